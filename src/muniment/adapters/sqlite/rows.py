"""Rows of one connection: the reads of the ledger port, and the appends of the writing connection."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import apsw

from muniment.adapters.sqlite.queries import statements
from muniment.core import replay
from muniment.core.replay import Insert, Meet, Update
from muniment.core.tables import TABLES, Row
from muniment.errors import InvariantBroken
from muniment.model.journal import AnyUnit
from muniment.model.operation import TERMINAL, State
from muniment.ports.ledger import HeldRows, JournalRow, SealedUnit

# An update is named by its table and by whether it ends an operation.
_UPDATES: Final[Mapping[tuple[str, bool], str]] = {
    ("operation", False): "step_operation",
    ("operation", True): "end_operation",
    ("part", False): "index_part",
    ("step", False): "complete_step",
}
_column_names: dict[str, tuple[str, ...]] = {}


class SqliteReads:
    """Reads through one connection; the caller holds the transaction that makes them consistent."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._sql = statements()

    def _each(self, name: str, /, **parameters: Any) -> Iterator[Row]:
        cursor = self._connection.execute(self._sql[name], parameters)
        names = _column_names.get(name)
        if names is None:
            try:
                names = tuple(column[0] for column in cursor.get_description())
            except apsw.ExecutionCompleteError:  # No row, so there is no description and nothing to name.
                return
            _column_names[name] = names
        for values in cursor:
            yield dict(zip(names, values, strict=True))

    def _all(self, name: str, /, **parameters: Any) -> list[Row]:
        return list(self._each(name, **parameters))

    def _one(self, name: str, /, **parameters: Any) -> Row | None:
        found = self._all(name, **parameters)
        return found[0] if found else None

    def _value(self, name: str, /, **parameters: Any) -> Any:
        return self._connection.execute(self._sql[name], parameters).fetchall()[0][0]

    # Store and journal

    def meta(self, key: str) -> str | None:
        row = self._one("get_meta", key=key)
        return None if row is None else str(row["value"])

    def head(self) -> tuple[int, bytes]:
        row = self._one("journal_head")
        return (0, replay.CHAIN_START) if row is None else (row["position"], row["chain"])

    def units(self, after: int, limit: int) -> list[JournalRow]:
        found = self._connection.execute(self._sql["journal_units"], {"after": after, "limit": limit})
        return [JournalRow(*values) for values in found]

    def rows(self, table: str) -> Iterator[Row]:
        return self._each(f"all_{table}")

    def attested(self, table: str) -> Iterator[Row]:
        return self._each(f"attested_{table}")

    # Finders

    def find_account(self, key: str) -> Row | None:
        return self._one("find_account", key=key)

    def account(self, n: int) -> Row | None:
        return self._one("account", n=n)

    def operation(self, n: int) -> Row | None:
        return self._one("operation", n=n)

    def find_operation(self, account_n: int, operation_id: str) -> Row | None:
        return self._one("find_operation", account_n=account_n, id=operation_id)

    def operations(
        self, account_n: int, *, state: str | None, kind: str | None, after: int, limit: int
    ) -> list[Row]:
        page = {"account_n": account_n, "kind": kind, "after": after, "limit": limit}
        if state is None or state == State.COMMITTED:
            return self._all("operations", state=state, **page)
        if state in TERMINAL:
            return self._all("operations_rejected", **page)
        return self._all("operations_unfinished", state=state, **page)

    def unfinished(self) -> list[Row]:
        return self._all("unfinished")

    def unsettled_dependents(self, account_n: int, operation_id: str) -> list[int]:
        found = self._all("unsettled_dependents", account_n=account_n, depends_on=operation_id)
        return [row["n"] for row in found]

    def has_dependents(self, account_n: int, operation_id: str) -> bool:
        return bool(self._value("has_dependents", account_n=account_n, depends_on=operation_id))

    def dependencies(self, operation_n: int) -> list[Row]:
        return self._all("dependencies", operation_n=operation_n)

    def events(self, operation_n: int, after: int, limit: int) -> list[Row]:
        return self._all("events", operation_n=operation_n, after=after, limit=limit)

    def evidence(self, operation_n: int, after: int = 0, limit: int | None = None) -> list[Row]:
        most = -1 if limit is None else limit  # SQLite takes -1 for no limit.
        return self._all("evidence", operation_n=operation_n, after=after, limit=most)

    def last_evidence(self, operation_n: int) -> Row | None:
        return self._one("last_evidence", operation_n=operation_n)

    def has_seen_end(self, operation_n: int, generation: int) -> bool:
        return bool(self._value("has_seen_end", operation_n=operation_n, generation=generation))

    def last_generation(self) -> int:
        return int(self._value("last_generation"))

    def payload(self, object_n: int) -> Row | None:
        return self._one("payload", object_n=object_n)

    def attribute(self, object_n: int) -> Row | None:
        return self._one("attribute", object_n=object_n)

    def model(self, n: int) -> Row | None:
        return self._one("model", n=n)

    def find_model(self, digest: str) -> Row | None:
        return self._one("find_model", digest=digest)

    def active_plan(self, object_n: int) -> Row | None:
        return self._one("active_plan", object_n=object_n)

    def parts(self, plan_n: int) -> list[Row]:
        return self._all("parts", plan_n=plan_n)

    def part(self, plan_n: int, part_index: int) -> Row | None:
        return self._one("part", plan_n=plan_n, part_index=part_index)

    def missing_parts(self, plan_n: int, after: int, limit: int) -> list[Row]:
        return self._all("missing_parts", plan_n=plan_n, after=after, limit=limit)

    def vectors(self, plan_n: int) -> list[Row]:
        return self._all("vectors", plan_n=plan_n)

    def find_memory(self, key: str) -> Row | None:
        return self._one("find_memory", key=key)

    def memory(self, object_n: int) -> Row | None:
        return self._one("memory", object_n=object_n)

    def memories(self, after: int, limit: int) -> list[Row]:
        return self._all("memories", after=after, limit=limit)

    def streams(self, account_n: int, name: str) -> list[Row]:
        return self._all("streams", account_n=account_n, name=name)

    def stream(self, object_n: int) -> Row | None:
        return self._one("stream", object_n=object_n)

    def steps(self, stream_n: int) -> list[Row]:
        return self._all("steps", stream_n=stream_n)

    def find_steps(self, account_n: int, idempotency_key: str) -> list[Row]:
        return self._all("find_steps", account_n=account_n, idempotency_key=idempotency_key)


