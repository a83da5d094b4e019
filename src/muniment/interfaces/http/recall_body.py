"""The body of POST /api/v2/recall."""

from typing import Any, Final

from muniment.config import Config
from muniment.core import canonical
from muniment.errors import InvalidField
from muniment.model.recall import RecallRequest

FIELDS: Final = ("query", "limit", "user_id", "agent_id", "session_id", "categories")
LIMIT_DEFAULT: Final = 10


def recall_request(body: bytes, config: Config) -> RecallRequest:
    """Read a recall request; ``null`` means absent. Raises ``Malformed`` or ``InvalidField``."""
    asked = canonical.parse(body)
    if not isinstance(asked, dict):
        raise InvalidField("body", "must be an object")
    for name in asked:
        if name not in FIELDS:
            raise InvalidField(name, "unknown field")
    return RecallRequest(
        query=_query(asked.get("query"), config.query_bytes_max),
        limit=_limit(asked.get("limit"), config.recall_limit_max),
        user_id=_text(asked, "user_id"),
        agent_id=_text(asked, "agent_id"),
        session_id=_text(asked, "session_id"),
        categories=_texts(asked, "categories"),
    )


def _query(value: Any, byte_count_max: int) -> str:
    if value is None:
        raise InvalidField("query", "is required")
    if not isinstance(value, str):
        raise InvalidField("query", "must be a string")
    if not value.strip():
        raise InvalidField("query", "must not be blank")
    byte_count = len(value.encode())
    if byte_count > byte_count_max:
        raise InvalidField("query", f"is {byte_count} bytes, the limit is {byte_count_max}")
    return value


def _limit(value: Any, maximum: int) -> int:
    if value is None:
        return min(LIMIT_DEFAULT, maximum)
    # JSON Schema calls 10.0 an integer; True is one to Python alone.
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise InvalidField("limit", f"must be an integer from 1 to {maximum}")
    if not 1 <= value <= maximum:
        raise InvalidField("limit", f"must be from 1 to {maximum}")
    return int(value)


def _text(asked: dict[str, Any], name: str) -> str | None:
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidField(name, "must be a string")
    return value


def _texts(asked: dict[str, Any], name: str) -> tuple[str, ...] | None:
    value = asked.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise InvalidField(name, "must be an array of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidField(f"{name}[{index}]", "must be a string")
    return tuple(value)
