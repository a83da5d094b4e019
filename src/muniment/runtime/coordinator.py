"""The coordinator drives every unfinished operation to its end, after a start and while the server runs.

It follows the journal and asks ``core.schedule`` what is due. Task operations it carries out itself, so that
they never wait for a model; memories go to ``runtime.ingestion``. Recovery is the same path: what the ledger
holds is loaded, minus what is saved already. Only the ledger decides how an operation ends (ruling 8).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from muniment.core.dependencies import turns
from muniment.core.schedule import Schedule, Unfinished, Verb, Work
from muniment.errors import InvariantBroken, LedgerUnavailable, OutcomeUnknown, StorageFull
from muniment.model import command, journal
from muniment.model.operation import Kind, State
from muniment.ports.clock import Clock
from muniment.ports.ledger import Ledger, Reads, SealedUnit
from muniment.runtime.ingestion import Pipeline

ADVANCES_MAX: Final = 64
"""Most operations of one command, so that a long backlog does not hold up a commit that others wait for."""
RETRY_SECONDS_MIN: Final = 0.25
RETRY_SECONDS_MAX: Final = 60.0

log = structlog.get_logger("coordinator")


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How many memories may be in work at one time."""

    operations_in_flight_max: int
    operations_stuck_max: int


def retry_seconds(failures: int) -> float:
    """Pause before the next try after so many failures in a row: 0.25 s, doubling, at most 60 s."""
    return float(min(RETRY_SECONDS_MIN * 2.0 ** min(failures - 1, 32), RETRY_SECONDS_MAX))


def unfinished(reads: Reads) -> list[Unfinished]:
    """Every operation in no terminal state, in ID order (seed, executor-readiness-and-recovery, step 1)."""
    return [
        Unfinished(
            n=row["n"],
            id=row["id"],
            account=row["account_n"],
            kind=Kind(row["kind"]),
            state=State(row["state"]),
            unmet={each["depends_on"] for each in reads.dependencies(row["n"]) if not each["met"]},
            queues=frozenset(
                (row["account_n"], turn) for turn in turns(Kind(row["kind"]), _attributes(reads, row))
            ),
        )
        for row in reads.unfinished()
    ]


def _attributes(reads: Reads, row: dict[str, Any]) -> dict[str, Any]:
    if row["kind"] == Kind.ADD_MEMORY:
        return {}
    held = reads.attribute(row["object_n"])
    if held is None:
        raise InvariantBroken(f"operation {row['n']} has no attribute row")
    attributes: dict[str, Any] = msgspec.json.decode(held["bytes"])
    return attributes


class Coordinator:
    """One a store, on the event loop."""

    def __init__(
        self,
        ledger: Ledger,
        ingestion: Pipeline,
        clock: Clock,
        room: Room,
        *,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._ledger = ledger
        self._ingestion = ingestion
        self._clock = clock
        self._room = room
        self._on_fatal = on_fatal
        self._schedule = Schedule()
        self._wake = asyncio.Event()
        self._rounds = 0
        self._round_done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fresh: deque[Work] = deque()
        """Operations to be advanced, behind those that are."""
        self._advancing = False
        self._failures: dict[int, int] = {}
        self._begun: dict[int, Work] = {}
        """The last work that was begun on each operation."""
        self._model_checked = asyncio.Event()
        ingestion.on_change = self._wake.set
        ledger.subscribe(self._observe)

    async def recover(self) -> int:
        """Load every unfinished operation, before the first write is accepted; return how many there are."""
        found = await self._ledger.read(unfinished)
        self._schedule.load(found)
        self._wake.set()
        return len(found)

    def model_is_checked(self) -> None:
        """The executor's model is the store's: memories may be planned and embedded."""
        self._model_checked.set()
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for work in self._schedule.due(self._memories_max()):
                    self._begin(work)
                self._rounds += 1
                self._round_done.set()
                self._round_done = asyncio.Event()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._ingestion.stop()

    def _memories_max(self) -> int:
        """Stuck memories take no place from others, up to a bound: beyond it something is wrong for all."""
        if not self._model_checked.is_set():
            return 0
        stuck = min(self._ingestion.stuck(), self._room.operations_stuck_max)
        return self._room.operations_in_flight_max + stuck

    async def ping(self) -> None:
        """Return once the coordinator has gone through one whole round: it works, and is not just there."""
        done = self._round_done
        self._wake.set()
        await done.wait()

    def open_operations(self) -> int:
        """Operations that have not ended."""
        return len(self._schedule)

    def _observe(self, sealed: Sequence[SealedUnit]) -> None:
        for each in sealed:
            attributes = None
            if isinstance(each.unit, journal.Accept) and each.unit.kind is not Kind.ADD_MEMORY:
                attributes = msgspec.json.decode(each.held["attribute", (each.unit.object,)]["bytes"])
            self._schedule.observe(each.unit, attributes)
            if isinstance(each.unit, journal.Commit | journal.Reject):
                self._ingestion.ended(each.unit.n)
                self._begun.pop(each.unit.n, None)
                self._failures.pop(each.unit.n, None)
        self._wake.set()

    # Work on one operation

    def _begin(self, work: Work) -> None:
        self._begun[work.n] = work
        if work.verb is Verb.REMEMBER:
            self._ingestion.admit(work.n)
            return
        if work.verb is Verb.APPLY:
            self._spawn(self._apply(work), f"{work.verb}-{work.n}")
            return
        self._fresh.append(work)
        if not self._advancing:
            self._advancing = True
            self._spawn(self._advance(), "advance")

    def _spawn(self, doing: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(doing, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(error)

    async def _advance(self) -> None:
        """Advance what is fresh, one command at a time: under load, all that came during the last commit."""
        try:
            while self._fresh:
                works = [self._fresh.popleft() for _ in range(min(len(self._fresh), ADVANCES_MAX))]
                numbers = tuple(work.n for work in works)
                await self._written(works, command.AdvanceAll(numbers=numbers, now=self._clock.now_us()))
        finally:
            self._advancing = False

    async def _apply(self, work: Work) -> None:
        await self._written([work], command.Apply(n=work.n, now=self._clock.now_us()))

    async def _written(self, works: Sequence[Work], asked: command.Command) -> None:
        try:
            await self._ledger.write(asked)
        except (StorageFull, LedgerUnavailable) as error:
            for work in works:
                log.warning("operation waits for the ledger", operation=work.n, reason=str(error))
                self._later(work)
        except OutcomeUnknown:
            return  # The ledger has said so itself; the process is about to end.

    def _later(self, work: Work) -> None:
        if self._is_open(work):
            failures = self._failures[work.n] = self._failures.get(work.n, 0) + 1
            asyncio.get_running_loop().call_later(retry_seconds(failures), self._again, work)

    def _again(self, work: Work) -> None:
        if self._is_open(work):
            self._schedule.again(work.n)
            self._wake.set()

    def _is_open(self, work: Work) -> bool:
        """Whether nothing came after this work: else it was carried out, and only its answer was lost."""
        return self._begun.get(work.n) is work
