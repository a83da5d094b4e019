"""Ledger stores for tests: both backends, one way to drive them, and ``checked`` for the end of a test."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from muniment.adapters.in_memory import InMemoryStore
from muniment.adapters.sqlite.check import Report, check
from muniment.adapters.sqlite.store import SqliteStore
from muniment.core import receipts, replay
from muniment.core.tables import TABLES, Row
from muniment.model import command
from muniment.model.command import Command
from muniment.model.operation import Event, Receipt, State
from muniment.ports.ledger import Handle, Reads, Reply, Rows, SealedUnit
from muniment.stages import ledger
from tests.support import operations
from tests.support.operations import ACCOUNT, NOW

T = TypeVar("T")
LINEAGE: Final = "5eed" * 8
PAGE: Final = 1000


class Store(Protocol):
    """What both backends have."""

    def transact(self, commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]: ...
    def read(self, query: Callable[[Reads], T]) -> T: ...
    def close(self) -> None: ...


def begin(rows: Rows) -> None:
    """Begin the same history every time."""
    ledger.begin(rows, lineage=LINEAGE, now=NOW)


def in_memory(handle: Handle = ledger.handle) -> InMemoryStore:
    """A new store in memory."""
    return InMemoryStore(handle, begin, incarnation="test")


def sqlite(directory: Path, handle: Handle = ledger.handle) -> SqliteStore:
    """Open or create the store of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return SqliteStore.open(directory, handle, begin, incarnation="test")


def checked(directory: Path) -> Report:
    """Assert that nothing is wrong with a data directory (ruling 12); return what was found in it."""
    report = check(directory)
    assert report.findings == (), report.findings
    return report


def state_digest(reads: Reads) -> str:
    """The digest of all attested columns."""
    return replay.state_digest((table, reads.rows(table)) for table in TABLES)


def units(reads: Reads) -> list[Any]:
    """The decoded journal."""
    found, after = [], 0
    while page := reads.units(after, PAGE):
        found += [replay.decode(row.data) for row in page]
        after = page[-1].position
    return found


def journal_is_whole(reads: Reads) -> None:
    """Assert that positions, digests and chain follow, and that tables and fold are one (rulings 12, 13)."""
    chain, after = replay.CHAIN_START, 0
    while page := reads.units(after, PAGE):
        for row in page:
            digest = replay.digest(row.data)
            chain = replay.link(chain, digest)
            after += 1
            assert (row.position, row.digest, row.chain) == (after, digest, chain)
    assert reads.head() == (after, chain)
    folded = replay.fold(units(reads))
    assert state_digest(reads) == replay.state_digest(
        (table, rows.values()) for table, rows in folded.rows.items()
    )


class Driver:
    """Commands to one store; after every batch, failed ones included, journal, fold and tables agree."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.accepted: dict[int, command.Accept] = {}

    def transact(self, *commands: Command) -> list[Reply]:
        """One transaction."""
        try:
            replies, sealed = self.store.transact(commands)
        finally:
            self.store.read(journal_is_whole)
        written = self.store.read(lambda reads: reads.units(self._before(reads, sealed), PAGE))
        assert [replay.encode(each.unit) for each in sealed] == [row.data for row in written]
        assert [each.position for each in sealed] == [row.position for row in written]
        return replies

    @staticmethod
    def _before(reads: Reads, sealed: Sequence[SealedUnit]) -> int:
        return sealed[0].position - 1 if sealed else reads.head()[0]

    def write(self, asked: Command) -> Any:
        """One command in its own transaction; raises the error that is its own."""
        [reply] = self.transact(asked)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def accept(self, asked: command.Accept) -> int:
        """Admit a new operation; return its number."""
        admitted: command.Admitted = self.write(asked)
        assert admitted.created
        n = self.operation(asked.operation_id)["n"]
        self.accepted[n] = asked
        return int(n)

    def advance(self, n: int, now: int = NOW) -> State:
        """Validate an operation."""
        return State(self.write(command.Advance(n=n, now=now)).state)

    def apply(self, n: int, now: int = NOW) -> State:
        """Carry a task operation to its end."""
        return State(self.write(command.Apply(n=n, now=now)).state)

    def plan(self, n: int, **how: Any) -> int | None:
        """Persist a plan."""
        found: int | None = self.write(operations.plan(n, self.accepted[n], **how))
        return found

    def vectors(self, n: int, plan_n: int | None, indexes: Sequence[int], **how: Any) -> State:
        """Save vectors."""
        assert plan_n is not None
        return State(self.write(operations.vectors(n, plan_n, indexes, **how)).state)

    def commit(self, n: int, now: int = NOW) -> State:
        """Commit a memory."""
        return State(self.write(command.CommitMemory(n=n, now=now)).state)

    def remember(self, asked: command.Accept, *, parts: int = 1, now: int = NOW) -> int:
        """Take a memory without dependencies all the way."""
        n = self.accept(asked)
        self.advance(n, now)
        self.finish(n, parts=parts, now=now)
        return n

    def finish(self, n: int, *, parts: int = 1, now: int = NOW) -> None:
        """Take a validated memory to its end."""
        plan_n = self.plan(n, parts=parts, now=now)
        self.vectors(n, plan_n, range(parts), now=now)
        assert self.commit(n, now) is State.COMMITTED

    # What callers see

    def head(self) -> int:
        """The last position of the journal."""
        return self.store.read(lambda reads: reads.head()[0])

    def rows(self, table: str) -> list[Row]:
        """All rows of a table."""
        return self.store.read(lambda reads: list(reads.rows(table)))

    def operation(self, operation_id: str) -> Row:
        """The row of an operation."""
        row = self.store.read(lambda reads: reads.find_operation(ACCOUNT, operation_id))
        assert row is not None, operation_id
        return row

    def receipt(self, operation_id: str) -> Receipt:
        """The receipt of an operation."""
        row = self.operation(operation_id)
        return receipts.receipt(row, self.store.read(lambda reads: reads.dependencies(row["n"])))

    def events(self, operation_id: str) -> list[Event]:
        """The events of an operation."""
        n = self.operation(operation_id)["n"]
        found = self.store.read(lambda reads: reads.events(n, 0, PAGE))
        return [receipts.event(operation_id, row) for row in found]

    def walk(self, operation_id: str) -> list[State]:
        """The states that an operation went through."""
        return [event.to_state for event in self.events(operation_id)]

    def evidence(self, n: int) -> list[tuple[int, str, int]]:
        """Sequence, kind and generation of what the executor did for an operation; 0 is the store."""
        found = self.store.read(lambda reads: reads.evidence(n))
        return [(row["sequence"], row["kind"], row["generation"]) for row in found]
