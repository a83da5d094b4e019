"""The child computes while the ledger commits, and no further than can be kept when the ledger is away."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from muniment.adapters.in_memory import InMemoryStore
from muniment.core.ingestion import Limits
from muniment.runtime.ingestion import Pipeline, Save
from tests.crash.workloads import InProcessExecutor
from tests.support import operations, stores
from tests.support.simulation import (
    REQUESTS_MAX,
    Faults,
    SimulatedClock,
    SimulatedExecutor,
    SimulatedLedger,
    simulated,
)

EMBED_SECONDS: Final = 1.0
COMMIT_SECONDS: Final = 1.5
WORDS: Final = 240
BATCH_TOKENS: Final = 24


class SlowLedger(SimulatedLedger):
    """Each commit takes longer than each inference."""

    async def _commit(self) -> None:
        while self._waiting:
            await asyncio.sleep(COMMIT_SECONDS)
            batch, self._waiting = self._waiting, []
            self._settle(batch)


class SteadyExecutor(SimulatedExecutor):
    """Notes when it computes."""

    computed: list[tuple[float, float]]

    def begin(self, generation: int) -> "asyncio.Task[None]":
        """Live, without the ledger."""
        self.computed = []
        self._model = InProcessExecutor({})
        self._model.generation = generation
        return asyncio.create_task(self._live(generation))

    async def _befalls(self, texts: tuple[str, ...]) -> None:
        return None

    async def _answer(self, verb: str, texts: tuple[str, ...], labels: tuple[str, ...]) -> Any:
        if verb == "plan":
            return await super()._answer(verb, texts, labels)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(EMBED_SECONDS)
        self.computed.append((began, asyncio.get_running_loop().time()))
        return await super()._answer(verb, texts, labels)


async def ingested(make: type[Pipeline], *, full_from: float = math.inf) -> list[tuple[float, float]]:
    """When the child computed for one long memory; from ``full_from`` on the ledger is full."""
    store: InMemoryStore = stores.in_memory()
    driver = stores.Driver(store)
    content = " ".join(f"word{number}" for number in range(WORDS))
    n = driver.accept(operations.memory("long", content=content))
    driver.advance(n)
    happened: Counter[str] = Counter()
    ledger = SlowLedger(store, Random(1), Faults(), happened)
    executor = SteadyExecutor(ledger, Random(1), Faults(), happened)
    fatal: list[BaseException] = []
    pipeline = make(
        ledger,
        executor,
        SimulatedClock(),
        Limits(batch_tokens_max=BATCH_TOKENS, retry_seconds_max=1.0),
        parts_max=1000,
        on_fatal=fatal.append,
    )
    child = executor.begin(1)
    pipeline.admit(n)
    if full_from < math.inf:
        await asyncio.sleep(full_from)
        ledger.full_until = math.inf
    await asyncio.sleep(200.0)
    assert not fatal, fatal
    await pipeline.stop()
    child.cancel()
    return executor.computed


class SavesFirst(Pipeline):
    """Asks for more only when what was answered is saved."""

    async def _embed(self, request: Any) -> Save:
        save = await super()._embed(request)
        await save()
        return nothing_left


class KeepsOn(Pipeline):
    """Asks for more however much waits for the ledger."""

    def _pump(self) -> None:
        self._saving = 0
        super()._pump()


async def nothing_left() -> None:
    """It is saved."""


def idle(computed: Sequence[tuple[float, float]]) -> float:
    """Of the time between first and last, the share in which the child had nothing to do."""
    assert len(computed) >= WORDS // BATCH_TOKENS
    whole = computed[-1][1] - computed[0][0]
    return 1.0 - sum(end - began for began, end in computed) / whole


def test_the_child_computes_while_the_ledger_commits() -> None:
    assert idle(simulated(lambda: ingested(Pipeline))) < 0.05


def test_control_a_child_that_waits_for_the_ledger_is_noticed() -> None:
    assert idle(simulated(lambda: ingested(SavesFirst))) > 0.15


def beyond(make: type[Pipeline]) -> int:
    """How many requests are computed after the ledger is full."""
    full_from = 4 * COMMIT_SECONDS
    return sum(began > full_from for began, _ in simulated(lambda: ingested(make, full_from=full_from)))


def test_a_full_ledger_stops_the_child_within_what_may_wait() -> None:
    assert beyond(Pipeline) <= 2 * REQUESTS_MAX


def test_control_a_pipeline_that_keeps_on_is_noticed() -> None:
    assert beyond(KeepsOn) > 2 * REQUESTS_MAX
