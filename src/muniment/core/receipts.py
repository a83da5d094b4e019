"""Rows to what callers see: receipts and events, the same bytes however often asked (rulings 9 and 17)."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import orjson

from muniment.core.dependencies import blocked_by
from muniment.core.tables import Row
from muniment.model.operation import SCHEMA_VERSION, Event, Kind, Receipt, State
from muniment.model.times import rfc3339

EVENT_NAME: Final = "operation_state"


def _json(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def receipt(row: Row, dependencies: Iterable[Row]) -> Receipt:
    """Project an operation row and its dependency rows, in their order, onto the seed's receipt."""
    named = [(dependency["depends_on"], bool(dependency["met"])) for dependency in dependencies]
    return Receipt(
        operation_id=row["id"],
        schema_version=SCHEMA_VERSION,
        kind=Kind(row["kind"]),
        payload_hash=row["payload_hash"],
        dependencies=tuple(depends_on for depends_on, _ in named),
        state=State(row["state"]),
        blocked_by=blocked_by(named),
        result=_json(row["result"]),
        error=row["error"],
        executor_generation=row["executor_generation"],
        executor_progress_seq=row["executor_progress_seq"],
        executor_exit_count=row["executor_exit_count"],
        executor_last_exit=row["executor_last_exit"],
        executor_error=row["executor_error"],
        progress_seq=row["progress_seq"],
        created_at=rfc3339(row["created_us"]),
        updated_at=rfc3339(row["updated_us"]),
    )


def event(operation_id: str, row: Row) -> Event:
    """Project an event row onto the seed's event."""
    return Event(
        operation_id=operation_id,
        sequence=row["sequence"],
        from_state=None if row["from_state"] is None else State(row["from_state"]),
        to_state=State(row["to_state"]),
        detail=_json(row["detail"]),
        executor_generation=row["executor_generation"],
        occurred_at=rfc3339(row["occurred_us"]),
    )


def frame(shown: Event) -> bytes:
    """The server-sent event of one transition; live and replayed frames are the same bytes."""
    data = orjson.dumps(msgspec.to_builtins(shown))
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (shown.sequence, EVENT_NAME.encode(), data)
