"""``muniment check`` finds nothing wrong with what was written, and names the place of every damage."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec
import pytest

from muniment.adapters.files.directory import DataDirectory, Owner
from muniment.adapters.sqlite import check as checking
from muniment.adapters.sqlite.check import Finding, Report, check, outcomes
from muniment.adapters.sqlite.store import SqliteReader
from muniment.core import replay, verification
from muniment.core.tables import TABLES, Row
from muniment.model import command, journal
from muniment.model.operation import State
from muniment.ports.ledger import Rows
from muniment.stages import ledger as stage
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import NOW
from tests.support.stores import Driver

FILE: Final = "ledger.db"
FLIPS: Final = 200
FLIPS_FOUND_MIN: Final = 100


def fill(ledger: Driver, *, salt: str = "", later: int = 0, faults: bool = False) -> None:
    """Write at least two rows into every table, and operations in every state that is stored."""
    now = NOW + later
    moments: dict[str, Any] = {
        "session_seq": 4,
        "occurred_at": "2024-01-01T00:00:00Z",
        "expires_at": "2030-01-01T00:00:00Z",
    }

    def salted(asked: command.Accept) -> command.Accept:
        return msgspec.structs.replace(
            asked,
            content_salt=ops.salt(f"{salt}{asked.operation_id}"),
            attributes_salt=ops.salt(f"{salt}x"),
            now=now,
        )

    ledger.remember(
        salted(ops.memory("m1", user_id="ann", session_id="s", categories=["c"], role="user")), parts=3
    )
    n = ledger.accept(
        salted(ops.memory("m2", "Another text.", ["m1"], speaker="bob", agent_id="a", **moments))
    )
    ledger.advance(n)
    plan_n = ledger.plan(n, parts=2)
    ledger.vectors(n, plan_n, [0])
    if faults:
        ledger.write(ops.exited(n, now=now))
    ledger.vectors(n, plan_n, [1], generation=2 if faults else 1)
    ledger.commit(n, now)
    for each in ("one", "two"):
        ledger.apply(ledger.accept(salted(ops.stream(f"stream {each}", each, user_id="ann", agent_id=each))))
        ledger.apply(
            ledger.accept(salted(ops.step(f"step {each}", f"key {each}", each, user_id="ann", agent_id=each)))
        )
    ledger.apply(ledger.accept(salted(ops.complete("done", "key one", result={"ok": True}))))
    blocked = ledger.accept(salted(ops.memory("blocked", dependencies=["m1", "missing"])))
    ledger.advance(blocked)
    ledger.write(ops.refuse(ledger.accept(salted(ops.memory("rejected")))))
    working = ledger.accept(salted(ops.memory("working", "In the middle of it.")))
    ledger.advance(working)
    half = ledger.plan(working, parts=4)
    ledger.vectors(working, half, [0, 2])
    ledger.accept(salted(ops.stream("accepted", "three")))
    if faults:
        ledger.write(ops.exited(working, generation=2, kind="protocol", now=now))
        ledger.write(ops.exited(working, generation=2, kind="failure", now=now))
        ledger.write(command.ReserveGeneration(now=now))
        ledger.write(command.Observe(kind="exit", generation=1, message="signal 9", now=now))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("healthy")
    opened = stores.sqlite(directory)
    ledger = Driver(opened)
    fill(ledger, faults=True)
    # A second account and a second model, as administration and a second model of one store would write them.
    for unit in (
        journal.Account(at=NOW, n=2, key="other"),
        journal.Model(at=NOW, n=2, digest="0" * 64, identity=msgspec.to_builtins(ops.OTHER_MODEL)),
    ):
        with opened._transaction():
            opened._rows.append(unit, {})
    opened._rows.take_sealed()
    opened.close()
    return directory


@pytest.fixture
def damaged(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy directory, to be damaged."""
    shutil.copytree(healthy, tmp_path / "damaged")
    return tmp_path / "damaged"


