"""The ledger port in memory, ``core.replay`` behind it: the reference for the contract suite.

Nothing is durable here. A copy of the tables stands in for a transaction, so that a failed batch leaves
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from muniment.core import replay
from muniment.core.tables import Row
from muniment.model.command import Command
from muniment.model.journal import AnyUnit
from muniment.model.operation import EXIT_KINDS, TERMINAL, State
from muniment.ports.ledger import Handle, HeldRows, JournalRow, Reads, Reply, SealedUnit, attempt

T = TypeVar("T")


class InMemoryRows:
    """Reads and appends on ``core.replay.Tables``."""

    def __init__(self) -> None:
        self.tables = replay.Tables()
        self.journal: list[JournalRow] = []
        self.values: dict[str, str] = {}
        self.sealed: list[SealedUnit] = []
        self._next: dict[str, int] = {}

    def _all(self, table: str, /, **wanted: Any) -> list[Row]:
        rows = self.tables.rows[table]
        return [
            dict(rows[key])
            for key in sorted(rows)
            if all(rows[key][name] == value for name, value in wanted.items())
        ]

    def _get(self, table: str, *key: Any) -> Row | None:
        row = self.tables.rows[table].get(key)
        return None if row is None else dict(row)

    def _first(self, table: str, /, **wanted: Any) -> Row | None:
        found = self._all(table, **wanted)
        return found[0] if found else None

    def meta(self, key: str) -> str | None:
        return self.values.get(key)

    def set_meta(self, key: str, value: str) -> None:
        """Write a value of the meta table."""
        self.values[key] = value

    def head(self) -> tuple[int, bytes]:
        return (
            (self.journal[-1].position, self.journal[-1].chain) if self.journal else (0, replay.CHAIN_START)
        )

    def units(self, after: int, limit: int) -> list[JournalRow]:
        return self.journal[after : after + limit]

    def rows(self, table: str) -> Iterator[Row]:
        return iter(self._all(table))

    def find_account(self, key: str) -> Row | None:
        return self._first("account", key=key)

    def account(self, n: int) -> Row | None:
        return self._get("account", n)

    def operation(self, n: int) -> Row | None:
        return self._get("operation", n)

    def find_operation(self, account_n: int, operation_id: str) -> Row | None:
        return self._first("operation", account_n=account_n, id=operation_id)

    def operations(
        self, account_n: int, *, state: str | None, kind: str | None, after: int, limit: int
    ) -> list[Row]:
        wanted: Row = {"account_n": account_n}
        wanted |= {} if state is None else {"state": state}
        wanted |= {} if kind is None else {"kind": kind}
        return [row for row in self._all("operation", **wanted) if row["n"] > after][:limit]

    def unfinished(self) -> list[Row]:
        rows = [row for row in self._all("operation") if State(row["state"]) not in TERMINAL]
        return sorted(rows, key=lambda row: row["id"].encode())

    def unsettled_dependents(self, account_n: int, operation_id: str) -> list[int]:
        open_ones = self._all("dependency", account_n=account_n, depends_on=operation_id, met=0)
        numbers = sorted({row["operation_n"] for row in open_ones})
        return [n for n in numbers if self.tables.rows["operation"][(n,)]["state"] == State.BLOCKED]

    def has_dependents(self, account_n: int, operation_id: str) -> bool:
        return self._first("dependency", account_n=account_n, depends_on=operation_id) is not None

    def dependencies(self, operation_n: int) -> list[Row]:
        return self._all("dependency", operation_n=operation_n)

    def events(self, operation_n: int, after: int, limit: int) -> list[Row]:
        return [row for row in self._all("event", operation_n=operation_n) if row["sequence"] > after][:limit]

    def evidence(self, operation_n: int, after: int = 0, limit: int | None = None) -> list[Row]:
        found = self._all("evidence", operation_n=operation_n)
        return [row for row in found if row["sequence"] > after][:limit]

    def last_evidence(self, operation_n: int) -> Row | None:
        found = self.evidence(operation_n)
        return found[-1] if found else None

    def has_seen_end(self, operation_n: int, generation: int) -> bool:
        found = self._all("evidence", operation_n=operation_n, generation=generation)
        return any(row["kind"] in EXIT_KINDS for row in found)

    def last_generation(self) -> int:
        return max((row["generation"] for row in self.evidence(0)), default=0)

    def payload(self, object_n: int) -> Row | None:
        return self._get("payload", object_n)

    def attribute(self, object_n: int) -> Row | None:
        return self._get("attribute", object_n)

    def model(self, n: int) -> Row | None:
        return self._get("model", n)

    def find_model(self, digest: str) -> Row | None:
        return self._first("model", digest=digest)

    def active_plan(self, object_n: int) -> Row | None:
        return self._first("plan", object_n=object_n, active=1)

    def parts(self, plan_n: int) -> list[Row]:
        return self._all("part", plan_n=plan_n)

    def part(self, plan_n: int, part_index: int) -> Row | None:
        return self._get("part", plan_n, part_index)

    def missing_parts(self, plan_n: int, after: int, limit: int) -> list[Row]:
        planned = self._all("part", plan_n=plan_n, embedding_state="planned")
        return [row for row in planned if row["part_index"] > after][:limit]

    def vectors(self, plan_n: int) -> list[Row]:
        return self._all("vector", plan_n=plan_n)

    def find_memory(self, key: str) -> Row | None:
        return self._first("memory", key=key)

    def memory(self, object_n: int) -> Row | None:
        return self._get("memory", object_n)

    def memories(self, after: int, limit: int) -> list[Row]:
        return [row for row in self._all("memory") if row["object_n"] > after][:limit]

    def streams(self, account_n: int, name: str) -> list[Row]:
        return self._all("stream", account_n=account_n, name=name)

    def stream(self, object_n: int) -> Row | None:
        return self._get("stream", object_n)

    def steps(self, stream_n: int) -> list[Row]:
        return sorted(self._all("step", stream_n=stream_n), key=lambda row: (row["ordinal"], row["object_n"]))

    def find_steps(self, account_n: int, idempotency_key: str) -> list[Row]:
        found = self._all("step", idempotency_key=idempotency_key)
        return [
            row for row in found if self.tables.rows["stream"][(row["stream_n"],)]["account_n"] == account_n
        ]

    def next_number(self, table: str) -> int:
        if table not in self._next:
            self._next[table] = max((key[0] for key in self.tables.rows[table]), default=0)
        self._next[table] += 1
        return self._next[table]

    def append(self, unit: AnyUnit, held: HeldRows) -> None:
        for change in replay.changes(unit):
            self.tables.apply(change, held)
        data = replay.encode(unit)
        position, chain = self.head()
        digest = replay.digest(data)
        self.journal.append(JournalRow(position + 1, data, digest, replay.link(chain, digest)))
        self.sealed.append(SealedUnit(position=position + 1, unit=unit, held=held))

    def probe(self, now: int) -> None:
        self.values["probe"] = str(now)

    def copied(self) -> "InMemoryRows":
        """The same state, which later appends do not touch: a row is replaced by them and never changed."""
        other = InMemoryRows()
        other.tables.rows = {name: dict(rows) for name, rows in self.tables.rows.items()}
        other.tables.waiting = {waited_for: list(keys) for waited_for, keys in self.tables.waiting.items()}
        other.journal, other.sealed = list(self.journal), list(self.sealed)
        other.values, other._next = dict(self.values), dict(self._next)
        return other


class InMemoryStore:
    """The same synchronous interface as ``SqliteStore``."""

    def __init__(self, handle: Handle, begin: Callable[[InMemoryRows], None], *, incarnation: str) -> None:
        self._handle = handle
        self._rows = InMemoryRows()
        begin(self._rows)
        self._rows.set_meta("incarnation", incarnation)
        self._rows.sealed = []

    def transact(self, commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]:
        """Handle all commands or, where one breaks the batch, none."""
        before = self._rows.copied()
        replies: list[Reply] = []
        try:
            replies.extend(attempt(self._handle, self._rows, command, self._appended) for command in commands)
        except BaseException:
            self._rows = before
            raise
        sealed, self._rows.sealed = self._rows.sealed, []
        return replies, sealed

    def _appended(self) -> int:
        return len(self._rows.sealed)

    def read(self, query: Callable[[Reads], T]) -> T:
        """Read the current state."""
        return query(self._rows)

    def close(self) -> None:
        """Nothing is open."""
