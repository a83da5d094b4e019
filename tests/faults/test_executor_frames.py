"""R11: the ingesting child is killed around each frame that goes to it or comes from it.

A real child, a real store, everything behind the port wired as the server wires it. Whatever frame the kill
hits: a new generation goes on, the exit is counted once for each operation that had something with the child
and for no other, no state ends by it, and the vectors are those of an undisturbed run, byte for byte.
"""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import apsw
import msgspec
import pytest

from muniment import wiring
from muniment.config import Config
from muniment.executor import protocol, supervisor
from muniment.executor.supervisor import Supervisor
from muniment.model import command
from muniment.runtime.ingestion import Pipeline
from muniment.runtime.service import Service
from muniment.stages import ledger as stage
from tests.support import submissions

CASE_SECONDS_MAX: Final = 120.0
AT_ONCE: Final = 4
CASES_MIN: Final = 80
SETTINGS: Final[dict[str, Any]] = {
    "embedder": "synthetic",
    "part_tokens_max": 8,
    "embed_batch_tokens_max": 8,
    "executor_backoff_seconds_max": 0.05,
    "operations_in_flight_max": 2,
}
SENTENCE: Final = "Boat {} passed the lock before noon. "
Side = Literal["before", "after"]


class Kill(msgspec.Struct, frozen=True):
    """Before or after the n-th frame, counted over both directions, heartbeats left out."""

    frame: int
    side: Side

    def __str__(self) -> str:
        return f"{self.side} frame {self.frame}"


class Case(msgspec.Struct, kw_only=True):
    """One run: where the child is to be killed, and what was seen."""

    path: Path
    kill: Kill | None
    frames: int = 0
    killed: str | None = None
    """The frame that the kill hit."""
    with_child: frozenset[int] = frozenset()
    """Operations of which something was with the child when it ended, by the supervisor's own book."""
    ending: wiring._Ending | None = None


class NobodyAsks:
    """In the place of the child for queries, of which there are none here."""

    def __init__(self, ingest: Supervisor) -> None:
        self.identity = ingest.identity
        self.health = ingest.health

    async def start(self) -> None:
        """There is nothing to start."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    async def join(self) -> None:
        await asyncio.Event().wait()


class Wired:
    """Cases by data directory, and the hooks in the supervisor that count frames and kill."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.by_supervisor: dict[int, Case] = {}

    def frame(self, of: Supervisor, child: Any, message: Any, handle: Callable[[], Any]) -> Any:
        case = self.by_supervisor.get(id(of))
        if case is None or isinstance(message, protocol.Heartbeat) or message.generation != child.generation:
            return handle()
        case.frames += 1
        hit = case.kill is not None and case.kill.frame == case.frames and case.killed is None
        if hit and case.kill is not None and case.kill.side == "before":
            self._kill(case, child, message)
        result = handle()
        if hit and case.killed is None:
            self._kill(case, child, message)
        return result

    @staticmethod
    def _kill(case: Case, child: Any, message: Any) -> None:
        case.killed = type(message).__name__
        os.kill(child.process.pid, signal.SIGKILL)


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Wired:
    made = Wired()
    children, take, send, bury = (
        wiring._children,
        Supervisor._take,
        Supervisor._send_one,
        Supervisor._bury,
    )

    def with_case(config: Config, *rest: Any) -> Any:
        both = children(config, *rest)
        made.by_supervisor[id(both.ingest)] = made.cases[config.data_dir]
        both.query = NobodyAsks(both.ingest)  # type: ignore[assignment]
        return both

    def taking(self: Supervisor, child: Any, message: Any, startup: Any) -> None:
        made.frame(self, child, message, lambda: take(self, child, message, startup))

    async def sending(self: Supervisor, child: Any, call: Any) -> None:
        message = msgspec.structs.replace(call.message, generation=child.generation)
        await made.frame(self, child, message, lambda: send(self, child, call))

    def burying(self: Supervisor, child: Any, status: int, broken: Any) -> None:
        case = made.by_supervisor.get(id(self))
        if case is not None and not self._stopping.is_set():
            labels = [label for call in child.in_flight for label in call.message.labels]
            case.with_child |= {int(label.split(":")[0]) for label in labels}
        bury(self, child, status, broken)

    monkeypatch.setattr(wiring, "_children", with_case)
    monkeypatch.setattr(Supervisor, "_take", taking)
    monkeypatch.setattr(Supervisor, "_send_one", sending)
    monkeypatch.setattr(Supervisor, "_bury", burying)
    return made


@contextlib.asynccontextmanager
async def serving(case: Case) -> AsyncIterator[Service]:
    case.ending = wiring._Ending()
    config = Config(data_dir=str(case.path), **SETTINGS)
    with wiring._owned(case.path) as directory:
        async with wiring._running(config, directory, case.ending) as service:
            yield service


def workload() -> list[dict[str, Any]]:
    """Memories of one and of many parts, one that waits for another."""
    return [
        submissions.memory("long", "".join(SENTENCE.format(number) for number in range(8))),
        submissions.memory("short", SENTENCE.format("nine")),
        submissions.envelope(
            "waits", "add_memory", {"content": SENTENCE.format("ten") * 3}, dependencies=["short"]
        ),
        submissions.memory("other", "".join(SENTENCE.format(number) for number in range(20, 25))),
    ]


async def run(wired: Wired, case: Case) -> None:
    """Submit all, wait until all have ended."""
    wired.cases[str(case.path)] = case
    async with asyncio.timeout(CASE_SECONDS_MAX), serving(case) as service:
        assert case.ending is not None
        for body in workload():
            await service.submit(msgspec.json.encode(body))
        while not case.ending.asked.is_set() and await unfinished(service):
            await asyncio.sleep(0.01)


