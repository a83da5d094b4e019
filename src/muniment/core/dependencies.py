"""What an operation waits for: declared dependencies, and its turn in the queues of its domain (ruling 6)."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from muniment.model.operation import Kind


def blocked_by(dependencies: Iterable[tuple[str, bool]]) -> tuple[str, ...]:
    """The receipt's ``blocked_by``: sorted by UTF-8 bytes, unique, whatever is not yet committed."""
    return tuple(sorted({depends_on for depends_on, met in dependencies if not met}, key=str.encode))


def closes_cycle(
    operation_id: str, dependencies: Iterable[str], dependencies_of: Callable[[str], Collection[str]]
) -> bool:
    """Whether accepting ``operation_id`` would let it wait for itself through open dependencies."""
    seen: set[str] = set()
    stack = list(dependencies)
    while stack:
        current = stack.pop()
        if current == operation_id:
            return True
        if current not in seen:
            seen.add(current)
            stack.extend(dependencies_of(current))
    return False


def turns(kind: Kind, attributes: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The queues in which an operation takes its turn: those that share one apply in acceptance order.

    A stream is named, a step is known by its key; owner and agent do not narrow a queue, so two streams of
    one name share theirs: order is kept where it is not needed rather than lost where it is.
    """
    match kind:
        case Kind.ADD_MEMORY:
            return frozenset()
        case Kind.CREATE_TASK_STREAM:
            return frozenset({("stream", attributes["name"])})
        case Kind.ADD_TASK_STEP:
            return frozenset({("stream", attributes["stream_name"]), ("step", attributes["idempotency_key"])})
        case Kind.COMPLETE_STEP:
            named = attributes.get("stream_name")
            own = {("step", attributes["idempotency_key"])}
            return frozenset(own | ({("stream", named)} if named is not None else set()))