@pytest.fixture(scope="module")
def rows(healthy: Path) -> dict[str, list[Row]]:
    with closing(SqliteReader(healthy / FILE)) as reader:
        found = reader.read(lambda reads: {table: list(reads.rows(table)) for table in TABLES})
    assert min(map(len, found.values())) >= 2, "every table has something to damage"
    assert {row["state"] for row in found["operation"]} == set(State) - {
        State.VALIDATED,
        State.PLANNED,
        State.INDEXED,
    }
    return found


def run(directory: Path, *statements: str, **parameters: Any) -> None:
    """Change a file behind the back of its schema."""
    with closing(apsw.Connection(str(directory / FILE))) as connection:
        connection.execute("PRAGMA foreign_keys = OFF; PRAGMA ignore_check_constraints = ON")
        for each in statements:
            connection.execute(each, parameters)
            assert connection.changes() == 1, each


def where(table: str) -> str:
    return " AND ".join(f"{column} = :{column}" for column in TABLES[table].key)


def key(table: str, row: Row) -> dict[str, Any]:
    return {column: row[column] for column in TABLES[table].key}


def is_named(report: Report, table: str, *rows: str) -> bool:
    return any(found.file == FILE and found.table == table and found.row in rows for found in report.findings)


# A healthy store


def test_nothing_is_wrong_with_a_healthy_store(healthy: Path, rows: dict[str, list[Row]]) -> None:
    report = stores.checked(healthy)

    assert (report.operations, report.memories) == (len(rows["operation"]), len(rows["memory"]))
    assert report.lineage == stores.LINEAGE
    assert report.owned_by is None
    with closing(SqliteReader(healthy / FILE)) as reader:
        assert report.position == reader.read(lambda reads: reads.head()[0])
        assert report.state_digest == reader.read(stores.state_digest)
        assert report.outcome_digest == reader.read(lambda reads: replay.outcome_digest(outcomes(reads)))


def test_a_new_store_is_healthy(tmp_path: Path) -> None:
    stores.sqlite(tmp_path).close()

    report = stores.checked(tmp_path)

    assert (report.operations, report.memories, report.position) == (0, 0, 2)


def contents(directory: Path) -> dict[str, bytes]:
    # The index of the log is rebuilt by whoever reads; it holds nothing.
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("-shm")}


def test_a_check_leaves_the_directory_as_it_was(damaged: Path) -> None:
    before, names = contents(damaged), sorted(damaged.iterdir())

    check(damaged)

    assert contents(damaged) == before
    assert sorted(damaged.iterdir()) == names


def test_a_directory_that_a_crash_left_is_checked_with_its_log_and_left_as_it_was(tmp_path: Path) -> None:
    opened = stores.sqlite(tmp_path / "living")
    fill(Driver(opened))
    shutil.copytree(tmp_path / "living", tmp_path / "crashed")
    opened.close()
    before = contents(tmp_path / "crashed")
    assert before[f"{FILE}-wal"]

    report = stores.checked(tmp_path / "crashed")

    assert contents(tmp_path / "crashed") == before
    assert report == stores.checked(tmp_path / "living")


def test_a_check_runs_beside_the_owner_and_sees_one_state(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    opened = stores.sqlite(tmp_path)
    directory.announce(Owner(url="http://127.0.0.1:1", pid=os.getpid(), incarnation="test"))
    seen = []

    def handle(rows: Rows, asked: command.Command) -> Any:
        reply = stage.handle(rows, asked)
        seen.append(stores.checked(tmp_path))  # In the middle of a transaction of the owner.
        return reply

    opened._handle = handle
    for each in range(5):
        opened.transact([ops.memory(f"a{each}"), ops.memory(f"b{each}")])

    assert {report.owned_by for report in seen} == {"http://127.0.0.1:1"}
    assert [report.operations for report in seen] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    opened.close()
    directory.release()
    assert stores.checked(tmp_path).owned_by is None


# One damaged row


def changed(value: Any, column: str, table: str) -> Any:
    match value:
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1])
        case str():
            return value + "0"
        case int():
            return value + 1000
        case _:
            return DECLARED[table][column][0]("7")


