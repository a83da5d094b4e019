"""The tables of a history as data: what names a row, what the journal attests, what is held apart.

``schema.sql`` must have these tables with these columns (a test compares). *Attested* columns follow from
the journal alone and make up the ``state_digest``. *Held* columns are bytes and caller text that the
journal names only by salted digests; an erase may empty them (rulings 13 to 15).
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

Row = dict[str, Any]
Key = tuple[Any, ...]


class Table(msgspec.Struct, frozen=True):
    """One table: key columns, further attested columns, held columns."""

    name: str
    key: tuple[str, ...]
    attested: tuple[str, ...]
    held: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns in the order of the schema."""
        return self.key + self.attested + self.held


_TABLES: Final = (
    Table("account", ("n",), ("key", "created_us")),
    Table("model", ("n",), ("digest", "identity", "created_us")),
    Table(
        "operation",
        ("n",),
        (
            "account_n",
            "id",
            "kind",
            "payload_hash",
            "object_n",
            "state",
            "progress_seq",
            "result",
            "error",
            "executor_generation",
            "executor_progress_seq",
            "executor_exit_count",
            "executor_last_exit",
            "executor_error",
            "created_us",
            "updated_us",
        ),
    ),
    Table("dependency", ("operation_n", "ordinal"), ("account_n", "depends_on", "met")),
    Table(
        "event",
        ("operation_n", "sequence"),
        ("from_state", "to_state", "detail", "executor_generation", "occurred_us"),
    ),
    Table("evidence", ("operation_n", "sequence"), ("kind", "generation", "message", "occurred_us")),
    Table("payload", ("object_n",), ("byte_count", "digest"), ("salt", "bytes")),
    Table("attribute", ("object_n",), ("operation_n", "byte_count", "digest"), ("salt", "bytes")),
    Table(
        "plan",
        ("n",),
        ("object_n", "model_n", "profile", "token_count", "part_count", "active", "created_us"),
    ),
    Table(
        "part",
        ("plan_n", "part_index"),
        (
            "token_start",
            "token_end",
            "byte_start",
            "byte_end",
            "digest",
            "embedding_state",
            "generation",
            "updated_us",
        ),
    ),
    Table("vector", ("plan_n", "part_index"), ("digest",), ("bytes",)),
    Table(
        "memory",
        ("object_n",),
        (
            "key",
            "operation_n",
            "plan_n",
            "space_n",
            "visibility",
            "submitter_n",
            "role",
            "session_seq",
            "occurred_us",
            "expires_us",
            "recorded_us",
        ),
        ("owner", "agent", "session", "speaker"),
    ),
    Table(
        "stream",
        ("object_n",),
        ("key", "account_n", "operation_n", "status", "created_us"),
        ("name", "owner", "agent"),
    ),
    Table(
        "step",
        ("object_n",),
        ("key", "operation_n", "stream_n", "ordinal", "status", "completed_by", "created_us", "completed_us"),
        ("name", "idempotency_key"),
    ),
)

TABLES: Final[Mapping[str, Table]] = {table.name: table for table in _TABLES}
