"""The schedule ends all that can end: in order in its queues, the same way every time, after a restart too.

The units come from the real rules on the store in memory. What may stand open, and what may pass what, is
worked out from the store's rows alone, so that the schedule is not measured by itself.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, NamedTuple

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from muniment.adapters.in_memory import InMemoryRows, InMemoryStore
from muniment.core.schedule import Queue, Schedule, Unfinished, Verb, Work
from muniment.errors import InvalidField
from muniment.model import command, journal
from muniment.model.command import Command
from muniment.model.operation import TERMINAL, Kind, State
from muniment.runtime.coordinator import unfinished
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import ACCOUNT, NOW

FAILURES_MAX: Final = 6
RESTARTS_MAX: Final = 3
# What exists already, so that every task operation below commits unless it is refused on purpose.
STEPS: Final = (("s0", "k0"), ("s1", "k0"), ("s0", "k1"), ("s1", "k2"))
PAYLOADS: Final[tuple[tuple[Kind, dict[str, Any]], ...]] = (
    *((Kind.CREATE_TASK_STREAM, {"name": stream}) for stream in ("s0", "s1")),
    *(
        (Kind.ADD_TASK_STEP, {"stream_name": stream, "idempotency_key": key, "name": key})
        for stream, key in STEPS
    ),
    *((Kind.COMPLETE_STEP, {"stream_name": stream, "idempotency_key": key}) for stream, key in STEPS),
    (Kind.COMPLETE_STEP, {"idempotency_key": "k1"}),
    (Kind.COMPLETE_STEP, {"idempotency_key": "k2"}),
)


def prepared() -> InMemoryRows:
    driver = stores.Driver(stores.in_memory())
    for number, (kind, payload) in enumerate(PAYLOADS[: 2 + len(STEPS)]):
        assert driver.apply(driver.accept(ops.accept(f"before-{number}", kind, payload))) is State.COMMITTED
    store = driver.store
    assert isinstance(store, InMemoryStore)
    return store._rows


PREPARED: Final = prepared()


class Submission(NamedTuple):
    id: str
    kind: Kind
    payload: dict[str, Any]
    dependencies: tuple[str, ...]
    refused: bool


@st.composite
def histories(draw: st.DrawFn, *, refusals: bool) -> list[Submission]:
    """Up to ten operations; one in three a memory; dependencies on earlier, later and missing ones."""
    names = [f"o{number}" for number in range(draw(st.integers(1, 10)))]
    found = []
    for name in names:
        others = [other for other in [*names, *names, "missing"] if other != name]
        kind, payload = draw(
            st.one_of(st.just((Kind.ADD_MEMORY, {"content": "Text."})), *[st.sampled_from(PAYLOADS)] * 2)
        )
        depends = draw(st.lists(st.sampled_from(others), max_size=2, unique=True))
        found.append(Submission(name, kind, payload, tuple(depends), refusals and draw(st.booleans())))
    return found


class Waits:
    """Who waits for whom, from the rows of the store."""

    def __init__(self, open_ones: list[Unfinished], accepted: set[str]) -> None:
        self.open = {each.n: each for each in open_ones}
        by_id = {each.id: each.n for each in open_ones}
        self.declared = {each.n: {by_id[name] for name in each.unmet if name in by_id} for each in open_ones}
        self.hopeless = {each.n for each in open_ones if each.unmet - accepted}
        self.edges = {
            n: self.declared[n] | {m for m in self.earlier(n) if n not in self.reach(m, self.declared)}
            for n in self.open
        }

    def earlier(self, n: int) -> list[int]:
        return [m for m in sorted(self.open) if m < n and self.open[m].queues & self.open[n].queues]

    @staticmethod
    def reach(start: int, edges: dict[int, set[int]]) -> set[int]:
        seen: set[int] = set()
        stack = [start]
        while stack:
            fresh = edges[stack.pop()] - seen
            seen |= fresh
            stack.extend(fresh)
        return seen


class Failed(Exception):
    """The executor or the ledger was not there."""


class Simulation:
    """One store, one schedule, work that overlaps and ends in any order, and fails at times."""

    def __init__(self, schedule: type[Schedule], chance: random.Random, *, faults: bool = True) -> None:
        self.make, self.chance = schedule, chance
        self.schedule, self.twin = schedule(), schedule()
        self.store = stores.in_memory()
        self.store._rows = PREPARED.copied()
        self.running: list[Work] = []
        self.submissions: dict[int, tuple[Submission, command.Accept]] = {}
        self.memories_max = chance.randint(1, 3)
        self.failures = FAILURES_MAX if faults else 0
        self.restarts = RESTARTS_MAX if faults else 0
        self.performed = 0

    def write(self, asked: Command) -> Any:
        [reply], sealed = self.store.transact([asked])
        for each in sealed:
            attributes = None
            if isinstance(each.unit, journal.Accept):
                attributes = msgspec.json.decode(each.held["attribute", (each.unit.object,)]["bytes"])
            self.schedule.observe(each.unit, attributes)
            self.twin.observe(each.unit, attributes)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def accept(self, one: Submission) -> None:
        asked = ops.accept(one.id, one.kind, one.payload, one.dependencies)
        try:
            self.write(asked)
        except InvalidField:
            return  # It closes a cycle, so it never comes.
        row = self.store.read(lambda reads: reads.find_operation(ACCOUNT, one.id))
        assert row is not None
        self.submissions[row["n"]] = (one, asked)

    def states(self) -> dict[str, State]:
        rows = self.store.read(lambda reads: list(reads.rows("operation")))
        return {row["id"]: State(row["state"]) for row in rows}

    def committed(self) -> set[str]:
        return {name for name, state in self.states().items() if state is State.COMMITTED}

    def waits(self) -> Waits:
        return Waits(self.store.read(unfinished), set(self.states()))

    def restart(self) -> None:
        """The process ends, all its work with it; the next one loads what the ledger holds."""
        self.running = []
        self.schedule, self.twin = self.make(), self.make()
        found = self.store.read(unfinished)
        self.schedule.load(found)
        self.twin.load([msgspec.structs.replace(each, unmet=set(each.unmet)) for each in found])

    def round(self) -> bool:
        """Take what is due, end one or more pieces of work; False where nothing is due and nothing runs."""
        if self.restarts and self.chance.random() < 0.1:
            self.restarts -= 1
            self.restart()
        fresh = list(self.schedule.due(self.memories_max))
        assert fresh == list(self.twin.due(self.memories_max)), "the same units gave other work"
        self.turns_are_kept(fresh)
        self.running += fresh
        numbers = [work.n for work in self.running]
        assert len(numbers) == len(set(numbers)), "one operation was handed out twice"
        assert sum(work.verb is Verb.REMEMBER for work in self.running) <= self.memories_max
        if not self.running:
            return False
        for _ in range(self.chance.randint(1, len(self.running))):
            self.end(self.running.pop(self.chance.randrange(len(self.running))))
        return True

    def turns_are_kept(self, fresh: list[Work]) -> None:
        waits = self.waits()
        for work in fresh:
            if work.verb is Verb.APPLY:
                for n in waits.earlier(work.n):
                    assert work.n in waits.reach(n, waits.edges), f"{work.n} passed {n}"

    def end(self, work: Work) -> None:
        self.performed += 1
        try:
            self.perform(work)
        except Failed:
            self.schedule.again(work.n)
            self.twin.again(work.n)

    def maybe_fail(self) -> None:
        if self.failures and self.chance.random() < 0.2:
            self.failures -= 1
            raise Failed

    def perform(self, work: Work) -> None:
        submission, asked = self.submissions[work.n]
        self.maybe_fail()
        if work.verb is Verb.ADVANCE:
            self.write(command.Advance(n=work.n, now=NOW))
        elif submission.refused:
            self.write(ops.refuse(work.n))
        elif work.verb is Verb.APPLY:
            assert self.write(command.Apply(n=work.n, now=NOW)).state in TERMINAL, "applied before its time"
        else:
            plan = self.write(ops.plan(work.n, asked))
            assert plan is not None, "planned before its time"
            self.maybe_fail()
            self.write(ops.vectors(work.n, plan, [0]))
            self.maybe_fail()
            self.write(command.CommitMemory(n=work.n, now=NOW))

    def run(self, history: list[Submission]) -> None:
        for one in history:
            self.accept(one)
            while self.chance.random() < 0.5:
                self.round()
        rounds = 0
        while self.round():
            rounds += 1
            assert rounds <= 2 * len(history) + FAILURES_MAX + 2 * RESTARTS_MAX, "it does not come to an end"
        waits = self.waits()
        for n in waits.open:
            reached = {n} | waits.reach(n, waits.edges)
            assert reached & waits.hopeless, f"{n} stands open and waits for nothing that is missing"
        assert len(self.schedule) == len(waits.open)
        assert self.performed <= 2 * len(history) + FAILURES_MAX + RESTARTS_MAX * len(history)


@given(histories(refusals=False), st.integers(0, 2**32))
def test_all_that_can_end_ends_in_order_through_failures_and_restarts(
    history: list[Submission], seed: int
) -> None:
    one = Simulation(Schedule, random.Random(seed))
    one.run(history)
    # A task operation that stands behind a blocked one may not have been looked at, or not be blocked itself.
    waiting = {State.ACCEPTED, State.VALIDATED, State.BLOCKED}
    assert set(one.states().values()) <= {State.COMMITTED} | waiting
    straight = Simulation(Schedule, random.Random(seed + 1), faults=False)
    straight.run(history)
    assert one.committed() == straight.committed()


@given(histories(refusals=True), st.integers(0, 2**32))
def test_refusals_carry_over_and_hold_nothing_up(history: list[Submission], seed: int) -> None:
    Simulation(Schedule, random.Random(seed)).run(history)


class NoTurns(Schedule):
    def _has_turn(self, operation: Unfinished) -> bool:
        return True


class NeverPasses(Schedule):
    def _has_turn(self, operation: Unfinished) -> bool:
        return not list(self._earlier(operation))


class NoRoomLimit(Schedule):
    def due(self, memories_max: int) -> Iterator[Work]:
        return super().due(1000)


class LooksOnlyOnce(Schedule):
    def again(self, n: int) -> None:
        self.release(n)


class ForgetsDependants(Schedule):
    def _remove(self, operation: Unfinished, *, met: bool) -> None:
        super()._remove(operation, met=False)


class HandsOutTwice(Schedule):
    def _start(self, operation: Unfinished, verb: Verb) -> Work:
        work = super()._start(operation, verb)
        if verb is Verb.APPLY:
            operation.busy = None
            self._touch(operation)
        return work


@pytest.mark.parametrize(
    "mutant", [NoTurns, NeverPasses, NoRoomLimit, LooksOnlyOnce, ForgetsDependants, HandsOutTwice]
)
def test_a_broken_schedule_is_seen(mutant: type[Schedule]) -> None:
    chance = random.Random(1)
    for seed in range(400):
        history = []
        names = [f"o{number}" for number in range(8)]
        for name in names:
            kind, payload = chance.choice((*PAYLOADS, *[(Kind.ADD_MEMORY, {"content": "Text."})] * 6))
            depends = chance.sample([other for other in names if other != name], chance.choice((0, 0, 1)))
            history.append(Submission(name, kind, payload, tuple(depends), refused=False))
        Simulation(Schedule, random.Random(seed)).run(history)
        try:
            Simulation(mutant, random.Random(seed)).run(history)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__} passed")


def unmet(
    n: int, *queues: Queue, needs: set[str] | None = None, kind: Kind = Kind.ADD_TASK_STEP
) -> Unfinished:
    state = State.ACCEPTED if kind is not Kind.ADD_MEMORY else State.VALIDATED
    return Unfinished(
        n=n, id=f"o{n}", account=1, kind=kind, state=state, unmet=needs or set(), queues=frozenset(queues)
    )


@pytest.mark.parametrize(
    ("operation", "verb"),
    [
        (unmet(1, (1, ("stream", "a")), (1, ("step", "k"))), Verb.APPLY),
        (unmet(1, (1, ("stream", "a")), needs={"other"}), Verb.ADVANCE),
        (unmet(1, kind=Kind.ADD_MEMORY), Verb.REMEMBER),
    ],
)
def test_again_makes_it_due_once_more(operation: Unfinished, verb: Verb) -> None:
    schedule = Schedule()
    schedule.load([msgspec.structs.replace(operation)])
    for _ in range(3):
        assert list(schedule.due(1)) == [Work(1, verb)]
        assert list(schedule.due(1)) == []
        schedule.again(1)
    schedule.again(99)  # It has ended in the meantime.
    schedule.release(99)
    assert list(schedule.due(1)) == [Work(1, verb)]


def test_no_room_for_memories_holds_no_task_up() -> None:
    schedule = Schedule()
    schedule.load([unmet(1, kind=Kind.ADD_MEMORY), unmet(2, (1, ("stream", "a")))])
    assert list(schedule.due(0)) == [Work(2, Verb.APPLY)]
    assert list(schedule.due(1)) == [Work(1, Verb.REMEMBER)]


def test_the_order_given_to_load_does_not_matter() -> None:
    queue = (1, ("stream", "a"))
    forwards, backwards = Schedule(), Schedule()
    forwards.load([unmet(n, queue) for n in (1, 2, 3)])
    backwards.load([unmet(n, queue) for n in (3, 2, 1)])
    assert list(forwards.due(1)) == list(backwards.due(1)) == [Work(1, Verb.APPLY)]


HASH_SEEDS: Final = ("0", "1", "2", "3")
ORDER: Final = """
from muniment.core.schedule import Schedule, Unfinished
from muniment.model.operation import Kind, State
{change}
schedule = Schedule()
schedule.load(
    Unfinished(n=n, id=str(n), account=1, kind=Kind.ADD_TASK_STEP, state=State.ACCEPTED, unmet=set(),
               queues=frozenset((1, (name, str(n % 7 if name == "s" else n))) for name in "stuvw"))
    for n in range(1, 41)
)
print(list(schedule._touched), [work.n for work in schedule.due(1)])
"""
UNSORTED: Final = "Schedule._touch = lambda self, one: self._touched.update(dict.fromkeys(one.queues))"


def orders(change: str) -> set[bytes]:
    return {
        subprocess.run(
            [sys.executable, "-c", ORDER.format(change=change)],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in HASH_SEEDS
    }


def test_the_order_is_the_same_in_every_process() -> None:
    assert len(orders("")) == 1
    assert len(orders(UNSORTED)) > 1


BACKLOG: Final = 90
TIMES: Final = 4
LINEAR_MAX: Final = TIMES * 1.1


def backlog(count: int) -> list[Unfinished]:
    """A third waits for nothing, a third in chains of ten, a third in twenty queues."""
    found = []
    for n in range(1, count + 1):
        kind = Kind.ADD_TASK_STEP if n % 3 == 0 else Kind.ADD_MEMORY
        queues = [(1, ("stream", str(n % 20)))] if n % 3 == 0 else []
        needs = {f"o{n - 3}"} if n % 3 == 1 and n % 30 != 1 else set()
        found.append(unmet(n, *queues, needs=needs, kind=kind))
    return found


def calls_to_drain(make: type[Schedule], count: int) -> int:
    """How many functions are called from the start of a server until its whole backlog has ended."""
    operations = backlog(count)
    calls = ended = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        schedule = make()
        schedule.load(operations)
        while work := list(schedule.due(4)):
            for each in work:
                schedule._remove(schedule._open[each.n], met=True)
                ended += 1
    finally:
        sys.setprofile(before)
    assert (ended, len(schedule)) == (count, 0)
    return calls


def growth(make: type[Schedule]) -> float:
    """Calls for four times the backlog over those for one; a little over four where each costs the same."""
    return calls_to_drain(make, TIMES * BACKLOG) / calls_to_drain(make, BACKLOG)


def test_a_backlog_costs_each_operation_the_same() -> None:
    assert growth(Schedule) <= LINEAR_MAX


class LooksAtAllAfterEachEnd(Schedule):
    def _remove(self, operation: Unfinished, *, met: bool) -> None:
        super()._remove(operation, met=met)
        for each in self._open.values():
            self._touch(each)


def test_control_a_schedule_that_looks_at_all_after_each_end_is_noticed() -> None:
    assert growth(LooksAtAllAfterEachEnd) > 2 * LINEAR_MAX
