"""Kill a process, kill its recovery, kill the recovery of that, then recover. A program, so that it may fork.

``python -m tests.crash.recovery_kills WORKLOAD DIRECTORY SEED STATES FIRST SECOND [MUTANT]`` prints a
``Verdict`` as JSON: for STATES stores that a kill has left, FIRST kills of their recovery each, and SECOND
kills of the recovery of each of those. A kill lies before a write of SQLite or around a statement.
"""

import contextlib
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import apsw
import msgspec

from muniment.adapters.sqlite import check
from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader, SqliteStore
from muniment.core import replay
from muniment.core.tables import TABLES
from muniment.errors import MunimentError
from muniment.model import command
from muniment.ports.ledger import Reads
from tests.crash.kill_points import opened, saved_labels
from tests.crash.mutants import Patches, acknowledge_before_commit
from tests.crash.workloads import WORKLOADS, Driver, Workload
from tests.support import truth
from tests.support.crashpoints import Fuse, Point, Tell, in_child, points, store_with
from tests.support.stores import state_digest
from tests.support.truth import Fact
from tests.support.writecalls import WriteCalls

PHASES: Final = ("open", "work", "close")
LATER_WEIGHTS: Final = (5, 1)
"""Closing is a checkpoint and no more."""
VIOLATIONS_MAX: Final = 100


class BeforeWrite(msgspec.Struct, frozen=True):
    """Before the n-th call of a process that changes a file."""

    phase: str
    number: int


class AtStatement(msgspec.Struct, frozen=True):
    """Before, inside or after a transaction."""

    phase: str
    point: Point


Place = BeforeWrite | AtStatement


class Verdict(msgspec.Struct):
    """What was tried, what really happened, and what was wrong afterwards."""

    cases: int = 0
    """Stores that two killed recoveries have left."""
    kills: dict[str, int] = {}
    """Recoveries that really ended by SIGKILL, by depth, phase and kind of place."""
    facts: int = 0
    saved_parts: int = 0
    violations: list[str] = []


class Left(msgspec.Struct, frozen=True):
    """A store that a killed process has left, and everything that was acknowledged until then."""

    path: Path
    facts: tuple[Fact, ...] = ()
    story: tuple[Place, ...] = ()
    """Where each life so far has ended."""


