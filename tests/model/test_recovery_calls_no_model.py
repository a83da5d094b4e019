"""R19: recovery reads records and asks no model (seed, memory-and-recovery; ruling 5).

Thirteen stores, each left in another intermediate state by a process that ended without a word. What comes
after is the real recovery: open, load the unfinished operations, fill the device. The executor that it is
given raises on any call, so that a recovery which asks a model cannot pass.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from muniment.adapters.devices.numpy_device import NumpyDevice
from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
from muniment.adapters.sqlite.rows import SqliteReads
from muniment.core.ingestion import Limits
from muniment.core.schedule import Schedule, Unfinished, Work
from muniment.core.tables import Row
from muniment.model import command, journal
from muniment.model.operation import TERMINAL, Kind, State
from muniment.model.plan import ModelIdentity
from muniment.ports.clock import Clock
from muniment.ports.device import Eligible, MemoryDelta
from muniment.ports.executor import Embedded, ExecutorHealth, Planned
from muniment.ports.ledger import Reads
from muniment.runtime import coordinator as coordinating
from muniment.runtime.coordinator import Coordinator, Room
from muniment.runtime.feed import Feed
from muniment.runtime.ingestion import Pipeline
from muniment.stages import index
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import NOW
from tests.support.stores import Driver

SECONDS: Final = 20.0
ANYBODY: Final = Eligible(as_of_us=NOW)


class AskedAModel(AssertionError):
    """Recovery must not."""


class NoModel:
    """``ports.executor.Executor`` of which every call is a failure."""

    async def start(self) -> None:
        raise AskedAModel("start")

    async def stop(self) -> None:
        raise AskedAModel("stop")

    requests_max = 2

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        raise AskedAModel("plan")

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        raise AskedAModel("embed")

    async def embed_query(self, text: str) -> Embedded:
        raise AskedAModel("embed_query")

    async def identity(self) -> ModelIdentity:
        raise AskedAModel("identity")

    def health(self) -> ExecutorHealth:
        raise AskedAModel("health")


class StoppedClock:
    """A clock of which nothing here depends."""

    def now_us(self) -> int:
        return NOW

    def monotonic(self) -> float:
        return 0.0


# Places at which a process may end


def empty(_: Driver) -> None:
    pass


def accepted(ledger: Driver) -> None:
    ledger.accept(ops.memory("m"))


def validated(ledger: Driver) -> None:
    ledger.advance(ledger.accept(ops.memory("m")))


def blocked(ledger: Driver) -> None:
    ledger.advance(ledger.accept(ops.memory("m", dependencies=["missing"])))


def unblocked(ledger: Driver) -> None:
    ledger.advance(ledger.accept(ops.memory("z", dependencies=["a"])))
    ledger.remember(ops.memory("a"), parts=2)


def planned(ledger: Driver, indexed: Sequence[int] = ()) -> tuple[int, int | None]:
    n = ledger.accept(ops.memory("m", "A text that has several parts."))
    ledger.advance(n)
    plan_n = ledger.plan(n, parts=4)
    if indexed:
        ledger.vectors(n, plan_n, indexed)
    return n, plan_n


def some_parts(ledger: Driver) -> None:
    planned(ledger, [0, 2])


def all_parts(ledger: Driver) -> None:
    planned(ledger, [0, 1, 2, 3])


def after_an_exit(ledger: Driver) -> None:
    n, plan_n = planned(ledger, [1])
    ledger.write(ops.exited(n))
    ledger.write(command.ReserveGeneration(now=NOW))
    ledger.write(command.ReserveGeneration(now=NOW))
    ledger.vectors(n, plan_n, [2], generation=2)


def committed(ledger: Driver) -> None:
    for each in range(5):
        ledger.remember(ops.memory(f"m{each}", f"Memory number {each}.", user_id="ann"), parts=each % 3 + 1)


def rejected(ledger: Driver) -> None:
    root = ledger.accept(ops.memory("root"))
    ledger.advance(ledger.accept(ops.memory("m", dependencies=["root"])))
    ledger.write(ops.refuse(root))


def tasks(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s")))
    ledger.accept(ops.step("a", "wash"))
    ledger.accept(ops.step("b", "dry", dependencies=["missing"]))
    ledger.apply(3)
    ledger.accept(ops.complete("c", "wash", dependencies=["a"]))


def everything(ledger: Driver) -> None:
    committed(ledger)
    unblocked(ledger)
    ledger.write(ops.refuse(ledger.accept(ops.memory("no"))))
    ledger.advance(ledger.accept(ops.memory("waits", dependencies=["missing"])))
    ledger.apply(ledger.accept(ops.stream("s")))
    ledger.accept(ops.step("wash", "wash", dependencies=["m1"]))
    ledger.accept(ops.complete("washed", "wash"))
    planned(ledger, [3])


STATES: Final[list[Callable[[Driver], Any]]] = [
    empty,
    accepted,
    validated,
    blocked,
    unblocked,
    planned,
    some_parts,
    all_parts,
    after_an_exit,
    committed,
    rejected,
    tasks,
    everything,
]


def left_behind(fill: Callable[[Driver], Any], tmp_path: Path) -> tuple[Path, str]:
    """What a process that fills a store and ends leaves on the disk, and the digest that it had."""
    opened = stores.sqlite(tmp_path / "living")
    try:
        fill(Driver(opened))
        digest = opened.read(stores.state_digest)
        shutil.copytree(tmp_path / "living", tmp_path / "left")
    finally:
        opened.close()
    return tmp_path / "left", digest


# Recovery


class Recovered(msgspec.Struct, frozen=True):
    """What stands in memory after a recovery."""

    count: int
    due: list[Work]
    device: NumpyDevice
    position: int
    digest: str
    memories: list[Row]
    rows: list[Row]


async def recovered(directory: Path, make_coordinator: type[Coordinator], make_feed: type[Feed]) -> Recovered:
    """Open a store as the next process does, and bring everything back."""
    clock: Clock = StoppedClock()
    fatal: list[BaseException] = []
    ledger = SqliteLedger(stores.sqlite(directory), Batching(), fatal.append)
    pipeline = Pipeline(
        ledger,
        NoModel(),
        clock,
        Limits(batch_tokens_max=64, retry_seconds_max=1.0),
        parts_max=100,
        on_fatal=fatal.append,
    )
    room = Room(operations_in_flight_max=8, operations_stuck_max=8)
    device = NumpyDevice()
    coordinator = make_coordinator(ledger, pipeline, clock, room, on_fatal=fatal.append)
    feed = make_feed(ledger, device)
    loading = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(SECONDS):
            count = await coordinator.recover()
            head = (await ledger.read(lambda reads: reads.head()))[0]
            reached = asyncio.create_task(feed.reach(head, SECONDS))
            await asyncio.wait([loading, reached], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                reached.cancel()
                loading.result()
            await reached
            assert coordinator.open_operations() == count
            return Recovered(
                count=count,
                due=list(coordinator._schedule.due(1000)),
                device=device,
                position=head,
                digest=await ledger.read(stores.state_digest),
                memories=await ledger.read(lambda reads: reads.memories(0, 1000)),
                rows=await ledger.read(lambda reads: list(reads.rows("operation"))),
            )
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await ledger.close()
        assert fatal == []


def observed(directory: Path) -> Schedule:
    """The schedule of a process that had followed the same journal from its beginning."""
    schedule = Schedule()
    opened = stores.sqlite(directory)
    attributes = {
        row["operation_n"]: msgspec.json.decode(row["bytes"])
        for row in opened.read(lambda reads: list(reads.rows("attribute")))
    }
    for unit in opened.read(stores.units):
        schedule.observe(unit, attributes.get(unit.n) if isinstance(unit, journal.Accept) else None)
    opened.close()
    return schedule


def restored(
    directory: Path, digest: str, coordinator: type[Coordinator] = Coordinator, feed: type[Feed] = Feed
) -> Recovered:
    """Recover, and assert that everything is as it was recorded."""
    found = asyncio.run(recovered(directory, coordinator, feed))
    assert found.digest == digest
    assert found.count == sum(row["state"] not in TERMINAL for row in found.rows)
    assert {work.n: work.verb for work in found.due} == {
        work.n: work.verb for work in observed(directory).due(1000)
    }
    searchable(found, directory)
    assert stores.checked(directory).state_digest == digest
    return found


def vectors_of(memory: Row) -> Callable[[Reads], list[Row]]:
    return lambda reads: reads.vectors(memory["plan_n"])


def searchable(found: Recovered, directory: Path) -> None:
    """Each committed memory is the best answer to its own vector, with the bytes that were saved."""
    opened = stores.sqlite(directory)
    try:
        assert found.device.position == found.position
        assert found.device.count()[0] == len(found.memories)
        for memory in found.memories:
            for vector in opened.read(vectors_of(memory)):
                best = found.device.search(vector["bytes"], ANYBODY, 1)[0]
                assert (best.key, best.part_index) == (memory["key"], vector["part_index"])
    finally:
        opened.close()


@pytest.mark.parametrize("fill", STATES)
def test_recovery_restores_what_was_recorded_and_asks_no_model(
    tmp_path: Path, fill: Callable[[Driver], Any]
) -> None:
    directory, digest = left_behind(fill, tmp_path)

    restored(directory, digest)


def test_the_stores_are_in_every_state_that_is_ever_stored(tmp_path: Path) -> None:
    assert len(STATES) >= 12
    seen: set[tuple[str, str]] = set()
    for number, fill in enumerate(STATES):
        store = stores.sqlite(tmp_path / str(number))
        ledger = Driver(store)
        fill(ledger)
        seen |= {(row["kind"], row["state"]) for row in ledger.rows("operation")}
        store.close()

    memories = {state for kind, state in seen if kind == Kind.ADD_MEMORY}
    # ``planned`` and ``indexed`` are left in the transaction in which they are reached.
    assert memories == set(State) - {State.PLANNED, State.INDEXED}
    assert {state for kind, state in seen if kind != Kind.ADD_MEMORY} >= {
        State.ACCEPTED,
        State.BLOCKED,
        State.COMMITTED,
    }


def test_a_recovery_of_a_recovered_store_changes_nothing(tmp_path: Path) -> None:
    directory, digest = left_behind(everything, tmp_path)

    first, second = restored(directory, digest), restored(directory, digest)

    assert (first.count, first.due, first.position) == (second.count, second.due, second.position)


# Planted mutants


def red(
    tmp_path: Path,
    error: type[BaseException] = AssertionError,
    *,
    coordinator: type[Coordinator] = Coordinator,
    feed: type[Feed] = Feed,
) -> None:
    directory, digest = left_behind(everything, tmp_path)
    with pytest.raises(error):
        restored(directory, digest, coordinator, feed)


def test_control_a_device_that_is_filled_by_embedding_again_is_noticed(tmp_path: Path) -> None:
    class EmbedsAgain(Feed):
        async def _load(self) -> None:
            await NoModel().embed(["One sentence. Another one."], labels=["1:0"])

    red(tmp_path, AskedAModel, feed=EmbedsAgain)


def test_control_a_recovery_that_plans_at_once_is_noticed(tmp_path: Path) -> None:
    class PlansAtOnce(Coordinator):
        async def recover(self) -> int:
            found = await super().recover()
            await self._ingestion._executor.plan(["One sentence. Another one."], labels=["1"])
            return found

    red(tmp_path, AskedAModel, coordinator=PlansAtOnce)


def test_control_a_recovery_that_writes_is_noticed(tmp_path: Path) -> None:
    class Writes(Coordinator):
        async def recover(self) -> int:
            await self._ledger.write(command.ReserveGeneration(now=NOW))
            return await super().recover()

    red(tmp_path, coordinator=Writes)


def test_control_a_recovery_that_overlooks_the_blocked_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = SqliteReads.unfinished

    def all_but_blocked(reads: SqliteReads) -> list[Row]:
        return [row for row in everyone(reads) if row["state"] != State.BLOCKED]

    monkeypatch.setattr(SqliteReads, "unfinished", all_but_blocked)

    red(tmp_path)


def test_control_a_recovery_that_forgets_what_was_met_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = coordinating.unfinished

    def forgetful(reads: Reads) -> list[Unfinished]:
        found = read(reads)
        for each in found:
            each.unmet = {row["depends_on"] for row in reads.dependencies(each.n)}
        return found

    monkeypatch.setattr(coordinating, "unfinished", forgetful)

    red(tmp_path)


def test_control_a_dropped_commit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = index.page

    def one_less(reads: Reads, after: int, limit: int) -> tuple[list[MemoryDelta], int]:
        found, last = page(reads, after, limit)
        return found[1:], last

    monkeypatch.setattr(index, "page", one_less)

    red(tmp_path)
