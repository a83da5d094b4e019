"""Status: what a person who looks after the server wants to know, beyond true and false of readiness."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from muniment.errors import LedgerUnavailable
from muniment.ports.executor import Supervised
from muniment.ports.ledger import Ledger, Reads
from muniment.runtime.coordinator import Coordinator
from muniment.runtime.feed import Feed
from muniment.runtime.ingestion import Pipeline
from muniment.runtime.readiness import ReadinessGauge

STUCK_SHOWN_MAX: Final = 20


class StatusBoard:
    """Reads everything at one moment; holds nothing."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        feed: Feed,
        gauge: ReadinessGauge,
        coordinator: Coordinator,
        ingestion: Pipeline,
        children: Mapping[str, Supervised],
    ) -> None:
        self._ledger = ledger
        self._feed = feed
        self._gauge = gauge
        self._coordinator = coordinator
        self._ingestion = ingestion
        self._children = children

    async def read(self) -> dict[str, Any]:
        """The body of the status route, as ``docs/reference/http-api.md`` describes it.

        Of a ledger that cannot be read it tells the reason, and neither position nor stuck operations.
        """
        readiness = await self._gauge.measure()
        numbers = self._ingestion.stuck_operations(STUCK_SHOWN_MAX)
        stuck: list[dict[str, Any]] = []
        durable: int | None = None
        with suppress(LedgerUnavailable):  # Its probe has just told why, and stands among the reasons.
            stuck, durable = await self._ledger.read(lambda reads: (_stuck(reads, numbers), reads.head()[0]))
        memories, parts = self._feed.count()
        return {
            "readiness": readiness.body(),
            "reasons": dict(sorted(readiness.reasons.items())),
            "children": [
                {"role": role, **msgspec.to_builtins(child.health())}
                for role, child in sorted(self._children.items())
            ],
            "operations": {
                "open": self._coordinator.open_operations(),
                "in_work": self._ingestion.in_work(),
                "stuck": self._ingestion.stuck(),
            },
            "stuck": stuck,
            "positions": {"device": self._feed.position, "durable": durable},
            "device": {"memories": memories, "parts": parts, "bytes": self._feed.byte_count()},
            "writes_waiting": self._ledger.queued(),
        }


def _stuck(reads: Reads, numbers: list[int]) -> list[dict[str, Any]]:
    rows = [reads.operation(n) for n in numbers]
    return [
        {
            "operation_id": row["id"],
            "state": row["state"],
            "executor_exit_count": row["executor_exit_count"],
            "executor_last_exit": row["executor_last_exit"],
            "executor_error": row["executor_error"],
        }
        for row in rows
        if row is not None
    ]
