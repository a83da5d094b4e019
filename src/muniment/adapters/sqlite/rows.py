"""Rows of one connection: the reads of the ledger port, and the appends of the writing connection."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import apsw

from muniment.adapters.sqlite.known_operations import KnownOperations
from muniment.adapters.sqlite.new_rows import NewRows, Values
from muniment.adapters.sqlite.queries import parameters, repeated, statements, tables
from muniment.core import replay
from muniment.core.replay import Insert, Meet, Update
from muniment.core.tables import TABLES, Row
from muniment.errors import InvariantBroken
from muniment.model import journal
from muniment.model.journal import AnyUnit
from muniment.model.operation import TERMINAL, State
from muniment.ports.ledger import HeldRows, JournalRow, SealedUnit

# Values of a statement that changes operations, after number, state and sequence that are expected.
_STEP_COLUMNS: Final = parameters("step_operations")[3:]
_END_COLUMNS: Final = parameters("end_operations")[3:]
_UPDATES: Final[Mapping[str, str]] = {"part": "index_part", "step": "complete_step"}
# What an update needs to be there: its own row, and the row that it comes to refer to.
_NEEDED: Final[Mapping[str, frozenset[str]]] = {
    "part": frozenset({"part"}),
    "step": frozenset({"step", "attribute"}),
}
ROWS_MAX: Final = 64
"""Most rows of one statement; it has a power of two of them, so that few statements are ever prepared."""
LOOK_UP_MAX: Final = 256
"""Most IDs of one look-up: SQLite takes a bounded number of parameters, a batch may be of any size."""
# What is asked by these is known where it has changed, so nothing has to be written before.
_KNOWN_IF_CHANGED: Final = frozenset({"operation", "find_operation", "has_dependents"})
_column_names: dict[str, tuple[str, ...]] = {}


class SqliteReads:
    """Reads through one connection; the caller holds the transaction that makes them consistent."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._sql = statements()

    def _run(self, name: str, parameters: Row) -> apsw.Cursor:
        return self._connection.execute(self._sql[name], parameters)

    def _named(self, name: str, parameters: Row) -> tuple[apsw.Cursor, tuple[str, ...]]:
        """Rows to come, and the names of their columns."""
        cursor = self._run(name, parameters)
        names = _column_names.get(name, ())
        if not names:
            # Without a row there is no description, and nothing to name.
            with suppress(apsw.ExecutionCompleteError):
                names = tuple(column[0] for column in cursor.get_description())
                _column_names[name] = names
        return cursor, names

    def _each(self, name: str, /, **parameters: Any) -> Iterator[Row]:
        cursor, names = self._named(name, parameters)
        for values in cursor:
            yield dict(zip(names, values, strict=True))

    def _all(self, name: str, /, **parameters: Any) -> list[Row]:
        cursor, names = self._named(name, parameters)
        return [dict(zip(names, values, strict=True)) for values in cursor]

    def _one(self, name: str, /, **parameters: Any) -> Row | None:
        found = self._all(name, **parameters)
        return found[0] if found else None

    def _value(self, name: str, /, **parameters: Any) -> Any:
        return self._run(name, parameters).fetchall()[0][0]

    # Store and journal

    def meta(self, key: str) -> str | None:
        row = self._one("get_meta", key=key)
        return None if row is None else str(row["value"])

    def head(self) -> tuple[int, bytes]:
        row = self._one("journal_head")
        return (0, replay.CHAIN_START) if row is None else (row["position"], row["chain"])

    def units(self, after: int, limit: int) -> list[JournalRow]:
        found = self._run("journal_units", {"after": after, "limit": limit})
        return [JournalRow(*values) for values in found]

    def rows(self, table: str) -> Iterator[Row]:
        return self._each(f"all_{table}")

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
    """The open write transaction: reads, and appends that keep tables and journal as one.

    New rows are collected (``new_rows``); every read finds them, and ``flush`` writes the last of them.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        super().__init__(connection)
        self._next: dict[str, int] = {}
        self._head: tuple[int, bytes] | None = None
        self._new = NewRows()
        self._known = KnownOperations()
        self._changed: dict[int, tuple[bool, Values]] = {}
        """Changes of operations that are not in their table yet: whether it is an end, and the values."""
        self._absent: set[tuple[int, str]] = set()
        self.sealed: list[SealedUnit] = []

    def forget(self) -> None:
        """Drop what was learned in a transaction that was rolled back."""
        self._next.clear()
        self._head = None
        self._new.clear()
        self._known.clear()
        self._changed.clear()
        self._absent.clear()
        self.sealed = []

    def take_sealed(self) -> list[SealedUnit]:
        """The units of the transaction that has just been committed."""
        sealed, self.sealed = self.sealed, []
        self._absent.clear()
        for each in sealed:
            if isinstance(each.unit, journal.Commit | journal.Reject):
                self._known.drop(each.unit.n)
        self._known.shrink()
        return sealed

    # Reads of a transaction with new rows

    def _run(self, name: str, parameters: Row) -> apsw.Cursor:
        if name not in _KNOWN_IF_CHANGED:
            self._settle(tables(name))
        return self._connection.execute(self._sql[name], parameters)

    def _settle(self, wanted: frozenset[str]) -> None:
        """Write what waits if some of it belongs to these tables."""
        if not wanted.isdisjoint(self._new.tables) or (self._changed and "operation" in wanted):
            self.flush()

    def look_up(self, named: Collection[tuple[int, str]]) -> None:
        """Find out together which of these operations, by account and ID, are not stored."""
        asked = [*named]
        self._absent = {*asked}
        for first in range(0, len(asked), LOOK_UP_MAX):
            some = asked[first : first + LOOK_UP_MAX]
            size = 1 << (len(some) - 1).bit_length()
            values = tuple(chain.from_iterable(some + some[-1:] * (size - len(some))))
            self._absent.difference_update(
                self._connection.execute(repeated("stored_operations", size), values)
            )

    def operation(self, n: int) -> Row | None:
        known = self._known.row(n)
        return known if known is not None else self._learnt(super().operation(n))

    def find_operation(self, account_n: int, operation_id: str) -> Row | None:
        known = self._known.find(account_n, operation_id)
        if known is not None or (account_n, operation_id) in self._absent:
            return known
        return self._learnt(super().find_operation(account_n, operation_id))

    def _learnt(self, row: Row | None) -> Row | None:
        if row is not None:
            self._known.learn(row)
        return row

    def dependencies(self, n: int) -> list[Row]:
        known = self._known.dependencies(n)
        return super().dependencies(n) if known is None else known

    def has_dependents(self, account_n: int, operation_id: str) -> bool:
        return self._new.awaits(account_n, operation_id) or super().has_dependents(account_n, operation_id)

    def head(self) -> tuple[int, bytes]:
        if self._head is None:
            self._head = super().head()
        return self._head

    # Writes

    def next_number(self, table: str) -> int:
        if table not in self._next:
            self._next[table] = int(self._value(f"last_{table}"))
        self._next[table] += 1
        return self._next[table]

    def append(self, unit: AnyUnit, held: HeldRows) -> None:
        for change in replay.changes(unit):
            match change:
                case Insert():
                    self._add(change, held)
                case Update():
                    self._update(change)
                case Meet():
                    self._meet(change)
        data = replay.encode(unit)
        position, before = self.head()
        digest = replay.digest(data)
        self._head = (position + 1, replay.link(before, digest))
        self._new.add_unit(position + 1, data, digest, self._head[1])
        self.sealed.append(SealedUnit(position=position + 1, unit=unit, held=held))

    def _add(self, new: Insert, held: HeldRows) -> None:
        self._new.add(new, held)
        if new.table == "operation":
            self._known.add(new.row)
        elif new.table == "dependency":
            self._known.add_dependency(new.row)

    def flush(self) -> None:
        """Write everything that is not in its table yet."""
        for name, rows in self._new.take():
            self._insert(name, rows)
        if self._changed:
            self._write_changes()

    def probe(self, now: int) -> None:
        self._write("write_probe", now=now)

    def set_meta(self, key: str, value: str) -> None:
        """Write a value of the meta table."""
        self._write("set_meta", key=key, value=value)

    def _write(self, name: str, /, **parameters: Any) -> None:
        self._connection.execute(self._sql[name], parameters)

    def _insert(self, name: str, rows: Sequence[Values]) -> None:
        for _ in self._many(name, rows):
            pass

    def _many(self, name: str, rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
        """Run a statement on all rows, as many at once as may be; tell after each run which they were."""
        first, count = 0, len(rows)
        while first < count:
            size = min(1 << (count - first).bit_length() - 1, ROWS_MAX)
            some = rows[first : first + size]
            self._connection.execute(repeated(name, size), tuple(chain.from_iterable(some)))
            yield some
            first += size

    def _write_changes(self) -> None:
        changed, self._changed = self._changed, {}
        for ends, name in ((False, "step_operations"), (True, "end_operations")):
            for some in self._many(name, [values for each, values in changed.values() if each is ends]):
                if self._connection.changes() != len(some):
                    raise InvariantBroken(f"one of {len(some)} operations is not as its unit expects")

    def _update(self, change: Update) -> None:
        if change.table == "operation":
            self._update_operation(change)
            return
        table = TABLES[change.table]
        self._settle(_NEEDED[change.table])
        expected = {f"was_{column}": value for column, value in change.expected.items()}
        key = dict(zip(table.key, change.key, strict=True))
        self._write(_UPDATES[change.table], **key, **change.values, **expected)
        if self._connection.changes() != 1:
            raise _unexpected(change)

    def _update_operation(self, change: Update) -> None:
        """Put off the change of an operation whose row is known; it stays conditional when it is written."""
        [n] = change.key
        row = self.operation(n)
        if row is None or any(row[column] != value for column, value in change.expected.items()):
            raise _unexpected(change)
        if n in self._changed:
            self.flush()
        ends = "result" in change.values
        columns = _END_COLUMNS if ends else _STEP_COLUMNS
        self._changed[n] = (ends, (n, *change.expected.values(), *[change.values[name] for name in columns]))
        self._known.change(n, change.values)

    def _meet(self, change: Meet) -> None:
        if not self.has_dependents(change.account_n, change.depends_on):
            return
        waiting = self._all("meet_dependencies", account_n=change.account_n, depends_on=change.depends_on)
        for n in {row["operation_n"] for row in waiting}:
            self._write("touch_operation", n=n, at=change.at)
            self._known.drop(n)


def _unexpected(change: Update) -> InvariantBroken:
    return InvariantBroken(f"{change.table} {change.key} is not as the unit expects")
