"""Follow: replay the durable events of an operation, then its live ones, as the same bytes (ruling 9).

A follower subscribes first and reads history after, so nothing falls between; what it has had already is
dropped by sequence, and a gap or a full queue is filled from the ledger. A follower that does not read
costs a bounded queue.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from muniment.core import receipts, replay
from muniment.core.tables import Row
from muniment.errors import NotFound, TooManyStreams, Unavailable
from muniment.model import journal
from muniment.model.operation import TERMINAL, State
from muniment.ports.ledger import Ledger, Reads, SealedUnit

QUEUE_EVENTS_MAX: Final = 64
HISTORY_PAGE: Final = 256
KEEPALIVE: Final = b": keep-alive\n\n"

Frame = tuple[int, bool, bytes]
"""Sequence, whether it is the last one of its operation, and the bytes."""


class Follower:
    """One open stream's queue of live frames."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.lagged = False
        self.closed = False
        self.wake = asyncio.Event()

    def push(self, frame: Frame) -> None:
        """Take a frame, or remember that one was missed."""
        if len(self.frames) >= QUEUE_EVENTS_MAX:
            self.frames.clear()
            self.lagged = True
        self.frames.append(frame)
        self.wake.set()

    def close(self) -> None:
        """End the stream at the next wake."""
        self.closed = True
        self.wake.set()


class Followers:
    """All open streams of a server."""

    def __init__(self, ledger: Ledger, *, followers_max: int, keepalive_seconds: float) -> None:
        self._ledger = ledger
        self._followers_max = followers_max
        self._keepalive_seconds = keepalive_seconds
        self._open: dict[int, dict[int, Follower]] = {}
        self._ids: dict[int, str] = {}
        self._count = 0
        self._closed = False
        ledger.subscribe(self._publish)

    def close(self) -> None:
        """End every stream; clients resume with ``after``."""
        self._closed = True
        for followers in self._open.values():
            for follower in followers.values():
                follower.close()

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
        for each in sealed:
            unit = each.unit
            if not isinstance(unit, journal.Step):
                continue
            followers = self._open.get(unit.n)
            if followers:
                for row in replay.step_events(unit):
                    frame = _frame(self._ids[unit.n], row)
                    for follower in followers.values():
                        follower.push(frame)

    async def _stream(self, n: int, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        follower = Follower()
        self._enter(n, operation_id, follower)
        try:
            frames = await self._history(n, operation_id, after)
            yield b"".join(data for _, _, data in frames)
            if frames and frames[-1][1]:
                return
            last = frames[-1][0] if frames else after
            behind = len(frames) == HISTORY_PAGE
            while not follower.closed:
                if behind:
                    follower.lagged = False
                    frames = await self._history(n, operation_id, last)
                    behind = len(frames) == HISTORY_PAGE
                else:
                    frames, behind = _fresh(follower, last)
                if frames:
                    last = frames[-1][0]
                    yield b"".join(data for _, _, data in frames)
                    if frames[-1][1]:
                        return
                elif not behind:
                    if await self._has_ended(n, last):
                        return
                    if not await _woken(follower, self._keepalive_seconds):
                        yield KEEPALIVE
        finally:
            self._leave(n, follower)

    def _enter(self, n: int, operation_id: str, follower: Follower) -> None:
        self._count += 1
        self._ids[n] = operation_id
        self._open.setdefault(n, {})[id(follower)] = follower
        if self._closed:
            follower.close()

    def _leave(self, n: int, follower: Follower) -> None:
        self._count -= 1
        self._open[n].pop(id(follower))
        if not self._open[n]:
            del self._open[n], self._ids[n]

    async def _history(self, n: int, operation_id: str, after: int) -> list[Frame]:
        # SQLite holds integers of 63 bits, and no sequence is ever larger; ``after`` may be any uint64.
        bounded = min(after, 2**63 - 1)
        rows = await self._ledger.read(lambda reads: reads.events(n, bounded, HISTORY_PAGE))
        return [_frame(operation_id, row) for row in rows]

    async def _has_ended(self, n: int, last: int) -> bool:
        def query(reads: Reads) -> bool:
            row = reads.operation(n)
            return row is not None and row["state"] in TERMINAL and row["progress_seq"] <= last

        return await self._ledger.read(query)


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
    return (shown.sequence, State(shown.to_state) in TERMINAL, receipts.frame(shown))


def _fresh(follower: Follower, last: int) -> tuple[list[Frame], bool]:
    """Take the queued frames that follow ``last``; the second value says that the ledger must fill a gap."""
    if follower.lagged:
        follower.frames.clear()
        return [], True
    frames: list[Frame] = []
    expected = last + 1
    while follower.frames:
        frame = follower.frames.popleft()
        if frame[0] < expected:
            continue
        if frame[0] > expected:
            follower.lagged = True
            return frames, not frames
        frames.append(frame)
        expected += 1
    return frames, False


async def _woken(follower: Follower, seconds: float) -> bool:
    if follower.frames or follower.lagged or follower.closed:
        return True
    follower.wake.clear()
    try:
        async with asyncio.timeout(seconds):
            await follower.wake.wait()
    except TimeoutError:
        return False
    return True
