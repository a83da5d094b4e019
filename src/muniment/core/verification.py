"""What must hold of every stored history, whatever wrote it (ruling 12). Rows and units in, problems out.

Nothing here trusts what the stages decided: it is the other opinion. Rows have the types of the schema;
that is all that is taken for granted about them.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import msgspec

from muniment.core import canonical, identity, replay
from muniment.core.lifecycle import TRANSITIONS
from muniment.core.tables import TABLES, Key, Row
from muniment.errors import Corrupt, InvariantBroken, Malformed
from muniment.model import journal
from muniment.model.operation import EXIT_KINDS, TERMINAL, Kind, State

JOURNAL: Final = "journal_unit"
STORE: Final = 0
"""The operation number under which store-wide evidence stands."""
SHOWN_CHARS_MAX: Final = 60

_STEPS: Final = frozenset((before, after) for (before, _), after in TRANSITIONS.items() if before != after)
_MEMORY_TEXT: Final = {"owner": "user_id", "agent": "agent_id", "session": "session_id", "speaker": "speaker"}
_STREAM_TEXT: Final = {"name": "name", "owner": "user_id", "agent": "agent_id"}
_STEP_TEXT: Final = {"name": "name", "idempotency_key": "idempotency_key"}


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """One thing that does not hold, and where."""

    table: str
    row: str
    text: str


def named(table: str, row: Row) -> str:
    """How people find a row: its key columns with their values."""
    return ", ".join(f"{column} {row[column]}" for column in TABLES[table].key)


def _shown(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."


# The journal


class Chain:
    """Follows the journal from its first unit, and folds it for as long as it can be believed."""

    def __init__(self) -> None:
        self.position = 0
        self.lineage = ""
        self.folded: replay.Tables | None = replay.Tables()
        """The tables that follow from the journal; None from the first unit on that cannot be folded."""
        self._chain = replay.CHAIN_START

    def follow(self, position: int, data: Any, digest: Any, chain: Any) -> Iterator[Problem]:
        """Check the next unit and fold it. A damaged row may hold anything in place of bytes."""
        if not (isinstance(data, bytes) and isinstance(digest, bytes) and isinstance(chain, bytes)):
            yield Problem(JOURNAL, f"position {position}", "is not made of bytes")
            self.position, self.folded = position, None
            return
        problems: list[str] = []
        if position != self.position + 1:
            problems.append(f"follows position {self.position}")
        actual = replay.digest(data)
        if actual != digest:
            problems.append("has other bytes than its digest says")
        if replay.link(self._chain, actual) != chain:
            problems.append("is not linked to the unit before it")
        self.position, self._chain = position, chain
        unit = self._read(data, problems)
        if unit is not None:
            self._take(unit, position, problems)
        for text in problems:
            yield Problem(JOURNAL, f"position {position}", text)

    def _read(self, data: bytes, problems: list[str]) -> journal.AnyUnit | None:
        try:
            unit = replay.decode(data)
            same = replay.encode(unit) == data
        except (Corrupt, Malformed) as error:
            problems.append(str(error))
            self.folded = None
            return None
        if not same:
            problems.append("is not in canonical form")
        return unit

    def _take(self, unit: journal.AnyUnit, position: int, problems: list[str]) -> None:
        if isinstance(unit, journal.Genesis):
            self.lineage = self.lineage or unit.lineage
        if isinstance(unit, journal.Genesis) != (position == 1):
            problems.append("a history begins with one genesis unit")
        if self.folded is None:
            return
        try:
            for change in replay.changes(unit):
                self.folded.apply(change)
        except InvariantBroken as error:
            problems.append(f"does not follow from the units before it: {error}")
            self.folded = None


def difference(table: str, row: Row, folded: MutableMapping[Key, Row]) -> Iterator[Problem]:
    """Compare the attested columns of a stored row with the folded one, which is taken out of ``folded``."""
    expected = folded.pop(tuple(row[column] for column in TABLES[table].key), None)
    if expected is None:
        yield Problem(table, named(table, row), "is not in the journal")
        return
    for column in TABLES[table].attested:
        if row[column] != expected[column]:
            text = f"{column} is {_shown(row[column])}, the journal says {_shown(expected[column])}"
            yield Problem(table, named(table, row), text)


def missing(table: str, folded: Mapping[Key, Row]) -> Iterator[Problem]:
    """Name the folded rows that no stored row has taken out."""
    for row in folded.values():
        yield Problem(table, named(table, row), "is missing")


# Bytes that are held apart


def held(table: str, row: Row, salt: bytes | None) -> Iterator[Problem]:
    """Compare held bytes with the digest, and the count if there is one, that the journal has of them."""
    data: bytes | None = row["bytes"]
    if data is None or salt is None:
        yield Problem(table, named(table, row), "its bytes or their salt are missing")
        return
    if row.get("byte_count", len(data)) != len(data):
        text = f"has {len(data)} bytes, the journal says {row['byte_count']}"
        yield Problem(table, named(table, row), text)
    if replay.salted(salt, data) != row["digest"]:
        yield Problem(table, named(table, row), "has other bytes than its digest says")


def said(attribute: Row) -> dict[str, Any] | None:
    """What a caller said beside the content; None where that is not one canonical JSON object."""
    data: bytes | None = attribute["bytes"]
    if data is None:
        return None
    try:
        value = canonical.parse(data)
        if isinstance(value, dict) and canonical.encode(value) == data:
            return value
    except Malformed:
        pass
    return None


# One operation with everything about it


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An operation row and the rows that belong to it."""

    row: Row
    dependencies: Sequence[Row]
    events: Sequence[Row]
    evidence: Sequence[Row]
    attribute: Row | None
    payload: Row | None
    plan: Row | None
    parts: Sequence[Row]
    vectors: Sequence[Row]
    model: Row | None
    memory: Row | None


