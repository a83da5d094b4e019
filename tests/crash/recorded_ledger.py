"""A ledger whose system calls are recorded: three processes, of which two end without a word. A program.

``python -m tests.crash.recorded_ledger DIRECTORY TOLD [MUTANT]`` runs the real store and the real stages,
with a checkpoint after every few commits. Each acknowledgement is a line that is written to the file TOLD
when ``transact`` has returned; so the recording has acknowledgements, writes and flushes in one order.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import apsw
import msgspec

from muniment.adapters.sqlite import store as store_module
from muniment.adapters.sqlite.connection import open_writer
from muniment.adapters.sqlite.store import SqliteStore
from muniment.model.command import Command
from muniment.ports.ledger import Reply
from muniment.stages import ledger
from tests.crash.mutants import acknowledge_before_commit
from tests.crash.workloads import EXITS, SHORT, TASKS, Driver, Submit, Workload
from tests.support.truth import Fact


class Session(msgspec.Struct, frozen=True):
    """What one process does, and how many pages the log may have before it is copied back."""

    number: int
    workload: Workload
    wal_pages_max: int


NEVER: Final = 100_000
SESSIONS: Final = (Session(1, SHORT, NEVER), Session(2, TASKS, 40), Session(3, EXITS, 40))
WHOLE: Final = Workload(
    tuple(step for session in SESSIONS for step in session.workload.steps), faults=EXITS.faults
)
SENT: Final = frozenset(
    sent.id for step in WHOLE.steps if isinstance(step, Submit) for sent in step.submissions
)


class Step(msgspec.Struct, frozen=True, tag=True):
    """Not an acknowledgement: what the process does from here on."""

    name: str


Line = Fact | Step


class CheckpointingDriver(Driver):
    """Checkpoints as the writer thread does: after a commit was answered, once the log has grown."""

    def __init__(self, store: SqliteStore, session: Session, tell: Callable[[Fact], None]) -> None:
        self._wal_pages_max = session.wal_pages_max
        super().__init__(store, session.workload, tell)

    def transact(self, commands: Sequence[Command]) -> list[Reply]:
        replies = super().transact(commands)
        self._store.checkpoint(self._wal_pages_max)
        return replies


def work(directory: Path, session: Session, tell: Callable[[Line], None]) -> SqliteStore:
    """Open the store, which recovers it, and do the work of a session."""
    tell(Step("open"))
    store = SqliteStore.open(
        directory,
        ledger.handle,
        lambda rows: ledger.begin(rows, lineage="00", now=0),
        incarnation=f"session {session.number}",
    )
    tell(Step("work"))
    CheckpointingDriver(store, session, tell).play()
    return store


def run(directory: Path, told: Path) -> None:
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(line: Line) -> None:
        os.write(file, msgspec.json.encode(line) + b"\n")

    for session in SESSIONS[:-1]:
        pid = os.fork()
        if pid == 0:
            _left = work(directory, session, tell)
            os._exit(0)  # As if it was killed: the log stays.
        assert os.waitpid(pid, 0)[1] == 0
    store = work(directory, SESSIONS[-1], tell)
    tell(Step("close"))
    store.close()


# Mutants: what the images must show


def _replaced(name: str, value: object) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(store_module, name, value)


def normal(stack: contextlib.ExitStack) -> None:
    """Commits are written and not flushed."""

    def careless(*given: Any) -> apsw.Connection:
        connection = open_writer(*given)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    stack.enter_context(_replaced("open_writer", careless))


def checkpoint_without_flush(stack: contextlib.ExitStack) -> None:
    """The log is used again before the database that it was copied to has been flushed."""
    checkpoint = SqliteStore._checkpoint

    def careless(self: SqliteStore, *given: Any) -> None:
        self._connection.execute("PRAGMA synchronous = OFF")
        try:
            checkpoint(self, *given)
        finally:
            self._connection.execute("PRAGMA synchronous = FULL")

    stack.enter_context(mock.patch.object(SqliteStore, "_checkpoint", careless))


MUTANTS: Final[Mapping[str, Callable[[contextlib.ExitStack], None]]] = {
    "NORMAL": normal,
    "checkpoint without flush": checkpoint_without_flush,
    "acknowledge before commit": acknowledge_before_commit,
}


if __name__ == "__main__":
    with contextlib.ExitStack() as patches:
        for mutant in sys.argv[3:]:
            MUTANTS[mutant](patches)
        run(Path(sys.argv[1]), Path(sys.argv[2]))
