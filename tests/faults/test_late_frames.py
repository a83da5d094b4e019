"""R12: what a dead generation had under way, released in any order after the next one has started.

Frames: a real child holds its answers back and dies; the next one lets them out on its own wire, in an order
that Hypothesis chooses, before, between and after its own. Answers: what the dead child had computed reaches
the ledger late, among the writes of the next. Neither changes anything.
"""

import asyncio
import functools
import gc
import itertools
import json
import sys
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muniment.errors import ExecutorExited
from muniment.executor.protocol import Spec
from muniment.executor.supervisor import ExecutorEvent, Supervisor
from muniment.model import command
from muniment.model.operation import State
from muniment.ports.executor import Embedded, Planned
from muniment.stages import ledger as stage
from tests.support import operations as ops
from tests.support import stores
from tests.support.stores import Driver

CASES: Final = 200
LIMIT_SECONDS: Final = 60.0
GENERATION: Final = 2
"""The one that lives."""

# Generation 1 writes what it would have answered into a file and dies. Generation 2 is told by each text
# which of those frames to let out before its answer.
CHILD: Final = """
import json, os, sys
from pathlib import Path
from muniment.executor import protocol as p
from muniment.model.plan import ModelIdentity, PlannedPart
held = Path(sys.argv[1])
decoder, inbox = p.FrameDecoder(), []
def receive():
    while not inbox:
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(0)
        inbox.extend(map(p.read_to_child, decoder.feed(data)))
    return inbox.pop(0)
g = receive().generation
def identity(name):
    return ModelIdentity(name=name, dimensions=2, window_tokens=8, files={}, tokenizer_digest="")
def answers(request, one):
    if isinstance(request, p.PlanRequest):
        plan = p.PlannedText(profile=one, token_count=1, parts=(PlannedPart(0, 1, 0, len(request.texts[0])),))
        return p.Planned(generation=g, request_id=request.request_id, plans=(plan,))
    row = b"\\0\\0\\x80?\\0\\0\\0" + one.encode()[:1]
    return p.Embedded(generation=g, request_id=request.request_id, vectors=(row,) * len(request.texts))
if g == 1:
    os.write(1, p.frame(p.Ready(generation=g, protocol=p.PROTOCOL_VERSION, identity=identity("the model"))))
    asked = [receive(), receive()]
    frames = [answers(request, "\\x01") for request in asked]
    for n in [request.request_id for request in asked] + list(range(3, 9)):
        frames += [
            p.Failed(generation=g, request_id=n, error="late"),
            p.Embedded(generation=g, request_id=n, vectors=()),
            p.Planned(generation=g, request_id=n, plans=()),
        ]
    frames += [
        p.Ready(generation=g, protocol=p.PROTOCOL_VERSION + 1, identity=identity("another model")),
        p.Failed(generation=g, request_id=None, error="late"),
        p.Heartbeat(generation=g, sequence=1, request_id=1, progress=10**9, tokenizer_problem="late"),
    ]
    held.write_bytes(b"".join(map(p.frame, frames)))
    os.kill(os.getpid(), 9)
late = [len(body).to_bytes(4, "big") + body for body in p.FrameDecoder().feed(held.read_bytes())]
BEFORE_READY
os.write(1, p.frame(p.Ready(generation=g, protocol=p.PROTOCOL_VERSION, identity=identity("the model"))))
while True:
    request = receive()
    if isinstance(request, p.Shutdown):
        sys.exit(0)
    before, after = json.loads(request.texts[0])
    # The request's own ID in the frames of the dead: nothing but the generation tells them apart.
    dead = [msg for msg in map(p.read_to_parent, (frame[4:] for frame in late))]
    def out(chosen):
        for number, own in chosen:
            message = dead[number % len(dead)]
            if own and getattr(message, "request_id", None) is not None:
                message = message.__class__(**{
                    name: getattr(message, name) for name in message.__struct_fields__
                } | {"request_id": request.request_id})
            os.write(1, p.frame(message))
    out(before)
    os.write(1, p.frame(answers(request, "\\x02")))
    out(after)
"""

Released = list[tuple[int, bool]]
FRAMES: Final = st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=6)
ORDERS: Final = st.tuples(st.booleans(), FRAMES, FRAMES)
"""Whether a plan is asked for; what is let out before the answer, and after it."""


