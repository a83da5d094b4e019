"""The SQLite store, synchronous: open, migrate, one transaction a batch, reads (rulings 11, 12, 16)."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

import apsw

from muniment.adapters.sqlite.connection import (
    allow_cleanup,
    checkpointing,
    committing,
    open_reader,
    open_writer,
    translated,
)
from muniment.adapters.sqlite.queries import migrations
from muniment.adapters.sqlite.rows import SqliteReads, SqliteRows
from muniment.errors import LedgerUnavailable, OutcomeUnknown, StorageFull, StoreTooNew
from muniment.model.command import Accept, Command
from muniment.ports.ledger import Handle, Reads, Reply, SealedUnit, attempt

T = TypeVar("T")
LEDGER_FILE: Final = "ledger.db"
Begin = Callable[[SqliteRows], None]


class SameFiles:
    """The database and its log are still the files that were opened.

    SQLite goes on writing to a file that was deleted or replaced under it; what is acknowledged then is lost
    at the next start. Looking costs two ``stat`` calls.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path, path.with_name(f"{path.name}-wal"))
        self._names = tuple(map(str, self._paths))
        self._known = [self._identity(path) for path in self._paths]

    def check(self) -> None:
        """Raise LedgerUnavailable if one of them is gone or another."""
        try:
            # Looked at before every transaction, so made to be cheap.
            states = list(map(os.stat, self._names))
        except OSError:
            states = []
        if [(state.st_dev, state.st_ino) for state in states] != self._known:
            self._refuse()

    def _refuse(self) -> None:
        for path, known in zip(self._paths, self._known, strict=True):
            found = self._identity(path)
            if found != known:
                what = "was removed" if found is None else "was replaced"
                raise LedgerUnavailable(f"operation ledger unavailable: {path.name} {what} while it was open")

    @staticmethod
    def _identity(path: Path) -> tuple[int, int] | None:
        try:
            state = path.stat()
        except OSError:
            return None
        return (state.st_dev, state.st_ino)


