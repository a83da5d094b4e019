"""What the proof must notice: each mutant breaks one promise, in the child that is killed and in recovery."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import apsw

from muniment.adapters.sqlite import store as store_module
from muniment.adapters.sqlite.connection import open_writer
from muniment.adapters.sqlite.new_rows import Values
from muniment.adapters.sqlite.queries import migrations
from muniment.adapters.sqlite.rows import SqliteRows
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core.ingestion import Piece
from muniment.model import command
from muniment.model.command import Command
from muniment.ports.ledger import Ledger, Reply, SealedUnit
from muniment.stages import execute, ledger
from tests.crash.workloads import Driver

Patches = Callable[[contextlib.ExitStack], None]
FIRST_UNITS: Final = 2
"""What a new history begins with."""


def _replaced(stack: contextlib.ExitStack, target: object, name: str, value: object) -> None:
    stack.enter_context(mock.patch.object(target, name, value))


def acknowledge_before_commit(stack: contextlib.ExitStack) -> None:
    """The caller hears as soon as the handler is done, while the transaction is open."""
    transact = Driver.transact

    def early(self: Driver, commands: Sequence[Command]) -> list[Reply]:
        handle = self._store._handle

        def answer(rows: Any, asked: Command) -> Any:
            value = handle(rows, asked)
            self.answered(asked, Reply(value))
            return value

        with mock.patch.object(self._store, "_handle", answer):
            return transact(self, commands)

    _replaced(stack, Driver, "transact", early)


def _after_commit_memory(statement: str) -> Patches:
    """Run a statement of SQL in the transaction that commits a memory, behind the handler's back."""

    def patch(stack: contextlib.ExitStack) -> None:
        handle = ledger.handle

        def meddle(rows: SqliteRows, asked: Command) -> Any:
            value = handle(rows, asked)
            if isinstance(asked, command.CommitMemory):
                rows.flush()
                rows._connection.execute(statement, {"n": asked.n})
            return value

        _replaced(stack, ledger, "handle", meddle)

    return patch


def two_memories(stack: contextlib.ExitStack) -> None:
    """A commit makes its memory twice. The schema refuses that, so the mutant has another schema."""
    unique, free = "operation_n INTEGER NOT NULL UNIQUE REFERENCES", "operation_n INTEGER REFERENCES"
    texts = [(number, text.replace(unique, free)) for number, text in migrations()]
    _replaced(stack, store_module, "migrations", lambda: texts)

    def unchecked(*given: Any) -> apsw.Connection:
        connection = open_writer(*given)
        connection.execute("PRAGMA foreign_keys = OFF")
        return connection

    _replaced(stack, store_module, "open_writer", unchecked)
    _after_commit_memory(
        "INSERT INTO memory (object_n, key, operation_n, plan_n, visibility, recorded_us) "
        "SELECT object_n + 1000, key || '2', operation_n, plan_n, visibility, recorded_us FROM memory "
        "WHERE operation_n = :n"
    )(stack)


two_events = _after_commit_memory(
    "INSERT INTO event SELECT operation_n, sequence + 1, to_state, to_state, detail, executor_generation, "
    "occurred_us FROM event WHERE operation_n = :n ORDER BY sequence DESC LIMIT 1"
)
"""A commit is recorded twice."""

commit_without_effect = _after_commit_memory("DELETE FROM memory WHERE operation_n = :n")
"""The receipt says committed and the memory is not there."""


def skip_rule_removed(stack: contextlib.ExitStack) -> None:
    """Parts that have their vector are embedded again."""

    async def all_parts(of: Ledger, plan: int, *, after: int, limit: int) -> tuple[Piece, ...]:
        rows = await of.read(lambda reads: reads.parts(plan))
        return tuple(
            Piece(
                row["part_index"], row["token_end"] - row["token_start"], row["byte_start"], row["byte_end"]
            )
            for row in rows
        )

    _replaced(stack, execute, "missing", all_parts)


def _another_transaction(rows: SqliteRows) -> None:
    """Commit what there is, but in what begins a history: two transactions where one is promised."""
    if rows.head()[0] > FIRST_UNITS:
        rows._connection.execute("COMMIT")
        rows._connection.execute("BEGIN IMMEDIATE")


def journal_apart_from_tables(stack: contextlib.ExitStack) -> None:
    """The journal is committed before the rows that it tells of."""
    flush = SqliteRows.flush

    def apart(self: SqliteRows) -> None:
        if units := self._new.tables.pop("journal_unit", []):
            self._insert("insert_journal_unit", units)
            _another_transaction(self)
        flush(self)

    _replaced(stack, SqliteRows, "flush", apart)


def event_apart_from_state(stack: contextlib.ExitStack) -> None:
    """The state of an operation is committed before the event that tells of it."""
    insert = SqliteRows._insert

    def apart(self: SqliteRows, name: str, rows: Sequence[Values]) -> None:
        if name == "insert_event":
            self._write_changes()
            _another_transaction(self)
        insert(self, name, rows)

    _replaced(stack, SqliteRows, "_insert", apart)


class _UndoneError(Exception):
    """Carries out of a transaction what its caller is told all the same."""


def rolled_back_and_acknowledged(stack: contextlib.ExitStack) -> None:
    """The transaction that commits a memory is rolled back, and everybody hears that it was kept."""
    transact = SqliteStore.transact

    def forgetful(self: SqliteStore, commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]:
        if not any(isinstance(asked, command.CommitMemory) for asked in commands):
            return transact(self, commands)
        try:
            with self._transaction():
                raise _UndoneError(
                    [Reply(ledger.handle(self._rows, asked)) for asked in commands], self._rows.sealed
                )
        except _UndoneError as undone:
            replies, sealed = undone.args
            return replies, sealed

    _replaced(stack, SqliteStore, "transact", forgetful)


MUTANTS: Final[Mapping[str, Patches]] = {
    "acknowledge before commit": acknowledge_before_commit,
    "two memories": two_memories,
    "two events": two_events,
    "commit without effect": commit_without_effect,
    "skip rule removed": skip_rule_removed,
    "journal apart from tables": journal_apart_from_tables,
    "event apart from state": event_apart_from_state,
    "rolled back and acknowledged": rolled_back_and_acknowledged,
}
