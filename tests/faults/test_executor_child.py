"""Real children that are killed, write garbage, print, fail, hang or lose their parent."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import uvloop

from muniment.adapters.embedders.synthetic import SyntheticEmbedder
from muniment.errors import (
    ExecutorExited,
    ExecutorFailed,
    ExecutorFault,
    ExecutorProtocolBroken,
    ExecutorStalled,
    InvariantBroken,
    LedgerUnavailable,
)
from muniment.executor import supervisor
from muniment.executor.child import tally_lines
from muniment.executor.protocol import Spec
from muniment.executor.supervisor import ExecutorEvent, Supervisor, backoff_seconds, exit_text
from muniment.executor_wiring import child_argv
from muniment.ports.executor import Embedded

SYNTHETIC = Spec(embedder="synthetic", heartbeat_seconds=0.02)
LIMIT_SECONDS = 30.0
"""How long a test waits for what must happen; nothing here is measured by time."""

# A child with the real loop and synthetic vectors, in which some texts do what models and their libraries
# have done: print, read stdin, raise, compute for long, crash.
HARMFUL_CHILD = """
import ctypes, os, sys, time
from muniment import executor_wiring
from muniment.adapters.embedders.synthetic import SyntheticEmbedder
from muniment.errors import ConfigError, ExecutorFailed
from muniment.executor import child

class Harmful(SyntheticEmbedder):
    def embed(self, texts, advance=lambda: None):
        for text in texts:
            if text.startswith("work "):
                for _ in range(int(text.split()[1])):
                    time.sleep(0.1)
                    advance()
            if text.startswith("sleep "):
                time.sleep(float(text.split()[1]))
            if text == "print":
                print("a stray print")
                os.write(1, b"a stray write\\n")
                assert sys.stdin.read() == "", "frames can be read by others"
            if text == "cannot":
                raise ExecutorFailed("this text cannot be embedded")
            if text == "bug":
                raise ZeroDivisionError("a bug")
            if text == "crash":
                ctypes.string_at(0)
            if text == "exit":
                os._exit(7)
            if text == "not finite":
                return super().embed(texts, advance) * float("nan")
        return super().embed(texts, advance)

def load(spec):
    if spec.model == "missing":
        raise ConfigError("embedder", "the weights are missing")
    if spec.model == "slow":
        time.sleep(60)
    return Harmful(), executor_wiring.load(spec)[1]

{before}
child.run(load)
"""

# A child that is no child of ours: it says what the behaviour tells it, byte for byte.
SCRIPTED_CHILD = """
import os, sys, time
from muniment.executor import protocol as p
from muniment.model.plan import ModelIdentity, PlannedPart
frames = p.FrameDecoder()
inbox = []
def receive():
    while not inbox:
        data = os.read(0, 65536)
        if not data:
            sys.exit(0)
        inbox.extend(map(p.read_to_child, frames.feed(data)))
    return inbox.pop(0)
def send(message):
    os.write(1, p.frame(message))
hello = receive()
g = hello.generation
identity = ModelIdentity(name="scripted", dimensions=2, window_tokens=8, files={{}}, tokenizer_digest="")
ready = p.Ready(generation=g, protocol=p.PROTOCOL_VERSION, identity=identity)
row = b"\\0\\0\\x80?\\0\\0\\0\\0"
def embedded(request, **changed):
    fields = dict(generation=g, request_id=request.request_id, vectors=(row,) * len(request.texts))
    return p.Embedded(**(fields | changed))