DECLARED: Final = {
    table: {
        column: (kind if kind is not bytes else str.encode, required)
        for column, (kind, required) in columns.items()
    }
    for table, columns in checking._schema().columns.items()
}
COLUMNS: Final = [(table.name, column) for table in TABLES.values() for column in table.columns]


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_one_changed_value_is_found_with_its_table_and_row(
    healthy: Path, tmp_path: Path, rows: dict[str, list[Row]], table: str, column: str
) -> None:
    for number, row in enumerate(rows[table]):
        if number in (0, len(rows[table]) - 1):
            directory = tmp_path / str(number)
            shutil.copytree(healthy, directory)
            value = changed(row[column], column, table)
            run(
                directory,
                f"UPDATE {table} SET {column} = :value WHERE {where(table)}",
                value=value,
                **key(table, row),
            )

            report = check(directory)

            moved = verification.named(table, row | {column: value})
            assert is_named(report, table, verification.named(table, row), moved), report.findings


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table, column in COLUMNS if not DECLARED[table][column][1]]
)
def test_one_value_that_is_gone_is_found(
    damaged: Path, rows: dict[str, list[Row]], table: str, column: str
) -> None:
    there = [row for row in rows[table] if row[column] is not None]
    for row in there[:1]:
        run(damaged, f"UPDATE {table} SET {column} = NULL WHERE {where(table)}", **key(table, row))

        assert is_named(check(damaged), table, verification.named(table, row))
    # Columns for what is not built yet hold nothing.
    assert there or (table, column) in {
        ("memory", "space_n"),
        ("memory", "submitter_n"),
    }, "the healthy store has no value to take away"


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("which", [0, -1])
def test_one_row_that_is_gone_is_found(
    damaged: Path, rows: dict[str, list[Row]], table: str, which: int
) -> None:
    row = rows[table][which]
    run(damaged, f"DELETE FROM {table} WHERE {where(table)}", **key(table, row))

    report = check(damaged)

    assert Finding(FILE, table, verification.named(table, row), "is missing") in report.findings


@pytest.mark.parametrize("table", TABLES)
def test_one_row_too_many_is_found(damaged: Path, rows: dict[str, list[Row]], table: str) -> None:
    row = dict(rows[table][-1])
    row[TABLES[table].key[-1]] += 1000
    unique = {
        "account": "key",
        "model": "digest",
        "operation": "id",
        "memory": "key",
        "stream": "key",
        "step": "key",
    }
    if table in unique:
        row[unique[table]] += "0"
    if table in {"memory", "stream", "step"}:
        row["operation_n"] += 1000
    row |= {"stream_n": 1000} if table == "step" else {"active": 0, "profile": "x"} if table == "plan" else {}
    names = ", ".join(row)
    run(damaged, f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in row)})", **row)

    report = check(damaged)

    assert Finding(FILE, table, verification.named(table, row), "is not in the journal") in report.findings


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE meta SET value = '2' WHERE key = 'format'", "key format"),
        ("DELETE FROM meta WHERE key = 'format'", "key format"),
        ("DELETE FROM meta WHERE key = 'incarnation'", "key incarnation"),
    ],
)
def test_a_damaged_meta_row_is_found(damaged: Path, statement: str, row: str) -> None:
    run(damaged, statement)

    assert is_named(check(damaged), "meta", row)


# The journal


def journal_rows(directory: Path) -> list[tuple[int, bytes, bytes, bytes]]:
    with closing(SqliteReader(directory / FILE)) as reader:
        return [
            (row.position, row.data, row.digest, row.chain)
            for row in reader.read(lambda reads: reads.units(0, 10_000))
        ]


