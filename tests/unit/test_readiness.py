"""Each probe flips its own bit, a measurement is shared while young, a stale one decides nothing."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final

import msgspec
import pytest

from muniment.errors import LedgerUnavailable, SearchUnavailable, Unavailable
from muniment.model.readiness import Capabilities, Readiness
from muniment.ports.executor import ExecutorHealth
from muniment.runtime import readiness
from muniment.runtime.readiness import STALE_SECONDS, ReadinessGauge

PROBES: Final = ("ledger", "storage", "coordinator", "search_index")
INGESTION: Final = ("ledger", "storage", "coordinator")
PROBE_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 5.0
HEALTHY: Final = ExecutorHealth(
    generation=1, alive=True, ready=True, heartbeat_age_seconds=0.1, last_error=None
)


class World:
    """A clock and four probes that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0
        self.wrong: dict[str, Exception] = {}
        self.ingest = self.query = HEALTHY
        self.asked: Counter[str] = Counter()
        self.hold: asyncio.Event | None = None
        self.gauge = ReadinessGauge(
            **{name: self.probe(name) for name in PROBES},
            ingest=lambda: self.ingest,
            query=lambda: self.query,
            clock=self,
            probe_seconds=PROBE_SECONDS,
            silence_seconds=SILENCE_SECONDS,
        )

    def now_us(self) -> int:
        return 0

    def monotonic(self) -> float:
        return self.time

    def probe(self, name: str) -> Any:
        async def ask() -> None:
            self.asked[name] += 1
            if self.hold is not None:
                await self.hold.wait()
            if name in self.wrong:
                raise self.wrong[name]

        return ask

    async def capabilities(self) -> dict[str, bool]:
        found: dict[str, bool] = msgspec.structs.asdict((await self.gauge.measure()).capabilities)
        return found


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_all_six_when_nothing_is_wrong() -> None:
    async def scene() -> None:
        measured = await World().gauge.measure()
        assert all(msgspec.structs.astuple(measured.capabilities))
        assert measured.reasons == {}
        assert measured.body()["status"] == "ready"
        assert (measured.ingestion_ready, measured.search_ready) == (True, True)

    run(scene())


@pytest.mark.parametrize("name", PROBES)
def test_a_failing_probe_flips_its_own_bit(name: str) -> None:
    async def scene() -> None:
        world = World()
        world.wrong = {name: SearchUnavailable(f"{name} is away")}
        measured = await world.gauge.measure()
        assert {each for each, up in (await world.capabilities()).items() if not up} == {name}
        assert measured.reasons == {name: f"{name} is away"}
        assert measured.ingestion_ready is (name not in INGESTION)
        assert measured.search_ready is False

    run(scene())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ready": False}, "the model is loading"),
        ({"ready": False, "alive": False, "last_error": "no such file"}, "no such file"),
        ({"alive": False}, "the executor has ended"),
        ({"alive": False, "last_error": "signal 9"}, "signal 9"),
        ({"heartbeat_age_seconds": 5.1}, "no heartbeat for 5.1 seconds"),
        ({"heartbeat_age_seconds": None}, "no heartbeat yet"),
    ],
)
def test_a_child_that_is_down_flips_what_it_does(changed: dict[str, Any], reason: str) -> None:
    """The ingesting child plans, so the tokenizer goes with it; the one for queries takes the model alone."""

    async def scene() -> None:
        world = World()
        world.ingest = msgspec.structs.replace(HEALTHY, **changed)
        measured = await world.gauge.measure()
        assert measured.reasons == {"tokenizer": reason, "model_executor": f"ingest child: {reason}"}
        assert measured.capabilities == Capabilities(
            ledger=True, storage=True, coordinator=True, search_index=True
        )
        assert (measured.ingestion_ready, measured.search_ready) == (True, False)

        world = World()
        world.query = msgspec.structs.replace(HEALTHY, **changed)
        measured = await world.gauge.measure()
        assert measured.reasons == {"model_executor": f"query child: {reason}"}
        assert (measured.ingestion_ready, measured.search_ready) == (True, False)

    run(scene())


def test_a_tokenizer_file_that_is_gone_flips_the_tokenizer_alone() -> None:
    async def scene() -> None:
        world = World()
        world.ingest = msgspec.structs.replace(HEALTHY, tokenizer_problem="it is gone")
        measured = await world.gauge.measure()
        assert measured.reasons == {"tokenizer": "it is gone"}
        assert measured.capabilities.model_executor
        assert not measured.search_ready

    run(scene())


def test_a_heartbeat_at_the_limit_is_one() -> None:
    async def scene() -> None:
        world = World()
        world.ingest = world.query = msgspec.structs.replace(HEALTHY, heartbeat_age_seconds=SILENCE_SECONDS)
        assert (await world.gauge.measure()).search_ready

    run(scene())


