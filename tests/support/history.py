"""What clients saw of a server that was disturbed, and the checker: pure functions from that to violations.

Every call is one ``Record`` with the times of its begin and its end, on one monotonic clock for all clients.
Its outcome is one of three: *ok* is an answer that promises something; *refused* is a 4xx, so it was not
carried out; *unknown* is everything else (a timeout, a reset, a 5xx), and either may be true. What a call
that ended before another one began had been told can never be taken back by that other one.
"""

import json
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from tests.support.live import Reply

OK: Final = (200, 202)
TERMINAL: Final = ("committed", "rejected")
NAMED_HASH: Final = re.compile(r"already exists with payload_hash ([0-9a-f]{64})")
MARKS: Final = ("progress_seq", "executor_progress_seq", "executor_exit_count", "executor_generation")

Verb = Literal["submit", "get", "events", "list", "memory", "recall"]
Outcome = Literal["ok", "refused", "unknown"]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One operation as a receipt showed it."""

    operation_id: str
    kind: str
    payload_hash: str
    dependencies: tuple[str, ...]
    created_at: str
    state: str
    progress_seq: int
    executor_progress_seq: int
    executor_exit_count: int
    executor_generation: int
    result: Any = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What never changes about an operation."""
        return (self.kind, self.payload_hash, self.dependencies, self.created_at)

    @property
    def memory(self) -> str | None:
        """The key of the memory that it has made."""
        return self.result["id"] if self.kind == "add_memory" and self.state == "committed" else None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A memory, or the part of one that was recalled: ``text`` are its bytes ``start`` to ``end``."""

    key: str
    operation_id: str
    text: str
    start: int
    end: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one client."""

    client: int
    verb: Verb
    subject: str
    """Operation ID, memory key, or query; of a list the ID after which the page begins."""
    began: float
    ended: float
    outcome: Outcome = "unknown"
    status: int | None = None
    error: str | None = None
    payload_hash: str | None = None
    """What was submitted, with ``payload``."""
    payload: Any = None
    told: tuple[Told, ...] = ()
    after: int = 0
    frames: tuple[bytes, ...] = ()
    """Whole frames, as they came; where the outcome is ok, the server has ended the stream in order."""
    found: tuple[Found, ...] = ()
    more: bool = False
    """Of a list: there is another page."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """What is there in the end."""

    operations: tuple[Told, ...]
    """In acceptance order."""
    frames: Mapping[str, tuple[bytes, ...]]
    memories: tuple[Found, ...]
    """Every memory of the store, whole."""


def noted(client: int, verb: Verb, subject: str, began: float, reply: Reply | None, **more: Any) -> Record:
    """Write down a call that ends now, with all that its answer tells; no answer is None."""
    record = Record(client=client, verb=verb, subject=subject, began=began, ended=time.monotonic(), **more)
    if reply is None:
        return record
    if reply.status not in OK:
        outcome: Outcome = "refused" if 400 <= reply.status < 500 else "unknown"
        return replace(record, outcome=outcome, status=reply.status, error=reply.json()["error"])
    record = replace(record, outcome="ok", status=reply.status)
    match verb:
        case "submit" | "get":
            return replace(record, told=(told(reply.json()),))
        case "list":
            page = reply.json()
            return replace(record, told=tuple(map(told, page["operations"])), more=page["next"] is not None)
        case "memory":
            return replace(record, found=(_whole(reply.json()),))
        case "recall":
            return replace(record, found=tuple(map(_part, reply.json()["results"])))
        case "events":
            return record


def told(receipt: Mapping[str, Any]) -> Told:
    """Read a receipt."""
    return msgspec.convert(receipt, Told)


def _whole(memory: Mapping[str, Any]) -> Found:
    return Found(
        key=memory["id"],
        operation_id=memory["operation_id"],
        text=memory["content"],
        start=0,
        end=memory["byte_count"],
    )


def _part(row: Mapping[str, Any]) -> Found:
    return Found(
        key=row["id"],
        operation_id=row["provenance"]["operation_id"],
        text=row["text"],
        start=row["span"]["start"],
        end=row["span"]["end"],
    )


def violations(records: Sequence[Record], end: End) -> list[str]:
    """Return everything that must not be; the reader of one line knows the rule that was broken."""
    return [complaint for rule in RULES for complaint in rule(records, end)]


# What was acknowledged, refused, or never said


def acknowledged_is_present(records: Sequence[Record], end: End) -> Iterator[str]:
    """Whatever a receipt has shown is there in the end, under the same hash and identity."""
    present = {each.operation_id: each for each in end.operations}
    for operation_id, shown in _by_operation(records).items():
        last = present.get(operation_id)
        if last is None:
            yield f"acknowledged and gone: {operation_id}, {shown[-1].state}"
            continue
        for other in {each.identity for each in shown} - {last.identity}:
            yield f"another identity: {operation_id} was {other} and is {last.identity}"


def refused_is_absent(records: Sequence[Record], end: End) -> Iterator[str]:
    """What was refused is not there, unless somebody else's submission of the same was not refused."""
    present = {each.operation_id: each.payload_hash for each in end.operations}
    submits = [each for each in records if each.verb == "submit"]
    wanted = {(each.subject, each.payload_hash) for each in submits if each.outcome != "refused"}
    for each in submits:
        if each.outcome != "refused":
            continue
        kept = present.get(each.subject)
        if each.status == 409:
            named = NAMED_HASH.search(each.error or "")
            if kept is None or named is None or named[1] != kept or kept == each.payload_hash:
                yield f"no conflict: {each.subject} {each.payload_hash} against {kept}, {each.error}"
        elif kept == each.payload_hash and (each.subject, kept) not in wanted:
            yield f"refused and present: {each.subject} {each.payload_hash}, {each.status}"


