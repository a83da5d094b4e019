"""Writers, followers and queries against one server, from a process of their own."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec
import uvloop

from bench.long_text import sentences
from tests.support import streams, submissions
from tests.support.live import Wire, post_bytes, request_bytes

END_SECONDS: Final = 300.0
ENDED: Final = b"0\r\n\r\n"
COMMITTED: Final = b'"to_state":"committed"'
ERRORS_KEPT: Final = 20


class Did(msgspec.Struct, kw_only=True):
    """What happened; latencies in seconds, in order of their ends."""

    seconds: float = 0.0
    """How long writers and queries went on."""
    accept: list[float] = []
    """From a POST to its 202."""
    commit: list[float] = []
    """From a POST to the event that says committed, as its follower heard it."""
    query: list[float] = []
    acknowledged: list[str] = []
    errors: list[str] = []
    error_count: int = 0

    def failed(self, what: str) -> None:
        """Note an error."""
        self.error_count += 1
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(what)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each, and for how long."""

    seconds: float
    writers: int = 0
    queries: int = 0
    followers: int = 0
    """Operations that are followed at one time, each to its end. A writer waits for a free one."""


def texts(seed: str) -> Iterator[str]:
    """Memories of one to eight sentences, without end, the same for the same seed."""
    dice = random.Random(seed)
    made = sentences(dice.randrange(2**32))
    while True:
        yield "".join(next(made) for _ in range(dice.randint(1, 8))).strip()


class MixedLoad:
    """The load process."""

    def __init__(self, prefix: str) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._prefix = prefix
        self._texts = texts(prefix)
        self._questions = texts(prefix + " asked")
        self._count = 0

    def run(self, url: str, plan: Plan) -> Did:
        """Do it, and return when everything that was acknowledged has ended or much time has passed."""
        return self._runner.run(_Running(self, url, plan).run())

    def submit(self, url: str, count: int) -> Did:
        """Submit so many memories one after the other, and follow none."""
        return self._runner.run(self._submit(url, count))

    def close(self) -> None:
        """Close the loop."""
        self._runner.close()

    def next_write(self) -> tuple[str, bytes]:
        """The ID and the request of the next memory."""
        name = f"{self._prefix}-{self._count}"
        self._count += 1
        return name, post_bytes(submissions.memory(name, next(self._texts)))

    def next_query(self) -> bytes:
        """The request of the next query: a sentence of the same kind."""
        body = json.dumps({"query": next(self._questions)[:200], "limit": 10}).encode()
        return request_bytes("POST", "/api/v2/recall", body)

    async def _submit(self, url: str, count: int) -> Did:
        did = Did()
        async with Wire.open(url) as wire:
            for _ in range(count):
                name, request = self.next_write()
                reply = await wire.send(request)
                if reply.status == 202:
                    did.acknowledged.append(name)
                else:
                    did.failed(f"POST: {reply.status} {reply.body[:200]!r}")
        return did


class _Running:
    """One run."""

    def __init__(self, load: MixedLoad, url: str, plan: Plan) -> None:
        self._load = load
        self._url = url
        self._plan = plan
        self._slots = asyncio.Semaphore(plan.followers)
        self._following: set[asyncio.Task[None]] = set()
        self._end = 0.0
        self._did = Did()

    async def run(self) -> Did:
        began = time.perf_counter()
        self._end = began + self._plan.seconds
        await asyncio.gather(
            *(self._write() for _ in range(self._plan.writers)),
            *(self._query() for _ in range(self._plan.queries)),
        )
        self._did.seconds = time.perf_counter() - began
        if self._following:
            _, late = await asyncio.wait(self._following, timeout=END_SECONDS)
            for task in late:
                task.cancel()
                self._did.failed("an operation has not ended")
        return self._did

    async def _write(self) -> None:
        async with Wire.open(self._url) as wire:
            while time.perf_counter() < self._end:
                await self._slots.acquire()
                name, request = self._load.next_write()
                began = time.perf_counter()
                reply = await wire.send(request)
                self._did.accept.append(time.perf_counter() - began)
                if reply.status != 202:
                    self._did.failed(f"POST: {reply.status} {reply.body[:200]!r}")
                    self._slots.release()
                    continue
                self._did.acknowledged.append(name)
                task = asyncio.create_task(self._follow(name, began))
                self._following.add(task)
                task.add_done_callback(self._following.discard)

    async def _follow(self, name: str, began: float) -> None:
        address = urlsplit(self._url)
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(streams.request(name))
            data = await reader.readuntil(ENDED)
            writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self._did.failed(f"event stream: {error!r}")
        else:
            self._did.commit.append(time.perf_counter() - began)
            if COMMITTED not in data:
                self._did.failed(f"{name} did not commit: {data[-300:]!r}")
        finally:
            self._slots.release()

    async def _query(self) -> None:
        async with Wire.open(self._url) as wire:
            while time.perf_counter() < self._end:
                began = time.perf_counter()
                reply = await wire.send(self._load.next_query())
                self._did.query.append(time.perf_counter() - began)
                if reply.status != 200 or not reply.json()["results"]:
                    self._did.failed(f"recall: {reply.status} {reply.body[:200]!r}")


def uncommitted(names: Sequence[str], states: dict[str, str]) -> list[str]:
    """Which acknowledged operations are not committed, and how they stand."""
    return [f"{name}: {states.get(name, 'lost')}" for name in names if states.get(name) != "committed"]
