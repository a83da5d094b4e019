"""Five workloads for the ledger, and a driver that runs them without threads: same stages, same schedule.

The driver does what coordinator and writer thread do, one step after the other, so that the n-th transaction
of a run is the same one each time. The subject is the ledger; text is planned and embedded in process.
"""

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from muniment.adapters.sqlite.store import SqliteStore
from muniment.core import canonical, payloads, planning
from muniment.core.ingestion import EmbedRequest, Ingestion, Limits, Piece, PlanRequest, Request
from muniment.core.schedule import Schedule, Verb
from muniment.errors import ExecutorExited, ExecutorFailed, ExecutorFault, ExecutorProtocolBroken
from muniment.model import command, journal
from muniment.model.command import Command
from muniment.model.operation import Kind
from muniment.model.plan import ModelIdentity
from muniment.ports.executor import Embedded, Planned
from muniment.ports.ledger import Reads, Reply, SealedUnit
from muniment.runtime.coordinator import unfinished
from muniment.stages import execute, plan
from tests.support.truth import Accepted, Fact, Indexed, Reserved, Stood, Written, sha256

T = TypeVar("T")
IN_FLIGHT_MAX: Final = 2
PART_TOKENS_MAX: Final = 8
BATCH_TOKENS_MAX: Final = 24
PARTS_MAX: Final = 1000
RETRY_SECONDS_MAX: Final = 4.0
DIMENSIONS: Final = 8
WORD: Final = re.compile(r"\w+")
SENTENCE: Final = re.compile(r"(?<=\. )")

MODEL: Final = ModelIdentity(
    name="hashed-parts",
    dimensions=DIMENSIONS,
    window_tokens=PART_TOKENS_MAX,
    files={},
    tokenizer_digest=hashlib.sha256(WORD.pattern.encode()).hexdigest(),
)


class Submission(msgspec.Struct, frozen=True):
    """What a client sends."""

    id: str
    kind: Kind
    payload: Mapping[str, Any]
    dependencies: tuple[str, ...] = ()


class Submit(msgspec.Struct, frozen=True):
    """Clients send these at one time: one transaction."""

    submissions: tuple[Submission, ...]


class Settle(msgspec.Struct, frozen=True):
    """Drive everything that is due to its end."""


class Workload(msgspec.Struct, frozen=True):
    """Steps, and the executor's faults: label -> what befalls the first, second, ... request with it."""

    steps: tuple[Submit | Settle, ...]
    faults: Mapping[str, tuple[type[ExecutorFault], ...]] = {}


class InProcessExecutor:
    """The planning and embedding calls of ``ports.executor``, deterministic, with planned faults."""

    def __init__(self, faults: Mapping[str, tuple[type[ExecutorFault], ...]]) -> None:
        self.generation = 0
        self.embedded: Counter[str] = Counter()
        """How often each part was embedded, by label."""
        self.faults = 0
        self._faults = faults
        self._asked: Counter[str] = Counter()

    def _ask(self, labels: Sequence[str]) -> None:
        for label in labels:
            befalls = self._faults.get(label, ())[self._asked[label] :][:1]
            self._asked[label] += 1
            if befalls:
                self.faults += 1
                raise befalls[0](f"planned for {label}", self.generation)

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        self._ask(labels)
        return tuple(self._plan(text) for text in texts)

    def _plan(self, text: str) -> Planned:
        starts, ends = [], []
        for word in WORD.finditer(text):
            starts.append(len(text[: word.start()].encode()))
            ends.append(len(text[: word.end()].encode()))
        sentences = [len(text[: found.start()].encode()) for found in SENTENCE.finditer(text)]
        return Planned(
            generation=self.generation,
            model=MODEL,
            profile=planning.profile_name(PART_TOKENS_MAX),
            token_count=len(starts),
            parts=planning.plan(len(text.encode()), starts, ends, sentences, PART_TOKENS_MAX),
        )

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        self._ask(labels)
        self.embedded.update(labels)
        return Embedded(
            generation=self.generation, model=MODEL, vectors=tuple(vector_of(text) for text in texts)
        )


