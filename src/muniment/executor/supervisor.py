"""The executor as the stages see it, kept alive: one child, few requests at a time, a new one after each end.

What happens to a child is reported, never judged. Requests that were with a child that ended raise, and
their callers decide; a request that was not sent yet waits for the next generation. A child that makes no
progress is ended (``executor.watchdog``).
"""

import asyncio
import contextlib
import itertools
import math
import signal
import struct
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from muniment.core import planning
from muniment.errors import (
    ExecutorExited,
    ExecutorFailed,
    ExecutorFault,
    ExecutorProtocolBroken,
    ExecutorStalled,
    InvariantBroken,
    Unavailable,
)
from muniment.executor import protocol, watchdog
from muniment.executor.protocol import FrameDecoder, Spec
from muniment.model.plan import ModelIdentity
from muniment.ports.executor import Embedded, ExecutorHealth, Planned

BACKOFF_SECONDS_MIN: Final = 0.1
STOP_SECONDS: Final = 2.0
"""Time that a child gets to end by itself, after Shutdown or after it closed its output."""
READ_BYTES: Final = 1 << 18
VECTOR_ITEM_BYTES: Final = 4
TICK_SECONDS_MAX: Final = 1.0
TICKS_OF_STALL: Final = 20
"""The watchdog looks so many times within the stall budget, and at least once a second."""

Role = Literal["ingest", "query"]
Kind = Literal["started", "ready", "exited", "stalled", "protocol_broken"]

T = TypeVar("T")


class ExecutorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a child.

    Each generation has ``started`` first, at most one ``ready``, and ends with exactly one of ``exited``,
    ``stalled`` and ``protocol_broken``. One that could not even be spawned has ``exited`` alone.
    """

    kind: Kind
    role: Role
    generation: int
    pid: int | None
    message: str


def backoff_seconds(failures: int, seconds_max: float) -> float:
    """Pause before the next child after so many ends without a request done between them: 0.1 s, doubling."""
    return min(BACKOFF_SECONDS_MIN * 2.0 ** min(failures - 1, 32), seconds_max)


def exit_text(status: int) -> str:
    """How a child ended, from the status that ``wait`` gave: ``exit status 1`` or ``signal 9 (SIGKILL)``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


class _Call(Generic[T]):
    """A request on its way: what is sent, who waits, and how an answer becomes a result."""

    def __init__(
        self, message: protocol.Request, result: Callable[[protocol.Answer, ModelIdentity], T]
    ) -> None:
        self.message = message
        self.result = result
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def settle(self, answer: protocol.Answer, identity: ModelIdentity) -> bool:
        """Give the answer to the caller, unless that one has gone; True when the request was done.

        Raises ``ExecutorProtocolBroken`` when the answer does not fit the request.
        """
        if isinstance(answer, protocol.Failed):
            self.fail(ExecutorFailed(answer.error, answer.generation))
            return False
        result = self.result(answer, identity)
        if not self.future.done():
            self.future.set_result(result)
        return True

    def fail(self, fault: ExecutorFault) -> None:
        """Tell the caller, if it still waits."""
        if not self.future.done():
            self.future.set_exception(fault)
            self.future.exception()  # now seen, should the caller be cancelled before it looks