def operation(found: Found, committed: Container[tuple[int, str]]) -> Iterator[Problem]:
    """Check one operation; ``committed`` holds account and ID of every operation that is."""
    yield from _events(found)
    yield from _evidence(found)
    yield from _dependencies(found, committed)
    yield from _source(found)
    if found.plan is not None:
        yield from _plan(found, found.plan)
    yield from _effect(found)


def _dependencies(found: Found, committed: Container[tuple[int, str]]) -> Iterator[Problem]:
    """What waits knows which of its dependencies are committed; what has ended keeps what it knew then."""
    for row in found.dependencies:
        there, met = (row["account_n"], row["depends_on"]) in committed, bool(row["met"])
        late = there and not met and found.row["state"] == State.REJECTED
        if met != there and not late:
            text = f"met is {row['met']}, which is not so of operation {_shown(row['depends_on'])}"
            yield Problem("dependency", named("dependency", row), text)
        if not met and found.row["state"] == State.COMMITTED:
            yield Problem("dependency", named("dependency", row), "was not met when its operation committed")


def _of(found: Found, text: str) -> Problem:
    return Problem("operation", named("operation", found.row), text)


def _events(found: Found) -> Iterator[Problem]:
    row, before, time, generation = found.row, None, found.row["created_us"], 0
    for sequence, event in enumerate(found.events, 1):
        where = named("event", event)
        if event["sequence"] != sequence:
            yield Problem("event", where, f"stands where sequence {sequence} is expected")
        if event["from_state"] != before or (before, event["to_state"]) not in _STEPS:
            text = (
                f"{_shown(event['from_state'])} to {_shown(event['to_state'])} cannot follow {_shown(before)}"
            )
            yield Problem("event", where, text)
        if event["occurred_us"] < time or event["executor_generation"] < generation:
            yield Problem("event", where, "time or generation is before that of the event before it")
        before, time, generation = event["to_state"], event["occurred_us"], event["executor_generation"]
    if len(found.events) != row["progress_seq"] or before != row["state"]:
        text = f"is {row['state']} after {row['progress_seq']} events, "
        yield _of(found, text + f"{len(found.events)} events end in {_shown(before)}")
    if row["updated_us"] < time or row["executor_generation"] < generation:
        yield _of(found, "was updated before its last event")
    if (row["state"] in TERMINAL) != (row["result"] is not None):
        yield _of(found, f"is {row['state']} with the result {_shown(row['result'])}")
    if (row["state"] == State.REJECTED) != (row["error"] is not None):
        yield _of(found, f"is {row['state']} with the error {_shown(row['error'])}")


