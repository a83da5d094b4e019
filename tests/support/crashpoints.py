"""A child process that is killed by SIGKILL at a chosen point of a chosen ledger transaction.

The store in the child counts its transactions and, through SQLite's own trace, the statements in each. A
point lies before a transaction, inside it (after its k-th statement) or after its COMMIT and before anybody
hears of it. Whatever the child tells through the pipe was told after ``transact`` had returned.
"""

import os
import secrets
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, NoReturn

import msgspec

from muniment.adapters.sqlite.store import SqliteStore
from tests.support.truth import Fact

CHILD_DONE: Final = 0
CHILD_FAILED: Final = 70
NEVER: Final = -1
SEED_VARIABLE: Final = "MUNIMENT_CRASH_SEED"
ALL_VARIABLE: Final = "MUNIMENT_CRASH_ALL"
SEED_BITS: Final = 32

Tell = Callable[[Fact], None]


def seed() -> int:
    """The seed that chooses a sample: the one that was asked for (``scripts/crash --seed``), or a new one."""
    asked = os.environ.get(SEED_VARIABLE)
    return int(asked) if asked else secrets.randbits(SEED_BITS)


def all_cases() -> bool:
    """Whether every case is to be run, and not a sample (``scripts/crash --all``)."""
    return os.environ.get(ALL_VARIABLE) == "1"


class Place(StrEnum):
    """Where in a transaction a process is killed."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class Point(msgspec.Struct, frozen=True, order=True):
    """A place in the n-th transaction of a process; ``statement`` counts from 1 and is 0 outside of one."""

    transaction: int
    place: Place
    statement: int = 0


class Fuse:
    """Counts, and kills this process when it comes to ``point``."""

    def __init__(self, point: Point | None) -> None:
        self.statements: list[int] = []
        """Statements of each transaction so far."""
        self._point = point
        self._inside = False

    def _burn(self, place: Place, statement: int = 0) -> None:
        if self._point == Point(len(self.statements) - 1, place, statement):
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self) -> None:
        """A transaction is about to begin."""
        self.statements.append(0)
        self._burn(Place.BEFORE)
        self._inside = True

    def statement(self, *_: Any) -> bool:
        """SQLite is about to run a statement: those before it have been run."""
        if self._inside:
            if done := self.statements[-1]:
                self._burn(Place.INSIDE, done)
            self.statements[-1] += 1
        return True

    def committed(self) -> None:
        """COMMIT has returned."""
        self._inside = False
        self._burn(Place.AFTER)

    def rolled_back(self) -> None:
        """There is no transaction any more."""
        self._inside = False


def points(statements: Sequence[int]) -> list[Point]:
    """Every point of a run whose transactions had so many statements."""
    return [
        Point(transaction, place, statement)
        for transaction, count in enumerate(statements)
        for place, statement in (
            (Place.BEFORE, 0),
            *((Place.INSIDE, done) for done in range(1, count)),
            (Place.AFTER, 0),
        )
    ]


def store_with(fuse: Fuse) -> type[SqliteStore]:
    """Return the real store, watched by ``fuse`` from its first transaction on."""

    class FusedStore(SqliteStore):
        @contextmanager
        def _transaction(self) -> Iterator[None]:
            self._connection.exec_trace = fuse.statement
            fuse.begin()
            try:
                with super()._transaction():
                    yield
            except BaseException:
                fuse.rolled_back()
                raise
            fuse.committed()

    return FusedStore


class Ended(msgspec.Struct, frozen=True):
    """How a child ended, and what it had told until then."""

    signal: int
    status: int
    facts: tuple[Fact, ...]


def in_child(work: Callable[[Tell], None]) -> Ended:
    """Run ``work`` in a forked child. The caller must have no other thread and no open connection."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _live(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    return Ended(
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        status=os.WEXITSTATUS(status) if os.WIFEXITED(status) else NEVER,
        facts=tuple(msgspec.json.decode(line, type=Fact) for line in told),
    )


def _live(work: Callable[[Tell], None], writing: int) -> NoReturn:
    try:
        work(lambda fact: _write(writing, fact))
    except BaseException:  # noqa: BLE001 nothing of the child may run on in the code of its parent
        traceback.print_exc()
        os._exit(CHILD_FAILED)
    os._exit(CHILD_DONE)


def _write(writing: int, fact: Fact) -> None:
    os.write(writing, msgspec.json.encode(fact) + b"\n")
