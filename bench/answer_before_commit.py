"""A planted fault for ``bench.crash_import``: the server answers a POST, and commits it a moment later.

Loaded into a server process by the driver, never part of the package. A run over such a server must fail.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from muniment.adapters.sqlite.store import SqliteStore
from muniment.model import command

DELAY_SECONDS: Final = 0.02


def apply() -> None:
    """Move the COMMIT of every transaction that holds nothing but accepts behind its answers.

    The writer hands out the answers and then calls ``checkpoint``; that is where COMMIT is now.
    """
    transact, checkpoint = SqliteStore.transact, SqliteStore.checkpoint
    whole = SqliteStore.__dict__["_transaction"]

    @contextmanager
    def begun(self: Any) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        yield

    def answered_first(self: Any, commands: Sequence[command.Command]) -> Any:
        late = all(isinstance(each, command.Accept) for each in commands)
        setattr(SqliteStore, "_transaction", begun if late else whole)  # noqa: B010 not for mypy: a private method
        return transact(self, commands)

    def committed_late(self: Any, wal_pages_max: int) -> None:
        if self._connection.in_transaction:
            time.sleep(DELAY_SECONDS)
            self._connection.execute("COMMIT")
        checkpoint(self, wal_pages_max)

    SqliteStore.transact = answered_first  # type: ignore[method-assign]
    SqliteStore.checkpoint = committed_late  # type: ignore[method-assign]