def one_hash_is_accepted(records: Sequence[Record], end: End) -> Iterator[str]:
    """Two hashes are never both accepted for one ID."""
    accepted: dict[str, set[str | None]] = defaultdict(set)
    for each in records:
        if each.verb == "submit" and each.outcome == "ok":
            accepted[each.subject].add(each.payload_hash)
            if each.told[0].payload_hash != each.payload_hash:
                yield f"the receipt of another payload: {each.subject} {each.payload_hash}: {each.told[0]}"
    for name, hashes in accepted.items():
        if len(hashes) > 1:
            yield f"two hashes accepted: {name} {hashes}"


def nothing_is_there_that_nobody_sent(records: Sequence[Record], end: End) -> Iterator[str]:
    """Each operation was submitted, and stands there once."""
    sent = {(each.subject, each.payload_hash) for each in records if each.verb == "submit"}
    for operation_id, times in Counter(each.operation_id for each in end.operations).items():
        if times > 1:
            yield f"listed {times} times: {operation_id}"
    for each in end.operations:
        if (each.operation_id, each.payload_hash) not in sent:
            yield f"phantom: {each.operation_id} {each.payload_hash}"


def new_only_once(records: Sequence[Record], end: End) -> Iterator[str]:
    """At most one 202 an ID, and none once anybody knew the ID."""
    floors = _floors(records)
    news: Counter[str] = Counter()
    for each in records:
        if each.verb == "submit" and each.status == 202:
            news[each.subject] += 1
            if (known := floors[each.subject].before(each.began)) is not None:
                yield f"new though it was known: {each.subject}, as {known[0]} at progress {known[1][0]}"
    yield from (f"202 said {times} times: {name}" for name, times in news.items() if times > 1)


# Order


class _Floors:
    """What had been told of one operation by a moment: no later answer may fall below."""

    def __init__(self, shown: Iterable[tuple[float, str, tuple[int, ...]]]) -> None:
        ordered = sorted(shown)
        self._times = [ended for ended, _, _ in ordered]
        self._states = list(accumulate(((marks, state) for _, state, marks in ordered), max))
        self._marks = list(accumulate((marks for _, _, marks in ordered), _highest))

    def before(self, moment: float) -> tuple[str, tuple[int, ...]] | None:
        """State and highest marks that were told by calls that ended before ``moment``."""
        count = bisect_left(self._times, moment)
        return (self._states[count - 1][1], self._marks[count - 1]) if count else None


