"""What the server does for a caller, whatever interface it came by; interfaces make bytes of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec
import structlog

from muniment.config import Config
from muniment.core import payloads, receipts
from muniment.core.planning import model_digest
from muniment.core.tables import Row
from muniment.errors import (
    ExecutorFault,
    InvalidField,
    NotFound,
    SearchUnavailable,
)
from muniment.model import command
from muniment.model.operation import Receipt
from muniment.model.readiness import Readiness
from muniment.model.recall import RecallRequest
from muniment.model.times import rfc3339
from muniment.ports.clock import Clock, Entropy
from muniment.ports.executor import QueryEmbedder
from muniment.ports.ledger import Ledger, Reads
from muniment.runtime.feed import Feed
from muniment.runtime.follow import Followers
from muniment.runtime.readiness import ReadinessGauge
from muniment.runtime.status import StatusBoard
from muniment.stages import accept, recall

LOCAL_ACCOUNT_N: Final = 1
"""Without API keys there is one account (ruling 1)."""

log = structlog.get_logger("service")


class Submitted(msgspec.Struct, frozen=True):
    """The receipt of a submission, and whether this call created it: 202 or 200."""

    created: bool
    receipt: Receipt


class Page(msgspec.Struct, frozen=True):
    """A page of receipts; ``next`` is the ``after`` of the following one, None on the last."""

    operations: tuple[Receipt, ...]
    next: str | None


class Service:
    """One running memory. Every method may raise a ``MunimentError`` with its status."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        queries: QueryEmbedder,
        feed: Feed,
        followers: Followers,
        gauge: ReadinessGauge,
        status: StatusBoard,
        clock: Clock,
        entropy: Entropy,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self._ledger = ledger
        self._queries = queries
        self._feed = feed
        self._followers = followers
        self._gauge = gauge
        self._status = status
        self._clock = clock
        self._entropy = entropy
        self._on_fatal = on_fatal
        self.incarnation = ""
        """The identity of this running copy."""
        self._limits = accept.Limits(
            operation_id_bytes_max=config.operation_id_bytes_max,
            dependencies_max=config.dependencies_max,
            payload=payloads.Limits(
                content_bytes_max=config.content_bytes_max, attributes_bytes_max=config.attributes_bytes_max
            ),
        )

    def fatal(self, error: BaseException) -> None:
        """A bug was met: the process ends non-zero and recovery speaks."""
        self._on_fatal(error)

    def close_streams(self) -> None:
        """End all event streams, as the server is stopping."""
        self._followers.close()

    async def ready(self) -> Readiness:
        """The readiness of the six capabilities, measured."""
        return await self._gauge.measure()

    async def status(self) -> dict[str, Any]:
        """Everything that helps to find out what is wrong; see ``runtime.status``."""
        return {"incarnation": self.incarnation, **await self._status.read()}

    async def submit(self, body: bytes) -> Submitted:
        """Durably accept or exactly replay an operation. Returns only after COMMIT and fsync (ruling 1)."""
        request = accept.read(body)
        await self._gauge.require_ingestion()
        asked = accept.admission(
            request, self._limits, account=LOCAL_ACCOUNT_N, clock=self._clock, entropy=self._entropy
        )
        admitted: command.Admitted = await self._ledger.write(asked)
        return Submitted(admitted.created, admitted.receipt)

    async def receipt(self, operation_id: str) -> Receipt:
        """The latest durable receipt."""

        def query(reads: Reads) -> Receipt | None:
            row = reads.find_operation(LOCAL_ACCOUNT_N, operation_id)
            return None if row is None else receipts.receipt(row, reads.dependencies(row["n"]))

        found = await self._ledger.read(query)
        if found is None:
            raise NotFound(f"operation '{operation_id}' not found")
        return found

    async def follow(self, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """The event stream of an operation: awaiting this checks that it exists, iterating follows it."""
        return await self._followers.follow(LOCAL_ACCOUNT_N, operation_id, after)

    async def evidence(self, operation_id: str, *, after: int, limit: int) -> dict[str, Any]:
        """A page of the executor evidence of an operation, beyond the sequence ``after``, in order."""

        def query(reads: Reads) -> dict[str, Any] | None:
            row = reads.find_operation(LOCAL_ACCOUNT_N, operation_id)
            if row is None:
                return None
            # SQLite holds integers of 63 bits, and no sequence is ever larger; ``after`` may be any uint64.
            rows = reads.evidence(row["n"], min(after, 2**63 - 1), limit + 1)
            shown = [_witness(each) for each in rows[:limit]]
            return {
                "operation_id": operation_id,
                "evidence": shown,
                "next": shown[-1]["sequence"] if len(rows) > limit else None,
            }

        found = await self._ledger.read(query)
        if found is None:
            raise NotFound(f"operation '{operation_id}' not found")
        return found

    async def operations(self, *, state: str | None, kind: str | None, after: str | None, limit: int) -> Page:
        """Receipts in acceptance order; ``after`` is the ID of the last one seen."""

        def query(reads: Reads) -> Page:
            first = 0
            if after is not None:
                row = reads.find_operation(LOCAL_ACCOUNT_N, after)
                if row is None:
                    raise InvalidField("after", "names no operation")
                first = row["n"]
            rows = reads.operations(LOCAL_ACCOUNT_N, state=state, kind=kind, after=first, limit=limit + 1)
            shown = tuple(receipts.receipt(row, reads.dependencies(row["n"])) for row in rows[:limit])
            return Page(shown, shown[-1].operation_id if len(rows) > limit else None)

        return await self._ledger.read(query)

    async def memory(self, key: str) -> dict[str, Any]:
        """One memory: content, provenance, parts."""

        def query(reads: Reads) -> dict[str, Any] | None:
            row = reads.find_memory(key)
            return None if row is None else recall.whole(reads, row)

        found = await self._ledger.read(query)
        if found is None:
            raise NotFound(f"memory '{key}' not found")
        return found

    async def task_streams(self, name: str, *, user_id: str | None, agent_id: str | None) -> dict[str, Any]:
        """All task streams of a name, with their steps."""
        found = await self._ledger.read(
            lambda reads: recall.task_streams(
                reads, LOCAL_ACCOUNT_N, name, user_id=user_id, agent_id=agent_id
            )
        )
        if not found:
            raise NotFound(f"task stream '{name}' not found")
        return {"name": name, "streams": found}

    async def recall(self, request: RecallRequest) -> dict[str, Any]:
        """The best memories for a query. Raises SearchUnavailable with the reason while it cannot search."""
        health = self._queries.health()
        if not (health.ready and health.alive):
            reason = health.last_error or "the model is loading"
            raise SearchUnavailable(f"search unavailable: {reason}")
        # Everything that was committed before this call is seen by it.
        position, _ = await self._ledger.read(lambda reads: reads.head())
        await self._feed.reach(position, self.config.recall_wait_seconds)
        seconds = self.config.recall_embed_seconds
        try:
            async with asyncio.timeout(seconds):
                embedded = await recall.embed(request.query, self._queries)
        except TimeoutError:
            # A child that hangs is not ended for one query; the caller hears that it was too slow.
            raise SearchUnavailable(
                f"search unavailable: the model did not read the query within {seconds} seconds"
            ) from None
        except ExecutorFault as fault:
            raise SearchUnavailable(f"search unavailable: {fault}") from fault
        eligible = recall.eligible(request, self._clock.now_us())
        hits = await self._feed.search(embedded.vector, eligible, request.limit)
        rows = await self._ledger.read(lambda reads: recall.rendered(reads, hits))
        return {
            "results": rows,
            "model": {"name": embedded.model.name, "digest": model_digest(embedded.model)},
        }


def _witness(row: Row) -> dict[str, Any]:
    """One evidence record as callers see it."""
    return {
        "sequence": row["sequence"],
        "kind": row["kind"],
        "generation": row["generation"],
        "message": row["message"],
        "occurred_at": rfc3339(row["occurred_us"]),
    }
