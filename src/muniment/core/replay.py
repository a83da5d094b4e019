"""Units to rows: one ``changes(unit)`` serves the tables and the fold (rulings 12 and 13).

``changes`` is total over the unit types and reads nothing, so the tables that a live server wrote and the
tables folded from its journal must be equal; ``state_digest`` compares them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import orjson

from muniment.core import canonical
from muniment.core.tables import TABLES, Key, Row
from muniment.errors import Corrupt, InvariantBroken, Malformed
from muniment.model import journal
from muniment.model.operation import TERMINAL, State

CHAIN_START: Final = bytes(32)
_decoder: Final[msgspec.json.Decoder[journal.AnyUnit]] = msgspec.json.Decoder(journal.AnyUnit)


class Insert(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A new row, without its held columns."""

    table: str
    row: Row


class Update(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New values for the one row that has this key and still has the expected values."""

    table: str
    key: Key
    expected: Row
    values: Row


class Meet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What waits for one operation ID of one account waits for it no more.

    What has ended waits for nothing: its dependencies, times and receipt stay as they were at its end.
    """

    account_n: int
    depends_on: str
    at: int


Change = Insert | Update | Meet


def encode(unit: journal.AnyUnit) -> bytes:
    """The unit's bytes: canonical JSON, the same on every machine."""
    return canonical.encode(msgspec.to_builtins(unit))


def decode(data: bytes) -> journal.AnyUnit:
    """Read a unit's bytes; raises ``Corrupt`` for bytes that no version of the vocabulary knows."""
    try:
        canonical.parse(data)  # The decoder alone would take a key twice, and integers of any size.
        unit = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, Malformed) as error:
        raise Corrupt(f"journal unit cannot be read: {error}") from error
    if unit.v != journal.VERSION:
        raise Corrupt(f"journal unit has version {unit.v}, this program knows {journal.VERSION}")
    return unit


def digest(data: bytes) -> bytes:
    """The unit's own digest: SHA-256 of its bytes."""
    return hashlib.sha256(data).digest()


def link(chain: bytes, unit_digest: bytes) -> bytes:
    """The chain after one more unit: SHA-256 over the chain before and the unit's digest."""
    return hashlib.sha256(chain + unit_digest).digest()


def salted(salt: bytes, data: bytes | memoryview) -> str:
    """The name that a journal may give to bytes: nothing about them can be guessed once the salt is gone."""
    return hashlib.sha256(salt + data).hexdigest()


def json_text(value: Any) -> str | None:
    """A JSON value as a column: canonical text, and NULL for null."""
    return None if value is None else canonical.encode(value).decode()


def changes(unit: journal.AnyUnit) -> Iterable[Change]:
    """All row changes of a unit, in the order in which they apply."""
    match unit:
        case journal.Accept():
            return _accept(unit)
        case (
            journal.Advance()
            | journal.Reject()
            | journal.Plan()
            | journal.Parts()
            | journal.Evidence()
            | journal.Commit()
        ):
            return _step(unit)
        case journal.Executor():
            return (_evidence(0, unit.witness, unit.at),)
        case journal.Model():
            return (_model(unit),)
        case journal.Account():
            return (Insert("account", {"n": unit.n, "key": unit.key, "created_us": unit.at}),)
        case journal.Genesis():
            return ()


def _model(unit: journal.Model) -> Insert:
    return Insert(
        "model",
        {"n": unit.n, "digest": unit.digest, "identity": json_text(unit.identity), "created_us": unit.at},
    )


def _evidence(operation_n: int, witness: journal.Witness, at: int) -> Insert:
    return Insert(
        "evidence",
        {
            "operation_n": operation_n,
            "sequence": witness.sequence,
            "kind": witness.kind,
            "generation": witness.generation,
            "message": witness.message,
            "occurred_us": at,
        },
    )


def event_row(operation_n: int, moved: journal.Moved, generation: int, at: int) -> Row:
    """The event row of one transition; live followers render the same row."""
    return {
        "operation_n": operation_n,
        "sequence": moved.sequence,
        "from_state": moved.from_state,
        "to_state": moved.to_state,
        "detail": json_text(moved.detail),
        "executor_generation": generation,
        "occurred_us": at,
    }


def accepted_event(unit: journal.Accept) -> Row:
    """The first event of every operation."""
    return event_row(unit.n, journal.Moved(unit.to.sequence, None, unit.to.state, None), 0, unit.at)


