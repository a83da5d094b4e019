"""The store alone, on one thread: so that the n-th call of a run is the same one each time. A program.

``python -m tests.crash.ledger_alone DIRECTORY`` opens a store, commits, checkpoints and closes, and prints
what became of each step as it knows it. After an unknown outcome it does what the server does: it touches
nothing more.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from muniment.adapters.sqlite.store import SqliteStore
from muniment.core import canonical
from muniment.errors import LedgerUnavailable, OutcomeUnknown, StorageFull
from muniment.model import command
from muniment.model.operation import Kind
from muniment.stages import ledger

COMMITS: Final = 8
WAL_PAGES_MAX: Final = 12
EXIT_FAULT: Final = 1


def name(number: int) -> str:
    return f"alone-{number}"


def accept(number: int) -> command.Accept:
    attributes = canonical.encode({"name": name(number)})
    return command.Accept(
        account=1,
        operation_id=name(number),
        kind=Kind.CREATE_TASK_STREAM,
        payload_hash=canonical.payload_hash({"name": name(number)}),
        dependencies=(),
        invalid=None,
        content=None,
        attributes=attributes,
        content_salt=bytes(16),
        attributes_salt=bytes(16),
        now=number + 1,
    )


def say(step: str, said: str) -> None:
    print(f"{step} {said}", flush=True)


def attempted(step: str, work: Callable[[], object]) -> bool:
    """Do a step and say what it came to; False where nothing more may be touched."""
    try:
        work()
    except OutcomeUnknown:
        say(step, "unknown")
        return False
    except StorageFull:
        say(step, "full")
    except LedgerUnavailable:
        say(step, "unavailable")
    else:
        say(step, "done")
    return True


def opened(directory: Path) -> SqliteStore:
    return SqliteStore.open(
        directory, ledger.handle, lambda rows: ledger.begin(rows, lineage="00", now=0), incarnation="alone"
    )


def run(directory: Path) -> int:
    stores: list[SqliteStore] = []
    if not attempted("open", lambda: stores.append(opened(directory))) or not stores:
        return EXIT_FAULT
    store = stores[0]
    for number in range(COMMITS):
        if not attempted(f"commit:{number}", partial(store.transact, [accept(number)])):
            return ended(store)
        if not attempted(f"checkpoint:{number}", partial(store.checkpoint, WAL_PAGES_MAX)):
            return ended(store)
    attempted("read", partial(store.read, lambda reads: list(reads.rows("event"))))
    return 0 if attempted("close", store.close) else EXIT_FAULT


def ended(store: SqliteStore) -> int:
    """Closing after an unknown outcome lets go and writes nothing."""
    store.close()
    return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
