"""Static rules of the kind payloads: what POST refuses with 400, the field named (rulings 4 and 14).

``null`` means absent in every optional field. An unknown field is refused: a caller who wrote ``catgories``
must hear of it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from muniment.core import canonical
from muniment.errors import InvalidField
from muniment.model.operation import Kind
from muniment.model.times import parse_rfc3339

ROLES: Final = ("user", "assistant", "system", "tool")
VISIBILITIES: Final = ("private", "instance")
ORDINAL_MAX: Final = 2**32 - 1
SESSION_SEQ_MAX: Final = 2**63 - 1

Check = Callable[[str, Any], None]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a payload must keep to."""

    content_bytes_max: int
    attributes_bytes_max: int


def _text(field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidField(field, f"must be a string, not {_typename(value)}")


def _filled(field: str, value: Any) -> None:
    _text(field, value)
    if not value.strip():
        raise InvalidField(field, "must not be blank")


def _whole(low: int, high: int) -> Check:
    def check(field: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidField(field, f"must be an integer, not {_typename(value)}")
        if not low <= value <= high:
            raise InvalidField(field, f"must be from {low} to {high}, not {value}")

    return check


def _one_of(*allowed: str) -> Check:
    def check(field: str, value: Any) -> None:
        _text(field, value)
        if value not in allowed:
            raise InvalidField(field, f"must be one of {', '.join(allowed)}")

    return check


def _texts(field: str, value: Any) -> None:
    if not isinstance(value, list):
        raise InvalidField(field, f"must be an array of strings, not {_typename(value)}")
    for index, item in enumerate(value):
        _text(f"{field}[{index}]", item)


def _moment(field: str, value: Any) -> None:
    _text(field, value)
    try:
        parse_rfc3339(value)
    except ValueError as error:
        raise InvalidField(field, str(error)) from error


def _object(field: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidField(field, f"must be an object, not {_typename(value)}")


def _anything(field: str, value: Any) -> None:
    """Any JSON value."""


def _no_space(field: str, value: Any) -> None:
    _text(field, value)
    raise InvalidField(field, "names no space of this server; leave it out or null")


def _quotes(field: str, value: Any) -> None:
    if not isinstance(value, list):
        raise InvalidField(field, f"must be an array, not {_typename(value)}")
    for index, quote in enumerate(value):
        where = f"{field}[{index}]"
        _object(where, quote)
        for name in quote:
            if name not in ("start", "end", "speaker"):
                raise InvalidField(f"{where}.{name}", "unknown field")
        for name in ("start", "end"):
            if name not in quote:
                raise InvalidField(f"{where}.{name}", "is required")
            _whole(0, 2**53)(f"{where}.{name}", quote[name])
        if quote.get("speaker") is not None:
            _text(f"{where}.speaker", quote["speaker"])


_COMMON: Final[Mapping[str, Check]] = {"user_id": _text, "agent_id": _text}

FIELDS: Final[Mapping[Kind, Mapping[str, Check]]] = {
    Kind.ADD_MEMORY: {
        "content": _filled,
        **_COMMON,
        "session_id": _text,
        "categories": _texts,
        "space": _no_space,
        "visibility": _one_of(*VISIBILITIES),
        "speaker": _text,
        "role": _one_of(*ROLES),
        "quotes": _quotes,
        "mentions": _texts,
        "session_seq": _whole(0, SESSION_SEQ_MAX),
        "occurred_at": _moment,
        "expires_at": _moment,
        "metadata": _object,
    },
    Kind.CREATE_TASK_STREAM: {"name": _filled, "description": _text, **_COMMON},
    Kind.ADD_TASK_STEP: {
        "stream_name": _filled,
        "name": _filled,
        "idempotency_key": _filled,
        "ordinal": _whole(0, ORDINAL_MAX),
        "description": _text,
        **_COMMON,
    },
    Kind.COMPLETE_STEP: {"idempotency_key": _filled, "stream_name": _text, "result": _anything},
}

REQUIRED: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.ADD_MEMORY: ("content",),
    Kind.CREATE_TASK_STREAM: ("name",),
    Kind.ADD_TASK_STEP: ("stream_name", "name", "idempotency_key"),
    Kind.COMPLETE_STEP: ("idempotency_key",),
}


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """A payload as it is kept: the source's exact bytes, and the canonical JSON of all else."""

    content: bytes | None
    attributes: bytes


def _typename(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def validate(kind: Kind, payload: Mapping[str, Any], limits: Limits) -> None:
    """Raise ``InvalidField`` that names the first wrong field, in the order of the reference page."""
    checks = FIELDS[kind]
    for name in payload:
        if name not in checks:
            raise InvalidField(f"payload.{name}", f"unknown field of {kind}")
    for name in REQUIRED[kind]:
        if payload.get(name) is None:
            raise InvalidField(f"payload.{name}", f"is required by {kind}")
    for name, check in checks.items():
        if payload.get(name) is not None:
            check(f"payload.{name}", payload[name])
    divided = divide(payload)
    if len(divided.attributes) > limits.attributes_bytes_max:
        raise InvalidField(
            "payload",
            f"is {len(divided.attributes)} bytes without its content, "
            f"the limit is {limits.attributes_bytes_max}",
        )
    if divided.content is not None:
        if len(divided.content) > limits.content_bytes_max:
            raise InvalidField(
                "payload.content", f"is {len(divided.content)} bytes, the limit is {limits.content_bytes_max}"
            )
        _quote_ranges(payload.get("quotes") or (), divided.content)


def _quote_ranges(quotes: Any, content: bytes) -> None:
    for index, quote in enumerate(quotes):
        start, end = quote["start"], quote["end"]
        if not start < end <= len(content):
            raise InvalidField(
                f"payload.quotes[{index}]",
                f"{start}..{end} is no byte range of a content of {len(content)} bytes",
            )
        for name, offset in (("start", start), ("end", end)):
            if offset < len(content) and content[offset] & 0xC0 == 0x80:
                raise InvalidField(f"payload.quotes[{index}].{name}", "stands inside a character")


def divide(payload: Mapping[str, Any]) -> Divided:
    """Split a payload into what is kept apart; nulls stay, so that the payload can be put together again."""
    content = payload.get("content")
    if not isinstance(content, str):
        return Divided(content=None, attributes=canonical.encode(dict(payload)))
    rest = {name: value for name, value in payload.items() if name != "content"}
    return Divided(content=content.encode(), attributes=canonical.encode(rest))
