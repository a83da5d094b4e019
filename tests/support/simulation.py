"""Worlds in simulated time: the real coordinator and pipeline, on a loop whose clock jumps to the next event.

Ledger, executor, network and time are simulated, each with faults drawn from one seed, so a world can be run
again from its number. What is under test runs unchanged: schedule, ingestion, coordinator, stages, ledger
rules. The store is the reference one in memory.
"""

import asyncio
import selectors
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from muniment.adapters.in_memory import InMemoryStore
from muniment.core.ingestion import Limits
from muniment.core.tables import Row
from muniment.errors import (
    ExecutorExited,
    ExecutorFailed,
    ExecutorFault,
    ExecutorProtocolBroken,
    ExecutorStalled,
    LedgerUnavailable,
    MunimentError,
    StorageFull,
)
from muniment.model import command
from muniment.model.operation import TERMINAL, State
from muniment.model.plan import ModelIdentity
from muniment.ports.executor import Embedded, ExecutorHealth, Planned
from muniment.ports.ledger import Reads, Reply, SealedUnit
from muniment.runtime.coordinator import Coordinator, Room
from muniment.runtime.ingestion import Pipeline
from tests.crash.workloads import MODEL, InProcessExecutor
from tests.support import operations, stores

T = TypeVar("T")
EPOCH_US: Final = operations.NOW
STALL_SECONDS: Final = 10.0
RETRY_SECONDS_MAX: Final = 8.0
REQUESTS_MAX: Final = 2
POISON: Final = "nobody reads this and lives"
DEATHS: Final = (ExecutorExited, ExecutorStalled, ExecutorProtocolBroken)


class EverythingWaitsError(AssertionError):
    """Everything waits for something that never happens."""


class _Nothing(selectors.BaseSelector):
    """No file is ever ready; waiting moves the clock."""

    def __init__(self, loop_time: list[float]) -> None:
        self._time = loop_time
        self._map: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._map[number] = selectors.SelectorKey(fileobj, number, events, data)
        return self._map[number]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._map.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._map

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise EverythingWaitsError
        self._time[0] += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits, and then at once."""

    def __init__(self) -> None:
        self._now = [0.0]
        super().__init__(_Nothing(self._now))

    def time(self) -> float:
        return self._now[0]


def simulated(work: Callable[[], Awaitable[T]]) -> T:
    """Run something in simulated time."""

    async def main() -> T:
        return await work()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main())


class SimulatedClock:
    """``ports.clock.Clock``: monotonic time is the loop's; the wall clock jumps now and then."""

    def __init__(self) -> None:
        self.offset_us = 0

    def now_us(self) -> int:
        return EPOCH_US + self.offset_us + int(self.monotonic() * 1e6)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class Faults(msgspec.Struct, kw_only=True):
    """How likely each thing goes wrong, for each time that it could. All zero: nothing does."""

    refused: float = 0.0
    """The ledger refuses before it wrote."""
    lost: float = 0.0
    """The ledger wrote, and the answer is lost."""
    ends: float = 0.0
    """The child ends, stalls or breaks the protocol on a request."""
    fails: float = 0.0
    """The child answers that it cannot."""
    slow: float = 0.0
    """A request takes long, and goes on."""
    network: float = 0.0
    """A client's request or its answer is lost, or sent twice."""


