"""Opening a connection: pragmas, version check, SQLite's errors in our words (rulings 11 and 16)."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

import apsw

from muniment.errors import (
    Corrupt,
    InvariantBroken,
    LedgerUnavailable,
    OutcomeUnknown,
    RefusedStart,
    StorageFull,
)

# Versions before carry the race that can corrupt a database when its write-ahead log is reset.
SQLITE_VERSION_MIN: Final = (3, 51, 3)
PAGE_BYTES: Final = 4096
READER_BUSY_MS: Final = 250
STATEMENTS_KEPT: Final = 300
"""Prepared statements of the writer: all that it has, in every size (ADR 0020)."""

# SQLite calls a write "full" for ENOSPC alone. A file or a quota that may not grow is the same clean no.
FULL_ERRNOS: Final = frozenset({errno.EFBIG, errno.EDQUOT})
READ_ERRORS: Final = frozenset({apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ})
_Translate = Callable[[apsw.Error, apsw.Connection | None], Exception | None]
_UNAVAILABLE: Final = (
    apsw.IOError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
    apsw.PermissionsError,
    apsw.AuthError,
    apsw.NoMemError,
    apsw.InterruptError,
    apsw.ProtocolError,
)


def check_version(version: str) -> None:
    """Refuse a SQLite library with the WAL-reset race."""
    if tuple(int(part) for part in version.split(".")) < SQLITE_VERSION_MIN:
        wanted = ".".join(str(part) for part in SQLITE_VERSION_MIN)
        raise RefusedStart(f"SQLite {version} is older than {wanted}, which has a fix against corruption")


def open_writer(path: Path) -> apsw.Connection:
    """The one writing connection. Checkpoints are explicit, so that a failed fsync in one is never silent.

    Closing it, or dropping it, touches no file: ``allow_cleanup`` comes before an orderly end.
    """
    check_version(apsw.sqlite_lib_version())
    with translated():
        connection = apsw.Connection(str(path), statementcachesize=STATEMENTS_KEPT)
    with translated(connection):
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.set_busy_timeout(READER_BUSY_MS)
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            "journal_mode = WAL",
            # FULL: NORMAL lost acknowledged writes in about half of the simulated power losses (ADR 0004).
            "synchronous = FULL",
            "foreign_keys = ON",
            "secure_delete = ON",
            "wal_autocheckpoint = 0",
            "cache_size = -65536",
            "temp_store = MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        _expect(connection, "journal_mode", "wal")
        _expect(connection, "synchronous", 2)
    return connection


def open_reader(path: Path) -> apsw.Connection:
    """A connection that cannot write."""
    with translated():
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(READER_BUSY_MS)
        connection.execute("PRAGMA query_only = ON").fetchall()
        connection.execute("PRAGMA cache_size = -16384").fetchall()
    return connection


def allow_cleanup(connection: apsw.Connection) -> None:
    """Let SQLite remove the empty log when the connection is closed."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)


def _expect(connection: apsw.Connection, pragma: str, value: object) -> None:
    got = connection.execute(f"PRAGMA {pragma}").fetchall()[0][0]
    if got != value:
        raise RefusedStart(f"SQLite refuses {pragma} = {value}: it says {got}")


class _Translating:
    """A context that turns SQLite's errors into ours; made for every transaction, so made to be cheap."""

    __slots__ = ("_connection", "_translate")

    def __init__(self, translate: "_Translate", connection: apsw.Connection | None) -> None:
        self._translate, self._connection = translate, connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        ours = self._translate(error, self._connection) if isinstance(error, apsw.Error) else None
        if ours is not None:
            try:
                raise ours from error
            finally:
                del ours, error, trace  # Held here they would hold each other, and what an error saw open.


def translated(connection: apsw.Connection | None = None) -> _Translating:
    """Turn SQLite's errors outside of COMMIT into ours (``translation``)."""
    return _Translating(translation, connection)


def translation(error: apsw.Error, connection: apsw.Connection | None) -> Exception | None:
    """Our error for one of SQLite's outside of COMMIT: full is a clean no, unreadable is unavailable.

    ``connection`` is asked why a write failed; only one that writes need be given. None for what is no error
    of storage, but a bug of ours.
    """
    full = isinstance(error, apsw.FullError)
    if full or (isinstance(error, apsw.IOError) and connection is not None and _is_full(connection, error)):
        return StorageFull()
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return Corrupt(f"ledger.db: {error}")
    if isinstance(error, apsw.ConstraintError):
        return InvariantBroken(f"a constraint of the schema refused a write: {error}")
    if isinstance(error, _UNAVAILABLE):
        return LedgerUnavailable(f"operation ledger unavailable: {error}")
    return None


def _is_full(connection: apsw.Connection, error: apsw.Error) -> bool:
    return _code(error) == apsw.SQLITE_IOERR_WRITE and connection.system_errno in FULL_ERRNOS


def _code(error: apsw.Error) -> int:
    code: int = error.extendedresult  # type: ignore[attr-defined]  # It is there; apsw's stub leaves it out.
    return code


def committing(connection: apsw.Connection) -> _Translating:
    """The same around COMMIT, where an I/O error leaves the outcome unknown (ruling 11)."""
    return _Translating(_of_commit, connection)


def _of_commit(error: apsw.Error, connection: apsw.Connection | None) -> Exception | None:
    ours = translation(error, connection)
    if isinstance(ours, LedgerUnavailable) and not isinstance(error, apsw.BusyError):
        return OutcomeUnknown()
    return ours


def checkpointing(connection: apsw.Connection) -> _Translating:
    """The same around a checkpoint, where what cannot be read stays in the log and nothing is lost."""
    return _Translating(_of_checkpoint, connection)


def _of_checkpoint(error: apsw.Error, connection: apsw.Connection | None) -> Exception | None:
    unread = isinstance(error, apsw.IOError) and _code(error) in READ_ERRORS
    return translation(error, connection) if unread else _of_commit(error, connection)
