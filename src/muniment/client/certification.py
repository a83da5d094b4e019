"""What ``muniment certify`` holds a server to: from what was seen to what is wrong with it. No I/O.

The rules are those of the seed (durable-operations 1.8.0; executor-readiness-and-recovery). Each is judged
by one check, so that one fault gives one failing line. A rule that does not hold raises ``RuleBroken``.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, TypeVar

import msgspec

from muniment.core import canonical
from muniment.errors import MunimentError
from muniment.model.operation import SCHEMA_VERSION, TERMINAL, Event, Kind, Receipt, State
from muniment.model.times import parse_rfc3339

T = TypeVar("T")

OWNER: Final = "certify"
SERVICE: Final = "surreal-memory-server"
CAPABILITIES: Final = ("ledger", "storage", "coordinator", "tokenizer", "model_executor", "search_index")
INGESTION: Final = CAPABILITIES[:3]
SETTLED: Final = ("operation_id", "schema_version", "kind", "payload_hash", "dependencies", "created_at")
"""What no receipt of an operation ever changes."""
ENDS: Final = frozenset({"exit", "stall", "protocol"})
"""Evidence that a generation has ended."""
EVIDENCE: Final = frozenset({"start", "plan", "progress", "restart", "completion", "failure"}) | ENDS

_FRAME: Final = re.compile(rb"id: (0|[1-9]\d*)\nevent: operation_state\ndata: ([^\r\n]+)\n\n|:[^\r\n]*\n\n")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN_CHARACTERS_MAX: Final = 200


class RuleBroken(MunimentError):
    """A rule does not hold; the text says what was expected and seen. ``todo`` is for whoever reads it."""

    def __init__(self, text: str, todo: str | None = None) -> None:
        super().__init__(text)
        self.todo = todo


class Check(msgspec.Struct, frozen=True):
    """One line of a certificate: what it is called, and what to do where it fails."""

    name: str
    todo: str


HEALTH: Final = Check(
    "health", "whoever answers there is no Muniment server, or not a whole one: look at the URL and its log"
)
READINESS: Final = Check(
    "readiness", "`Readiness` in docs/operating.md says what each capability that is missing needs"
)
RESPONSE_LOSS: Final = Check(
    "response-loss reconciliation",
    "repeating after a lost answer is not safe here: stop writing, `muniment check` the directory",
)
EXACT_REPLAY: Final = Check(
    "exact replay", "repeating a request is not safe here: stop writing, and compare the server's version"
)
HASH_CONFLICT: Final = Check(
    "hash conflict", "content can be mixed up under one ID here: stop writing, compare the server's version"
)
TERMINAL_RECEIPT: Final = Check(
    "terminal receipt retrieval",
    "receipts of this server prove nothing: `muniment check` the directory, keep a copy of it as it is",
)
SSE_RESUME: Final = Check(
    "SSE resume",
    "do not follow streams of this server, ask for receipts; a proxy that buffers or cuts is the usual cause",
)
DEPENDENCY: Final = Check(
    "dependency block and release",
    "order between operations is not kept here: `muniment operation ID` of both",
)
REJECTED: Final = Check(
    "rejected receipt", "a refusal cannot be read back here: `muniment check` the directory"
)
LONG_MEMORY: Final = Check(
    "long memory, executor killed",
    "`muniment evidence ID` and `muniment operation ID` tell what became of it, the server's log the rest",
)
CHECKS: Final = (
    HEALTH,
    READINESS,
    RESPONSE_LOSS,
    EXACT_REPLAY,
    HASH_CONFLICT,
    TERMINAL_RECEIPT,
    SSE_RESUME,
    DEPENDENCY,
    REJECTED,
    LONG_MEMORY,
)


class Record(msgspec.Struct, frozen=True):
    """One record of evidence."""

    sequence: int
    kind: str
    generation: int
    message: str | None
    occurred_at: str


class EvidencePage(msgspec.Struct, frozen=True):
    """A page of evidence."""

    operation_id: str
    evidence: tuple[Record, ...]
    next: int | None


class Page(msgspec.Struct, frozen=True):
    """A page of operations."""

    operations: tuple[Receipt, ...]
    next: str | None


class Part(msgspec.Struct, frozen=True):
    """What is looked at of a part."""

    index: int
    token_start: int
    token_end: int
    byte_start: int
    byte_end: int
    content: str
    embedding_state: str
    updated_at: str


class Memory(msgspec.Struct, frozen=True):
    """What is looked at of a memory."""

    id: str
    content: str
    content_sha256: str
    byte_count: int
    parts: tuple[Part, ...]


class Hit(msgspec.Struct, frozen=True):
    """What is looked at of a result of recall."""

    id: str


class Recalled(msgspec.Struct, frozen=True):
    """An answer of recall."""

    results: tuple[Hit, ...]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check; ``todo`` is None where it passed."""

    name: str
    ok: bool
    seen: str
    todo: str | None
    ms: int


