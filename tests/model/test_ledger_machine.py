"""R16: random histories on both stores in lock step, against the fold of the journal and a small model.

After every rule: equal replies, equal rows, events without a gap, one digest of three (SQLite, memory, fold),
and every operation where the model says it stands. A crash is a copy of the files in the middle of a
transaction, or right after a commit, opened as the next process would.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from muniment.adapters.in_memory import InMemoryStore
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core import canonical, identity, replay
from muniment.core.tables import TABLES
from muniment.errors import Conflict, InvalidField, InvariantBroken
from muniment.model import command, journal
from muniment.model.command import Command
from muniment.model.operation import Kind, State
from muniment.ports.ledger import HeldRows, Rows
from muniment.stages import ledger as stage
from tests.support import operations as ops
from tests.support import stores
from tests.support.history_model import PAYLOADS, HistoryModel, Standing
from tests.support.operations import NOW

EXAMPLES: Final = max(500, int(os.environ.get("MUNIMENT_EXAMPLES", "0")))
STEPS: Final = 50
SHARES: Final = 5  # So that two workers share the work.
MUTANT_EXAMPLES: Final = 500

# Nothing here is about the disk; where memory serves as one, it is faster.
SCRATCH: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

picks = st.integers(0, len(PAYLOADS) - 1)
names = st.sampled_from(sorted(PAYLOADS))
generations = st.sampled_from([2, 1, 3])
late_generations = st.sampled_from([1, 2, 3])


class Crashed(BaseException):
    """The process is gone."""


class LedgerMachine(RuleBasedStateMachine):
    """One history."""

    decide: ClassVar[Callable[[Rows, Command], Any]] = stage.handle
    template: ClassVar[Path]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=SCRATCH, prefix="muniment-machine-"))
        self.directory = self.root / "0"
        self.generation = 0
        shutil.copytree(self.template, self.directory)
        self.crash: Callable[[], None] | None = None
        self.memory = InMemoryStore(self.handle, stores.begin, incarnation="test")
        self.sqlite = self.opened()
        self.fold = replay.Tables()
        self.folded = 0
        self.model = HistoryModel()
        self.now = NOW
        self.follow()

    def handle(self, rows: Rows, asked: Command) -> Any:
        reply = type(self).decide(rows, asked)
        if self.crash is not None:
            self.crash()
        return reply

    def opened(self) -> SqliteStore:
        return SqliteStore.open(self.directory, self.handle, stores.begin, incarnation="test")

    # Both stores at once

    def write(self, *commands: Command) -> list[Any]:
        """Carry commands out on both stores, compare all that can be seen; return values and errors."""
        ours, written = self.sqlite.transact(commands)
        theirs, same = self.memory.transact(commands)
        assert [(reply.value, repr(reply.error)) for reply in ours] == [
            (reply.value, repr(reply.error)) for reply in theirs
        ]
        assert [(each.position, each.unit) for each in written] == [
            (each.position, each.unit) for each in same
        ]
        self.compare()
        return [reply.value if reply.error is None else reply.error for reply in ours]

    def ask(self, asked: Command, one: Standing, kind: str, *, fenced: bool = False) -> None:
        """Carry out a command on an operation; its reply says where the model says it stands."""
        [reply] = self.write(asked)
        assert reply == command.Standing(n=one.n, state=one.state, fenced=fenced), f"{kind} of {one.id}"
        self.seen[f"{kind}: {one.state}"] += 1

    def follow(self) -> None:
        """Fold what the journal of the SQLite store has got since the last time."""
        for row in self.sqlite.read(lambda reads: reads.units(self.folded, 1000)):
            for change in replay.changes(replay.decode(row.data)):
                self.fold.apply(change)
            self.folded = row.position

    def compare(self) -> None:
        self.follow()
        assert self.sqlite.read(lambda reads: reads.head()) == self.memory.read(lambda reads: reads.head())
        rows = self.sqlite.read(lambda reads: {table: list(reads.rows(table)) for table in TABLES})
        assert rows == self.memory.read(lambda reads: {table: list(reads.rows(table)) for table in TABLES})
        digest = replay.state_digest(rows.items())
        assert digest == replay.state_digest((name, each.values()) for name, each in self.fold.rows.items())
        self.events_have_no_gap(rows)
        self.model_agrees(rows)

    @staticmethod
    def events_have_no_gap(rows: dict[str, list[dict[str, Any]]]) -> None:
        walks: dict[int, list[Any]] = {row["n"]: [] for row in rows["operation"]}
        for event in rows["event"]:
            walks[event["operation_n"]].append((event["sequence"], event["from_state"], event["to_state"]))
        for row in rows["operation"]:
            before = None
            for number, (sequence, from_state, to_state) in enumerate(walks[row["n"]], 1):
                assert (sequence, from_state) == (number, before)
                before = to_state
            assert (row["progress_seq"], row["state"]) == (len(walks[row["n"]]), before)

    def model_agrees(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        indexed: dict[int, list[bool]] = {}
        for part in rows["part"]:
            indexed.setdefault(part["plan_n"], []).append(part["embedding_state"] == "indexed")
        unmet: dict[int, set[str]] = {}
        for each in rows["dependency"]:
            if not each["met"]:
                unmet.setdefault(each["operation_n"], set()).add(each["depends_on"])
        objects = Counter(row["operation_n"] for table in ("memory", "stream", "step") for row in rows[table])
        assert len(rows["operation"]) == len(self.model.operations)
        for row in rows["operation"]:
            one = self.model.operations[row["id"]]
            assert {
                "n": row["n"],
                "state": row["state"],
                "events": row["progress_seq"],
                "unmet": unmet.get(row["n"], set()),
                "parts": None if one.plan is None else indexed[one.plan],
                "generation": row["executor_generation"],
                "evidence": row["executor_progress_seq"],
                "exits": row["executor_exit_count"],
                "objects": objects[row["n"]],
            } == {
                "n": one.n,
                "state": one.state,
                "events": one.events,
                "unmet": one.unmet,
                "parts": one.parts,
                "generation": one.generation,
                "evidence": one.evidence,
                "exits": one.exits,
                "objects": int(one.made),
            }, one.id

    # Rules

    def admission(self, name: str, dependencies: tuple[str, ...] = (), **changed: Any) -> command.Accept:
        kind, payload = PAYLOADS[name]
        return ops.accept(name, kind, payload | changed, dependencies, now=self.now)

    def chosen(self, pick: int, *states: State) -> Standing:
        """Any operation; three times of four one in the given states, if there is one."""
        everyone = list(self.model.operations.values())
        fitting = [one for one in everyone if one.state in states] if pick % 4 != 3 else []
        return (fitting or everyone)[pick % len(fitting or everyone)]

    def tick(self, jump: int) -> int:
        """A clock that may jump back."""
        self.now += jump
        return self.now

    @initialize(first=st.lists(names, unique=True, min_size=3, max_size=6))
    def begin(self, first: list[str]) -> None:
        for name in first:
            self.write_submission(self.admission(name), name, ())

    @precondition(lambda self: len(self.model.operations) < len(PAYLOADS))
    @rule(pick=picks, others=st.lists(st.sampled_from([*sorted(PAYLOADS), "missing"]), max_size=2))
    def submit(self, pick: int, others: list[str]) -> None:
        new = sorted(PAYLOADS.keys() - self.model.operations.keys())
        name = new[pick % len(new)]
        dependencies = tuple(each for each in others if each != name)
        [reply] = self.write_submission(self.admission(name, dependencies), name, dependencies)
        if isinstance(reply, command.Admitted):
            assert reply.created
            assert reply.receipt.blocked_by == tuple(sorted(self.model.operations[name].unmet))
            self.seen["accepted"] += 1

    def write_submission(self, asked: command.Accept, name: str, dependencies: tuple[str, ...]) -> list[Any]:
        if self.model.would_wait_for_itself(name, dependencies):
            [reply] = self.write(asked)
            assert isinstance(reply, InvalidField)
            self.seen["cycle"] += 1
            return [reply]
        self.model.accept(name, dependencies)
        return self.write(asked)

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks)
    def submit_what_is_waited_for(self, pick: int) -> None:
        """A missing ID comes, and depends on somebody: most often on whoever waits for it."""
        waiting = [one for one in self.model.operations.values() if one.unmet - self.model.operations.keys()]
        wanted = sorted(
            (name, one.id) for one in waiting for name in one.unmet & PAYLOADS.keys() if name != one.id
        )
        for name, by in wanted[:1]:
            if name not in self.model.operations:
                dependency = by if pick % 4 else self.chosen(pick).id
                self.write_submission(self.admission(name, (dependency,)), name, (dependency,))

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks)
    def replay(self, pick: int) -> None:
        one = self.chosen(pick)
        [reply] = self.write(self.admission(one.id, ("another",)))
        assert (reply.created, reply.receipt.state) == (False, one.state)
        assert reply.receipt.dependencies == one.dependencies
        self.seen["replayed"] += 1

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks)
    def conflict(self, pick: int) -> None:
        one = self.chosen(pick)
        [reply] = self.write(self.admission(one.id, extra=1))
        assert isinstance(reply, Conflict)
        assert canonical.payload_hash(PAYLOADS[one.id][1]) in str(reply)
        self.seen["conflict"] += 1

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, jump=st.integers(-2, 3))
    def advance(self, pick: int, jump: int) -> None:
        one = self.chosen(pick, State.ACCEPTED)
        self.model.advance(one)
        self.ask(command.Advance(n=one.n, now=self.tick(jump)), one, "advance")

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, jump=st.integers(-2, 3))
    def apply(self, pick: int, jump: int) -> None:
        one = self.chosen(pick)
        self.model.apply(one)
        self.ask(command.Apply(n=one.n, now=self.tick(jump)), one, "apply")

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, parts=st.integers(1, 3), generation=generations)
    def plan(self, pick: int, parts: int, generation: int) -> None:
        one = self.chosen(pick, State.VALIDATED, State.BLOCKED)
        self.plan_of(one, parts, generation)

    def plan_of(self, one: Standing, parts: int, generation: int) -> None:
        expected = self.model.save_plan(one, parts, generation)
        asked = ops.plan(one.n, self.admission(one.id), parts=parts, generation=generation, now=self.now)
        assert self.write(asked) == [expected]
        self.seen["plan" if expected else "no plan"] += 1

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, indexes=st.sets(st.integers(0, 3), min_size=1, max_size=3), generation=late_generations)
    def part(self, pick: int, indexes: set[int], generation: int) -> None:
        one = self.chosen(pick, State.PROCESSING)
        self.vectors_of(one, tuple(sorted(indexes)), generation)

    @precondition(
        lambda self: any(one.parts and one.generation > 1 for one in self.model.operations.values())
    )
    @rule(pick=picks)
    def late_part(self, pick: int) -> None:
        """A frame that a dead child had written, with a part that nobody else has sent."""
        late = [one for one in self.model.operations.values() if one.parts and one.generation > 1]
        one = late[pick % len(late)]
        assert one.parts is not None
        self.vectors_of(one, (one.parts.index(False) if False in one.parts else 0,), one.generation - 1)

    @precondition(lambda self: any(any(one.parts or []) for one in self.model.operations.values()))
    @rule(pick=picks)
    def part_again(self, pick: int) -> None:
        """A part that is indexed comes once more, from a child that is younger or the same."""
        done = [one for one in self.model.operations.values() if any(one.parts or [])]
        one = done[pick % len(done)]
        assert one.parts is not None
        self.vectors_of(one, (one.parts.index(True),), one.generation + pick % 2)

    def vectors_of(self, one: Standing, chosen: tuple[int, ...], generation: int) -> None:
        fenced = self.model.index(one, chosen, generation)
        asked = ops.vectors(one.n, one.plan or 1, chosen, generation=generation, now=self.now)
        # The vectors say which generation made them, so that a second write of a part would show.
        marked = tuple((index, ops.vector(one.n, index, generation)) for index in chosen)
        self.ask(msgspec.structs.replace(asked, vectors=marked), one, "part", fenced=fenced)

    @precondition(lambda self: self.model.operations)
    @rule(
        pick=picks,
        kind=st.sampled_from(["exit", "stall", "protocol", "failure"]),
        generation=generations,
        times=st.integers(1, 2),
    )
    def exit(self, pick: int, kind: str, generation: int, times: int) -> None:
        states = (State.VALIDATED, State.BLOCKED) if pick % 2 else (State.PROCESSING,)
        one = self.chosen(pick, *states)
        for _ in range(times):
            self.model.exit(one, kind, generation)
            self.ask(ops.exited(one.n, kind=kind, generation=generation, now=self.now), one, "exit")

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, jump=st.integers(-2, 3))
    def commit(self, pick: int, jump: int) -> None:
        one = self.chosen(pick, State.PROCESSING)
        self.tick(jump)
        self.commit_of(one)

    def commit_of(self, one: Standing) -> None:
        asked = command.CommitMemory(n=one.n, now=self.now)
        if self.model.may_commit(one):
            self.model.commit(one)
            self.ask(asked, one, "commit")
            return
        for store in (self.sqlite, self.memory):
            with pytest.raises(InvariantBroken, match="must not commit"):
                store.transact([asked])
        self.compare()
        self.seen["gate"] += 1

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks)
    def refuse(self, pick: int) -> None:
        blocked = [one for one in self.model.operations.values() if one.state is State.BLOCKED]
        named = {each for one in blocked for each in one.unmet}
        waited_for = [one for one in self.model.operations.values() if one.id in named]
        if waited_for or pick % 3 == 2:  # Not too often, or every history is over soon.
            one = waited_for[pick % len(waited_for)] if waited_for else self.chosen(pick)
            self.model.refuse(one)
            self.ask(ops.refuse(one.n, now=self.now), one, "refuse")

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, steps=st.integers(1, 4))
    def work(self, pick: int, steps: int) -> None:
        """Go on with an operation as the coordinator would, so that many of them come to their end."""
        one = self.chosen(pick)
        for _ in range(steps):
            if one.kind is not Kind.ADD_MEMORY:
                self.model.apply(one)
                self.ask(command.Apply(n=one.n, now=self.tick(1)), one, "apply")
            elif one.state is State.ACCEPTED:
                self.model.advance(one)
                self.ask(command.Advance(n=one.n, now=self.tick(1)), one, "advance")
            elif one.parts is None:
                self.plan_of(one, 2, max(1, one.generation))
            elif not all(one.parts):
                self.vectors_of(one, (one.parts.index(False),), one.generation)
            else:
                self.commit_of(one)

    @rule()
    def reserve(self) -> None:
        self.model.generations += 1
        assert self.write(command.ReserveGeneration(now=self.now)) == [self.model.generations]

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, other=picks)
    def batch(self, pick: int, other: int) -> None:
        """Several commands in one transaction, one of them with an error of its own."""
        first, second = self.chosen(pick), self.chosen(other)
        self.model.advance(first)
        states = [first.state]
        self.model.refuse(second)
        states.append(second.state)
        replies = self.write(
            command.Advance(n=first.n, now=self.now),
            self.admission(first.id, extra=1),
            ops.refuse(second.n, now=self.now),
            command.Probe(now=self.now),
        )
        assert isinstance(replies[1], Conflict)
        assert [replies[0].state, replies[2].state] == states

    # The end of a process

    def left_behind(self) -> Path:
        """Copy what a process that ends now leaves on the disk."""
        copy = self.root / str(self.generation + 1)
        copy.mkdir()
        for name in ("ledger.db", "ledger.db-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(self.directory / name, copy / name)
        return copy

    def go_on_in(self, directory: Path) -> None:
        self.sqlite.close()
        shutil.rmtree(self.directory)
        self.generation += 1
        self.directory = directory
        self.sqlite = self.opened()
        self.compare()

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, kind=st.sampled_from(["refuse", "advance", "apply", "exit", "accept"]))
    def crash_in_a_transaction(self, pick: int, kind: str) -> None:
        one = self.chosen(pick)
        asked: dict[str, Command] = {
            "refuse": ops.refuse(one.n),
            "advance": command.Advance(n=one.n, now=self.now),
            "apply": command.Apply(n=one.n, now=self.now),
            "exit": ops.exited(one.n),
            "accept": ops.memory("never"),
        }
        copies: list[Path] = []

        def end() -> None:
            if not copies:
                copies.append(self.left_behind())
            raise Crashed

        self.crash = end
        for store in (self.sqlite, self.memory):
            with pytest.raises(Crashed):
                store.transact([asked[kind]])
        self.crash = None
        self.go_on_in(copies[0])
        self.seen["crash in a transaction"] += 1

    @precondition(lambda self: self.model.operations)
    @rule(cleanly=st.booleans())
    def end_between_transactions(self, cleanly: bool) -> None:
        if cleanly:
            self.sqlite.close()
            self.sqlite = self.opened()
            self.compare()
        else:
            self.go_on_in(self.left_behind())
        self.seen["reopened" if cleanly else "crash after a commit"] += 1

    def teardown(self) -> None:
        try:
            self.sqlite.close()
            stores.checked(self.directory)
        finally:
            shutil.rmtree(self.root)


def run(machine: type[LedgerMachine], template: Path, examples: int, **settings: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    machine = type(machine.__name__, (machine,), {"template": template, "seen": seen})
    profile = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        suppress_health_check=list(hypothesis.HealthCheck),
        **settings,
    )
    run_state_machine_as_test(machine, settings=profile)
    return seen


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with nothing in it, to be copied for every history."""
    directory = tmp_path_factory.mktemp("template")
    stores.sqlite(directory).close()
    return directory