class _Queue:
    """Calls that were not sent yet, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[_Call[Any]] = deque()
        self._filled = asyncio.Event()

    def put(self, call: _Call[Any]) -> None:
        self._waiting.append(call)
        self._filled.set()

    async def get(self) -> _Call[Any]:
        """The next call whose caller still waits. Cancelling loses no call: none is taken before a wait."""
        while True:
            while self._waiting:
                call = self._waiting.popleft()
                if not call.future.done():
                    return call
            self._filled.clear()
            await self._filled.wait()

    def fail_all(self, text: str) -> None:
        for call in self._waiting:
            call.fail(ExecutorExited(text))
        self._waiting.clear()


class _Child:
    """One generation: its process and what is known of it."""

    def __init__(self, generation: int, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.generation = generation
        self.process = process
        self.stdin = process.stdin
        self.stdout = process.stdout
        self.identity: ModelIdentity | None = None
        self.ready = asyncio.Event()
        self.answered = asyncio.Event()
        self.in_flight: deque[_Call[Any]] = deque()
        """Requests that are with the child, in the order in which it has to answer."""
        self.watch = watchdog.Watch()
        self.tokenizer_problem: str | None = None
        self.last_frame: float | None = None
        self.reason: str | None = None
        """Why the child or this supervisor ended it, where the exit status does not say it all."""
        self.stalled = False

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        with contextlib.suppress(ProcessLookupError):  # it has ended and was reaped
            self.process.kill()

    async def reap(self) -> int:
        """The exit status; waits for it, kills after a while. Leaves neither a zombie nor an open pipe."""
        self.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.kill(f"still alive {STOP_SECONDS} seconds after its end of output")
            await self.process.wait()
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # what it had not read is lost with it
            await self.stdin.wait_closed()
        status = self.process.returncode
        if status is None:
            raise InvariantBroken(f"process {self.process.pid} was waited for and has no exit status")
        return status


class NextGeneration(Protocol):
    """Gives store-wide generation numbers."""

    def __call__(self) -> Awaitable[int]:
        """A number that is larger than any before and durably reserved. May raise ``Unavailable``."""
        ...


class Supervisor:
    """Implements ``ports.executor.Executor`` and ``QueryEmbedder``, each over one child process."""

    def __init__(
        self,
        argv: Sequence[str],
        spec: Spec,
        *,
        role: Role,
        requests_max: int,
        next_generation: NextGeneration,
        observe: Callable[[ExecutorEvent], None],
        startup_seconds: float,
        stall_seconds: float,
        backoff_seconds_max: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing starts here. ``observe`` is called on the event loop and must not wait."""
        self._argv = tuple(argv)
        self._spec = spec
        self._role = role
        self._requests_max = requests_max
        self._next_generation = next_generation
        self._observe = observe
        self._startup_seconds = startup_seconds
        self._stall_seconds = stall_seconds
        self._backoff_seconds_max = backoff_seconds_max
        self._clock = clock
        self._request_ids = itertools.count(1)
        self._queue = _Queue()
        self._stopping = asyncio.Event()
        self._identified = asyncio.Event()
        self._identity: ModelIdentity | None = None
        self._child: _Child | None = None
        self._generation = 0
        self._failures = 0
        self._last_error: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin supervising; returns at once."""
        if self._task is not None:
            raise InvariantBroken("the executor was started twice")
        self._task = asyncio.create_task(self._supervise(), name="executor-supervisor")

    async def stop(self) -> None:
        """End the child, reap it, and fail what waits. Raises what ended the supervision, if a bug."""
        self._stopping.set()
        hurry = None
        if self._child is not None:
            self._shut_down(self._child)
            hurry = asyncio.get_running_loop().call_later(
                STOP_SECONDS, self._child.kill, "did not stop by itself"
            )
        try:
            await self.join()
        finally:
            if hurry is not None:
                hurry.cancel()
        self._close()

    async def join(self) -> None:
        """Wait until supervision has ended. Raises what ended it, if that was not ``stop``: a bug."""
        if self._task is not None:
            await asyncio.shield(self._task)

    @property
    def requests_max(self) -> int:
        """Requests that are with the child at one time."""
        return self._requests_max

    async def plan(self, texts: Sequence[str], *, labels: Sequence[str]) -> tuple[Planned, ...]:
        """Plan sources; each answer is checked against the length of its text before it is believed."""
        if len(texts) != len(labels):
            raise InvariantBroken(f"{len(texts)} texts with {len(labels)} labels")
        byte_lengths = [len(text.encode("utf-8")) for text in texts]

        def result(answer: protocol.Answer, identity: ModelIdentity) -> tuple[Planned, ...]:
            if not isinstance(answer, protocol.Planned):
                raise ExecutorProtocolBroken(f"{type(answer).__name__} answers a plan request")
            if len(answer.plans) != len(byte_lengths):
                raise ExecutorProtocolBroken(f"{len(answer.plans)} plans for {len(byte_lengths)} texts")
            return tuple(
                believed(plan, byte_length, answer.generation, identity)
                for plan, byte_length in zip(answer.plans, byte_lengths, strict=True)
            )

        message = protocol.PlanRequest(
            generation=0, request_id=next(self._request_ids), texts=tuple(texts), labels=tuple(labels)
        )
        return await self._ask(_Call(message, result))

    async def embed(self, texts: Sequence[str], *, labels: Sequence[str]) -> Embedded:
        """Embed parts; one label a text."""
        if len(texts) != len(labels):
            raise InvariantBroken(f"{len(texts)} texts with {len(labels)} labels")
        return await self._embed(tuple(texts), tuple(labels))

    async def embed_query(self, text: str) -> Embedded:
        """Embed one query."""
        return await self._embed((text,), ())

    async def identity(self) -> ModelIdentity:
        """The identity of the first child that became ready. A later child with another one is ended."""
        await self._identified.wait()
        if self._identity is None:
            raise ExecutorExited("the executor was stopped before a model was ready")
        return self._identity

    def health(self) -> ExecutorHealth:
        """What is known now."""
        child = self._child
        last_frame = None if child is None else child.last_frame
        return ExecutorHealth(
            generation=self._generation,
            alive=child is not None and child.process.returncode is None,
            ready=child is not None and child.ready.is_set(),
            heartbeat_age_seconds=None if last_frame is None else max(0.0, self._clock() - last_frame),
            last_error=self._last_error,
            tokenizer_problem=None if child is None else child.tokenizer_problem,
        )

    async def _embed(self, texts: tuple[str, ...], labels: tuple[str, ...]) -> Embedded:
        def result(answer: protocol.Answer, identity: ModelIdentity) -> Embedded:
            if not isinstance(answer, protocol.Embedded):
                raise ExecutorProtocolBroken(f"{type(answer).__name__} answers an embed request")
            row_bytes = identity.dimensions * VECTOR_ITEM_BYTES
            if [len(row) for row in answer.vectors] != [row_bytes] * len(texts):
                raise ExecutorProtocolBroken(
                    f"{len(answer.vectors)} vectors for {len(texts)} texts, or not of {row_bytes} bytes each"
                )
            if not all(map(finite, answer.vectors)):
                raise ExecutorProtocolBroken("a vector with a number that is not finite")
            return Embedded(generation=answer.generation, model=identity, vectors=answer.vectors)

        message = protocol.EmbedRequest(
            generation=0, request_id=next(self._request_ids), texts=texts, labels=labels
        )
        return await self._ask(_Call(message, result))

    async def _ask(self, call: _Call[T]) -> T:
        if self._stopping.is_set():
            raise ExecutorExited("the executor is stopped")
        self._queue.put(call)
        return await call.future

    # Supervision

    async def _supervise(self) -> None:
        try:
            while not self._stopping.is_set():
                generation = await self._reserve_generation()
                if generation is not None:
                    if generation <= self._generation:
                        raise InvariantBroken(f"generation {generation} follows {self._generation}")
                    self._generation = generation
                    await self._live_and_die(generation)
                if not self._stopping.is_set():
                    self._failures += 1
                    await self._or_stopped(
                        asyncio.sleep(backoff_seconds(self._failures, self._backoff_seconds_max))
                    )
        finally:
            self._close()

    def _close(self) -> None:
        """Nobody may wait for a supervisor that has ended."""
        self._stopping.set()
        self._identified.set()
        self._queue.fail_all("the executor is stopped")

    async def _reserve_generation(self) -> int | None:
        try:
            return await self._or_stopped(self._next_generation())
        except Unavailable as error:
            self._last_error = f"no generation number: {error}"
            return None

    async def _or_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of ``work``; None, and ``work`` is cancelled, as soon as the supervisor is stopped."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for one in (task, stopping):
                one.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def _live_and_die(self, generation: int) -> None:
        """One child from spawn to reaping; returns when nothing of it is left."""
        try:
            # stderr is inherited: what a library prints there belongs into the server's log.
            process = await asyncio.create_subprocess_exec(*self._argv, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            self._report("exited", generation, None, f"cannot be started: {error}")
            return
        child = self._child = _Child(generation, process)
        broken: ExecutorProtocolBroken | None = None
        try:
            self._report("started", generation, process.pid, f"process {process.pid}")
            if self._stopping.is_set():
                child.kill("stopped while it was started")
            broken = await self._serve(child)
        finally:
            if broken is not None:
                child.kill(str(broken))
            status = await child.reap()
            self._child = None
            self._bury(child, status, broken)

    def _bury(self, child: _Child, status: int, broken: ExecutorProtocolBroken | None) -> None:
        """Report the end and fail the requests that were with this child."""
        generation, pid = child.generation, child.process.pid
        text = exit_text(status) if child.reason is None else f"{exit_text(status)}: {child.reason}"
        fault: type[ExecutorFault] = ExecutorExited
        if broken is not None:
            text = str(broken)
            fault = ExecutorProtocolBroken
        elif child.stalled:
            text = child.reason or text
            fault = ExecutorStalled
        kind: Kind = "protocol_broken" if broken is not None else "stalled" if child.stalled else "exited"
        self._report(kind, generation, pid, text)
        for call in child.in_flight:
            call.fail(fault(text, generation))

    def _report(self, kind: Kind, generation: int, pid: int | None, text: str) -> None:
        if kind not in ("started", "ready") and not self._stopping.is_set():
            self._last_error = text
        self._observe(ExecutorEvent(kind=kind, role=self._role, generation=generation, pid=pid, message=text))

    def _shut_down(self, child: _Child) -> None:
        if not child.stdin.is_closing():
            child.stdin.write(protocol.frame(protocol.Shutdown(generation=child.generation)))
            child.stdin.close()

    async def _serve(self, child: _Child) -> ExecutorProtocolBroken | None:
        """Talk to the child until its output ends. What it broke of the protocol is returned."""
        async with asyncio.TaskGroup() as group:
            startup = group.create_task(
                self._bound_startup(child), name=f"executor-startup-{child.generation}"
            )
            sender = group.create_task(self._send_requests(child), name=f"executor-sender-{child.generation}")
            guard = group.create_task(self._guard(child), name=f"executor-watchdog-{child.generation}")
            try:
                return await self._receive(child, startup)
            finally:
                for task in (startup, sender, guard):
                    task.cancel()

    async def _bound_startup(self, child: _Child) -> None:
        """End the child when its startup budget is used up; cancelled when it says Ready.

        As with the watchdog only time that the supervisor was awake for counts: after a longer absence the
        Ready that came meanwhile has not been read yet.
        """
        tick = min(TICK_SECONDS_MAX, self._startup_seconds / TICKS_OF_STALL)
        left = self._startup_seconds
        while left > 0.0:
            before = self._clock()
            await asyncio.sleep(min(tick, left))
            left -= min(max(self._clock() - before, 0.0), tick)
        child.kill(f"not ready within {self._startup_seconds} seconds")

    async def _guard(self, child: _Child) -> None:
        """End the child when it stands still. Startup has its own budget and is not watched."""
        await child.ready.wait()
        tick = min(TICK_SECONDS_MAX, self._stall_seconds / TICKS_OF_STALL)
        while True:
            before = self._clock()
            await asyncio.sleep(tick)
            child.watch = watchdog.passed(
                child.watch, self._clock() - before, tick_seconds=tick, busy=bool(child.in_flight)
            )
            reason = watchdog.stalled(child.watch, self._stall_seconds)
            if reason is not None and not self._stopping.is_set():
                child.stalled = True
                child.kill(reason)
                return

    async def _send_requests(self, child: _Child) -> None:
        """Say Hello, then send requests, so that no more than allowed are with the child."""
        try:
            hello = protocol.Hello(
                generation=child.generation, protocol=protocol.PROTOCOL_VERSION, spec=self._spec
            )
            child.stdin.write(protocol.frame(hello))
            await child.stdin.drain()
            await child.ready.wait()
            while not self._stopping.is_set():
                while len(child.in_flight) >= self._requests_max:
                    child.answered.clear()
                    await child.answered.wait()
                await self._send_one(child, await self._queue.get())
        except (BrokenPipeError, ConnectionResetError):
            return  # the child is ending; the receiver sees the end of its output

    async def _send_one(self, child: _Child, call: _Call[Any]) -> None:
        try:
            data = protocol.frame(msgspec.structs.replace(call.message, generation=child.generation))
        except ExecutorProtocolBroken as error:
            # Too long for a frame: nothing was sent, and no later child could take it.
            call.fail(ExecutorFailed(str(error), child.generation))
            return
        child.in_flight.append(call)
        child.stdin.write(data)
        await child.stdin.drain()

    async def _receive(self, child: _Child, startup: asyncio.Task[None]) -> ExecutorProtocolBroken | None:
        decoder = FrameDecoder()
        try:
            while data := await child.stdout.read(READ_BYTES):
                for body in decoder.feed(data):
                    self._take(child, protocol.read_to_parent(body), startup)
        except ExecutorProtocolBroken as error:
            return error
        return None

    def _take(self, child: _Child, message: protocol.ToParent, startup: asyncio.Task[None]) -> None:
        if message.generation != child.generation:
            return  # fenced: whatever it says, it is not about this child's work
        child.last_frame = self._clock()
        match message:
            case protocol.Heartbeat():
                child.watch = watchdog.heard(child.watch, message.progress)
                child.tokenizer_problem = message.tokenizer_problem
            case protocol.Ready():
                self._take_ready(child, message)
                startup.cancel()
            case protocol.Failed(request_id=None):
                child.reason = message.error
            case protocol.Planned() | protocol.Embedded() | protocol.Failed():
                self._take_answer(child, message)

    def _take_ready(self, child: _Child, message: protocol.Ready) -> None:
        if message.protocol != protocol.PROTOCOL_VERSION:
            raise ExecutorProtocolBroken(
                f"the child speaks protocol {message.protocol}, not {protocol.PROTOCOL_VERSION}"
            )
        if child.ready.is_set():
            raise ExecutorProtocolBroken("the child said twice that it is ready")
        if self._identity is not None and message.identity != self._identity:
            raise ExecutorProtocolBroken(
                f"the model changed from {self._identity.name} to {message.identity.name}, "
                "or its files did; restart the server to use it"
            )
        self._identity = child.identity = message.identity
        child.ready.set()
        self._identified.set()
        self._report("ready", child.generation, child.process.pid, message.identity.name)

    def _take_answer(self, child: _Child, message: protocol.Answer) -> None:
        call = child.in_flight[0] if child.in_flight else None
        if call is None or child.identity is None or call.message.request_id != message.request_id:
            raise ExecutorProtocolBroken(f"an answer to request {message.request_id}, whose turn it is not")
        if call.settle(message, child.identity):
            self._failures = 0
        child.in_flight.popleft()
        child.watch = watchdog.heard(child.watch, None)
        child.answered.set()


def finite(row: bytes) -> bool:
    """Whether every number of a vector is finite. One that is not would be found only at the commit.

    The sum says it of all: no sum of so many float32 overflows a double, and what is not finite stays so.
    """
    return math.isfinite(sum(struct.unpack(f"<{len(row) // VECTOR_ITEM_BYTES}f", row)))


def believed(
    plan: protocol.PlannedText, byte_length: int, generation: int, identity: ModelIdentity
) -> Planned:
    """A plan that covers its text exactly. Raises ``ExecutorProtocolBroken`` for any other."""
    try:
        planning.verify(plan.parts, byte_length)
    except InvariantBroken as error:
        raise ExecutorProtocolBroken(f"the plan is broken: {error}") from error
    if plan.token_count != plan.parts[-1].token_end:
        raise ExecutorProtocolBroken(f"{plan.token_count} tokens in a plan to {plan.parts[-1].token_end}")
    return Planned(
        generation=generation,
        model=identity,
        profile=plan.profile,
        token_count=plan.token_count,
        parts=plan.parts,
    )
