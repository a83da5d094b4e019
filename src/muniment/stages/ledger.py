"""Ledger: the only writer of events and states; one command is one atomic step.

``handle`` decides with the pure functions of ``core`` on rows of the open transaction and appends at most
one unit for the operation (and, where a rejection carries over to dependants, one for each of them). A
command that does not hold any more (another one got there first) changes nothing and says where the
operation stands.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from muniment.core import commitment, dependencies, identity, lifecycle, receipts, replay, tasks
from muniment.core.lifecycle import Fact
from muniment.core.planning import model_digest
from muniment.core.tables import Row
from muniment.errors import Conflict, InvalidField, InvariantBroken
from muniment.model import command, journal
from muniment.model.operation import TERMINAL, Kind, State
from muniment.model.times import parse_rfc3339
from muniment.ports.ledger import HeldRows, Rows

STORE = 0
"""The operation number under which store-wide evidence stands."""
_FIRST = journal.At(lifecycle.step(None, Fact.SUBMITTED), 1)


def handle(rows: Rows, asked: command.Command) -> Any:
    """Carry out one command in the open transaction and return its reply."""
    match asked:
        case command.Accept():
            return _accept(rows, asked)
        case command.Advance() | command.AdvanceAll():
            return _advance_each(rows, asked)
        case command.Apply():
            return _apply(rows, asked)
        case command.SavePlan():
            return _save_plan(rows, asked)
        case command.SaveParts():
            return _save_parts(rows, asked)
        case command.CommitMemory():
            return _commit_memory(rows, asked)
        case command.RecordExit():
            return _record_exit(rows, asked)
        case command.Refuse():
            return _refuse(rows, asked)
        case command.ReserveGeneration():
            return _reserve_generation(rows, asked)
        case command.Observe():
            return _observe(rows, asked)
        case command.Probe():
            return rows.probe(asked.now)


def begin(rows: Rows, *, lineage: str, now: int) -> None:
    """Write the first units of a new history: its lineage and the local account."""
    rows.append(journal.Genesis(at=now, lineage=lineage), {})
    rows.append(journal.Account(at=now, n=rows.next_number("account"), key=identity.LOCAL_ACCOUNT), {})


# Accept


def _accept(rows: Rows, asked: command.Accept) -> command.Admitted:
    stored = rows.find_operation(asked.account, asked.operation_id)
    if stored is not None:
        if stored["payload_hash"] != asked.payload_hash:
            raise Conflict(asked.operation_id, stored["payload_hash"])
        return command.Admitted(receipt=_receipt(rows, stored), created=False)
    if asked.invalid is not None:
        raise InvalidField(*asked.invalid)
    _check_cycle(rows, asked)
    unit = journal.Accept(
        at=asked.now,
        n=rows.next_number("operation"),
        account=asked.account,
        id=asked.operation_id,
        kind=asked.kind,
        payload_hash=asked.payload_hash,
        dependencies=tuple((each, _is_committed(rows, asked.account, each)) for each in asked.dependencies),
        object=rows.next_number("attribute"),
        content=None if asked.content is None else _held(asked.content_salt, asked.content),
        attributes=_held(asked.attributes_salt, asked.attributes),
        to=_FIRST,
    )
    held: dict[tuple[str, tuple[Any, ...]], Row] = {
        ("attribute", (unit.object,)): {"salt": asked.attributes_salt, "bytes": asked.attributes}
    }
    if asked.content is not None:
        held["payload", (unit.object,)] = {"salt": asked.content_salt, "bytes": asked.content}
    rows.append(unit, held)
    return command.Admitted(receipt=receipts.accepted(unit), created=True)


def _held(salt: bytes, data: bytes) -> journal.Held:
    return journal.Held(byte_count=len(data), digest=replay.salted(salt, data))


def _receipt(rows: Rows, row: Row) -> Any:
    return receipts.receipt(row, rows.dependencies(row["n"]))


def _is_committed(rows: Rows, account: int, operation_id: str) -> bool:
    row = rows.find_operation(account, operation_id)
    return row is not None and row["state"] == State.COMMITTED


def _check_cycle(rows: Rows, asked: command.Accept) -> None:
    """A new operation closes a cycle only if something stored depends on it already."""
    if not asked.dependencies or not rows.has_dependents(asked.account, asked.operation_id):
        return

    def dependencies_of(operation_id: str) -> list[str]:
        row = rows.find_operation(asked.account, operation_id)
        if row is None or row["state"] in TERMINAL:  # What has ended waits for nothing.
            return []
        return [each["depends_on"] for each in rows.dependencies(row["n"])]

    if dependencies.closes_cycle(asked.operation_id, asked.dependencies, dependencies_of):
        raise InvalidField("dependencies", f"operation '{asked.operation_id}' would wait for itself")


# Steps of an accepted operation


def _stands(row: Row) -> journal.At:
    return journal.At(State(row["state"]), row["progress_seq"])


def _snapshot(row: Row, **changed: Any) -> journal.Snapshot:
    now = journal.Snapshot(
        generation=row["executor_generation"],
        progress_seq=row["executor_progress_seq"],
        exit_count=row["executor_exit_count"],
        last_exit=row["executor_last_exit"],
        error=row["executor_error"],
    )
    return msgspec.structs.replace(now, **changed) if changed else now


def _moves(
    row: Row, facts: Sequence[Fact], details: Mapping[State, Any]
) -> tuple[journal.At, tuple[journal.Moved, ...]]:
    transitions = lifecycle.walk(State(row["state"]), row["progress_seq"], facts)
    events = tuple(
        journal.Moved(each.sequence, each.from_state, each.to_state, details.get(each.to_state))
        for each in transitions
    )
    last = transitions[-1] if transitions else None
    return (journal.At(last.to_state, last.sequence) if last else _stands(row)), events


def _at(row: Row, now: int) -> int:
    """Times of one operation never decrease, whatever the clock does."""
    return max(now, int(row["updated_us"]))


def _load(rows: Rows, n: int) -> Row:
    row = rows.operation(n)
    if row is None:
        raise InvariantBroken(f"operation {n} does not exist")
    return row


def _standing(n: int, state: State | str) -> command.Standing:
    return command.Standing(n=n, state=State(state))


def _rejected_dependency(rows: Rows, row: Row, named: Sequence[Row]) -> str | None:
    for dependency in named:
        if not dependency["met"]:
            found = rows.find_operation(row["account_n"], dependency["depends_on"])
            if found is not None and found["state"] == State.REJECTED:
                return str(dependency["depends_on"])
    return None


def _advance_each(
    rows: Rows, asked: command.Advance | command.AdvanceAll
) -> command.Standing | tuple[command.Standing, ...]:
    if isinstance(asked, command.Advance):
        return _advance(rows, asked)
    return tuple([_advance(rows, command.Advance(n=n, now=asked.now)) for n in asked.numbers])


def _advance(rows: Rows, asked: command.Advance) -> command.Standing:
    row = _load(rows, asked.n)
    if row["state"] != State.ACCEPTED:
        return _standing(asked.n, row["state"])
    named = rows.dependencies(asked.n)
    rejected = _rejected_dependency(rows, row, named)
    if rejected is not None:
        facts = [Fact.PAYLOAD_VALID, Fact.DEPENDENCY_REJECTED]
        return _reject(rows, row, facts, *_for_dependency(rejected), now=asked.now)
    open_ids = dependencies.blocked_by((each["depends_on"], each["met"]) for each in named)
    facts = [Fact.PAYLOAD_VALID, Fact.DEPENDENCY_OPEN] if open_ids else [Fact.PAYLOAD_VALID]
    detail = {State.BLOCKED: {"reason": "dependencies_not_committed", "blocked_by": list(open_ids)}}
    to, events = _moves(row, facts, detail)
    rows.append(
        journal.Advance(
            at=_at(row, asked.now), n=asked.n, was=_stands(row), to=to, events=events, executor=_snapshot(row)
        ),
        {},
    )
    return _standing(asked.n, to.state)


# Rejection, which carries over to dependants


def _for_dependency(operation_id: str) -> tuple[str, Any]:
    return (
        f"dependency '{operation_id}' was rejected",
        {"outcome": "rejected", "reason": "dependency_rejected", "dependency": operation_id},
    )


def _reject(
    rows: Rows, row: Row, facts: Sequence[Fact], error: str, result: Any, *, now: int
) -> command.Standing:
    _append_rejection(rows, row, facts, error, result, now)
    fallen = [row]
    while fallen:
        cause = fallen.pop()
        for n in rows.unsettled_dependents(cause["account_n"], cause["id"]):
            dependant = _load(rows, n)
            if dependant["state"] == State.BLOCKED:
                _append_rejection(
                    rows, dependant, [Fact.DEPENDENCY_REJECTED], *_for_dependency(cause["id"]), now
                )
                fallen.append(dependant)
    return _standing(row["n"], State.REJECTED)


def _append_rejection(rows: Rows, row: Row, facts: Sequence[Fact], error: str, result: Any, now: int) -> None:
    to, events = _moves(row, facts, {State.REJECTED: result})
    rows.append(
        journal.Reject(
            at=_at(row, now),
            n=row["n"],
            was=_stands(row),
            to=to,
            events=events,
            executor=_snapshot(row),
            error=error,
            result=result,
        ),
        {},
    )


def _refuse(rows: Rows, asked: command.Refuse) -> command.Standing:
    row = _load(rows, asked.n)
    if row["state"] in TERMINAL:
        return _standing(asked.n, row["state"])
    facts = [Fact.REFUSED] if row["state"] != State.ACCEPTED else [Fact.PAYLOAD_VALID, Fact.REFUSED]
    return _reject(rows, row, facts, asked.error, asked.result, now=asked.now)


# Plan, parts, memory


def _save_plan(rows: Rows, asked: command.SavePlan) -> int | None:
    row = _load(rows, asked.n)
    stored = rows.active_plan(row["object_n"])
    if stored is not None:
        return int(
            stored["n"]
        )  # The first plan that was persisted is the plan; a later one is not looked at.
    if State(row["state"]) not in (State.VALIDATED, State.BLOCKED) or row["kind"] != Kind.ADD_MEMORY:
        return None
    if asked.generation < row["executor_generation"] or _waits(rows.dependencies(asked.n)):
        return None
    model_n = _model(rows, asked)
    first = row["executor_progress_seq"]
    to, events = _moves(
        row,
        [Fact.PARTS_PLANNED, Fact.EXECUTOR_STARTED],
        {
            State.PLANNED: {"parts": len(asked.parts), "token_count": asked.token_count},
            State.PROCESSING: {"executor_generation": asked.generation},
        },
    )
    unit = journal.Plan(
        at=_at(row, asked.now),
        n=asked.n,
        was=_stands(row),
        to=to,
        events=events,
        executor=_snapshot(row, generation=asked.generation, progress_seq=first + 2, error=None),
        evidence=(
            journal.Witness(first + 1, "start", asked.generation, None),
            journal.Witness(first + 2, "plan", asked.generation, f"{len(asked.parts)} parts"),
        ),
        plan=rows.next_number("plan"),
        object=row["object_n"],
        model=model_n,
        profile=asked.profile,
        token_count=asked.token_count,
        parts=tuple(
            journal.Part(part.token_start, part.token_end, part.byte_start, part.byte_end, digest)
            for part, digest in zip(asked.parts, asked.part_digests, strict=True)
        ),
    )
    rows.append(unit, {})
    return unit.plan


def _waits(named: Sequence[Row]) -> bool:
    return any(not each["met"] for each in named)


def _model(rows: Rows, asked: command.SavePlan) -> int:
    digest = model_digest(asked.model)
    known = rows.find_model(digest)
    if known is not None:
        return int(known["n"])
    n = rows.next_number("model")
    rows.append(
        journal.Model(at=asked.now, n=n, digest=digest, identity=msgspec.to_builtins(asked.model)), {}
    )
    return n


def _save_parts(rows: Rows, asked: command.SaveParts) -> command.Standing:
    row = _load(rows, asked.n)
    plan = rows.active_plan(row["object_n"])
    if row["state"] != State.PROCESSING or plan is None or plan["n"] != asked.plan:
        return _standing(asked.n, row["state"])
    if asked.generation < row["executor_generation"]:
        # A late frame of an older generation changes nothing (ADR 0008).
        return command.Standing(n=asked.n, state=State(row["state"]), fenced=True)
    model, payload = rows.model(plan["model_n"]), rows.payload(row["object_n"])
    if model is None or payload is None or model["digest"] != asked.model_digest:
        raise InvariantBroken(f"operation {asked.n}: vectors and plan do not belong to one model")
    fresh = [(index, data) for index, data in asked.vectors if _is_planned(rows, asked.plan, index)]
    if not fresh:
        return _standing(asked.n, row["state"])
    lifecycle.step(State.PROCESSING, Fact.PART_INDEXED)  # No event: the state stays until all are.
    first, evidence = row["executor_progress_seq"], []
    if asked.generation != row["executor_generation"]:
        first += 1
        evidence.append(journal.Witness(first, "restart", asked.generation, None))
    first += 1
    evidence.append(journal.Witness(first, "progress", asked.generation, f"{len(fresh)} parts"))
    salt: bytes = payload["salt"]
    unit = journal.Parts(
        at=_at(row, asked.now),
        n=asked.n,
        was=_stands(row),
        to=_stands(row),
        executor=_snapshot(row, generation=asked.generation, progress_seq=first, error=None),
        evidence=tuple(evidence),
        plan=asked.plan,
        vectors=tuple((index, replay.salted(salt, data)) for index, data in fresh),
    )
    rows.append(unit, {("vector", (asked.plan, index)): {"bytes": data} for index, data in fresh})
    return _standing(asked.n, row["state"])


def _is_planned(rows: Rows, plan: int, index: int) -> bool:
    part = rows.part(plan, index)
    return part is not None and part["embedding_state"] == "planned"


def _commit_memory(rows: Rows, asked: command.CommitMemory) -> command.Standing:
    row = _load(rows, asked.n)
    if row["state"] != State.PROCESSING:
        return _standing(asked.n, row["state"])
    plan, payload = rows.active_plan(row["object_n"]), rows.payload(row["object_n"])
    model = None if plan is None else rows.model(plan["model_n"])
    if plan is None or payload is None or model is None:
        raise InvariantBroken(f"operation {asked.n} is processing without plan, payload or model")
    problem = commitment.broken(
        plan,
        rows.parts(plan["n"]),
        {vector["part_index"]: vector for vector in rows.vectors(plan["n"])},
        salt=payload["salt"],
        content=payload["bytes"],
        dimensions=msgspec.json.decode(model["identity"])["dimensions"],
    )
    if problem is not None:
        raise InvariantBroken(f"operation {asked.n} must not commit: {problem}")
    attributes = _attributes(rows, row)
    memory = _memory(rows, row, plan, attributes)
    progress = row["executor_progress_seq"] + 1
    to, events = _moves(
        row, [Fact.ALL_PARTS_INDEXED, Fact.EFFECT_COMMITTED], {State.COMMITTED: {"outcome": "committed"}}
    )
    unit = journal.Commit(
        at=_at(row, asked.now),
        n=asked.n,
        was=_stands(row),
        to=to,
        events=events,
        executor=_snapshot(row, progress_seq=progress),
        evidence=(journal.Witness(progress, "completion", row["executor_generation"], None),),
        account=row["account_n"],
        id=row["id"],
        result={"id": memory.key, "parts": plan["part_count"], "token_count": plan["token_count"]},
        memory=memory,
    )
    text = {
        "owner": attributes.get("user_id"),
        "agent": attributes.get("agent_id"),
        "session": attributes.get("session_id"),
        "speaker": attributes.get("speaker"),
    }
    rows.append(unit, {("memory", (memory.object,)): text})
    return _standing(asked.n, to.state)


def _attributes(rows: Rows, row: Row) -> dict[str, Any]:
    held = rows.attribute(row["object_n"])
    if held is None:
        raise InvariantBroken(f"operation {row['n']} has no attribute row")
    attributes: dict[str, Any] = msgspec.json.decode(held["bytes"])
    return attributes


def _account_key(rows: Rows, row: Row) -> str:
    account = rows.account(row["account_n"])
    if account is None:
        raise InvariantBroken(f"operation {row['n']} has no account")
    return str(account["key"])


def _memory(rows: Rows, row: Row, plan: Row, attributes: Mapping[str, Any]) -> journal.Memory:
    def moment(name: str) -> int | None:
        text = attributes.get(name)
        return None if text is None else parse_rfc3339(text)

    return journal.Memory(
        object=row["object_n"],
        key=identity.object_key("memory", _account_key(rows, row), row["id"]),
        plan=plan["n"],
        space=None,
        visibility=attributes.get("visibility") or "private",
        submitter=None,
        role=attributes.get("role"),
        session_seq=attributes.get("session_seq"),
        occurred_at=moment("occurred_at"),
        expires_at=moment("expires_at"),
    )


# Task kinds: accept, then the rest in one unit


def _apply(rows: Rows, asked: command.Apply) -> command.Standing:
    row = _load(rows, asked.n)
    state = State(row["state"])
    if state not in (State.ACCEPTED, State.VALIDATED, State.BLOCKED) or row["kind"] == Kind.ADD_MEMORY:
        return _standing(asked.n, state)
    named = rows.dependencies(row["n"])
    rejected = _rejected_dependency(rows, row, named)
    valid = [Fact.PAYLOAD_VALID] if state is State.ACCEPTED else []
    if rejected is not None:
        facts = [*valid, Fact.DEPENDENCY_REJECTED]
        return _reject(rows, row, facts, *_for_dependency(rejected), now=asked.now)
    if _waits(named):
        return _advance(rows, command.Advance(n=asked.n, now=asked.now))
    key = identity.object_key("stream", _account_key(rows, row), row["id"])
    step_key = identity.object_key("step", _account_key(rows, row), row["id"])
    effect = tasks.decide(Kind(row["kind"]), _attributes(rows, row), _View(rows, row), key, step_key)
    if isinstance(effect, tasks.Refused):
        result = {"outcome": "rejected", "reason": effect.reason}
        return _reject(rows, row, [*valid, Fact.REFUSED], effect.error, result, now=asked.now)
    facts = [*valid, Fact.PARTS_PLANNED, Fact.EXECUTOR_STARTED, Fact.ALL_PARTS_INDEXED, Fact.EFFECT_COMMITTED]
    to, events = _moves(row, facts, {State.PLANNED: {"parts": 0}, State.COMMITTED: {"outcome": "committed"}})
    unit = journal.Commit(
        at=_at(row, asked.now),
        n=asked.n,
        was=_stands(row),
        to=to,
        events=events,
        executor=_snapshot(row),
        account=row["account_n"],
        id=row["id"],
        result=effect.result,
        stream=effect.stream,
        step=effect.step,
        completion=effect.completion,
    )
    rows.append(unit, _text_of(effect))
    return _standing(asked.n, to.state)


def _text_of(effect: tasks.Effect) -> HeldRows:
    if effect.stream is not None:
        return {("stream", (effect.stream.object,)): dict(effect.text)}
    if effect.step is not None:
        return {("step", (effect.step.object,)): dict(effect.text)}
    return {}


class _View:
    """What the task rules may look at, read from the open transaction."""

    def __init__(self, rows: Rows, row: Row) -> None:
        self._rows, self._row = rows, row

    @property
    def object(self) -> int:
        return int(self._row["object_n"])

    def streams(self, name: str) -> list[Row]:
        return self._rows.streams(self._row["account_n"], name)

    def stream_name(self, stream_n: int) -> str | None:
        stream = self._rows.stream(stream_n)
        return None if stream is None else stream["name"]

    def steps(self, stream_n: int) -> list[Row]:
        return self._rows.steps(stream_n)

    def find_steps(self, idempotency_key: str) -> list[Row]:
        return self._rows.find_steps(self._row["account_n"], idempotency_key)

    def attributes(self, object_n: int) -> dict[str, Any]:
        held = self._rows.attribute(object_n)
        if held is None:
            raise InvariantBroken(f"object {object_n} has no attribute row")
        attributes: dict[str, Any] = msgspec.json.decode(held["bytes"])
        return attributes


# Executor evidence


def _record_exit(rows: Rows, asked: command.RecordExit) -> command.Standing:
    row = _load(rows, asked.n)
    if row["state"] in TERMINAL or row["state"] == State.ACCEPTED or row["kind"] != Kind.ADD_MEMORY:
        return _standing(asked.n, row["state"])
    if _is_recorded(rows, row, asked):
        return _standing(asked.n, row["state"])
    fact = Fact.EXECUTOR_STALLED if asked.kind == "stall" else Fact.EXECUTOR_EXITED
    lifecycle.step(State(row["state"]), fact)  # Evidence, never a verdict: the state stays.
    sequence = row["executor_progress_seq"] + 1
    if asked.kind == "failure":
        snapshot = _snapshot(row, progress_seq=sequence, error=asked.message)
    else:
        snapshot = _snapshot(
            row,
            generation=max(asked.generation, row["executor_generation"]),
            progress_seq=sequence,
            exit_count=row["executor_exit_count"] + 1,
            last_exit=asked.message,
        )
    rows.append(
        journal.Evidence(
            at=_at(row, asked.now),
            n=asked.n,
            was=_stands(row),
            to=_stands(row),
            executor=snapshot,
            evidence=(journal.Witness(sequence, asked.kind, asked.generation, asked.message),),
        ),
        {},
    )
    return _standing(asked.n, row["state"])


def _is_recorded(rows: Rows, row: Row, asked: command.RecordExit) -> bool:
    """A generation ends once, whatever of the operation was with it and however often it is told.

    A failure that repeats unchanged is no news either.
    """
    if asked.kind == "failure":
        return bool(row["executor_error"] == asked.message)
    return rows.has_seen_end(asked.n, asked.generation)


def _reserve_generation(rows: Rows, asked: command.ReserveGeneration) -> int:
    generation = rows.last_generation() + 1
    witness = journal.Witness(_next_evidence(rows), "reserved", generation, None)
    rows.append(journal.Executor(at=asked.now, witness=witness), {})
    return generation


def _next_evidence(rows: Rows) -> int:
    last = rows.last_evidence(STORE)
    return 1 if last is None else int(last["sequence"]) + 1


def _observe(rows: Rows, asked: command.Observe) -> None:
    witness = journal.Witness(_next_evidence(rows), asked.kind, asked.generation, asked.message)
    rows.append(journal.Executor(at=asked.now, witness=witness), {})
