"""What the HTTP interface asks of the runtime; ``muniment.runtime.service.Service`` does it."""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from muniment.config import Config
from muniment.model.operation import Receipt
from muniment.model.readiness import Readiness
from muniment.model.recall import RecallRequest


class Submitted(Protocol):
    """What became of a submission."""

    @property
    def created(self) -> bool:
        """Whether this submission stored it."""
        ...

    @property
    def receipt(self) -> Receipt:
        """As it is stored now."""
        ...


class Page(Protocol):
    """A page of receipts."""

    @property
    def operations(self) -> tuple[Receipt, ...]:
        """In acceptance order."""
        ...

    @property
    def next(self) -> str | None:
        """The operation ID after which the next page starts, if there is one."""
        ...


class Service(Protocol):
    """The memory. Every method may raise ``Unavailable``, and no method answers what it does not know."""

    @property
    def config(self) -> Config:
        """The settings, with every limit."""
        ...

    async def status(self) -> dict[str, Any]:
        """Reasons, children, stuck operations, positions."""
        ...

    async def submit(self, body: bytes) -> Submitted:
        """Accept or replay; returns after the durable commit. Raises RequestError or Conflict."""
        ...

    async def receipt(self, operation_id: str) -> Receipt:
        """The current receipt. Raises NotFound."""
        ...

    async def follow(self, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Whole frames of the events after ``after``, and comment lines while there are none.

        Ends after the terminal event. Raises NotFound before the first frame.
        """
        ...

    async def evidence(self, operation_id: str, *, after: int, limit: int) -> dict[str, Any]:
        """A page of executor evidence with a sequence greater than ``after``. Raises NotFound."""
        ...

    async def operations(self, *, state: str | None, kind: str | None, after: str | None, limit: int) -> Page:
        """A page in acceptance order. Raises InvalidField for an unknown ``after``."""
        ...

    async def memory(self, key: str) -> dict[str, Any]:
        """A committed memory. Raises NotFound."""
        ...

    async def task_streams(self, name: str, *, user_id: str | None, agent_id: str | None) -> dict[str, Any]:
        """The task streams of a name with their steps. Raises NotFound."""
        ...

    async def recall(self, request: RecallRequest) -> dict[str, Any]:
        """The best parts for a query. Raises SearchUnavailable rather than answer with nothing."""
        ...

    async def ready(self) -> Readiness:
        """A measurement of the six capabilities. Never raises Unavailable."""
        ...

    def fatal(self, error: BaseException) -> None:
        """End the process: a bug was met, and recovery speaks."""
        ...
