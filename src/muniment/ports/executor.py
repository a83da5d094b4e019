"""The executor as the stages see it: text in, plans and vectors out, with the generation that made it.

Two children stand behind these ports: one ingests, the other reads queries alone (ADR 0019).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from muniment.model.plan import ModelIdentity, PlannedPart


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of a source in order; their byte ranges cover it without gap or overlap."""

    generation: int
    model: ModelIdentity
    profile: str
    """Name of the planning rules and their parameters, such as ``sentences-64-1``."""
    token_count: int
    parts: tuple[PlannedPart, ...]


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """One float32 little-endian row a text, in the order asked for."""

    generation: int
    model: ModelIdentity
    vectors: tuple[bytes, ...]


class ExecutorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor last saw of its child."""

    generation: int
    alive: bool
    ready: bool
    """The ready frame of this generation has arrived: tokenizer and model loaded and used once."""
    heartbeat_age_seconds: float | None
    """Seconds of the monotonic clock since the last frame; None before the first."""
    last_error: str | None
    tokenizer_problem: str | None = None
    """Why a child that is started now could not load its tokenizer, as the living child last said."""


class Supervised(Protocol):
    """One supervised child: started, restarted, asked how it is, and able to plan.

    A call made while no child is ready waits for the next one. Any call may raise ExecutorExited,
    ExecutorStalled or ExecutorProtocolBroken (the child was ended while this request was with it), or
    ExecutorFailed (the child lives and cannot do the request). All carry ``generation``.
    """

    async def start(self) -> None:
        """Begin supervising; returns at once, the child warms in the background."""
        ...

    async def stop(self) -> None:
        """End the child and stop supervising. Calls that wait raise ExecutorExited."""
        ...

    async def identity(self) -> ModelIdentity:
        """The identity of the first child that becomes ready; waits for it."""
        ...

    def health(self) -> ExecutorHealth:
        """What is known now; never waits."""
        ...

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        """Plan sources, one plan a text. ``labels`` only name the work in the child's logs."""
        ...


class Executor(Supervised, Protocol):
    """The child that ingests. At most ``requests_max`` calls are with it at one time; more wait."""

    @property
    def requests_max(self) -> int:
        """Requests that are with the child at one time: one is computed, the others keep it from waiting."""
        ...

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        """Embed parts, of one source or of several. The caller keeps each request within its token budget."""
        ...


class QueryEmbedder(Supervised, Protocol):
    """The child that reads queries; it never waits for ingestion."""

    async def embed_query(self, text: str) -> Embedded:
        """Embed one query. One that is longer than the model reads raises ExecutorFailed; it is never cut."""
        ...
