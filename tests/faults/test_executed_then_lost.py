"""R9: a write is carried out and its answer is lost, or it is refused before it was: the caller reconciles.

A ledger port that loses the answer to one command stands between the whole server and its real ledger, for
each type of command and each call of a full workload. Nothing doubles, and the outcome is that of the
undisturbed run. A ledger behind a connection, which drops after COMMIT, looks like this to its callers.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import apsw
import msgspec
import pytest

from muniment import executor_wiring, wiring
from muniment.config import Config
from muniment.errors import ExecutorExited, ExecutorFailed, LedgerUnavailable, Unavailable
from muniment.executor.supervisor import Supervisor
from muniment.model import command
from muniment.model.operation import State
from muniment.ports.executor import Embedded, ExecutorHealth, Planned
from muniment.runtime.ingestion import Pipeline
from muniment.runtime.service import Service, Submitted
from tests.support import submissions

if TYPE_CHECKING:
    from muniment.adapters.sqlite.check import Report

CASE_SECONDS_MAX: Final = 120.0
AT_ONCE: Final = 12
CASES_MIN: Final = 90
SETTINGS: Final[Mapping[str, Any]] = {
    "embedder": "synthetic",
    "part_tokens_max": 16,
    "embed_batch_tokens_max": 40,
    "parts_max": 12,
    "operations_in_flight_max": 1,  # Which parts share a request must not depend on the time of day.
}
SENTENCE: Final = "The lock keeper wrote down every boat that passed before noon. "
EXITS, FAILS = "the executor ends here", "the executor refuses this once"
ENDS: Final[Mapping[str, str]] = {
    "waits": "committed",
    "first": "committed",
    "long": "committed",
    "too-long": "rejected",
    "exits": "committed",
    "fails": "committed",
    "after-rejection": "rejected",
    "stream": "committed",
    "step": "committed",
    "done": "committed",
    "done-otherwise": "rejected",
}
OPEN: Final = ("accepted", "validated", "blocked", "planned", "processing", "indexed")
OBSERVED_WHEN_READY: Final = 4
SUPERVISOR_CALLS: Final = {"ReserveGeneration": 2, "Observe": 6}
"""Both children are started, are ready, and have exited."""

When = Literal["committed", "before"]
WHENS: Final[tuple[When, ...]] = ("committed", "before")
Repeat = Callable[[dict[str, Any], int], dict[str, Any]]


class Fault(msgspec.Struct, frozen=True):
    """The answer to call ``call`` of the commands ``verb`` is lost, or that to every so many calls."""

    when: When
    verb: str | None = None
    call: int = 1
    every: int | None = None

    def __str__(self) -> str:
        which = f"{self.verb} {self.call}" if self.every is None else f"every {self.every}"
        return f"{which} {self.when}"


class LosingLedger:
    """The ledger port over a real ledger; raises LedgerUnavailable where the fault says so."""

    def __init__(self, inner: Any, fault: Fault | None) -> None:
        self._inner = inner
        self._fault = fault
        self.calls: Counter[str] = Counter()
        self.lost = 0
        self.read = inner.read
        self.subscribe = inner.subscribe
        self.queued = inner.queued
        self.check_identity = inner.check_identity
        self.close = inner.close

    async def write(self, asked: command.Command) -> Any:
        verb = type(asked).__name__
        self.calls[verb] += 1
        if self._fault is None or not self._hits(self._fault, verb):
            return await self._inner.write(asked)
        if self._fault.when == "committed":
            await self._inner.write(asked)
        self.lost += 1
        raise LedgerUnavailable("operation ledger unavailable: the answer was lost")

    def _hits(self, fault: Fault, verb: str) -> bool:
        if fault.every is not None:
            return self.calls.total() % fault.every == 0
        return verb == fault.verb and self.calls[verb] == fault.call


class CountingExecutor:
    """The executor port over a real supervised child that many stores share; counts what it really did."""

    def __init__(self, inner: Supervisor) -> None:
        self._inner = inner
        self.requests_max = 2
        self._met: set[str] = set()
        self.planned: Counter[str] = Counter()
        self.embedded: Counter[str] = Counter()
        self.embed_query = inner.embed_query
        self.identity: Callable[[], Any] = inner.identity
        self.health: Callable[[], ExecutorHealth] = inner.health

    async def start(self) -> None:
        """It runs already."""

    async def stop(self) -> None:
        """The others still need it."""

    async def join(self) -> None:
        await asyncio.Event().wait()

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        planned = await self._inner.plan(texts, labels=labels)
        self.planned.update(labels)
        return planned

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        self._once(texts, EXITS, ExecutorExited("signal 9 (SIGKILL)", 1))
        self._once(texts, FAILS, ExecutorFailed("too hard", 1))
        embedded = await self._inner.embed(texts, labels=labels)
        self.embedded.update(labels)
        return embedded

    def _once(self, texts: Sequence[str], mark: str, fault: Exception) -> None:
        if mark not in self._met and any(mark in text for text in texts):
            self._met.add(mark)
            raise fault


class Case(msgspec.Struct, kw_only=True):
    """One run of the workload: what it is to lose, and what was seen."""

    path: Path
    fault: Fault | None = None
    ledger: LosingLedger | None = None
    executor: CountingExecutor | None = None
    """None: the server supervises a child of its own."""
    ending: wiring._Ending | None = None
    unanswered: int = 0
    """How often a client was told to come again."""

    @property
    def lost(self) -> int:
        """How many answers were really lost."""
        return 0 if self.ledger is None else self.ledger.lost


@contextlib.asynccontextmanager
async def child() -> AsyncIterator[Supervisor]:
    """One real executor child, ready."""

    async def generation() -> int:
        return 1

    supervisor = Supervisor(
        executor_wiring.child_argv("ingest"),
        executor_wiring.spec(Config(**SETTINGS), "ingest"),
        role="ingest",
        requests_max=2,
        next_generation=generation,
        observe=lambda _: None,
        startup_seconds=60.0,
        stall_seconds=60.0,
        backoff_seconds_max=1.0,
    )
    await supervisor.start()
    try:
        await supervisor.identity()
        yield supervisor
    finally:
        await supervisor.stop()


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Cases by data directory: a server that is wired for one of them gets its ledger and its executor."""
    cases: dict[str, Case] = {}
    open_ledger, make_children = wiring._ledger, wiring._children

    def losing(config: Config, *rest: Any) -> LosingLedger:
        case = cases[config.data_dir]
        case.ledger = LosingLedger(open_ledger(config, *rest), case.fault)
        return case.ledger

    def counting(config: Config, *rest: Any) -> Any:
        case = cases[config.data_dir]
        if case.executor is None:
            return make_children(config, *rest)
        return wiring._Children(case.executor, case.executor, set())  # type: ignore[arg-type]

    monkeypatch.setattr(wiring, "_ledger", losing)
    monkeypatch.setattr(wiring, "_children", counting)
    return cases


