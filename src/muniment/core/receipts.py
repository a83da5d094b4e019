"""Rows to what callers see: receipts and events, the same bytes however often asked (rulings 9 and 17)."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import msgspec
import orjson

from muniment.core.dependencies import blocked_by
from muniment.core.tables import Row
from muniment.model import journal
from muniment.model.operation import SCHEMA_VERSION, Event, Kind, Receipt, State
from muniment.model.times import rfc3339

EVENT_NAME: Final = "operation_state"
SECONDS_KEPT: Final = 1024
_KINDS: Final = {str(kind): kind for kind in Kind}
_STATES: Final = {str(state): state for state in State}


@lru_cache(SECONDS_KEPT)
def _to_second(seconds: int) -> str:
    return rfc3339(seconds * 1_000_000)[: -len(".000000Z")]


def moment(microseconds: int) -> str:
    """What ``rfc3339`` says; times of one batch share their second, which is rendered once."""
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{_to_second(seconds)}.{rest:06d}Z"


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def receipt(row: Row, dependencies: Iterable[Row]) -> Receipt:
    """Project an operation row and its dependency rows, in their order, onto the seed's receipt."""
    named = [(dependency["depends_on"], bool(dependency["met"])) for dependency in dependencies]
    created = moment(row["created_us"])
    return Receipt(
        operation_id=row["id"],
        schema_version=SCHEMA_VERSION,
        kind=_KINDS[row["kind"]],
        payload_hash=row["payload_hash"],
        dependencies=tuple(depends_on for depends_on, _ in named),
        state=_STATES[row["state"]],
        blocked_by=blocked_by(named) if named else (),
        result=_json(row["result"]),
        error=row["error"],
        executor_generation=row["executor_generation"],
        executor_progress_seq=row["executor_progress_seq"],
        executor_exit_count=row["executor_exit_count"],
        executor_last_exit=row["executor_last_exit"],
        executor_error=row["executor_error"],
        progress_seq=row["progress_seq"],
        created_at=created,
        updated_at=created if row["updated_us"] == row["created_us"] else moment(row["updated_us"]),
    )


def accepted(unit: journal.Accept) -> Receipt:
    """The first receipt of an operation: what ``receipt`` makes of the rows of this unit."""
    at = moment(unit.at)
    return Receipt(
        operation_id=unit.id,
        schema_version=SCHEMA_VERSION,
        kind=unit.kind,
        payload_hash=unit.payload_hash,
        dependencies=tuple([depends_on for depends_on, _ in unit.dependencies]),
        state=unit.to.state,
        blocked_by=blocked_by(unit.dependencies) if unit.dependencies else (),
        result=None,
        error=None,
        executor_generation=0,
        executor_progress_seq=0,
        executor_exit_count=0,
        executor_last_exit=None,
        executor_error=None,
        progress_seq=unit.to.sequence,
        created_at=at,
        updated_at=at,
    )


def event(operation_id: str, row: Row) -> Event:
    """Project an event row onto the seed's event."""
    return Event(
        operation_id=operation_id,
        sequence=row["sequence"],
        from_state=None if row["from_state"] is None else _STATES[row["from_state"]],
        to_state=_STATES[row["to_state"]],
        detail=_json(row["detail"]),
        executor_generation=row["executor_generation"],
        occurred_at=moment(row["occurred_us"]),
    )


def frame(shown: Event) -> bytes:
    """The server-sent event of one transition; live and replayed frames are the same bytes."""
    data = orjson.dumps(msgspec.to_builtins(shown))
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (shown.sequence, EVENT_NAME.encode(), data)
