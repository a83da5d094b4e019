"""R18: seeded worlds. Whatever goes wrong in them, once it stops everything ends as if nothing had happened.

Each world is a number: operations, clients, a network, a ledger, an executor and kills of the server, all
drawn from it. ``MUNIMENT_WORLDS=first:count`` runs others; a failure names its world.
"""

import asyncio
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final

import msgspec
import pytest

from muniment.adapters.in_memory import InMemoryStore
from muniment.core import ingestion
from muniment.core.ingestion import Ingestion
from muniment.core.tables import Row
from muniment.errors import LedgerUnavailable, MunimentError
from muniment.model import command
from muniment.model.operation import State
from muniment.runtime import coordinator as coordinating
from muniment.runtime.coordinator import Coordinator
from muniment.runtime.ingestion import Pipeline
from muniment.stages import ledger as stage
from tests.support import operations, stores, truth
from tests.support.simulation import POISON, Faults, Life, is_open, new_store, receipt_rows, simulated

WORLDS: Final = 2000
SHARES: Final = 8
FAULT_SECONDS: Final = 40.0
SETTLE_SECONDS: Final = 150.0
HEAL_SECONDS: Final = 120.0
REST_SECONDS: Final = 40.0
"""Simulated, in which whatever is left comes to its end where nothing goes wrong."""
FAULTS_MIN: Final = {
    "refused": 500,
    "answer lost": 500,
    "full": 100,
    "read refused": 200,
    "ExecutorExited": 500,
    "ExecutorStalled": 100,
    "ExecutorProtocolBroken": 100,
    "failed": 100,
    "slow": 100,
    "request lost": 500,
    "reply lost": 500,
    "sent twice": 500,
    "killed": 500,
    "clock jumped": 200,
}
"""Faults of each kind that must have happened in 2,000 worlds; fewer worlds, in proportion."""


class Drawn(msgspec.Struct, frozen=True):
    """What one client sends, and when it begins."""

    asked: command.Accept
    at: float


def draw(random: Random) -> list[Drawn]:
    """Operations of all kinds that lean on each other, a few of them poison.

    Memories depend on anything, or tasks on memories; never both in one world. With both, a dependency can
    stand against the order of acceptance, and which of the two gives way then depends on the time of day.
    Which of two rejected dependencies is named does as well, so a memory that may lose one has one.
    """
    count = random.randint(3, 12)
    kinds = [
        random.choice(("memory", "memory", "memory", "stream", "step", "complete")) for _ in range(count)
    ]
    memories = [number for number, kind in enumerate(kinds) if kind == "memory"]
    tasks_wait = random.random() < 0.5
    poisonous = random.choice((0.0, 0.1, 0.1, 0.7))
    drawn = []
    for number, kind in enumerate(kinds):
        others = memories if tasks_wait else range(count)
        most = 2 if tasks_wait else int(kind == "memory")
        chosen = random.sample(others, min(len(others), random.choice((0, 0, 0, most))))
        dependencies = sorted(f"op-{each}" for each in chosen if each != number)
        at = random.uniform(0.0, FAULT_SECONDS / 2)
        drawn.append(Drawn(_operation(random, number, kind, dependencies, poisonous), at))
    return drawn


def _operation(
    random: Random, number: int, kind: str, dependencies: Sequence[str], poisonous: float
) -> command.Accept:
    name = f"op-{number}"
    if kind == "stream":
        return operations.stream(name, f"stream-{random.randrange(2)}", dependencies)
    if kind == "step":
        stream = f"stream-{random.randrange(2)}"
        return operations.step(name, f"key-{random.randrange(3)}", stream, dependencies)
    if kind == "complete":
        return operations.complete(name, f"key-{random.randrange(3)}", dependencies)
    length = random.choice((1, 1, 2, 3, 8))
    lines = [f"Line {line} of {name} has the number {random.randrange(1000)}. " for line in range(length)]
    if random.random() < poisonous:
        lines[random.randrange(length)] = f"Line of {name}: {POISON}. "
    return operations.memory(name, "".join(lines), dependencies)


