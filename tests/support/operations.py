"""Commands to a ledger as the stages send them, with salts, plans and vectors that never change."""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from muniment.core import canonical, payloads, replay
from muniment.core.planning import model_digest
from muniment.model import command
from muniment.model.operation import Kind
from muniment.model.plan import ModelIdentity, PlannedPart

ACCOUNT: Final = 1
NOW: Final = 1_700_000_000_000_000
DIMENSIONS: Final = 4
MODEL: Final = ModelIdentity(
    name="test",
    dimensions=DIMENSIONS,
    window_tokens=16,
    files={"weights": "0" * 64},
    tokenizer_digest="words",
)
OTHER_MODEL: Final = ModelIdentity(
    name="other", dimensions=DIMENSIONS, window_tokens=16, files={}, tokenizer_digest="words"
)
PROFILE: Final = "words-2-1"


def salt(text: str) -> bytes:
    """Sixteen bytes that are the same in every run."""
    return hashlib.sha256(text.encode()).digest()[:16]


def accept(
    operation_id: str,
    kind: Kind,
    payload: dict[str, Any],
    dependencies: Iterable[str] = (),
    *,
    now: int = NOW,
    invalid: tuple[str, str] | None = None,
    account: int = ACCOUNT,
) -> command.Accept:
    """Admit any payload."""
    divided = payloads.divide(payload)
    return command.Accept(
        account=account,
        operation_id=operation_id,
        kind=kind,
        payload_hash=canonical.payload_hash(payload),
        dependencies=tuple(dependencies),
        invalid=invalid,
        content=divided.content,
        attributes=divided.attributes,
        content_salt=salt(f"content of {operation_id}"),
        attributes_salt=salt(f"attributes of {operation_id}"),
        now=now,
    )


def memory(
    operation_id: str,
    content: str = "One sentence. Another one.",
    dependencies: Iterable[str] = (),
    *,
    now: int = NOW,
    **attributes: Any,
) -> command.Accept:
    """Admit an add_memory."""
    return accept(operation_id, Kind.ADD_MEMORY, {"content": content, **attributes}, dependencies, now=now)


def stream(
    operation_id: str, name: str = "chores", dependencies: Iterable[str] = (), *, now: int = NOW, **rest: Any
) -> command.Accept:
    """Admit a create_task_stream."""
    return accept(operation_id, Kind.CREATE_TASK_STREAM, {"name": name, **rest}, dependencies, now=now)


def step(
    operation_id: str,
    key: str = "wash",
    stream_name: str = "chores",
    dependencies: Iterable[str] = (),
    *,
    now: int = NOW,
    **rest: Any,
) -> command.Accept:
    """Admit an add_task_step; its name is its key unless another is given."""
    payload = {"stream_name": stream_name, "idempotency_key": key, "name": key, **rest}
    return accept(operation_id, Kind.ADD_TASK_STEP, payload, dependencies, now=now)


def complete(
    operation_id: str, key: str = "wash", dependencies: Iterable[str] = (), *, now: int = NOW, **rest: Any
) -> command.Accept:
    """Admit a complete_step."""
    return accept(operation_id, Kind.COMPLETE_STEP, {"idempotency_key": key, **rest}, dependencies, now=now)


def cut(content: bytes, count: int) -> tuple[PlannedPart, ...]:
    """Parts of nearly equal size that cover the content; a token is two bytes. Takes ASCII only."""
    edges = [len(content) * index // count for index in range(count + 1)]
    return tuple(
        PlannedPart(token_start=start // 2, token_end=end // 2, byte_start=start, byte_end=end)
        for start, end in pairwise(edges)
    )


def plan(
    n: int,
    admitted: command.Accept,
    *,
    parts: int = 1,
    generation: int = 1,
    now: int = NOW,
    model: ModelIdentity = MODEL,
) -> command.SavePlan:
    """Persist a plan of the source that ``admitted`` brought."""
    content = admitted.content or b"no source"
    planned = cut(content, parts)
    return command.SavePlan(
        n=n,
        generation=generation,
        model=model,
        profile=PROFILE,
        token_count=planned[-1].token_end,
        parts=planned,
        part_digests=tuple(
            replay.salted(admitted.content_salt, content[part.byte_start : part.byte_end]) for part in planned
        ),
        now=now,
    )


def vector(*named: object) -> bytes:
    """A unit vector that follows from what it is named by."""
    seed = hashlib.sha256(repr(named).encode()).digest()
    values = [byte - 127.5 for byte in seed[:DIMENSIONS]]
    length = math.sqrt(sum(value * value for value in values))
    return struct.pack(f"<{DIMENSIONS}f", *(value / length for value in values))


def vectors(
    n: int,
    plan_n: int,
    indexes: Sequence[int],
    *,
    generation: int = 1,
    now: int = NOW,
    model: ModelIdentity = MODEL,
) -> command.SaveParts:
    """Save the vectors of some parts."""
    return command.SaveParts(
        n=n,
        plan=plan_n,
        generation=generation,
        model_digest=model_digest(model),
        vectors=tuple((index, vector(n, index)) for index in indexes),
        now=now,
    )


def refuse(n: int, *, now: int = NOW, reason: str = "because") -> command.Refuse:
    """End an operation as rejected."""
    return command.Refuse(n=n, error=reason, result={"outcome": "rejected", "reason": reason}, now=now)


def exited(n: int, *, generation: int = 1, kind: str = "exit", now: int = NOW) -> command.RecordExit:
    """Record what happened to the executor while it worked for an operation."""
    return command.RecordExit(
        n=n, kind=kind, generation=generation, message=f"{kind} of {generation}", now=now
    )