class SqliteStore:
    """One data directory's ledger. One thread writes; each reading thread has its own ``reader()``."""

    def __init__(self, directory: Path, handle: Handle) -> None:
        self.path = directory / LEDGER_FILE
        self._handle = handle
        self._connection = open_writer(self.path)
        self._rows = SqliteRows(self._connection)
        self._files: SameFiles | None = None
        self._broken = False
        self._wal_pages = 0
        self._connection.set_wal_hook(self._note_wal_pages)

    @classmethod
    def open(cls, directory: Path, handle: Handle, begin: Begin, *, incarnation: str) -> "SqliteStore":
        """Open or create the store; ``begin`` writes the first units of a new history.

        Raises StoreTooNew for a newer format, Corrupt for a file that is no ledger, LedgerUnavailable where
        it cannot be opened.
        """
        store = cls(directory, handle)
        try:
            store._migrate(begin, incarnation)
            store._files = SameFiles(store.path)
        except BaseException:
            store._connection.close()  # As it is: what is refused or unknown is not written to.
            raise
        return store

    def _migrate(self, begin: Begin, incarnation: str) -> None:
        known = migrations()
        with translated():
            version = int(str(self._connection.execute("PRAGMA user_version").fetchall()[0][0]))
        if version > known[-1][0]:
            raise StoreTooNew(
                f"{self.path} has format {version}; this program knows up to {known[-1][0]}. "
                "Start the newer version that wrote it."
            )
        # The fsync of what recovery found in the log may have failed, with the bytes in memory alone: they
        # are written once more, elsewhere, before anybody hears of them.
        with suppress(StorageFull, LedgerUnavailable):
            self._copy_back()
        with translated():
            current = version == known[-1][0] and self._rows.head()[0] > 0
        # A store that needs nothing but this note is opened on a full disk too: it can be read.
        with suppress(StorageFull) if current else nullcontext(), self._transaction():
            for number, text in known:
                if number > version:
                    self._connection.execute(text)
                    self._connection.execute(f"PRAGMA user_version = {number}")
            if self._rows.head()[0] == 0:
                begin(self._rows)
            self._rows.set_meta("format", str(known[-1][0]))
            self._rows.set_meta("incarnation", incarnation)
        self._rows.take_sealed()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE ... COMMIT; whatever is raised inside rolls back and leaves nothing."""
        try:
            with translated(self._connection):
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._rows.flush()
        except BaseException:
            self._roll_back()
            raise
        try:
            with committing(self._connection):
                self._connection.execute("COMMIT")
        except OutcomeUnknown:
            self._broken = True
            raise
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        self._rows.forget()
        if self._connection.in_transaction:
            with self._ending(), committing(self._connection):
                self._connection.execute("ROLLBACK")

    def transact(self, commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]:
        """Handle all commands in one durable transaction.

        An error that is one command's own (a conflict, a wrong field) is its reply. StorageFull,
        LedgerUnavailable and InvariantBroken roll the whole batch back and are raised; OutcomeUnknown means
        the process must end.
        """
        replies: list[Reply] = []
        self._check_files()
        with self._transaction():
            accepts = [(each.account, each.operation_id) for each in commands if isinstance(each, Accept)]
            if len(accepts) > 1:
                self._rows.look_up(accepts)
            replies.extend(attempt(self._handle, self._rows, command, self._appended) for command in commands)
        return replies, self._rows.take_sealed()

    def _appended(self) -> int:
        return len(self._rows.sealed)

    def checkpoint(self, wal_pages_max: int) -> None:
        """Copy the write-ahead log back once it has grown, so that it is reused and does not grow for ever.

        Raises OutcomeUnknown on a failed write or fsync, which must never be tried again (ADR 0017);
        StorageFull and LedgerUnavailable where it can wait: the log keeps what is not copied.
        """
        if self._wal_pages > wal_pages_max:
            self._copy_back()

    def _copy_back(self) -> None:
        try:
            self._checkpoint(apsw.SQLITE_CHECKPOINT_RESTART)
        except LedgerUnavailable:
            # A reader holds the log; what can be copied is, and the next commit tries again.
            self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _checkpoint(self, mode: int) -> None:
        with self._ending(), checkpointing(self._connection):
            self._connection.wal_checkpoint(mode=mode)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """After an unknown outcome no file is touched any more: the next process finds out what is there."""
        try:
            yield
        except OutcomeUnknown:
            self._broken = True
            raise

    def _note_wal_pages(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def check_identity(self) -> None:
        """Raise LedgerUnavailable if the file at the path cannot be opened or is not the open one."""
        try:
            with self.path.open("r+b"):
                self._check_files()
        except OSError as error:
            raise LedgerUnavailable(
                f"operation ledger unavailable: {self.path.name}: {error.strerror}"
            ) from error

    def _check_files(self) -> None:
        if self._files is not None:
            self._files.check()

    def read(self, query: Callable[[Reads], T]) -> T:
        """Read through the writing connection, outside of any write."""
        with translated():
            return query(SqliteReads(self._connection))

    def reader(self) -> "SqliteReader":
        """A new reading connection, for one thread."""
        return SqliteReader(self.path, self._files)

    def close(self) -> None:
        """Copy the log back, so that one file holds everything, and close the writing connection.

        Raises OutcomeUnknown where a write or an fsync fails then; what was acknowledged is in the log, which
        stays. After an unknown outcome nothing is written.
        """
        try:
            if not self._broken:
                self._leave_one_file()
        finally:
            self._connection.close()

    def _leave_one_file(self) -> None:
        try:
            self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except (StorageFull, LedgerUnavailable):
            return  # No room, or somebody reads: the log stays, and is read at the next start.
        allow_cleanup(self._connection)


class SqliteReader:
    """A read-only connection; each ``read`` is one consistent snapshot."""

    def __init__(self, path: Path, files: SameFiles | None = None) -> None:
        self._files = files
        self._connection = open_reader(path)
        self._reads = SqliteReads(self._connection)

    def read(self, query: Callable[[Reads], T]) -> T:
        """Run ``query`` in one read transaction."""
        if self._files is not None:
            self._files.check()
        with translated():
            self._connection.execute("BEGIN")
            try:
                return query(self._reads)
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
