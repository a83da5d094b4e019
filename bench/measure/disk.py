"""The ledger with nothing around it, and what limits it: a raw append with fdatasync, and the SQL alone.

All of it runs in one worker process. What is counted is the time of the calls; making the next operation lies
between them.
"""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec
import uvloop

from bench.measure import payload
from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
from muniment.adapters.sqlite.queries import migrations
from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteStore
from muniment.model import command
from muniment.stages import ledger as stage
from muniment.wiring import GIL_SWITCH_SECONDS

APPEND_BYTES: Final = 1024
SLICE_SECONDS: Final = 0.1
WAL_PAGES_MAX: Final = Batching().wal_pages_max
ACCOUNT: Final = 1
COPIED: Final = ("operation", "event", "attribute", "payload", "journal_unit")
"""Where an accepted memory has a row, in the order in which they are written."""
NUMBERED: Final = frozenset({"n", "object_n", "operation_n", "position"})
FIND: Final = "SELECT * FROM operation WHERE account_n = ? AND id = ?"


class Calls(msgspec.Struct, frozen=True):
    """Timed calls: how many operations they were, and the seconds of each call."""

    operations: int
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Operations a second of time inside the calls."""
        return self.operations / sum(self.seconds)


def _together(slices: Sequence[Calls]) -> Calls:
    """The calls of all slices."""
    return Calls(
        sum(each.operations for each in slices), tuple(itertools.chain(*(each.seconds for each in slices)))
    )


def timed(call: Callable[[], object]) -> float:
    """The seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Disk:
    """A raw file, a bare database, a store and a ledger in one directory."""

    def __init__(self, directory: Path) -> None:
        sys.setswitchinterval(GIL_SWITCH_SECONDS)  # As the server does.
        self._directory = directory
        directory.mkdir(parents=True)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._store = _opened(directory / "store")
        self._stored = 0
        self._threaded = 0
        self._commands = payload.commands("store")
        self._threaded_commands = payload.commands("thread")
        self._ledger: SqliteLedger = self._runner.run(_ledger(directory / "thread"))
        self._bare: BareSql | None = None

    def raw(self, seconds: float) -> Calls:
        """Append 1 KiB and fdatasync, again and again, for so long."""
        path = self._directory / "raw"
        data = os.urandom(APPEND_BYTES)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:

            def append() -> None:
                os.write(file, data)
                os.fdatasync(file)

            found = tuple(timed(append) for _ in _for(seconds))
        finally:
            os.close(file)
        assert path.stat().st_size == APPEND_BYTES * len(found)
        path.unlink()
        return Calls(len(found), found)

    def bare_sql(self, seconds: float) -> Calls:
        """Look up, insert the same rows and commit, one operation each, with no code of Muniment between."""
        if self._bare is None:
            self._warm_up()
            self._bare = BareSql(self._directory / "bare", self._directory / "store" / LEDGER_FILE)
        found = tuple(timed(self._bare.accept) for _ in _for(seconds))
        return Calls(len(found), found)

    def store(self, seconds: float, batch: int) -> Calls:
        """Commit so many operations at a time through ``SqliteStore``, on the thread that asks."""
        self._warm_up()
        found = []
        for _ in _for(seconds):
            asked = list(itertools.islice(self._commands, batch))
            found.append(timed(lambda asked=asked: self._commit(asked)))  # type: ignore[misc]
        return Calls(batch * len(found), tuple(found))

    def paced(self, seconds: float, commits_a_second: float, batch: float) -> Calls:
        """Commit at a given rate; ``batch`` operations a commit on average. Waiting is not counted."""
        self._warm_up()
        found: list[float] = []
        count, owed = 0, 0.0
        began = time.perf_counter()
        for number in itertools.count():
            due = began + number / commits_a_second
            if due > began + seconds:
                return Calls(count, tuple(found))
            time.sleep(max(0.0, due - time.perf_counter()))
            owed += batch
            asked = list(itertools.islice(self._commands, max(1, round(owed))))
            owed -= len(asked)
            count += len(asked)
            found.append(timed(lambda asked=asked: self._commit(asked)))  # type: ignore[misc]
        raise AssertionError

    def thread(self, seconds: float) -> Calls:
        """One operation a commit through ``SqliteLedger``: event loop, writer thread, event loop."""

        async def write() -> list[float]:
            found = []
            for _ in _for(seconds):
                asked = next(self._threaded_commands)
                began = time.perf_counter()
                admitted = await self._ledger.write(asked)
                found.append(time.perf_counter() - began)
                assert admitted.created
            return found

        found = tuple(self._runner.run(write()))
        self._threaded += len(found)
        return Calls(len(found), found)

    def turns(self, seconds: float, batch: int) -> dict[str, Calls]:
        """All in slices of a tenth of a second, for ``seconds`` each: what disturbs one disturbs all."""
        ways: dict[str, Callable[[], Calls]] = {
            "raw": lambda: self.raw(SLICE_SECONDS),
            "sql": lambda: self.bare_sql(SLICE_SECONDS),
            "store": lambda: self.store(SLICE_SECONDS, 1),
            "batch": lambda: self.store(SLICE_SECONDS, batch),
            "thread": lambda: self.thread(SLICE_SECONDS),
        }
        found: dict[str, list[Calls]] = {name: [] for name in ways}
        for number in range(max(1, round(seconds / SLICE_SECONDS))):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                found[name].append(ways[name]())
        return {name: _together(slices) for name, slices in found.items()}

    def lost(self) -> list[str]:
        """What was answered as stored and is not in the database, and the like."""
        found = []
        for name, known in (("store", self._stored), ("thread", self._threaded)):
            stored = count_operations(self._directory / name / LEDGER_FILE)
            if stored != known:
                found.append(f"ledger alone ({name}): {known} operations answered, {stored} in the database")
        return found

    def close(self) -> None:
        """Close what is open."""
        self._store.close()
        self._runner.run(self._ledger.close())
        self._runner.close()
        if self._bare is not None:
            self._bare.close()

    def _warm_up(self) -> None:
        if self._stored == 0:
            self._commit([next(self._commands)])

    def _commit(self, asked: list[command.Accept]) -> None:
        replies, _ = self._store.transact(asked)
        self._store.checkpoint(WAL_PAGES_MAX)
        assert all(reply.value.created for reply in replies)
        self._stored += len(asked)


