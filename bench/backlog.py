"""What a backlog costs: operations are accepted while the executor is stopped, then all must commit.

The executor child is stopped with SIGSTOP, so every operation is accepted and waits. The time of a POST with
nothing waiting and with nearly everything waiting is taken in one run and compared as a ratio. Then the child
goes on, and every operation must be committed.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import apsw
import msgspec

from bench.measure.machine import load, load_line
from tests.support import submissions
from tests.support.live import Wire, executor_pid, post_bytes
from tests.support.server import Server

DRAIN_SECONDS_MAX = 1800.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Seconds, bytes, counts."""

    operations: int
    connections: int
    accept_seconds: float
    first: tuple[float, ...]
    """Seconds of the first POSTs, with hardly anything waiting, in order."""
    last: tuple[float, ...]
    """Seconds of the last POSTs, with nearly everything waiting."""
    waiting: int
    """Operations that were accepted and not ended when the last POST had been answered."""
    drain_seconds: float
    committed: int
    rss_idle: int
    rss_waiting: int
    rss_drained: int

    @property
    def ratio(self) -> float:
        """Median POST with the backlog over median POST without."""
        return statistics.median(self.last) / statistics.median(self.first)

    def lines(self) -> list[str]:
        """The report as text."""
        quantiles = [
            f"  {name:<8} p50 {median * 1e3:7.2f} ms   p95 {p95 * 1e3:7.2f} ms   p99 {p99 * 1e3:7.2f} ms"
            for name, values in (("first", self.first), ("last", self.last))
            for median, p95, p99 in [(quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.99))]
        ]
        accepts, commits = self.operations / self.accept_seconds, self.committed / self.drain_seconds
        memory = (
            f"{name} {size / 1e6:.0f} MB"
            for name, size in (
                ("idle", self.rss_idle),
                ("with the backlog", self.rss_waiting),
                ("drained", self.rss_drained),
            )
        )
        return [
            f"accepted {self.operations} over {self.connections} connections: {accepts:.0f}/s",
            f"waiting after the last POST, the executor being stopped: {self.waiting}",
            f"POST, first and last {len(self.first)}:",
            *quantiles,
            f"  ratio of the medians, last over first: {self.ratio:.2f}",
            f"drained: {self.committed} in {self.drain_seconds:.1f} s, {commits:.0f}/s",
            f"resident memory of the server: {', '.join(memory)}",
        ]


def quantile(values: tuple[float, ...], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has ended")


def body(number: int) -> dict[str, Any]:
    content = f"Note {number}: the {number % 97} boxes in row {number % 31} were counted again on Tuesday."
    return submissions.memory(f"backlog-{number:06d}", content, session_id=f"s{number % 50}")


async def post_all(url: str, count: int, connections: int) -> list[float]:
    """Submit ``count`` operations; return the seconds that each took, in order of submission."""
    requests = [post_bytes(body(number)) for number in range(count)]
    seconds = [0.0] * count
    numbers = iter(range(count))

    async def client() -> None:
        async with Wire.open(url) as wire:
            for number in numbers:
                began = time.perf_counter()
                reply = await wire.send(requests[number])
                seconds[number] = time.perf_counter() - began
                assert reply.status == 202, reply

    await asyncio.gather(*(client() for _ in range(connections)))
    return seconds


def drain(data_dir: Path, count: int) -> tuple[int, float]:
    """Wait until ``count`` memories are there; return how many there are, and the seconds it took."""
    began = time.monotonic()
    connection = apsw.Connection(str(data_dir / "ledger.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        while True:
            found = stored(connection, "SELECT count(*) FROM memory")
            seconds = time.monotonic() - began
            if found >= count or seconds > DRAIN_SECONDS_MAX:
                return found, seconds
            time.sleep(0.25)
    finally:
        connection.close()


def stored(connection: apsw.Connection, sql: str) -> int:
    ((count,),) = connection.execute(sql).fetchall()
    assert isinstance(count, int)
    return count


def waiting(data_dir: Path) -> int:
    connection = apsw.Connection(str(data_dir / "ledger.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        sql = "SELECT count(*) FROM operation WHERE state NOT IN ('committed', 'rejected')"
        return stored(connection, sql)
    finally:
        connection.close()


def measure(server: Server, *, operations: int, connections: int, window: int) -> Report:
    """Run the whole of it on a server that has started and is ready; ``window`` POSTs are compared."""
    rss_idle = resident_bytes(server.pid)
    child = executor_pid(server)
    os.kill(child, signal.SIGSTOP)
    try:
        began = time.monotonic()
        seconds = asyncio.run(post_all(server.url, operations, connections))
        accept_seconds = time.monotonic() - began
        held = waiting(server.data_dir)
        rss_waiting = resident_bytes(server.pid)
    finally:
        os.kill(child, signal.SIGCONT)
    committed, drain_seconds = drain(server.data_dir, operations)
    return Report(
        operations=operations,
        connections=connections,
        accept_seconds=accept_seconds,
        first=tuple(seconds[:window]),
        last=tuple(seconds[-window:]),
        waiting=held,
        drain_seconds=drain_seconds,
        committed=committed,
        rss_idle=rss_idle,
        rss_waiting=rss_waiting,
        rss_drained=resident_bytes(server.pid),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--window", type=int, default=1000, help="POSTs compared, first and last")
    parser.add_argument("--embedder", choices=("synthetic", "bundled"), default="synthetic")
    parser.add_argument("--in-flight", type=int, help="setting operations_in_flight_max, else its default")
    chosen = parser.parse_args()
    settings = {} if chosen.in_flight is None else {"operations_in_flight_max": chosen.in_flight}
    before = load()
    with tempfile.TemporaryDirectory(prefix="muniment-bench-") as directory:
        server = Server(Path(directory) / "store", embedder=chosen.embedder, **settings)
        with server:
            server.wait_ready("search_ready")
            report = measure(
                server, operations=chosen.operations, connections=chosen.connections, window=chosen.window
            )
            server.terminate()
    print("\n".join([*report.lines(), load_line(before)]))
    return 0 if report.committed == report.waiting == report.operations else 1


if __name__ == "__main__":
    sys.exit(main())