# Requests


def submission(
    operation_id: str, kind: Kind, payload: Mapping[str, Any], dependencies: Sequence[str] = ()
) -> dict[str, Any]:
    """A right body for POST."""
    return {
        "operation_id": operation_id,
        "schema_version": SCHEMA_VERSION,
        "kind": kind.value,
        "dependencies": list(dependencies),
        "payload_hash": canonical.payload_hash(dict(payload)),
        "payload": dict(payload),
    }


def memory(operation_id: str, content: str, session: str, dependencies: Sequence[str] = ()) -> dict[str, Any]:
    """A right body that adds a memory of the owner ``certify``."""
    payload = {"content": content, "user_id": OWNER, "session_id": session, "categories": [OWNER]}
    return submission(operation_id, Kind.ADD_MEMORY, payload, dependencies)


def task_stream(
    operation_id: str, name: str, description: str, dependencies: Sequence[str] = ()
) -> dict[str, Any]:
    """A right body that creates a task stream of the owner ``certify``; needs no model."""
    payload = {"name": name, "description": description, "user_id": OWNER}
    return submission(operation_id, Kind.CREATE_TASK_STREAM, payload, dependencies)


def respelled(body: Mapping[str, Any]) -> bytes:
    """The same submission in other bytes: keys in another order, with spaces. The hash is of the payload."""
    turned = {name: body[name] for name in sorted(body, reverse=True)}
    turned["payload"] = {name: body["payload"][name] for name in sorted(body["payload"], reverse=True)}
    return msgspec.json.format(msgspec.json.encode(turned), indent=3)


def long_text(sentences: int, seed: str) -> str:
    """A text of so many different sentences, the same one for the same arguments."""
    return "".join(sentence(number, seed) for number in range(sentences))


def sentence(number: int, seed: str) -> str:
    """The n-th sentence of ``long_text``, its end included."""
    mark = hashlib.sha256(f"{seed} {number}".encode()).hexdigest()
    return (
        f"Page {number} of the ledger keeps the weight of crate {int(mark[:4], 16)}, which stood in room "
        f"{int(mark[4:6], 16)} beside the {int(mark[6:9], 16)} others until the evening of day {number}. "
    )


# Health and readiness


def health(status: int, body: bytes) -> str:
    """Liveness: 200, and exactly the three fields of the seed. Returns what was seen."""
    expect(status == 200, f"expected status 200, saw {status}: {shown(body)}")
    value = fields(body, ("service", "status", "version"))
    expect(
        value["service"] == SERVICE and value["status"] == "ok" and isinstance(value["version"], str),
        f"expected service {SERVICE}, status ok and a version, saw {shown(body)}",
    )
    return f"200, {SERVICE} {value['version']}"


def readiness(status: int, body: bytes) -> dict[str, Any]:
    """The shape of ``/ready``, and that its parts and its status say one thing. Returns the body."""
    value = fields(body, ("status", "capabilities", "ingestion_ready", "search_ready"))
    capabilities = value["capabilities"]
    expect(
        isinstance(capabilities, dict)
        and sorted(capabilities) == sorted(CAPABILITIES)
        and all(isinstance(up, bool) for up in (*capabilities.values(), value["ingestion_ready"]))
        and isinstance(value["search_ready"], bool),
        f"expected the capabilities {', '.join(CAPABILITIES)} as true or false, saw {shown(body)}",
    )
    ready = all(capabilities[name] for name in INGESTION)
    expect(
        (status, value["status"], value["ingestion_ready"])
        == ((200, "ready", True) if ready else (503, "not_ready", False)),
        f"ledger, storage and coordinator say {ready}, and the rest of the answer does not: status {status}, "
        f"{shown(body)}",
    )
    expect(
        not value["search_ready"] or all(capabilities.values()),
        f"search_ready is true without {missing(value)}",
    )
    return value