def _for(seconds: float) -> Iterator[None]:
    """Go on until the time is over, at least once."""
    end = time.perf_counter() + seconds
    while True:
        yield
        if time.perf_counter() >= end:
            return


def _opened(directory: Path) -> SqliteStore:
    directory.mkdir()
    return SqliteStore.open(
        directory, stage.handle, lambda rows: stage.begin(rows, lineage="00", now=0), incarnation="bench"
    )


async def _ledger(directory: Path) -> SqliteLedger:
    def fatal(error: BaseException) -> None:
        raise error

    return SqliteLedger(_opened(directory), Batching(), fatal)


def count_operations(path: Path) -> int:
    """The operations in a ledger."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return int(str(connection.execute("SELECT count(*) FROM operation").fetchall()[0][0]))
    finally:
        connection.close()


class BareSql:
    """The same tables, the same statements, rows of the same size; written out, with nothing decided.

    The rows are those of one operation that the real ledger stored, with other numbers and another ID.
    """

    def __init__(self, directory: Path, model: Path) -> None:
        directory.mkdir()
        self._connection = apsw.Connection(str(directory / LEDGER_FILE))
        for pragma in (
            "page_size = 4096",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "secure_delete = ON",
            "wal_autocheckpoint = 0",
            "cache_size = -65536",
            "temp_store = MEMORY",
        ):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        for _, text in migrations():
            self._connection.execute(text)
        self._connection.execute("INSERT INTO account (n, key, created_us) VALUES (1, 'local', 0)")
        self._rows = _rows_of_one(model)
        self._number = 0
        self._wal_pages = 0
        self._connection.set_wal_hook(self._note_wal_pages)

    def accept(self) -> None:
        """One operation, one durable transaction."""
        self._number += 1
        number, name = self._number, f"bare-{self._number:09d}"
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        found = run(FIND, (ACCOUNT, name)).fetchall()
        assert not found
        for sql, row, places, id_at in self._rows:
            for place in places:
                row[place] = number
            if id_at is not None:
                row[id_at] = name
            run(sql, row)
        run("COMMIT")
        if self._wal_pages > WAL_PAGES_MAX:
            with suppress(apsw.BusyError):
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _note_wal_pages(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK


Copied = tuple[str, list[Any], list[int], int | None]
"""Statement, values, places of the number in them, place of the ID."""


def _rows_of_one(path: Path) -> list[Copied]:
    """One row of each table that an accepted memory is written to."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: list[Copied] = []
    try:
        for table in COPIED:
            cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1 DESC LIMIT 1")
            names = [column[0] for column in cursor.get_description()]
            row = list(next(iter(cursor)))
            sql = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            places = [place for place, name in enumerate(names) if name in NUMBERED]
            found.append((sql, row, places, names.index("id") if "id" in names else None))
    finally:
        connection.close()
    return found