def _highest(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, one, other))


def _marks(shown: Told) -> tuple[int, ...]:
    return tuple(getattr(shown, name) for name in MARKS)


def _floors(records: Iterable[Record]) -> defaultdict[str, _Floors]:
    shown: dict[str, list[tuple[float, str, tuple[int, ...]]]] = defaultdict(list)
    for each in records:
        for receipt in each.told:
            shown[receipt.operation_id].append((each.ended, receipt.state, _marks(receipt)))
        for frame in each.frames:
            event = event_of(frame)
            shown[each.subject].append((each.ended, event["to_state"], (event["sequence"], 0, 0, 0)))
    return defaultdict(lambda: _Floors(()), {name: _Floors(each) for name, each in shown.items()})


def nothing_goes_back(records: Sequence[Record], end: End) -> Iterator[str]:
    """In real time no operation loses progress, changes its state without any, or is not found any more."""
    floors = _floors(records)
    events = ((name, event_of(frame)) for name, frames in end.frames.items() for frame in frames)
    states = {(name, event["sequence"]): event["to_state"] for name, event in events}
    for each in records:
        for receipt in each.told:
            name, marks = receipt.operation_id, _marks(receipt)
            state = states.setdefault((name, receipt.progress_seq), receipt.state)
            if state != receipt.state:
                yield f"two states at progress {receipt.progress_seq}: {name}, {state} and {receipt.state}"
            known = floors[name].before(each.began)
            if known is not None and _highest(known[1], marks) != marks:
                yield f"went back: {name}, from {known} to {(receipt.state, marks)} of {MARKS}"
        if each.status == 404 and each.verb in ("get", "events") and floors[each.subject].before(each.began):
            yield f"not found any more: {each.subject}"


def pages_are_runs_of_the_whole(records: Sequence[Record], end: End) -> Iterator[str]:
    """A page is a run of the acceptance order without a gap; the last one reaches all that was known."""
    order = {each.operation_id: place for place, each in enumerate(end.operations)}
    first_told: dict[str, float] = {}
    for each in records:
        for receipt in each.told:
            name = receipt.operation_id
            first_told[name] = min(first_told.get(name, each.ended), each.ended)
    known = sorted((ended, order.get(name, -1)) for name, ended in first_told.items())
    furthest = list(accumulate((place for _, place in known), max))
    times = [ended for ended, _ in known]
    for each in records:
        if each.verb != "list" or each.outcome != "ok":
            continue
        start = order.get(each.subject, -1) + 1
        places = [order.get(receipt.operation_id, -1) for receipt in each.told]
        if places != list(range(start, start + len(places))):
            yield f"a page with a gap: after {each.subject or 'the beginning'} come the places {places}"
        count = bisect_left(times, each.began)
        if not each.more and count and furthest[count - 1] >= start + len(places):
            yield f"a last page that ends too early: {start + len(places)} of {furthest[count - 1] + 1} known"


def event_of(frame: bytes) -> dict[str, Any]:
    """The event in a frame."""
    event: dict[str, Any] = json.loads(frame.partition(b"\ndata: ")[2])
    return event


def events_are_a_prefix(records: Sequence[Record], end: End) -> Iterator[str]:
    """What a stream gave is a run of the final events, byte for byte; one that ended in order lacks none."""
    for each in records:
        if each.verb != "events":
            continue
        wanted = end.frames.get(each.subject, ())[each.after :]
        if each.frames != wanted[: len(each.frames)]:
            yield f"other events: {each.subject} after {each.after}: {each.frames}, not {wanted}"
        elif each.outcome == "ok" and len(each.frames) != len(wanted):
            yield f"a stream that ends too early: {each.subject} after {each.after}: {each.frames}"
    for shown in end.operations:
        events = [event_of(frame) for frame in end.frames.get(shown.operation_id, ())]
        if [event["sequence"] for event in events] != list(range(1, shown.progress_seq + 1)):
            yield f"a gap in the events: {shown.operation_id} at {shown.progress_seq}: {events}"
        elif events[-1]["to_state"] != shown.state:
            yield f"the last event is not the receipt: {shown.operation_id}, {shown.state}: {events[-1]}"


