"""Ingestion: from validated memories to committed ones, through the one child that plans and embeds.

``core.ingestion`` decides what is asked for next; here it is read, asked, saved and committed. A child that
ends, stalls or breaks the protocol becomes evidence of each operation that had something with it, and what
was lost is tried again alone. A ledger that is full or away stops ingestion until it works again; nothing
that was computed is thrown away for it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog

from muniment.core.ingestion import EmbedRequest, Ingestion, Job, Limits, Piece, PlanRequest, Request
from muniment.errors import (
    ExecutorExited,
    ExecutorFailed,
    ExecutorFault,
    ExecutorProtocolBroken,
    ExecutorStalled,
    LedgerUnavailable,
    OutcomeUnknown,
    StorageFull,
)
from muniment.model import command
from muniment.model.operation import TERMINAL, State
from muniment.model.plan import PlannedPart
from muniment.ports.clock import Clock
from muniment.ports.executor import Executor, Planned
from muniment.ports.ledger import Ledger
from muniment.stages import commit, execute, plan

PERSIST_SECONDS_MIN: Final = 0.25
PERSIST_SECONDS_MAX: Final = 5.0
MESSAGE_CHARACTERS_MAX: Final = 2000
PARTS_AHEAD: Final = 512
"""Parts of one memory that are kept loaded; a memory of 200,000 parts is never held as a whole."""
CONTENT_BYTES_KEPT: Final = 32 * 1024 * 1024
"""Sources that are kept for their next request; older ones are read again."""
EVIDENCE_KINDS: Final[dict[type[ExecutorFault], str]] = {
    ExecutorExited: "exit",
    ExecutorStalled: "stall",
    ExecutorProtocolBroken: "protocol",
    ExecutorFailed: "failure",
}

Save = Callable[[], Coroutine[Any, Any, None]]
"""Writes down what the child has answered."""

log = structlog.get_logger("ingestion")


class Pipeline:
    """All memories in work, on the event loop."""

    def __init__(
        self,
        ledger: Ledger,
        executor: Executor,
        clock: Clock,
        limits: Limits,
        *,
        parts_max: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``on_fatal`` hears of bugs; ``on_change`` may be set to hear that something has moved."""
        self._ledger = ledger
        self._executor = executor
        self._clock = clock
        self._parts_max = parts_max
        self._on_fatal = on_fatal
        self.on_change: Callable[[], None] = lambda: None
        self._work = Ingestion(limits)
        self._committing: set[int] = set()
        self._contents = _Contents()
        self._requests = 0
        """With the child."""
        self._saving = 0
        """Answered, on their way into the ledger: as many as may be with the child where that is away."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False

    def stuck(self) -> int:
        """Memories of which everything that is left has failed alone; they take no place from others."""
        return self._work.stuck()

    def in_work(self) -> int:
        """Memories that were taken up and have not ended, stuck ones among them."""
        return len(self._work)

    def stuck_operations(self, limit: int) -> list[int]:
        """The numbers of the first stuck memories."""
        return self._work.stuck_operations(limit)

    def admit(self, n: int) -> None:
        """Take up a memory that waits for nothing. It stays here until it has ended."""
        self._begin(self._admit(n), f"admit-{n}")

    def ended(self, n: int) -> None:
        """The ledger says that the operation has ended."""
        self._work.drop(n)
        self._committing.discard(n)
        self._contents.drop(n)

    async def stop(self) -> None:
        """Cancel what is under way; the ledger knows how far it came."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Tasks

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, OutcomeUnknown):
            return  # The ledger has said so itself; the process is about to end.
        if error is not None:
            self._on_fatal(error)
        else:
            self._pump()
            self.on_change()

    def _pump(self) -> None:
        """Ask for all that can be asked now."""
        if self._stopping:
            return
        for job in self._work.hungry(PARTS_AHEAD // 2):
            self._begin(self._load(job), f"load-{job.n}")
        most = self._executor.requests_max
        while self._requests < most and self._requests + self._saving < 2 * most:
            request = self._work.next(self._clock.monotonic())
            if request is None:
                break
            self._requests += 1
            self._begin(self._ask(request), f"request-{request.operations[0]}")
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock.monotonic()
        moment = self._work.wake_at(now)
        self._timer = (
            None
            if moment is None
            else asyncio.get_running_loop().call_later(max(0.0, moment - now), self._pump)
        )

    async def _persist(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Do something with the ledger, again and again while that is full or away."""
        seconds = PERSIST_SECONDS_MIN
        while True:
            try:
                return await work()
            except (StorageFull, LedgerUnavailable) as error:
                log.warning("ingestion waits for the ledger", reason=str(error))
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, PERSIST_SECONDS_MAX)

    async def _write(self, asked: command.Command) -> Any:
        return await self._persist(lambda: self._ledger.write(asked))

    # One memory

    async def _admit(self, n: int) -> None:
        source = await self._source(n)
        self._take_up(source, isolated=source.exits > 0)

    def _take_up(self, source: plan.Source, *, isolated: bool) -> None:
        if source.plan is None:
            self._work.admit(source.n, len(source.content), isolated=isolated, now=self._clock.monotonic())
        else:
            self._work.resume(source.n, len(source.content), source.plan, isolated=isolated)

    async def _load(self, job: Job) -> None:
        assert job.plan is not None
        chosen, after = job.plan, job.last
        pieces = await self._persist(
            lambda: execute.missing(self._ledger, chosen, after=after, limit=PARTS_AHEAD)
        )
        now = self._clock.monotonic()
        self._work.more(job.n, pieces, complete=len(pieces) < PARTS_AHEAD, now=now)
        self._commit_if_done([job.n])

    def _commit_if_done(self, operations: Iterable[int]) -> None:
        for n in operations:
            job = self._work.job(n)
            if job is not None and job.done and n not in self._committing:
                self._committing.add(n)
                self._begin(self._afresh(n) if job.doubtful else self._commit(n), f"commit-{n}")

    async def _commit(self, n: int) -> None:
        state: State = await self._persist(lambda: commit.commit(n, self._ledger, self._clock))
        if state not in TERMINAL:
            await self._afresh(n)

    async def _afresh(self, n: int) -> None:
        """Ask the ledger how far it came: an answer may have been lost, or fenced by a later generation."""
        self._work.drop(n)
        self._committing.discard(n)
        self._take_up(await self._source(n), isolated=False)

    # One request

    async def _ask(self, request: Request) -> None:
        try:
            save = await (self._plan(request) if isinstance(request, PlanRequest) else self._embed(request))
        except ExecutorFault as fault:
            if self._stopping:
                return
            await self._record(request, fault)
            self._work.lost(request, self._clock.monotonic())
            return
        finally:
            self._requests -= 1
        self._saving += 1
        try:
            self._pump()  # The child has room, and need not wait for the ledger.
            await save()
        finally:
            self._saving -= 1

    async def _sources(self, operations: Iterable[int]) -> dict[int, plan.Source]:
        found = {}
        for n in operations:
            source = self._contents.find(n)
            if source is None:
                source = await self._source(n)
            found[n] = source
        return found

    async def _source(self, n: int) -> plan.Source:
        source: plan.Source = await self._persist(lambda: plan.load(self._ledger, n))
        self._contents.keep(source)
        return source

    async def _plan(self, request: PlanRequest) -> Save:
        sources = await self._sources(request.operations)
        answers = await plan.plan([sources[n] for n in request.operations], self._executor)
        return partial(self._save_plans, request, sources, answers)

    async def _save_plans(
        self, request: PlanRequest, sources: Mapping[int, plan.Source], answers: Sequence[Planned]
    ) -> None:
        saved = await asyncio.gather(
            *(
                self._save_plan(sources[n], answer)
                for n, answer in zip(request.operations, answers, strict=True)
            )
        )
        self._work.succeeded(request)
        now = self._clock.monotonic()
        for n, answer, number in zip(request.operations, answers, saved, strict=True):
            if number is not None:
                pieces = _pieces(answer.parts[:PARTS_AHEAD])
                complete = len(pieces) == len(answer.parts)
                self._work.has_plan(n, number, pieces, complete=complete, now=now)
            elif self._work.job(n) is not None:
                self._begin(self._afresh(n), f"afresh-{n}")

    async def _save_plan(self, source: plan.Source, planned: Planned) -> int | None:
        """The number of the plan; None when the operation has ended, for having too many parts too."""
        try:
            asked = plan.saving(source, planned, parts_max=self._parts_max, now=self._clock.now_us())
        except plan.TooManyParts as error:
            text = str(error)
            await self._persist(
                lambda: commit.refuse(
                    source.n, self._ledger, self._clock, error=text, reason="too_many_parts"
                )
            )
            return None
        number: int | None = await self._write(asked)
        return number

    async def _embed(self, request: EmbedRequest) -> Save:
        sources = await self._sources(request.operations)
        plans = {n: job.plan for n in request.operations if (job := self._work.job(n)) and job.plan}
        embedded = await execute.embed(
            request, {n: source.content for n, source in sources.items()}, self._executor
        )
        return partial(
            self._save_parts, request, execute.saving(request, embedded, plans, now=self._clock.now_us())
        )

    async def _save_parts(self, request: EmbedRequest, commands: Sequence[command.SaveParts]) -> None:
        replies: list[command.Standing] = await asyncio.gather(*(self._write(each) for each in commands))
        self._work.succeeded(request)
        for reply in replies:
            if reply.fenced:
                self._work.doubt(reply.n)
        self._commit_if_done(request.operations)

    async def _record(self, request: Request, fault: ExecutorFault) -> None:
        """The end of a child is evidence of all that was with it; a failure, of what failed alone."""
        if isinstance(fault, ExecutorFailed) and not _is_alone(request):
            return
        kind = EVIDENCE_KINDS[type(fault)]
        message = str(fault)[:MESSAGE_CHARACTERS_MAX]
        await asyncio.gather(
            *(
                self._write(
                    command.RecordExit(
                        n=n, kind=kind, generation=fault.generation, message=message, now=self._clock.now_us()
                    )
                )
                for n in request.operations
            )
        )


def _is_alone(request: Request) -> bool:
    contents = request.operations if isinstance(request, PlanRequest) else request.pieces
    return len(contents) == 1


def _pieces(parts: Iterable[PlannedPart]) -> tuple[Piece, ...]:
    return tuple(
        Piece(index, part.token_end - part.token_start, part.byte_start, part.byte_end)
        for index, part in enumerate(parts)
    )


class _Contents:
    """The sources of the latest requests, within a bound."""

    def __init__(self) -> None:
        self._sources: dict[int, plan.Source] = {}
        self._bytes = 0

    def find(self, n: int) -> plan.Source | None:
        source = self._sources.pop(n, None)
        if source is not None:
            self._sources[n] = source  # The latest used stands last.
        return source

    def keep(self, source: plan.Source) -> None:
        self.drop(source.n)
        self._sources[source.n] = source
        self._bytes += len(source.content)
        while self._bytes > CONTENT_BYTES_KEPT and len(self._sources) > 1:
            self.drop(next(iter(self._sources)))

    def drop(self, n: int) -> None:
        source = self._sources.pop(n, None)
        if source is not None:
            self._bytes -= len(source.content)