def test_every_changed_unit_is_found(healthy: Path, damaged: Path) -> None:
    numbers = random.Random(7)
    count = len(journal_rows(healthy))
    for position in sorted({1, 2, count, *numbers.sample(range(1, count), 8)}):
        for column in ("bytes", "digest", "chain"):
            shutil.copy(healthy / FILE, damaged / FILE)
            value = bytearray(
                journal_rows(healthy)[position - 1][("bytes", "digest", "chain").index(column) + 1]
            )
            value[numbers.randrange(len(value))] ^= 1 << numbers.randrange(8)
            statement = f"UPDATE journal_unit SET {column} = :value WHERE position = :position"
            run(damaged, statement, value=bytes(value), position=position)

            assert is_named(check(damaged), "journal_unit", f"position {position}"), (position, column)


@pytest.mark.parametrize("which", ["first", "middle"])
def test_a_unit_that_is_gone_is_found_at_the_one_that_follows(damaged: Path, which: str) -> None:
    position = 1 if which == "first" else len(journal_rows(damaged)) // 2
    run(damaged, "DELETE FROM journal_unit WHERE position = :position", position=position)

    assert is_named(check(damaged), "journal_unit", f"position {position + 1}")


def test_a_tail_that_is_gone_is_found_in_the_rows_that_it_had_made(damaged: Path) -> None:
    position = len(journal_rows(damaged))
    run(damaged, "DELETE FROM journal_unit WHERE position = :position", position=position)

    assert Finding(FILE, "model", "n 2", "is not in the journal") in check(damaged).findings


def test_an_empty_journal_is_found(damaged: Path) -> None:
    with closing(apsw.Connection(str(damaged / FILE))) as connection:
        connection.execute("DELETE FROM journal_unit")

    report = check(damaged)

    assert report.findings[0].table == "journal_unit"
    assert (report.position, report.lineage) == (0, "")


def rewritten(directory: Path, change: Callable[[list[journal.AnyUnit]], list[journal.AnyUnit]]) -> None:
    """Replace the journal by another one whose digests and chain are right."""
    units = change([replay.decode(data) for _, data, _, _ in journal_rows(directory)])
    with closing(apsw.Connection(str(directory / FILE))) as connection:
        connection.execute("DELETE FROM journal_unit")
        chain = replay.CHAIN_START
        for position, unit in enumerate(units, 1):
            data = replay.encode(unit)
            chain = replay.link(chain, replay.digest(data))
            connection.execute(
                "INSERT INTO journal_unit VALUES (?, ?, ?, ?)", (position, data, replay.digest(data), chain)
            )


def test_a_journal_that_was_rewritten_with_right_digests_is_found_by_the_fold(damaged: Path) -> None:
    def without_a_part(units: list[journal.AnyUnit]) -> list[journal.AnyUnit]:
        return [
            msgspec.structs.replace(unit, vectors=unit.vectors[:2])
            if isinstance(unit, journal.Parts) and len(unit.vectors) == 3
            else unit
            for unit in units
        ]

    rewritten(damaged, without_a_part)

    report = check(damaged)

    assert is_named(report, "part", "plan_n 1, part_index 2")
    assert Finding(FILE, "vector", "plan_n 1, part_index 2", "is not in the journal") in report.findings


@pytest.mark.parametrize("doubled", [True, False])
def test_a_unit_that_does_not_follow_is_found(damaged: Path, doubled: bool) -> None:
    def twice_or_never(units: list[journal.AnyUnit]) -> list[journal.AnyUnit]:
        at = next(index for index, unit in enumerate(units) if isinstance(unit, journal.Plan))
        return [*units[: at + 1], units[at], *units[at + 1 :]] if doubled else units[:at] + units[at + 1 :]

    rewritten(damaged, twice_or_never)

    [finding] = [each for each in check(damaged).findings if each.table == "journal_unit"]
    assert "does not follow from the units before it" in finding.problem


