"""Targets 3 to 6: durable accepts over HTTP, against the same app without a ledger and the ledger alone."""

import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from bench.measure import commit_counter, flushes
from bench.measure.commit_counter import Counts
from bench.measure.disk import Calls, Disk
from bench.measure.figures import Figure, quantile, serial_bound
from bench.measure.http_load import HttpLoad, Told
from bench.measure.ledger_alone import BATCH
from bench.measure.payload import operation_id
from bench.measure.rounds import Loads, Measured, Options, Step, in_turns
from bench.measure.serving import AppProcess
from bench.measure.worker import Worker
from muniment.adapters.sqlite.store import LEDGER_FILE
from tests.support.live import executor_pid, patched
from tests.support.server import Server
from tests.support.strace import calls_in, straced

CONNECTIONS: Final = 32
PACED_CONNECTIONS: Final = 128
PACED_FACTOR: Final = 5.0
"""A stretch at a given rate is so many times as long as a round of the others: 10 s beside 2 s."""
PACED_ROUNDS_MAX: Final = 3
TRACED_SECONDS: Final = 0.5
QUIET_SECONDS: Final = 0.2
PREFIX: Final = "accept"
TRACED_PREFIX: Final = "flushed"
SETTINGS: Final[dict[str, Any]] = {
    "executor_stall_seconds": 3600.0,  # The stopped child is left alone for the whole measurement.
    "log_level": "error",
}


def steps(options: Options) -> int:
    """How often ``step`` is called."""
    return 3 * options.rounds + 2 * min(options.rounds, PACED_ROUNDS_MAX) + 1


def measure(options: Options, step: Step) -> Measured:
    """All of it on one server whose executor is stopped, beside the bare app and the ledger alone."""
    counted = options.directory / "counts"
    environ = patched(options.directory / "patch", commit_counter.code(counted))
    with (
        stopped(Server(options.directory / "accepts", environ=environ, **SETTINGS)) as server,
        AppProcess("bench.measure.bare_app") as bare_app,
        Worker(partial(HttpLoad, PREFIX)) as load,
        Worker(partial(HttpLoad, "bare")) as bare_load,
        Worker(partial(Disk, options.directory / "beside")) as disk,
    ):
        ground = _Ground(options, step, _Ours(server.url, counted, load), bare_app.url, bare_load, disk)
        figures = ground.closed() + ground.paced()
        wrong = [*ground.wrong, *ground.ours.wrong(server.data_dir / LEDGER_FILE), *disk.call(Disk.lost)]
    step("each 202 after its flush")
    complaints, note = trace(options.directory)
    noted = [msgspec.structs.replace(each, note=note) if each.key == "6" else each for each in figures]
    return Measured(tuple(noted), (*wrong, *complaints))


@contextmanager
def stopped(server: Server) -> Iterator[Server]:
    """A server that was ready and whose ingesting child was stopped then, so that nothing is worked on."""
    with server:
        server.wait_ready("search_ready")
        os.kill(executor_pid(server), signal.SIGSTOP)
        yield server
        server.kill()


class _Ours:
    """Load on the server, and what it was told."""

    def __init__(self, url: str, counted: Path, load: Worker[HttpLoad]) -> None:
        self._url = url
        self._counted = counted
        self._load = load
        self._told: list[Told] = []

    def closed(self, seconds: float) -> tuple[Told, Counts]:
        """As much as 32 connections get, and the commits of it."""
        before = commit_counter.read(self._counted)
        told = self._load.call(HttpLoad.closed, self._url, CONNECTIONS, seconds)
        return self._ended(told, before)

    def paced(self, seconds: float, rate: float) -> tuple[Told, Counts]:
        """The same at a given rate."""
        before = commit_counter.read(self._counted)
        told = self._load.call(HttpLoad.paced, self._url, PACED_CONNECTIONS, seconds, rate)
        return self._ended(told, before)

    def _ended(self, told: Told, before: Counts) -> tuple[Told, Counts]:
        """Return when nothing of it is left to be done while something else is measured."""
        self._told.append(told)
        counts = commit_counter.read(self._counted)
        found = counts.since(before)
        while True:
            time.sleep(QUIET_SECONDS)
            now = commit_counter.read(self._counted)
            if now == counts:
                return told, found
            counts = now

    def wrong(self, path: Path) -> list[str]:
        """Answers that were no 202, and operations that were accepted and are not in the database."""
        found = [
            f"POST was answered {count} times with {status}"
            for told in self._told
            for status, count in told.others.items()
        ]
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            stored = {name for (name,) in connection.execute("SELECT id FROM operation")}
        finally:
            connection.close()
        accepted = [operation_id(PREFIX, number) for told in self._told for number in told.accepted]
        lost = [name for name in accepted if name not in stored]
        if lost:
            found.append(f"{len(lost)} of {len(accepted)} accepted operations are lost: {lost[:3]}")
        return found


