"""Receipts and events: each column in its place, the same bytes whenever asked."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.core import receipts
from muniment.core.tables import Row
from muniment.model.operation import Event, Kind, Receipt, State
from muniment.model.times import rfc3339

LOW = -62_135_596_800_000_000  # Of the years 1 to 9999.
HIGH = 253_402_300_799_999_999

OPERATION: Row = {
    "id": "op",
    "kind": "add_memory",
    "payload_hash": "ab" * 32,
    "state": "blocked",
    "result": None,
    "error": None,
    "executor_generation": 2,
    "executor_progress_seq": 3,
    "executor_exit_count": 4,
    "executor_last_exit": "signal 9",
    "executor_error": "failed",
    "progress_seq": 5,
    "created_us": 0,
    "updated_us": 1,
}
EVENT: Row = {
    "sequence": 3,
    "from_state": "validated",
    "to_state": "blocked",
    "detail": '{"blocked_by":["a"]}',
    "executor_generation": 7,
    "occurred_us": 1_500_000,
}


@given(st.integers(LOW, HIGH), st.integers(-2, 2))
def test_a_moment_is_what_the_renderer_of_times_says(microseconds: int, seconds: int) -> None:
    """Also where its second, or one beside it, was rendered already."""
    near = min(max(microseconds + seconds * 500_000, LOW), HIGH)

    assert [receipts.moment(each) for each in (microseconds, near)] == [rfc3339(microseconds), rfc3339(near)]


def test_a_receipt_has_every_column_in_its_place() -> None:
    dependencies: list[Row] = [
        {"depends_on": "z", "met": 0},
        {"depends_on": "m", "met": 1},
        {"depends_on": "a", "met": 0},
    ]
    assert receipts.receipt(OPERATION, dependencies) == Receipt(
        operation_id="op",
        schema_version=2,
        kind=Kind.ADD_MEMORY,
        payload_hash="ab" * 32,
        dependencies=("z", "m", "a"),
        state=State.BLOCKED,
        blocked_by=("a", "z"),
        result=None,
        error=None,
        executor_generation=2,
        executor_progress_seq=3,
        executor_exit_count=4,
        executor_last_exit="signal 9",
        executor_error="failed",
        progress_seq=5,
        created_at="1970-01-01T00:00:00.000000Z",
        updated_at="1970-01-01T00:00:00.000001Z",
    )


@pytest.mark.parametrize(
    ("text", "value"), [(None, None), ("{}", {}), ("false", False), ('{"a":[1,null]}', {"a": [1, None]})]
)
def test_a_result_and_a_detail_are_json(text: str | None, value: object) -> None:
    assert receipts.receipt(OPERATION | {"result": text}, []).result == value
    assert receipts.event("op", EVENT | {"detail": text}).detail == value


def test_an_event_has_every_column_in_its_place() -> None:
    assert receipts.event("op", EVENT) == Event(
        operation_id="op",
        sequence=3,
        from_state=State.VALIDATED,
        to_state=State.BLOCKED,
        detail={"blocked_by": ["a"]},
        executor_generation=7,
        occurred_at="1970-01-01T00:00:01.500000Z",
    )
    first = receipts.event("op", EVENT | {"from_state": None, "to_state": "accepted"})
    assert (first.from_state, first.to_state) == (None, State.ACCEPTED)


@pytest.mark.parametrize("name", ["op", "a\nevent: x\n\nid: 9", "\r\u2028", "é😀"])
def test_a_frame_is_one_frame_whatever_the_id(name: str) -> None:
    shown = receipts.event(name, EVENT)
    frame = receipts.frame(shown)
    assert frame == receipts.frame(receipts.event(name, dict(EVENT)))
    head, event, data = frame.removesuffix(b"\n\n").split(b"\n")
    assert (head, event) == (b"id: 3", b"event: operation_state")
    assert b"\r" not in frame
    told = orjson.loads(data.removeprefix(b"data: "))
    assert told["operation_id"] == name
    assert list(told) == list(Event.__struct_fields__)