def test_a_unit_that_is_not_canonical_is_found(damaged: Path) -> None:
    position, data, _, _ = journal_rows(damaged)[-1]
    before = journal_rows(damaged)[-2][3]
    for spaced in (data.replace(b":", b": ", 1), data[:-1] + b',"zzz":1}'):
        run(
            damaged,
            "UPDATE journal_unit SET bytes = :data, digest = :digest, chain = :chain WHERE position = :at",
            data=spaced,
            digest=replay.digest(spaced),
            chain=replay.link(before, replay.digest(spaced)),
            at=position,
        )
        where = f"position {position}"
        assert check(damaged).findings == (Finding(FILE, "journal_unit", where, "is not in canonical form"),)


# Histories in which tables and journal agree, and both are wrong


def at(row: Row) -> journal.At:
    return journal.At(State(row["state"]), row["progress_seq"])


def snapshot(**changed: Any) -> journal.Snapshot:
    zero = journal.Snapshot(generation=0, progress_seq=0, exit_count=0, last_exit=None, error=None)
    return msgspec.structs.replace(zero, **changed)


def a_leap(rows: Rows, row: Row) -> None:
    moved = journal.Moved(2, State.ACCEPTED, State.INDEXED, None)
    to = journal.At(State.INDEXED, 2)
    rows.append(
        journal.Advance(at=NOW, n=row["n"], was=at(row), to=to, events=(moved,), executor=snapshot()), {}
    )


def a_gap(rows: Rows, row: Row) -> None:
    moved = journal.Moved(3, State.ACCEPTED, State.VALIDATED, None)
    to = journal.At(State.VALIDATED, 3)
    rows.append(
        journal.Advance(at=NOW, n=row["n"], was=at(row), to=to, events=(moved,), executor=snapshot()), {}
    )


def a_silent_move(rows: Rows, row: Row) -> None:
    to = journal.At(State.VALIDATED, 1)
    rows.append(journal.Advance(at=NOW, n=row["n"], was=at(row), to=to, executor=snapshot()), {})


def a_time_before(rows: Rows, row: Row) -> None:
    moved = journal.Moved(2, State.ACCEPTED, State.VALIDATED, None)
    to = journal.At(State.VALIDATED, 2)
    unit = journal.Advance(at=NOW - 1, n=row["n"], was=at(row), to=to, events=(moved,), executor=snapshot())
    rows.append(unit, {})


def evidence_with_a_gap(rows: Rows, row: Row) -> None:
    witness = journal.Witness(2, "progress", 1, None)
    unit = journal.Evidence(
        at=NOW, n=row["n"], was=at(row), to=at(row), evidence=(witness,), executor=snapshot(progress_seq=2)
    )
    rows.append(unit, {})


def an_exit_that_nobody_saw(rows: Rows, row: Row) -> None:
    witness = journal.Witness(1, "progress", 1, None)
    unit = journal.Evidence(
        at=NOW,
        n=row["n"],
        was=at(row),
        to=at(row),
        evidence=(witness,),
        executor=snapshot(progress_seq=1, exit_count=1, last_exit="signal 9"),
    )
    rows.append(unit, {})


def an_end(
    row: Row, *, memory: journal.Memory | None = None, stream: journal.Stream | None = None
) -> journal.Commit:
    states = [
        State.ACCEPTED,
        State.VALIDATED,
        State.PLANNED,
        State.PROCESSING,
        State.INDEXED,
        State.COMMITTED,
    ]
    return journal.Commit(
        at=NOW,
        n=row["n"],
        was=at(row),
        to=journal.At(State.COMMITTED, 6),
        events=tuple(journal.Moved(n, states[n - 2], states[n - 1], None) for n in range(2, 7)),
        executor=snapshot(),
        account=row["account_n"],
        id=row["id"],
        result={},
        memory=memory,
        stream=stream,
    )


def a_commit_without_its_memory(rows: Rows, row: Row) -> None:
    rows.append(an_end(row), {})


def a_stream_with_another_key(rows: Rows, row: Row) -> None:
    made = journal.Stream(object=row["object_n"], key="stream:another", status="active")
    rows.append(an_end(row, stream=made), {("stream", (row["object_n"],)): {"name": "chores"}})


