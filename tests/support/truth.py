"""*Truth*: what must hold of a store after any fault, whatever the fault was.

Each acknowledged fact is present; the receipt is the last event; sequences have no gap; a committed memory
operation has exactly one memory and any other has none; tables, held bytes and journal agree. It reads
rows and nothing else, so it does not repeat what the code under test believes of itself; ``verify`` asks
that too.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from muniment.adapters.sqlite import check
from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader
from muniment.core import replay
from muniment.core.tables import TABLES, Row
from muniment.model.operation import TERMINAL
from muniment.ports.ledger import Reads

JOURNAL_PAGE: Final = 1000


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A caller was told that this operation is stored."""

    id: str
    payload_hash: str


class Stood(msgspec.Struct, frozen=True, tag=True):
    """Somebody was told that an operation has reached a state."""

    id: str
    state: str


class Indexed(msgspec.Struct, frozen=True, tag=True):
    """The stage was told that a part and its vector are saved."""

    id: str
    part_index: int
    vector_sha256: str


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """The supervisor was told that this generation is taken."""

    generation: int


class Written(msgspec.Struct, frozen=True, tag=True):
    """A unit was published to followers and the device."""

    position: int
    unit_sha256: str


Fact = Accepted | Stood | Indexed | Reserved | Written


