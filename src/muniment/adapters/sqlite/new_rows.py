"""New rows of the open transaction that are not in their tables yet (ADR 0020).

A statement costs more than its row: it lets go of the interpreter's lock and has to get it back. So rows are
collected, and written many a statement. Whoever reads must not notice: ``SqliteRows`` writes them before it
reads or updates a table that some of them belong to, and asks here for what accepting looks up.
"""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Final, cast

import msgspec

from muniment.adapters.sqlite.queries import parameters
from muniment.core.replay import Insert
from muniment.core.tables import TABLES, Key, Row, Table
from muniment.ports.ledger import HeldRows

Values = tuple[Any, ...]

INSERTS: Final = (
    "insert_account",
    "insert_model",
    "insert_operation",
    "insert_dependency",
    "insert_event",
    "insert_evidence",
    "insert_attribute",
    "insert_payload",
    "insert_plan",
    "insert_part",
    "insert_vector",
    "insert_memory",
    "insert_stream",
    "insert_step",
    "insert_journal_unit",
)
"""In the order in which they run: a row that refers to another one comes after it."""
_PLACES: Final = {name.removeprefix("insert_"): place for place, name in enumerate(INSERTS)}


class NewRows:
    """The rows by table, in the order of their units."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Values]] = {}
        self._awaited: set[tuple[int, str]] = set()

    def add(self, new: Insert, held: HeldRows) -> None:
        """Take a row with its held columns, null where ``held`` has none."""
        table, row = new.table, new.row
        shape = _SHAPES[table]
        values = shape.attested(row)
        if shape.held:
            extra = held.get((table, shape.key(row)), {})
            values += tuple([extra.get(name) for name in shape.held])
        self._list(table).append(values)
        if table == "dependency":
            self._awaited.add((row["account_n"], row["depends_on"]))

    def add_unit(self, position: int, data: bytes, digest: bytes, chain: bytes) -> None:
        """Take a journal row."""
        self._list("journal_unit").append((position, data, digest, chain))

    def awaits(self, account_n: int, operation_id: str) -> bool:
        """Whether a new operation names this ID as a dependency."""
        return (account_n, operation_id) in self._awaited

    def clear(self) -> None:
        """Forget all rows."""
        self.tables.clear()
        self._awaited.clear()

    def take(self) -> list[tuple[str, list[Values]]]:
        """Give up all rows, under the names of their inserts, in the order of ``INSERTS``."""
        taken, self.tables = self.tables, {}
        self.clear()
        return [(INSERTS[_PLACES[table]], taken[table]) for table in sorted(taken, key=_PLACES.__getitem__)]

    def _list(self, table: str) -> list[Values]:
        rows = self.tables.get(table)
        if rows is None:
            rows = self.tables[table] = []
        return rows


class _Shape(msgspec.Struct, frozen=True):
    """How a row of one table becomes the values of its insert statement: attested columns, then held ones."""

    key: Callable[[Row], Key]
    attested: Callable[[Row], Values]
    held: tuple[str, ...]


def _shape(table: Table) -> _Shape:
    attested = table.key + table.attested
    assert parameters(f"insert_{table.name}") == attested + table.held, table.name
    return _Shape(_getter(table.key), _getter(attested), table.held)


def _getter(columns: tuple[str, ...]) -> Callable[[Row], Values]:
    if len(columns) == 1:
        [name] = columns
        return lambda row: (row[name],)
    return cast("Callable[[Row], Values]", itemgetter(*columns))


_SHAPES: Final[Mapping[str, _Shape]] = {name: _shape(table) for name, table in TABLES.items()}
