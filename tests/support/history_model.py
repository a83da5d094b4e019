"""What a ledger promises, written down a second time and much smaller: the model of the ledger machine.

It knows nothing of rows, units or SQL. Given the same commands it says where every operation stands, how many
events and pieces of evidence it has, and what exists in the end.
"""

from typing import Any, Final

import msgspec

from muniment.model.operation import TERMINAL, Kind, State

PAYLOADS: Final[dict[str, tuple[Kind, dict[str, Any]]]] = {
    "m1": (Kind.ADD_MEMORY, {"content": "The first memory of all."}),
    "m2": (Kind.ADD_MEMORY, {"content": "A second one, owned.", "user_id": "ann"}),
    "m3": (Kind.ADD_MEMORY, {"content": "Third.", "session_id": "s", "categories": ["a", "b"]}),
    "m4": (Kind.ADD_MEMORY, {"content": "The first memory of all."}),
    "s1": (Kind.CREATE_TASK_STREAM, {"name": "chores", "description": "at home"}),
    "s2": (Kind.CREATE_TASK_STREAM, {"name": "chores", "description": "abroad"}),
    "a1": (Kind.ADD_TASK_STEP, {"stream_name": "chores", "name": "wash", "idempotency_key": "wash"}),
    "a2": (Kind.ADD_TASK_STEP, {"stream_name": "chores", "name": "dry", "idempotency_key": "wash"}),
    "c1": (Kind.COMPLETE_STEP, {"idempotency_key": "wash", "result": {"ok": True}}),
    "c2": (Kind.COMPLETE_STEP, {"idempotency_key": "wash", "result": None}),
}
"""Every operation of the machine by its ID; a few of them exclude one another."""


class Standing(msgspec.Struct):
    """One operation as the model sees it."""

    n: int
    id: str
    kind: Kind
    dependencies: tuple[str, ...]
    unmet: set[str]
    state: State = State.ACCEPTED
    events: int = 1
    parts: list[bool] | None = None
    """Whether each planned part is indexed; None before the plan."""
    plan: int | None = None
    generation: int = 0
    evidence: int = 0
    exits: int = 0
    ended: set[int] = msgspec.field(default_factory=set)
    """Generations whose end it has seen."""
    failure: int | None = None
    """The generation that failed last, with no progress since."""
    made: bool = False
    """Whether it made an object of its own."""


