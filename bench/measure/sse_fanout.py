"""Target 7: one operation, hundreds of followers in another process, a thousand events a second."""

import asyncio
import json
import re
import resource
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

import httpx
import msgspec
import uvloop

from bench.measure.figures import Figure
from bench.measure.http_load import address
from bench.measure.rounds import Loads, Measured, Options, Step, in_turns
from bench.measure.serving import AppProcess
from bench.measure.worker import Worker
from tests.support import streams
from tests.support.live import OPERATIONS
from tests.support.received import received

RATE: Final = 1000
EACH: Final = 5
FEW: Final = 200
MANY: Final = 1000
FEW_ROUNDS_MAX: Final = 3
MANY_ROUNDS: Final = 2
KEPT_EVERY: Final = 20
"""Of so many followers, the bytes of one are kept and gone through."""
OPENING: Final = 64
PLACE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.001
PATIENCE_SECONDS: Final = 8.0
STALL_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 120.0
LAST_BYTES: Final = 2048
ID: Final = re.compile(rb"id: (\d+)\n")


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the followers heard."""

    in_time: tuple[int, ...]
    """Events of each follower when the time was over, from the first one on."""
    seconds: float
    unended: int
    """Followers that had not heard the end some seconds after the last event was due."""
    wrong: tuple[str, ...]

    @property
    def rate(self) -> float:
        """Events a second, all followers together."""
        return sum(self.in_time) / self.seconds

    @property
    def mean(self) -> float:
        """Events of a follower."""
        return sum(self.in_time) / len(self.in_time)


class Follower(asyncio.Protocol):
    """One connection; frames are counted by their ends."""

    def __init__(self, request: bytes, *, kept: bool) -> None:
        self._request = request
        self._newline = False
        self._kept = kept
        self.raw = bytearray()
        self.count = 0
        self.last = b""
        self.placed = asyncio.Event()
        self.ended = asyncio.Event()
        self.whole = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the frames that end in a piece."""
        self.count += data.count(b"\n\n") + (self._newline and data[0] == 10)
        self._newline = data[-1] == 10
        self.last = data if len(data) > LAST_BYTES else (self.last + data)[-LAST_BYTES:]
        if self._kept:
            self.raw += data
        if self.count and not self.placed.is_set():
            self.placed.set()
        if self.last.endswith(b"0\r\n\r\n"):
            self.whole = True
            self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing more comes."""
        self.placed.set()
        self.ended.set()


class Crowd:
    """Followers in a process of their own."""

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._followers: list[Follower] = []

    def place(self, url: str, operation_id: str, count: int) -> None:
        """Open so many streams; return when each has its first event."""
        self._runner.run(self._place(url, operation_id, count))

    def hear(self, seconds: float, events: int) -> Heard:
        """From the first event on, count for so long; then hear the end: ``events`` in all."""
        return self._runner.run(self._hear(seconds, events))

    def close(self) -> None:
        """Close all connections."""
        self._runner.run(self._leave())
        self._runner.close()

    async def _place(self, url: str, operation_id: str, count: int) -> None:
        (host, port), loop = address(url), asyncio.get_running_loop()
        opening = asyncio.Semaphore(OPENING)
        request = streams.request(operation_id)

        async def one(number: int) -> Follower:
            async with opening:
                _, follower = await loop.create_connection(
                    lambda: Follower(request, kept=number % KEPT_EVERY == 0),
                    host,
                    port,
                )
                await follower.placed.wait()
                return follower

        async with asyncio.timeout(PLACE_SECONDS):
            self._followers = list(await asyncio.gather(*map(one, range(count))))

    async def _hear(self, seconds: float, events: int) -> Heard:
        loop = asyncio.get_running_loop()
        before = [follower.count for follower in self._followers]
        while [follower.count for follower in self._followers] == before:  # noqa: ASYNC110 200 x 1,000/s
            await asyncio.sleep(POLL_SECONDS)
        began = loop.time()
        await asyncio.sleep(seconds)
        taken = loop.time() - began
        in_time = tuple(
            follower.count - first for follower, first in zip(self._followers, before, strict=True)
        )
        stalled = await self._ends()
        wrong = complaints(self._followers, events, stalled=stalled)
        unended = sum(not follower.whole for follower in self._followers)
        await self._leave()
        return Heard(in_time=in_time, seconds=taken, unended=unended, wrong=tuple(wrong))

    async def _ends(self) -> bool:
        """Wait for all to hear the end; True when nothing came any more although some had not."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_SECONDS
        moved, last = loop.time(), -1
        while not all(follower.ended.is_set() for follower in self._followers):
            count = sum(follower.count for follower in self._followers)
            if count != last:
                moved, last = loop.time(), count
            elif loop.time() - moved > STALL_SECONDS:
                return True
            if loop.time() > give_up and loop.time() - moved < 1.0:
                return False
            await asyncio.sleep(0.05)
        return False

    async def _leave(self) -> None:
        for follower in self._followers:
            if follower.transport is not None:
                follower.transport.close()
        self._followers = []
        await asyncio.sleep(0)


