"""Many POSTs over kept connections, from a process of their own: closed loop, or at a given rate.

A connection is an ``asyncio.Protocol`` on uvloop, and a request is ready before it is needed, so that the
load costs less than what it measures.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench.measure.payload import Requests

ACCEPTED: Final = 202
LENGTH: Final = b"content-length: "
DRAIN_SECONDS: Final = 30.0
PACE_SECONDS: Final = 0.0005


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a load was told."""

    counted: int
    """Answers within the time."""
    seconds: float
    """The time."""
    latencies: tuple[float, ...]
    """Of all answers, in order of arrival. At a given rate, waiting for a free connection is included."""
    accepted: tuple[int, ...]
    """Numbers of the operations that were answered with 202."""
    others: dict[int, int]
    """Other statuses, and how often; 0 is a connection that was closed."""
    late: float = 0.0
    """99th percentile of how much later than due a request was taken up, in seconds: the load's own doing."""

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.counted / self.seconds


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, answered: Callable[["Connection", int], None]) -> None:
        self._answered = answered
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._waits = False
        self.number = 0
        self.began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class.

    def send(self, number: int, request: bytes, began: float) -> None:
        """Send a request; the answer is told as soon as it is whole."""
        assert self._transport is not None
        self._waits, self.number, self.began = True, number, began
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take a piece of an answer."""
        data = self._data + data if self._data else data
        head = data.find(b"\r\n\r\n")
        if head >= 0:
            length = data.index(LENGTH) + len(LENGTH)
            if len(data) >= head + 4 + int(data[length : data.index(b"\r", length)]):
                self._data, self._waits = b"", False
                self._answered(self, int(data[9:12]))
                return
        self._data = data

    def connection_lost(self, error: Exception | None) -> None:
        """A connection that the server closes before it has answered is an answer that never came."""
        if self._waits:
            self._waits = False
            self._answered(self, 0)

    def close(self) -> None:
        """Close it, which is no news then."""
        self._waits = False
        if self._transport is not None:
            self._transport.close()


class _Load:
    """One run of a load."""

    def __init__(self, requests: Requests, first: int, seconds: float) -> None:
        self._requests = requests
        self._next = first
        self._seconds = seconds
        self._done = asyncio.Event()
        self._under_way = 0
        self._end = 0.0
        self._late: list[float] = []
        self._idle: deque[Connection] = deque()
        self._waiting: deque[float] = deque()
        self._given_out = False
        self._paced = False
        self.latencies: list[float] = []
        self.accepted: list[int] = []
        self.others: Counter[int] = Counter()
        self.counted = 0

    async def closed(self, connections: list[Connection]) -> Told:
        """Each connection sends its next request as soon as the last one is answered."""
        began = time.perf_counter()
        self._end = began + self._seconds
        for connection in connections:
            self._send(connection, began)
        self._given_out = True
        await self._finished()
        return self._told()

    async def paced(self, connections: list[Connection], rate: float) -> Told:
        """Requests are due at equal distances; one that finds no free connection waits for it."""
        self._idle.extend(connections)
        self._paced = True
        began = time.perf_counter()
        self._end = began + self._seconds
        given = 0
        while (now := time.perf_counter()) < self._end:
            while began + given / rate <= now:
                self._late.append(now - (began + given / rate))
                given += 1
                self._waiting.append(now)
            self._hand_out()
            await asyncio.sleep(PACE_SECONDS)
        self._given_out = True
        await self._finished()
        return self._told()

    def answered(self, connection: Connection, status: int) -> None:
        """An answer is there; what comes next depends on the kind of load."""
        now = time.perf_counter()
        self._under_way -= 1
        self.latencies.append(now - connection.began)
        self.counted += now <= self._end
        if status == ACCEPTED:
            self.accepted.append(connection.number)
        else:
            self.others[status] += 1
        if self._paced:
            if status:
                self._idle.append(connection)
            self._hand_out()
        elif now < self._end and status:
            self._send(connection, now)
        if self._given_out and not self._under_way and not self._waiting:
            self._done.set()

    def _hand_out(self) -> None:
        while self._waiting and self._idle:
            self._send(self._idle.popleft(), self._waiting.popleft())

    def _send(self, connection: Connection, began: float) -> None:
        number = self._next
        self._next += 1
        self._under_way += 1
        connection.send(number, self._requests.encoded(number), began)

    async def _finished(self) -> None:
        if self._under_way or self._waiting:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._done.wait()

    def _told(self) -> Told:
        late = sorted(self._late)
        return Told(
            counted=self.counted,
            seconds=self._seconds,
            latencies=tuple(self.latencies),
            accepted=tuple(self.accepted),
            others=dict(self.others),
            late=late[int(0.99 * len(late))] if late else 0.0,
        )


class HttpLoad:
    """The load process: every run takes operation numbers that no run before it had."""

    def __init__(self, prefix: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._requests = Requests(prefix)
        self._first = 0

    def closed(self, url: str, connections: int, seconds: float) -> Told:
        """So many connections, each with one request under way, for so long."""
        return self._run(url, connections, seconds, None)

    def paced(self, url: str, connections: int, seconds: float, rate: float) -> Told:
        """So many requests a second, whatever becomes of those before."""
        return self._run(url, connections, seconds, rate)

    def close(self) -> None:
        """Close the loop."""
        self._runner.close()

    def _run(self, url: str, connections: int, seconds: float, rate: float | None) -> Told:
        told = self._runner.run(self._loaded(url, connections, seconds, rate))
        self._first += len(told.latencies)
        return told

    async def _loaded(self, url: str, connections: int, seconds: float, rate: float | None) -> Told:
        (host, port), loop = address(url), asyncio.get_running_loop()
        load = _Load(self._requests, self._first, seconds)
        made = [
            (await loop.create_connection(lambda: Connection(load.answered), host, port))[1]
            for _ in range(connections)
        ]
        try:
            return await (load.closed(made) if rate is None else load.paced(made, rate))
        finally:
            for connection in made:
                connection.close()