def vector_of(text: str) -> bytes:
    """Eight float32 numbers that only this text has."""
    return struct.pack(f"<{DIMENSIONS}f", *hashlib.sha256(text.encode()).digest()[:DIMENSIONS])


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without a loop."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a stage waited for something other than ledger and executor")


class Driver:
    """Client, coordinator and writer thread in one, on an open store. Making one is recovery."""

    def __init__(self, store: SqliteStore, workload: Workload, tell: Callable[[Fact], None]) -> None:
        self.executor = InProcessExecutor(workload.faults)
        self.conflicts: Counter[str] = Counter()
        self._store = store
        self._workload = workload
        self._tell = tell
        self._clock = 0
        self._ids = {row["n"]: row["id"] for row in store.read(lambda reads: list(reads.rows("operation")))}
        self._schedule = Schedule()
        self._schedule.load(store.read(unfinished))
        self._ingestion = Ingestion(
            Limits(batch_tokens_max=BATCH_TOKENS_MAX, retry_seconds_max=RETRY_SECONDS_MAX)
        )
        self._seconds = 0.0
        self._next_generation()

    def play(self) -> None:
        """Send everything, as clients do that heard nothing, and drive it to its end."""
        for step in self._workload.steps:
            match step:
                case Submit():
                    self._submit(step.submissions)
                case Settle():
                    self.settle()

    def settle(self) -> None:
        """Work until nothing is due."""
        while due := list(self._schedule.due(IN_FLIGHT_MAX)):
            advances = [
                command.Advance(n=work.n, now=self.now_us()) for work in due if work.verb is Verb.ADVANCE
            ]
            if advances:
                self.transact(advances)
            for work in due:
                if work.verb is Verb.APPLY:
                    self.transact([command.Apply(n=work.n, now=self.now_us())])
                elif work.verb is Verb.REMEMBER:
                    self._admit(work.n)
            self._ingest()

    # What the stages are given: a clock and a ledger

    def now_us(self) -> int:
        self._clock += 1
        return self._clock

    async def write(self, asked: Command) -> Any:
        reply = self.transact([asked])[0]
        if reply.error is not None:
            raise reply.error
        return reply.value

    async def read(self, query: Callable[[Reads], T]) -> T:
        return self._store.read(query)

    def transact(self, commands: Sequence[Command]) -> list[Reply]:
        """One transaction; what it made true is told when it has returned, and not before."""
        replies, sealed = self._store.transact(commands)
        self.published(sealed)
        for asked, reply in zip(commands, replies, strict=True):
            self.answered(asked, reply)
        return replies

    def published(self, sealed: Sequence[SealedUnit]) -> None:
        """What followers, device and schedule hear of a committed batch."""
        for each in sealed:
            unit, attributes = each.unit, None
            if isinstance(unit, journal.Accept):
                self._ids[unit.n] = unit.id
                if unit.kind is not Kind.ADD_MEMORY:
                    attributes = msgspec.json.decode(each.held["attribute", (unit.object,)]["bytes"])
            self._schedule.observe(unit, attributes)
            self._tell(Written(each.position, sha256(canonical.encode(msgspec.to_builtins(unit)))))

    def answered(self, asked: Command, reply: Reply) -> None:
        """What the one who asked hears."""
        match asked:
            case command.Accept() if reply.error is None:
                self._tell(Accepted(asked.operation_id, asked.payload_hash))
                self._tell(Stood(asked.operation_id, reply.value.receipt.state))
            case command.Accept():
                self.conflicts[asked.operation_id] += 1
            case command.ReserveGeneration():
                self._tell(Reserved(reply.value))
            case command.SaveParts():
                for part_index, data in asked.vectors:
                    self._tell(Indexed(self._ids[asked.n], part_index, sha256(data)))
            case command.Advance() | command.Apply() | command.CommitMemory():
                self._tell(Stood(self._ids[asked.n], reply.value.state))
            case _:
                pass

    # Client

    def _submit(self, submissions: Sequence[Submission]) -> None:
        self.transact([self._accept(each) for each in submissions])

    def _accept(self, sent: Submission) -> command.Accept:
        divided = payloads.divide(sent.payload)
        salt = hashlib.sha256(sent.id.encode()).digest()[:16]
        return command.Accept(
            account=1,
            operation_id=sent.id,
            kind=sent.kind,
            payload_hash=canonical.payload_hash(dict(sent.payload)),
            dependencies=sent.dependencies,
            invalid=None,
            content=divided.content,
            attributes=divided.attributes,
            content_salt=salt,
            attributes_salt=salt,
            now=self.now_us(),
        )

    # Coordinator

    def _next_generation(self) -> None:
        asked = command.ReserveGeneration(now=self.now_us())
        self.executor.generation = self.transact([asked])[0].value

    def _source(self, n: int) -> plan.Source:
        return finished(plan.load(self, n))  # type: ignore[arg-type]

    def _admit(self, n: int) -> None:
        source = self._source(n)
        if source.plan is None:
            self._ingestion.admit(n, len(source.content), isolated=source.exits > 0, now=self._seconds)
        else:
            self._ingestion.resume(n, len(source.content), source.plan, isolated=source.exits > 0)

    def _ingest(self) -> None:
        """All requests that the memories in work need, one after the other."""
        while True:
            for job in self._ingestion.hungry(PARTS_MAX):
                assert job.plan is not None
                pieces = finished(execute.missing(self, job.plan, after=job.last, limit=PARTS_MAX))  # type: ignore[arg-type]
                self._ingestion.more(job.n, pieces, complete=True, now=self._seconds)
                self._commit_if_done([job.n])
            request = self._ingestion.next(self._seconds)
            moment = self._ingestion.wake_at(self._seconds)
            if request is not None:
                self._ask(request)
            elif moment is not None:
                self._seconds = moment
            else:
                return

    def _commit_if_done(self, operations: Sequence[int]) -> None:
        done = [n for n in operations if (job := self._ingestion.job(n)) is not None and job.done]
        for n in done:
            self._ingestion.drop(n)
        if done:
            self.transact([command.CommitMemory(n=n, now=self.now_us()) for n in done])

    def _ask(self, request: Request) -> None:
        try:
            if isinstance(request, PlanRequest):
                self._plan(request)
            else:
                self._embed(request)
        except ExecutorFault as fault:
            kind = {ExecutorExited: "exit", ExecutorProtocolBroken: "protocol", ExecutorFailed: "failure"}
            self.transact(
                [
                    command.RecordExit(
                        n=n,
                        kind=kind[type(fault)],
                        generation=fault.generation,
                        message=str(fault),
                        now=self.now_us(),
                    )
                    for n in request.operations
                ]
            )
            if not isinstance(fault, ExecutorFailed):
                self._next_generation()
            self._ingestion.lost(request, self._seconds)

    def _plan(self, request: PlanRequest) -> None:
        sources = [self._source(n) for n in request.operations]
        answers = finished(plan.plan(sources, self.executor))  # type: ignore[arg-type]
        replies = self.transact(
            [
                plan.saving(source, answer, parts_max=PARTS_MAX, now=self.now_us())
                for source, answer in zip(sources, answers, strict=True)
            ]
        )
        self._ingestion.succeeded(request)
        for source, answer, reply in zip(sources, answers, replies, strict=True):
            assert reply.value is not None
            pieces = [
                Piece(index, part.token_end - part.token_start, part.byte_start, part.byte_end)
                for index, part in enumerate(answer.parts)
            ]
            self._ingestion.has_plan(source.n, reply.value, pieces, complete=True, now=self._seconds)

    def _embed(self, request: EmbedRequest) -> None:
        contents = {n: self._source(n).content for n in request.operations}
        plans = {n: job.plan for n in request.operations if (job := self._ingestion.job(n)) and job.plan}
        embedded = finished(execute.embed(request, contents, self.executor))  # type: ignore[arg-type]
        self.transact(execute.saving(request, embedded, plans, now=self.now_us()))
        self._ingestion.succeeded(request)
        self._commit_if_done(request.operations)


