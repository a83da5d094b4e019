"""What is due: the unfinished operations and what each waits for, as the journal tells (rulings 6, 7).

Pure and deterministic: the same units give the same work in the same order. Memories are due in acceptance
order as far as there is room; task operations when their dependencies are met and it is their turn in every
queue of theirs. An operation does not wait for an earlier one that itself waits for it, else a declared
dependency against the order of a queue would stop both for ever.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from muniment.core.dependencies import turns
from muniment.model import journal
from muniment.model.operation import TERMINAL, Kind, State

Queue = tuple[int, tuple[str, str]]


class Verb(StrEnum):
    """What to do next with an operation."""

    ADVANCE = "advance"
    APPLY = "apply"
    REMEMBER = "remember"


class Work(msgspec.Struct, frozen=True, gc=False):
    """One piece of due work; the operation is busy until ``release``."""

    n: int
    verb: Verb


class Unfinished(msgspec.Struct, kw_only=True, gc=False):
    """One operation that has not ended."""

    n: int
    id: str
    account: int
    kind: Kind
    state: State
    unmet: set[str]
    queues: frozenset[Queue] = frozenset()
    busy: Verb | None = None


class Schedule:
    """All unfinished operations of a store."""

    def __init__(self) -> None:
        self._open: dict[int, Unfinished] = {}
        self._by_id: dict[tuple[int, str], int] = {}
        self._waiting: dict[tuple[int, str], set[int]] = {}
        # An ordered dict finds its first entry at once, however many were taken out before it.
        self._queues: dict[Queue, OrderedDict[int, None]] = {}
        self._fresh: deque[int] = deque()
        self._memories: deque[int] = deque()
        self._touched: dict[Queue, None] = {}
        self._remembering = 0

    def __len__(self) -> int:
        return len(self._open)

    def load(self, operations: Iterable[Unfinished]) -> None:
        """Take over what a store holds at start. The order given does not matter: queues go by acceptance."""
        for operation in sorted(operations, key=lambda each: each.n):
            self._add(operation)

    def observe(self, unit: journal.AnyUnit, attributes: Mapping[str, Any] | None = None) -> None:
        """Follow one unit, in journal order. ``attributes`` are those of an accepted task operation."""
        if isinstance(unit, journal.Accept):
            queues = frozenset((unit.account, turn) for turn in turns(unit.kind, attributes or {}))
            unmet = {depends_on for depends_on, met in unit.dependencies if not met}
            self._add(
                Unfinished(
                    n=unit.n,
                    id=unit.id,
                    account=unit.account,
                    kind=unit.kind,
                    state=unit.to.state,
                    unmet=unmet,
                    queues=queues,
                )
            )
        elif isinstance(unit, journal.Step):
            self._follow(unit)

    def _add(self, operation: Unfinished) -> None:
        self._open[operation.n] = operation
        self._by_id[operation.account, operation.id] = operation.n
        for depends_on in operation.unmet:
            self._waiting.setdefault((operation.account, depends_on), set()).add(operation.n)
        for queue in operation.queues:
            self._queues.setdefault(queue, OrderedDict())[operation.n] = None
        self._touch(operation)
        if self._waiting.get((operation.account, operation.id)) and (operation.unmet or operation.queues):
            # Whoever waits for it waits from now on for all that stands before it, which may let that pass.
            self._touched |= dict.fromkeys(self._queues)
        if operation.state is State.ACCEPTED and (operation.kind is Kind.ADD_MEMORY or operation.unmet):
            self._fresh.append(operation.n)
        self._offer(operation)

    def _follow(self, unit: journal.Step) -> None:
        operation = self._open.get(unit.n)
        if operation is None:
            return
        operation.state = unit.to.state
        if unit.to.state in TERMINAL:
            self._remove(operation, met=unit.to.state is State.COMMITTED)
        elif isinstance(unit, journal.Advance):
            self.release(unit.n)
            self._offer(operation)
            self._touch(operation)  # What it waited for may have been committed while it was busy.

    def _remove(self, operation: Unfinished, *, met: bool) -> None:
        self.release(operation.n)
        del self._open[operation.n]
        del self._by_id[operation.account, operation.id]
        for queue in operation.queues:
            self._queues[queue].pop(operation.n)
            if not self._queues[queue]:
                del self._queues[queue]
        self._touch(operation)
        for depends_on in operation.unmet:
            self._waiting[operation.account, depends_on].discard(operation.n)
        if met:
            for n in sorted(self._waiting.pop((operation.account, operation.id), ())):
                dependant = self._open[n]
                dependant.unmet.discard(operation.id)
                self._offer(dependant)
                self._touch(dependant)

    def _offer(self, operation: Unfinished) -> None:
        """Line a memory up as soon as nothing stands before its plan."""
        if (
            operation.kind is Kind.ADD_MEMORY
            and not operation.unmet
            and operation.state is not State.ACCEPTED
        ):
            self._memories.append(operation.n)

    def release(self, n: int) -> None:
        """The work on an operation has ended, whatever came of it; it may be due again."""
        operation = self._open.get(n)
        if operation is None:
            return
        if operation.busy is Verb.REMEMBER:
            self._remembering -= 1
        operation.busy = None

    def again(self, n: int) -> None:
        """Line an operation up once more, after its work ended without an end of the operation."""
        operation = self._open.get(n)
        if operation is None:
            return
        self.release(n)
        if operation.state is State.ACCEPTED and (operation.kind is Kind.ADD_MEMORY or operation.unmet):
            self._fresh.append(n)
        self._offer(operation)
        self._touch(operation)

    def _touch(self, operation: Unfinished) -> None:
        """Look at its queues next time. Sorted, since the order of a set differs from process to process."""
        self._touched |= dict.fromkeys(sorted(operation.queues))

    def due(self, memories_max: int) -> Iterator[Work]:
        """Hand out all work that is due; each operation is busy until its end or ``again``."""
        while self._fresh:
            operation = self._open.get(self._fresh.popleft())
            if operation is not None and operation.state is State.ACCEPTED and operation.busy is None:
                yield self._start(operation, Verb.ADVANCE)
        touched, self._touched = self._touched, {}
        for queue in touched:
            yield from self._due_in(queue)
        while self._memories and self._remembering < memories_max:
            operation = self._open.get(self._memories.popleft())
            if operation is not None and operation.busy is None:
                yield self._start(operation, Verb.REMEMBER)

    def _start(self, operation: Unfinished, verb: Verb) -> Work:
        operation.busy = verb
        self._remembering += verb is Verb.REMEMBER
        return Work(operation.n, verb)

    def _due_in(self, queue: Queue) -> Iterator[Work]:
        """The first operation of a queue that waits for no dependency, if it is its turn."""
        for n in self._queues.get(queue, ()):
            operation = self._open[n]
            if not operation.unmet:
                if operation.busy is None and self._has_turn(operation):
                    yield self._start(operation, Verb.APPLY)
                return

    def _has_turn(self, operation: Unfinished) -> bool:
        """Whether each earlier one in its queues waits for a dependency, and in the end for this."""
        dependants = self._dependants(operation)
        return all(
            self._open[n].unmet and (n in dependants or self._waits_for(n, operation.n))
            for n in self._earlier(operation)
        )

    def _earlier(self, operation: Unfinished) -> Iterator[int]:
        for queue in operation.queues:
            for n in self._queues[queue]:
                if n == operation.n:
                    break
                yield n

    def _dependants(self, operation: Unfinished) -> set[int]:
        """All that depend on it by declaration, directly or over others."""
        found: set[int] = set()
        stack = [operation]
        while stack:
            each = stack.pop()
            fresh = self._waiting.get((each.account, each.id), set()) - found
            found |= fresh
            stack.extend(self._open[n] for n in fresh)
        return found

    def _waits_for(self, n: int, goal: int) -> bool:
        """Whether ``n`` cannot end before ``goal`` has, by dependencies and by the order of queues."""
        seen, stack = {n}, [n]
        while stack:
            for each in self._before(self._open[stack.pop()]):
                if each == goal:
                    return True
                if each not in seen:
                    seen.add(each)
                    stack.append(each)
        return False

    def _before(self, operation: Unfinished) -> Iterator[int]:
        """Its open dependencies, and the earlier ones of its queues that do not depend on it themselves."""
        for depends_on in operation.unmet:
            n = self._by_id.get((operation.account, depends_on))
            if n is not None:
                yield n
        dependants = self._dependants(operation)
        yield from (n for n in self._earlier(operation) if n not in dependants)