def planned(request, parts, **changed):
    plan = p.PlannedText(**(dict(profile="x", token_count=1, parts=parts) | changed))
    return p.Planned(generation=g, request_id=request.request_id, plans=(plan,))
{behaviour}
"""


class Running:
    """A supervisor at work, with what it reported."""

    def __init__(self, supervised: Supervisor, events: list[ExecutorEvent]) -> None:
        self.supervisor = supervised
        self.events = events

    def kinds(self) -> list[tuple[str, int]]:
        return [(event.kind, event.generation) for event in self.events]

    def pid(self, generation: int) -> int:
        pids = [
            event.pid for event in self.events if (event.kind, event.generation) == ("started", generation)
        ]
        assert len(pids) == 1
        assert pids[0] is not None
        return pids[0]

    async def until(self, kind: str, generation: int) -> ExecutorEvent:
        await happens(lambda: (kind, generation) in self.kinds())
        return self.events[self.kinds().index((kind, generation))]

    async def in_flight(self) -> None:
        """Wait until the child has been sent a request."""
        await happens(
            lambda: self.supervisor._child is not None and len(self.supervisor._child.in_flight) > 0
        )


async def happens(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not true():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    argv: Sequence[str],
    spec: Spec = SYNTHETIC,
    *,
    startup_seconds: float = LIMIT_SECONDS,
    stall_seconds: float = LIMIT_SECONDS,
    requests_max: int = 1,
    next_generation: Callable[[], Awaitable[int]] | None = None,
) -> AsyncIterator[Running]:
    """A started supervisor; afterwards it must have stopped without a trace."""
    numbers = iter(range(1, 1_000_000))
    events: list[ExecutorEvent] = []

    async def counted() -> int:
        return next(numbers)

    supervised = Supervisor(
        argv,
        spec,
        role="ingest",
        requests_max=requests_max,
        next_generation=next_generation or counted,
        observe=events.append,
        startup_seconds=startup_seconds,
        stall_seconds=stall_seconds,
        backoff_seconds_max=0.02,
    )
    before = asyncio.all_tasks()
    await supervised.start()
    try:
        yield Running(supervised, events)
    finally:
        await supervised.stop()
    assert asyncio.all_tasks() <= before
    ended = [event for event in events if event.kind in ("exited", "stalled", "protocol_broken")]
    started = [event for event in events if event.kind == "started"]
    assert {event.generation for event in started} <= {event.generation for event in ended}
    assert len({event.generation for event in ended}) == len(ended)
    assert not [
        event.pid for event in started if event.pid is not None and Path(f"/proc/{event.pid}").exists()
    ]


def run(main: Awaitable[None]) -> None:
    """Run on a new loop, then let forgotten pipes and processes complain (pytest makes warnings errors)."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * LIMIT_SECONDS):
            await main

    asyncio.run(bounded())
    gc.collect()


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "child.py"
    path.write_text(text, "utf-8")
    return [sys.executable, str(path)]


def harmful(tmp_path: Path, before: str = "") -> list[str]:
    return script(tmp_path, HARMFUL_CHILD.format(before=before))


def scripted(tmp_path: Path, behaviour: str) -> list[str]:
    return script(tmp_path, SCRIPTED_CHILD.format(behaviour=textwrap.dedent(behaviour)))


def expected_rows(texts: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(row.tobytes() for row in SyntheticEmbedder().embed(texts))


# A healthy child


def test_the_bundled_model_plans_and_embeds_through_the_real_child() -> None:
    async def main() -> None:
        async with running(child_argv("ingest"), Spec(embedder="bundled")) as at:
            identity = await at.supervisor.identity()
            text = "The mill stands by the river. " * 20
            (plan,) = await at.supervisor.plan([text], labels=["a"])
            octets = text.encode()
            texts = [octets[part.byte_start : part.byte_end].decode() for part in plan.parts]
            embedded = await at.supervisor.embed(texts, labels=["a"] * len(texts))
            query = await at.supervisor.embed_query("Where is the mill?")
            assert identity.name == "all-MiniLM-L6-v2"
            assert (plan.generation, plan.profile, plan.model) == (1, "sentences-64-1", identity)
            assert len(plan.parts) == 3
            assert plan.token_count == 140
            assert [len(row) for row in (*embedded.vectors, *query.vectors)] == [4 * 384] * 4
            assert at.kinds() == [("started", 1), ("ready", 1)]
            health = at.supervisor.health()
            assert (health.generation, health.alive, health.ready, health.last_error) == (1, True, True, None)
            assert health.heartbeat_age_seconds is not None
            assert health.heartbeat_age_seconds < LIMIT_SECONDS

    run(main())


def test_it_works_under_the_event_loop_of_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_SECONDS), running(harmful(tmp_path)) as at:
            assert (await at.supervisor.embed(["a"], labels=["a"])).vectors == expected_rows(["a"])
            dying = asyncio.create_task(at.supervisor.embed(["sleep 60"], labels=["a"]))
            await at.in_flight()
            os.kill(at.pid(1), signal.SIGKILL)
            with pytest.raises(ExecutorExited, match=r"signal 9 \(SIGKILL\)"):
                await dying
            assert (await at.supervisor.embed(["b"], labels=["b"])).generation == 2
            waiting = asyncio.create_task(at.supervisor.embed(["sleep 60"], labels=["a"]))
            await at.in_flight()
        with pytest.raises(ExecutorExited):
            await waiting

    uvloop.run(main())
    gc.collect()


def test_health_before_the_child_is_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(scripted(tmp_path, "receive()")) as at:
            health = at.supervisor.health()
            assert (health.generation, health.alive, health.ready) == (0, False, False)
            assert health.heartbeat_age_seconds is None
            await at.until("started", 1)
            assert at.supervisor.health().alive
            assert not at.supervisor.health().ready

    run(main())


def test_heartbeats_go_on_while_loading_and_computing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(
            harmful(tmp_path), Spec(embedder="synthetic", model="slow", heartbeat_seconds=0.02)
        ) as at:
            await happens(lambda: at.supervisor.health().heartbeat_age_seconds is not None)
            child = at.supervisor._child
            assert child is not None
            await frames_arrive(child, 5)
            assert not at.supervisor.health().ready
        async with running(harmful(tmp_path)) as at:
            working = asyncio.create_task(at.supervisor.embed(["sleep 0.5"], labels=["a"]))
            await at.in_flight()
            child = at.supervisor._child
            assert child is not None
            await frames_arrive(child, 5)
            assert child.in_flight
            await working

    run(main())