async def unfinished(service: Service) -> bool:
    names = [body["operation_id"] for body in workload()]
    receipts = [await service.receipt(name) for name in names]
    return any(receipt.state not in ("committed", "rejected") for receipt in receipts)


def rows(case: Case, statement: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(
        apsw.Connection(str(case.path / "ledger.db"), apsw.SQLITE_OPEN_READONLY)
    ) as store:
        return store.execute(statement).fetchall()


VECTORS: Final = """
SELECT operation.id, vector.part_index, vector.bytes
FROM vector JOIN plan ON plan.n = vector.plan_n JOIN operation ON operation.object_n = plan.object_n
ORDER BY operation.id, vector.part_index
"""
RECEIPTS: Final = """
SELECT n, id, state, executor_generation, executor_exit_count, executor_last_exit, executor_error
FROM operation
"""


# Of the first child: where all is done without a second one, that may be killed too, while it starts.
KILLS: Final = """
SELECT count(*) FROM evidence
WHERE kind = 'exited' AND message LIKE 'ingest%SIGKILL%' AND generation = 1
"""


def violations(case: Case, clean: Case) -> list[str]:
    """Everything in which a run differs from what it must be."""
    assert case.ending is not None
    found = [] if case.ending.fault is None else [f"the server ended: {case.ending.fault!r}"]
    checked, undisturbed = wiring.check(case.path), wiring.check(clean.path)
    found += [f"check: {finding}" for finding in checked.findings]
    if checked.outcome_digest != undisturbed.outcome_digest:
        found.append("another outcome")
    if rows(case, VECTORS) != rows(clean, VECTORS):
        found.append("other vectors")
    for n, name, state, generation, exits, last_exit, error in rows(case, RECEIPTS):
        due = int(n in case.with_child)
        if exits != due:
            found.append(f"{name} counts {exits} exits, not {due}")
        if bool(due) != (last_exit == "signal 9 (SIGKILL)"):
            found.append(f"{name} says of its last exit: {last_exit}")
        if state == "committed" and error is not None:
            found.append(f"{name} committed and has an error: {error}")
        if due and generation < 2:
            found.append(f"{name} was finished by generation {generation}")
    [(kills,)] = rows(case, KILLS)
    if kills != 1:
        found.append(f"the store saw {kills} kills")
    return found


async def run_all(wired: Wired, cases: Sequence[Case]) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> None:
        async with room:
            await run(wired, case)

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(case))


def killed_at(
    tmp_path: Path, wired: Wired, chosen: Callable[[int], Sequence[Kill]]
) -> tuple[Case, list[Case]]:
    async def all_cases() -> tuple[Case, list[Case]]:
        clean = Case(path=tmp_path / "clean", kill=None)
        await run(wired, clean)
        cases = [
            Case(path=tmp_path / f"{number}", kill=kill) for number, kill in enumerate(chosen(clean.frames))
        ]
        await run_all(wired, cases)
        return clean, cases

    return asyncio.run(all_cases())


def every(frames: int) -> list[Kill]:
    """Both sides of every frame that an undisturbed run has."""
    return [Kill(frame, side) for frame in range(1, frames + 1) for side in ("before", "after")]


def test_killed_around_each_frame(tmp_path: Path, wired: Wired) -> None:
    clean, cases = killed_at(tmp_path, wired, every)
    hit = Counter(case.killed for case in cases)
    lost = sum(len(case.with_child) for case in cases)
    print(f"{clean.frames} frames, {len(cases)} kills: {dict(hit)}; operations with the child: {lost}")
    # Two runs need not have the same number of frames: a last one may not come.
    happened = [case for case in cases if case.killed is not None]
    assert len(happened) >= CASES_MIN
    assert {"Ready", "PlanRequest", "Planned", "EmbedRequest", "Embedded"} <= hit.keys()
    assert lost >= CASES_MIN // 2
    wrong = {str(case.kill): found for case in happened if (found := violations(case, clean))}
    assert wrong == {}


# Controls


async def a_verdict(self: Pipeline, request: Any, fault: Any) -> None:
    for n in request.operations:
        await self._write(command.Refuse(n=n, error=str(fault), result=None, now=self._clock.now_us()))


async def nothing_said(self: Pipeline, request: Any, fault: Any) -> None:
    """An exit leaves no evidence."""


CONTROLS: Final = {
    "an exit is a verdict": (Pipeline, "_record", a_verdict, "another outcome"),
    "an exit is not told": (Pipeline, "_record", nothing_said, "counts 0 exits, not 1"),
    "an exit is told for each request": (stage, "_is_recorded", lambda *_: False, "counts 2 exits, not 1"),
}


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS.keys())
def test_control_an_exit_that_is_treated_otherwise_is_noticed(
    tmp_path: Path,
    wired: Wired,
    monkeypatch: pytest.MonkeyPatch,
    control: tuple[Any, str, Any, str],
) -> None:
    target, name, mutant, complaint = control
    monkeypatch.setattr(target, name, mutant)

    def some(frames: int) -> list[Kill]:
        return [Kill(frame, "before") for frame in range(5, frames, 3)]

    clean, cases = killed_at(tmp_path, wired, some)
    found = [each for case in cases if case.killed for each in violations(case, clean)]
    assert any(complaint in each for each in found), found


def test_the_hooks_are_where_frames_pass() -> None:
    assert {"_take", "_send_one", "_bury"} <= vars(supervisor.Supervisor).keys()