def everything_ends(records: Sequence[Record], end: End) -> Iterator[str]:
    """No operation is left between."""
    for each in end.operations:
        if each.state not in TERMINAL:
            yield f"never ended: {each.operation_id}, {each.state}"


# Memories


def _contents(records: Iterable[Record]) -> dict[tuple[str, str | None], str]:
    """The content that was submitted under each ID and hash."""
    return {
        (each.subject, each.payload_hash): each.payload["content"]
        for each in records
        if each.verb == "submit" and isinstance(each.payload, dict) and "content" in each.payload
    }


def one_memory_an_operation(records: Sequence[Record], end: End) -> Iterator[str]:
    """A committed memory operation has one memory of exactly its content, and any other has none."""
    contents = _contents(records)
    made: dict[str, list[Found]] = defaultdict(list)
    for memory in end.memories:
        made[memory.operation_id].append(memory)
    for each in end.operations:
        own = made.pop(each.operation_id, [])
        keys, wanted = [memory.key for memory in own], [] if each.memory is None else [each.memory]
        if keys != wanted:
            yield f"not its memory: {each.operation_id} is {each.state} and has {keys}, not {wanted}"
        for memory in own:
            if memory.text != contents.get((each.operation_id, each.payload_hash)):
                yield f"another content: {memory.key} of {each.operation_id}: {memory.text!r}"
    yield from (f"a memory of nobody: {name}" for name in made)


def memories_stay(records: Sequence[Record], end: End) -> Iterator[str]:
    """Once a receipt has named a memory it is always found, whole, and by its own words."""
    whole = {memory.key: memory for memory in end.memories}
    named: dict[str, float] = {}
    for each in records:
        for key in filter(None, (receipt.memory for receipt in each.told)):
            named[key] = min(named.get(key, each.ended), each.ended)
    for each in records:
        if each.verb == "memory":
            if each.status == 404 and named.get(each.subject, each.began) < each.began:
                yield f"a memory is not found any more: {each.subject}"
            for found in each.found:
                if whole.get(found.key) != found:
                    yield f"another memory: {each.subject}: {found}"
        elif each.verb == "recall":
            yield from _recalled(each, whole, named)


def _recalled(record: Record, whole: Mapping[str, Found], named: Mapping[str, float]) -> Iterator[str]:
    for found in record.found:
        memory = whole.get(found.key)
        if memory is None or memory.operation_id != found.operation_id:
            yield f"recalled what is not there: {found}"
        elif memory.text.encode()[found.start : found.end].decode() != found.text:
            yield f"recalled other words: {found}"
    if record.outcome == "ok":
        keys = {found.key for found in record.found}
        for key, memory in whole.items():
            meant = memory.text == record.subject and named.get(key, record.ended) < record.began
            if meant and key not in keys:
                yield f"not recalled by its own words: {key}, {record.subject!r}"


def _by_operation(records: Iterable[Record]) -> dict[str, list[Told]]:
    shown: dict[str, list[Told]] = defaultdict(list)
    for each in records:
        for receipt in each.told:
            shown[receipt.operation_id].append(receipt)
    return shown


RULES: Final = (
    acknowledged_is_present,
    refused_is_absent,
    one_hash_is_accepted,
    nothing_is_there_that_nobody_sent,
    new_only_once,
    nothing_goes_back,
    pages_are_runs_of_the_whole,
    events_are_a_prefix,
    everything_ends,
    one_memory_an_operation,
    memories_stay,
)
