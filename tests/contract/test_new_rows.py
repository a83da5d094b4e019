"""Rows that wait to be written together are there for every read and gone with their batch (ADR 0020)."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

from muniment.adapters.sqlite import known_operations, rows
from muniment.adapters.sqlite.known_operations import KnownOperations
from muniment.adapters.sqlite.new_rows import INSERTS
from muniment.adapters.sqlite.queries import migrations, repeated, statements
from muniment.adapters.sqlite.rows import SqliteRows
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core import identity
from muniment.core.planning import model_digest
from muniment.core.tables import TABLES
from muniment.errors import Conflict, InvariantBroken
from muniment.model import command, journal
from muniment.model.command import Command
from muniment.model.operation import State
from muniment.ports.ledger import Reads, Rows
from muniment.stages import ledger as stage
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import ACCOUNT, NOW
from tests.support.stores import Driver

SQLITE_PARAMETERS_MAX: Final = 32_766
BURST: Final = 32
BURST_STATEMENTS_MAX: Final = 12

M1: Final = ops.memory("m1", user_id="ann")
# Every way through the ledger, in commands whose operation numbers are those of their acceptance.
STORY: Final[tuple[Command, ...]] = (
    command.ReserveGeneration(now=NOW),
    M1,
    ops.memory("m2", "Two sentences here. This is the other.", ["m1", "later"]),
    ops.stream("s1", "chores"),
    ops.step("t1", dependencies=["m1"]),
    ops.memory("later", now=NOW + 3),
    ops.memory("refused", dependencies=["later"]),
    ops.memory("falls", dependencies=["refused"]),
    command.Advance(n=1, now=NOW + 4),
    command.AdvanceAll(numbers=(2, 5, 6, 7), now=NOW + 4),
    M1,
    ops.plan(1, M1, parts=2),
    ops.vectors(1, 1, [0]),
    ops.exited(1, kind="failure"),
    ops.exited(1, generation=1, kind="stall"),
    ops.vectors(1, 1, [1], generation=2),
    command.CommitMemory(n=1, now=NOW + 9),
    command.Apply(n=3, now=NOW + 9),
    command.Apply(n=4, now=NOW + 9),
    ops.complete("c1", result=[1]),
    command.Apply(n=8, now=NOW + 10),
    ops.refuse(6, now=NOW + 11),
    ops.plan(5, ops.memory("later"), generation=2),
    ops.vectors(5, 2, [0], generation=2),
    command.CommitMemory(n=5, now=NOW + 12),
    command.Observe(kind="exit", generation=1, message="signal 9", now=NOW),
    command.Probe(now=NOW),
    ops.stream("s2", "chores", user_id="bob"),
    command.Apply(n=9, now=NOW + 13),
)


def rows_of(table: str) -> Callable[[Reads], Any]:
    return lambda reads: list(reads.rows(table))


READS: Final[dict[str, Callable[[Reads], Any]]] = {
    "head": lambda reads: reads.head(),
    "units": lambda reads: list(reads.units(0, 1000)),
    **{f"rows of {table}": rows_of(table) for table in TABLES},
    "find_account": lambda reads: reads.find_account("local"),
    "account": lambda reads: reads.account(1),
    "operation": lambda reads: [reads.operation(n) for n in range(1, 10)],
    "find_operation": lambda reads: [reads.find_operation(ACCOUNT, each) for each in ("m1", "later", "x")],
    "operations": lambda reads: [
        reads.operations(ACCOUNT, state=state, kind=None, after=0, limit=99)
        for state in (None, "accepted", "rejected", "committed")
    ],
    "unfinished": lambda reads: reads.unfinished(),
    "unsettled_dependents": lambda reads: reads.unsettled_dependents(ACCOUNT, "later"),
    "has_dependents": lambda reads: [reads.has_dependents(ACCOUNT, each) for each in ("later", "m1", "t1")],
    "dependencies": lambda reads: [reads.dependencies(n) for n in range(1, 10)],
    "events": lambda reads: [reads.events(n, 0, 99) for n in range(1, 10)],
    "evidence": lambda reads: [reads.evidence(n) for n in range(10)],
    "last_evidence": lambda reads: [reads.last_evidence(n) for n in range(10)],
    "has_seen_end": lambda reads: [reads.has_seen_end(1, generation) for generation in (1, 2)],
    "last_generation": lambda reads: reads.last_generation(),
    "payload": lambda reads: [reads.payload(n) for n in range(1, 10)],
    "attribute": lambda reads: [reads.attribute(n) for n in range(1, 10)],
    "model": lambda reads: reads.model(1),
    "find_model": lambda reads: reads.find_model(model_digest(ops.MODEL)),
    "active_plan": lambda reads: [reads.active_plan(n) for n in range(1, 10)],
    "parts": lambda reads: [reads.parts(n) for n in (1, 2)],
    "part": lambda reads: [reads.part(1, index) for index in range(3)],
    "missing_parts": lambda reads: reads.missing_parts(1, -1, 9),
    "vectors": lambda reads: [reads.vectors(n) for n in (1, 2)],
    "find_memory": lambda reads: reads.find_memory(identity.object_key("memory", "local", "m1")),
    "memory": lambda reads: [reads.memory(n) for n in range(1, 10)],
    "memories": lambda reads: reads.memories(0, 99),
    "streams": lambda reads: reads.streams(ACCOUNT, "chores"),
    "stream": lambda reads: reads.stream(3),
    "steps": lambda reads: reads.steps(3),
    "find_steps": lambda reads: reads.find_steps(ACCOUNT, "wash"),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[SqliteStore]:
    store = stores.sqlite(tmp_path / "data")
    try:
        yield store
    finally:
        store.close()
    stores.checked(tmp_path / "data")


def tables(reads: Reads) -> dict[str, list[dict[str, Any]]]:
    return {table: list(reads.rows(table)) for table in TABLES}


# One batch, or one command at a time


def test_the_story_has_a_row_in_every_table() -> None:
    ledger = Driver(stores.in_memory())
    for each in STORY:
        ledger.write(each)

    assert [table for table, found in ledger.store.read(tables).items() if not found] == []


def test_one_batch_leaves_what_single_commands_leave(opened: SqliteStore) -> None:
    single = Driver(stores.in_memory())
    expected = [single.write(each) for each in STORY]

    replies, sealed = opened.transact(STORY)

    assert [reply.value for reply in replies] == expected
    assert [each.position for each in sealed] == list(range(3, single.head() + 1))
    assert opened.read(lambda reads: reads.head()) == single.store.read(lambda reads: reads.head())
    assert opened.read(tables) == single.store.read(tables)
    opened.read(stores.journal_is_whole)


def differences(store: SqliteStore, name: str, *, together: bool = True) -> list[int]:
    """The commands of the story after which a read inside their transaction does not find what it must."""
    query = READS[name]
    single = Driver(stores.in_memory())
    expected, found = [], []
    for each in STORY:
        single.write(each)
        expected.append(single.store.read(query))

    def handle(rows: Rows, asked: Command) -> Any:
        reply = stage.handle(rows, asked)
        found.append(query(rows))
        return reply

    store._handle = handle
    for batch in [STORY] if together else [[each] for each in STORY]:
        store.transact(batch)
    return [index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]


def test_every_read_of_the_port_is_asked() -> None:
    asked = {name for name in READS if not name.startswith("rows of")} | {"rows"}

    assert asked == {name for name in vars(Reads) if not name.startswith("_")} - {"meta"}


@pytest.mark.parametrize("name", READS)
def test_a_read_finds_the_new_rows_of_its_batch(opened: SqliteStore, name: str) -> None:
    assert differences(opened, name) == []


@pytest.mark.parametrize("kept", [known_operations.OPERATIONS_KEPT, 1])
@pytest.mark.parametrize("name", ["operation", "find_operation", "dependencies", "rows of operation"])
def test_a_read_finds_what_earlier_transactions_wrote(
    opened: SqliteStore, monkeypatch: pytest.MonkeyPatch, name: str, kept: int
) -> None:
    monkeypatch.setattr(known_operations, "OPERATIONS_KEPT", kept)

    assert differences(opened, name, together=False) == []
    assert len(opened._rows._known._rows) <= kept


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("method", "name"), [("change", "operation"), ("drop", "operation"), ("drop", "dependencies")]
)
def test_control_known_operations_that_grow_old_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str, together: bool
) -> None:
    monkeypatch.setattr(KnownOperations, method, lambda *_: None)
    with closing(stores.sqlite(tmp_path)) as store:
        try:
            found = differences(store, name, together=together)
        except InvariantBroken:
            return  # The change itself is conditional.

    assert found


def test_what_ended_is_not_kept(opened: SqliteStore) -> None:
    kept: set[str] = set()
    for each in STORY:
        opened.transact([each])
        kept |= {row["state"] for row in opened._rows._known._rows.values()}

    assert kept == {State.ACCEPTED, State.VALIDATED, State.BLOCKED, State.PROCESSING}


@pytest.mark.parametrize(
    "name", ["rows of event", "evidence", "last_generation", "attribute", "missing_parts"]
)
def test_control_a_read_that_does_not_wait_for_new_rows_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(rows, "tables", lambda name: frozenset())
    with closing(stores.sqlite(tmp_path)) as store:
        try:
            found = differences(store, name)
        except InvariantBroken:
            return  # The ledger itself reads what is not there.

    assert found


# What was accepted in the same batch


def accepted_twice(store: SqliteStore) -> list[bool]:
    asked: list[Command] = [
        ops.memory("a"),
        ops.memory("a"),
        command.Advance(n=1, now=NOW),  # It reads the operation, so what was collected is written.
        ops.memory("a"),
        ops.memory("b"),
        ops.memory("a", "another text"),
        ops.memory("b"),
    ]
    replies, _ = store.transact(asked)
    assert isinstance(replies[5].error, Conflict)
    return [reply.value.created for reply in replies if isinstance(reply.value, command.Admitted)]


def test_what_a_batch_has_accepted_it_replays(opened: SqliteStore) -> None:
    assert accepted_twice(opened) == [True, False, False, True, False]


def test_what_is_stored_already_is_found_by_a_batch(opened: SqliteStore) -> None:
    opened.transact([ops.memory("a"), ops.memory("c")])

    replies, _ = opened.transact([ops.memory(each) for each in ("a", "b", "c", "b", "\x00", "é")])

    assert [reply.value.created for reply in replies] == [False, True, False, False, True, True]


def test_a_look_up_may_be_of_any_size(opened: SqliteStore) -> None:
    """More IDs than one statement takes parameters: what is stored is found, wherever it stands."""
    opened.transact([ops.memory(each) for each in ("a", "b")])
    others = [(ACCOUNT, f"x{each}") for each in range(SQLITE_PARAMETERS_MAX)]

    opened._rows.look_up([(ACCOUNT, "a"), *others, (ACCOUNT, "b")])

    assert opened._rows._absent == {*others}


def test_control_a_look_up_in_one_statement_is_noticed(
    opened: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LOOK_UP_MAX", SQLITE_PARAMETERS_MAX)

    with pytest.raises(apsw.SQLError, match="too many SQL variables"):
        test_a_look_up_may_be_of_any_size(opened)


@pytest.mark.parametrize("forgotten", ["add", "find"])
def test_control_a_look_up_that_grows_old_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    monkeypatch.setattr(KnownOperations, forgotten, lambda *_: None)
    with closing(stores.sqlite(tmp_path)) as store:
        try:
            found = accepted_twice(store)
        except InvariantBroken:
            return  # The schema has the last word.

    assert found != [True, False, False, True, False]


# What cannot be written


def twice(rows: Rows, asked: Command) -> Any:
    """A bug: an operation gets a number that is taken."""
    unit = journal.Accept(
        at=NOW,
        n=1,
        account=ACCOUNT,
        id="again",
        kind=ops.memory("x").kind,
        payload_hash="0" * 64,
        dependencies=(),
        object=rows.next_number("attribute"),
        content=None,
        attributes=journal.Held(2, "0" * 64),
        to=journal.At(stage._FIRST.state, 1),
    )
    rows.append(unit, {})
    return None


def test_a_row_that_the_schema_refuses_takes_its_batch_with_it_and_leaves_nothing(
    opened: SqliteStore,
) -> None:
    opened.transact([ops.memory("before")])
    before = opened.read(tables)
    handle, opened._handle = (
        opened._handle,
        lambda rows, asked: (
            twice(rows, asked) if isinstance(asked, command.Probe) else stage.handle(rows, asked)
        ),
    )
    batches: list[list[Command]] = [
        [ops.memory("a"), command.Probe(now=NOW)],
        [command.Probe(now=NOW), ops.memory("b")],
    ]
    for batch in batches:
        with pytest.raises(InvariantBroken, match="a constraint of the schema refused a write"):
            opened.transact(batch)
        assert opened.read(tables) == before

    opened._handle = handle
    replies, sealed = opened.transact([ops.memory("a"), ops.memory("after")])
    assert [reply.value.created for reply in replies] == [True, True]
    assert [each.position for each in sealed] == [4, 5]


# The statements


def statements_of(store: SqliteStore, commands: list[Command]) -> list[str]:
    found: list[str] = []

    def note(_: apsw.Cursor, sql: str, __: object) -> bool:
        found.append(sql)
        return True

    store._connection.set_exec_trace(note)
    try:
        store.transact(commands)
    finally:
        store._connection.set_exec_trace(None)
    return found


def burst() -> list[Command]:
    return [ops.memory(f"m{each}") for each in range(BURST)]


def test_a_burst_of_accepts_takes_few_statements(opened: SqliteStore) -> None:
    found = statements_of(opened, burst())

    assert len(found) <= BURST_STATEMENTS_MAX, [each.split("VALUES")[0] for each in found]


def test_control_a_row_a_statement_is_noticed(opened: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_MAX", 1)

    assert len(statements_of(opened, burst())) > BURST_STATEMENTS_MAX


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 128, 200])
def test_however_many_rows_there_are_each_is_written_once(opened: SqliteStore, count: int) -> None:
    opened.transact([ops.memory(f"m{each}") for each in range(count)])

    assert [row["id"] for row in opened.read(tables)["operation"]] == [f"m{each}" for each in range(count)]


def test_few_texts_are_ever_prepared() -> None:
    sizes = {min(1 << (count.bit_length() - 1), rows.ROWS_MAX) for count in range(1, 300)}

    assert sizes == {1, 2, 4, 8, 16, 32, 64}


def forward(order: tuple[str, ...]) -> list[tuple[str, str]]:
    """References to a table whose rows are written after those that refer to it."""
    places = {name.removeprefix("insert_"): place for place, name in enumerate(order)}
    with closing(apsw.Connection(":memory:")) as connection:
        for _, text in migrations():
            connection.execute(text)
        return [
            (table, row[2])
            for table, place in places.items()
            for row in connection.execute(f"PRAGMA foreign_key_list({table})")
            if places[row[2]] > place
        ]


def test_a_row_is_written_after_those_that_it_refers_to() -> None:
    assert {name for name in statements() if re.match("insert_", name)} == set(INSERTS)
    assert forward(INSERTS) == []


def test_control_another_order_is_noticed() -> None:
    assert ("payload", "attribute") in forward(tuple(reversed(INSERTS)))


def test_a_statement_is_repeated_by_its_row_alone() -> None:
    assert repeated("insert_vector", 2) == (
        "INSERT INTO vector (plan_n, part_index, digest, bytes)\nVALUES (?, ?, ?, ?), (?, ?, ?, ?);"
    )
    assert repeated("stored_operations", 3).endswith("IN (VALUES (?, ?), (?, ?), (?, ?));")


def burst_of_advances(store: SqliteStore) -> list[str]:
    store.transact(burst())
    return statements_of(store, [command.AdvanceAll(numbers=tuple(range(1, BURST + 1)), now=NOW)])


def test_a_burst_of_advances_takes_few_statements(opened: SqliteStore) -> None:
    assert len(burst_of_advances(opened)) <= BURST_STATEMENTS_MAX


def test_control_operations_that_are_read_one_by_one_are_noticed(
    opened: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_operations, "OPERATIONS_KEPT", 0)

    assert len(burst_of_advances(opened)) > BURST_STATEMENTS_MAX


def behind_our_back(store: SqliteStore) -> None:
    """What another program wrote to the file: the operation is not as the writer left it."""
    store.transact([ops.memory("m")])
    store._connection.execute("UPDATE operation SET state = 'validated', progress_seq = 2")


def test_a_change_is_conditional_on_what_the_file_holds(opened: SqliteStore) -> None:
    behind_our_back(opened)

    with pytest.raises(InvariantBroken, match="not as its unit expects"):
        opened.transact([command.Advance(n=1, now=NOW)])

    opened._connection.execute("UPDATE operation SET state = 'accepted', progress_seq = 1")
    [reply], _ = opened.transact([command.Advance(n=1, now=NOW)])
    assert reply.value == command.Standing(n=1, state=State.VALIDATED)


def test_a_refused_update_is_told_at_once(opened: SqliteStore) -> None:
    """An update writes what it needs first, and is not put off itself."""
    seen: list[str] = []

    def handle(rows: SqliteRows, asked: Command) -> Any:
        stage.handle(rows, ops.memory("m"))
        row = rows.find_operation(ACCOUNT, "m")
        assert row is not None
        stale = journal.At(State.BLOCKED, 9)
        unit = journal.Advance(at=NOW, n=row["n"], was=stale, to=stale, executor=stage._snapshot(row))
        with pytest.raises(InvariantBroken, match="is not as the unit expects"):
            rows.append(unit, {})
        seen.append("told")
        raise InvariantBroken("and the batch is over")

    opened._handle = handle  # type: ignore[assignment]
    with pytest.raises(InvariantBroken, match="over"):
        opened.transact([command.Probe(now=NOW)])

    assert seen == ["told"]