def missing(ready: Mapping[str, Any]) -> str:
    """The capabilities that are false, in words."""
    return ", ".join(name for name in CAPABILITIES if not ready["capabilities"][name]) or "nothing"


# Receipts


def receipt(body: bytes) -> Receipt:
    """A receipt with exactly the fields and types of the seed."""
    value = fields(body, Receipt.__struct_fields__)
    try:
        typed = msgspec.convert(value, Receipt)
        parse_rfc3339(typed.created_at)
        parse_rfc3339(typed.updated_at)
    except (msgspec.ValidationError, ValueError) as error:
        raise RuleBroken(f"this is no receipt ({error}): {shown(body)}") from error
    expect(
        typed.schema_version == SCHEMA_VERSION
        and _HASH.fullmatch(typed.payload_hash) is not None
        and min(
            typed.progress_seq,
            typed.executor_generation,
            typed.executor_progress_seq,
            typed.executor_exit_count,
        )
        >= 0,
        f"this is no receipt: {shown(body)}",
    )
    return typed


def of(body: Mapping[str, Any], answer: Receipt) -> None:
    """``answer`` is the receipt of the submission ``body``."""
    expected = {**body, "dependencies": tuple(body["dependencies"])}
    for name in ("operation_id", "kind", "payload_hash", "dependencies"):
        saw = getattr(answer, name)
        expect(
            saw == expected[name],
            f"the receipt of {body['operation_id']} has the {name} {saw!r}, not {expected[name]!r}",
        )


def same_operation(before: Receipt, after: Receipt) -> None:
    """Two receipts of one operation, the second not older than the first."""
    for name in SETTLED:
        was, became = getattr(before, name), getattr(after, name)
        expect(was == became, f"{name} of {before.operation_id} was {was!r} and became {became!r}")
    expect(
        before.progress_seq <= after.progress_seq,
        f"{before.operation_id} went back from event {before.progress_seq} to {after.progress_seq}",
    )


def equal(first: Receipt, second: Receipt, what: str) -> None:
    """Two receipts that must be the same."""
    for name in Receipt.__struct_fields__:
        was, became = getattr(first, name), getattr(second, name)
        expect(was == became, f"{what}: {name} of {first.operation_id} was {was!r} and became {became!r}")


def key(answer: Receipt) -> str:
    """The key of the memory that a committed operation made."""
    found = answer.result.get("id") if isinstance(answer.result, dict) else None
    if not isinstance(found, str):
        raise RuleBroken(
            f"{answer.operation_id} is committed and its result names no memory: {answer.result}"
        )
    return found


def error_text(status: int, body: bytes, expected: int, what: str) -> str:
    """The text of an error answer with the expected status and the one key ``error``."""
    expect(status == expected, f"expected {expected} for {what}, saw {status}: {shown(body)}")
    value = fields(body, ("error",))
    expect(isinstance(value["error"], str), f"the error of {what} is no text: {shown(body)}")
    return str(value["error"])


def told_by_last_event(answer: Receipt, found: Sequence[Event]) -> None:
    """The receipt of an ended operation is its last event."""
    last = found[-1] if found else None
    told = None if last is None else (last.to_state.value, last.sequence, last.executor_generation)
    says = (answer.state.value, answer.progress_seq, answer.executor_generation)
    expect(
        told == says,
        f"state, sequence and generation of {answer.operation_id} are {says}, and its last event says {told}",
    )


def once_each(hashes: Iterable[str], operations: Iterable[Receipt]) -> None:
    """Each payload hash belongs to exactly one of the operations."""
    owners: dict[str, list[str]] = {each: [] for each in hashes}
    for operation in operations:
        if operation.payload_hash in owners:
            owners[operation.payload_hash].append(operation.operation_id)
    for ids in owners.values():
        expect(len(ids) == 1, f"one submission became {len(ids)} operations: {', '.join(ids) or 'none'}")


