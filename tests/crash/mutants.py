"""What the proof of the crash tests must notice: each mutant breaks one promise, in the child or in recovery too."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import apsw

from muniment.adapters.sqlite import store as store_module
from muniment.adapters.sqlite.rows import SqliteRows
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core.tables import Row
from muniment.model import command
from muniment.model.command import Command
from muniment.ports.ledger import Ledger, Reply
from muniment.stages import execute, ledger
from tests.crash.workloads import Driver

Patches = Callable[[contextlib.ExitStack], None]


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
                rows._connection.execute(statement, {"n": asked.n})
            return value

        _replaced(stack, ledger, "handle", meddle)

    return patch


def two_memories(stack: contextlib.ExitStack) -> None:
    """A commit makes its memory twice. The schema refuses that, so the mutant has another schema."""
    texts = [
        (number, text.replace("operation_n INTEGER NOT NULL UNIQUE REFERENCES", "operation_n INTEGER REFERENCES"))
        for number, text in store_module.migrations()
    ]
    _replaced(stack, store_module, "migrations", lambda: texts)
    opened = store_module.open_writer

    def unchecked(*given: Any) -> apsw.Connection:
        connection = opened(*given)
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

    async def all_parts(of: Ledger, plan: int) -> list[Row]:
        return await of.read(lambda reads: reads.parts(plan))

    _replaced(stack, execute, "missing", all_parts)


def _split_before(statement: str) -> Patches:
    """Commit what there is before one statement of a unit: two transactions where one is promised."""

    def patch(stack: contextlib.ExitStack) -> None:
        write = SqliteRows._write

        def split(self: SqliteRows, name: str, /, **parameters: Any) -> None:
            if name == statement and self.head()[0] > 1:
                self._connection.execute("COMMIT")
                self._connection.execute("BEGIN IMMEDIATE")
            write(self, name, **parameters)

        _replaced(stack, SqliteRows, "_write", split)

    return patch


def rolled_back_and_acknowledged(stack: contextlib.ExitStack) -> None:
    """A transaction that writes the plan is rolled back, and its caller hears that it was kept."""

    @contextlib.contextmanager
    def forgetful(self: SqliteStore) -> Iterator[None]:
        with transaction(self):
            yield
            if any(unit.unit.__struct_config__.tag == "plan" for unit in self._rows.sealed):
                self._connection.execute("ROLLBACK")
                self._connection.execute("BEGIN IMMEDIATE")

    transaction = SqliteStore._transaction
    _replaced(stack, SqliteStore, "_transaction", forgetful)


MUTANTS: Final[Mapping[str, Patches]] = {
    "acknowledge before commit": acknowledge_before_commit,
    "two memories": two_memories,
    "two events": two_events,
    "commit without effect": commit_without_effect,
    "skip rule removed": skip_rule_removed,
    "journal apart from tables": _split_before("insert_journal_unit"),
    "event apart from state": _split_before("insert_event"),
    "rolled back and acknowledged": rolled_back_and_acknowledged,
}