class HistoryModel:
    """All operations of one store."""

    def __init__(self) -> None:
        self.operations: dict[str, Standing] = {}
        self.plans = 0
        self.generations = 0
        self.description: str | None = None
        self.step: str | None = None
        self.completion: list[Any] = []

    # What a submission meets

    def would_wait_for_itself(self, name: str, dependencies: tuple[str, ...]) -> bool:
        """Whether the new operation is among what its dependencies wait for."""
        seen: set[str] = set()
        pending = list(dependencies)
        while pending:
            each = pending.pop()
            if each == name:
                return True
            known = self.operations.get(each)
            if each not in seen and known is not None and known.state not in TERMINAL:
                pending.extend(known.dependencies)
            seen.add(each)
        return False

    def accept(self, name: str, dependencies: tuple[str, ...]) -> Standing:
        """Take a new operation."""
        unmet = {each for each in dependencies if not self._is(each, State.COMMITTED)}
        found = Standing(
            n=len(self.operations) + 1,
            id=name,
            kind=PAYLOADS[name][0],
            dependencies=dependencies,
            unmet=unmet,
        )
        self.operations[name] = found
        return found

    def _is(self, name: str, state: State) -> bool:
        return name in self.operations and self.operations[name].state is state

    # Steps

    def advance(self, one: Standing) -> None:
        """Validate: blocked by what is open, rejected by what was rejected."""
        if one.state is not State.ACCEPTED:
            return
        self._move(one, State.VALIDATED)
        if any(self._is(each, State.REJECTED) for each in one.unmet):
            self.reject(one)
        elif one.unmet:
            self._move(one, State.BLOCKED)

    def apply(self, one: Standing) -> None:
        """Carry a task operation as far as it comes."""
        waits = one.state in (State.ACCEPTED, State.VALIDATED, State.BLOCKED)
        if one.kind is Kind.ADD_MEMORY or not waits:
            return
        if one.unmet:
            self.advance(one)
            return
        if one.state is State.ACCEPTED:
            self._move(one, State.VALIDATED)
        if not self._takes_effect(one):
            self.reject(one)
            return
        for state in (State.PLANNED, State.PROCESSING, State.INDEXED):
            self._move(one, state)
        self._commit(one)

    def _takes_effect(self, one: Standing) -> bool:
        payload = PAYLOADS[one.id][1]
        if one.kind is Kind.CREATE_TASK_STREAM:
            one.made = self.description is None
            self.description = self.description or payload["description"]
            return bool(self.description == payload["description"])
        if one.kind is Kind.ADD_TASK_STEP:
            if self.description is None:
                return False
            one.made = self.step is None
            self.step = self.step or payload["name"]
            return bool(self.step == payload["name"])
        if self.step is None:
            return False
        self.completion = self.completion or [payload["result"]]
        return bool(self.completion == [payload["result"]])

    def save_plan(self, one: Standing, parts: int, generation: int) -> int | None:
        """Take a plan; return the number of the plan that counts."""
        waits = one.state not in (State.VALIDATED, State.BLOCKED) or one.unmet
        if one.parts is not None or waits or one.kind is not Kind.ADD_MEMORY or generation < one.generation:
            return one.plan
        self.plans += 1
        one.plan, one.parts, one.generation, one.failure = self.plans, [False] * parts, generation, None
        one.evidence += 2
        self._move(one, State.PLANNED)
        self._move(one, State.PROCESSING)
        return one.plan

    def index(self, one: Standing, indexes: tuple[int, ...], generation: int) -> bool:
        """Take vectors; return whether they come from an older generation than it has seen."""
        if one.state is not State.PROCESSING or one.parts is None:
            return False
        if generation < one.generation:
            return True
        fresh = [index for index in indexes if index < len(one.parts) and not one.parts[index]]
        if fresh:
            one.evidence += 2 if generation != one.generation else 1
            one.generation, one.failure = generation, None
            for index in fresh:
                one.parts[index] = True
        return False

    def may_commit(self, one: Standing) -> bool:
        """Whether a commit of a memory would pass the gate."""
        return one.state is not State.PROCESSING or all(one.parts or [False])

    def commit(self, one: Standing) -> None:
        """Commit a memory."""
        if one.state is State.PROCESSING:
            one.evidence += 1
            one.made = True
            self._move(one, State.INDEXED)
            self._commit(one)

    def exit(self, one: Standing, kind: str, generation: int) -> None:
        """Take executor evidence."""
        if one.state in TERMINAL or one.state is State.ACCEPTED or one.kind is not Kind.ADD_MEMORY:
            return
        if generation == one.failure if kind == "failure" else generation in one.ended:
            return  # It is known, and so no news.
        one.evidence += 1
        if kind == "failure":
            one.failure = generation
        else:
            one.exits += 1
            one.ended.add(generation)
            one.generation = max(one.generation, generation)

    def refuse(self, one: Standing) -> None:
        """End as rejected."""
        if one.state in TERMINAL:
            return
        if one.state is State.ACCEPTED:
            self._move(one, State.VALIDATED)
        self.reject(one)

    def reject(self, one: Standing) -> None:
        """Reject, and with it whoever is blocked on it."""
        self._move(one, State.REJECTED)
        for each in self.operations.values():
            if each.state is State.BLOCKED and one.id in each.unmet:
                self.reject(each)

    def _commit(self, one: Standing) -> None:
        self._move(one, State.COMMITTED)
        for each in self.operations.values():
            if each.state not in TERMINAL:  # What has ended keeps the receipt with which it ended.
                each.unmet.discard(one.id)

    @staticmethod
    def _move(one: Standing, state: State) -> None:
        one.state = state
        one.events += 1
