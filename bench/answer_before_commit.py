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
    """Move the COMMIT of every accepted operation behind its answer; all other work is committed as ever.

    The writer hands out the answers and then calls ``checkpoint``; that is where the COMMIT is now.
    """
    transact, checkpoint = SqliteStore.transact, SqliteStore.checkpoint
    whole = SqliteStore.__dict__["_transaction"]

    @contextmanager
    def begun(self: Any) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        yield

    def answered_first(self: Any, commands: Sequence[command.Command]) -> Any:
        accepts = [each for each in commands if isinstance(each, command.Accept)]
        others = [each for each in commands if not isinstance(each, command.Accept)]
        replies, sealed = transact(self, others) if others else ([], [])
        if accepts:
            setattr(SqliteStore, "_transaction", begun)  # noqa: B010 mypy would ask for the type of a method
            first, added = transact(self, accepts)
            setattr(SqliteStore, "_transaction", whole)  # noqa: B010
            replies, sealed = [*first, *replies], [*sealed, *added]
        return replies, sealed

    def committed_late(self: Any, wal_pages_max: int) -> None:
        if self._connection.in_transaction:
            time.sleep(DELAY_SECONDS)
            self._connection.execute("COMMIT")
        checkpoint(self, wal_pages_max)

    SqliteStore.transact = answered_first  # type: ignore[method-assign]
    SqliteStore.checkpoint = committed_late  # type: ignore[method-assign]
