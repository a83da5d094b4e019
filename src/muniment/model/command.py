"""Commands to the ledger: frozen, decided and encoded before they reach the writer (ruling 16).

Each is handled in one transaction by ``stages.ledger.handle``; one that loses its condition gets its own
answer and cannot fail its batch. ``now`` is wall-clock microseconds, taken by the caller.
"""

from typing import Any

import msgspec

from muniment.model.operation import Kind, Receipt, State
from muniment.model.plan import ModelIdentity, PlannedPart


class Accept(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Admit a submission whose envelope and hash are right. Reply: ``Admitted``, Conflict or InvalidField."""

    account: int
    operation_id: str
    kind: Kind
    payload_hash: str
    dependencies: tuple[str, ...]
    invalid: tuple[str, str] | None
    """Field and problem of a statically wrong payload: raised where no stored receipt answers (ruling 2)."""
    content: bytes | None
    attributes: bytes
    content_salt: bytes
    attributes_salt: bytes
    now: int


class Admitted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The stored receipt, and whether this command stored it."""

    receipt: Receipt
    created: bool


class Advance(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Validate an accepted operation; block it while dependencies are open, reject it with a rejected one."""

    n: int
    now: int


class AdvanceAll(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``Advance`` each of these operations, in order; the reply is a tuple with each one's reply."""

    numbers: tuple[int, ...]
    now: int


class Apply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Carry a task operation, whose turn it is, through to its end in one unit."""

    n: int
    now: int


class SavePlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Persist a whole plan before any inference. Reply: the plan's number."""

    n: int
    generation: int
    model: ModelIdentity
    profile: str
    token_count: int
    parts: tuple[PlannedPart, ...]
    part_digests: tuple[str, ...]
    now: int


class SaveParts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Mark parts indexed together with their vectors, float32 little-endian rows. Reply: ``Standing``."""

    n: int
    plan: int
    generation: int
    model_digest: str
    vectors: tuple[tuple[int, bytes], ...]
    now: int


class CommitMemory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pass the gate and commit: parts re-read, exactly one memory, terminal receipt."""

    n: int
    now: int


class RecordExit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An executor child ended, broke the protocol, or failed a request while it worked for this operation."""

    n: int
    kind: str
    """``exit``, ``stall``, ``protocol`` (each counts as an exit) or ``failure`` (the child lives)."""
    generation: int
    message: str
    now: int


class Refuse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """End an operation as rejected, for a reason that became known after it was accepted."""

    n: int
    error: str
    result: Any
    now: int


class ReserveGeneration(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Durably take the next executor generation. Reply: the number."""

    now: int


class Observe(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Store-wide executor evidence."""

    kind: str
    generation: int
    message: str | None
    now: int


class Probe(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Write and commit one small row, to know that the ledger can. Leaves no trace in the journal."""

    now: int


class Standing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The reply to commands on an operation: where it stands afterwards."""

    n: int
    state: State
    fenced: bool = False
    """Whether it came from an older generation than the operation has seen, and so changed nothing."""


Command = (
    Accept
    | Advance
    | AdvanceAll
    | Apply
    | SavePlan
    | SaveParts
    | CommitMemory
    | RecordExit
    | Refuse
    | ReserveGeneration
    | Observe
    | Probe
)