def operation_row(unit: journal.Accept) -> Row:
    """The operation row that an accepted submission begins with; its first receipt shows the same."""
    return {
        "n": unit.n,
        "account_n": unit.account,
        "id": unit.id,
        "kind": unit.kind,
        "payload_hash": unit.payload_hash,
        "object_n": unit.object,
        "state": unit.to.state,
        "progress_seq": unit.to.sequence,
        "result": None,
        "error": None,
        "executor_generation": 0,
        "executor_progress_seq": 0,
        "executor_exit_count": 0,
        "executor_last_exit": None,
        "executor_error": None,
        "created_us": unit.at,
        "updated_us": unit.at,
    }


def dependency_rows(unit: journal.Accept) -> list[Row]:
    """The dependency rows of an accepted submission, in the caller's order."""
    return [
        {
            "operation_n": unit.n,
            "ordinal": ordinal,
            "account_n": unit.account,
            "depends_on": depends_on,
            "met": int(met),
        }
        for ordinal, (depends_on, met) in enumerate(unit.dependencies)
    ]


def _accept(unit: journal.Accept) -> list[Change]:
    attributes = {
        "object_n": unit.object,
        "operation_n": unit.n,
        "byte_count": unit.attributes.byte_count,
        "digest": unit.attributes.digest,
    }
    found: list[Change] = [Insert("operation", operation_row(unit))]
    if unit.dependencies:
        found += [Insert("dependency", row) for row in dependency_rows(unit)]
    found += (Insert("event", accepted_event(unit)), Insert("attribute", attributes))
    if unit.content is not None:
        content = unit.content
        row = {"object_n": unit.object, "byte_count": content.byte_count, "digest": content.digest}
        found.append(Insert("payload", row))
    return found


def step_events(unit: journal.AnyStep) -> Iterator[Row]:
    """The event rows of a step, in order."""
    for moved in unit.events:
        yield event_row(unit.n, moved, unit.executor.generation, unit.at)


def _step(unit: journal.AnyStep) -> Iterator[Change]:
    values: Row = {
        "state": unit.to.state,
        "progress_seq": unit.to.sequence,
        "updated_us": unit.at,
        "executor_generation": unit.executor.generation,
        "executor_progress_seq": unit.executor.progress_seq,
        "executor_exit_count": unit.executor.exit_count,
        "executor_last_exit": unit.executor.last_exit,
        "executor_error": unit.executor.error,
    }
    if isinstance(unit, journal.Reject | journal.Commit):
        values["result"] = json_text(unit.result)
        values["error"] = unit.error if isinstance(unit, journal.Reject) else None
    expected: Row = {"state": unit.was.state, "progress_seq": unit.was.sequence}
    yield Update("operation", (unit.n,), expected, values)
    for row in step_events(unit):
        yield Insert("event", row)
    for witness in unit.evidence:
        yield _evidence(unit.n, witness, unit.at)
    if isinstance(unit, journal.Plan):
        yield from _plan(unit)
    if isinstance(unit, journal.Parts):
        yield from _parts(unit)
    if isinstance(unit, journal.Commit):
        yield from _effect(unit)


def _plan(unit: journal.Plan) -> Iterator[Change]:
    yield Insert(
        "plan",
        {
            "n": unit.plan,
            "object_n": unit.object,
            "model_n": unit.model,
            "profile": unit.profile,
            "token_count": unit.token_count,
            "part_count": len(unit.parts),
            "active": 1,
            "created_us": unit.at,
        },
    )
    for index, part in enumerate(unit.parts):
        yield Insert(
            "part",
            {
                "plan_n": unit.plan,
                "part_index": index,
                "token_start": part.token_start,
                "token_end": part.token_end,
                "byte_start": part.byte_start,
                "byte_end": part.byte_end,
                "digest": part.digest,
                "embedding_state": "planned",
                "generation": 0,
                "updated_us": unit.at,
            },
        )


def _parts(unit: journal.Parts) -> Iterator[Change]:
    for index, vector_digest in unit.vectors:
        yield Update(
            "part",
            (unit.plan, index),
            {"embedding_state": "planned"},
            {"embedding_state": "indexed", "generation": unit.executor.generation, "updated_us": unit.at},
        )
        yield Insert("vector", {"plan_n": unit.plan, "part_index": index, "digest": vector_digest})