def complaints(followers: Sequence[Follower], events: int, *, stalled: bool) -> list[str]:
    """What is wrong with what the followers got: not all, not in order, or no end.

    One that has not heard the end, but goes on hearing, is slow and not wrong: it was left then, and must
    have heard everything up to there.
    """
    found = []
    if stalled:
        found.append(f"followers heard nothing for {STALL_SECONDS:.0f} s, and had not heard the end")
    cut = sum(follower.ended.is_set() and not follower.whole for follower in followers)
    if cut:
        found.append(f"{cut} of {len(followers)} connections were closed before the end")
    short = {follower.count for follower in followers if follower.whole and follower.count != events}
    if short:
        found.append(f"followers heard other than {events} events: {sorted(short)[:5]}")
    for follower in followers:
        if follower.raw:
            sequences = [int(each) for each in ID.findall(received(bytes(follower.raw)).frames)]
            if sequences != list(range(1, len(sequences) + 1)):
                found.append("a follower heard events that are not 1, 2, 3 and so on")
    return found


def steps(options: Options) -> int:
    """How often ``step`` is called."""
    return 2 * (min(options.rounds, FEW_ROUNDS_MAX) + min(options.rounds, MANY_ROUNDS))


def measure(options: Options, step: Step) -> Measured:
    """200 followers, then 1,000: the server and the bare app in turns."""
    wrong: list[str] = []
    with (
        AppProcess("bench.measure.event_server", str(options.directory / "events")) as ours,
        AppProcess("bench.measure.bare_events") as bare,
        Worker(Crowd) as crowd,
    ):
        figures = []
        for count, rounds_max, prefix in ((FEW, FEW_ROUNDS_MAX, "7"), (MANY, MANY_ROUNDS, "7-many")):

            def heard(url: str, name: str, count: int = count) -> Heard:
                step(f"{count} followers of {name}")
                return run(url, crowd, count, options.seconds)

            loads = Loads()
            found = [
                in_turns(
                    number,
                    [partial(heard, ours.url, "an operation"), partial(heard, bare.url, "the bare app")],
                )
                for number in range(min(options.rounds, rounds_max))
            ]
            wrong += [each for pair in found for one in pair for each in one.wrong]
            figures += _figures(loads, prefix, count, found)
    return Measured(tuple(figures), tuple(wrong))


def _figures(loads: Loads, prefix: str, count: int, found: Sequence[Sequence[Heard]]) -> list[Figure]:
    due = float(count * RATE)
    delivered, slowest = ("7-delivered", "7-slowest") if prefix == "7" else (prefix, f"{prefix}-slowest")
    unended = max(ours.unended for ours, _ in found)
    note = (
        f"events come in units of {EACH}, committed by the ledger; {unended} of {count} followers had not "
        f"heard the end {PATIENCE_SECONDS:.0f} s after it was due."
    )
    return [
        loads.figure(delivered, [(ours.rate, due) for ours, _ in found], note),
        loads.figure(slowest, [(float(min(ours.in_time)), max(ours.mean, 1e-9)) for ours, _ in found]),
        loads.figure(f"{prefix}-bare", [(bare.rate, due) for _, bare in found]),
    ]


_NUMBERS = iter(range(1_000_000))


def run(url: str, crowd: Worker[Crowd], count: int, seconds: float) -> Heard:
    """Accept an operation, place the followers, let it emit events and end, and ask what they heard."""
    name = f"fan-out-{next(_NUMBERS)}"
    # Longer than it is counted, so that the end does not fall into the time that is counted.
    emitting = seconds + 0.5
    units = round(RATE * emitting / EACH)
    with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as client:
        client.post(OPERATIONS, content=json.dumps({"operation_id": name})).raise_for_status()
        crowd.call(Crowd.place, url, name, count)
        crowd.begin(
            Crowd.hear, seconds, 1 + units * EACH + 1
        )  # The first is its acceptance, the last its end.
        asked = {"operation_id": name, "rate": RATE, "seconds": emitting, "each": EACH}
        client.post(OPERATIONS, content=json.dumps(asked)).raise_for_status()
        heard: Heard = crowd.result()
        return heard