# The workloads


def remember(id: str, content: str, *dependencies: str, **attributes: Any) -> Submission:  # noqa: A002
    return Submission(id, Kind.ADD_MEMORY, {"content": content, **attributes}, dependencies)


def stream(id: str, name: str, *dependencies: str, **attributes: Any) -> Submission:  # noqa: A002
    return Submission(id, Kind.CREATE_TASK_STREAM, {"name": name, **attributes}, dependencies)


def step(id: str, stream_name: str, key: str, *dependencies: str) -> Submission:  # noqa: A002
    payload = {"stream_name": stream_name, "name": f"do {key}", "idempotency_key": key}
    return Submission(id, Kind.ADD_TASK_STEP, payload, dependencies)


def complete(id: str, key: str, *dependencies: str, **attributes: Any) -> Submission:  # noqa: A002
    return Submission(id, Kind.COMPLETE_STEP, {"idempotency_key": key, **attributes}, dependencies)


def sentences(count: int) -> str:
    return "".join(
        f"Sentence {number} says that shelf {number * 7} holds box {number}. " for number in range(count)
    )


SHORT: Final = Workload(
    (
        Submit(
            (
                remember("short-1", "The kettle is on the stove.", user_id="ann"),
                remember("short-2", "Tea at four."),
            )
        ),
        Settle(),
        Submit(
            (
                remember("short-1", "The kettle is on the stove.", user_id="ann"),  # a replay
                remember("short-2", "Coffee at four."),  # a conflict
                remember("short-3", "Ann likes tea. Bob does not.", categories=["drinks"]),
            )
        ),
        Settle(),
        Submit((remember("short-4", "Ein Löffel Zucker."), remember("short-1", "Nothing of that."))),
        Settle(),
    )
)