async def frames_arrive(child: supervisor._Child, count: int) -> None:
    for _ in range(count):
        last = child.last_frame
        await happens(lambda last=last: child.last_frame != last)  # type: ignore[misc]


def test_the_child_inherits_no_open_file_of_the_parent(tmp_path: Path) -> None:
    async def main() -> None:
        secret = tmp_path / "store.sqlite"
        with secret.open("wb") as store:
            os.set_inheritable(store.fileno(), True)  # as a careless library might
            async with running(child_argv("ingest")) as at:
                await at.until("ready", 1)
                files = [str(link.readlink()) for link in Path(f"/proc/{at.pid(1)}/fd").iterdir()]
        assert files
        assert str(secret) not in files

    run(main())


# Death


def test_a_child_killed_in_mid_request_fails_that_request_and_no_other(tmp_path: Path) -> None:
    """R11 in small: every kill is counted, each costs one request, the next generation does the rest."""
    kills = 3

    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            for generation in range(1, kills + 1):
                dying = asyncio.create_task(at.supervisor.embed(["sleep 60"], labels=["x"]))
                await at.in_flight()
                queued = [
                    asyncio.create_task(at.supervisor.embed([f"later {n}"], labels=["y"])) for n in range(3)
                ]
                await asyncio.sleep(0)
                os.kill(at.pid(generation), signal.SIGKILL)
                with pytest.raises(ExecutorExited, match=r"^signal 9 \(SIGKILL\)$") as exited:
                    await dying
                assert exited.value.generation == generation
                for n, task in enumerate(queued):
                    done = await task
                    assert done.generation == generation + 1
                    assert done.vectors == expected_rows([f"later {n}"])
                assert at.supervisor.health().last_error == "signal 9 (SIGKILL)"
            ends = [event for event in at.events if event.kind == "exited"]
            assert len(ends) == kills
            print(f"killed children: {len(ends)}")

    run(main())


def test_a_kill_while_planning_a_real_text_with_the_real_child() -> None:
    async def main() -> None:
        async with running(child_argv("ingest")) as at:
            planning = asyncio.create_task(at.supervisor.plan(["word. " * 500_000], labels=["long"]))
            await at.in_flight()
            os.kill(at.pid(1), signal.SIGKILL)
            with pytest.raises(ExecutorExited) as exited:
                await planning
            assert exited.value.generation == 1
            (plan,) = await at.supervisor.plan(["word."], labels=["short"])
            assert plan.generation == 2

    run(main())


def test_a_bug_ends_the_child_and_its_exit_is_told(tmp_path: Path) -> None:
    endings = {
        "bug": "exit status 1",
        "exit": "exit status 7",
        "crash": "signal 11 (SIGSEGV)",
        "not finite": "exit status 1",
    }

    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            for generation, (text, ending) in enumerate(endings.items(), 1):
                with pytest.raises(ExecutorExited) as exited:
                    await at.supervisor.embed([text], labels=["x"])
                assert str(exited.value) == ending
                assert exited.value.generation == generation
            assert (await at.supervisor.embed(["fine"], labels=["x"])).generation == len(endings) + 1

    run(main())


def test_what_a_model_cannot_do_is_an_answer_and_the_child_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            with pytest.raises(ExecutorFailed, match="this text cannot be embedded") as failed:
                await at.supervisor.embed(["cannot"], labels=["x"])
            assert failed.value.generation == 1
            assert (await at.supervisor.embed(["fine"], labels=["x"])).generation == 1
            with pytest.raises(ExecutorFailed, match="does not fit a frame"):
                await at.supervisor.plan(["x" * (64 * 1024 * 1024)], labels=["x"])
            assert (await at.supervisor.embed(["fine"], labels=["x"])).generation == 1

    run(main())


def test_stray_prints_cannot_break_frames_nor_reads_steal_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            done = await at.supervisor.embed(["print"], labels=["x"])
            assert (done.generation, done.vectors) == (1, expected_rows(["print"]))
            assert (await at.supervisor.embed(["after"], labels=["x"])).generation == 1

    run(main())
    assert "a stray write" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_for_the_parent_to_decide(tmp_path: Path, number: int) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            await at.until("ready", 1)
            os.kill(at.pid(1), number)
            working = asyncio.create_task(at.supervisor.embed(["sleep 0.2"], labels=["x"]))
            await at.in_flight()
            os.kill(at.pid(1), number)
            assert (await working).generation == 1
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


# Starting