def sha256(data: bytes) -> str:
    """Lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def rows(reads: Reads, table: str) -> list[Row]:
    """All rows of a table."""
    return list(reads.rows(table))


def units(reads: Reads) -> Iterator[Any]:
    """The whole journal, page by page."""
    after = 0
    while page := reads.units(after, JOURNAL_PAGE):
        yield from page
        after = page[-1].position


# Facts


def missing(facts: Iterable[Fact], reads: Reads) -> list[str]:
    """Return each acknowledged fact that the store does not know."""
    operations = {row["id"]: row for row in reads.rows("operation")}
    reached = defaultdict(set)
    for event in reads.rows("event"):
        reached[event["operation_n"]].add(event["to_state"])
    journal = {unit.position: sha256(unit.data) for unit in units(reads)}
    vectors = indexed(reads)
    generation = max(
        (row["generation"] for row in reads.rows("evidence") if row["operation_n"] == 0), default=0
    )

    def known(fact: Fact) -> bool:
        match fact:
            case Accepted():
                row = operations.get(fact.id)
                return row is not None and row["payload_hash"] == fact.payload_hash
            case Stood():
                row = operations.get(fact.id)
                return row is not None and fact.state in reached[row["n"]]
            case Indexed():
                return vectors.get((fact.id, fact.part_index)) == fact.vector_sha256
            case Reserved():
                return generation >= fact.generation
            case Written():
                return journal.get(fact.position) == fact.unit_sha256

    return [f"acknowledged and gone: {fact}" for fact in facts if not known(fact)]


def indexed(reads: Reads) -> dict[tuple[str, int], str]:
    """Operation ID and index of each part that is marked indexed, with the SHA-256 of its vector."""
    owner = {row["object_n"]: row["id"] for row in reads.rows("operation")}
    plan = {row["n"]: owner[row["object_n"]] for row in reads.rows("plan")}
    bytes_of = {(row["plan_n"], row["part_index"]): row["bytes"] for row in reads.rows("vector")}
    return {
        (plan[row["plan_n"]], row["part_index"]): sha256(
            bytes_of.get((row["plan_n"], row["part_index"]), b"")
        )
        for row in reads.rows("part")
        if row["embedding_state"] == "indexed"
    }


# What holds of every store


def problems(reads: Reads) -> list[str]:
    """Return everything that is wrong with a store, whatever it was meant to hold."""
    return [
        *_event_problems(reads),
        *_effect_problems(reads),
        *_held_problems(reads),
        *_journal_problems(reads),
    ]


def _event_problems(reads: Reads) -> Iterator[str]:
    events, evidence = defaultdict(list), defaultdict(list)
    for row in reads.rows("event"):
        events[row["operation_n"]].append(row)
    for row in reads.rows("evidence"):
        evidence[row["operation_n"]].append(row["sequence"])
    for operation in reads.rows("operation"):
        name, own = f"operation {operation['id']}", events.pop(operation["n"], [])
        sequences = [row["sequence"] for row in own]
        if sequences != list(range(1, operation["progress_seq"] + 1)):
            yield f"{name}: events {sequences}, progress_seq {operation['progress_seq']}"
        if not own or own[-1]["to_state"] != operation["state"]:
            yield f"{name}: is {operation['state']}, last event {own[-1]['to_state'] if own else None}"
        if [row["from_state"] for row in own] != [None, *(row["to_state"] for row in own[:-1])]:
            yield f"{name}: events do not follow each other"
        if evidence[operation["n"]] != list(range(1, operation["executor_progress_seq"] + 1)):
            yield f"{name}: evidence {evidence[operation['n']]}, not 1..{operation['executor_progress_seq']}"
    if events:
        yield f"events of unknown operations {sorted(events)}"
    if evidence[0] != list(range(1, len(evidence[0]) + 1)):
        yield f"evidence of the store has a gap: {evidence[0]}"


def _effect_problems(reads: Reads) -> Iterator[str]:
    made: dict[str, dict[int, list[str]]] = {name: defaultdict(list) for name in ("memory", "stream", "step")}
    for name, of in made.items():
        for row in reads.rows(name):
            of[row["operation_n"]].append(row["key"])
    keys = {key for of in made.values() for each in of.values() for key in each}
    for operation in reads.rows("operation"):
        n, committed = operation["n"], operation["state"] == "committed"
        own = {name: of.pop(n, []) for name, of in made.items()}
        count = sum(map(len, own.values()))
        result = msgspec.json.decode(operation["result"] or "null")
        key = (result or {}).get("id")
        if count > 1 or (count and not committed):
            yield f"operation {operation['id']} is {operation['state']} and has {own}"
        if operation["kind"] == "add_memory" and committed and own["memory"] != [key]:
            yield f"operation {operation['id']} is committed as {result} and has the memories {own['memory']}"
        if committed and key not in keys:
            yield f"operation {operation['id']} is committed as {result}, which does not exist"
        if (operation["state"] in TERMINAL) != (result is not None):
            yield f"operation {operation['id']} is {operation['state']} and has the result {result}"
    if left := {name: dict(of) for name, of in made.items() if of}:
        yield f"effects of unknown operations: {left}"
    completed = Counter(row["completed_by"] for row in reads.rows("step") if row["completed_by"] is not None)
    if twice := [n for n, times in completed.items() if times > 1]:
        yield f"completions that completed two steps: {twice}"


def _held_problems(reads: Reads) -> Iterator[str]:
    payloads = {row["object_n"]: row for row in reads.rows("payload")}
    for name in ("payload", "attribute"):
        for row in reads.rows(name):
            if replay.salted(row["salt"], row["bytes"]) != row["digest"]:
                yield f"{name} {row['object_n']} has other bytes than the journal names"
    plans = {row["n"]: payloads[row["object_n"]] for row in reads.rows("plan")}
    for row in reads.rows("part"):
        source = plans[row["plan_n"]]
        if (
            replay.salted(source["salt"], source["bytes"][row["byte_start"] : row["byte_end"]])
            != row["digest"]
        ):
            yield f"part {row['plan_n']}:{row['part_index']} has other bytes than its source"
    for row in reads.rows("vector"):
        if replay.salted(plans[row["plan_n"]]["salt"], row["bytes"]) != row["digest"]:
            yield f"vector {row['plan_n']}:{row['part_index']} has other bytes than the journal names"


def _journal_problems(reads: Reads) -> Iterator[str]:
    chain, found = replay.CHAIN_START, list(units(reads))
    for position, unit in enumerate(found, 1):
        chain = replay.link(chain, replay.digest(unit.data))
        if (unit.position, unit.digest, unit.chain) != (position, replay.digest(unit.data), chain):
            yield f"journal unit {unit.position} is not the {position}th of its chain"
            return
    try:
        folded = replay.fold(replay.decode(unit.data) for unit in found)
    except AssertionError as error:
        yield f"the journal cannot be folded: {error}"
        return
    for name in TABLES:
        if _digest(name, folded.rows[name].values()) != _digest(name, reads.rows(name)):
            yield f"table {name} differs from the fold of the journal"


def _digest(table: str, of: Iterable[Row]) -> str:
    return replay.state_digest([(table, of)])


# Outcomes


def outcome_digest(reads: Reads) -> str:
    """One digest over what became of all operations."""
    return replay.outcome_digest(check.outcomes(reads))


def open_operations(reads: Reads) -> list[str]:
    """Return the operations that have not ended, with their state."""
    return [f"{row['id']}: {row['state']}" for row in reads.rows("operation") if row["state"] not in TERMINAL]


def verify(data_dir: Path, facts: Iterable[Fact] = ()) -> str:
    """Assert *truth* of a data directory that nobody serves, and ``check``; return its outcome digest."""
    reader = SqliteReader(data_dir / LEDGER_FILE)
    try:
        wrong, digest = reader.read(
            lambda reads: ([*missing(facts, reads), *problems(reads)], outcome_digest(reads))
        )
    finally:
        reader.close()
    report = check.check(data_dir)
    assert not wrong, wrong
    assert report.findings == (), report.findings
    assert report.outcome_digest == digest
    return digest
