"""The ledger port: rows to read, units to append, commands to submit.

Two backends stand behind it (``adapters/sqlite``, ``adapters/in_memory``); ``tests/contract`` runs one
suite on both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from muniment.core.tables import Key, Row
from muniment.errors import MunimentError, Unavailable
from muniment.model.command import Command
from muniment.model.journal import AnyUnit

T = TypeVar("T")
HeldRows = Mapping[tuple[str, Key], Row]


class SealedUnit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A unit at its place in the journal, with the held values that were written beside it."""

    position: int
    unit: AnyUnit
    held: HeldRows


class JournalRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A journal row as stored."""

    position: int
    data: bytes
    digest: bytes
    chain: bytes


class Reads(Protocol):
    """Reads of one consistent state. Rows are plain dicts with the columns of ``core.tables``."""

    def meta(self, key: str) -> str | None:
        """A value of the meta table: ``format`` or ``incarnation``. The genesis unit holds the lineage."""
        ...

    def head(self) -> tuple[int, bytes]:
        """Position and chain link of the last unit; (0, zeros) before the first."""
        ...

    def units(self, after: int, limit: int) -> list[JournalRow]:
        """Journal rows in order of position."""
        ...

    def rows(self, table: str) -> Iterable[Row]:
        """Every row of a table, in key order, for digests and ``check``."""
        ...

    def find_account(self, key: str) -> Row | None:
        """An account by its key."""
        ...

    def account(self, n: int) -> Row | None:
        """An account by number."""
        ...

    def operation(self, n: int) -> Row | None:
        """An operation by number."""
        ...

    def find_operation(self, account_n: int, operation_id: str) -> Row | None:
        """An operation by its account and ID, compared byte for byte."""
        ...

    def operations(
        self, account_n: int, *, state: str | None, kind: str | None, after: int, limit: int
    ) -> list[Row]:
        """A page in acceptance order, ``n`` greater than ``after``."""
        ...

    def unfinished(self) -> list[Row]:
        """Every operation in no terminal state, in ID order (UTF-8 bytes), as the seed's recovery says."""
        ...

    def unsettled_dependents(self, account_n: int, operation_id: str) -> list[int]:
        """Numbers of the blocked operations that have an open dependency on this ID, ascending."""
        ...

    def has_dependents(self, account_n: int, operation_id: str) -> bool:
        """Whether any stored operation names this ID as a dependency."""
        ...

    def dependencies(self, operation_n: int) -> list[Row]:
        """The dependencies of an operation, in the caller's order."""
        ...

    def events(self, operation_n: int, after: int, limit: int) -> list[Row]:
        """Events with a sequence greater than ``after``, in order."""
        ...

    def evidence(self, operation_n: int, after: int = 0, limit: int | None = None) -> list[Row]:
        """The evidence of an operation, or of the store (0), beyond sequence ``after``, in order."""
        ...

    def last_evidence(self, operation_n: int) -> Row | None:
        """The newest evidence of an operation, or of the store (0)."""
        ...

    def has_seen_end(self, operation_n: int, generation: int) -> bool:
        """Whether the evidence of an operation holds the exit, stall or protocol fault of a generation."""
        ...

    def last_generation(self) -> int:
        """The highest executor generation that was ever reserved; 0 before the first."""
        ...

    def payload(self, object_n: int) -> Row | None:
        """The source bytes of an object."""
        ...

    def attribute(self, object_n: int) -> Row | None:
        """The attributes of an object: canonical JSON of its payload without content."""
        ...

    def model(self, n: int) -> Row | None:
        """A model by number."""
        ...

    def find_model(self, digest: str) -> Row | None:
        """A model by the digest of its identity."""
        ...

    def active_plan(self, object_n: int) -> Row | None:
        """The one active plan of an object."""
        ...

    def parts(self, plan_n: int) -> list[Row]:
        """All parts of a plan, in order."""
        ...

    def part(self, plan_n: int, part_index: int) -> Row | None:
        """One part of a plan."""
        ...

    def missing_parts(self, plan_n: int, after: int, limit: int) -> list[Row]:
        """The next parts of a plan that are not indexed, with an index greater than ``after``, in order."""
        ...

    def vectors(self, plan_n: int) -> list[Row]:
        """All vectors of a plan, in part order."""
        ...

    def find_memory(self, key: str) -> Row | None:
        """A committed memory by its key."""
        ...

    def memory(self, object_n: int) -> Row | None:
        """A committed memory by object number."""
        ...

    def memories(self, after: int, limit: int) -> list[Row]:
        """Committed memories by object number."""
        ...

    def streams(self, account_n: int, name: str) -> list[Row]:
        """All task streams of an account with this name."""
        ...

    def stream(self, object_n: int) -> Row | None:
        """A task stream by object number."""
        ...

    def steps(self, stream_n: int) -> list[Row]:
        """The steps of a stream by ordinal, then by acceptance."""
        ...

    def find_steps(self, account_n: int, idempotency_key: str) -> list[Row]:
        """All steps of an account with this idempotency key."""
        ...


class Rows(Reads, Protocol):
    """Reads inside the one open write transaction, and the only way to write."""

    def next_number(self, table: str) -> int:
        """The next integer key of ``account``, ``model``, ``operation``, ``attribute`` or ``plan``."""
        ...

    def append(self, unit: AnyUnit, held: HeldRows) -> None:
        """Apply the unit's changes with their held values and append it to the journal, chained.

        Raises ``InvariantBroken`` where the tables are not as the unit expects, at the latest before the
        commit; nothing of the batch is kept then.
        """
        ...

    def probe(self, now: int) -> None:
        """Write one row outside the history."""
        ...


Handle = Callable[[Rows, Command], Any]


class Reply(msgspec.Struct, frozen=True):
    """What became of one command of a batch: a value, or the error that is this command's alone."""

    value: Any = None
    error: MunimentError | None = None


def attempt(handle: Handle, rows: Rows, command: Command, appended: Callable[[], int]) -> Reply:
    """Handle one command of a batch, so that an error of its own cannot fail the others.

    What breaks the whole transaction is raised: storage, bugs, and an error after something was appended.
    """
    before = appended()
    try:
        return Reply(handle(rows, command))
    except Unavailable:
        raise
    except MunimentError as error:
        if appended() != before:
            raise
        return Reply(error=error)


class Ledger(Protocol):
    """The durable ledger. Every method may raise LedgerUnavailable, StorageFull or OutcomeUnknown."""

    async def write(self, command: Command) -> Any:
        """Handle one command durably: the reply comes after COMMIT and fsync, never before.

        Raises whatever the handler raised for this command alone; other commands of the batch are not
        touched.
        """
        ...

    async def read(self, query: Callable[[Reads], T]) -> T:
        """Run ``query`` on a consistent state that holds every write answered before this call."""
        ...

    def subscribe(self, listener: Callable[[Sequence[SealedUnit]], None]) -> None:
        """Call ``listener`` on the event loop with each batch of units after its commit, in journal order."""
        ...

    def queued(self) -> int:
        """Commands waiting for the writer."""
        ...