def a_stream_with_another_name(rows: Rows, row: Row) -> None:
    from muniment.core import identity

    key = identity.object_key("stream", "local", row["id"])
    made = journal.Stream(object=row["object_n"], key=key, status="active")
    rows.append(an_end(row, stream=made), {("stream", (row["object_n"],)): {"name": "cores"}})


def a_rejection_without_a_reason(rows: Rows, row: Row) -> None:
    moves = (
        journal.Moved(2, State.ACCEPTED, State.VALIDATED, None),
        journal.Moved(3, State.VALIDATED, State.REJECTED, None),
    )
    unit = journal.Reject(
        at=NOW,
        n=row["n"],
        was=at(row),
        to=journal.At(State.REJECTED, 3),
        events=moves,
        executor=snapshot(),
        error="no",
        result=None,
    )
    rows.append(unit, {})


FORGED: Final[list[tuple[Any, command.Accept, str, str]]] = [
    (a_leap, ops.memory("m"), "event", "accepted to indexed cannot follow accepted"),
    (a_gap, ops.memory("m"), "event", "stands where sequence 2 is expected"),
    (a_silent_move, ops.memory("m"), "operation", "is validated after 1 events, 1 events end in accepted"),
    (a_time_before, ops.memory("m"), "event", "time or generation is before that of the event before it"),
    (evidence_with_a_gap, ops.memory("m"), "evidence", "stands where sequence 1 is expected"),
    (
        an_exit_that_nobody_saw,
        ops.memory("m"),
        "operation",
        "executor_exit_count is 1, there is evidence of 0",
    ),
    (
        a_commit_without_its_memory,
        ops.memory("m"),
        "operation",
        "is add_memory, committed, and has no memory",
    ),
    (
        a_stream_with_another_key,
        ops.stream("s"),
        "stream",
        "key is stream:another, its operation has stream:",
    ),
    (a_stream_with_another_name, ops.stream("s"), "stream", "name is cores, its caller said something else"),
    (a_rejection_without_a_reason, ops.memory("m"), "operation", "is rejected with the result null"),
    (
        lambda rows, row: None,
        msgspec.structs.replace(ops.memory("m"), payload_hash="0" * 64),
        "operation",
        "payload_hash is not the hash of the payload that is kept",
    ),
    (
        lambda rows, row: None,
        msgspec.structs.replace(ops.memory("m"), attributes=b'{"b":1,"a":2}'),
        "attribute",
        "is no canonical JSON object",
    ),
]


@pytest.mark.parametrize(("forge", "asked", "table", "problem"), FORGED)
def test_a_history_that_agrees_with_its_journal_and_breaks_a_promise_is_found(
    tmp_path: Path, forge: Callable[[Rows, Row], None], asked: command.Accept, table: str, problem: str
) -> None:
    opened = stores.sqlite(tmp_path)
    ledger = Driver(opened)
    ledger.accept(asked)
    opened._handle = lambda rows, _: forge(rows, rows.operation(1) or {})
    ledger.transact(command.Probe(now=NOW))
    opened.close()

    report = check(tmp_path)

    assert [each for each in report.findings if each.table == table and problem in each.problem], (
        report.findings
    )
    assert not [each for each in report.findings if each.table == "journal_unit"]


def test_a_met_flag_that_is_not_so_is_found(damaged: Path, rows: dict[str, list[Row]]) -> None:
    """Here the tables are changed, to show that the flag is also compared with the operation it is about."""
    row = next(row for row in rows["dependency"] if not row["met"])
    run(damaged, f"UPDATE dependency SET met = 1 WHERE {where('dependency')}", **key("dependency", row))

    texts = [each.problem for each in check(damaged).findings if each.table == "dependency"]

    assert texts == ["met is 1, the journal says 0", "met is 1, which is not so of operation missing"]