class World:
    """One world, from its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.random = Random(number)
        self.store = new_store()
        self.happened: Counter[str] = Counter()
        self.faults = self._draw_faults()
        self.drawn = draw(self.random)
        self.lives: list[Life] = []
        self.accepted: set[str] = set()
        self.refused: set[str] = set()
        self.seen: dict[str, Row] = {}
        self.healed = False

    def _draw_faults(self) -> Faults:
        """Some worlds are quiet, some are not, most have faults of a few kinds only."""

        def chance(most: float) -> float:
            return self.random.choice((0.0, 0.0, most / 4, most))

        return Faults(
            refused=chance(0.2),
            lost=chance(0.2),
            ends=chance(0.25),
            fails=chance(0.2),
            slow=chance(0.1),
            network=chance(0.4),
        )

    @property
    def life(self) -> Life:
        return self.lives[-1]

    async def run(self) -> None:
        await self._begin_life()
        clients = [asyncio.create_task(self._client(each)) for each in self.drawn]
        watcher = asyncio.create_task(self._watch())
        await self._nemesis()
        self._calm()
        await asyncio.gather(*clients)
        await self._until(lambda: all(map(self._is_poisoned, self._open())), SETTLE_SECONDS)
        self.healed = self.life.executor.healed = True
        await self._until(lambda: all(map(self._waits_for_ever, self._open())), HEAL_SECONDS)
        await asyncio.sleep(REST_SECONDS)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await self.life.kill()
        assert [life.fatal for life in self.lives if life.fatal] == []

    async def _begin_life(self) -> None:
        self.lives.append(Life(self.store, self.random, self.faults, self.happened, healed=self.healed))
        await self.life.begin()

    async def _nemesis(self) -> None:
        """Kill the server, fill the disk, turn the clock; until the time of faults is over."""
        loop = asyncio.get_running_loop()
        kills = self.random.choice((0, 0, 1, 2, 3))
        while loop.time() < FAULT_SECONDS:
            await asyncio.sleep(self.random.uniform(0.5, FAULT_SECONDS / 3))
            if kills and self.random.random() < 0.7:
                kills -= 1
                self.happened["killed"] += 1
                await self.life.kill()
                await asyncio.sleep(self.random.uniform(0.0, 1.0))
                await self._begin_life()
            elif self.random.random() < 0.3:
                self.life.ledger.full_until = loop.time() + self.random.uniform(0.1, 5.0)
            elif self.random.random() < 0.5:
                self.happened["clock jumped"] += 1
                self.life.clock.offset_us += self.random.randint(-(10**12), 10**12)

    def _calm(self) -> None:
        for name in Faults.__struct_fields__:
            setattr(self.faults, name, 0.0)
        self.life.ledger.full_until = 0.0

    async def _client(self, drawn: Drawn) -> None:
        """Send an operation until it is answered, over a network that loses and doubles."""
        await asyncio.sleep(drawn.at)
        while True:
            asked = msgspec.structs.replace(drawn.asked, now=self.life.clock.now_us())
            chance = self.random.random()
            if chance < self.faults.network / 3:
                self.happened["request lost"] += 1
            else:
                if chance < 2 * self.faults.network / 3:
                    self.happened["sent twice"] += 1
                    again = asyncio.ensure_future(self._post(asked))
                    again.add_done_callback(lambda done: done.cancelled() or done.exception())
                if await self._answered(asked) and self.random.random() >= self.faults.network / 3:
                    return
                self.happened["reply lost"] += 1
            await asyncio.sleep(self.random.uniform(0.05, 1.0))

    async def _answered(self, asked: command.Accept) -> bool:
        try:
            async with asyncio.timeout(3.0):
                await self._post(asked)
        except (LedgerUnavailable, TimeoutError):
            return False
        except MunimentError as error:
            if error.status == 503:
                return False
            self.refused.add(asked.operation_id)
            return True
        self.accepted.add(asked.operation_id)
        return True

    async def _post(self, asked: command.Accept) -> None:
        await self.life.ledger.write(asked)

    async def _watch(self) -> None:
        """Look at all receipts again and again: nothing goes back, and what has ended stays as it is."""
        while True:
            for name, row in receipt_rows(self.store).items():
                before = self.seen.get(name)
                if before is not None:
                    assert row["progress_seq"] >= before["progress_seq"], name
                    assert row["updated_us"] >= before["updated_us"], name
                    assert row["executor_progress_seq"] >= before["executor_progress_seq"], name
                    assert is_open(before) or row == before, f"{name} changed after its end"
                self.seen[name] = row
            await asyncio.sleep(0.7)

    def _open(self) -> list[Row]:
        return [row for row in receipt_rows(self.store).values() if is_open(row)]

    def _is_poisoned(self, row: Row) -> bool:
        """Whether it cannot end while poison is poison."""
        return self._waits_for_ever(row) or self._leads_to(
            row["id"], lambda asked: POISON.encode() in (asked.content or b"")
        )

    def _waits_for_ever(self, row: Row) -> bool:
        """Whether it depends on what was refused, and so can never come."""
        return self._leads_to(row["id"], lambda asked: asked.operation_id in self.refused)

    def _leads_to(self, start: str, goal: Callable[[command.Accept], bool]) -> bool:
        asked = {each.asked.operation_id: each.asked for each in self.drawn}
        todo, seen = [start], set()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                if goal(asked[name]):
                    return True
                todo += self._before(asked[name])
        return False

    def _before(self, asked: command.Accept) -> list[str]:
        """What must have ended first: dependencies, and for tasks whatever shares a queue with them."""
        if asked.content is not None:
            return list(asked.dependencies)
        tasks = [each.asked.operation_id for each in self.drawn if each.asked.content is None]
        return [*asked.dependencies, *tasks]

    async def _until(self, held: Callable[[], bool], seconds: float) -> None:
        give_up = asyncio.get_running_loop().time() + seconds
        while not held():
            late = {row["id"]: row["state"] for row in self._open()}
            assert asyncio.get_running_loop().time() < give_up, f"still open: {late}"
            await asyncio.sleep(0.5)

    def judge(self) -> None:
        """Everything that must hold at the end."""
        rows = receipt_rows(self.store)
        assert self.accepted <= rows.keys(), "accepted, and gone"
        assert rows.keys() <= {each.asked.operation_id for each in self.drawn}
        self.store.read(stores.journal_is_whole)
        assert self.store.read(truth.problems) == []
        self._judge_exits(rows)
        undisturbed = simulated(self._undisturbed)
        assert [life.fatal for life in self.lives if life.fatal] == []
        assert ends(self.store) == ends(undisturbed)
        if not self._open():  # What waits for ever does so in a state that depends on the time of day.
            assert self.store.read(truth.outcome_digest) == undisturbed.read(truth.outcome_digest)

    def _judge_exits(self, rows: dict[str, Row]) -> None:
        """One exit adds 1 to each operation that had something with the child, and to no other."""
        generations = [generation for life in self.lives for generation in life.executor.generations]
        assert generations == sorted(set(generations))
        due: Counter[int] = Counter()
        for life in self.lives:
            for death in life.executor.deaths:
                due.update(death.operations)
        for row in rows.values():
            counted = row["executor_exit_count"]
            # A server that was killed, too, may have heard of an exit and not have written it yet.
            assert counted <= due[row["n"]], row["id"]
            assert len(self.lives) > 1 or counted == due[row["n"]], row["id"]

    async def _undisturbed(self) -> InMemoryStore:
        """The end of the same operations, accepted in the same order, where nothing goes wrong."""
        store = new_store()
        life = Life(store, Random(0), Faults(), Counter(), healed=True)
        self.lives.append(life)
        await life.begin()
        asked = {each.asked.operation_id: each.asked for each in self.drawn}
        for row in sorted(receipt_rows(self.store).values(), key=lambda row: row["n"]):
            await life.ledger.write(asked[row["id"]])
        await asyncio.sleep(REST_SECONDS)
        await life.kill()
        return store


def ends(store: InMemoryStore) -> dict[str, tuple[Any, ...] | None]:
    """How each operation ended; None for one that waits."""
    return {
        name: None if is_open(row) else (row["state"], row["result"], row["error"])
        for name, row in receipt_rows(store).items()
    }


def run(number: int) -> Counter[str]:
    """One world to its end; a failure names it."""
    world = World(number)
    try:
        simulated(world.run)
        world.judge()
    except AssertionError as error:
        for fatal in (fatal for life in world.lives for fatal in life.fatal):
            error.add_note("".join(traceback.format_exception(fatal)))
        error.add_note(f"world {number}: MUNIMENT_WORLDS={number}:1 scripts/test tests/model/test_worlds.py")
        raise
    return world.happened


def run_all(chosen: Iterable[int]) -> Counter[str]:
    """Worlds one after the other, up to the first that fails."""
    happened: Counter[str] = Counter()
    for number in chosen:
        happened += run(number)
    return happened


def numbers() -> range:
    """The worlds of this run."""
    first, count = (int(part) for part in os.environ.get("MUNIMENT_WORLDS", f"0:{WORLDS}").split(":"))
    return range(first, first + count)


@pytest.mark.timeout(7200)  # As long as anybody wants to try other worlds.
@pytest.mark.parametrize("share", range(SHARES))
def test_every_world_ends_as_if_nothing_had_happened(share: int) -> None:
    chosen = numbers()[share::SHARES]
    happened = run_all(chosen)
    print(f"{len(chosen)} worlds: {dict(sorted(happened.items()))}")
    if len(numbers()) >= WORLDS:
        missing = {
            kind: happened[kind]
            for kind, least in FAULTS_MIN.items()
            if happened[kind] < least * len(chosen) // WORLDS // 2
        }
        assert missing == {}


# Controls: each takes one rule away, and some world must notice.


def gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was with a child that ended is forgotten."""

    def lost(self: Ingestion, request: Any, now: float) -> None:
        self._finish(request)

    monkeypatch.setattr(Ingestion, "lost", lost)


