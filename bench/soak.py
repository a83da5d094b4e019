"""Many operations through one server: is memory flat, the log recycled, does each file handle come back?

A real server with real children and the synthetic embedder takes memories, tasks, replays and recalls over
kept connections, and event streams over others. What grows by design, the device that holds every memory, is
counted row by row and taken off. The rest must be flat after the warm-up, a quarter of the operations, when
the page caches of the database are full. Exit status 1 if it is not, if the write-ahead log or the number of
handles grows, or if something acknowledged did not commit.

``--mutant`` plants a fault in the server, which must be found: the exit status must be 1.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.backlog import resident_bytes
from bench.measure.machine import load, load_line
from muniment import wiring
from muniment.adapters.devices.numpy_device import KEY_BYTES
from muniment.adapters.embedders.synthetic import DIMENSIONS
from tests.support import streams, submissions
from tests.support.live import Wire, executor_pid, patched, post_bytes, request_bytes
from tests.support.received import READ_BYTES, received
from tests.support.server import Server

OPEN_MAX = 2000
FLAT = 0.05
EVENTS = 6
"""Of a memory of one part."""
WARM_SHARE = 0.25
CLOSING_SECONDS = 0.5
"""After this the server has closed what its clients have."""
IDLE_SECONDS = 2.0
"""The server closes a connection on which nothing was asked for five."""
PAGE_BYTES = 4096
PART_BYTES = 4 * DIMENSIONS + 8
MEMORY_BYTES = 6 * 8 + 1 + KEY_BYTES
"""Its columns, the mark of its number, its key."""

MUTANTS = {
    "keep": """
from muniment.runtime import service
submit, kept = service.Service.submit, []

async def keeping(self, body):
    kept.append(bytes(body) * 3)
    return await submit(self, body)

service.Service.submit = keeping
""",
    "handles": """
import os
from muniment.runtime import follow
leave = follow.Followers._leave

def leaving(self, feed):
    leave(self, feed)
    os.open("/", os.O_RDONLY)

follow.Followers._leave = leaving
""",
}
"""Servers that keep what each operation was sent as, or a handle for each stream that has ended."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one moment. Bytes and counts."""

    operations: int
    server: int
    memories: int
    parts: int
    children: int
    handles: int
    log: int

    @property
    def device(self) -> int:
        """What the device's rows take, without those that no memory has touched yet."""
        return self.parts * PART_BYTES + self.memories * MEMORY_BYTES

    @property
    def rest(self) -> int:
        """Resident memory of the server without what its device holds."""
        return self.server - self.device