def test_a_model_that_cannot_be_loaded_is_named_and_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path), Spec(embedder="synthetic", model="missing")) as at:
            waiting = asyncio.create_task(at.supervisor.embed(["x"], labels=["x"]))
            await at.until("exited", 2)
            assert at.supervisor.health().last_error == "exit status 1: embedder: the weights are missing"
            assert not waiting.done()
        with pytest.raises(ExecutorExited, match="stopped"):
            await waiting
        assert not [event for event in at.events if event.kind == "ready"]

    run(main())


def test_a_child_that_does_not_become_ready_in_time_is_ended(tmp_path: Path) -> None:
    async def main() -> None:
        slow = Spec(embedder="synthetic", model="slow")
        async with running(harmful(tmp_path), slow, startup_seconds=0.5) as at:
            ended = await at.until("exited", 1)
            assert ended.message == "signal 9 (SIGKILL): not ready within 0.5 seconds"
            await at.until("started", 2)

    run(main())


def test_the_startup_limit_ends_when_the_child_is_ready(tmp_path: Path) -> None:
    behaviour = "send(ready)\nwhile True: receive()"

    async def main() -> None:
        # On a busy machine the first children may be too late; the one that is in time must stay.
        async with running(scripted(tmp_path, behaviour), startup_seconds=0.6) as at:
            await happens(lambda: bool(at.events) and at.events[-1].kind == "ready")
            in_time = at.events[-1]
            await asyncio.sleep(0.8)
            assert at.events[-1] is in_time

    run(main())


def test_a_command_that_cannot_be_started_is_reported_and_tried_again() -> None:
    async def main() -> None:
        async with running(["/nonexistent/python"]) as at:
            ended = await at.until("exited", 2)
            assert "cannot be started" in ended.message
            assert ended.pid is None

    run(main())


def test_no_child_starts_without_a_generation_number() -> None:
    answers: list[int | Exception] = [LedgerUnavailable("locked"), LedgerUnavailable("locked"), 40]

    async def next_generation() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        async with running(child_argv("ingest"), next_generation=next_generation) as at:
            assert (await at.supervisor.embed(["x"], labels=["x"])).generation == 40
            assert at.kinds() == [("started", 40), ("ready", 40)]
            assert at.supervisor.health().last_error == "no generation number: locked"

    run(main())


def test_a_bug_in_the_caller_ends_the_supervision_and_is_raised() -> None:
    async def next_generation() -> int:
        raise ZeroDivisionError

    async def main() -> None:
        supervised = Supervisor(
            child_argv("ingest"),
            SYNTHETIC,
            role="query",
            requests_max=1,
            next_generation=next_generation,
            observe=lambda event: None,
            startup_seconds=1,
            stall_seconds=1,
            backoff_seconds_max=1,
        )
        await supervised.start()
        with pytest.raises(InvariantBroken):
            await supervised.start()
        with pytest.raises(ExecutorExited):
            await supervised.embed(["x"], labels=["x"])
        with pytest.raises(ExecutorExited):
            await supervised.identity()
        with pytest.raises(ZeroDivisionError):
            await supervised.join()
        with pytest.raises(ZeroDivisionError):
            await supervised.stop()

    run(main())


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (1000, 5.0)]
)
def test_backoff_doubles_up_to_its_limit(failures: int, seconds: float) -> None:
    assert backoff_seconds(failures, 5.0) == pytest.approx(seconds)


def test_a_request_that_was_done_resets_the_backoff(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            for _ in range(2):
                with pytest.raises(ExecutorExited):
                    await at.supervisor.embed(["exit"], labels=["x"])
            await at.until("ready", 3)
            assert at.supervisor._failures == 2
            await at.supervisor.embed(["fine"], labels=["x"])
            assert at.supervisor._failures == 0

    run(main())


@pytest.mark.parametrize(
    ("status", "text"), [(0, "exit status 0"), (-9, "signal 9 (SIGKILL)"), (-77, "signal 77")]
)
def test_exit_text(status: int, text: str) -> None:
    assert exit_text(status) == text


# The protocol, broken in each way that a frame can break it

READY = "send(ready); request = receive(); "
BROKEN: dict[str, tuple[str, str]] = {
    "garbage": ("os.write(1, bytes([255]) * 100)", "a frame of 4294967295 bytes"),
    "a text line": ('os.write(1, b"hello world")', "a frame of"),
    "no message": ("os.write(1, bytes([0, 0, 0, 1, 0xc1]))", "no message"),
    "another request": ("send(embedded(request, request_id=999))", "request 999"),
    "another kind": (
        "send(planned(request, (PlannedPart(0, 1, 0, 4),)))",
        "Planned answers an embed request",
    ),
    "a vector too few": ("send(embedded(request, vectors=()))", "0 vectors for 1 texts"),
    "a vector too short": ("send(embedded(request, vectors=(row[:4],)))", "not of 8 bytes"),
    "a vector that is not finite": (
        "send(embedded(request, vectors=(row[:4] * 1 + b'\\0\\0\\xc0\\x7f',)))",
        "not finite",
    ),
    "ready twice": ("send(ready)", "twice"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_child_that_breaks_the_protocol_is_ended(tmp_path: Path, fault: str) -> None:
    behaviour, text = BROKEN[fault]

    async def main() -> None:
        async with running(scripted(tmp_path, f"{READY}{behaviour}; time.sleep(60)")) as at:
            with pytest.raises(ExecutorProtocolBroken, match=text) as broken:
                await at.supervisor.embed(["text"], labels=["x"])
            assert broken.value.generation == 1
            event = await at.until("protocol_broken", 1)
            assert event.message == str(broken.value)
            assert ("exited", 1) not in at.kinds()
            await at.until("started", 2)

    run(main())


@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        ("PlannedPart(0, 1, 0, 3)", ""),
        ("PlannedPart(0, 1, 1, 4)", ""),
        ("PlannedPart(0, 1, 0, 4)", ", token_count=2"),
        ("", ""),
    ],
    ids=["a byte lost at the end", "a byte lost at the start", "false token count", "no part"],
)
def test_a_plan_that_loses_a_byte_is_not_believed(tmp_path: Path, parts: str, changed: str) -> None:
    behaviour = READY + f"send(planned(request, ({parts}{',' if parts else ''}){changed})); time.sleep(60)"

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour)) as at:
            with pytest.raises(ExecutorProtocolBroken):
                await at.supervisor.plan(["text"], labels=["x"])

    run(main())


