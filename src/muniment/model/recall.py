"""What a caller asks of recall."""

import msgspec


class RecallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A query with its limit and filters; ``None`` means no filter, an empty ``categories`` too."""

    query: str
    limit: int = 10
    user_id: str | None = None
    agent_id: str | None = None
    session_id: str | None = None
    categories: tuple[str, ...] | None = None
