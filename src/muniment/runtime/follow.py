"""Follow: replay the durable events of an operation, then its live ones, as the same bytes (ruling 9).

A follower enters the feed of its operation first and reads history after, so nothing falls between. From
then on it holds a position: the feed's ring gives what follows, or says that the ledger must. A follower
that does not read costs what its connection holds, and nobody waits for it (ADR 0021).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from muniment.core import receipts, replay
from muniment.core.event_ring import EventRing, Frame, Place, Slice
from muniment.core.tables import Row
from muniment.errors import InvariantBroken, NotFound, TooManyStreams, Unavailable
from muniment.model import journal
from muniment.model.operation import TERMINAL, State
from muniment.ports.ledger import Ledger, Reads, SealedUnit

RING_BYTES_MAX: Final = 1024 * 1024
"""Of one feed."""
RINGS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all feeds; the one that grows beyond it drops its own frames."""
COALESCE_SECONDS: Final = 0.02
"""Followers are woken at most so often, with all that came; the first event and the last at once."""
HISTORY_PAGE: Final = 256
KEEPALIVE: Final = b": keep-alive\n\n"


class Feed:
    """The live events of one operation, while somebody follows it."""

    def __init__(self, n: int, operation_id: str, keepalive_seconds: float) -> None:
        self.n = n
        self.operation_id = operation_id
        self.ring = EventRing()
        self.followers = 0
        self.beats = 0
        """Counts up when nothing may have been sent for as long as a client should wait."""
        self._keepalive_seconds = keepalive_seconds
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._woken_at = 0.0
        self._waking: asyncio.TimerHandle | None = None
        self._beating = self._loop.call_later(keepalive_seconds, self._beat)

    async def news(self) -> None:
        """Return when there may be something new. Whoever waits has looked at the ring just before."""
        await self._news.wait()

    def told(self, *, at_once: bool) -> None:
        """Wake the followers, now or with those events that come in the next moment."""
        due = self._woken_at + COALESCE_SECONDS
        if at_once or due <= self._loop.time():
            self.wake()
        elif self._waking is None:
            self._waking = self._loop.call_at(due, self.wake)

    def wake(self) -> None:
        """Wake the followers now."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._woken_at = self._loop.time()
        self._news.set()
        self._news.clear()

    def close(self) -> None:
        """End the timers."""
        self._beating.cancel()
        if self._waking is not None:
            self._waking.cancel()

    def _beat(self) -> None:
        self.beats += 1
        self._beating = self._loop.call_later(self._keepalive_seconds, self._beat)
        self.wake()


class Followers:
    """All open streams of a server."""

    def __init__(self, ledger: Ledger, *, followers_max: int, keepalive_seconds: float) -> None:
        self._ledger = ledger
        self._followers_max = followers_max
        self._keepalive_seconds = keepalive_seconds
        self._feeds: dict[int, Feed] = {}
        self._count = 0
        self._ring_bytes = 0
        self._closed = False
        ledger.subscribe(self._publish)

    def close(self) -> None:
        """End every stream; clients resume with ``after``."""
        self._closed = True
        for feed in self._feeds.values():
            feed.wake()

    def count(self) -> int:
        """Open streams."""
        return self._count

    async def follow(self, account: int, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Return the stream of events with a sequence greater than ``after``.

        Raises NotFound, LedgerUnavailable, or Unavailable where too many streams are open, before the first
        byte.
        """
        row = await self._ledger.read(lambda reads: reads.find_operation(account, operation_id))
        if row is None:
            raise NotFound(f"operation '{operation_id}' not found")
        if self._closed:
            raise Unavailable("event streams are closed: the server is stopping")
        if self._count >= self._followers_max:
            raise TooManyStreams(f"too many event streams are open, the limit is {self._followers_max}")
        stream = self._stream(int(row["n"]), operation_id, after)
        # The stream takes its place and reads its first page now, so that a fault is an answer and not a cut.
        return _Begun(await anext(stream), stream)

    def _publish(self, sealed: Sequence[SealedUnit]) -> None:
        told: dict[int, bool] = {}
        for each in sealed:
            unit = each.unit
            if isinstance(unit, journal.Step) and (feed := self._feeds.get(unit.n)) is not None:
                for row in replay.step_events(unit):
                    frame = _frame(feed.operation_id, row)
                    self._keep(feed.ring, frame)
                    told[unit.n] = frame.ends
        for n, ends in told.items():
            self._feeds[n].told(at_once=ends)

    def _keep(self, ring: EventRing, frame: Frame) -> None:
        others = self._ring_bytes - ring.byte_count
        ring.append(frame)
        ring.shrink(min(RING_BYTES_MAX, RINGS_BYTES_MAX - others))
        self._ring_bytes = others + ring.byte_count

    async def _stream(self, n: int, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        feed = self._enter(n, operation_id)
        try:
            found, more = await self._history(feed, after)
            yield found.data
            while not (found.ends or self._closed):
                beats = feed.beats
                following = Place.BEHIND if more else feed.ring.after(found.last)
                if following is Place.ENDED:
                    return
                if following is Place.LATEST:
                    await feed.news()
                    if feed.beats != beats:
                        yield KEEPALIVE
                    continue
                if isinstance(following, Slice):
                    found = following
                else:
                    found, more = await self._backfill(feed, found.last, expected=not more)
                if found.data:
                    yield found.data
        finally:
            self._leave(feed)

    def _enter(self, n: int, operation_id: str) -> Feed:
        feed = self._feeds.get(n)
        if feed is None:
            feed = self._feeds[n] = Feed(n, operation_id, self._keepalive_seconds)
        feed.followers += 1
        self._count += 1
        return feed

    def _leave(self, feed: Feed) -> None:
        self._count -= 1
        feed.followers -= 1
        if not feed.followers:
            feed.close()
            self._ring_bytes -= feed.ring.byte_count
            del self._feeds[feed.n]

    async def _history(self, feed: Feed, after: int) -> tuple[Slice, bool]:
        """A page of events that follow ``after``, and whether there may be more in the ledger."""

        def query(reads: Reads) -> tuple[list[Row], Row | None]:
            # SQLite holds integers of 63 bits, and no sequence is ever larger; ``after`` may be any uint64.
            rows = reads.events(feed.n, min(after, 2**63 - 1), HISTORY_PAGE)
            return rows, None if rows else reads.operation(feed.n)

        rows, operation = await self._ledger.read(query)
        frames = [_frame(feed.operation_id, row) for row in rows]
        if not frames:
            ended = operation is not None and _has_ended(operation)
            return Slice(data=b"", last=after, ends=ended), False
        data = b"".join([frame.data for frame in frames])
        return Slice(data=data, last=frames[-1].sequence, ends=frames[-1].ends), len(frames) == HISTORY_PAGE

    async def _backfill(self, feed: Feed, last: int, *, expected: bool) -> tuple[Slice, bool]:
        found, more = await self._history(feed, last)
        if expected and not found.data:
            raise InvariantBroken(f"events after {last} of '{feed.operation_id}' are not in the ledger")
        return found, more


class _Begun(AsyncGenerator[bytes, None]):
    """A stream whose first bytes have been made: they come first, unless there are none."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first, self._rest = first, rest

    async def asend(self, value: None) -> bytes:
        """Give the next bytes."""
        first, self._first = self._first, b""
        return first or await self._rest.asend(value)

    async def athrow(self, *arguments: Any) -> bytes:
        """Raise inside the stream."""
        return await self._rest.athrow(*arguments)

    async def aclose(self) -> None:
        """End the stream, also one of which nothing was read."""
        await self._rest.aclose()


def _frame(operation_id: str, row: Row) -> Frame:
    shown = receipts.event(operation_id, row)
    return Frame(shown.sequence, State(shown.to_state) in TERMINAL, receipts.frame(shown))


def _has_ended(operation: Row) -> bool:
    return operation["state"] in TERMINAL
