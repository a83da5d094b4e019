"""``muniment check``: whether a data directory holds what was promised, read-only (rulings 12 and 13).

The file is verified by SQLite, the journal by its digests and chain, the tables by folding the journal,
and every operation by ``core.verification``. A file that is damaged is a finding, whatever the damage. It
may run beside the process that owns the directory: all is read in one transaction, which sees one state
and keeps nobody from writing, but keeps the write-ahead log from being recycled for as long as it runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import apsw
import msgspec
import orjson

from muniment.adapters.files.directory import owner
from muniment.adapters.sqlite.connection import READER_BUSY_MS, open_reader
from muniment.adapters.sqlite.queries import migrations, statements
from muniment.adapters.sqlite.rows import SqliteReads
from muniment.adapters.sqlite.store import LEDGER_FILE
from muniment.core import replay, verification
from muniment.core.replay import Outcome
from muniment.core.tables import TABLES, Row
from muniment.core.verification import Chain, Found, Problem, named
from muniment.errors import MunimentError
from muniment.model.operation import State
from muniment.ports.ledger import Reads

JOURNAL_PAGE: Final = 1000
EVENTS_MAX: Final = 1000
NOWHERE: Final = "-"
"""Stands for the table or row of a finding about a whole file or table."""
_TYPES: Final[Mapping[str, type]] = {"INTEGER": int, "TEXT": str, "BLOB": bytes}


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, and where; ``row`` names key columns with their values."""

    file: str
    table: str
    row: str
    problem: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a data directory holds. Without findings it is whole; a digest that cannot be made is empty."""

    findings: tuple[Finding, ...]
    operations: int
    memories: int
    position: int
    state_digest: str
    outcome_digest: str
    lineage: str
    owned_by: str | None
    """URL of the process that owned the directory meanwhile."""


def check(path: Path) -> Report:
    """Verify a data directory that nobody owns, or a consistent state of one that is owned.

    Changes nothing. Every damage is a finding of the report; nothing is raised for it. The fold of the
    journal is held in memory; payloads and vectors are read one operation at a time.
    """
    found_owner = owner(path)
    verifier = _Verifier(path / LEDGER_FILE)
    verifier.run()
    return verifier.report(None if found_owner is None else found_owner.url)


def outcomes(reads: Reads) -> Iterator[Outcome]:
    """What became of every operation, as it was accepted; ``replay.outcome_digest`` sorts them by ID."""
    objects: defaultdict[int, list[str]] = defaultdict(list)
    for table in ("memory", "stream", "step"):
        for row in reads.rows(table):
            objects[row["operation_n"]].append(row["key"])
    accounts = {row["n"]: row["key"] for row in reads.rows("account")}
    for row in reads.rows("operation"):
        plan = reads.active_plan(row["object_n"])
        model = None if plan is None else reads.model(plan["model_n"])
        yield Outcome(
            account=accounts[row["account_n"]],
            operation_id=row["id"],
            kind=row["kind"],
            payload_hash=row["payload_hash"],
            state=State(row["state"]),
            result=None if row["result"] is None else orjson.loads(row["result"]),
            error=row["error"],
            objects=tuple(objects[row["n"]]),
            source_digest=verification.source_digest(reads.payload(row["object_n"])),
            plan_ranges=tuple(
                (part["token_start"], part["token_end"], part["byte_start"], part["byte_end"])
                for part in (reads.parts(plan["n"]) if plan is not None else ())
            ),
            model_digest=None if model is None else model["digest"],
        )


class _Verifier:
    """One run over one ledger file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._findings: dict[Finding, None] = {}
        self._chain = Chain()
        self._readable = True
        self._operations = self._memories = 0
        self._state_digest = self._outcome_digest = ""

    def report(self, owned_by: str | None) -> Report:
        return Report(
            findings=tuple(self._findings),
            operations=self._operations,
            memories=self._memories,
            position=self._chain.position,
            state_digest=self._state_digest,
            outcome_digest=self._outcome_digest,
            lineage=self._chain.lineage,
            owned_by=owned_by,
        )

    def run(self) -> None:
        if not self._path.is_file():
            self._find("there is no such file")
            return
        with self._reading(), closing(_open(self._path)) as connection:
            connection.execute("BEGIN")
            self._verify(connection)

    def _find(self, problem: str, table: str = NOWHERE, row: str = NOWHERE) -> None:
        self._findings[Finding(self._path.name, table, row, problem)] = None

    def _take(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._find(problem.text, problem.table, problem.row)

    @contextmanager
    def _reading(self, table: str = NOWHERE, row: str = NOWHERE) -> Iterator[None]:
        """Whatever a damaged file does to a read is a finding."""
        try:
            yield
        except (MunimentError, apsw.Error, UnicodeDecodeError) as error:
            self._readable = False
            self._find(f"cannot be read: {error}", table, row)

    def _verify(self, connection: apsw.Connection) -> None:
        reads = SqliteReads(connection)
        schema = _schema()
        if not self._format_is_known(connection, reads):
            return
        self._check_definitions(connection, schema)
        self._check_file(connection)
        with self._reading(verification.JOURNAL):
            self._check_journal(reads)
        digest = replay.state_digest((table, self._rows(reads, table, schema)) for table in TABLES)
        if not self._readable:
            return  # What rows mean together is asked only where every row is what it should be in itself.
        self._state_digest = digest
        with self._reading():
            self._check_operations(reads)
            self._check_objects(reads)
        if not self._findings:
            self._outcome_digest = replay.outcome_digest(outcomes(reads))

    # The file

    def _format_is_known(self, connection: apsw.Connection, reads: SqliteReads) -> bool:
        """Whether this program knows what to look for. Without that there is one finding and no more."""
        known = [number for number, _ in migrations()]
        version = connection.execute("PRAGMA user_version").fetchall()[0][0]
        if version != known[-1]:
            self._find(f"has format {version}, this program knows {known[-1]}")
            return False
        with self._reading("meta"):
            for key, expected in (("format", str(version)), ("incarnation", None)):
                value = reads.meta(key)
                if value is None or value != (expected or value):
                    self._find(f"is {value}, expected {expected or 'any'}", "meta", f"key {key}")
        return True

    def _check_definitions(self, connection: apsw.Connection, schema: "_Schema") -> None:
        with self._reading("sqlite_schema"):
            stored = _definitions(connection)
            for kind, name in sorted(stored.keys() | schema.definitions.keys()):
                if stored.get((kind, name)) != schema.definitions.get((kind, name)):
                    self._find("is not defined as in the schema of this format", name, kind)

    def _check_file(self, connection: apsw.Connection) -> None:
        with self._reading():
            for (text,) in connection.execute("PRAGMA integrity_check"):
                if text != "ok":
                    self._find(f"integrity check: {text}")
            for table, rowid, parent, _ in connection.execute("PRAGMA foreign_key_check"):
                self._find(f"refers to a row of {parent} that is missing", table, f"rowid {rowid}")

    # Journal and tables

    def _check_journal(self, reads: SqliteReads) -> None:
        after = 0
        while page := reads.units(after, JOURNAL_PAGE):
            for each in page:
                if each.position <= after:  # A damaged tree may lead round in circles.
                    self._find(
                        f"stands after position {after}", verification.JOURNAL, f"position {each.position}"
                    )
                    self._chain.folded = None
                    return
                after = each.position
                self._take(self._chain.follow(each.position, each.data, each.digest, each.chain))
        if self._chain.position == 0:
            self._find("is empty, a history begins with one genesis unit", verification.JOURNAL)

    def _rows(self, reads: SqliteReads, table: str, schema: "_Schema") -> Iterator[Row]:
        """Every row of a table that has the declared types, compared with the journal on its way."""
        folded = None if self._chain.folded is None else self._chain.folded.rows[table]
        at = "the first row"
        try:
            for row in reads.rows(table):
                wrong = list(verification.types(table, row, schema.columns[table]))
                self._take(wrong)
                if wrong:
                    self._readable = False
                    continue
                if folded is not None:
                    self._take(verification.difference(table, row, folded))
                if "salt" in row:
                    self._take(verification.held(table, row, row["salt"]))
                at = f"the row after {named(table, row)}"
                yield row
        except (apsw.Error, UnicodeDecodeError) as error:
            self._readable = False
            self._find(f"cannot be read: {error}", table, at)
        else:
            self._take(verification.missing(table, folded or {}))

    # What belongs together

    def _check_operations(self, reads: SqliteReads) -> None:
        committed = {
            (row["account_n"], row["id"])
            for row in reads.rows("operation")
            if row["state"] == State.COMMITTED
        }
        for row in reads.rows("operation"):
            self._operations += 1
            self._take(verification.operation(_found(reads, row), committed))
        self._take(verification.sequence(reads.evidence(verification.STORE)))

    def _check_objects(self, reads: SqliteReads) -> None:
        accounts = {row["n"]: row["key"] for row in reads.rows("account")}
        for table in ("memory", "stream", "step"):
            for row in reads.rows(table):
                self._memories += table == "memory"
                maker = reads.operation(row["operation_n"])
                account_key = None if maker is None else accounts.get(maker["account_n"])
                attribute = reads.attribute(row["object_n"])
                self._take(verification.made(table, row, maker, account_key, attribute))
        self._take(verification.completions(reads.rows("step")))


def _open(path: Path) -> apsw.Connection:
    """A connection that writes nothing, and takes away at its end the files that only reading has made.

    A log that is there already is some other process's, or what a crash left: only its owner copies it back.
    """
    if path.with_name(f"{path.name}-wal").exists():
        return open_reader(path)
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(READER_BUSY_MS)
    connection.execute("PRAGMA query_only = ON").fetchall()
    return connection


def _found(reads: SqliteReads, row: Row) -> Found:
    n, object_n = row["n"], row["object_n"]
    plan = reads.active_plan(object_n)
    return Found(
        row=row,
        dependencies=reads.dependencies(n),
        events=reads.events(n, 0, EVENTS_MAX),
        evidence=reads.evidence(n),
        attribute=reads.attribute(object_n),
        payload=reads.payload(object_n),
        plan=plan,
        parts=[] if plan is None else reads.parts(plan["n"]),
        vectors=[] if plan is None else reads.vectors(plan["n"]),
        model=None if plan is None else reads.model(plan["model_n"]),
        memory=reads.memory(object_n),
    )


class _Schema(msgspec.Struct, frozen=True):
    """What the migrations make: definitions by type and name, columns by table with type and NOT NULL."""

    definitions: Mapping[tuple[str, str], str]
    columns: Mapping[str, Mapping[str, tuple[type, bool]]]


def _schema() -> _Schema:
    with closing(apsw.Connection(":memory:")) as connection:
        for _, text in migrations():
            connection.execute(text)
        return _Schema(_definitions(connection), {table: _columns(connection, table) for table in TABLES})


def _definitions(connection: apsw.Connection) -> dict[tuple[str, str], str]:
    found = connection.execute(statements()["definitions"])
    return {(kind, name): sql for kind, name, sql in found}


def _columns(connection: apsw.Connection, table: str) -> dict[str, tuple[type, bool]]:
    found = connection.execute(f"PRAGMA table_info({table})")
    return {name: (_TYPES[kind], bool(required or key)) for _, name, kind, required, _, key in found}