class Second:
    """The second generation at work, and all that was seen of it."""

    def __init__(self, supervisor: Supervisor, events: list[ExecutorEvent], lost: Sequence[Any]) -> None:
        self.supervisor = supervisor
        self.events = events
        self.lost = lost


class Loop:
    """A loop that stays while Hypothesis tries one order after another."""

    def __init__(self, directory: Path, before_ready: str = "") -> None:
        self._loop = asyncio.new_event_loop()
        path = directory / "child.py"
        path.write_text(CHILD.replace("BEFORE_READY", before_ready), "utf-8")
        self._argv = [sys.executable, str(path), str(directory / "held")]

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(LIMIT_SECONDS):
                return await work

        return self._loop.run_until_complete(bounded())

    async def second(self) -> Second:
        """Let the first generation take two requests and die; return when the second one is ready."""
        events: list[ExecutorEvent] = []
        numbers = itertools.count(1)

        async def counted() -> int:
            return next(numbers)

        supervisor = Supervisor(
            self._argv,
            Spec(embedder="scripted"),
            role="ingest",
            requests_max=2,
            next_generation=counted,
            observe=events.append,
            startup_seconds=LIMIT_SECONDS,
            stall_seconds=LIMIT_SECONDS,
            backoff_seconds_max=0.02,
        )
        await supervisor.start()
        lost = await asyncio.gather(
            supervisor.plan(["text"], labels=["a"]),
            supervisor.embed(["text"], labels=["b"]),
            return_exceptions=True,
        )
        while ("ready", GENERATION) not in [(event.kind, event.generation) for event in events]:
            await asyncio.sleep(0.005)
        return Second(supervisor, events, lost)

    def close(self) -> None:
        self._loop.close()
        gc.collect()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.close()


async def ask(at: Supervisor, text: str, *, plan: bool) -> Planned | Embedded:
    if plan:
        (planned,) = await at.plan([text], labels=["x"])
        return planned
    return await at.embed([text], labels=["x"])


def changes(second: Second, answer: Planned | Embedded) -> list[str]:
    """What the dead generation has changed, in an answer or in what is known of the living one."""
    health = second.supervisor.health()
    child = second.supervisor._child
    found = [] if answer.generation == GENERATION else [f"an answer of generation {answer.generation}"]
    if isinstance(answer, Planned) and answer.profile != "\x02":
        found.append("the plan of the dead")
    if isinstance(answer, Embedded) and {row[-1] for row in answer.vectors} != {2}:
        found.append("a vector of the dead")
    if (health.generation, health.alive, health.ready) != (GENERATION, True, True):
        found.append("another generation")
    if health.tokenizer_problem is not None or health.last_error != "signal 9 (SIGKILL)":
        found.append("health of the dead")
    if child is None or child.watch.progress != 0:
        found.append("progress of the dead")
    if [event.kind for event in second.events] != ["started", "ready", "exited", "started", "ready"]:
        found.append("events of the dead")
    return found


def test_late_frames_of_a_dead_generation_change_nothing(loop: Loop) -> None:
    second = loop.run(loop.second())
    released = {"cases": 0, "frames": 0, "own": 0}
    assert [type(each) for each in second.lost] == [ExecutorExited] * 2

    @settings(max_examples=max(CASES, settings().max_examples))
    @given(ORDERS)
    @example((True, [(number, True) for number in range(32)], []))
    @example((False, [(number, True) for number in range(32)], []))
    def released_in(order: tuple[bool, Released, Released]) -> None:
        plan, before, after = order
        text = json.dumps([before, after])
        answer = loop.run(ask(second.supervisor, text, plan=plan))
        released["cases"] += 1
        released["frames"] += len(before) + len(after)
        released["own"] += sum(own for _, own in before)
        assert changes(second, answer) == []

    try:
        released_in()
        # The last answer has passed all that was let out before it; this one passes what came after.
        assert changes(second, loop.run(ask(second.supervisor, "[[], []]", plan=False))) == []
    finally:
        loop.run(second.supervisor.stop())
    print(f"late frames: {released}")
    assert released["cases"] >= CASES
    assert released["frames"] >= CASES
    assert released["own"] >= CASES // 4