@pytest.mark.parametrize("share", range(SHARES))
def test_every_history_is_the_same_on_both_stores_in_the_fold_and_in_the_model(
    template: Path, share: int
) -> None:
    examples = EXAMPLES // SHARES
    seen = run(LedgerMachine, template, examples)

    print(f"R16, share {share}: {examples} histories of up to {STEPS} steps: {dict(sorted(seen.items()))}")
    for what in ("crash in a transaction", "crash after a commit", "reopened", "replayed", "conflict"):
        assert seen[what] >= examples // 10, what
    for what in ("commit: committed", "apply: committed", "part: processing"):
        assert seen[what] > 0, what


# Planted mutants: each is a rule of the ledger broken in the way in which it would be broken by mistake.


class Altered:
    """The rows of the open transaction, with another ``append``."""

    def __init__(self, rows: Rows, append: Callable[[Rows, journal.AnyUnit, HeldRows], None]) -> None:
        self._rows, self._append = rows, append

    def append(self, unit: journal.AnyUnit, held: HeldRows) -> None:
        self._append(self._rows, unit, held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


def appending(change: Callable[[Rows, journal.AnyUnit, HeldRows], None]) -> Callable[[Rows, Command], Any]:
    def handle(rows: Rows, asked: Command) -> Any:
        return stage.handle(Altered(rows, change), asked)

    handle.__name__ = change.__name__
    return handle


def drops_a_commit(rows: Rows, unit: journal.AnyUnit, held: HeldRows) -> None:
    """The caller hears committed, and nothing is written."""
    if not isinstance(unit, journal.Commit):
        rows.append(unit, held)


def forgets_the_memory(rows: Rows, unit: journal.AnyUnit, held: HeldRows) -> None:
    """The operation is committed, and its memory is not there."""
    if isinstance(unit, journal.Commit) and unit.memory is not None:
        unit, held = msgspec.structs.replace(unit, memory=None), {}
    rows.append(unit, held)


def commits_twice(rows: Rows, unit: journal.AnyUnit, held: HeldRows) -> None:
    """A second memory for the same operation, under another object."""
    rows.append(unit, held)
    if isinstance(unit, journal.Commit) and unit.memory is not None:
        key = identity.object_key("memory", "local", unit.id, 1)
        again = msgspec.structs.replace(
            unit,
            was=unit.to,
            events=(),
            evidence=(),
            memory=msgspec.structs.replace(unit.memory, object=unit.memory.object + 1000, key=key),
        )
        rows.append(again, {})


def skips_an_event(rows: Rows, unit: journal.AnyUnit, held: HeldRows) -> None:
    """A block without its event."""
    if isinstance(unit, journal.Advance) and unit.to.state is State.BLOCKED:
        unit = msgspec.structs.replace(unit, events=unit.events[:-1])
    rows.append(unit, held)


def makes_an_exit_a_verdict(rows: Rows, unit: journal.AnyUnit, held: HeldRows) -> None:
    """An exit of the executor ends the operation as rejected."""
    if isinstance(unit, journal.Evidence) and unit.was.state is State.PROCESSING:
        moved = journal.Moved(unit.was.sequence + 1, unit.was.state, State.REJECTED, None)
        unit = journal.Reject(
            at=unit.at,
            n=unit.n,
            was=unit.was,
            to=journal.At(State.REJECTED, moved.sequence),
            events=(moved,),
            executor=unit.executor,
            evidence=unit.evidence,
            error="executor exited",
            result={},
        )
    rows.append(unit, held)


def takes_late_frames(rows: Rows, asked: Command) -> Any:
    """Vectors of a dead generation are taken for those of the living one."""
    if isinstance(asked, command.SaveParts):
        row = rows.operation(asked.n)
        assert row is not None
        if row["state"] == State.PROCESSING and asked.vectors:
            asked = msgspec.structs.replace(
                asked, generation=max(asked.generation, row["executor_generation"])
            )
    return stage.handle(rows, asked)


def answers_a_replay_as_new(rows: Rows, asked: Command) -> Any:
    """A replay is told to be created."""
    reply = stage.handle(rows, asked)
    return msgspec.structs.replace(reply, created=True) if isinstance(asked, command.Accept) else reply


def indexes_whatever_comes(rows: Rows, asked: Command) -> Any:
    """The rule that skips indexed parts is gone: every part that comes is written again."""

    class Forgetting(Altered):
        def part(self, plan_n: int, part_index: int) -> dict[str, Any] | None:
            found: dict[str, Any] | None = self._rows.part(plan_n, part_index)
            return None if found is None else found | {"embedding_state": "planned"}

    return stage.handle(Forgetting(rows, lambda inner, unit, held: inner.append(unit, held)), asked)


def spares_the_dependants(rows: Rows, asked: Command) -> Any:
    """A rejection does not carry over."""

    class Alone(Altered):
        def unsettled_dependents(self, account_n: int, operation_id: str) -> list[int]:
            return []

    return stage.handle(Alone(rows, lambda inner, unit, held: inner.append(unit, held)), asked)


def repeats_an_exit(rows: Rows, asked: Command) -> Any:
    """The end of a generation is evidence as often as it is told."""

    class Amnesiac(Altered):
        def has_seen_end(self, operation_n: int, generation: int) -> bool:
            return False

    return stage.handle(Amnesiac(rows, lambda inner, unit, held: inner.append(unit, held)), asked)


def repeats_a_failure(rows: Rows, asked: Command) -> Any:
    """A failure that is told again unchanged is evidence again."""

    class Amnesiac(Altered):
        def operation(self, n: int) -> dict[str, Any] | None:
            found: dict[str, Any] | None = self._rows.operation(n)
            known = isinstance(asked, command.RecordExit) and asked.kind == "failure"
            return found | {"executor_error": None} if found is not None and known else found

    return stage.handle(Amnesiac(rows, lambda inner, unit, held: inner.append(unit, held)), asked)


FIRST_FAILURE: Final[dict[str, Any]] = {
    "derandomize": True,
    "phases": [hypothesis.Phase.generate],
    "report_multiple_bugs": False,
}
MUTANTS: Final[list[Callable[[Rows, Command], Any]]] = [
    appending(drops_a_commit),
    appending(forgets_the_memory),
    appending(commits_twice),
    appending(skips_an_event),
    appending(makes_an_exit_a_verdict),
    takes_late_frames,
    answers_a_replay_as_new,
    indexes_whatever_comes,
    spares_the_dependants,
    repeats_an_exit,
    repeats_a_failure,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_control_a_broken_ledger_is_noticed(template: Path, mutant: Callable[[Rows, Command], Any]) -> None:
    broken = type("Broken", (LedgerMachine,), {"decide": staticmethod(mutant)})

    with pytest.raises((AssertionError, ExceptionGroup)):
        run(broken, template, MUTANT_EXAMPLES, **FIRST_FAILURE)


def test_control_a_lost_commit_is_noticed_after_a_crash(template: Path) -> None:
    class Forgetful(LedgerMachine):
        def left_behind(self) -> Path:
            copy = super().left_behind()
            (copy / "ledger.db-wal").unlink(missing_ok=True)  # What NORMAL may lose.
            return copy

    with pytest.raises((AssertionError, ExceptionGroup)):
        run(Forgetful, template, MUTANT_EXAMPLES, **FIRST_FAILURE)
