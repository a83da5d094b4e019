"""THE table of the operation lifecycle: the only place that says which state may follow which.

``accepted -> validated -> [blocked ->] planned -> processing -> indexed -> committed``, and ``rejected``
from every state between the two ends (design, section 6). A fact that leaves the state as it is makes no
event: it is executor evidence (ADR 0008). The SQL CHECK, the OpenAPI enum and ``docs/lifecycle.md`` are
tested against this table.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from muniment.errors import InvariantBroken
from muniment.model.operation import State

A, V, B, P, R, X = (
    State.ACCEPTED,
    State.VALIDATED,
    State.BLOCKED,
    State.PLANNED,
    State.PROCESSING,
    State.INDEXED,
)


class Fact(StrEnum):
    """What can become known about an operation."""

    SUBMITTED = "submitted"
    PAYLOAD_VALID = "payload_valid"
    DEPENDENCY_OPEN = "dependency_open"
    DEPENDENCY_REJECTED = "dependency_rejected"
    PARTS_PLANNED = "parts_planned"
    EXECUTOR_STARTED = "executor_started"
    PART_INDEXED = "part_indexed"
    EXECUTOR_EXITED = "executor_exited"
    EXECUTOR_STALLED = "executor_stalled"
    ALL_PARTS_INDEXED = "all_parts_indexed"
    EFFECT_COMMITTED = "effect_committed"
    REFUSED = "refused"


TRANSITIONS: Final[Mapping[tuple[State | None, Fact], State]] = MappingProxyType(
    {
        (None, Fact.SUBMITTED): A,
        (A, Fact.PAYLOAD_VALID): V,
        (V, Fact.DEPENDENCY_OPEN): B,
        **{(state, Fact.PARTS_PLANNED): P for state in (V, B)},
        (P, Fact.EXECUTOR_STARTED): R,
        (R, Fact.PART_INDEXED): R,
        (R, Fact.ALL_PARTS_INDEXED): X,
        (X, Fact.EFFECT_COMMITTED): State.COMMITTED,
        **{(state, Fact.DEPENDENCY_REJECTED): State.REJECTED for state in (V, B)},
        **{(state, Fact.REFUSED): State.REJECTED for state in (V, B, P, R, X)},
        # An exit or a stall is evidence and never a verdict (ruling 8).
        **{
            (state, fact): state
            for state in (V, B, P, R)
            for fact in (Fact.EXECUTOR_EXITED, Fact.EXECUTOR_STALLED)
        },
    }
)


class Transition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event to be: its sequence and the two states."""

    sequence: int
    from_state: State | None
    to_state: State


class IllegalTransition(InvariantBroken):
    """A fact was reported about a state in which it cannot be true."""


def step(state: State | None, fact: Fact) -> State:
    """Return the state after ``fact``. Raises ``IllegalTransition`` for a pair that is not in the table."""
    following = TRANSITIONS.get((state, fact))
    if following is None:
        raise IllegalTransition(f"{fact} is not possible in state {state}")
    return following


def walk(state: State | None, sequence: int, facts: Iterable[Fact]) -> tuple[Transition, ...]:
    """Apply facts in order; return the transitions that change the state, numbered on from ``sequence``."""
    transitions: list[Transition] = []
    for fact in facts:
        following = step(state, fact)
        if following is not state:
            sequence += 1
            transitions.append(Transition(sequence, state, following))
        state = following
    return tuple(transitions)