def ended_with_an_open_dependency(directory: Path) -> None:
    """An operation that was rejected while it waited for what was committed later."""
    opened = stores.sqlite(directory)
    ledger = Driver(opened)
    ledger.write(ops.refuse(ledger.accept(ops.memory("m", dependencies=["later"])), now=NOW + 5))
    ledger.remember(ops.memory("later"), now=NOW + 9)
    opened.close()
    stores.checked(directory)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "UPDATE dependency SET met = 1 WHERE operation_n = 1",
            Finding(FILE, "dependency", "operation_n 1, ordinal 0", "met is 1, the journal says 0"),
        ),
        (
            f"UPDATE operation SET updated_us = {NOW + 9} WHERE n = 1",
            Finding(FILE, "operation", "n 1", f"updated_us is {NOW + 9}, the journal says {NOW + 5}"),
        ),
    ],
)
def test_a_receipt_that_changed_after_its_end_is_found(
    tmp_path: Path, statement: str, expected: Finding
) -> None:
    ended_with_an_open_dependency(tmp_path)
    run(tmp_path, statement)

    assert check(tmp_path).findings == (expected,)


def test_an_operation_that_committed_before_its_dependency_is_found(tmp_path: Path) -> None:
    """Journal and tables agree here, so that the rule alone tells."""
    opened = stores.sqlite(tmp_path)
    ledger = Driver(opened)
    ledger.accept(ops.stream("s", dependencies=["never"]))
    opened._handle = lambda rows, _: rows.append(an_end(rows.operation(1) or {}), {})
    ledger.transact(command.Probe(now=NOW))
    opened.close()

    texts = [each.problem for each in check(tmp_path).findings]

    assert texts == ["was not met when its operation committed"]


# The file


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    assert check(tmp_path).findings == (Finding(FILE, "-", "-", "there is no such file"),)
    assert check(tmp_path / "nowhere").findings == (Finding(FILE, "-", "-", "there is no such file"),)


@pytest.mark.parametrize("content", [b"", b"x", b"no database at all" * 1000, bytes(8192)])
def test_a_file_that_is_something_else_is_found(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)

    [finding] = check(tmp_path).findings

    assert finding.file == FILE


def test_every_truncation_is_found(healthy: Path, damaged: Path) -> None:
    whole = (healthy / FILE).read_bytes()
    sizes = {1, 99, 100, 512, len(whole) - 1, len(whole) // 2, *range(4096, len(whole), 4096)}
    for size in sorted(sizes):
        (damaged / FILE).write_bytes(whole[:size])
        report = check(damaged)
        assert report.findings, size
        assert {finding.file for finding in report.findings} == {FILE}


def everything(directory: Path) -> Any:
    """All that a store holds, the held bytes included."""
    with closing(SqliteReader(directory / FILE)) as reader:
        return reader.read(
            lambda reads: (
                {table: list(reads.rows(table)) for table in TABLES},
                reads.units(0, 10_000),
                reads.meta("format"),
            )
        )


def test_a_flipped_bit_is_found_or_lies_where_nothing_is_kept(healthy: Path, damaged: Path) -> None:
    numbers = random.Random(20_240_229)
    whole, kept = (healthy / FILE).read_bytes(), everything(healthy)
    used = [offset for offset, byte in enumerate(whole) if byte]  # Most of a small file is room for more.
    found = in_rows = 0
    for number in range(FLIPS):
        offset = numbers.choice(used) if number % 4 else numbers.randrange(len(whole))
        bit = numbers.randrange(8)
        (damaged / FILE).write_bytes(whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :])
        report = check(damaged)
        assert {finding.file for finding in report.findings} <= {FILE}
        if report.findings:
            found += 1
            in_rows += any(finding.row != "-" for finding in report.findings)
        else:
            assert everything(damaged) == kept, (
                f"bit {bit} of byte {offset} changed something, and was not found"
            )
        for rest in damaged.iterdir():
            if rest.name != FILE:
                rest.unlink()
    print(f"{FLIPS} flipped bits: {found} found, {in_rows} with their row, the others change nothing")
    assert found >= FLIPS_FOUND_MIN


