"""Followers of every kind in simulated time: each hears all events after its place, once, and soon."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import msgspec
import pytest

from muniment.core import event_ring, receipts
from muniment.core.event_ring import EventRing, Frame, Place
from muniment.errors import InvariantBroken, Unavailable
from muniment.model import command
from muniment.runtime import follow
from muniment.runtime.follow import KEEPALIVE, Feed, Followers
from tests.support import operations, stores
from tests.support.operations import ACCOUNT, NOW
from tests.support.simulation import Faults, SimulatedLedger, simulated

SEEDS: Final = range(150)
OPERATIONS: Final = 3
FOLLOWERS: Final = 12
KEEPALIVE_SECONDS: Final = 60.0
KEEPALIVES_MAX: Final = 3
BYTES_MAX: Final = 100_000
"""Far more than an operation's events are."""
SOON_SECONDS: Final = 0.2
"""Some simulated reads of the ledger, and what events are collected for."""


class Heard(msgspec.Struct):
    """One follower, and how it fared."""

    operation_id: str
    after: int
    read_seconds: float
    """How long it takes over a piece."""
    leaves: bool
    data: bytes = b""
    keepalives: int = 0
    ended_at: float | None = None


class World:
    """Some operations that go their way, some followers, and a ring that is often too small."""

    def __init__(self, seed: int, make: type[Followers] = Followers) -> None:
        self.random = Random(seed)
        self.store = stores.in_memory()
        self.driver = stores.Driver(self.store)
        self.happened: Counter[str] = Counter()
        self.ledger = SlowReads(self.store, self.random, Faults(), self.happened)
        self.followers = make(self.ledger, followers_max=FOLLOWERS, keepalive_seconds=KEEPALIVE_SECONDS)
        self.heard: list[Heard] = []
        self.ends: dict[str, float] = {}

    async def run(self) -> None:
        """Until all operations and all followers have ended."""
        for number in range(OPERATIONS):
            await self.ledger.write(operations.memory(f"m{number}", dependencies=[f"s{number}"]))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(FOLLOWERS):
                    tasks.create_task(self.follow())
                for number in range(OPERATIONS):
                    tasks.create_task(self.carry(number))
        except* AssertionError as errors:
            raise AssertionError(str(errors.exceptions)) from errors
        assert self.followers.count() == 0
        assert self.followers._feeds == {}
        assert self.followers._ring_bytes == 0

    async def carry(self, number: int) -> None:
        """Take an operation through its states, at times in bursts."""
        n, asked = number + 1, operations.memory(f"m{number}", dependencies=[f"s{number}"])
        pause = self.random.choice([0.0, 0.01, 0.2])
        await asyncio.sleep(self.random.uniform(0.2, 1.5))
        await self.ledger.write(operations.stream(f"s{number}"))
        [stream] = [row for row in self.driver.rows("operation") if row["id"] == f"s{number}"]
        for make in (
            lambda: command.Advance(n=n, now=NOW),
            lambda: command.Apply(n=stream["n"], now=NOW),
            lambda: operations.plan(n, asked),
            lambda: operations.vectors(n, self.plan(n), [0]),
            lambda: command.CommitMemory(n=n, now=NOW),
        ):
            await self.ledger.write(make())
            await asyncio.sleep(self.random.uniform(0.0, pause))
        self.ends[f"m{number}"] = asyncio.get_running_loop().time()

    def plan(self, n: int) -> int:
        """The plan of an operation."""
        [operation] = [row for row in self.driver.rows("operation") if row["n"] == n]
        [plan] = [row for row in self.driver.rows("plan") if row["object_n"] == operation["object_n"]]
        return int(plan["n"])

    async def follow(self) -> None:
        """Come, read, and stay to the end or leave."""
        heard = Heard(
            f"m{self.random.randrange(OPERATIONS)}",
            self.random.choice([0, 0, 0, 1, 3, 6, 7, 8, 2**64 - 1]),
            self.random.choice([0.0, 0.0, 0.05, 0.5]),
            self.random.random() < 0.2,
        )
        self.heard.append(heard)
        await asyncio.sleep(self.random.uniform(0.0, 1.5))
        stream = await self.followers.follow(ACCOUNT, heard.operation_id, heard.after)
        reading = asyncio.ensure_future(self.read(stream, heard))
        if heard.leaves:
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if not reading.cancelled():
            reading.result()
        await stream.aclose()

    async def read(self, stream: Any, heard: Heard) -> None:
        """Read at this follower's pace."""
        async for piece in stream:
            assert piece
            assert len(heard.data) < BYTES_MAX, f"no end: {heard.operation_id}"
            if piece == KEEPALIVE:
                heard.keepalives += 1
                assert heard.keepalives < KEEPALIVES_MAX, f"it waits for ever: {heard.operation_id}"
            else:
                heard.data += piece
            await asyncio.sleep(heard.read_seconds)
        heard.ended_at = asyncio.get_running_loop().time()

    def check(self) -> None:
        """Raise AssertionError unless each heard everything after its place, once, and ended soon."""
        for heard in self.heard:
            events = self.driver.events(heard.operation_id)
            frames = [receipts.frame(each) for each in events if each.sequence > heard.after]
            whole = b"".join(frames)
            if heard.leaves and heard.ended_at is None:
                assert whole.startswith(heard.data), f"other bytes: {heard}"
                continue
            assert heard.data == whole, f"other bytes: {heard}"
            assert heard.ended_at is not None
            slow = SOON_SECONDS + (heard.read_seconds + 0.02) * (len(frames) + 1)
            assert heard.ended_at <= max(self.ends[heard.operation_id], 2.0) + slow, f"late: {heard}"
            assert not heard.keepalives