class _Closed(msgspec.Struct, frozen=True):
    """One round of closed loops, in operations a second."""

    bare: float
    accepts: float
    ledger: float
    counts: Counts


class _Ground:
    """Everything that runs, and what is done with it."""

    def __init__(
        self,
        options: Options,
        step: Step,
        ours: _Ours,
        bare_url: str,
        bare_load: Worker[HttpLoad],
        disk: Worker[Disk],
    ) -> None:
        self._options = options
        self._step = step
        self.ours = ours
        self._bare_url = bare_url
        self._bare_load = bare_load
        self._disk = disk
        self._most = 0.0
        self.wrong: list[str] = []

    def closed(self) -> list[Figure]:
        """Targets 3, 4 and 6."""
        loads = Loads()
        rounds = [self._round(number) for number in range(self._options.rounds)]
        self._most = statistics.median(each.accepts for each in rounds)
        return [
            loads.figure("3", [(each.accepts, each.bare) for each in rounds]),
            loads.figure("4", [(each.accepts, serial_bound(each.bare, each.ledger)) for each in rounds]),
            loads.figure("6", [(each.counts.bearing / each.counts.accepts, 1.0) for each in rounds]),
        ]

    def _round(self, number: int) -> _Closed:
        counts: list[Counts] = []

        def accepts() -> float:
            self._step("durable accepts")
            told, counted = self.ours.closed(self._options.seconds)
            counts.append(counted)
            return told.rate

        bare, accepted, ledger = in_turns(number, [self._bare, accepts, self._ledger])
        return _Closed(bare, accepted, ledger, counts[0])

    def _bare(self) -> float:
        self._step("the app without a ledger")
        told = self._bare_load.call(HttpLoad.closed, self._bare_url, CONNECTIONS, self._options.seconds)
        if told.others:
            self.wrong.append(f"the app without a ledger answered {told.others}")
        return told.rate

    def _ledger(self) -> float:
        self._step("the ledger alone, 32 a commit")
        return self._disk.call(Disk.store, self._options.seconds, BATCH).rate

    def paced(self) -> list[Figure]:
        """Target 5."""
        loads = Loads()
        found = [self._stretch() for _ in range(min(self._options.rounds, PACED_ROUNDS_MAX))]
        late = max(told.late for told, _, _ in found)
        batch = statistics.median(counts.accepts / counts.bearing for _, counts, _ in found)
        note = (
            f"{self._most / 2:.0f} requests/s, {batch:.1f} a commit; the load itself took them up "
            f"{late * 1e3:.1f} ms late (p99, not counted)."
        )
        pairs = [
            (quantile(told.latencies, 0.99) * 1e3, quantile(calls.seconds, 0.99) * 1e3)
            for told, _, calls in found
        ]
        return [loads.figure("5", pairs, note)]

    def _stretch(self) -> tuple[Told, Counts, Calls]:
        seconds = PACED_FACTOR * self._options.seconds
        self._step("accepts at half the most")
        told, counts = self.ours.paced(seconds, self._most / 2)
        self._step("the ledger's commits at that rate")
        calls = self._disk.call(
            Disk.paced, seconds, counts.bearing / seconds, counts.accepts / counts.bearing
        )
        return told, counts, calls


def trace(directory: Path, environ: Mapping[str, str] | None = None) -> tuple[list[str], str]:
    """Record a server under strace; return complaints about its answers, and what was seen."""
    record = directory / "record"
    server = straced(
        directory / "traced", record, flushes.RECORDED, ledger_only=False, environ=environ, **SETTINGS
    )
    with Worker(partial(HttpLoad, TRACED_PREFIX)) as load, server:
        server.wait_ready("ingestion_ready")
        told = load.call(HttpLoad.closed, server.url, CONNECTIONS, TRACED_SECONDS)
        server.kill()
    names = [operation_id(TRACED_PREFIX, number) for number in told.accepted]
    calls = calls_in(record)
    found = flushes.complaints(calls, names, TRACED_PREFIX)
    if told.others:
        found.append(f"under strace, POST was answered {told.others}")
    seen = flushes.bearing(calls, TRACED_PREFIX) / len(names)
    note = (
        f"in a record of system calls, {len(names) - len(found)} of {len(names)} answers with 202 came after "
        f"a flush that covers them (there, slowed down by strace, {seen:.2f} such flushes for each)."
    )
    return found, note
