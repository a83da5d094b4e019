"""Many operations through one server: is memory flat, the log recycled, does each file handle come back?

A real server with real children and the synthetic embedder takes memories, tasks, replays, recalls and event
streams over kept connections. What grows by design, the device that holds every memory, is counted row by
row and taken off; the rest must be flat after the warm-up. Exit status 1 if it is not, if a handle or the
write-ahead log grows, or if something acknowledged did not commit.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from bench.backlog import resident_bytes
from muniment import wiring
from tests.support import submissions
from tests.support.live import Wire, executor_pid, post_bytes, request_bytes
from tests.support.server import Server

OPEN_MAX = 2000
FLAT = 0.05
WARM_SHARE = 0.25
PAGE_BYTES = 4096


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one moment. Bytes and counts."""

    operations: int
    server: int
    device: int
    children: int
    handles: int
    log: int

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
        self.row_bytes = 0

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

    async def client(self, numbers: "asyncio.Queue[int]") -> None:
        """Send what comes, some of it twice, and recall now and then; a negative number ends it."""
        async with Wire.open(self.server.url) as wire:
            while (number := await numbers.get()) >= 0:
                request = post_bytes(self.body(number))
                reply = await wire.send(request)
                assert reply.status == 202, reply
                self.sent += 1
                if number % 10 == 0:
                    reply = await wire.send(request)
                    assert reply.status == 200, reply
                    self.replayed += 1
                if number % 50 == 0:
                    query = msgspec.json.encode(
                        {"query": f"Which box was counted by {number % 13}?", "limit": 5}
                    )
                    reply = await wire.send(request_bytes("POST", "/api/v2/recall", query))
                    assert reply.status == 200, reply
                    self.recalled += 1

    async def settled(self, wire: Wire, open_max: int) -> dict[str, Any]:
        """Wait until no more operations are open than that; return the status."""
        while (told := await self.status(wire))["operations"]["open"] > open_max:  # noqa: ASYNC110 nothing here would tell
            await asyncio.sleep(0.05)
        return told

    async def status(self, wire: Wire) -> dict[str, Any]:
        """The status of the server."""
        told: dict[str, Any] = msgspec.json.decode((await wire.get("/api/v2/status")).body)
        return told

    async def run(self, connections: int, progress: Progress) -> None:
        """All operations, with a sample after each hundredth."""
        task = progress.add_task("operations", total=self.count)
        numbers: asyncio.Queue[int] = asyncio.Queue(connections)
        async with Wire.open(self.server.url) as wire, asyncio.TaskGroup() as clients:
            for _ in range(connections):
                clients.create_task(self.client(numbers))
            every = max(1, self.count // 100)
            for number in range(self.count):
                await numbers.put(number)
                if number % every == 0:
                    self.samples.append(self.sample(number, await self.settled(wire, OPEN_MAX)))
                    progress.update(task, completed=number)
            for _ in range(connections):
                await numbers.put(-1)
        async with Wire.open(self.server.url) as wire:
            self.samples.append(self.sample(self.count, await self.settled(wire, 0)))
            progress.update(task, completed=self.count)

    def sample(self, number: int, told: dict[str, Any]) -> Sample:
        """Measure now."""
        pid = self.server.pid
        log = self.server.data_dir / "ledger.db-wal"
        return Sample(
            operations=number,
            server=resident_bytes(pid),
            device=told["device"]["bytes"],
            children=sum(resident_bytes(executor_pid(self.server, role)) for role in ("ingest", "query")),
            handles=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            log=log.stat().st_size,
        )


def spread(values: list[int]) -> float:
    """How far the values lie apart, against their middle."""
    return (max(values) - min(values)) / (sorted(values)[len(values) // 2])


def verdict(samples: list[Sample], wal_pages_max: int) -> tuple[list[str], list[str]]:
    """What to print, and what is wrong, of the samples after the warm-up."""
    warm = samples[int(len(samples) * WARM_SHARE) :]
    rest, children = [each.rest for each in warm], [each.children for each in warm]
    handles = [each.handles for each in warm]
    log = max(each.log for each in warm)
    lines = [
        f"server, warm and at the end: {warm[0].server / 1e6:.0f}, {warm[-1].server / 1e6:.0f} MB",
        f"  of it the device: {warm[0].device / 1e6:.0f} and {warm[-1].device / 1e6:.0f} MB",
        f"  the rest: {min(rest) / 1e6:.1f} to {max(rest) / 1e6:.1f} MB, spread {spread(rest):.3f}",
        f"children: {min(children) / 1e6:.1f} to {max(children) / 1e6:.1f} MB, spread {spread(children):.3f}",
        f"file handles: {min(handles)} to {max(handles)}",
        f"write-ahead log: at most {log / 1e6:.1f} MB",
    ]
    wrong = []
    if spread(rest) > FLAT:
        wrong.append(f"the server's memory is not flat: {spread(rest):.3f}")
    if spread(children) > FLAT:
        wrong.append(f"the children's memory is not flat: {spread(children):.3f}")
    if handles[-1] > handles[0]:
        wrong.append(f"file handles grow: {handles[0]} to {handles[-1]}")
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
    parser.add_argument("--json", metavar="PATH", help="write the samples to this file")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muniment-soak-") as directory:
        data = Path(directory) / "store"
        with Server(data, embedder="synthetic") as server, Progress(console=Console(stderr=True)) as progress:
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
    print(f"{soak.sent} operations, {soak.replayed} replays, {soak.recalled} recalls in {seconds:.0f} s")
    print("\n".join(lines + [f"WRONG: {each}" for each in wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
