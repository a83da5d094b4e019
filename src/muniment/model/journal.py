"""Journal units: one atomic step of one operation, or of the store itself (ruling 12, ADR 0005).

A unit is immutable. Its bytes are the canonical JSON of its fields; ``v`` is the version of this vocabulary
and ``t`` the type. Keys are integers, times integer microseconds. No caller text but operation IDs stands
in a unit: bytes are named by salted digests (ruling 14), so that a unit says nothing once the bytes and
their salt are erased.
"""

from typing import Any, Final

import msgspec

from muniment.model.operation import Kind, State

VERSION: Final = 1


class At(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an operation stood, or stands: its state and progress sequence."""

    state: State
    sequence: int


class Moved(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event: sequence, the two states, and the event's detail."""

    sequence: int
    from_state: State | None
    to_state: State
    detail: Any


class Snapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The executor fields of the receipt after this unit, as absolute values."""

    generation: int
    progress_seq: int
    exit_count: int
    last_exit: str | None
    error: str | None


class Witness(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of executor evidence: its number within the operation, kind, generation, message."""

    sequence: int
    kind: str
    generation: int
    message: str | None


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes that are held apart: how many, and SHA-256 over their salt and them."""

    byte_count: int
    digest: str


class Unit(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", gc=False):
    """What all units have: the vocabulary version and the time of the step."""

    at: int
    v: int = VERSION


class Genesis(Unit, frozen=True, kw_only=True, tag="genesis"):
    """The first unit of every history: its lineage, in hex."""

    lineage: str


class Account(Unit, frozen=True, kw_only=True, tag="account"):
    """A name space for operation IDs begins."""

    n: int
    key: str


class Model(Unit, frozen=True, kw_only=True, tag="model"):
    """A model identity is used for the first time; ``identity`` is ``ModelIdentity`` as plain JSON."""

    n: int
    digest: str
    identity: Any


class Executor(Unit, frozen=True, kw_only=True, tag="executor"):
    """Store-wide evidence: a generation was reserved, became ready, or ended."""

    witness: Witness


class Accept(Unit, frozen=True, kw_only=True, tag="accept"):
    """An operation was durably accepted."""

    n: int
    account: int
    id: str
    kind: Kind
    payload_hash: str
    dependencies: tuple[tuple[str, bool], ...]
    """Each dependency with whether it had been committed already."""
    object: int
    content: Held | None
    attributes: Held
    to: At


class Step(Unit, frozen=True, kw_only=True):
    """A unit of an accepted operation: it holds only where the operation stands at ``was``."""

    n: int
    was: At
    to: At
    executor: Snapshot
    events: tuple[Moved, ...] = ()
    evidence: tuple[Witness, ...] = ()


class Advance(Step, frozen=True, kw_only=True, tag="advance"):
    """Validated, or validated and blocked."""


class Reject(Step, frozen=True, kw_only=True, tag="reject"):
    """Rejected with the receipt's error and result."""

    error: str
    result: Any


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One planned part: token range, byte range, salted digest of its bytes."""

    token_start: int
    token_end: int
    byte_start: int
    byte_end: int
    digest: str


class Plan(Step, frozen=True, kw_only=True, tag="plan"):
    """Planned and processing, with the whole plan."""

    plan: int
    object: int
    model: int
    profile: str
    token_count: int
    parts: tuple[Part, ...]


class Parts(Step, frozen=True, kw_only=True, tag="parts"):
    """A batch of parts was embedded: part index and salted digest of its vector."""

    plan: int
    vectors: tuple[tuple[int, str], ...]


class Evidence(Step, frozen=True, kw_only=True, tag="evidence"):
    """Executor evidence that changes no state (ruling 8)."""


class Memory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The memory that a commit makes. Caller text is in its attributes, which the accept unit names."""

    object: int
    key: str
    plan: int
    space: int | None
    visibility: str
    submitter: int | None
    role: str | None
    session_seq: int | None
    occurred_at: int | None
    expires_at: int | None


class Stream(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The task stream that a commit makes."""

    object: int
    key: str
    status: str


class TaskStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The task step that a commit makes."""

    object: int
    key: str
    stream: int
    ordinal: int
    status: str


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The step that a commit completes; ``by`` is the object that holds the completing payload."""

    step: int
    by: int


class Commit(Step, frozen=True, kw_only=True, tag="commit"):
    """Committed, with the whole effect: at most one of the four; none when an equal object existed.

    ``account`` and ``id`` name the operation again, since the commit meets every dependency on it.
    """

    account: int
    id: str
    result: Any
    memory: Memory | None = None
    stream: Stream | None = None
    step: TaskStep | None = None
    completion: Completion | None = None


AnyStep = Advance | Reject | Plan | Parts | Evidence | Commit
AnyUnit = Genesis | Account | Model | Executor | Accept | AnyStep
