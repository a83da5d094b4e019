"""What a task operation does: unique streams, steps keyed inside their stream, one completion.

An equal repetition commits to what exists; a differing one is refused, since silence would drop what the
caller said. Texts of refusals name object keys, never caller text: a receipt is kept for ever, caller text
may be erased.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from muniment.core import canonical
from muniment.core.tables import Row
from muniment.errors import InvariantBroken
from muniment.model import journal
from muniment.model.operation import Kind


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What to commit: the receipt's result and at most one new or changed object, with its held text."""

    result: dict[str, Any]
    stream: journal.Stream | None = None
    step: journal.TaskStep | None = None
    completion: journal.Completion | None = None
    text: Mapping[str, str | None] = {}


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why the operation ends as rejected: a fixed word for programs and a sentence for people."""

    reason: str
    error: str


class View(Protocol):
    """What a decision may look at: everything of the operation's own account."""

    @property
    def object(self) -> int:
        """The operation's own object number."""
        ...

    def streams(self, name: str) -> list[Row]:
        """All streams of this name."""
        ...

    def stream_name(self, stream_n: int) -> str | None:
        """The name of a stream."""
        ...

    def steps(self, stream_n: int) -> list[Row]:
        """The steps of a stream."""
        ...

    def find_steps(self, idempotency_key: str) -> list[Row]:
        """All steps with this idempotency key."""
        ...

    def attributes(self, object_n: int) -> dict[str, Any]:
        """The attributes of an object."""
        ...


def decide(
    kind: Kind, payload: Mapping[str, Any], view: View, stream_key: str, step_key: str
) -> Effect | Refused:
    """Decide the effect of a task operation on the objects as they are."""
    match kind:
        case Kind.CREATE_TASK_STREAM:
            return _create_stream(payload, view, stream_key)
        case Kind.ADD_TASK_STEP:
            return _add_step(payload, view, step_key)
        case Kind.COMPLETE_STEP:
            return _complete_step(payload, view)
        case Kind.ADD_MEMORY:
            raise InvariantBroken("a memory is no task operation")


def _own_streams(view: View, name: str, payload: Mapping[str, Any]) -> list[Row]:
    """Streams of this name and exactly this owner and agent; an absent one matches only an absent one."""
    wanted = (payload.get("user_id"), payload.get("agent_id"))
    return [stream for stream in view.streams(name) if (stream["owner"], stream["agent"]) == wanted]


def _create_stream(payload: Mapping[str, Any], view: View, key: str) -> Effect | Refused:
    for existing in _own_streams(view, payload["name"], payload):
        if view.attributes(existing["object_n"]).get("description") != payload.get("description"):
            return Refused(
                reason="stream_differs",
                error=f"{existing['key']} has this name, owner and agent, and another description",
            )
        return Effect(result={"id": existing["key"], "existing": True})
    return Effect(
        result={"id": key, "existing": False},
        stream=journal.Stream(object=view.object, key=key, status="active"),
        text={"name": payload["name"], "owner": payload.get("user_id"), "agent": payload.get("agent_id")},
    )


def _step_content(payload: Mapping[str, Any]) -> tuple[Any, ...]:
    ordinal = payload.get("ordinal")
    return (payload.get("name"), 1 if ordinal is None else ordinal, payload.get("description"))


def _add_step(payload: Mapping[str, Any], view: View, key: str) -> Effect | Refused:
    streams = _own_streams(view, payload["stream_name"], payload)
    if not streams:
        return Refused(
            reason="stream_not_found", error="no task stream has this stream_name, user_id and agent_id"
        )
    stream = streams[0]
    for existing in view.steps(stream["object_n"]):
        if existing["idempotency_key"] == payload["idempotency_key"]:
            if _step_content(view.attributes(existing["object_n"])) != _step_content(payload):
                return Refused(
                    reason="step_differs", error=f"{existing['key']} has this idempotency_key and differs"
                )
            return Effect(result={"id": existing["key"], "task_stream_id": stream["key"], "existing": True})
    return Effect(
        result={"id": key, "task_stream_id": stream["key"], "existing": False},
        step=journal.TaskStep(
            object=view.object,
            key=key,
            stream=stream["object_n"],
            ordinal=_step_content(payload)[1],
            status="pending",
        ),
        text={"name": payload["name"], "idempotency_key": payload["idempotency_key"]},
    )


def _complete_step(payload: Mapping[str, Any], view: View) -> Effect | Refused:
    named = payload.get("stream_name")
    found = [
        step
        for step in view.find_steps(payload["idempotency_key"])
        if named is None or view.stream_name(step["stream_n"]) == named
    ]
    if not found:
        return Refused(reason="step_not_found", error="no task step has this idempotency_key")
    if len(found) > 1:
        keys = ", ".join(sorted(step["key"] for step in found))
        hint = "; name its stream in stream_name" if named is None else ""
        return Refused(
            reason="step_ambiguous", error=f"several task steps have this idempotency_key: {keys}{hint}"
        )
    step = found[0]
    result = {"id": step["key"], "status": "completed", "existing": step["completed_by"] is not None}
    if step["completed_by"] is None:
        return Effect(result=result, completion=journal.Completion(step=step["object_n"], by=view.object))
    first = view.attributes(step["completed_by"]).get("result")
    if canonical.encode(first) != canonical.encode(
        payload.get("result")
    ):  # 1, 1.0 and true are three results.
        return Refused(reason="completion_differs", error=f"{step['key']} is completed with another result")
    return Effect(result=result)