def _effect(unit: journal.Commit) -> Iterator[Change]:
    if unit.memory is not None:
        memory = unit.memory
        yield Insert(
            "memory",
            {
                "object_n": memory.object,
                "key": memory.key,
                "operation_n": unit.n,
                "plan_n": memory.plan,
                "space_n": memory.space,
                "visibility": memory.visibility,
                "submitter_n": memory.submitter,
                "role": memory.role,
                "session_seq": memory.session_seq,
                "occurred_us": memory.occurred_at,
                "expires_us": memory.expires_at,
                "recorded_us": unit.at,
            },
        )
    if unit.stream is not None:
        yield Insert(
            "stream",
            {
                "object_n": unit.stream.object,
                "key": unit.stream.key,
                "account_n": unit.account,
                "operation_n": unit.n,
                "status": unit.stream.status,
                "created_us": unit.at,
            },
        )
    if unit.step is not None:
        yield Insert(
            "step",
            {
                "object_n": unit.step.object,
                "key": unit.step.key,
                "operation_n": unit.n,
                "stream_n": unit.step.stream,
                "ordinal": unit.step.ordinal,
                "status": unit.step.status,
                "completed_by": None,
                "created_us": unit.at,
                "completed_us": None,
            },
        )
    if unit.completion is not None:
        yield Update(
            "step",
            (unit.completion.step,),
            {"completed_by": None},
            {"status": "completed", "completed_by": unit.completion.by, "completed_us": unit.at},
        )
    yield Meet(unit.account, unit.id, unit.at)


class Tables:
    """All tables of one history in memory: the fold of a journal, and the store of the in-memory ledger."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Key, Row]] = {name: {} for name in TABLES}
        self.waiting: dict[tuple[int, str], list[Key]] = {}
        """Unmet dependencies by account and ID, so that a commit does not scan."""

    def apply(self, change: Change, held: Mapping[tuple[str, Key], Row] | None = None) -> None:
        """Apply one change; raises ``InvariantBroken`` where it does not fit, as the SQL constraints do."""
        match change:
            case Insert():
                self._insert(change, held or {})
            case Update():
                row = self.rows[change.table].get(change.key)
                if row is None or any(row[name] != value for name, value in change.expected.items()):
                    raise InvariantBroken(f"{change.table} {change.key} is not as the unit expects: {row}")
                self.rows[change.table][change.key] = row | change.values
            case Meet():
                for key in self.waiting.pop((change.account_n, change.depends_on), []):
                    self._meet(key, change.at)

    def _meet(self, key: Key, at: int) -> None:
        operation = self.rows["operation"][(key[0],)]
        if operation["state"] in TERMINAL:
            return
        self.rows["dependency"][key] = self.rows["dependency"][key] | {"met": 1}
        # Times of one operation never decrease, whatever the clock does.
        touched = {"updated_us": max(at, operation["updated_us"])}
        self.rows["operation"][(key[0],)] = operation | touched

    def _insert(self, change: Insert, held: Mapping[tuple[str, Key], Row]) -> None:
        table = TABLES[change.table]
        key = tuple(change.row[name] for name in table.key)
        if key in self.rows[table.name]:
            raise InvariantBroken(f"{table.name} {key} exists already")
        extra = held.get((table.name, key), {})
        self.rows[table.name][key] = dict.fromkeys(table.held) | change.row | extra
        if table.name == "dependency" and not change.row["met"]:
            self.waiting.setdefault((change.row["account_n"], change.row["depends_on"]), []).append(key)


def fold(units: Iterable[journal.AnyUnit]) -> Tables:
    """Rebuild every attested column from the journal alone."""
    tables = Tables()
    for unit in units:
        for change in changes(unit):
            tables.apply(change)
    return tables


def state_digest(tables: Iterable[tuple[str, Iterable[Row]]]) -> str:
    """One digest over all attested columns of a history, whatever order the rows come in (ruling 13).

    ``tables`` gives each table once, with its rows; a column that the journal does not attest is ignored.
    """
    whole = hashlib.sha256()
    for name, rows in sorted(tables):
        table = TABLES[name]
        columns = table.key + table.attested
        lines = sorted(orjson.dumps([row[column] for column in columns]) for row in rows)
        whole.update(f"{name} {len(lines)}\n".encode())
        for line in lines:
            whole.update(line + b"\n")
    return whole.hexdigest()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault must not change about one operation: no time, position, evidence or vector byte in it."""

    account: str
    operation_id: str
    kind: str
    payload_hash: str
    state: State
    result: Any
    error: str | None
    objects: tuple[str, ...]
    source_digest: str | None
    """SHA-256 of the source's bytes, salted by nothing: salts differ between runs."""
    plan_ranges: tuple[tuple[int, int, int, int], ...]
    model_digest: str | None


def outcome_digest(outcomes: Iterable[Outcome]) -> str:
    """One digest over the outcomes of all operations, in ID order (ruling 13)."""
    whole = hashlib.sha256()
    ordered = sorted(outcomes, key=lambda outcome: (outcome.account.encode(), outcome.operation_id.encode()))
    for outcome in ordered:
        whole.update(canonical.encode(msgspec.to_builtins(outcome)) + b"\n")
    return whole.hexdigest()