def test_control_the_scripted_child_is_believed_when_it_is_right(tmp_path: Path) -> None:
    behaviour = """
    send(ready)
    while True:
        request = receive()
        if isinstance(request, p.PlanRequest):
            send(planned(request, (PlannedPart(0, 1, 0, 4),)))
        else:
            send(embedded(request))
    """

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour)) as at:
            (plan,) = await at.supervisor.plan(["text"], labels=["x"])
            assert len(plan.parts) == 1
            assert len((await at.supervisor.embed(["a", "b"], labels=["x", "y"])).vectors) == 2
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("send(p.Ready(generation=g, protocol=9, identity=identity)); time.sleep(60)", "speaks protocol 9"),
        ("send(p.Embedded(generation=g, request_id=1, vectors=())); time.sleep(60)", "whose turn it is not"),
        ("os.write(1, b'Loading model...\\n'); time.sleep(60)", "a frame of"),
    ],
    ids=["another version", "an answer before ready", "text before ready"],
)
def test_a_broken_start_costs_no_request(tmp_path: Path, behaviour: str, text: str) -> None:
    async def main() -> None:
        async with running(scripted(tmp_path, behaviour)) as at:
            waiting = asyncio.create_task(at.supervisor.embed(["x"], labels=["x"]))
            event = await at.until("protocol_broken", 2)
            assert text in event.message
            assert not waiting.done()
        with pytest.raises(ExecutorExited):
            await waiting

    run(main())


def test_another_model_after_a_restart_is_refused(tmp_path: Path) -> None:
    behaviour = """
    if g > 1:
        identity = ModelIdentity(name="other", dimensions=2, window_tokens=8, files={}, tokenizer_digest="")
        ready = p.Ready(generation=g, protocol=p.PROTOCOL_VERSION, identity=identity)
    send(ready)
    receive()
    os._exit(3)
    """

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour)) as at:
            with pytest.raises(ExecutorExited, match="exit status 3"):
                await at.supervisor.embed(["x"], labels=["x"])
            event = await at.until("protocol_broken", 2)
            assert "the model changed from scripted to other" in event.message
            assert (await at.supervisor.identity()).name == "scripted"

    run(main())


def test_frames_of_another_generation_change_nothing(tmp_path: Path) -> None:
    behaviour = """
    send(p.Ready(generation=g + 1, protocol=99, identity=identity))
    send(p.Failed(generation=g - 1, request_id=None, error="old"))
    send(ready)
    request = receive()
    send(embedded(request, generation=g - 1, vectors=()))
    send(p.Failed(generation=g + 1, request_id=request.request_id, error="a later one"))
    send(ready.__class__(generation=g - 1, protocol=p.PROTOCOL_VERSION, identity=identity))
    send(embedded(request))
    receive()
    """

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour)) as at:
            done = await at.supervisor.embed(["x"], labels=["x"])
            assert (done.generation, len(done.vectors)) == (1, 1)
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


def test_a_child_that_closes_its_output_and_lives_on_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.2)

    async def main() -> None:
        async with running(scripted(tmp_path, READY + "os.close(1); time.sleep(60)")) as at:
            with pytest.raises(ExecutorExited, match=r"signal 9 \(SIGKILL\): still alive"):
                await at.supervisor.embed(["x"], labels=["x"])

    run(main())


# Order and cancelling


