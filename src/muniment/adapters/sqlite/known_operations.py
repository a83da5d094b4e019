"""Operations as the writing connection has left them, so that they need not be read again (ADR 0020).

There is one writer, so what it wrote is what is there. An operation that was accepted a moment ago is
validated next: its row is at hand. Bounded; what has ended is not kept. A transaction that is rolled back
empties it.
"""

from itertools import islice
from typing import Final

from muniment.core.tables import Row

OPERATIONS_KEPT: Final = 4096


class KnownOperations:
    """Rows by number and by ID, with the dependencies of those that were accepted here."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._dependencies: dict[int, list[Row]] = {}

    def row(self, n: int) -> Row | None:
        """An operation, by its number."""
        found = self._rows.get(n)
        return None if found is None else dict(found)

    def find(self, account_n: int, operation_id: str) -> Row | None:
        """An operation, by its ID."""
        n = self._numbers.get((account_n, operation_id))
        return None if n is None else self.row(n)

    def dependencies(self, n: int) -> list[Row] | None:
        """All dependencies of an operation; None where they are not known."""
        found = self._dependencies.get(n)
        return None if found is None else [dict(row) for row in found]

    def learn(self, row: Row) -> None:
        """Take a row that was read."""
        self._rows[row["n"]] = dict(row)
        self._numbers[row["account_n"], row["id"]] = row["n"]

    def add(self, row: Row) -> None:
        """Take the row of a new operation, whose dependencies come after it."""
        self.learn(row)
        self._dependencies[row["n"]] = []

    def add_dependency(self, row: Row) -> None:
        """Take a dependency of a new operation."""
        self._dependencies[row["operation_n"]].append(row)

    def change(self, n: int, values: Row) -> None:
        """Take new values of an operation."""
        if n in self._rows:
            self._rows[n] |= values

    def drop(self, n: int) -> None:
        """Forget an operation."""
        row = self._rows.pop(n, None)
        if row is not None:
            del self._numbers[row["account_n"], row["id"]]
        self._dependencies.pop(n, None)

    def shrink(self) -> None:
        """Forget the oldest beyond the bound."""
        for n in list(islice(self._rows, max(0, len(self._rows) - OPERATIONS_KEPT))):
            self.drop(n)

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._numbers.clear()
        self._dependencies.clear()
