"""Digests see every change that they must and no other; units survive their bytes (ADR 0005)."""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from muniment.core import replay
from muniment.core.replay import Outcome, Tables, fold, outcome_digest, state_digest
from muniment.core.tables import TABLES, Row
from muniment.errors import Corrupt, InvariantBroken
from muniment.model import journal
from muniment.model.operation import Kind, State

SNAPSHOT = journal.Snapshot(1, 1, 0, None, None)


def _history() -> Iterator[journal.AnyUnit]:
    """One unit of each type that together leave a row in every table."""
    yield journal.Genesis(at=1, lineage="00")
    yield journal.Account(at=1, n=1, key="local")
    yield journal.Model(at=1, n=1, digest="d" * 64, identity={"dimensions": 4})
    yield journal.Executor(at=1, witness=journal.Witness(1, "reserved", 1, None))
    accepted = journal.At(State.ACCEPTED, 1)
    for n, kind in enumerate((Kind.ADD_MEMORY, Kind.CREATE_TASK_STREAM, Kind.ADD_TASK_STEP), start=1):
        yield journal.Accept(
            at=2,
            n=n,
            account=1,
            id=f"operation-{n}",
            kind=kind,
            payload_hash="a" * 64,
            dependencies=(("operation-0", False),) if n == 1 else (),
            object=n,
            content=journal.Held(5, "b" * 64) if n == 1 else None,
            attributes=journal.Held(2, "c" * 64),
            to=accepted,
        )
    processing, committed = journal.At(State.PROCESSING, 4), journal.At(State.COMMITTED, 6)
    moved = (journal.Moved(2, State.ACCEPTED, State.VALIDATED, None),)
    yield journal.Plan(
        at=3,
        n=1,
        was=accepted,
        to=processing,
        executor=SNAPSHOT,
        events=moved,
        plan=1,
        object=1,
        model=1,
        profile="sentences-64-1",
        token_count=2,
        parts=(journal.Part(0, 2, 0, 5, "e" * 64),),
    )
    yield journal.Parts(
        at=4, n=1, was=processing, to=processing, executor=SNAPSHOT, plan=1, vectors=((0, "f" * 64),)
    )
    ended: dict[str, Any] = {
        "at": 5,
        "to": committed,
        "executor": SNAPSHOT,
        "account": 1,
        "result": {"id": "x"},
    }
    yield journal.Commit(
        n=1,
        id="operation-1",
        was=processing,
        memory=journal.Memory(
            object=1,
            key="memory:a",
            plan=1,
            space=None,
            visibility="private",
            submitter=None,
            role=None,
            session_seq=None,
            occurred_at=None,
            expires_at=None,
        ),
        **ended,
    )
    yield journal.Commit(
        n=2,
        id="operation-2",
        was=accepted,
        stream=journal.Stream(object=2, key="stream:a", status="active"),
        **ended,
    )
    yield journal.Commit(
        n=3,
        id="operation-3",
        was=accepted,
        step=journal.TaskStep(object=3, key="step:a", stream=2, ordinal=1, status="pending"),
        **ended,
    )


def _rows(tables: Tables) -> dict[str, list[Row]]:
    return {name: list(rows.values()) for name, rows in tables.rows.items()}


def _digest(rows: dict[str, list[Row]]) -> str:
    return state_digest(rows.items())


ROWS = _rows(fold(_history()))
ATTESTED = [(table.name, column) for table in TABLES.values() for column in table.key + table.attested]
HELD = [(table.name, column) for table in TABLES.values() for column in table.held]


def test_the_history_leaves_a_row_in_every_table() -> None:
    assert {name for name, rows in ROWS.items() if rows} == set(TABLES)


@pytest.mark.parametrize(("table", "column"), ATTESTED)
def test_a_changed_attested_value_changes_the_state_digest(table: str, column: str) -> None:
    changed = copy.deepcopy(ROWS)
    row = changed[table][0]
    row[column] = f"{row[column]}-changed" if isinstance(row[column], str) else (row[column] or 0) + 1
    assert _digest(changed) != _digest(ROWS)


@pytest.mark.parametrize(("table", "column"), HELD)
def test_a_held_value_is_not_in_the_state_digest(table: str, column: str) -> None:
    changed = copy.deepcopy(ROWS)
    changed[table][0][column] = b"erased"
    assert _digest(changed) == _digest(ROWS)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_a_dropped_or_doubled_row_changes_the_state_digest(table: str) -> None:
    for rows in ([], ROWS[table] * 2):
        assert _digest(ROWS | {table: rows}) != _digest(ROWS)


def test_the_order_of_rows_is_not_in_the_state_digest() -> None:
    assert _digest({name: rows[::-1] for name, rows in reversed(ROWS.items())}) == _digest(ROWS)


OUTCOME = Outcome(
    account="local",
    operation_id="a",
    kind="add_memory",
    payload_hash="a" * 64,
    state=State.COMMITTED,
    result={"id": "memory:a"},
    error=None,
    objects=("memory:a",),
    source_digest="b" * 64,
    plan_ranges=((0, 2, 0, 5),),
    model_digest="c" * 64,
)
OTHER: dict[str, Any] = {
    "account": "other",
    "operation_id": "b",
    "kind": "complete_step",
    "payload_hash": "d" * 64,
    "state": State.REJECTED,
    "result": {"id": "memory:b"},
    "error": "no",
    "objects": (),
    "source_digest": None,
    "plan_ranges": ((0, 2, 0, 6),),
    "model_digest": None,
}


@pytest.mark.parametrize("field", Outcome.__struct_fields__)
def test_a_changed_field_changes_the_outcome_digest(field: str) -> None:
    changed = msgspec.structs.replace(OUTCOME, **{field: OTHER[field]})
    assert outcome_digest([changed]) != outcome_digest([OUTCOME])


def test_the_outcome_digest_is_in_id_order_and_counts() -> None:
    other = msgspec.structs.replace(OUTCOME, operation_id="b")
    assert outcome_digest([OUTCOME, other]) == outcome_digest([other, OUTCOME])
    assert outcome_digest([OUTCOME, OUTCOME]) != outcome_digest([OUTCOME])


def test_units_survive_their_bytes() -> None:
    for unit in _history():
        data = replay.encode(unit)
        assert replay.decode(data) == unit
        assert replay.encode(replay.decode(data)) == data


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"t":"later","v":1,"at":1}', b'{"t":"genesis","v":2,"at":1,"lineage":""}', b"\xff"]
)
def test_bytes_of_no_known_unit_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        replay.decode(data)


def test_a_unit_that_does_not_fit_breaks_the_fold() -> None:
    units = list(_history())
    with pytest.raises(InvariantBroken):
        fold([*units, units[-1]])
    with pytest.raises(InvariantBroken):
        fold(units[:5] + units[8:])
