"""The checks of ``muniment certify``, each a function that asks a running server and returns what was seen.

What must hold is decided in ``client.certification``; here is only the asking and the waiting.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from muniment.client import certification as rules
from muniment.client.certification import (
    Check,
    EvidencePage,
    Hit,
    Memory,
    Page,
    Recalled,
    Record,
    RuleBroken,
    expect,
)
from muniment.client.http import MEMORIES, OPERATIONS, RECALL
from muniment.client.probe import Answer, Cut, Probe
from muniment.core import canonical
from muniment.model.operation import Receipt, State

T = TypeVar("T")

OPERATION_SECONDS: Final = 60.0
"""How long a short operation may take to end."""
REPLAYS: Final = 5
QUERY: Final = "a certification of this server"
ANSWERED: Final = (Cut.UNREAD, Cut.FIRST_BYTE, Cut.ALL_BUT_ONE)
"""Cuts at which the server has begun to answer, so that it has carried the request out."""
_FIRST_POLL_SECONDS: Final = 0.005
_LONGEST_POLL_SECONDS: Final = 0.2
_TOLD_SECONDS: Final = 5.0


class Run:
    """One run against one server: fresh names, and the questions that all checks ask.

    ``seconds`` bounds every wait; ``tell`` hears what is waited for; ``data_path`` is where the server's
    process is looked up.
    """

    def __init__(self, probe: Probe, *, seconds: float, data_path: Path, tell: Callable[[str], None]) -> None:
        self.probe = probe
        self.seconds = seconds
        self.data_path = data_path
        self.tell = tell
        self.name = f"certify-{secrets.token_hex(6)}"

    def id(self, name: str) -> str:
        """An operation ID that nobody has used."""
        return f"{self.name}-{name}"

    def memory(self, name: str, *, session: str, dependencies: Sequence[str] = ()) -> dict[str, Any]:
        """The submission of a short memory that says where it comes from."""
        operation_id = self.id(name)
        content = f"A certification of this server left this memory, {operation_id}."
        return rules.memory(operation_id, content, f"{self.name}-{session}", dependencies)

    def submitted(self, body: dict[str, Any]) -> Receipt:
        """Submit for the first time; return the receipt of the 202."""
        answer = self.probe.submit(canonical.encode(body))
        name = body["operation_id"]
        expect(
            answer.status == 202,
            f"expected 202 for the new {name}, saw {answer.status}: {rules.shown(answer.body)}",
        )
        receipt = rules.receipt(answer.body)
        rules.of(body, receipt)
        return receipt

    def again(self, body: dict[str, Any]) -> Receipt:
        """Submit once more; return the receipt, new or replayed."""
        answer = self.probe.submit(canonical.encode(body))
        expect(
            answer.status in (200, 202),
            f"expected a receipt for {body['operation_id']} again, saw {answer.status}: "
            f"{rules.shown(answer.body)}",
        )
        receipt = rules.receipt(answer.body)
        rules.of(body, receipt)
        return receipt

    def asked(self, operation_id: str) -> Answer:
        """GET an operation, whatever is answered."""
        return self.probe.get(operation_path(operation_id))

    def receipt(self, operation_id: str) -> Receipt:
        """The receipt of an operation that must be there."""
        answer = self.asked(operation_id)
        expect(
            answer.status == 200,
            f"expected the receipt of {operation_id}, saw {answer.status}: {rules.shown(answer.body)}",
        )
        return rules.receipt(answer.body)

    def waited(
        self, operation_id: str, until: Callable[[Receipt], bool], what: str, seconds: float
    ) -> Receipt:
        """Ask for the receipt until it is as wanted. Receipts that go back in between break a rule."""
        seconds = min(seconds, self.seconds)
        last = self.receipt(operation_id)
        for pause in polls(seconds, self.tell, f"{operation_id} to be {what}"):
            if until(last):
                return last
            time.sleep(pause)
            newest = self.receipt(operation_id)
            rules.same_operation(last, newest)
            last = newest
        raise RuleBroken(
            f"{operation_id} is {last.state}, not {what}, after {seconds:g} seconds "
            f"(executor_error {last.executor_error!r})",
            "this proves nothing about the write; see `An operation does not end` in docs/operating.md, or "
            "give a longer --timeout",
        )

    def ended(self, operation_id: str, state: State, seconds: float = OPERATION_SECONDS) -> Receipt:
        """The terminal receipt, which must be the one of ``state``."""
        receipt = self.waited(operation_id, rules.ended, "terminal", seconds)
        expect(
            receipt.state is state,
            f"expected {operation_id} to be {state.value}, and it was {receipt.state}: {receipt.error}",
        )
        return receipt

    def committed(self, operation_id: str, seconds: float = OPERATION_SECONDS) -> Receipt:
        """The receipt, once it is committed."""
        return self.ended(operation_id, State.COMMITTED, seconds)

    @property
    def stream_seconds(self) -> float:
        """How long the stream of a short operation may last."""
        return min(OPERATION_SECONDS, self.seconds)

    def replay(
        self, operation_id: str, *, after: int | None = None, last_event_id: int | None = None
    ) -> bytes:
        """A whole event stream, which must end by itself."""
        return self.probe.stream(
            events_path(operation_id),
            after=after,
            last_event_id=last_event_id,
            seconds=self.stream_seconds,
        )

    def found(self, kind: type[T], path: str, what: str, **params: Any) -> T:
        """The object behind a path that must be there."""
        return self._read(self.probe.get(path, **params), kind, what)

    def evidence(self, operation_id: str, after: int = 0) -> list[Record]:
        """All evidence of an operation after a sequence."""
        path, what = operation_path(operation_id) + "/evidence", f"evidence of {operation_id}"
        found: list[Record] = []
        place: int | None = after
        while place is not None:
            page = self.found(EvidencePage, path, what, after=place)
            found += page.evidence
            place = page.next
        return found

    def kept(self, receipt: Receipt) -> Memory:
        """The memory that a committed operation made."""
        return self.found(Memory, f"{MEMORIES}/{rules.key(receipt)}", f"the memory of {receipt.operation_id}")

    def recalled(self, query: str, session: str) -> tuple[Hit, ...]:
        """What recall finds in one session of this run."""
        asked = {"query": query, "session_id": f"{self.name}-{session}", "user_id": rules.OWNER}
        return self._read(self.probe.post(RECALL, canonical.encode(asked)), Recalled, "recall").results

    @staticmethod
    def _read(answer: Answer, kind: type[T], what: str) -> T:
        expect(
            answer.status == 200, f"expected 200 for {what}, saw {answer.status}: {rules.shown(answer.body)}"
        )
        return rules.decoded(answer.body, kind, what)

    def accepted_since(self, marker: str) -> Iterator[Receipt]:
        """Every operation that was accepted after ``marker``."""
        place: str | None = marker
        while place is not None:
            page = self.found(Page, OPERATIONS, "a list of operations", after=place)
            yield from page.operations
            place = page.next


def operation_path(operation_id: str) -> str:
    """The path of an operation of a run, whose IDs need no more than this."""
    return f"{OPERATIONS}/{quote(operation_id, safe='')}"


def events_path(operation_id: str) -> str:
    """The path of its event stream."""
    return operation_path(operation_id) + "/events"


def polls(seconds: float, tell: Callable[[str], None], what: str) -> Iterator[float]:
    """Yield pauses that grow, until the time is over; tell every few seconds what is waited for."""
    began = told = time.monotonic()
    pause = _FIRST_POLL_SECONDS
    while (now := time.monotonic()) < began + seconds:
        if now > told + _TOLD_SECONDS:
            tell(f"waiting for {what}, {now - began:.0f} of at most {seconds:g} seconds")
            told = now
        yield pause
        pause = min(_LONGEST_POLL_SECONDS, pause * 1.3)


def health(run: Run) -> str:
    """The process answers."""
    answer = run.probe.get("/health")
    return rules.health(answer.status, answer.body)


def readiness(run: Run) -> str:
    """Writes are accepted, and search comes up within the time that is given."""
    began = time.monotonic()
    seen: dict[str, Any] | None = None
    for pause in polls(run.seconds, run.tell, "readiness"):
        answer = run.probe.get("/ready")
        newest = rules.readiness(answer.status, answer.body)
        if newest["search_ready"]:
            return f"ready for writes and search after {time.monotonic() - began:.1f} s"
        if newest != seen:
            run.tell(f"waiting for {rules.missing(newest)}")
        seen = newest
        time.sleep(pause)
    lacking = "unknown" if seen is None else rules.missing(seen)
    raise RuleBroken(f"not ready after {run.seconds:g} seconds; missing: {lacking}")


def response_loss(run: Run) -> str:
    """A submission whose answer is lost is there once, whatever the client did not hear."""
    marker = run.submitted(rules.task_stream(run.id("marker"), run.id("marker"), "Where a run began."))
    bodies = {cut: run.memory(f"lost-{number}", session="lost") for number, cut in enumerate(Cut)}
    for cut, body in bodies.items():
        _lose(run, cut, body)
    committed = [run.committed(body["operation_id"]) for body in bodies.values()]
    for body, receipt in zip(bodies.values(), committed, strict=True):
        rules.same_operation(receipt, run.again(body))
    listed = run.accepted_since(marker.operation_id)
    rules.once_each([body["payload_hash"] for body in bodies.values()], listed)
    keys = [rules.key(receipt) for receipt in committed]
    rules.exactly(keys, run.recalled(QUERY, "lost"), "answers that were lost")
    return f"{len(bodies)} cuts, {len(committed)} operations, {len(keys)} memories"


def _lose(run: Run, cut: Cut, body: dict[str, Any]) -> None:
    """Cut a first submission, ask by ID, submit again: one operation, whatever had arrived."""
    name = body["operation_id"]
    run.probe.submit_and_cut(canonical.encode(body), cut)
    asked = run.asked(name)
    if asked.status == 404:
        expect(cut not in ANSWERED, f"{name} is not there, and what was read is: {cut.value}")
        run.again(body)
        return
    expect(asked.status == 200, f"expected a receipt or 404 for {name}, saw {asked.status}")
    expect(cut is not Cut.HALF_SENT, f"{name} was stored from half of its request")
    before = rules.receipt(asked.body)
    rules.of(body, before)
    rules.same_operation(before, run.again(body))


def exact_replay(run: Run) -> str:
    """202 once, then 200 with the stored receipt, while the operation moves and when it has ended."""
    body = run.memory("replayed", session="replay")
    last = run.submitted(body)
    for _ in range(REPLAYS):
        last = _replayed(run, body, canonical.encode(body), last)
    last = run.committed(body["operation_id"])
    spellings = (canonical.encode(body), rules.respelled(body))
    for data in spellings:
        last = _replayed(run, body, data, last)
    return f"202, then {REPLAYS + len(spellings)} times 200 with the stored receipt"


def _replayed(run: Run, body: dict[str, Any], data: bytes, last: Receipt) -> Receipt:
    """Replay between two looks at the receipt: where these are equal, the replay is equal to them."""
    name = body["operation_id"]
    before = run.receipt(name)
    answer = run.probe.submit(data)
    expect(
        answer.status == 200,
        f"expected 200 for the same {name} again, saw {answer.status}: {rules.shown(answer.body)}",
    )
    replayed = rules.receipt(answer.body)
    after = run.receipt(name)
    rules.of(body, replayed)
    rules.same_operation(last, replayed)
    rules.same_operation(replayed, after)
    if before == after:
        rules.equal(before, replayed, "a replay is not the stored receipt")
    return replayed


def hash_conflict(run: Run) -> str:
    """Other content under a known ID is 409 and changes nothing; a hash that is false stores nothing."""
    body = run.memory("held", session="conflict")
    name, stored = body["operation_id"], body["payload_hash"]
    run.submitted(body)
    before = run.committed(name)
    other = rules.memory(name, "Other content under the same ID.", body["payload"]["session_id"])
    answer = run.probe.submit(canonical.encode(other))
    text = rules.error_text(answer.status, answer.body, 409, "other content under a known ID")
    expect(name in text and stored in text, f"the 409 does not name the ID and the hash that it has: {text}")
    answer = run.probe.submit(canonical.encode(other | {"payload_hash": stored}))
    rules.error_text(answer.status, answer.body, 400, "other content with the hash of the first")
    rules.equal(before, run.receipt(name), "a conflict changed the receipt")
    false = run.memory("false", session="conflict") | {"payload_hash": stored}
    answer = run.probe.submit(canonical.encode(false))
    rules.error_text(answer.status, answer.body, 400, "a hash that is not the payload's")
    asked = run.asked(false["operation_id"])
    rules.error_text(asked.status, asked.body, 404, "an operation that was refused")
    rules.exactly([rules.key(before)], run.recalled(QUERY, "conflict"), "conflicts")
    return "409 and 400, the receipt untouched; a false hash 400, nothing stored"


def terminal_receipt(run: Run) -> str:
    """The receipt of a committed operation is its last event, stays as it is, and leads to the memory."""
    body = run.memory("kept", session="receipt")
    name = body["operation_id"]
    run.submitted(body)
    receipt = run.committed(name)
    found = rules.events(run.replay(name), name)
    rules.told_by_last_event(receipt, found)
    rules.whole_memory(run.kept(receipt), body["payload"]["content"])
    rules.exactly([rules.key(receipt)], run.recalled(QUERY, "receipt"), "one committed memory")
    rules.equal(receipt, run.again(body), "a replay of a terminal operation")
    rules.equal(receipt, run.receipt(name), "a terminal receipt after a replay")
    return f"committed at event {receipt.progress_seq}, the same receipt by GET and POST, one memory"


def sse_resume(run: Run) -> str:
    """Whatever event a stream was cut after, its rest comes on resuming: no gap, nothing twice."""
    first = run.id("first")
    late = run.memory("late", session="resume", dependencies=[first])
    name = late["operation_id"]
    run.submitted(late)
    run.waited(name, lambda receipt: receipt.state is State.BLOCKED, "blocked", OPERATION_SECONDS)
    live = run.probe.stream_cut(events_path(name), 3, 0, seconds=run.stream_seconds)
    run.submitted(rules.task_stream(first, first, "What the late one waited for."))
    rest = run.replay(name, last_event_id=rules.frames(live)[-1][0])
    uncut = run.replay(name)
    count = len(rules.events(uncut, name))
    rules.union([live, rest], uncut, "a live stream that was cut and resumed")
    for event in range(count + 1):
        had = b"".join(frame for _, frame in rules.frames(uncut)[:event])
        what = f"resumed after event {event} of {count}"
        rules.union([had, run.replay(name, after=event)], uncut, f"{what} with ?after=")
        rules.union([had, run.replay(name, last_event_id=event)], uncut, f"{what} with Last-Event-ID")
    torn = rules.whole(run.probe.stream_cut(events_path(name), 2, 20, seconds=run.stream_seconds))
    rules.union([torn, run.replay(name, after=2)], uncut, "cut in the middle of an event")
    return f"{count} events, cut after each, in the middle of one, and live; each stream ends by itself"


def dependency(run: Run) -> str:
    """An operation waits for what it depends on, says for what, and goes on when that is committed."""
    needed = run.memory("needed", session="order")["operation_id"]
    waiting = run.memory("waiting", session="order", dependencies=[needed])
    name = waiting["operation_id"]
    run.submitted(waiting)
    blocked = run.waited(
        name,
        lambda receipt: receipt.state not in (State.ACCEPTED, State.VALIDATED),
        "blocked",
        OPERATION_SECONDS,
    )
    expect(
        (blocked.state, blocked.blocked_by) == (State.BLOCKED, (needed,)),
        f"expected {name} to be blocked by {needed}, saw {blocked.state}, blocked_by {blocked.blocked_by}",
    )
    run.submitted(run.memory("needed", session="order"))
    run.committed(needed)
    released = run.committed(name)
    expect(released.blocked_by == (), f"{name} is committed and blocked by {released.blocked_by}")
    planned = rules.passed(rules.events(run.replay(name), name), State.PLANNED)
    met = rules.passed(rules.events(run.replay(needed), needed), State.COMMITTED)
    expect(
        met.occurred_at <= planned.occurred_at,
        f"{name} was planned at {planned.occurred_at}, and {needed} committed at {met.occurred_at}, later",
    )
    return "blocked by name, planned after its dependency was committed"


def rejected(run: Run) -> str:
    """A refusal is an outcome: terminal, with its reason, and read back for ever."""
    stream = rules.task_stream(run.id("stream"), run.id("stream"), "The first description.")
    refused = rules.task_stream(run.id("refused"), run.id("stream"), "Another description of one name.")
    name = refused["operation_id"]
    run.submitted(stream)
    run.committed(stream["operation_id"])
    run.submitted(refused)
    receipt = run.ended(name, State.REJECTED)
    expect(bool(receipt.error), f"{name} is rejected without a reason")
    rules.told_by_last_event(receipt, rules.events(run.replay(name), name))
    rules.equal(receipt, run.again(refused), "a replay of a rejected operation")
    return f"rejected with its reason at event {receipt.progress_seq}, the same by GET and POST"


ALWAYS: Final[tuple[tuple[Check, Callable[[Run], str]], ...]] = (
    (rules.HEALTH, health),
    (rules.READINESS, readiness),
    (rules.RESPONSE_LOSS, response_loss),
    (rules.EXACT_REPLAY, exact_replay),
    (rules.HASH_CONFLICT, hash_conflict),
    (rules.TERMINAL_RECEIPT, terminal_receipt),
    (rules.SSE_RESUME, sse_resume),
    (rules.DEPENDENCY, dependency),
    (rules.REJECTED, rejected),
)