def test_late_frames_before_the_next_is_ready_change_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "for frame in late[::-1]: os.write(1, frame)")
    second = loop.run(loop.second())
    try:
        assert changes(second, loop.run(ask(second.supervisor, "[[], []]", plan=True))) == []
    finally:
        loop.run(second.supervisor.stop())
        loop.close()


def test_control_a_supervisor_that_believes_the_dead_is_noticed(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of late frame changes something, once nothing looks at its generation."""
    take = Supervisor._take

    def believing(self: Supervisor, child: Any, message: Any, startup: Any) -> None:
        take(self, child, msgspec.structs.replace(message, generation=child.generation), startup)

    monkeypatch.setattr(Supervisor, "_take", believing)
    second = loop.run(loop.second())
    noticed = []
    try:
        # The last three are Ready, Failed without a request, and Heartbeat; the heartbeat does no harm alone.
        for number in (-1, 1):
            text = json.dumps([[(number, True)], []])
            try:
                noticed += changes(second, loop.run(ask(second.supervisor, text, plan=False)))
            except Exception as error:  # noqa: BLE001 whatever it is, it is a change
                noticed.append(type(error).__name__)
    finally:
        loop.run(second.supervisor.stop())
    assert "progress of the dead" in noticed
    assert {"a vector of the dead", "ExecutorProtocolBroken"} & set(noticed), noticed


# Answers that reach the ledger late

PARTS: Final = 4
LATE_FIRST: Final = 100
"""In an order, numbers from here on are late answers, the others are parts that the living one embedded."""


def late_answers(driver: Driver, n: int, plan_n: int) -> list[command.Command]:
    """What the dead generation had under way for the ledger: each part alone, all parts, another plan."""
    groups = [*([index] for index in range(PARTS)), list(range(PARTS))]
    parts = [
        msgspec.structs.replace(
            ops.vectors(n, plan_n, group, generation=1),
            vectors=tuple((index, ops.vector("of the dead", index)) for index in group),
        )
        for group in groups
    ]
    return [*parts, ops.plan(n, driver.accepted[n], parts=2, generation=1)]


def begun() -> tuple[Driver, int, int]:
    """A memory that the first generation planned, and of which the second one has embedded the first part."""
    driver = Driver(stores.in_memory())
    n = driver.accept(ops.memory("m", "A content of some length."))
    driver.advance(n)
    plan_n = driver.plan(n, parts=PARTS)
    assert plan_n is not None
    driver.write(ops.exited(n, generation=1))
    driver.vectors(n, plan_n, [0], generation=GENERATION)
    return driver, n, plan_n


@functools.cache
def undisturbed(order: tuple[int, ...]) -> tuple[Any, ...]:
    """The same without the late answers."""
    return finished(order)


def finished(order: Sequence[int]) -> tuple[Any, ...]:
    """Everything that the ledger holds once the second generation has embedded the rest."""
    driver, n, plan_n = begun()
    late = late_answers(driver, n, plan_n)
    for number in order:
        asked = (
            late[number - LATE_FIRST]
            if number >= LATE_FIRST
            else ops.vectors(n, plan_n, [number], generation=GENERATION)
        )
        [reply], _ = driver.store.transact([asked])
        assert reply.error is None
    assert driver.commit(n) is State.COMMITTED
    driver.transact(*(late[number - LATE_FIRST] for number in order if number >= LATE_FIRST))
    return driver.store.read(stores.state_digest), driver.head(), driver.rows("vector")


def mixed() -> st.SearchStrategy[list[int]]:
    lates = st.lists(st.integers(LATE_FIRST, LATE_FIRST + PARTS + 1), min_size=1, max_size=8)
    return lates.flatmap(lambda chosen: st.permutations([1, 2, 3, *chosen]))


@settings(max_examples=max(CASES, settings().max_examples))
@given(mixed())
def test_late_answers_of_a_dead_generation_change_nothing_in_the_ledger(order: list[int]) -> None:
    assert finished(order) == undisturbed(tuple(number for number in order if number < LATE_FIRST))


def test_control_a_ledger_that_takes_late_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    save = stage._save_parts

    def unfenced(rows: Any, asked: command.SaveParts) -> command.Standing:
        return save(rows, msgspec.structs.replace(asked, generation=max(asked.generation, GENERATION)))

    clean = finished([1, 2, 3])
    monkeypatch.setattr(stage, "_save_parts", unfenced)
    assert finished([LATE_FIRST + 2, 1, 2, 3]) != clean