def test_a_lost_sector_is_found_or_held_nothing(healthy: Path, damaged: Path) -> None:
    """Whole sectors of noise: trees that lead round in circles, rows with values of any type."""
    numbers = random.Random(4)
    whole, kept = (healthy / FILE).read_bytes(), everything(healthy)
    found = 0
    for start in range(0, len(whole), 3 * 512):
        (damaged / FILE).write_bytes(whole[:start] + numbers.randbytes(512) + whole[start + 512 :])
        report = check(damaged)
        found += bool(report.findings)
        assert report.findings or everything(damaged) == kept, start
        for rest in damaged.iterdir():
            if rest.name != FILE:
                rest.unlink()
    print(f"{found} of {-(-len(whole) // (3 * 512))} lost sectors found")
    assert found > 30


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("DROP INDEX dependency_reverse", "dependency_reverse"),
        ("CREATE TABLE extra (n INTEGER)", "extra"),
        ("ALTER TABLE step ADD COLUMN extra TEXT", "step"),
        ("DROP TABLE probe", "probe"),
        ("DROP TABLE vector", "vector"),
    ],
)
def test_another_schema_is_found(damaged: Path, statement: str, name: str) -> None:
    with closing(apsw.Connection(str(damaged / FILE))) as connection:
        connection.execute(statement)

    text = "is not defined as in the schema of this format"
    assert [each.table for each in check(damaged).findings if each.problem == text] == [name]


# Outcomes


def test_outcomes_are_the_same_on_both_backends(tmp_path: Path) -> None:
    opened, memory = stores.sqlite(tmp_path), stores.in_memory()
    for each in (opened, memory):
        fill(Driver(each), faults=True)

    found = opened.read(lambda reads: list(outcomes(reads)))

    assert found == memory.read(lambda reads: list(outcomes(reads)))
    opened.close()
    assert stores.checked(tmp_path).outcome_digest == replay.outcome_digest(found)
    by_id = {outcome.operation_id: outcome for outcome in found}
    assert by_id["m1"].objects == (by_id["m1"].result["id"],)
    assert by_id["m1"].plan_ranges == ((0, 4, 0, 8), (4, 8, 8, 17), (8, 13, 17, 26))
    assert by_id["step one"].objects == (by_id["step one"].result["id"],)
    assert (by_id["done"].objects, by_id["done"].source_digest, by_id["done"].model_digest) == (
        (),
        None,
        None,
    )
    assert by_id["blocked"].state is State.BLOCKED


def test_a_run_with_faults_has_the_outcome_of_a_run_without(tmp_path: Path) -> None:
    """Ruling 13: no time, position, evidence, salt or vector byte is part of an outcome."""
    reports = []
    for name, how in (
        ("plain", {}),
        ("again", {}),
        ("faults", {"salt": "other", "later": 5, "faults": True}),
    ):
        opened = stores.sqlite(tmp_path / name)
        fill(Driver(opened), **how)  # type: ignore[arg-type]
        opened.close()
        reports.append(stores.checked(tmp_path / name))
    plain, again, faults = reports

    assert plain == again
    assert plain.outcome_digest == faults.outcome_digest
    assert plain.state_digest != faults.state_digest
    assert plain.position != faults.position


def test_a_report_is_plain_json(healthy: Path) -> None:
    shown = msgspec.json.decode(msgspec.json.encode(check(healthy)))

    assert list(shown) == [
        "findings",
        "operations",
        "memories",
        "position",
        "state_digest",
        "outcome_digest",
        "lineage",
        "owned_by",
    ]


@pytest.fixture(autouse=True)
def no_open_file_is_left() -> Iterator[None]:
    """A check closes what it opens, also where the file is damaged."""
    before = open_ledgers()
    yield
    assert open_ledgers() <= before


def open_ledgers() -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += FILE in str(each.readlink())
        except FileNotFoundError:
            continue  # The listing's own.
    return found