def exactly(keys: Iterable[str], results: Iterable[Hit], what: str) -> None:
    """Recall of a session found each of the memories once and nothing else."""
    wanted, found = sorted(keys), sorted(hit.id for hit in results)
    expect(wanted == found, f"{what}: expected exactly {wanted} in recall, found {found}")


# Events


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """Sequence and bytes of each event; comment lines are left out. ``data`` ends with a whole frame."""
    found, place = [], 0
    while place < len(data):
        match = _FRAME.match(data, place)
        if match is None:
            raise RuleBroken(f"no event of the contract at byte {place} of a stream: {shown(data[place:])}")
        if match[1] is not None:
            found.append((int(match[1]), match[0]))
        place = match.end()
    return found


def whole(data: bytes) -> bytes:
    """What a client had of a stream that was cut: its whole frames."""
    return data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""


def events(data: bytes, operation_id: str) -> list[Event]:
    """The events of a stream from its beginning: 1..n, each from the state of the one before."""
    found: list[Event] = []
    for sequence, frame in frames(data):
        try:
            event = msgspec.json.decode(frame.split(b"\ndata: ")[1], type=Event)
            parse_rfc3339(event.occurred_at)
        except (msgspec.DecodeError, ValueError) as error:
            raise RuleBroken(
                f"event {sequence} of {operation_id} is none ({error}): {shown(frame)}"
            ) from error
        came_from = found[-1].to_state if found else None
        expect(
            (event.operation_id, event.sequence, event.from_state)
            == (operation_id, len(found) + 1, came_from)
            and sequence == event.sequence,
            f"event {len(found) + 1} of {operation_id} was expected, from {came_from}; saw {shown(frame)}",
        )
        found.append(event)
    return found


def union(parts: Sequence[bytes], uncut: bytes, what: str) -> None:
    """Streams that were resumed one after the other have the frames of the uncut one, byte for byte."""
    got = [frame for part in parts for frame in frames(part)]
    expected = frames(uncut)
    if got != expected:
        numbers = [sequence for sequence, _ in got]
        raise RuleBroken(
            f"{what}: expected the events {[sequence for sequence, _ in expected]}, saw {numbers}"
            + (" with other bytes" if numbers == [sequence for sequence, _ in expected] else "")
        )


def passed(found: Sequence[Event], state: State) -> Event:
    """The event that led to ``state``."""
    for event in found:
        if event.to_state is state:
            return event
    raise RuleBroken(f"no event leads to {state.value}: {[event.to_state.value for event in found]}")


# A killed executor


def killed(before: Receipt, after: Receipt, evidence: Sequence[Record]) -> int:
    """One exit is evidence and no verdict: counted once, worked on by a later generation, planned once.

    Returns how many progress records lie before the exit. ``after`` is committed.
    """
    name = after.operation_id
    records(after, evidence)
    kinds = [record.kind for record in evidence]
    counted = after.executor_exit_count - before.executor_exit_count
    expect(counted == 1, f"executor_exit_count of {name} rose by {counted} for one kill; {summary(kinds)}")
    expect(bool(after.executor_last_exit), f"executor_last_exit of {name} is not set after the kill")
    expect(
        after.executor_generation > before.executor_generation,
        f"{name} was killed in generation {before.executor_generation} and committed in "
        f"{after.executor_generation}, which is not later",
    )
    ends = [place for place, kind in enumerate(kinds) if kind in ENDS]
    expect(len(ends) == 1, f"expected one exit in the evidence of {name}, saw {summary(kinds)}")
    end = ends[0]
    expect(
        "progress" in kinds[:end] and "restart" in kinds[end:] and "progress" in kinds[end:],
        f"expected progress, exit, restart, progress in the evidence of {name}, saw {summary(kinds)}",
    )
    restart = evidence[end + kinds[end:].index("restart")]
    expect(
        restart.generation > evidence[end].generation,
        f"{name} restarted in generation {restart.generation}, which is not after the one that ended",
    )
    expect(
        kinds.count("plan") == 1, f"{name} was planned {kinds.count('plan')} times: its plan was not reused"
    )
    return kinds[:end].count("progress")


def summary(kinds: Sequence[str]) -> str:
    """Kinds in a row, repeated ones counted."""
    return ", ".join(
        kind if count == 1 else f"{count} {kind}"
        for kind, count in ((kind, len(list(row))) for kind, row in groupby(kinds))
    )


