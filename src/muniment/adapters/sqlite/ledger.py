"""The ledger port on SQLite: one writer thread, two lanes, group commit, reader threads (ruling 16).

The writer takes whatever waits, accepts first, and commits it in one transaction: a lone command pays one
fsync, a burst shares it. Every reply is handed to the event loop in one call a batch, after COMMIT has
returned.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import msgspec
import structlog

from muniment.adapters.sqlite.store import SqliteReader, SqliteStore
from muniment.errors import LedgerUnavailable, OutcomeUnknown, StorageFull
from muniment.model import command
from muniment.model.command import Command
from muniment.ports.ledger import Reads, Reply, SealedUnit

T = TypeVar("T")
READER_THREADS: Final = 3
COMMAND_OVERHEAD_BYTES: Final = 256
Listener = Callable[[Sequence[SealedUnit]], None]

log = structlog.get_logger("ledger")


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """How much one transaction may take, and how much may wait."""

    commands_max: int = 256
    bytes_max: int = 4 * 1024 * 1024
    queue_max: int = 100_000
    wal_pages_max: int = 8000


class _Waiting(msgspec.Struct, frozen=True):
    command: Command
    future: "asyncio.Future[Any]"
    byte_count: int


def _byte_count(asked: Command) -> int:
    match asked:
        case command.Accept():
            return COMMAND_OVERHEAD_BYTES + len(asked.attributes) + len(asked.content or b"")
        case command.SaveParts():
            return COMMAND_OVERHEAD_BYTES + sum(len(data) for _, data in asked.vectors)
        case _:
            return COMMAND_OVERHEAD_BYTES


class SqliteLedger:
    """``ports.ledger.Ledger`` on a ``SqliteStore``. Made and used on one event loop."""

    def __init__(
        self, store: SqliteStore, batching: Batching, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self._store = store
        self._batching = batching
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._lanes: tuple[deque[_Waiting], deque[_Waiting]] = (deque(), deque())
        self._wake = threading.Condition()
        self._closing = False
        self._fatal: BaseException | None = None
        self._listeners: list[Listener] = []
        # Opened now, files of the log included, so that reading needs no file descriptor later on.
        self._readers = [store.reader() for _ in range(READER_THREADS)]
        self._idle: SimpleQueue[SqliteReader] = SimpleQueue()
        for reader in self._readers:
            reader.read(lambda reads: reads.head())
            self._idle.put(reader)
        self._pool = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="ledger-reader")
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    # The port

    async def write(self, asked: Command) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        waiting = _Waiting(asked, future, _byte_count(asked))
        lane = self._lanes[0 if isinstance(asked, command.Accept | command.Probe) else 1]
        with self._wake:
            if self._fatal is not None:
                raise OutcomeUnknown from self._fatal
            if self._closing:
                raise LedgerUnavailable("operation ledger unavailable: the server is stopping")
            if isinstance(asked, command.Accept) and len(lane) >= self._batching.queue_max:
                raise LedgerUnavailable("operation ledger unavailable: too many writes are waiting")
            lane.append(waiting)
            self._wake.notify()
        # A caller that goes away does not take the write back: it is answered to nobody, and the ledger
        # tells.
        return await asyncio.shield(future)

    async def read(self, query: Callable[[Reads], T]) -> T:
        if self._closing:
            raise LedgerUnavailable("operation ledger unavailable: the server is stopping")
        return await self._loop.run_in_executor(self._pool, self._read, query)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def queued(self) -> int:
        return len(self._lanes[0]) + len(self._lanes[1])

    async def check_identity(self) -> None:
        """Raise LedgerUnavailable if the database file cannot be written or is another file by now."""
        await self._loop.run_in_executor(self._pool, self._store.check_identity)

    async def close(self) -> None:
        """Finish what waits, then end the threads and close the connections."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await self._loop.run_in_executor(None, self._thread.join)
        await self._loop.run_in_executor(None, self._pool.shutdown)
        for reader in self._readers:
            reader.close()
        self._store.close()

    # Reader threads

    def _read(self, query: Callable[[Reads], T]) -> T:
        reader = self._idle.get()
        try:
            return reader.read(query)
        finally:
            self._idle.put(reader)

    # The writer thread

    def _run(self) -> None:
        while batch := self._take():
            try:
                replies, sealed = self._committed(batch)
                self._loop.call_soon_threadsafe(self._answer, batch, replies, sealed)
                batch = []
                self._checkpoint()
            except BaseException as error:  # noqa: BLE001 not handled but handed on: the process ends with it
                self._end(batch, error)
                return

    def _committed(self, batch: list[_Waiting]) -> tuple[list[Reply], list[SealedUnit]]:
        """Commit a batch; where that is refused, it was rolled back and everybody hears so."""
        try:
            return self._store.transact([each.command for each in batch])
        except (StorageFull, LedgerUnavailable) as error:
            return [Reply(error=error)] * len(batch), []

    def _checkpoint(self) -> None:
        try:
            self._store.checkpoint(self._batching.wal_pages_max)
        except (StorageFull, LedgerUnavailable) as error:
            # The log keeps what the file could not take, and the next commit tries again.
            log.warning("the write-ahead log could not be copied back", reason=str(error))

    def _take(self) -> list[_Waiting]:
        with self._wake:
            while not any(self._lanes) and not self._closing:
                self._wake.wait()
            batch: list[_Waiting] = []
            room = self._batching.bytes_max
            # Accepts go first, and leave a quarter of a full batch to the work on what was accepted.
            others = min(len(self._lanes[1]), self._batching.commands_max // 4)
            for lane, most in zip(self._lanes, (-others, 0), strict=True):
                while lane and len(batch) < self._batching.commands_max + most:
                    if batch and lane[0].byte_count > room:
                        break
                    room -= lane[0].byte_count
                    batch.append(lane.popleft())
            return batch

    def _end(self, batch: list[_Waiting], error: BaseException) -> None:
        """An unknown outcome or a bug: nothing is written any more, the process must end."""
        with self._wake:
            self._fatal = error
            batch = batch + [each for lane in self._lanes for each in lane]
            for lane in self._lanes:
                lane.clear()
        unknown = OutcomeUnknown()
        unknown.__cause__ = error
        self._loop.call_soon_threadsafe(self._answer, batch, [Reply(error=unknown)] * len(batch), [])
        self._loop.call_soon_threadsafe(self._on_fatal, error)

    def _answer(self, batch: list[_Waiting], replies: list[Reply], sealed: list[SealedUnit]) -> None:
        if sealed:
            for listener in self._listeners:
                listener(sealed)
        for each, reply in zip(batch, replies, strict=True):
            if each.future.cancelled():
                continue
            if reply.error is not None:
                each.future.set_exception(reply.error)
                each.future.exception()  # Seen, should the caller have gone away: the ledger tells it later.
            else:
                each.future.set_result(reply.value)
