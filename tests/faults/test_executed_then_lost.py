"""R9: a write is carried out and its answer is lost, or it is refused before it was: the caller reconciles.

A ledger port whose answer to one command is lost stands between the whole server and its real ledger, for each type
of command and each call of a full workload. Nothing doubles, and the outcome is that of the undisturbed run. The
answer of a ledger that is away (PostgreSQL after COMMIT, a connection that drops) looks like this.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pytest

from muniment import executor_wiring, wiring
from muniment.config import Config
from muniment.errors import ExecutorExited, ExecutorFailed, LedgerUnavailable, Unavailable
from muniment.executor.supervisor import Supervisor
from muniment.model import command
from muniment.model.plan import ModelIdentity
from muniment.ports.executor import Embedded, ExecutorHealth, Plan
from muniment.runtime.coordinator import RETRY_SECONDS_MIN
from muniment.runtime.service import Service
from muniment.stages import execute, ledger
from tests.support import submissions

CASE_SECONDS_MAX: Final = 60.0
EMBED_SECONDS: Final = 1.5 * RETRY_SECONDS_MIN
AT_ONCE: Final = 12
CASES_MIN: Final = 90
SETTINGS: Final[Mapping[str, Any]] = {
    "embedder": "synthetic",
    "part_tokens_max": 16,
    "embed_batch_tokens_max": 40,
    "parts_max": 12,
}
SENTENCE: Final = "The lock keeper wrote down every boat that passed before noon. "
EXITS, FAILS = "the executor ends here", "the executor refuses this once"

When = Literal["committed", "before"]


class Fault(msgspec.Struct, frozen=True):
    """The answer to call ``call`` of commands of type ``verb`` is lost; or to every ``every``-th of all."""

    when: When
    verb: str | None = None
    call: int = 1
    every: int | None = None

    def __str__(self) -> str:
        which = f"{self.verb} {self.call}" if self.every is None else f"every {self.every}th call"
        return f"{which}, {self.when}"


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
    """The executor port over a real supervised child that many stores share; counts what was really embedded."""

    def __init__(self, inner: Supervisor) -> None:
        self._inner = inner
        self._met: set[str] = set()
        self.planned: Counter[str] = Counter()
        self.embedded: Counter[str] = Counter()

    async def start(self) -> None:
        """It runs already."""

    async def stop(self) -> None:
        """The others still need it."""

    async def join(self) -> None:
        await asyncio.Event().wait()

    async def plan(self, text: str, *, label: str) -> Plan:
        planned = await self._inner.plan(text, label=label)
        self.planned[label] += 1
        return planned

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        # Longer than an operation waits before it is tried again: what began twice is counted twice.
        await asyncio.sleep(EMBED_SECONDS)
        self._once(texts, EXITS, ExecutorExited("signal 9 (SIGKILL)", 1))
        self._once(texts, FAILS, ExecutorFailed("too hard", 1))
        embedded = await self._inner.embed(texts, labels=labels)
        self.embedded.update(labels)
        return embedded

    def _once(self, texts: Sequence[str], mark: str, fault: Exception) -> None:
        if mark not in self._met and any(mark in text for text in texts):
            self._met.add(mark)
            raise fault

    async def embed_query(self, text: str) -> Embedded:
        return await self._inner.embed_query(text)

    async def identity(self) -> ModelIdentity:
        return await self._inner.identity()

    def health(self) -> ExecutorHealth:
        return self._inner.health()


class Case(msgspec.Struct, kw_only=True):
    """One run of the workload: what it was told to lose, and what was seen."""

    path: Path
    fault: Fault | None
    ledger: LosingLedger | None = None
    executor: CountingExecutor | None = None
    fatal: BaseException | None = None
    unanswered: int = 0
    """How often a client was told to come again."""


@contextlib.asynccontextmanager
async def child() -> AsyncIterator[Supervisor]:
    """One real executor child, ready."""

    async def generation() -> int:
        return 1

    supervisor = Supervisor(
        executor_wiring.child_argv(),
        executor_wiring.spec(Config(**SETTINGS)),
        next_generation=generation,
        observe=lambda _: None,
        startup_seconds=60.0,
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
    """Cases by their data directory: a server that is wired for one of them gets its ledger and executor."""
    cases: dict[str, Case] = {}
    open_ledger, make_executor = wiring._ledger, wiring._executor

    def losing(config: Config, *rest: Any) -> LosingLedger:
        case = cases[config.data_dir]
        case.ledger = LosingLedger(open_ledger(config, *rest), case.fault)
        return case.ledger

    def counting(config: Config, *rest: Any) -> Any:
        case = cases[config.data_dir]
        return make_executor(config, *rest) if case.executor is None else (case.executor, set())

    monkeypatch.setattr(wiring, "_ledger", losing)
    monkeypatch.setattr(wiring, "_executor", counting)
    return cases


@contextlib.asynccontextmanager
async def serving(case: Case) -> AsyncIterator[Service]:
    """Everything behind the port, wired as the server wires it, with the losing ledger between."""
    ending = wiring._Ending()
    config = Config(data_dir=str(case.path), **SETTINGS)
    with wiring._owned(case.path) as directory:
        async with wiring._running(config, directory, ending) as service:
            yield service
    case.fatal = ending.fault


def workload() -> list[dict[str, Any]]:
    """Every kind, every end and every detour that the path has."""
    return [
        submissions.envelope("waits", "add_memory", {"content": SENTENCE}, dependencies=["first"]),
        submissions.memory("first", "Four boats went down the canal. "),
        submissions.memory("long", SENTENCE * 6, session_id="canal"),
        submissions.memory("too-long", SENTENCE * 40),
        submissions.memory("exits", f"{SENTENCE}Then {EXITS}."),
        submissions.memory("fails", f"{SENTENCE}Then {FAILS}."),
        submissions.envelope(
            "after-rejection", "add_memory", {"content": SENTENCE}, dependencies=["done-otherwise"]
        ),
        submissions.stream("stream", name="locks"),
        submissions.envelope(
            "step",
            "add_task_step",
            {"stream_name": "locks", "name": "oil the gate", "idempotency_key": "gate"},
        ),
        submissions.envelope("done", "complete_step", {"idempotency_key": "gate", "result": {"oiled": True}}),
        submissions.envelope(
            "done-otherwise", "complete_step", {"idempotency_key": "gate", "result": {"oiled": False}}
        ),
    ]


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
Repeat = Callable[[dict[str, Any], int], dict[str, Any]]


def same(body: dict[str, Any], _: int) -> dict[str, Any]:
    """A client that repeats what it sent, under its ID."""
    return body


async def submit(case: Case, service: Service, body: dict[str, Any], repeat: Repeat) -> None:
    """Submit until it is answered, as the contract asks of a client."""
    for attempt in range(1000):
        try:
            await service.submit(msgspec.json.encode(repeat(body, attempt)))
        except Unavailable:
            case.unanswered += 1
            await asyncio.sleep(0.02)
        else:
            return
    raise AssertionError(f"{body['operation_id']} was never answered")


async def run(wired: dict[str, Case], case: Case, repeat: Repeat = same) -> Case:
    """One run: submit all, wait until nothing is unfinished or the server wants to end, stop."""
    wired[str(case.path)] = case
    async with asyncio.timeout(CASE_SECONDS_MAX), serving(case) as service:
        for body in workload():
            await submit(case, service, body, repeat)
        await ended(service)
        for body in workload():
            if repeat is same:
                await submit(case, service, body, repeat)
    return case


async def ended(service: Service) -> None:
    """Wait until every operation has ended."""
    while any(
        [(await service.operations(state=state, kind=None, after=None, limit=1)).operations for state in OPEN]
    ):
        await asyncio.sleep(0.02)


def violations(case: Case, clean: wiring.Report) -> list[str]:
    """Everything in which a run differs from what it must be."""
    assert case.ledger is not None
    found = [] if case.fatal is None else [f"the server ended: {case.fatal!r}"]
    checked = wiring.check(case.path)
    found += [f"check: {finding}" for finding in checked.findings]
    if checked.outcome_digest != clean.outcome_digest:
        found.append(f"the outcome differs: {checked.operations} operations, {checked.memories} memories")
    if case.executor is not None:
        again = {"SaveParts"} if case.fault is None or case.fault.when == "before" else set()
        lost_work = case.fault is not None and case.fault.when == "before"
        if not (lost_work and case.fault.verb in {None, "SaveParts"}):
            found += [f"embedded {count} times: {part}" for part, count in case.executor.embedded.items() if count > 1]
        if not (lost_work and case.fault.verb in {None, "SavePlan", "Refuse"}):
            found += [f"planned {count} times: {label}" for label, count in case.executor.planned.items() if count > 1]
    return found