class SlowReads(SimulatedLedger):
    """The state that a read sees is the one from its beginning or its end, and commits come in between."""

    async def read(self, query: Any) -> Any:
        early = self._random.random() < 0.5
        found = self._store.read(query) if early else None
        await asyncio.sleep(self._random.uniform(0.0, 0.03))
        return found if early else self._store.read(query)


def run(seeds: Sequence[int], make: type[Followers] = Followers) -> Counter[str]:
    """Run worlds, some with rings and pages of a frame or two; count what happened."""
    counted: Counter[str] = Counter()
    for seed in seeds:
        small = Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(follow, "RING_BYTES_MAX", small.choice([1, 400, 1_000_000]))
            patch.setattr(follow, "RINGS_BYTES_MAX", small.choice([0, 900, 1_000_000]))
            patch.setattr(follow, "HISTORY_PAGE", small.choice([1, 2, 256]))
            patch.setattr(event_ring, "SLICE_BYTES_MAX", small.choice([1, 600, 100_000]))
            seen = _counting(patch)
            world = World(seed, make)
            simulated(world.run)
            world.check()
        counted.update(seen)
        counted["left"] += sum(heard.ended_at is None for heard in world.heard)
    return counted


def _counting(patch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    after = EventRing.after

    def counting(self: EventRing, position: int) -> Any:
        found = after(self, position)
        seen["slice" if not isinstance(found, Place) else found.value] += 1
        return found

    patch.setattr(EventRing, "after", counting)
    return seen


def test_every_follower_hears_everything_once_and_soon() -> None:
    counted = run(SEEDS)
    print(f"{len(SEEDS)} worlds: {dict(counted)}")
    for what, least in (("slice", 200), ("behind", 200), ("latest", 1000), ("ended", 100), ("left", 50)):
        assert counted[what] >= least, f"too rarely: {what}: {counted}"


def test_a_silent_stream_is_kept_alive() -> None:
    async def scenario() -> tuple[list[bytes], float]:
        world = World(1)
        await world.ledger.write(operations.memory("m", dependencies=["s"]))
        stream = await world.followers.follow(ACCOUNT, "m", 0)
        pieces = [await anext(stream) for _ in range(4)]
        taken = asyncio.get_running_loop().time()
        world.followers.close()
        assert [piece async for piece in stream] == []
        return pieces, taken

    pieces, taken = simulated(scenario)
    assert pieces[1:] == [KEEPALIVE] * 3
    assert 3 * KEEPALIVE_SECONDS <= taken <= 3 * KEEPALIVE_SECONDS + 1


def test_closing_ends_every_stream() -> None:
    async def scenario() -> None:
        world = World(1)
        await world.ledger.write(operations.memory("m", dependencies=["s"]))
        streams = [await world.followers.follow(ACCOUNT, "m", 0) for _ in range(3)]
        reading = [asyncio.create_task(_all(stream)) for stream in streams]
        await asyncio.sleep(1.0)
        world.followers.close()
        async with asyncio.timeout(1.0):
            await asyncio.gather(*reading)
        with pytest.raises(Unavailable):
            await world.followers.follow(ACCOUNT, "m", 0)

    simulated(scenario)


async def _all(stream: Any) -> bytes:
    return b"".join([piece async for piece in stream])


def test_events_that_the_ledger_has_lost_are_no_endless_search() -> None:
    async def scenario() -> None:
        world = World(1)
        await world.ledger.write(operations.memory("m", dependencies=["s"]))
        stream = await world.followers.follow(ACCOUNT, "m", 0)
        await anext(stream)
        [feed] = world.followers._feeds.values()
        feed.ring.append(Frame(99, ends=False, data=b"from nowhere"))
        with pytest.raises(InvariantBroken, match="are not in the ledger"):
            await anext(stream)
        await stream.aclose()

    simulated(scenario)


# Controls: followers with a planted fault, which the same worlds must find.


class ReadsHistoryFirst(Followers):
    """Enters the feed after it has read."""

    async def _history(self, feed: Feed, after: int) -> Any:
        found = await super()._history(feed, after)
        feed.ring = EventRing() if feed.followers == 1 else feed.ring
        self._ring_bytes = sum(each.ring.byte_count for each in self._feeds.values())
        return found


class NeverBackfills(Followers):
    """Gives one that is behind what is there."""

    async def _backfill(self, feed: Feed, last: int, *, expected: bool) -> Any:
        if not expected:
            return await super()._backfill(feed, last, expected=expected)
        return feed.ring.after(feed.ring._first - 1), False


class WakesNobody(Followers):
    """Tells those who wait of nothing but the end."""

    def _enter(self, n: int, operation_id: str) -> Feed:
        feed = super()._enter(n, operation_id)
        feed.told = lambda *, at_once: None  # type: ignore[method-assign]
        return feed


class LosesAWake(Followers):
    """An event that comes while a wake is due is not told."""

    def _enter(self, n: int, operation_id: str) -> Feed:
        feed, loop = super()._enter(n, operation_id), asyncio.get_running_loop()

        def told(*, at_once: bool) -> None:
            if loop.time() - feed._woken_at > follow.COALESCE_SECONDS:
                feed.wake()

        feed.told = told  # type: ignore[method-assign]
        return feed


class PublishesTwice(Followers):
    """Sends a frame live that history has had."""

    def _keep(self, ring: EventRing, frame: Frame) -> None:
        super()._keep(ring, frame)
        ring._first += ring._first > 3
        ring._given = None


class KeepsFeeds(Followers):
    """A feed stays when its followers have gone."""

    def _leave(self, feed: Feed) -> None:
        feed.followers += 1
        super()._leave(feed)
        feed.followers -= 1


@pytest.mark.parametrize(
    "mutant", [ReadsHistoryFirst, NeverBackfills, WakesNobody, LosesAWake, PublishesTwice, KeepsFeeds]
)
def test_control_followers_with_a_fault_are_noticed(mutant: type[Followers]) -> None:
    with pytest.raises(AssertionError):
        run(SEEDS[:40], mutant)