def test_requests_are_answered_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async def main() -> None:
        order: list[str] = []

        async def ask(text: str) -> None:
            await at.supervisor.embed([text], labels=["x"])
            order.append(text)

        async with running(harmful(tmp_path), requests_max=2) as at, asyncio.TaskGroup() as group:
            texts = ["sleep 0.2", *(f"part {number}" for number in range(50))]
            for text in texts:
                group.create_task(ask(text))
                await asyncio.sleep(0)
        assert order == texts

    run(main())


def test_no_more_requests_than_allowed_are_with_the_child(tmp_path: Path) -> None:
    """One is computed while the next waits there, so that it is never idle; more would only be lost."""
    behaviour = """
    send(ready)
    first, second = receive(), receive()
    time.sleep(0.5)
    assert not inbox and not select.select([0], [], [], 0)[0], "a third request was sent"
    for request in (first, second):
        send(embedded(request))
    while True:
        send(embedded(receive()))
    """

    async def main() -> None:
        async with running(
            scripted(tmp_path, "import select\n" + textwrap.dedent(behaviour)), requests_max=2
        ) as at:
            done = await asyncio.gather(*(at.supervisor.embed(["x"], labels=["x"]) for _ in range(5)))
            assert {each.generation for each in done} == {1}

    run(main())


def test_all_that_is_with_a_child_is_lost_with_it_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path), requests_max=2) as at:
            asked = [
                asyncio.create_task(at.supervisor.embed([text], labels=["x"]))
                for text in ("sleep 60", "behind it", "later", "last")
            ]
            await happens(
                lambda: at.supervisor._child is not None and len(at.supervisor._child.in_flight) == 2
            )
            os.kill(at.pid(1), signal.SIGKILL)
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(each) for each in results] == [ExecutorExited, ExecutorExited, Embedded, Embedded]
            assert [each.generation for each in results] == [1, 1, 2, 2]  # type: ignore[union-attr]
            assert results[0] is not results[1], "one error, raised in two tasks"

    run(main())


def test_answers_in_another_order_break_the_protocol(tmp_path: Path) -> None:
    behaviour = """
    send(ready)
    first, second = receive(), receive()
    send(embedded(second))
    time.sleep(60)
    """

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour), requests_max=2) as at:
            asked = [at.supervisor.embed(["x"], labels=["x"]) for _ in range(2)]
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(each) for each in results] == [ExecutorProtocolBroken] * 2

    run(main())


# The watchdog, with real children (its rules: tests/unit/test_watchdog.py)

STALL_SECONDS = 1.0


def test_a_child_that_hangs_while_its_heart_beats_is_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path), stall_seconds=STALL_SECONDS) as at:
            with pytest.raises(ExecutorStalled, match="no progress for") as stalled:
                await at.supervisor.embed(["sleep 60"], labels=["x"])
            assert stalled.value.generation == 1
            assert (await at.until("stalled", 1)).message == str(stalled.value)
            assert (await at.supervisor.embed(["fine"], labels=["x"])).generation == 2

    run(main())


def test_a_child_that_is_slow_and_goes_on_is_left_alone(tmp_path: Path) -> None:
    """One request takes three times the stall budget, in steps of a tenth of it."""

    async def main() -> None:
        async with running(harmful(tmp_path), stall_seconds=STALL_SECONDS) as at:
            await at.until("ready", 1)
            began = time.monotonic()
            assert (await at.supervisor.embed(["work 30"], labels=["x"])).generation == 1
            assert time.monotonic() - began > 3 * STALL_SECONDS
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_child_is_ended(tmp_path: Path, *, busy: bool) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path), stall_seconds=STALL_SECONDS) as at:
            await at.until("ready", 1)
            working = asyncio.create_task(at.supervisor.embed(["work 100"], labels=["x"])) if busy else None
            if busy:
                await at.in_flight()
            os.kill(at.pid(1), signal.SIGSTOP)
            assert "for" in (await at.until("stalled", 1)).message
            if working is not None:
                with pytest.raises(ExecutorStalled):
                    await working
            assert (await at.supervisor.embed(["fine"], labels=["x"])).generation == 2

    run(main())


def test_a_parent_that_was_held_up_does_not_blame_the_child(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(harmful(tmp_path), stall_seconds=STALL_SECONDS) as at:
            await at.until("ready", 1)
            working = asyncio.create_task(at.supervisor.embed(["work 25"], labels=["x"]))
            await at.in_flight()
            time.sleep(2 * STALL_SECONDS)
            assert (await working).generation == 1
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


def test_a_slow_start_has_a_budget_of_its_own(tmp_path: Path) -> None:
    behaviour = "time.sleep(1.0)\nsend(ready)\nwhile True: send(embedded(receive()))"

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour), stall_seconds=0.2) as at:
            done = await at.supervisor.embed(["x"], labels=["x"])
            assert done.generation == 1

    run(main())