def sequence(rows: Sequence[Row]) -> Iterator[Problem]:
    """Check that evidence is numbered from 1 without a gap, in times that never fall in one operation."""
    time = rows[0]["occurred_us"] if rows else 0  # A clock may have stood before 1970.
    for expected, row in enumerate(rows, 1):
        where = named("evidence", row)
        if row["sequence"] != expected:
            yield Problem("evidence", where, f"stands where sequence {expected} is expected")
        if row["operation_n"] != STORE and row["occurred_us"] < time:
            yield Problem("evidence", where, "its time is before that of the evidence before it")
        time = row["occurred_us"]


def _evidence(found: Found) -> Iterator[Problem]:
    row, rows = found.row, found.evidence
    yield from sequence(rows)
    exits = [each for each in rows if each["kind"] in EXIT_KINDS]
    if len(rows) != row["executor_progress_seq"]:
        text = f"executor_progress_seq is {row['executor_progress_seq']}, of evidence there are {len(rows)}"
        yield _of(found, text)
    if len(exits) != row["executor_exit_count"]:
        text = f"executor_exit_count is {row['executor_exit_count']}, there is evidence of {len(exits)}"
        yield _of(found, text)
    if row["executor_last_exit"] != (exits[-1]["message"] if exits else None):
        yield _of(found, "executor_last_exit is not the message of the last exit")
    if rows and row["kind"] != Kind.ADD_MEMORY:
        yield _of(found, f"is {row['kind']}, which needs no executor, and has evidence of one")


def _source(found: Found) -> Iterator[Problem]:
    """Put the payload together again and compare its hash: what the caller named is what is kept."""
    if found.attribute is None or found.attribute["operation_n"] != found.row["n"]:
        yield _of(found, f"has no attribute row of object {found.row['object_n']}")
        return
    if (found.payload is not None) != (found.row["kind"] == Kind.ADD_MEMORY):
        yield _of(
            found, f"is {found.row['kind']}, and its content is {'there' if found.payload else 'missing'}"
        )
    attributes = said(found.attribute)
    if attributes is None:
        yield Problem("attribute", named("attribute", found.attribute), "is no canonical JSON object")
        return
    whole = dict(attributes)
    if found.payload is not None:
        try:
            whole["content"] = str(found.payload["bytes"] or b"", "utf-8")
        except UnicodeDecodeError:
            yield Problem("payload", named("payload", found.payload), "is not UTF-8")
            return
    if canonical.payload_hash(whole) != found.row["payload_hash"]:
        yield _of(found, "payload_hash is not the hash of the payload that is kept")


def _plan(found: Found, plan: Row) -> Iterator[Problem]:
    where = named("plan", plan)
    content, salt = (found.payload or {}).get("bytes"), (found.payload or {}).get("salt")
    if content is None or salt is None:
        yield Problem("plan", where, "has no source")
        return
    if len(found.parts) != plan["part_count"]:
        yield Problem("plan", where, f"has {len(found.parts)} parts, part_count is {plan['part_count']}")
    token = byte = 0
    for index, part in enumerate(found.parts):
        if (part["part_index"], part["token_start"], part["byte_start"]) != (index, token, byte):
            yield Problem("part", named("part", part), f"does not begin where part {index - 1} ends")
        if part["token_end"] < part["token_start"] or part["byte_end"] <= part["byte_start"]:
            yield Problem("part", named("part", part), "ends before it begins")
        if replay.salted(salt, content[part["byte_start"] : part["byte_end"]]) != part["digest"]:
            yield Problem("part", named("part", part), "has another digest than its bytes in the source")
        token, byte = part["token_end"], part["byte_end"]
    if (token, byte) != (plan["token_count"], len(content)):
        text = f"ends at token {token}, byte {byte} of {plan['token_count']}, {len(content)}"
        yield Problem("plan", where, text)
    yield from _vectors(found, plan, salt)