class Soak:
    """One server under load, and what was seen of it."""

    def __init__(self, server: Server, arguments: argparse.Namespace) -> None:
        self.server = server
        self.count: int = arguments.operations
        self.random = random.Random(arguments.seed)
        self.samples: list[Sample] = []
        self.sent = 0
        self.replayed = 0
        self.recalled = 0
        self.followed = 0

    def body(self, number: int) -> dict[str, Any]:
        """Mostly memories; one in ten belongs to a task."""
        if number % 30 == 0:
            return submissions.stream(f"op-{number:07d}", name=f"stream {number}")
        if number % 30 == 10 and number > 30:
            payload = {
                "stream_name": f"stream {number - 10}",
                "name": "look",
                "idempotency_key": f"key {number}",
            }
            return submissions.envelope(f"op-{number:07d}", "add_task_step", payload)
        words = f"box {number % 97} in row {number % 31} was counted again by {number % 13}"
        return submissions.memory(
            f"op-{number:07d}", f"Note {number}: {words}.", session_id=f"s{number % 50}"
        )

    async def client(self, numbers: "asyncio.Queue[int]", tasks: asyncio.TaskGroup) -> None:
        """Send what comes over one connection, or a new one after a pause; a negative number ends it."""
        number = await numbers.get()
        while number >= 0:
            async with Wire.open(self.server.url) as wire:
                with suppress(TimeoutError):
                    while number >= 0:
                        await self.send(wire, number, tasks)
                        async with asyncio.timeout(IDLE_SECONDS):
                            number = await numbers.get()
                    return
            number = await numbers.get()

    async def send(self, wire: Wire, number: int, tasks: asyncio.TaskGroup) -> None:
        """Submit one operation, some of them twice, and follow or recall now and then."""
        request = post_bytes(self.body(number))
        reply = await wire.send(request)
        assert reply.status == 202, reply
        self.sent += 1
        if number % 10 == 0:
            reply = await wire.send(request)
            assert reply.status == 200, reply
            self.replayed += 1
        if number % 50 == 25:
            tasks.create_task(self.follow(f"op-{number:07d}"))
        if number % 50 == 0:
            query = msgspec.json.encode({"query": f"Which box was counted by {number % 13}?", "limit": 5})
            reply = await wire.send(request_bytes("POST", "/api/v2/recall", query))
            assert reply.status == 200, reply
            self.recalled += 1

    async def follow(self, operation_id: str) -> None:
        """Hear an operation to its end."""
        address = urlsplit(self.server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(streams.request(operation_id))
        raw = bytearray()
        while not raw.endswith(b"0\r\n\r\n"):
            data = await reader.read(READ_BYTES)
            assert data, raw
            raw += data
        writer.close()
        told = received(bytes(raw))
        assert (told.status, told.ended, told.frames.count(b"event: ")) == (200, True, EVENTS), told
        self.followed += 1

    async def settled(self, open_max: int) -> dict[str, Any]:
        """Wait until no more operations are open than that; return the status."""
        async with Wire.open(self.server.url) as wire:
            while (told := await self.status(wire))["operations"]["open"] > open_max:  # noqa: ASYNC110 nothing here would tell
                await asyncio.sleep(0.05)
        return told

    async def status(self, wire: Wire) -> dict[str, Any]:
        """The status of the server."""
        told: dict[str, Any] = msgspec.json.decode((await wire.get("/api/v2/status")).body)
        return told

    async def run(self, connections: int, progress: Progress) -> None:
        """All operations, with a sample before, after each hundredth, and after the clients have gone."""
        task = progress.add_task("operations", total=self.count)
        numbers: asyncio.Queue[int] = asyncio.Queue(connections)
        every = max(1, self.count // 100)
        self.samples.append(await self.sample(0, 0))
        async with asyncio.TaskGroup() as clients:
            for _ in range(connections):
                clients.create_task(self.client(numbers, clients))
            for number in range(self.count):
                await numbers.put(number)
                if number % every == 0 and number > 0:
                    self.samples.append(await self.sample(number, OPEN_MAX))
                    progress.update(task, completed=number)
            for _ in range(connections):
                await numbers.put(-1)
        self.samples.append(await self.sample(self.count, 0))
        progress.update(task, completed=self.count)

    async def sample(self, number: int, open_max: int) -> Sample:
        """Measure once no more operations are open than that, and connections that have ended are closed."""
        told = await self.settled(open_max)
        await asyncio.sleep(CLOSING_SECONDS)
        return self.measured(number, told)

    def measured(self, number: int, told: dict[str, Any]) -> Sample:
        """What is to be seen now."""
        pid = self.server.pid
        log = self.server.data_dir / "ledger.db-wal"
        return Sample(
            operations=number,
            server=resident_bytes(pid),
            memories=told["device"]["memories"],
            parts=told["device"]["parts"],
            children=sum(resident_bytes(executor_pid(self.server, role)) for role in ("ingest", "query")),
            handles=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            log=log.stat().st_size,
        )


def spread(values: list[int]) -> float:
    """How far the values lie apart, against their middle."""
    return (max(values) - min(values)) / (sorted(values)[len(values) // 2])


def verdict(samples: list[Sample], wal_pages_max: int) -> tuple[list[str], list[str]]:
    """What to print, and what is wrong, of the samples after the warm-up.

    The first sample is from before the clients came, the last from after they have gone.
    """
    warm = samples[int(len(samples) * WARM_SHARE) :]
    rest, children = [each.rest for each in warm], [each.children for each in warm]
    before, after = samples[0].handles, samples[-1].handles
    log = max(each.log for each in warm)
    lines = [
        f"server, warm and at the end: {warm[0].server / 1e6:.0f}, {warm[-1].server / 1e6:.0f} MB",
        f"  of it the device: {warm[0].device / 1e6:.0f} and {warm[-1].device / 1e6:.0f} MB",
        f"  the rest: {min(rest) / 1e6:.1f} to {max(rest) / 1e6:.1f} MB, spread {spread(rest):.3f}",
        f"children: {min(children) / 1e6:.1f} to {max(children) / 1e6:.1f} MB, spread {spread(children):.3f}",
        f"file handles: {before} before, {after} after, at most {max(each.handles for each in samples)}",
        f"write-ahead log: at most {log / 1e6:.1f} MB",
    ]
    wrong = []
    if spread(rest) > FLAT:
        wrong.append(f"the server's memory is not flat: {spread(rest):.3f}")
    if spread(children) > FLAT:
        wrong.append(f"the children's memory is not flat: {spread(children):.3f}")
    if after > before:
        wrong.append(f"file handles grow: {before} to {after}")
    if log > 2 * wal_pages_max * PAGE_BYTES:
        wrong.append(f"the write-ahead log is not recycled: {log} bytes")
    return lines, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this fault in the server")
    parser.add_argument("--json", metavar="PATH", help="write the samples to this file")
    arguments = parser.parse_args()
    began, before = time.monotonic(), load()
    with tempfile.TemporaryDirectory(prefix="muniment-soak-") as directory:
        data = Path(directory) / "store"
        fault = arguments.mutant and patched(Path(directory) / "patch", MUTANTS[arguments.mutant])
        with (
            Server(data, embedder="synthetic", environ=fault) as server,
            Progress(console=Console(stderr=True)) as progress,
        ):
            server.wait_ready("search_ready")
            soak = Soak(server, arguments)
            asyncio.run(soak.run(arguments.connections, progress))
            assert server.terminate() == 0
        report = wiring.check(data)
    lines, wrong = verdict(soak.samples, wal_pages_max=8000)
    wrong += [f"check: {finding}" for finding in report.findings]
    if report.operations != arguments.operations:
        wrong.append(f"{report.operations} operations of {arguments.operations}")
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(soak.samples)))
    seconds = time.monotonic() - began
    print(
        f"{soak.sent} operations, {soak.replayed} replays, {soak.recalled} recalls, {soak.followed} streams "
        f"in {seconds:.0f} s"
    )
    lines.append(load_line(before))
    print("\n".join(lines + [f"WRONG: {each}" for each in wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
