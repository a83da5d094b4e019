"""What the ingesting child is to do next, and what becomes of work that its end took along (ruling 8).

Pure and deterministic: jobs, answers and times go in, requests come out. Parts of many memories share a
request within a token budget; the memory that was served least goes first, so a long one holds no short one
back, and from the parts next in turn those go with it that are about as long, so that little is padded.
Whatever was with the child when that ended is *suspect*: it runs alone, after the healthy work. What fails
alone is tried again ever more rarely; a memory that has nothing else left is *stuck* and takes no place from
others. Nothing here ends an operation.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

RETRY_SECONDS_MIN: Final = 1.0
SUSPECT_WAIT_SECONDS: Final = 5.0
"""Under a steady stream of healthy work, suspects get their turn after this long."""
LOOK_AHEAD: Final = 4
"""So many requests' worth of parts in turn are looked through for those of one length. With 8 instead of 4
the model starts 9 % more rarely; with 1, twice as often."""
PLAN_BYTES_MAX: Final = 64 * 1024
PLAN_TEXTS_MAX: Final = 64


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one request may hold, and how rarely a part that fails alone is tried."""

    batch_tokens_max: int
    retry_seconds_max: float


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part that has no vector yet: its index, its tokens, its byte range in the source."""

    index: int
    tokens: int
    byte_start: int
    byte_end: int


class PlanRequest(msgspec.Struct, frozen=True):
    """Plan these sources."""

    operations: tuple[int, ...]
    alone: bool = False
    """Whether it is one suspect, and nothing else may be with the child meanwhile."""
    failures: int = 0
    """How often the same, alone, has failed before."""


class EmbedRequest(msgspec.Struct, frozen=True):
    """Embed these parts, each with its operation."""

    pieces: tuple[tuple[int, Piece], ...]
    alone: bool = False
    failures: int = 0

    @property
    def operations(self) -> tuple[int, ...]:
        """The operations that have a part in it, ascending."""
        return tuple(sorted({n for n, _ in self.pieces}))


Request = PlanRequest | EmbedRequest


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """What was with a child that ended: a part or, without ``piece``, the planning of a source."""

    n: int
    piece: Piece | None
    due: float
    """Not tried before this moment."""
    overdue: float
    """From this moment on healthy work waits for it."""
    failures: int
    """How often it failed alone."""

    @property
    def key(self) -> tuple[int, int]:
        """Its operation and part index; planning goes as index -1."""
        return (self.n, -1 if self.piece is None else self.piece.index)


class Job(msgspec.Struct, kw_only=True):
    """One memory on its way from validated to all parts indexed."""

    n: int
    byte_count: int
    isolated: bool
    """It saw a child end before the server was started: one part of it is tried alone before the others."""
    plan: int | None = None
    pieces: deque[Piece] = msgspec.field(default_factory=deque)
    """The next parts without a vector, in order."""
    complete: bool = False
    """Whether ``pieces`` reaches to the last part; otherwise more are to be loaded."""
    last: int = -1
    """The last part index that was loaded."""
    loading: bool = False
    under_way: int = 0
    """Requests with the child that hold something of it."""
    suspects: int = 0
    failing: int = 0
    """Parts that have failed alone and not succeeded since, among its suspects or tried again right now."""
    retried: int = 0
    """Those of them that are with the child."""
    served: int = 0
    """Parts that were handed out: who has least goes first."""
    doubtful: bool = False
    """Something was lost meanwhile, so that only the ledger knows whether all parts are indexed."""

    @property
    def done(self) -> bool:
        """Whether every part was embedded, as far as is known here."""
        return (
            self.plan is not None and self.complete and not (self.pieces or self.under_way or self.suspects)
        )

    @property
    def stuck(self) -> bool:
        """Whether all that can be done for it now has failed alone."""
        if not self.failing or (self.pieces and not self.isolated):
            return False
        return self.under_way == self.retried and self.suspects + self.retried == self.failing


def retry_seconds(failures: int, seconds_max: float) -> float:
    """Pause after so many failures alone: 1 s, doubling."""
    return float(min(RETRY_SECONDS_MIN * 2.0 ** min(failures - 1, 32), seconds_max))


class Ingestion:
    """All memories in work."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._jobs: dict[int, Job] = {}
        self._unplanned: deque[int] = deque()
        self._suspects: dict[tuple[int, int], Suspect] = {}
        self._under_way = 0
        self._alone = False
        self._planned = False
        """Whether the last request was for planning."""

    def __len__(self) -> int:
        return len(self._jobs)

    def stuck(self) -> int:
        """How many memories have nothing left but what failed alone."""
        return sum(job.stuck for job in self._jobs.values())

    def stuck_operations(self, limit: int) -> list[int]:
        """The first of them, in the order in which they were taken up."""
        return [job.n for job in self._jobs.values() if job.stuck][:limit]

    def job(self, n: int) -> Job | None:
        """A memory in work."""
        return self._jobs.get(n)

    # What comes in

    def admit(self, n: int, byte_count: int, *, isolated: bool, now: float) -> None:
        """Take a memory up that has no plan yet; ``resume`` tells of one that has."""
        self._jobs[n] = Job(n=n, byte_count=byte_count, isolated=isolated)
        if isolated:
            self._suspect(n, None, now, failures=0)
        else:
            self._unplanned.append(n)

    def resume(self, n: int, byte_count: int, plan: int, *, isolated: bool) -> None:
        """Take a memory up that is planned; its parts are loaded when it is hungry."""
        self._jobs[n] = Job(n=n, byte_count=byte_count, isolated=isolated, plan=plan)

    def has_plan(self, n: int, plan: int, pieces: Sequence[Piece], *, complete: bool, now: float) -> None:
        """A plan is saved; ``pieces`` are its first parts without a vector."""
        job = self._jobs.get(n)
        if job is not None:
            job.plan = plan
            self.more(n, pieces, complete=complete, now=now)

    def more(self, n: int, pieces: Sequence[Piece], *, complete: bool, now: float) -> None:
        """The next parts of a plan that have no vector."""
        job = self._jobs.get(n)
        if job is None:
            return
        job.pieces.extend(pieces)
        if job.isolated and job.pieces and not job.suspects and not job.under_way:
            self._suspect(n, job.pieces.popleft(), now, failures=0)
        job.complete = complete
        job.loading = False
        if pieces:
            job.last = pieces[-1].index

    def hungry(self, enough: int) -> list[Job]:
        """Planned memories whose next parts are to be loaded now; they are marked as loading."""
        found = [
            job
            for job in self._jobs.values()
            if job.plan is not None and not job.complete and not job.loading and len(job.pieces) < enough
        ]
        for job in found:
            job.loading = True
        return found

    def doubt(self, n: int) -> None:
        """Something of it was not saved: when it seems done, the ledger is to be asked what is missing."""
        job = self._jobs.get(n)
        if job is not None:
            job.doubtful = True

    def drop(self, n: int) -> None:
        """The operation has ended, or is to be taken up afresh."""
        job = self._jobs.pop(n, None)
        if job is not None and job.suspects:
            for key in [key for key in self._suspects if key[0] == n]:
                del self._suspects[key]

    # What goes out

    def next(self, now: float) -> Request | None:
        """The next request for the child, or None while it has to wait: for work, or to be alone."""
        if self._alone:
            return None
        suspect = self._first_suspect(now)
        healthy = suspect is None or now < suspect.overdue
        request = self._plan_or_embed() if healthy else None
        if request is None and suspect is not None and self._under_way == 0:
            request = self._try(suspect)
        if request is not None:
            self._under_way += 1
            self._alone = request.alone
            for n in request.operations:
                self._jobs[n].under_way += 1
        return request

    def wake_at(self, now: float) -> float | None:
        """When a suspect is due or overdue next; None if time alone changes nothing."""
        moments = (each.due if each.due > now else each.overdue for each in self._suspects.values())
        return min((moment for moment in moments if moment > now), default=None)

    def _first_suspect(self, now: float) -> Suspect | None:
        due = (each for each in self._suspects.values() if each.due <= now)
        return min(due, key=lambda each: (each.overdue, each.failures, each.key), default=None)

    def _try(self, suspect: Suspect) -> Request:
        self._clear(suspect)
        if suspect.piece is None:
            return PlanRequest((suspect.n,), alone=True, failures=suspect.failures)
        return EmbedRequest(((suspect.n, suspect.piece),), alone=True, failures=suspect.failures)

    def _clear(self, suspect: Suspect) -> None:
        del self._suspects[suspect.key]
        job = self._jobs[suspect.n]
        job.suspects -= 1
        job.retried += suspect.failures > 0

    def _plan_or_embed(self) -> Request | None:
        """Planning and embedding take turns: neither a long text nor many short ones hold up the other."""
        ready = [job for job in self._jobs.values() if job.pieces and not job.isolated]
        if self._planned:
            self._planned = False
            return self._embed(ready) or self._plan()
        request = self._plan()
        self._planned = request is not None
        return request or self._embed(ready)

    def _plan(self) -> PlanRequest | None:
        chosen: list[int] = []
        room = PLAN_BYTES_MAX
        while self._unplanned and len(chosen) < PLAN_TEXTS_MAX:
            job = self._jobs.get(self._unplanned[0])
            if job is None or job.plan is not None:
                self._unplanned.popleft()
                continue
            if chosen and job.byte_count > room:
                break
            room -= job.byte_count
            chosen.append(self._unplanned.popleft())
        return PlanRequest(tuple(chosen)) if chosen else None

    def _embed(self, ready: Sequence[Job]) -> EmbedRequest | None:
        if not ready:
            return None
        budget = self._limits.batch_tokens_max
        chosen = alike(list(_within(_in_turn(ready), LOOK_AHEAD * budget)), budget)
        taken: dict[int, set[int]] = {}
        for n, piece in chosen:
            taken.setdefault(n, set()).add(piece.index)
        for n, indexes in taken.items():
            job = self._jobs[n]
            job.pieces = deque(piece for piece in job.pieces if piece.index not in indexes)
            job.served += len(indexes)
        return EmbedRequest(tuple(chosen))

    # What became of it

    def succeeded(self, request: Request) -> None:
        """The answer came and is saved; call it before ``has_plan``."""
        self._finish(request)
        for n in request.operations:
            if (job := self._jobs.get(n)) is not None:
                job.isolated = False

    def lost(self, request: Request, now: float) -> None:
        """The child ended, or refused: all that was in the request is suspect and runs alone from now on."""
        self._finish(request)
        failures = request.failures + 1 if request.alone else 0
        for n, piece in _contents(request):
            if n in self._jobs:
                self._suspect(n, piece, now, failures=failures)
                self._jobs[n].doubtful = True

    def _suspect(self, n: int, piece: Piece | None, now: float, *, failures: int) -> None:
        due = now + (retry_seconds(failures, self._limits.retry_seconds_max) if failures else 0.0)
        suspect = Suspect(n=n, piece=piece, due=due, overdue=due + SUSPECT_WAIT_SECONDS, failures=failures)
        self._suspects[suspect.key] = suspect
        self._jobs[n].suspects += 1
        self._jobs[n].failing += failures > 0

    def _finish(self, request: Request) -> None:
        self._under_way -= 1
        self._alone = False
        for n in request.operations:
            if (job := self._jobs.get(n)) is not None:
                job.under_way -= 1
                if request.failures:
                    job.retried -= 1
                    job.failing -= 1