@contextlib.asynccontextmanager
async def serving(case: Case) -> AsyncIterator[Service]:
    """Everything behind the port, wired as the server wires it, with the losing ledger between."""
    case.ending = wiring._Ending()
    config = Config(data_dir=str(case.path), **SETTINGS)
    with wiring._owned(case.path) as directory:
        async with wiring._running(config, directory, case.ending) as service:
            yield service


def workload() -> list[dict[str, Any]]:
    """Every kind, every end, and every detour on the way to one."""
    envelope, memory = submissions.envelope, submissions.memory
    return [
        envelope("waits", "add_memory", {"content": SENTENCE}, dependencies=["first"]),
        memory("first", "Four boats went down the canal. "),
        memory("long", SENTENCE * 6, session_id="canal"),
        memory("too-long", SENTENCE * 40),
        memory("exits", f"{SENTENCE}Then {EXITS}."),
        memory("fails", f"{SENTENCE}Then {FAILS}."),
        envelope("after-rejection", "add_memory", {"content": SENTENCE}, dependencies=["done-otherwise"]),
        submissions.stream("stream", name="locks"),
        envelope(
            "step", "add_task_step", {"stream_name": "locks", "name": "oil it", "idempotency_key": "gate"}
        ),
        envelope("done", "complete_step", {"idempotency_key": "gate", "result": {"oiled": True}}),
        envelope("done-otherwise", "complete_step", {"idempotency_key": "gate", "result": {"oiled": False}}),
    ]


def same(body: dict[str, Any], _: int) -> dict[str, Any]:
    """A client that repeats what it sent, under its ID."""
    return body


def renamed(body: dict[str, Any], attempt: int) -> dict[str, Any]:
    """A client that takes a new ID for each attempt."""
    return body if attempt == 0 else body | {"operation_id": f"{body['operation_id']}-{attempt}"}


