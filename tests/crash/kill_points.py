"""Kill a workload at chosen points, recover, and say what is wrong then. A program, so that it may fork.

``python -m tests.crash.kill_points WORKLOAD DIRECTORY SEED COUNT [MUTANT]`` prints a ``Verdict`` as JSON.
A count of 0 takes every point.
"""

import contextlib
import random
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from muniment.adapters.sqlite import check
from muniment.adapters.sqlite.store import SqliteStore
from muniment.errors import MunimentError
from muniment.ports.ledger import Reads
from muniment.stages import ledger
from tests.crash.mutants import MUTANTS
from tests.crash.workloads import WORKLOADS, Driver, Workload
from tests.support import truth
from tests.support.crashpoints import Fuse, Place, Point, Tell, in_child, points, store_with
from tests.support.truth import Fact

STORE: Final = "store"
VIOLATIONS_MAX: Final = 500


class Verdict(msgspec.Struct):
    """What was tried, what really happened, and what was wrong afterwards."""

    transactions: int
    points: int
    kills: dict[str, int]
    """Children that really ended by SIGKILL, by place."""
    facts: int = 0
    """Acknowledged facts that were looked for after a kill."""
    saved_parts: int = 0
    """Parts that were indexed when a child was killed."""
    faults: int = 0
    """Planned faults of the executor that happened in recovery."""
    violations: list[str] = []


class Proof:
    """One workload in one directory, with or without a mutant."""

    def __init__(self, workload: Workload, directory: Path, mutant: str | None) -> None:
        self._workload = workload
        self._directory = directory
        self._mutant = mutant

    def judge(self, seed: int, count: int) -> Verdict:
        """Kill at ``count`` points, chosen by ``seed``; all of them for 0."""
        statements, clean = self._undisturbed()
        chosen = sampled(points(statements), seed, count)
        verdict = Verdict(len(statements), len(chosen), dict.fromkeys(Place, 0))
        with self._mutated():
            for point in chosen:
                for wrong in self._after_kill(point, clean, verdict):
                    if len(verdict.violations) < VIOLATIONS_MAX:
                        verdict.violations.append(f"{point}: {wrong}")
        return verdict

    @contextlib.contextmanager
    def _mutated(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._mutant is not None:
                MUTANTS[self._mutant](stack)
            yield

    def _undisturbed(self) -> tuple[list[int], str]:
        """Statements of each transaction of a run that nobody disturbs, and its outcome."""
        fuse = Fuse(None)
        with self._fresh() as path, opened(store_with(fuse), path) as store:
            Driver(store, self._workload, lambda fact: None).play()
            assert store.read(truth.open_operations) == []
            return fuse.statements, store.read(truth.outcome_digest)

    def _after_kill(self, point: Point, clean: str, verdict: Verdict) -> Iterator[str]:
        with self._fresh() as path:

            def work(tell: Tell) -> None:
                with opened(store_with(Fuse(point)), path) as store:
                    Driver(store, self._workload, tell).play()

            ended = in_child(work)
            if ended.signal != signal.SIGKILL:
                yield f"the child was not killed: signal {ended.signal}, status {ended.status}"
                return
            verdict.kills[point.place] += 1
            verdict.facts += len(ended.facts)
            try:
                yield from self._recovered(path, ended.facts, clean, verdict)
            except (MunimentError, AssertionError) as error:
                yield f"recovery failed: {type(error).__name__}: {error}"

    def _recovered(self, path: Path, facts: Iterable[Fact], clean: str, verdict: Verdict) -> Iterator[str]:
        with opened(SqliteStore, path) as store:
            # Nobody is killed from here on, so nothing is shown by waiting for the disk.
            store._connection.execute("PRAGMA synchronous = OFF")
            yield from store.read(lambda reads: [*truth.missing(facts, reads), *truth.problems(reads)])
            saved = store.read(saved_labels)
            verdict.saved_parts += len(saved)
            driver = Driver(store, self._workload, lambda fact: None)
            driver.settle()
            driver.play()
            verdict.faults += driver.executor.faults
            yield from store.read(lambda reads: [*truth.missing(facts, reads), *truth.problems(reads)])
            yield from (f"has not ended: {each}" for each in store.read(truth.open_operations))
            if again := sorted(saved & driver.executor.embedded.keys()):
                yield f"embedded again: {again}"
        report = check.check(path)
        yield from (f"check: {finding}" for finding in report.findings)
        if report.outcome_digest != clean:
            yield "the outcome differs from that of an undisturbed run"

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[Path]:
        path = self._directory / STORE
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)


@contextlib.contextmanager
def opened(kind: type[SqliteStore], path: Path) -> Iterator[SqliteStore]:
    """Open, or create, a store of the workload."""
    store = kind.open(
        path,
        ledger.handle,
        lambda rows: ledger.begin(rows, lineage="00", now=0),
        incarnation="crash test",
    )
    try:
        yield store
    finally:
        store.close()


def saved_labels(reads: Reads) -> set[str]:
    """Label of each part that is indexed, as the execute stage names it."""
    numbers = {row["id"]: row["n"] for row in reads.rows("operation")}
    return {f"{numbers[name]}:{index}" for name, index in truth.indexed(reads)}


def sampled(everywhere: list[Point], seed: int, count: int) -> list[Point]:
    """Every point around a transaction, and as many of those inside as there is room for."""
    if count in {0, len(everywhere)}:
        return everywhere
    around = [point for point in everywhere if point.place is not Place.INSIDE]
    inside = [point for point in everywhere if point.place is Place.INSIDE]
    chooser = random.Random(seed)
    if count <= len(around):
        return sorted(chooser.sample(everywhere, count))
    return sorted([*around, *chooser.sample(inside, min(count - len(around), len(inside)))])


def main(arguments: list[str]) -> None:
    """Print the verdict."""
    workload, directory, seed, count, *mutant = arguments
    proof = Proof(WORKLOADS[workload], Path(directory), mutant[0] if mutant else None)
    print(msgspec.json.encode(proof.judge(int(seed), int(count))).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