def records(answer: Receipt, evidence: Sequence[Record]) -> None:
    """Evidence is whole: known kinds, 1..n without gap, n as the receipt says, completion at its end."""
    name = answer.operation_id
    expect(
        [record.sequence for record in evidence] == list(range(1, answer.executor_progress_seq + 1)),
        f"{name} has {len(evidence)} records of evidence with a gap, or not as many as executor_progress_seq "
        f"says, {answer.executor_progress_seq}",
    )
    strange = sorted({record.kind for record in evidence} - EVIDENCE)
    expect(not strange, f"evidence of {name} has unknown kinds: {strange}")
    expect(
        bool(evidence) and evidence[-1].kind == "completion",
        f"{name} is committed and its evidence does not end with completion",
    )


def whole_memory(found: Memory, content: str) -> None:
    """The memory has the submitted bytes, and parts that cover them once, all of them indexed."""
    data = content.encode()
    expect(
        found.content == content and found.content_sha256 == hashlib.sha256(data).hexdigest(),
        f"{found.id} has other content than was submitted ({found.byte_count} bytes of {len(data)})",
    )
    byte = token = 0
    for index, part in enumerate(found.parts):
        expect(
            (part.index, part.byte_start, part.token_start, part.embedding_state)
            == (index, byte, token, "indexed"),
            f"part {index} of {found.id} is {part.embedding_state}, at byte {part.byte_start}, not {byte}",
        )
        byte, token = part.byte_end, part.token_end
        expect(
            part.content.encode() == data[part.byte_start : byte],
            f"part {index} of {found.id} is not what stands at its place in the content",
        )
    expect(byte == len(data), f"the {len(found.parts)} parts of {found.id} end at byte {byte} of {len(data)}")


def kept_parts(found: Memory, evidence: Sequence[Record]) -> int:
    """Parts that were indexed before the exit were not embedded again; returns how many there are.

    A part says when it was updated last: each progress record before the exit still has a part of its time.
    """
    end = next(place for place, record in enumerate(evidence) if record.kind in ENDS)
    times = {record.occurred_at for record in evidence[:end] if record.kind == "progress"}
    kept = [part.updated_at for part in found.parts if part.updated_at in times]
    expect(times <= set(kept), f"parts of {found.id} that were indexed before the kill were embedded again")
    return len(kept)


def ingest_child(children: Mapping[int, Sequence[str]], server: int) -> int:
    """The process that embeds what is written, of a server's children with their command lines."""
    executors = {pid: words for pid, words in children.items() if "muniment.executor_wiring" in words}
    chosen = [pid for pid, words in executors.items() if words[-1] == "ingest"] or list(executors)
    if len(chosen) != 1:
        raise RuleBroken(
            f"process {server} has {len(chosen)} executor children that could be the one: {sorted(chosen)}",
            "run certify on the machine, and in the container, where the server runs",
        )
    return chosen[0]


# Words


def expect(holds: bool, text: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise ``RuleBroken`` with the text unless it holds."""
    if not holds:
        raise RuleBroken(text)


def fields(body: bytes, names: Sequence[str]) -> dict[str, Any]:
    """A JSON object with exactly these fields."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RuleBroken(f"the answer is no JSON ({error}): {shown(body)}") from error
    expect(
        isinstance(value, dict) and sorted(value) == sorted(names),
        f"expected an object with {', '.join(names)}; saw {shown(body)}",
    )
    checked: dict[str, Any] = value
    return checked


def shown(body: bytes) -> str:
    """The beginning of an answer, in one line."""
    text = body[:_SHOWN_CHARACTERS_MAX].decode("utf-8", "replace")
    return " ".join(text.split()) + (" ..." if len(body) > _SHOWN_CHARACTERS_MAX else "") or "nothing"


def ended(answer: Receipt) -> bool:
    """Whether a receipt is terminal."""
    return answer.state in TERMINAL


def decoded(body: bytes, kind: type[T], what: str) -> T:
    """The answer to ``what`` as ``kind``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RuleBroken(f"the answer to {what} is no {kind.__name__} ({error}): {shown(body)}") from error