def shares_with_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was with a child that ended is tried again with others."""

    def lost(self: Ingestion, request: Any, now: float) -> None:
        self._finish(request)
        for n, piece in ingestion._contents(request):
            if n in self._jobs and piece is not None:
                self._jobs[n].pieces.appendleft(piece)
            elif n in self._jobs:
                self._unplanned.append(n)

    monkeypatch.setattr(Ingestion, "lost", lost)


def never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that met a ledger out of order is not taken up again."""
    monkeypatch.setattr(Coordinator, "_later", lambda self, work: None)


def counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a child is counted for each request and each repetition."""
    monkeypatch.setattr(stage, "_is_recorded", lambda *_: False)


def exit_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation whose child ended is rejected."""

    async def record(self: Pipeline, request: Any, fault: Any) -> None:
        for n in request.operations:
            await self._write(command.Refuse(n=n, error=str(fault), result=None, now=self._clock.now_us()))

    monkeypatch.setattr(Pipeline, "_record", record)


def recovers_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, whatever has a plan is overlooked."""
    unfinished = coordinating.unfinished
    monkeypatch.setattr(
        coordinating,
        "unfinished",
        lambda reads: [each for each in unfinished(reads) if each.state != State.PROCESSING],
    )


def taken_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was lost makes work be begun again, whatever has come of it."""
    monkeypatch.setattr(Coordinator, "_is_open", lambda self, work: True)


def stuck_takes_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories that cannot go on stand in the way of others."""
    monkeypatch.setattr(Pipeline, "stuck", lambda self: 0)


MUTANTS: Final = (
    gives_up,
    shares_with_suspects,
    never_again,
    counts_twice,
    exit_is_a_verdict,
    recovers_half,
    taken_up_twice,
    stuck_takes_a_place,
)
CONTROL_WORLDS: Final = 400


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.replace("_", " "))
def test_control_a_rule_that_is_gone_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_all(range(CONTROL_WORLDS))


def test_a_world_can_be_run_again_from_its_number() -> None:
    assert run(7) == run(7)
