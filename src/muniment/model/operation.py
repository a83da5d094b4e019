"""Operations, receipts and events: the shapes of the seed's contract."""

from enum import StrEnum
from typing import Any, Final

import msgspec

SCHEMA_VERSION: Final = 2


class Kind(StrEnum):
    """The seed's four operation kinds."""

    ADD_MEMORY = "add_memory"
    CREATE_TASK_STREAM = "create_task_stream"
    ADD_TASK_STEP = "add_task_step"
    COMPLETE_STEP = "complete_step"


class State(StrEnum):
    """The seed's operation states, in its order."""

    ACCEPTED = "accepted"
    VALIDATED = "validated"
    BLOCKED = "blocked"
    PLANNED = "planned"
    PROCESSING = "processing"
    INDEXED = "indexed"
    COMMITTED = "committed"
    REJECTED = "rejected"


TERMINAL: Final = frozenset({State.COMMITTED, State.REJECTED})


class OperationRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A submission whose envelope is well formed and whose hash has been computed and agrees."""

    operation_id: str
    kind: Kind
    payload_hash: str
    payload: dict[str, Any]
    dependencies: tuple[str, ...] = ()


class Executor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The receipt's projection of executor evidence (seed, executor-readiness-and-recovery)."""

    generation: int = 0
    progress_seq: int = 0
    exit_count: int = 0
    last_exit: str | None = None
    error: str | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The durable, current answer about an operation; field for field the seed's ``OperationReceipt``."""

    operation_id: str
    schema_version: int
    kind: Kind
    payload_hash: str
    dependencies: tuple[str, ...]
    state: State
    blocked_by: tuple[str, ...]
    result: Any
    error: str | None
    executor_generation: int
    executor_progress_seq: int
    executor_exit_count: int
    executor_last_exit: str | None
    executor_error: str | None
    progress_seq: int
    created_at: str
    updated_at: str


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One state transition; field for field the seed's ``OperationEvent``."""

    operation_id: str
    sequence: int
    from_state: State | None
    to_state: State
    detail: Any
    executor_generation: int
    occurred_at: str


EXIT_KINDS: Final = ("exit", "stall", "protocol")
"""Evidence of an operation that a child had ended while it held something of it; each counts as an exit."""
