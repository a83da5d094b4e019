"""The executor as the stages see it: text in, plans and vectors out, with the generation that made it."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from muniment.model.plan import ModelIdentity, PlannedPart


class Plan(msgspec.Struct, frozen=True, kw_only=True):
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


class Executor(Protocol):
    """One supervised child. Any call may raise ExecutorExited, ExecutorProtocolBroken or ExecutorFailed.

    The exceptions carry ``generation``. A call made while no child is ready waits for the next one.
    """

    async def start(self) -> None:
        """Begin supervising; returns at once, the child warms in the background."""
        ...

    async def stop(self) -> None:
        """End the child and stop supervising. Calls that wait raise ExecutorExited."""
        ...

    async def plan(self, text: str, *, label: str) -> Plan:
        """Plan one source. ``label`` only names the work in the child's tally and logs."""
        ...

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        """Embed parts. The caller keeps each request within the token budget."""
        ...

    async def embed_query(self, text: str) -> Embedded:
        """Embed one query, ahead of all waiting ingestion requests.

        One that is longer than the model reads raises ExecutorFailed; it is never cut.
        """
        ...

    async def identity(self) -> ModelIdentity:
        """The identity of the first child that becomes ready; waits for it."""
        ...

    def health(self) -> ExecutorHealth:
        """What is known now; never waits."""
        ...