def _vectors(found: Found, plan: Row, salt: bytes) -> Iterator[Problem]:
    size = _vector_bytes(found.model)
    if size is None:
        yield Problem("model", f"n {plan['model_n']}", "is missing or is no model identity")
        return
    indexed = {part["part_index"] for part in found.parts if part["embedding_state"] == "indexed"}
    for vector in found.vectors:
        where = named("vector", vector)
        yield from held("vector", vector, salt)
        data = vector["bytes"] or b""
        if vector["part_index"] not in indexed:
            yield Problem("vector", where, "belongs to a part that is not indexed")
        if len(data) != size:
            yield Problem("vector", where, f"has {len(data)} bytes, its model makes {size}")
        elif not all(map(math.isfinite, struct.unpack(f"<{size // 4}f", data))):
            yield Problem("vector", where, "is not finite")
    for index in sorted(indexed - {vector["part_index"] for vector in found.vectors}):
        yield Problem("part", f"plan_n {plan['n']}, part_index {index}", "is indexed and has no vector")


def _vector_bytes(model: Row | None) -> int | None:
    try:
        identity_of = msgspec.json.decode(model["identity"]) if model is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    dimensions = identity_of.get("dimensions") if isinstance(identity_of, dict) else None
    return 4 * dimensions if isinstance(dimensions, int) and dimensions > 0 else None


def _effect(found: Found) -> Iterator[Problem]:
    """A committed memory operation has exactly one memory with every part indexed; any other has none."""
    remembered = found.row["kind"] == Kind.ADD_MEMORY and found.row["state"] == State.COMMITTED
    if (found.memory is not None) != remembered:
        there = "a memory" if found.memory is not None else "no memory"
        yield _of(found, f"is {found.row['kind']}, {found.row['state']}, and has {there}")
    if found.memory is None:
        return
    where = named("memory", found.memory)
    if found.plan is None or found.memory["plan_n"] != found.plan["n"]:
        yield Problem("memory", where, "is not of the active plan of its source")
    if any(part["embedding_state"] != "indexed" for part in found.parts):
        yield Problem("memory", where, "has parts that are not indexed")


def made(
    table: str, row: Row, maker: Row | None, account_key: str | None, attribute: Row | None
) -> Iterator[Problem]:
    """Check a memory, stream or step against the operation that made it and what its caller said."""
    where = named(table, row)
    if maker is None or maker["state"] != State.COMMITTED or maker["object_n"] != row["object_n"]:
        yield Problem(table, where, "was made by no committed operation")
        return
    kind = {"memory": Kind.ADD_MEMORY, "stream": Kind.CREATE_TASK_STREAM, "step": Kind.ADD_TASK_STEP}[table]
    if maker["kind"] != kind:
        yield Problem(table, where, f"was made by an operation of kind {maker['kind']}")
    key = identity.object_key(table, account_key or "", maker["id"])  # type: ignore[arg-type] # one of the three
    if row["key"] != key:
        yield Problem(table, where, f"key is {_shown(row['key'])}, its operation has {key}")
    attributes = None if attribute is None else said(attribute)
    columns = {"memory": _MEMORY_TEXT, "stream": _STREAM_TEXT, "step": _STEP_TEXT}[table]
    for column, name in columns.items():
        if attributes is not None and row[column] != attributes.get(name):
            yield Problem(table, where, f"{column} is {_shown(row[column])}, its caller said something else")
    if (
        table == "step"
        and len({row["status"] == "completed", *_is_set(row, "completed_by", "completed_us")}) > 1
    ):
        yield Problem(table, where, f"is {row['status']}, which its completion contradicts")


def _is_set(row: Row, *columns: str) -> Iterator[bool]:
    return (row[column] is not None for column in columns)


def completions(steps: Iterable[Row]) -> Iterator[Problem]:
    """Check that no operation completes two steps."""
    rows = [row for row in steps if row["completed_by"] is not None]
    times = Counter(row["completed_by"] for row in rows)
    for row in rows:
        if times[row["completed_by"]] > 1:
            yield Problem("step", named("step", row), "is completed by what completes another step as well")


def types(table: str, row: Row, declared: Mapping[str, tuple[type, bool]]) -> Iterator[Problem]:
    """Check a row against the declared types: what follows may rely on them."""
    for column, value in row.items():
        kind, required = declared[column]
        if (value is None and required) or (value is not None and type(value) is not kind):
            yield Problem(table, named(table, row), f"{column} is of type {type(value).__name__}")


def source_digest(payload: Row | None) -> str | None:
    """SHA-256 of a source's bytes; None where there is none, or none any more."""
    return (
        None if payload is None or payload["bytes"] is None else hashlib.sha256(payload["bytes"]).hexdigest()
    )