def test_a_parent_that_was_held_up_while_a_child_starts_lets_it_start(tmp_path: Path) -> None:
    """Its Ready lies in the pipe when the parent wakes, long after the budget."""
    behaviour = "send(ready)\nwhile True: send(embedded(receive()))"

    async def main() -> None:
        async with running(scripted(tmp_path, behaviour), startup_seconds=3.0) as at:
            await at.until("started", 1)
            time.sleep(4.0)
            assert (await at.supervisor.embed(["x"], labels=["x"])).generation == 1
            assert at.kinds() == [("started", 1), ("ready", 1)]

    run(main())


def test_cancelled_callers_never_shift_the_answers_of_others(tmp_path: Path) -> None:
    """Callers give up before, while and after their request is on the wire; every other answer is its own."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def main() -> None:
        sent_and_cancelled = right = 0
        async with running(harmful(tmp_path)) as at:
            await at.until("ready", 1)
            tasks: dict[asyncio.Task[Embedded], str] = {}
            for number in range(150):
                text = f"sleep 0.00{chance.randrange(5)} {number}"
                tasks[asyncio.create_task(at.supervisor.embed([text], labels=["x"]))] = text
                await asyncio.sleep(chance.random() * 0.006)
                victim = chance.choice(list(tasks))
                if chance.random() < 0.5 and not victim.done():
                    child = at.supervisor._child
                    assert child is not None
                    flying = bool(child.in_flight) and child.in_flight[0].message.texts == (tasks[victim],)
                    sent_and_cancelled += flying
                    victim.cancel()
            for task, text in tasks.items():
                try:
                    assert (await task).vectors == expected_rows([text])
                    right += 1
                except asyncio.CancelledError:
                    assert task.cancelled()
            # At least one cancelled request is in flight for certain.
            last = asyncio.create_task(at.supervisor.embed(["sleep 0.2"], labels=["x"]))
            await at.in_flight()
            last.cancel()
            assert (await at.supervisor.embed(["after"], labels=["x"])).vectors == expected_rows(["after"])
            assert at.kinds() == [("started", 1), ("ready", 1)]
        print(f"cancelled in flight: {sent_and_cancelled + 1}, answered right: {right}")
        assert right >= 20

    run(main())


def test_labels_and_texts_must_match() -> None:
    async def main() -> None:
        async with running(child_argv("ingest")) as at:
            with pytest.raises(InvariantBroken):
                await at.supervisor.embed(["a", "b"], labels=["x"])

    run(main())


# The tally


def test_the_tally_has_one_line_for_each_part_that_was_embedded(tmp_path: Path) -> None:
    tally = tmp_path / "tally"

    async def main() -> None:
        async with running(harmful(tmp_path), Spec(embedder="synthetic", tally=str(tally))) as at:
            await at.supervisor.embed(["a", "b"], labels=["m/0", "m/1"])
            await at.supervisor.embed_query("not counted")
            await at.supervisor.plan(["not counted"], labels=["m"])
            with pytest.raises(ExecutorFailed):
                await at.supervisor.embed(["cannot"], labels=["never"])
            with pytest.raises(ExecutorExited):
                await at.supervisor.embed(["exit"], labels=["never"])
            await at.supervisor.embed(["c"], labels=["a line\nend and a \\ backslash"])

    run(main())
    assert tally.read_bytes() == b"1 m/0\n1 m/1\n2 a line\\nend and a \\\\ backslash\n"


def test_no_label_can_make_two_lines() -> None:
    assert tally_lines(3, ["a\r\nb", "\ud800"]) == b"3 a\\r\\nb\n3 \\ud800\n"


def test_a_tally_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        spec = Spec(embedder="synthetic", tally=str(tmp_path / "absent" / "tally"))
        async with running(harmful(tmp_path), spec) as at:
            assert "executor_tally" in (await at.until("exited", 1)).message

    run(main())


# Stopping


@pytest.mark.parametrize("text", ["sleep 60", "idle"])
def test_stop_ends_a_child_at_once_whatever_it_does(tmp_path: Path, text: str) -> None:
    async def main() -> None:
        tasks = []
        async with running(harmful(tmp_path)) as at:
            await at.until("ready", 1)
            if text != "idle":
                tasks = [asyncio.create_task(at.supervisor.embed([text], labels=["x"])) for _ in range(3)]
                await at.in_flight()
        assert at.events[-1].message == "exit status 0"
        assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == [
            ExecutorExited
        ] * len(tasks)
        with pytest.raises(ExecutorExited, match="stopped"):
            await at.supervisor.embed(["x"], labels=["x"])

    run(main())


def test_stop_kills_a_child_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.2)

    async def main() -> None:
        async with running(harmful(tmp_path)) as at:
            await at.until("ready", 1)
            os.kill(at.pid(1), signal.SIGSTOP)
            await happens(lambda: state(at.pid(1)) == "T")
        assert at.events[-1].message == "signal 9 (SIGKILL): did not stop by itself"

    run(main())


def test_stop_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    """Before the first step, while spawning, loading, backing off, and waiting for a number."""

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def main() -> None:
        for pause in (0.0, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2):
            async with running(harmful(tmp_path)):
                if pause:
                    await asyncio.sleep(pause)
        async with running([sys.executable, "-c", "raise SystemExit(4)"]) as at:
            await at.until("exited", 3)
        async with running(child_argv("ingest"), next_generation=never):
            await asyncio.sleep(0.01)

    run(main())


def test_many_generations_leave_no_descriptor_behind() -> None:
    async def main() -> None:
        async with running([sys.executable, "-c", "raise SystemExit(4)"]) as at:
            await at.until("exited", 2)
            before = len(list(Path("/proc/self/fd").iterdir()))
            await at.until("exited", 8)
            after = len(list(Path("/proc/self/fd").iterdir()))
            assert after <= before + 3  # the pipes of one child

    run(main())


# The parent's death

PARENT = """
import asyncio, sys
from muniment.executor.supervisor import Supervisor
from muniment.executor.protocol import Spec