LONG: Final = Workload(
    (
        Submit((remember("long-1", sentences(18), session_id="shelves"), remember("long-2", "One line."))),
        Settle(),
        Submit((remember("long-3", sentences(7)),)),
        Settle(),
    )
)

TASKS: Final = Workload(
    (
        # The completion waits for a step that nobody has sent yet, the memory for the completion.
        Submit(
            (
                complete("task-done", "pots", "task-step", result={"clean": True}),
                remember("task-note", "Done.", "task-done"),
            )
        ),
        Submit((stream("task-stream", "kitchen", description="after dinner"),)),
        Settle(),
        Submit((step("task-step", "kitchen", "pots"), step("task-step-2", "kitchen", "pans"))),
        Settle(),
        Submit(
            (
                stream("task-stream-again", "kitchen", description="after dinner"),  # commits to the first
                stream("task-stream-other", "kitchen", description="before dinner"),  # rejected
                complete("task-done-2", "pans"),
                complete("task-done-3", "pans", result="twice"),  # a second, differing completion: rejected
            )
        ),
        Settle(),
    )
)

CASCADE: Final = Workload(
    (
        Submit(
            (
                remember("chain-3", "Third.", "chain-2"),
                remember("chain-2", "Second.", "chain-1"),
                remember("chain-1", "First.", "chain-0", "good-0"),
                step("chain-step", "nowhere", "late", "chain-3"),
                remember("good-1", "Stays.", "good-0"),
            )
        ),
        Settle(),
        Submit((remember("good-0", "Goes through."),)),
        Settle(),
        Submit((complete("chain-0", "unknown key"),)),  # rejected, and everything that waits for it falls
        Settle(),
        Submit(
            (
                remember("late-1", "Too late.", "chain-2"),
                complete("late-2", "unknown", "chain-step", "good-1"),
            )
        ),
        Settle(),
    )
)

EXITS: Final = Workload(
    (
        Submit((remember("exit-1", sentences(8)), remember("exit-2", "Unharmed."))),
        Settle(),
        Submit((remember("exit-3", "Dies while it is planned."), remember("exit-4", "Fails once."))),
        Settle(),
    ),
    faults={
        "1:4": (ExecutorExited, ExecutorExited),
        "1:7": (ExecutorProtocolBroken,),
        "3": (ExecutorExited,),
        "4:0": (ExecutorFailed,),
    },
)

WORKLOADS: Final = {"short": SHORT, "long": LONG, "tasks": TASKS, "cascade": CASCADE, "exits": EXITS}