class SqliteRows(SqliteReads):
    """The open write transaction: reads, and appends that keep tables and journal as one."""

    def __init__(self, connection: apsw.Connection) -> None:
        super().__init__(connection)
        self._next: dict[str, int] = {}
        self._head: tuple[int, bytes] | None = None
        self.sealed: list[SealedUnit] = []

    def forget(self) -> None:
        """Drop what was learned in a transaction that was rolled back."""
        self._next.clear()
        self._head = None
        self.sealed = []

    def take_sealed(self) -> list[SealedUnit]:
        """The units of the transaction that has just been committed."""
        sealed, self.sealed = self.sealed, []
        return sealed

    def head(self) -> tuple[int, bytes]:
        if self._head is None:
            self._head = super().head()
        return self._head

    def next_number(self, table: str) -> int:
        if table not in self._next:
            self._next[table] = int(self._value(f"last_{table}"))
        self._next[table] += 1
        return self._next[table]

    def append(self, unit: AnyUnit, held: HeldRows) -> None:
        for change in replay.changes(unit):
            self._apply(change, held)
        data = replay.encode(unit)
        position, chain = self.head()
        digest = replay.digest(data)
        self._head = (position + 1, replay.link(chain, digest))
        self._write(
            "insert_journal_unit", position=position + 1, bytes=data, digest=digest, chain=self._head[1]
        )
        self.sealed.append(SealedUnit(position=position + 1, unit=unit, held=held))

    def probe(self, now: int) -> None:
        self._write("write_probe", now=now)

    def set_meta(self, key: str, value: str) -> None:
        """Write a value of the meta table."""
        self._write("set_meta", key=key, value=value)

    def _write(self, name: str, /, **parameters: Any) -> None:
        self._connection.execute(self._sql[name], parameters)

    def _apply(self, change: replay.Change, held: HeldRows) -> None:
        match change:
            case Insert():
                table = TABLES[change.table]
                key = tuple(change.row[column] for column in table.key)
                extra = held.get((table.name, key), {})
                self._write(f"insert_{table.name}", **(dict.fromkeys(table.held) | change.row | extra))
            case Update():
                self._update(change)
            case Meet():
                named = {"account_n": change.account_n, "depends_on": change.depends_on}
                self._write("touch_dependents", at=change.at, **named)
                self._write("meet_dependencies", **named)

    def _update(self, change: Update) -> None:
        table = TABLES[change.table]
        ends = change.table == "operation" and "result" in change.values
        expected = {f"was_{column}": value for column, value in change.expected.items()}
        key = dict(zip(table.key, change.key, strict=True))
        self._write(_UPDATES[change.table, ends], **key, **change.values, **expected)
        if self._connection.changes() != 1:
            raise InvariantBroken(f"{change.table} {change.key} is not as the unit expects")