# No heartbeat in time to notice a broken pipe: that is not the way that these tests are about.
spec = Spec(embedder="synthetic", heartbeat_seconds=3600.0)

async def main():
    async def one():
        return 1
    def observe(event):
        if event.kind in ("started", "ready"):
            print(event.kind, event.pid, flush=True)
    supervisor = Supervisor({argv!r}, spec, role="ingest", requests_max=1, next_generation=one,
                            observe=observe, startup_seconds=60, stall_seconds=3600, backoff_seconds_max=60)
    await supervisor.start()
    await supervisor.embed(["{text}"], labels=["x"])
    print("done", 0, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def state(pid: int) -> str:
    """The state letter of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ends(pid: int, seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if state(pid) in ("", "Z", "X"):  # a zombie belongs to whoever inherited it
            return True
        time.sleep(0.01)
    return False


def orphan(argv: list[str], text: str, *, stopped: bool = False) -> int:
    """Start a parent with a child, kill the parent with SIGKILL, return the child's process ID."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(argv=argv, text=text)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        word, pid = parent.stdout.readline().split()
        assert word == "started"
        assert parent.stdout.readline().startswith("ready")
        if text == "idle":
            assert parent.stdout.readline().startswith("done")
        else:
            time.sleep(0.2)  # the request is read and being computed
        assert state(int(pid)) not in ("", "Z", "X")
        if stopped:
            os.kill(int(pid), signal.SIGSTOP)
            while state(int(pid)) != "T":
                time.sleep(0.005)
        parent.kill()
    return int(pid)


NO_HELP_FROM_THE_KERNEL = "child._die_with_parent = lambda: None"
NO_READER = """
def read_once(source, inbox):
    for body in child.FrameDecoder().feed(os.read(source, 65536)):
        inbox.put(child.read_to_child(body))
    time.sleep(60)
child._read = read_once
"""


@pytest.mark.parametrize("text", ["idle", "sleep 60"])
@pytest.mark.parametrize("before", ["", NO_HELP_FROM_THE_KERNEL], ids=["both ways", "end of file alone"])
def test_a_child_ends_with_its_parent(tmp_path: Path, text: str, before: str) -> None:
    pid = orphan(harmful(tmp_path, before), text)
    assert ends(pid, LIMIT_SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_stopped_child_ends_with_its_parent(tmp_path: Path) -> None:
    pid = orphan(harmful(tmp_path), "sleep 60", stopped=True)
    assert ends(pid, LIMIT_SECONDS)


def test_control_a_child_without_either_way_outlives_its_parent(tmp_path: Path) -> None:
    pid = orphan(harmful(tmp_path, f"{NO_HELP_FROM_THE_KERNEL}\n{NO_READER}"), "sleep 60")
    try:
        assert not ends(pid, 1.0)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert ends(pid, LIMIT_SECONDS)


# The parent breaks the protocol


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"", 0), (b"\xff\xff\xff\xff", 2), (b"\x00\x00\x00\x01\xc1", 2), (b"\x00\x00\x00\x03\x92\xa8s", 2)],
    ids=["end of file", "a false length", "no message", "half a message"],
)
def test_a_child_does_not_guess_what_its_parent_means(data: bytes, status: int) -> None:
    done = subprocess.run(
        child_argv("ingest"), input=data, capture_output=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == status
    assert done.stdout == b""
    assert (b"executor child:" in done.stderr) == (status != 0)


def test_faults_carry_their_generation() -> None:
    for fault in (ExecutorExited, ExecutorProtocolBroken, ExecutorFailed):
        assert issubclass(fault, ExecutorFault)
        assert (fault("text").generation, fault("text", 3).generation, str(fault("text", 3))) == (
            0,
            3,
            "text",
        )