async def submit(case: Case, service: Service, body: dict[str, Any], repeat: Repeat) -> Submitted:
    """Submit until it is answered, as the contract asks of a client."""
    attempt = 0
    while True:
        try:
            return await service.submit(msgspec.json.encode(repeat(body, attempt)))
        except Unavailable:
            attempt += 1
            case.unanswered += 1
            await asyncio.sleep(0.02)


async def run(wired: dict[str, Case], case: Case, repeat: Repeat = same) -> None:
    """One run: submit all, wait for all ends or the server's own, and ask for each outcome once more."""
    wired[str(case.path)] = case
    async with asyncio.timeout(CASE_SECONDS_MAX), serving(case) as service:
        assert case.ending is not None
        for body in workload():
            submitted = await submit(case, service, body, repeat)
            while not case.ending.asked.is_set() and await is_accepted(service, submitted):
                await asyncio.sleep(0.005)  # Else the next one may be validated together with it, or not.
        while not case.ending.asked.is_set() and (starting(case) or await unfinished(service)):
            await asyncio.sleep(0.02)
        if repeat is same and not case.ending.asked.is_set():
            again = [await submit(case, service, body, same) for body in workload()]
            assert not any(submitted.created for submitted in again)


async def is_accepted(service: Service, submitted: Submitted) -> bool:
    with contextlib.suppress(Unavailable):
        return (await service.receipt(submitted.receipt.operation_id)).state is State.ACCEPTED
    return True


def starting(case: Case) -> bool:
    """Whether a child of the case's own is not ready yet: the query child is not needed for the workload."""
    assert case.ledger is not None
    return case.executor is None and case.ledger.calls["Observe"] < OBSERVED_WHEN_READY


async def unfinished(service: Service) -> bool:
    pages = [await service.operations(state=state, kind=None, after=None, limit=1) for state in OPEN]
    return any(page.operations for page in pages)


