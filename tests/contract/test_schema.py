"""The SQLite schema, its statements, and which files and libraries the store refuses (11, 13, 15, 16)."""

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

from muniment.adapters.sqlite import queries, store
from muniment.adapters.sqlite.check import check
from muniment.adapters.sqlite.connection import PAGE_BYTES, check_version, open_reader, open_writer
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core.tables import TABLES
from muniment.errors import Corrupt, LedgerUnavailable, RefusedStart, StoreTooNew
from muniment.model import command
from muniment.model.operation import TERMINAL, Kind, State
from muniment.ports.ledger import Handle, Rows
from muniment.stages import ledger
from tests.support import operations as ops
from tests.support import stores
from tests.support.stores import Driver

FOLDER: Final = Path(queries.__file__).parent
NOT_HISTORY: Final = {"meta", "probe", "journal_unit"}


def definitions(script: str) -> list[tuple[str, str, str]]:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute(script)
        return sorted(connection.execute("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))


@pytest.fixture
def schema() -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(":memory:")) as connection:
        for _, text in queries.migrations():
            connection.execute(text)
        yield connection


# The schema


def test_the_schema_is_the_sum_of_the_migrations() -> None:
    together = "".join(text for _, text in queries.migrations())

    assert definitions((FOLDER / "schema.sql").read_text("utf-8")) == definitions(together)


def test_migrations_are_numbered_from_one_without_a_gap() -> None:
    assert [number for number, _ in queries.migrations()] == list(range(1, len(queries.migrations()) + 1))


def test_tables_and_columns_are_those_of_the_core(schema: apsw.Connection) -> None:
    names = {name for (name,) in schema.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert names == {*TABLES, *NOT_HISTORY}
    for name, table in TABLES.items():
        columns = [row[1] for row in schema.execute(f"PRAGMA table_info({name})")]
        key = [row[1] for row in sorted(schema.execute(f"PRAGMA table_info({name})"), key=lambda row: row[5])]
        assert columns == list(table.columns), name
        assert key[len(columns) - len(table.key) :] == list(table.key), name


def test_every_table_is_strict(schema: apsw.Connection) -> None:
    tables = {
        row[1]: row[5] for row in schema.execute("PRAGMA table_list") if not row[1].startswith("sqlite_")
    }

    assert tables == dict.fromkeys({*TABLES, *NOT_HISTORY}, 1)


def listed(sql: str, column: str) -> list[set[str]]:
    """The sets of texts that a definition compares a column with."""
    return [
        set(re.findall(r"'(\w+)'", match))
        for match in re.findall(rf"\b{column} IN \(([^()]*)\)", sql, re.DOTALL)
    ]


def test_states_and_kinds_of_the_schema_are_those_of_the_model(schema: apsw.Connection) -> None:
    sql: dict[str, str] = dict(schema.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))
    unfinished = {state.value for state in State if state not in TERMINAL}

    assert listed(sql["operation"], "state") == [{state.value for state in State}]
    assert listed(sql["operation"], "kind") == [{kind.value for kind in Kind}]
    assert listed(sql["operation_unfinished"], "state") == [unfinished]


@pytest.mark.parametrize("column", ["state", "kind"])
def test_the_database_itself_refuses_another_state_or_kind(schema: apsw.Connection, column: str) -> None:
    row: dict[str, Any] = dict.fromkeys(TABLES["operation"].columns, 1)
    row |= {"id": "a", "kind": "add_memory", "payload_hash": "0" * 64, "state": "accepted", "result": None}
    row |= {"error": None, "executor_last_exit": None, "executor_error": None}
    insert = queries.statements()["insert_operation"]
    schema.execute(insert, row)

    with pytest.raises(apsw.ConstraintError, match="CHECK"):
        schema.execute(insert, row | {"n": 2, "id": "b", column: "processed"})


# The statements


def strings(source: str) -> tuple[set[str], list[re.Pattern[str]]]:
    """All string constants of a module, and its f-strings as patterns."""
    constants, patterns = set(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            constants.add(node.value)
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+"
                for part in node.values
            )
            patterns.append(re.compile(text))
    return constants, patterns


def unused(names: Iterable[str], sources: Iterable[str]) -> set[str]:
    """Statements that no module of the adapter names."""
    found = [strings(source) for source in sources]
    tables = {*TABLES}
    return {
        name
        for name in names
        if not any(
            name in constants
            or any(pattern.fullmatch(name) and name.partition("_")[2] in tables for pattern in patterns)
            for constants, patterns in found
        )
    }


def sources() -> list[str]:
    return [path.read_text("utf-8") for path in FOLDER.glob("*.py")]


def test_every_statement_is_used() -> None:
    assert unused(queries.statements(), sources()) == set()


def test_control_a_statement_that_nobody_names_is_noticed() -> None:
    assert unused([*queries.statements(), "insert_nothing", "retired"], sources()) == {
        "insert_nothing",
        "retired",
    }


@pytest.mark.parametrize("name", queries.statements())
def test_every_statement_prepares_on_the_schema(schema: apsw.Connection, name: str) -> None:
    sql = queries.statements()[name]
    parameters = dict.fromkeys(re.findall(r":(\w+)", sql))

    assert list(schema.execute(f"EXPLAIN {sql}", parameters))


def test_rows_are_read_in_key_order_with_all_their_columns(schema: apsw.Connection) -> None:
    for name, table in TABLES.items():
        sql = " ".join(queries.statements()[f"all_{name}"].split())
        assert sql == f"SELECT {', '.join(table.columns)} FROM {name} ORDER BY {', '.join(table.key)};"


def test_the_unfinished_and_the_rejected_are_found_by_their_indexes(schema: apsw.Connection) -> None:
    for name, index in (
        ("unfinished", "operation_unfinished"),
        ("operations_unfinished", "operation_unfinished"),
        ("operations_rejected", "operation_rejected"),
        ("has_dependents", "dependency_reverse"),
        ("find_steps", "step_idempotency_key"),
        ("streams", "stream_name"),
    ):
        sql = queries.statements()[name]
        plan = list(schema.execute(f"EXPLAIN QUERY PLAN {sql}", dict.fromkeys(re.findall(r":(\w+)", sql))))
        assert any(index in row[3] for row in plan), (name, plan)


def walked(schema: apsw.Connection, sql: str) -> set[str]:
    """The tables of which a statement reads every row, as SQLite plans it; ``new`` are its own values."""
    plan = schema.execute(f"EXPLAIN QUERY PLAN {sql}", dict.fromkeys(re.findall(r":(\w+)", sql)))
    return {row[3].split()[1] for row in plan if row[3].startswith("SCAN ")} - {"CONSTANT", "new"}


def test_what_is_asked_while_serving_walks_no_table(schema: apsw.Connection) -> None:
    """A receipt, its dependencies and events are found by their keys, however much is stored."""
    # Of the first only the last row is read; the other is asked once, at the start, of an index that holds
    # the unfinished alone.
    expected = {"journal_head": {"journal_unit"}, "unfinished": {"operation"}}
    whole = {f"{kind}_{table}" for kind in ("all", "attested") for table in TABLES} | {"definitions"}
    served = {name: sql for name, sql in queries.statements().items() if name not in whole}
    found = {name: walked(schema, sql) for name, sql in served.items()}

    assert {"find_operation", "dependencies", "events", "payload", "find_memory"} <= found.keys()
    assert {name: tables for name, tables in found.items() if tables} == expected


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT n FROM operation WHERE id = :id",
        "SELECT n FROM operation WHERE state NOT IN ('committed', 'rejected') ORDER BY id",
        "SELECT operation.n FROM memory JOIN operation ON operation.n = memory.operation_n",
    ],
)
def test_control_a_statement_that_walks_a_table_is_noticed(schema: apsw.Connection, sql: str) -> None:
    assert walked(schema, sql) & {"operation", "memory"}


