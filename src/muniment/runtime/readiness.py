"""Readiness: each of the six capabilities is measured by using the real thing (ruling 10).

A measurement is shared by all who ask while it is young. A ledger that was full or away is measured again
on the next question, so that writes are accepted again without a restart.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from muniment.errors import MunimentError, Unavailable
from muniment.model.readiness import Capabilities, Readiness
from muniment.ports.clock import Clock
from muniment.ports.executor import ExecutorHealth

STALE_SECONDS: Final = 5.0
"""A measurement that is older than this is not used for anything."""
PROBE_TIMEOUT_SECONDS: Final = 2.0

Probe = Callable[[], Awaitable[None]]


class ReadinessGauge:
    """Measures on demand, one measurement at a time."""

    def __init__(
        self,
        *,
        ledger: Probe,
        storage: Probe,
        coordinator: Probe,
        search_index: Probe,
        ingest: Callable[[], ExecutorHealth],
        query: Callable[[], ExecutorHealth],
        clock: Clock,
        probe_seconds: float,
        silence_seconds: float,
    ) -> None:
        """A probe returns when the thing works and raises ``MunimentError`` that says why it does not."""
        self._probes = {
            "ledger": ledger,
            "storage": storage,
            "coordinator": coordinator,
            "search_index": search_index,
        }
        self._ingest = ingest
        self._query = query
        self._clock = clock
        self._probe_seconds = probe_seconds
        self._silence_seconds = silence_seconds
        self._last: Readiness | None = None
        self._taken = 0.0
        self._running: asyncio.Task[Readiness] | None = None

    async def measure(self) -> Readiness:
        """The current readiness, at most ``probe_seconds`` old."""
        if self._last is not None and self._age() <= self._probe_seconds:
            return self._last
        return await asyncio.shield(self._start())

    async def require_ingestion(self) -> None:
        """Raise ``Unavailable`` unless writes may be accepted; free while the last measurement is good."""
        last = self._last
        if last is not None and last.ingestion_ready and self._age() <= STALE_SECONDS:
            if self._age() > self._probe_seconds:
                self._start()
            return
        last = await self.measure()
        if not last.ingestion_ready:
            reasons = "; ".join(
                f"{name}: {last.reasons[name]}"
                for name in ("ledger", "storage", "coordinator")
                if name in last.reasons
            )
            raise Unavailable(f"operation ledger unavailable: {reasons}")

    async def close(self) -> None:
        """Wait for a measurement that is under way."""
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    def _age(self) -> float:
        return self._clock.monotonic() - self._taken

    def _start(self) -> "asyncio.Task[Readiness]":
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._measure(), name="readiness")
        return self._running

    async def _measure(self) -> Readiness:
        reasons = dict(
            zip(
                self._probes,
                await asyncio.gather(*(_reason(probe) for probe in self._probes.values())),
                strict=True,
            )
        )
        reasons |= _executor_reasons(self._ingest(), self._query(), self._silence_seconds)
        wrong = {name: reason for name, reason in reasons.items() if reason is not None}
        self._last = Readiness(
            capabilities=Capabilities(**{name: reason is None for name, reason in reasons.items()}),
            reasons=wrong,
        )
        self._taken = self._clock.monotonic()
        return self._last


async def _reason(probe: Probe) -> str | None:
    """Why a probe failed; None when it did not."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            await probe()
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_SECONDS} seconds"
    except MunimentError as error:
        return str(error)
    return None


def _executor_reasons(
    ingest: ExecutorHealth, query: ExecutorHealth, silence_seconds: float
) -> dict[str, str | None]:
    """The tokenizer plans in the ingesting child; the model executor is both children."""
    down = {"ingest": _down(ingest, silence_seconds), "query": _down(query, silence_seconds)}
    problems = [f"{role} child: {reason}" for role, reason in down.items() if reason is not None]
    return {
        "tokenizer": down["ingest"] or ingest.tokenizer_problem or query.tokenizer_problem,
        "model_executor": "; ".join(problems) or None,
    }


def _down(health: ExecutorHealth, silence_seconds: float) -> str | None:
    """A child has used tokenizer and model once before it says ready; heartbeats say that it lives."""
    if not health.ready:
        return health.last_error or "the model is loading"
    if not health.alive:
        return health.last_error or "the executor has ended"
    age = health.heartbeat_age_seconds
    if age is None:
        return "no heartbeat yet"
    return None if age <= silence_seconds else f"no heartbeat for {age:.1f} seconds"