class SimulatedLedger:
    """``ports.ledger.Ledger`` of one life of a server; it commits what waits, after a while, in one batch."""

    def __init__(self, store: InMemoryStore, random: Random, faults: Faults, happened: Counter[str]) -> None:
        self._store = store
        self._random = random
        self._faults = faults
        self._happened = happened
        self._listeners: list[Callable[[Sequence[SealedUnit]], None]] = []
        self._waiting: list[tuple[command.Command, asyncio.Future[Any]]] = []
        self._committing: asyncio.Task[None] | None = None
        self.full_until = 0.0
        self.dead = False
        self.on_fatal: Callable[[BaseException], None] = lambda _: None

    def subscribe(self, listener: Callable[[Sequence[SealedUnit]], None]) -> None:
        self._listeners.append(listener)

    def queued(self) -> int:
        return len(self._waiting)

    async def read(self, query: Callable[[Reads], T]) -> T:
        await asyncio.sleep(self._random.uniform(0.0, 0.004))
        if self.dead:
            await asyncio.Event().wait()
        if self._random.random() < self._faults.refused / 2:
            self._happened["read refused"] += 1
            raise LedgerUnavailable
        return self._store.read(query)

    async def write(self, asked: command.Command) -> Any:
        if self.dead:
            await asyncio.Event().wait()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit())
        return await asyncio.shield(future)

    async def _commit(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._random.uniform(0.0005, 0.02))
            if self.dead:
                return
            batch, self._waiting = self._waiting, []
            try:
                self._settle(batch)
            except BaseException as error:
                self.on_fatal(error)
                raise

    def _settle(self, batch: list[tuple[command.Command, asyncio.Future[Any]]]) -> None:
        error = self._refusal()
        if error is not None:
            self._answer(batch, [Reply(error=error)] * len(batch))
            return
        replies, sealed = self._store.transact([asked for asked, _ in batch])
        if sealed:
            for listener in self._listeners:
                listener(sealed)
        if self._random.random() < self._faults.lost:
            self._happened["answer lost"] += 1
            replies = [Reply(error=LedgerUnavailable("the answer was lost"))] * len(batch)
        self._answer(batch, replies)

    def _refusal(self) -> MunimentError | None:
        if asyncio.get_running_loop().time() < self.full_until:
            self._happened["full"] += 1
            return StorageFull()
        if self._random.random() < self._faults.refused:
            self._happened["refused"] += 1
            return LedgerUnavailable()
        return None

    @staticmethod
    def _answer(batch: list[tuple[command.Command, asyncio.Future[Any]]], replies: Sequence[Reply]) -> None:
        for (_, future), reply in zip(batch, replies, strict=True):
            if reply.error is not None:
                future.set_exception(reply.error)
                future.exception()
            else:
                future.set_result(reply.value)


class Death(msgspec.Struct, frozen=True):
    """A child ended: its generation, and the operations of which something was with it."""

    generation: int
    operations: frozenset[int]