def test_those_who_ask_at_one_time_share_one_measurement() -> None:
    async def scene() -> None:
        world = World()
        world.hold = asyncio.Event()
        asking = [asyncio.create_task(world.gauge.measure()) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking[0].cancel()  # One who goes away takes nothing from the others.
        await asyncio.sleep(0)
        world.hold.set()
        found = await asyncio.gather(*asking[1:])
        assert all(each is found[0] for each in found)
        assert world.asked == dict.fromkeys(PROBES, 1)

    run(scene())


def test_a_young_measurement_is_used_again_and_an_older_one_is_not() -> None:
    async def scene() -> None:
        world = World()
        first = await world.gauge.measure()
        world.wrong = {"storage": LedgerUnavailable("full")}
        world.time += PROBE_SECONDS
        assert await world.gauge.measure() is first
        world.time += 0.01
        assert (await world.gauge.measure()).reasons == {"storage": "full"}
        world.wrong = {}
        world.time += PROBE_SECONDS + 0.01
        assert (await world.gauge.measure()).reasons == {}
        assert world.asked["storage"] == 3

    run(scene())


def test_ingestion_is_refused_with_every_reason_that_concerns_it() -> None:
    async def scene() -> None:
        world = World()
        world.wrong = {
            "ledger": LedgerUnavailable("no room"),
            "coordinator": Unavailable("stuck"),
            "search_index": SearchUnavailable("behind"),
        }
        with pytest.raises(Unavailable) as refused:
            await world.gauge.require_ingestion()
        assert str(refused.value) == "operation ledger unavailable: ledger: no room; coordinator: stuck"
        world.wrong = {}
        world.time += PROBE_SECONDS + 0.01
        await world.gauge.require_ingestion()

    run(scene())


def test_search_that_is_down_does_not_stop_ingestion() -> None:
    async def scene() -> None:
        world = World()
        world.wrong = {"search_index": SearchUnavailable("behind")}
        world.ingest = world.query = msgspec.structs.replace(HEALTHY, ready=False)
        await world.gauge.require_ingestion()

    run(scene())


def test_a_good_measurement_lets_writes_in_until_it_is_stale() -> None:
    async def scene() -> None:
        world = World()
        await world.gauge.measure()
        world.hold = asyncio.Event()  # From now on no probe answers until the end.
        world.time += PROBE_SECONDS
        await asyncio.wait_for(world.gauge.require_ingestion(), 5)
        await asyncio.sleep(0)
        assert world.asked["ledger"] == 1, "it is young"
        world.time += STALE_SECONDS - PROBE_SECONDS
        await asyncio.wait_for(world.gauge.require_ingestion(), 5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert world.asked["ledger"] == 2, "a new one was begun beside"
        world.time += 0.01
        waiting = asyncio.create_task(world.gauge.require_ingestion())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "a stale measurement let a write in"
        world.wrong = {"ledger": LedgerUnavailable("gone")}
        world.hold.set()
        with pytest.raises(Unavailable, match="ledger: gone"):
            await waiting

    run(scene())


def test_a_bad_measurement_is_taken_again_before_a_write_is_refused() -> None:
    async def scene() -> None:
        world = World()
        world.wrong = {"storage": LedgerUnavailable("full")}
        await world.gauge.measure()
        world.wrong = {}
        world.time += PROBE_SECONDS + 0.01
        await world.gauge.require_ingestion()

    run(scene())


def test_a_probe_without_an_answer_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PROBE_TIMEOUT_SECONDS", 0.01)

    async def scene() -> None:
        world = World()
        world.hold = asyncio.Event()
        measured = await world.gauge.measure()
        assert measured.reasons == dict.fromkeys(PROBES, "no answer within 0.01 seconds")
        assert measured.capabilities == Capabilities(tokenizer=True, model_executor=True)

    run(scene())


def test_a_bug_in_a_probe_is_no_reason_but_an_error() -> None:
    async def scene() -> None:
        world = World()
        world.wrong = {"ledger": ZeroDivisionError("a bug")}
        with pytest.raises(ZeroDivisionError):
            await world.gauge.measure()
        world.wrong = {}
        assert (await world.gauge.measure()).ingestion_ready

    run(scene())


def test_close_waits_for_the_measurement_under_way() -> None:
    async def scene() -> None:
        world = World()
        await world.gauge.close()
        world.hold = asyncio.Event()
        asking = asyncio.create_task(world.gauge.measure())
        await asyncio.sleep(0)
        closing = asyncio.create_task(world.gauge.close())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not closing.done()
        world.hold.set()
        await closing
        assert isinstance(await asking, Readiness)

    run(scene())


class Eager(ReadinessGauge):
    """Trusts any measurement, however old."""

    def _age(self) -> float:
        return 0.0


def test_a_gauge_that_trusts_old_measurements_would_be_seen() -> None:
    async def scene() -> None:
        world = World()
        world.gauge.__class__ = Eager
        await world.gauge.measure()
        world.wrong = {"ledger": LedgerUnavailable("gone")}
        world.time += 2 * STALE_SECONDS
        await world.gauge.require_ingestion()  # The real one refuses.
        world.gauge.__class__ = ReadinessGauge
        with pytest.raises(Unavailable):
            await world.gauge.require_ingestion()

    run(scene())