async def run_all(wired: dict[str, Case], cases: Iterable[Case]) -> None:
    """A few at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> None:
        async with room:
            await run(wired, case)

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(case))


def violations(case: Case, clean: "Report") -> list[str]:
    """Everything in which a run differs from what it must be."""
    assert case.ending is not None
    found = [] if case.ending.fault is None else [f"the server ended: {case.ending.fault!r}"]
    checked = wiring.check(case.path)
    found += [f"check: {finding}" for finding in checked.findings]
    if checked.outcome_digest != clean.outcome_digest:
        found.append(f"another outcome: {checked.operations} operations, {checked.memories} memories")
    if case.executor is not None:
        found += [
            f"{verb} was done {count} times for {label}"
            for verb, counts in (("SaveParts", case.executor.embedded), ("SavePlan", case.executor.planned))
            for label, count in counts.items()
            if count > 1 and not may_be_done_again(case.fault, verb)
        ]
    return found


def may_be_done_again(fault: Fault | None, verb: str) -> bool:
    """What was not saved must be; and a refusal that was not saved is found again by planning."""
    if fault is None or fault.when == "committed":
        return False
    return fault.verb in {None, verb} or (verb, fault.verb) == ("SavePlan", "Refuse")


def ends(path: Path) -> dict[str, str]:
    """The state of every operation of a store."""
    with contextlib.closing(apsw.Connection(str(path / "ledger.db"), apsw.SQLITE_OPEN_READONLY)) as store:
        return {str(name): str(state) for name, state in store.execute("SELECT id, state FROM operation")}


def say(cases: Sequence[Case]) -> None:
    """Print what really happened."""
    verbs = Counter(f"{case.fault.verb or 'any'} {case.fault.when}" for case in cases if case.fault)
    told = sum(case.unanswered for case in cases)
    print(f"answers lost: {sum(case.lost for case in cases)} in {len(cases)} runs, of {dict(verbs)}")
    print(f"clients told to come again: {told}")


def test_every_command_and_every_call(tmp_path: Path, wired: dict[str, Case]) -> None:
    async def all_cases() -> tuple[Case, list[Case]]:
        async with child() as shared:
            clean = Case(path=tmp_path / "clean", executor=CountingExecutor(shared))
            await run(wired, clean)
            assert clean.ledger is not None
            # How often the ledger is probed depends on how long a run takes, and on nothing else.
            calls = clean.ledger.calls | {"Probe": 1}
            faults = [
                Fault(when, verb, call)
                for verb in calls
                for call in range(1, calls[verb] + 1)
                for when in WHENS
            ]
            cases = [
                Case(path=tmp_path / f"{number}", fault=fault, executor=CountingExecutor(shared))
                for number, fault in enumerate(faults)
            ]
            await run_all(wired, cases)
            return clean, cases

    clean, cases = asyncio.run(all_cases())
    say(cases)
    whole = wiring.check(clean.path)
    assert violations(clean, whole) == []
    assert ends(clean.path) == ENDS
    verbs = {case.fault.verb for case in cases if case.fault}
    asked = {each.__name__ for each in command.Command.__args__}
    assert verbs | SUPERVISOR_CALLS.keys() == asked - {"Advance"}  # The server asks for many at once.
    assert [str(case.fault) for case in cases if case.lost != 1] == []
    assert len(cases) >= CASES_MIN
    wrong = {str(case.fault): found for case in cases if (found := violations(case, whole))}
    assert wrong == {}


def test_what_the_supervisor_writes(tmp_path: Path, wired: dict[str, Case]) -> None:
    """Generations are reserved and children observed through the same ledger; each has its own child."""
    faults = [
        Fault(when, verb, call)
        for verb, count in SUPERVISOR_CALLS.items()
        for call in range(1, count + 1)
        for when in WHENS
    ]
    clean = Case(path=tmp_path / "clean")
    cases = [Case(path=tmp_path / f"{number}", fault=fault) for number, fault in enumerate(faults)]
    asyncio.run(run_all(wired, [clean, *cases]))
    say(cases)
    whole = wiring.check(clean.path)
    assert [str(case.fault) for case in cases if case.lost != 1] == []
    assert {str(case.fault): found for case in cases if (found := violations(case, whole))} == {}


def test_answers_are_lost_all_the_time(tmp_path: Path, wired: dict[str, Case]) -> None:
    async def all_cases() -> tuple[Case, list[Case]]:
        async with child() as shared:
            clean = Case(path=tmp_path / "clean", executor=CountingExecutor(shared))
            cases = [
                Case(
                    path=tmp_path / f"{when}-{every}",
                    fault=Fault(when, every=every),
                    executor=CountingExecutor(shared),
                )
                for when in WHENS
                for every in (3, 4)
            ]
            await run_all(wired, [clean, *cases])
            return clean, cases

    clean, cases = asyncio.run(all_cases())
    say(cases)
    whole = wiring.check(clean.path)
    assert [str(case.fault) for case in cases if case.lost < 15] == []
    assert {str(case.fault): found for case in cases if (found := violations(case, whole))} == {}


# Controls: what must not pass unnoticed.


def forgetful(name: str) -> Callable[..., Any]:
    """A pipeline that computes again what it could not save at once."""
    save = getattr(Pipeline, name)

    async def once(pipeline: Pipeline, request: Any, *answers: Any) -> None:
        vars(pipeline)["_write"] = pipeline._ledger.write
        try:
            await save(pipeline, request, *answers)
        except LedgerUnavailable:
            pipeline._work.lost(request, pipeline._clock.monotonic())

    return once


class Control(msgspec.Struct, frozen=True):
    """A caller that does not reconcile: a client with a bad habit, or a function of the server replaced."""

    fault: Fault
    complaint: str
    repeat: Repeat = same
    target: Any = None
    name: str = ""


CONTROLS: Final = {
    "the client takes a new ID": Control(
        Fault("committed", "Accept", 2), "another outcome: 12 operations, 6 memories", renamed
    ),
    "vectors are not kept": Control(
        Fault("committed", "SaveParts", 2), "SaveParts was done 2", same, Pipeline, "_save_parts"
    ),
    "plans are not kept": Control(
        Fault("committed", "SavePlan", 2), "SavePlan was done 2", same, Pipeline, "_save_plans"
    ),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS.keys())
def test_control_a_caller_that_does_not_reconcile_is_noticed(
    tmp_path: Path, wired: dict[str, Case], monkeypatch: pytest.MonkeyPatch, control: Control
) -> None:
    async def both() -> tuple[Case, Case]:
        async with child() as shared:
            clean = Case(path=tmp_path / "clean", executor=CountingExecutor(shared))
            await run(wired, clean)
            if control.name:
                monkeypatch.setattr(control.target, control.name, forgetful(control.name))
            broken = Case(path=tmp_path / "broken", fault=control.fault, executor=CountingExecutor(shared))
            await run(wired, broken, control.repeat)
            return clean, broken

    clean, broken = asyncio.run(both())
    assert broken.lost == 1
    whole = wiring.check(clean.path)
    assert violations(clean, whole) == []
    found = violations(broken, whole)
    assert any(control.complaint in each for each in found), found