def statements_of(store: SqliteStore, asked: command.Command) -> list[str]:
    """What one command runs, in its own transaction."""
    found: list[str] = []

    def note(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        found.append(" ".join(sql.split()))
        return True

    store._connection.set_exec_trace(note)
    try:
        [reply], _ = store.transact([asked])
    finally:
        store._connection.set_exec_trace(None)
    assert reply.error is None
    return found


def evidence_costs(directory: Path, handle: Handle = ledger.handle) -> tuple[list[str], list[str]]:
    """What a piece of evidence runs that is the first of its operation, and one that has many before it.

    Nothing of the operation is at hand, as after a start.
    """
    with closing(stores.sqlite(directory, handle)) as opened:
        driver = Driver(opened)
        n = driver.accept(ops.memory("m"))
        driver.advance(n)
        driver.plan(n)
        opened._rows.forget()
        first = statements_of(opened, ops.exited(n, generation=2))
        for generation in range(3, 60):
            opened.transact([ops.exited(n, generation=generation)])
        opened._rows.forget()
        return first, statements_of(opened, ops.exited(n, generation=60))


def receipts_made(statements: Iterable[str]) -> int:
    """How often dependencies were looked up, which nothing but a receipt needs here."""
    return sum(" FROM dependency" in each for each in statements if each.startswith("SELECT"))


def test_evidence_costs_the_same_however_much_there_is(tmp_path: Path) -> None:
    """It is written in one transaction: its operation is read once, by key, and no receipt is made."""
    first, last = evidence_costs(tmp_path)

    assert last == first
    assert [each.split()[0] for each in (first[0], first[-1])] == ["BEGIN", "COMMIT"]
    assert sum(each.startswith("INSERT INTO evidence") for each in first) == 1
    assert sum(" FROM operation" in each for each in first if each.startswith("SELECT")) == 1
    assert receipts_made(first) == 0


def test_control_evidence_that_makes_a_receipt_or_walks_its_history_is_noticed(tmp_path: Path) -> None:
    def thorough(rows: Rows, asked: command.Command) -> Any:
        if isinstance(asked, command.RecordExit):
            rows.dependencies(asked.n)
            for each in rows.evidence(asked.n):
                rows.events(each["operation_n"], 0, 1)
        return ledger.handle(rows, asked)

    first, last = evidence_costs(tmp_path, thorough)

    assert last != first
    assert receipts_made(first) == 1


# Connections


def pragma(connection: apsw.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchall()[0][0]


def test_the_writer_is_durable_and_forgets_what_was_erased(tmp_path: Path) -> None:
    with closing(open_writer(tmp_path / "ledger.db")) as connection:
        assert pragma(connection, "journal_mode") == "wal"
        assert pragma(connection, "synchronous") == 2, "FULL"
        assert pragma(connection, "secure_delete") == 1
        assert pragma(connection, "foreign_keys") == 1
        assert pragma(connection, "wal_autocheckpoint") == 0


def test_deleted_bytes_are_gone_from_the_file(tmp_path: Path) -> None:
    """Ruling 15: ``secure_delete`` is on from the first migration."""
    opened = stores.sqlite(tmp_path)
    Driver(opened).write(ops.memory("m", "very particular words"))
    opened.close()
    file = tmp_path / "ledger.db"
    assert b"very particular words" in file.read_bytes()

    with closing(open_writer(file)) as connection:
        connection.execute("UPDATE payload SET bytes = NULL, salt = NULL")
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    assert b"very particular words" not in file.read_bytes()
    assert [finding.table for finding in check(tmp_path).findings] == ["payload", "operation"]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    stores.sqlite(tmp_path).close()

    with closing(open_reader(tmp_path / "ledger.db")) as connection, pytest.raises(apsw.ReadOnlyError):
        connection.execute("DELETE FROM meta")


@pytest.mark.parametrize("version", ["3.51.2", "3.50.99", "3.9.0", "2.99.99"])
def test_a_library_with_the_race_against_the_log_is_refused(version: str) -> None:
    with pytest.raises(RefusedStart, match=version):
        check_version(version)


@pytest.mark.parametrize("version", ["3.51.3", "3.52.0", "3.100.0", "4.0.0", apsw.sqlite_lib_version()])
def test_a_library_without_the_race_is_taken(version: str) -> None:
    check_version(version)


def test_an_old_library_is_refused_before_the_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")

    with pytest.raises(RefusedStart):
        stores.sqlite(tmp_path)

    assert list(tmp_path.iterdir()) == []


# What a store refuses


def test_a_newer_store_is_refused_and_left_untouched(tmp_path: Path) -> None:
    opened = stores.sqlite(tmp_path)
    Driver(opened).write(ops.memory("m"))
    opened.close()
    file = tmp_path / "ledger.db"
    newest = queries.migrations()[-1][0]
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute(f"PRAGMA user_version = {newest + 1}")
    before = file.read_bytes()

    with pytest.raises(StoreTooNew, match=f"format {newest + 1}; this program knows up to {newest}"):
        stores.sqlite(tmp_path)

    assert file.read_bytes() == before
    [finding] = check(tmp_path).findings
    assert finding.problem == f"has format {newest + 1}, this program knows {newest}"


@pytest.mark.parametrize("content", [b"no database" * 500, b"x" * 16, b"SQLite format 3\0" + bytes(8176)])
def test_a_file_that_is_no_database_is_refused_and_left_untouched(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ledger.db"
    file.write_bytes(content)

    with pytest.raises(Corrupt, match=r"ledger\.db"):
        stores.sqlite(tmp_path)

    assert file.read_bytes() == content


def test_a_database_whose_journal_is_damaged_is_refused(tmp_path: Path) -> None:
    stores.sqlite(tmp_path).close()
    file = tmp_path / "ledger.db"
    with closing(apsw.Connection(str(file))) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'journal_unit'")
    content = bytearray(file.read_bytes())
    content[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = bytes(PAGE_BYTES)
    file.write_bytes(content)

    with pytest.raises(Corrupt, match=r"ledger\.db"):
        stores.sqlite(tmp_path)


def test_a_file_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").mkdir()

    with pytest.raises(LedgerUnavailable):
        stores.sqlite(tmp_path)


def test_opening_again_goes_on_with_the_same_history(tmp_path: Path) -> None:
    opened = stores.sqlite(tmp_path)
    Driver(opened).remember(ops.memory("m"))
    head = opened.read(lambda reads: reads.head())
    opened.close()

    again = store.SqliteStore.open(
        tmp_path, lambda rows, asked: None, lambda rows: pytest.fail("began again"), incarnation="second"
    )

    assert again.read(lambda reads: reads.head()) == head
    assert again.read(lambda reads: (reads.meta("incarnation"), reads.meta("format"))) == ("second", "1")
    assert again.read(lambda reads: reads.meta("unknown")) is None
    again.close()
    stores.checked(tmp_path)


def test_numbers_go_on_after_opening_again(tmp_path: Path) -> None:
    opened = stores.sqlite(tmp_path)
    Driver(opened).remember(ops.memory("m"))
    opened.close()
    opened = stores.sqlite(tmp_path)
    again = Driver(opened)
    again.remember(ops.memory("second"))
    again.apply(again.accept(ops.stream("s")))

    assert [row["n"] for row in again.rows("operation")] == [1, 2, 3]
    assert [row["n"] for row in again.rows("plan")] == [1, 2]
    assert [row["n"] for row in again.rows("model")] == [1]
    assert [row["object_n"] for row in again.rows("attribute")] == [1, 2, 3]
    opened.close()
    stores.checked(tmp_path)