class Proof:
    """One workload in one directory."""

    def __init__(self, workload: Workload, directory: Path, seed: str) -> None:
        self._workload = workload
        self._directory = directory
        self._dice = random.Random(seed)
        self._calls = WriteCalls()
        self._made = 0
        self.verdict = Verdict()

    def judge(self, states: int, first: int, second: int) -> Verdict:
        """Try so many."""
        clean, fresh = self._undisturbed()
        nothing = Left(self._new())
        for number in range(states):
            # The first dies while its store is made, so that recovery has migrations to run.
            phase = "open" if number == 0 else "work"
            for state in self._killed(nothing, fresh, [phase], plays=True):
                for once in self._killed_recoveries(state, first, depth=1):
                    for twice in self._killed_recoveries(once, second, depth=2):
                        self.verdict.cases += 1
                        self._complain(twice, self._recovered(twice, clean))
                    shutil.rmtree(once.path)
                shutil.rmtree(state.path)
        return self.verdict

    def _undisturbed(self) -> tuple[str, list[Place]]:
        path = self._new()
        places = self._live(path, plays=True)
        report = check.check(path)
        assert report.findings == ()
        shutil.rmtree(path)
        return report.outcome_digest, places

    # Lives

    def _live(
        self, path: Path, place: Place | None = None, tell: Tell = lambda fact: None, *, plays: bool
    ) -> list[Place]:
        """Be a process, from opening to closing; return every place at which it might have been killed."""
        fuse = Fuse(place.point if isinstance(place, AtStatement) else None)
        self._calls.counted(place.number if isinstance(place, BeforeWrite) else None)
        ends = []

        def ended() -> None:
            ends.append((self._calls.count, len(fuse.statements)))

        with opened(store_with(fuse), path) as store:
            ended()
            driver = Driver(store, self._workload, tell)
            driver.settle()
            if plays:
                driver.play()
            ended()
        ended()
        self._calls.counted()
        return list(_places(ends, fuse.statements))

    def _killed(
        self, left: Left, places: list[Place], phases: list[str], *, plays: bool = False
    ) -> Iterator[Left]:
        """Live on copies of what is left, each killed at a place in one of the phases."""
        for phase in phases:
            chosen = self._dice.choice([place for place in places if place.phase == phase])
            path = self._copy(left.path)

            def work(tell: Tell, path: Path = path, place: Place = chosen) -> None:
                self._live(path, place, tell, plays=plays)

            ended = in_child(work)
            now = Left(path, (*left.facts, *ended.facts), (*left.story, chosen))
            if ended.signal != signal.SIGKILL:
                self._complain(now, [f"not killed: signal {ended.signal}, status {ended.status}"])
                continue
            yield now

    def _killed_recoveries(self, left: Left, count: int, depth: int) -> Iterator[Left]:
        """Kill the recovery of a store at ``count`` places, half of them while it is opened."""
        path = self._copy(left.path)
        try:
            places = self._live(path, plays=False)
        except (MunimentError, AssertionError) as error:
            self._complain(left, [f"recovery failed: {type(error).__name__}: {error}"])
            return
        finally:
            shutil.rmtree(path)
        later = self._dice.choices(PHASES[1:], LATER_WEIGHTS, k=count // 2)
        phases = [PHASES[0]] * (count - count // 2) + later
        before = _digest(left.path)
        for killed in self._killed(left, places, phases):
            place = killed.story[-1]
            name = f"{depth} {place.phase} {type(place).__name__}"
            self.verdict.kills[name] = self.verdict.kills.get(name, 0) + 1
            if place.phase == "open" and before is not None and _digest(killed.path) != before:
                self._complain(killed, ["a recovery that was killed while opening has changed something"])
            yield killed

    # Afterwards

    def _recovered(self, left: Left, clean: str) -> Iterator[str]:
        path = left.path
        self.verdict.facts += len(left.facts)
        try:
            found = _digest(path)
            with opened(SqliteStore, path) as store:
                yield from store.read(
                    lambda reads: [*truth.missing(left.facts, reads), *truth.problems(reads)]
                )
                once = store.read(state_digest)
                saved = store.read(saved_labels)
            self.verdict.saved_parts += len(saved)
            if found not in {None, once}:
                yield "opening has changed something"
            with opened(SqliteStore, path) as store:
                if store.read(state_digest) != once:
                    yield "opening again has changed something"
                yield from self._to_the_end(store, saved)
                yield from store.read(
                    lambda reads: [*truth.missing(left.facts, reads), *truth.problems(reads)]
                )
        except (MunimentError, AssertionError) as error:
            yield f"recovery failed: {type(error).__name__}: {error}"
            return
        report = check.check(path)
        yield from (f"check: {finding}" for finding in report.findings)
        if report.outcome_digest != clean:
            yield "the outcome differs from that of an undisturbed run"
        shutil.rmtree(path)

    def _to_the_end(self, store: SqliteStore, saved: set[str]) -> Iterator[str]:
        store._connection.execute("PRAGMA synchronous = OFF")  # Nobody is killed from here on.
        driver = Driver(store, self._workload, lambda fact: None)
        driver.settle()
        if again := sorted(saved & driver.executor.embedded.keys()):
            yield f"embedded again: {again}"
        once = store.read(apart_from_generations)
        Driver(store, self._workload, lambda fact: None).settle()
        if store.read(apart_from_generations) != once:
            yield "recovering again has changed something"
        driver.play()
        yield from (f"has not ended: {each}" for each in store.read(truth.open_operations))

    def _complain(self, left: Left, wrong: Iterable[str]) -> None:
        for each in wrong:
            if len(self.verdict.violations) < VIOLATIONS_MAX:
                self.verdict.violations.append(f"{' > '.join(map(str, left.story))}: {each}")

    # Directories

    def _new(self) -> Path:
        self._made += 1
        path = self._directory / str(self._made)
        path.mkdir()
        return path

    def _copy(self, of: Path) -> Path:
        path = self._new()
        shutil.copytree(of, path, dirs_exist_ok=True)
        return path


def _places(ends: list[tuple[int, int]], statements: list[int]) -> Iterator[Place]:
    writes, transactions = 0, 0
    everywhere = points(statements)
    for phase, (last_write, last_transaction) in zip(PHASES, ends, strict=True):
        yield from (BeforeWrite(phase, number) for number in range(writes + 1, last_write + 1))
        yield from (
            AtStatement(phase, point)
            for point in everywhere
            if transactions <= point.transaction < last_transaction
        )
        writes, transactions = last_write, last_transaction


def _digest(path: Path) -> str | None:
    """The state of a store as it lies there; None where no history has begun."""
    copy = path.with_name(f"{path.name}-read")
    shutil.copytree(path, copy)  # Reading makes an index of the log, and rolls back what was begun.
    try:
        if not (copy / LEDGER_FILE).exists():
            return None
        with contextlib.closing(apsw.Connection(str(copy / LEDGER_FILE))) as connection:
            if connection.execute("PRAGMA user_version").fetchall() == [(0,)]:
                return None
        with contextlib.closing(SqliteReader(copy / LEDGER_FILE)) as reader:
            return reader.read(state_digest)
    finally:
        shutil.rmtree(copy)


def apart_from_generations(reads: Reads) -> str:
    """The state without the generations that each coordinator reserves when it begins."""
    return replay.state_digest(
        (table, [row for row in reads.rows(table) if table != "evidence" or row["operation_n"]])
        for table in TABLES
    )


# Mutants: recoveries that are right unless they are interrupted, or repeated


def _after_opening(work: Callable[[SqliteStore], object]) -> Patches:
    def patch(stack: contextlib.ExitStack) -> None:
        migrate = SqliteStore._migrate

        def more(self: SqliteStore, *given: Any) -> None:
            migrate(self, *given)
            work(self)

        stack.enter_context(mock.patch.object(SqliteStore, "_migrate", more))

    return patch


def takes_out_before_it_puts_back(store: SqliteStore) -> None:
    """Vectors are written anew: first the old ones go, then they come back."""
    vectors = store._connection.execute("SELECT * FROM vector").fetchall()
    if vectors:
        store._connection.execute("DELETE FROM vector")
        places = ", ".join("?" * len(vectors[0]))
        store._connection.executemany(f"INSERT INTO vector VALUES ({places})", vectors)


def writes_that_it_was_there(store: SqliteStore) -> None:
    """Each opening leaves a unit in the journal."""
    store.transact([command.ReserveGeneration(now=0)])


MUTANTS: Final[Mapping[str, Patches]] = {
    "acknowledge before commit": acknowledge_before_commit,
    "takes out before it puts back": _after_opening(takes_out_before_it_puts_back),
    "writes that it was there": _after_opening(writes_that_it_was_there),
}


def main(arguments: list[str]) -> None:
    """Print the verdict."""
    workload, directory, seed, *counts = arguments[:6]
    with contextlib.ExitStack() as stack:
        for mutant in arguments[6:]:
            MUTANTS[mutant](stack)
        proof = Proof(WORKLOADS[workload], Path(directory), f"{seed} {workload}")  # Each draws its own.
        print(msgspec.json.encode(proof.judge(*map(int, counts))).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
