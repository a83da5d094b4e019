"""The ledger port on SQLite: one writer thread, two lanes, group commit, reader threads (ruling 16).

The writer takes whatever waits, accepts first, and commits it in one transaction: a lone command pays one
fsync, a burst shares it. Every reply is handed to the event loop in one call a batch, after COMMIT has
returned. The lanes are filled on the loop alone and emptied by the writer alone, so neither waits for the
other.
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
    """The first command of each lane goes into a batch whatever its size."""
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
        case command.AdvanceAll():
            return COMMAND_OVERHEAD_BYTES * len(asked.numbers)
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
        self._accepts: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._fatal: BaseException | None = None
        self._others_went = False
        """Whether the last batch had room for one command, and that was none of the accepts."""
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
        if self._fatal is not None:
            raise OutcomeUnknown from self._fatal
        if self._closing:
            raise LedgerUnavailable("operation ledger unavailable: the server is stopping")
        lane = self._accepts if isinstance(asked, command.Accept | command.Probe) else self._others
        if isinstance(asked, command.Accept) and len(lane) >= self._batching.queue_max:
            raise LedgerUnavailable("operation ledger unavailable: too many writes are waiting")
        future: asyncio.Future[Any] = self._loop.create_future()
        lane.append(_Waiting(asked, future, _byte_count(asked)))
        if not self._wake.is_set():
            self._wake.set()
        # A caller that goes away does not take the write back: it is answered to nobody, and the ledger
        # tells.
        return await future

    async def read(self, query: Callable[[Reads], T]) -> T:
        if self._closing:
            raise LedgerUnavailable("operation ledger unavailable: the server is stopping")
        return await self._loop.run_in_executor(self._pool, self._read, query)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def queued(self) -> int:
        return len(self._accepts) + len(self._others)

    async def check_identity(self) -> None:
        """Raise LedgerUnavailable if the database file cannot be written or is another file by now."""
        await self._loop.run_in_executor(self._pool, self._store.check_identity)

    async def close(self) -> None:
        """Finish what waits, then end the threads and close the connections."""
        self._closing = True
        self._wake.set()
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
        batch: list[_Waiting] = []
        try:
            while self._fatal is None:
                closing = self._closing  # Asked before looking: what was written before is in a lane.
                batch = self._take()
                if batch:
                    replies, sealed = self._committed(batch)
                    self._loop.call_soon_threadsafe(self._answer, batch, replies, sealed)
                    batch = []
                    self._checkpoint()
                elif closing:
                    return
                else:
                    self._wake.wait()
                    self._wake.clear()  # Before looking again: what is appended from now on wakes again.
        except BaseException as error:  # noqa: BLE001 not handled but handed on: the process ends with it
            self._fatal = error
            self._loop.call_soon_threadsafe(self._abandon, batch)
            self._loop.call_soon_threadsafe(self._on_fatal, error)
        else:
            self._loop.call_soon_threadsafe(self._abandon, batch)

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
        """The next batch: accepts first, with a quarter of it, and one command at least, for other work."""
        most = self._batching.commands_max
        others = min(len(self._others), max(most // 4, 1))
        if others == most and self._accepts and self._others_went:
            others = 0  # There is room for one command only: the lanes take turns.
        self._others_went = others == most
        batch: list[_Waiting] = []
        room = self._batching.bytes_max
        for lane, limit in ((self._accepts, most - others), (self._others, most)):
            first = True
            while lane and len(batch) < limit and (first or lane[0].byte_count <= room):
                room -= lane[0].byte_count
                batch.append(lane.popleft())
                first = False
        return batch

    # On the loop again

    def _answer(self, batch: list[_Waiting], replies: list[Reply], sealed: list[SealedUnit]) -> None:
        fault = self._tell(sealed) if sealed else None
        for each, reply in zip(batch, replies, strict=True):
            if each.future.done():  # Its caller has gone away; the ledger tells it later.
                continue
            if reply.error is not None:
                each.future.set_exception(reply.error)
                each.future.exception()  # Seen, should the caller go away before it looks.
            else:
                each.future.set_result(reply.value)
        if fault is not None:
            self._fatal = fault
            self._wake.set()
            self._on_fatal(fault)

    def _tell(self, sealed: list[SealedUnit]) -> BaseException | None:
        """Tell the listeners. The units are committed: what fails in one is a bug and no caller's error.

        After a failure nobody is told any more: a listener would see a gap.
        """
        try:
            for listener in self._listeners:
                listener(sealed)
        except BaseException as fault:  # noqa: BLE001 not handled but handed on: the process ends with it
            self._listeners.clear()
            return fault
        return None

    def _abandon(self, batch: list[_Waiting]) -> None:
        """After an unknown outcome or a bug nothing is written any more: whoever waits hears so."""
        unknown = OutcomeUnknown()
        unknown.__cause__ = self._fatal
        batch = [*batch, *self._accepts, *self._others]
        self._accepts.clear()
        self._others.clear()
        self._answer(batch, [Reply(error=unknown)] * len(batch), [])