def _contents(request: Request) -> Iterator[tuple[int, Piece | None]]:
    if isinstance(request, PlanRequest):
        yield from ((n, None) for n in request.operations)
    else:
        yield from request.pieces


def _in_turn(jobs: Sequence[Job]) -> Iterator[tuple[int, Piece]]:
    """All parts of these memories, each from the one that would have been served least by then."""
    queue = [(job.served, job.n, iter(job.pieces)) for job in jobs]
    heapq.heapify(queue)
    while queue:
        served, n, pieces = queue[0]
        piece = next(pieces, None)
        if piece is None:
            heapq.heappop(queue)
            continue
        yield n, piece
        heapq.heapreplace(queue, (served + 1, n, pieces))


def _within(parts: Iterator[tuple[int, Piece]], tokens_max: int) -> Iterator[tuple[int, Piece]]:
    """The first parts, up to so many tokens; one goes always."""
    room = tokens_max
    for number, part in enumerate(parts):
        room -= part[1].tokens
        if number and room < 0:
            return
        yield part


def alike(parts: Sequence[tuple[int, Piece]], tokens_max: int) -> list[tuple[int, Piece]]:
    """The first part, whose turn it is, and those nearest to it in length while they fit; rising length.

    Whoever is first goes, so a part waits at most as long as the queue before it, whatever its length.
    """
    order = sorted(range(len(parts)), key=lambda index: parts[index][1].tokens)
    first = order.index(0)
    length = parts[0][1].tokens
    room = tokens_max - length
    shorter, longer = first - 1, first + 1
    while True:
        below = parts[order[shorter]][1].tokens if shorter >= 0 else 0
        above = parts[order[longer]][1].tokens if longer < len(order) else room + 1
        if above <= room and (shorter < 0 or above - length <= length - below):
            longer += 1
            room -= above
        elif shorter >= 0 and below <= room:
            shorter -= 1
            room -= below
        else:
            return [parts[index] for index in order[shorter + 1 : longer]]