class SimulatedExecutor:
    """``ports.executor.Executor``: one child after the other, each with up to two requests."""

    def __init__(
        self, ledger: SimulatedLedger, random: Random, faults: Faults, happened: Counter[str]
    ) -> None:
        self._ledger = ledger
        self._random = random
        self._faults = faults
        self._happened = happened
        self._model = InProcessExecutor({})
        self._queue: deque[tuple[str, tuple[str, ...], tuple[str, ...], asyncio.Future[Any]]] = deque()
        self._filled = asyncio.Event()
        self.requests_max = REQUESTS_MAX
        self.healed = False
        self.deaths: list[Death] = []
        self.embedded: Counter[str] = Counter()
        self.generations: list[int] = []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def identity(self) -> ModelIdentity:
        return MODEL

    def health(self) -> ExecutorHealth:
        raise AssertionError("nobody asks here")

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        planned: tuple[Planned, ...] = await self._ask("plan", tuple(texts), tuple(labels))
        return planned

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        embedded: Embedded = await self._ask("embed", tuple(texts), tuple(labels))
        return embedded

    async def _ask(self, verb: str, texts: tuple[str, ...], labels: tuple[str, ...]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((verb, texts, labels, future))
        assert len(self._queue) <= REQUESTS_MAX, "more requests than were allowed"
        self._filled.set()
        return await future

    async def run(self) -> None:
        """Live and die, until cancelled."""
        while True:
            try:
                generation = await self._ledger.write(command.ReserveGeneration(now=1))
            except MunimentError:
                await asyncio.sleep(0.5)
                continue
            self.generations.append(generation)
            self._model.generation = generation
            await asyncio.sleep(self._random.uniform(0.1, 2.0))
            await self._live(generation)

    async def _live(self, generation: int) -> None:
        while True:
            while not self._queue:
                self._filled.clear()
                await self._filled.wait()
            verb, texts, labels, future = self._queue[0]
            fault = await self._befalls(texts)
            if isinstance(fault, ExecutorFailed):
                self._happened["failed"] += 1
                self._queue.popleft()
                future.set_exception(ExecutorFailed("cannot", generation))
                future.exception()
            elif fault is not None:
                self._happened[type(fault).__name__] += 1
                self._die(generation, type(fault))
                return
            else:
                self._queue.popleft()
                future.set_result(await self._answer(verb, texts, labels))

    async def _answer(self, verb: str, texts: tuple[str, ...], labels: tuple[str, ...]) -> Any:
        if verb == "plan":
            return await self._model.plan(texts, labels=labels)
        self.embedded.update(labels)
        return await self._model.embed(texts, labels=labels)

    async def _befalls(self, texts: tuple[str, ...]) -> ExecutorFault | None:
        await asyncio.sleep(self._random.uniform(0.001, 0.05) * len(texts))
        if not self.healed and any(POISON in text for text in texts):
            return ExecutorExited("poison")
        if self._random.random() < self._faults.slow:
            self._happened["slow"] += 1
            await asyncio.sleep(self._random.uniform(1.0, 20.0))
        if self._random.random() < self._faults.ends:
            kind = self._random.choice(DEATHS)
            if kind is ExecutorStalled:
                await asyncio.sleep(STALL_SECONDS)
            return kind("fault")
        if self._random.random() < self._faults.fails:
            return ExecutorFailed("cannot")
        return None

    def _die(self, generation: int, kind: type[ExecutorFault]) -> None:
        gone, self._queue = self._queue, deque()
        labels = [label for _, _, each, _ in gone for label in each]
        self.deaths.append(Death(generation, frozenset(int(label.split(":")[0]) for label in labels)))
        for _, _, _, future in gone:
            future.set_exception(kind("ended", generation))
            future.exception()


class Life:
    """One running copy of the server: coordinator, pipeline, executor, on the store that outlives it."""

    def __init__(
        self, store: InMemoryStore, random: Random, faults: Faults, happened: Counter[str], *, healed: bool
    ) -> None:
        self.clock = SimulatedClock()
        self.fatal: list[BaseException] = []
        self.ledger = SimulatedLedger(store, random, faults, happened)
        self.ledger.on_fatal = self.fatal.append
        self.executor = SimulatedExecutor(self.ledger, random, faults, happened)
        self.executor.healed = healed
        self.coordinator = Coordinator(
            self.ledger,
            Pipeline(
                self.ledger,
                self.executor,
                self.clock,
                Limits(batch_tokens_max=24, retry_seconds_max=RETRY_SECONDS_MAX),
                parts_max=40,
                on_fatal=self.fatal.append,
            ),
            self.clock,
            Room(operations_in_flight_max=4, operations_stuck_max=16),
            on_fatal=self.fatal.append,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Recover, then work."""
        while True:
            try:
                await self.coordinator.recover()
            except MunimentError:
                await asyncio.sleep(0.1)
            else:
                break
        self.coordinator.model_is_checked()
        self._tasks = [
            asyncio.create_task(self.coordinator.run()),
            asyncio.create_task(self.executor.run()),
        ]

    async def kill(self) -> None:
        """End without a word: what was not committed is gone, and so is every answer."""
        self.ledger.dead = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def receipt_rows(store: InMemoryStore) -> dict[str, Row]:
    """Every operation as it stands."""
    return {row["id"]: row for row in store.read(lambda reads: list(reads.rows("operation")))}


def is_open(row: Row) -> bool:
    """Whether an operation has not ended."""
    return State(row["state"]) not in TERMINAL


def new_store() -> InMemoryStore:
    """An empty history."""
    return stores.in_memory()
