"""A planted fault for ``bench.crash_import``: the server answers a POST, and commits it a moment later.

Loaded into a server process by the driver, never part of the package. A run over such a server must fail.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Final

from muniment.adapters.sqlite.connection import committing, translated
from muniment.adapters.sqlite.store import SqliteStore
from muniment.model import command

DELAY_SECONDS: Final = 0.03


def apply() -> None:
    """Move the COMMIT of every transaction that holds nothing but accepts behind its answers.

    The writer hands out the answers and then calls ``checkpoint``; that is where COMMIT is now.
    """
    transact, checkpoint = SqliteStore.transact, SqliteStore.checkpoint
    transaction = SqliteStore._transaction  # noqa: SLF001

    @contextmanager
    def uncommitted(self: Any) -> Any:
        with translated():
            self._connection.execute("BEGIN IMMEDIATE")
        yield

    def answered_first(self: Any, commands: Sequence[command.Command]) -> Any:
        early = all(isinstance(each, command.Accept | command.Probe) for each in commands)
        SqliteStore._transaction = uncommitted if early else transaction  # type: ignore[method-assign]  # noqa: SLF001
        return transact(self, commands)

    def committed_late(self: Any, *arguments: Any) -> None:
        if self._connection.in_transaction:
            time.sleep(DELAY_SECONDS)
            with committing():
                self._connection.execute("COMMIT")
        checkpoint(self, *arguments)

    SqliteStore.transact = answered_first  # type: ignore[method-assign]
    SqliteStore.checkpoint = committed_late  # type: ignore[method-assign]
