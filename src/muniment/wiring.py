"""The only place that names concrete adapters: a ``Config`` goes in, a running server comes out.

Everything heavy is imported inside the functions, so that a command which only talks to a server starts at
once.
"""

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import structlog

from muniment.config import Config
from muniment.errors import ConfigError, ModelMismatch, MunimentError, OutcomeUnknown, RefusedStart

if TYPE_CHECKING:
    from muniment.adapters.files.directory import DataDirectory, Owner
    from muniment.adapters.sqlite.check import Report
    from muniment.adapters.sqlite.ledger import SqliteLedger
    from muniment.executor.supervisor import ExecutorEvent, Supervisor
    from muniment.runtime.service import Service

EXIT_DONE: Final = 0
EXIT_FAULT: Final = 1
LISTEN_BACKLOG: Final = 2048
PRIVATE_UMASK: Final = 0o077
"""What people told their agents is readable by the owner of the directory alone."""
GIL_SWITCH_SECONDS: Final = 0.001
"""SQLite gives the interpreter lock up at every statement; with the default of 5 ms the writer would wait
that long to get it back whenever the event loop is busy. With a fifth of a millisecond the two threads
change so often that an accept costs a third more processor time."""
GC_THRESHOLDS: Final = (5_000, 10, 20)
"""The collector looks for cycles, of which there are next to none here. With the defaults it went through
everything for 70 ms, again and again, while a backlog grew (ADR 0020)."""
DESCRIPTORS_RESERVED: Final = 128
"""File descriptors that event streams leave to the store, the children, probes, and those who only ask."""
FATAL_GRACE_SECONDS: Final = 0.2
"""After a fault, callers that wait get their 503 before the process ends."""


def owner(path: Path) -> "Owner | None":
    """The process that owns a data directory now, or None."""
    from muniment.adapters.files.directory import owner as find

    return find(path)


def check(path: Path) -> "Report":
    """Verify a data directory; see ``adapters.sqlite.check``."""
    from muniment.adapters.sqlite.check import check as verify

    return verify(path)


def model_problem(config: Config) -> str | None:
    """Why the configured model could not be loaded by a child that is started now; None if it could.

    Reads and hashes the model's files and loads the tokenizer; nothing is sent anywhere.
    """
    from muniment import executor_wiring

    try:
        executor_wiring.load(executor_wiring.spec(config, "query"))
    except MunimentError as error:
        return str(error)
    return None


def storage_problem(config: Config) -> str | None:
    """Why the storage capability would be false; None if it would not."""
    from muniment.adapters.files.directory import free_bytes

    free = free_bytes(config.data_path)
    if free < config.storage_reserve_bytes:
        return f"{free} bytes are free, {config.storage_reserve_bytes} are kept in reserve"
    return None


def serve(config: Config, announce: Callable[[str], None]) -> int:
    """Run a server until SIGTERM, SIGINT or a fault; return the exit status, which tells the truth.

    ``announce`` gets the base URL once the port is open. Raises ``RefusedStart`` where the server must not
    start.
    """
    import uvloop

    from muniment import logs

    logs.configure(config)
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    gc.set_threshold(*GC_THRESHOLDS)
    os.umask(PRIVATE_UMASK)
    _raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, announce))


def _raise_descriptor_limit() -> None:
    """Take all file descriptors that are allowed: each stream is one, and many systems start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _streams_max(wanted: int) -> int:
    """As many streams as are wanted, or as leave file descriptors for everything else."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, allowed - DESCRIPTORS_RESERVED))


class _Ending:
    """Why the server ends: asked to, or a fault."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.fault: BaseException | None = None

    def fatal(self, error: BaseException) -> None:
        """Take the first fault, and say it at once: what comes after may end the process without a word."""
        if self.fault is None:
            self.fault = error
            if not isinstance(error, RefusedStart):
                structlog.get_logger("server").error("ended by a fault", exc_info=error)
        self.asked.set()


async def _serve(config: Config, announce: Callable[[str], None]) -> int:
    ending = _Ending()
    with _owned(config.data_path) as directory, _bound(config) as (listener, url):
        async with _running(config, directory, ending) as service:
            with _signals(ending):
                await _listen(config, service, directory, _Front(listener, url, announce), ending)
        if ending.fault is None:
            structlog.get_logger("server").info("stopped")
            return EXIT_DONE
    if isinstance(ending.fault, RefusedStart):
        raise ending.fault
    return EXIT_FAULT


@contextlib.contextmanager
def _owned(path: Path) -> "Iterator[DataDirectory]":
    from muniment.adapters.files.directory import DataDirectory

    directory = DataDirectory(path)
    try:
        yield directory
    finally:
        directory.release()


@contextlib.contextmanager
def _bound(config: Config) -> Iterator[tuple[socket.socket, str]]:
    """Bind the port before anything is started, so that a port in use is a clean refusal."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("host", f"{config.host} cannot be used: {error.strerror}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                "port", f"cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error
        port = listener.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        yield listener, f"http://{host}:{port}"


@contextlib.contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.asked.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _running(config: Config, directory: "DataDirectory", ending: _Ending) -> "AsyncIterator[Service]":
    """Everything behind the port. Leaving drains and closes; after a fault nothing more is written."""
    from muniment.adapters.clock import SystemClock, SystemEntropy
    from muniment.adapters.devices.numpy_device import NumpyDevice
    from muniment.core.ingestion import Limits
    from muniment.runtime.coordinator import Coordinator, Room
    from muniment.runtime.feed import Feed
    from muniment.runtime.follow import Followers
    from muniment.runtime.ingestion import Pipeline
    from muniment.runtime.readiness import ReadinessGauge
    from muniment.runtime.service import Service
    from muniment.runtime.status import StatusBoard

    clock = SystemClock()
    incarnation = secrets.token_hex(16)
    ledger = _ledger(config, clock, incarnation, ending)
    children = _children(config, ledger, clock)
    feed = Feed(ledger, NumpyDevice())
    followers = Followers(
        ledger,
        followers_max=_streams_max(config.followers_max),
        keepalive_seconds=config.event_keepalive_seconds,
    )
    ingestion = Pipeline(
        ledger,
        children.ingest,
        clock,
        Limits(
            batch_tokens_max=config.embed_batch_tokens_max,
            retry_seconds_max=config.ingest_retry_seconds_max,
        ),
        parts_max=config.parts_max,
        on_fatal=ending.fatal,
    )
    coordinator = Coordinator(
        ledger,
        ingestion,
        clock,
        Room(
            operations_in_flight_max=config.operations_in_flight_max,
            operations_stuck_max=config.operations_stuck_max,
        ),
        on_fatal=ending.fatal,
    )
    gauge = ReadinessGauge(
        ledger=_ledger_probe(ledger, clock),
        storage=_storage_probe(directory, config),
        coordinator=coordinator.ping,
        search_index=feed.probe,
        ingest=children.ingest.health,
        query=children.query.health,
        clock=clock,
        probe_seconds=config.probe_seconds,
        silence_seconds=config.executor_silence_seconds,
    )
    service = Service(
        config,
        ledger=ledger,
        queries=children.query,
        feed=feed,
        followers=followers,
        gauge=gauge,
        status=StatusBoard(
            ledger=ledger,
            feed=feed,
            gauge=gauge,
            coordinator=coordinator,
            ingestion=ingestion,
            children={"ingest": children.ingest, "query": children.query},
        ),
        clock=clock,
        entropy=SystemEntropy(),
        on_fatal=ending.fatal,
    )
    service.incarnation = incarnation
    await coordinator.recover()
    tasks = [
        _watched(coordinator.run(), "coordinator", ending),
        _watched(feed.run(), "feed", ending),
        _watched(_check_model(ledger, children, coordinator), "model-check", ending),
    ]
    for each in (children.ingest, children.query):
        await each.start()
        tasks.append(_watched(each.join(), "executor", ending))
    try:
        yield service
    finally:
        followers.close()
        for task in tasks[:3]:
            task.cancel()
        await asyncio.gather(children.ingest.stop(), children.query.stop())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *children.observations, return_exceptions=True)
        await gauge.close()
        if isinstance(ending.fault, OutcomeUnknown):
            # Closing would checkpoint and so ask for another fsync, which may lie (ADR 0017).
            sys.stderr.flush()
            os._exit(EXIT_FAULT)
        try:
            await ledger.close()
        except OutcomeUnknown as error:
            ending.fatal(error)


def _watched(work: Any, name: str, ending: _Ending) -> "asyncio.Task[Any]":
    """A task whose failure ends the server: nothing runs on without its parts."""
    task: asyncio.Task[Any] = asyncio.create_task(work, name=name)

    def ended(done: "asyncio.Task[Any]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            ending.fatal(error)

    task.add_done_callback(ended)
    return task


def _ledger(config: Config, clock: Any, incarnation: str, ending: _Ending) -> "SqliteLedger":
    from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
    from muniment.adapters.sqlite.store import SqliteStore
    from muniment.stages import ledger as stage

    store = SqliteStore.open(
        config.data_path,
        stage.handle,
        lambda rows: stage.begin(rows, lineage=secrets.token_hex(16), now=clock.now_us()),
        incarnation=incarnation,
    )
    batching = Batching(
        commands_max=config.commit_batch_commands_max,
        bytes_max=config.commit_batch_bytes_max,
        queue_max=config.write_queue_max,
        wal_pages_max=config.wal_pages_max,
    )
    return SqliteLedger(store, batching, ending.fatal)


class _Children:
    """The two supervised children, and the writing of what happens to them."""

    def __init__(
        self, ingest: "Supervisor", query: "Supervisor", observations: "set[asyncio.Task[None]]"
    ) -> None:
        self.ingest = ingest
        self.query = query
        self.observations = observations


def _children(config: Config, ledger: "SqliteLedger", clock: Any) -> _Children:
    from muniment import executor_wiring
    from muniment.errors import Unavailable
    from muniment.executor.supervisor import Supervisor
    from muniment.model import command

    log = structlog.get_logger("executor")
    observations: set[asyncio.Task[None]] = set()

    async def next_generation() -> int:
        generation: int = await ledger.write(command.ReserveGeneration(now=clock.now_us()))
        return generation

    async def record(event: "ExecutorEvent") -> None:
        try:
            await ledger.write(
                command.Observe(
                    kind=event.kind,
                    generation=event.generation,
                    message=f"{event.role}: {event.message}",
                    now=clock.now_us(),
                )
            )
        except Unavailable as error:
            log.warning("executor evidence could not be written", kind=event.kind, reason=str(error))

    def observe(event: "ExecutorEvent") -> None:
        log.info(
            event.kind, role=event.role, generation=event.generation, pid=event.pid, message=event.message
        )
        task = asyncio.get_running_loop().create_task(record(event))
        observations.add(task)
        task.add_done_callback(observations.discard)

    def supervisor(role: Literal["ingest", "query"], requests_max: int) -> Supervisor:
        return Supervisor(
            executor_wiring.child_argv(role),
            executor_wiring.spec(config, role),
            role=role,
            requests_max=requests_max,
            next_generation=next_generation,
            observe=observe,
            startup_seconds=config.executor_startup_seconds,
            stall_seconds=config.executor_stall_seconds,
            backoff_seconds_max=config.executor_backoff_seconds_max,
        )

    return _Children(supervisor("ingest", config.ingest_requests_max), supervisor("query", 1), observations)


async def _check_model(ledger: "SqliteLedger", children: _Children, coordinator: Any) -> None:
    """Let memories be planned only by the model that the store was built with (ruling 18)."""
    from muniment.core.planning import model_digest

    identity = await children.ingest.identity()
    digest = model_digest(identity)
    known = await ledger.read(lambda reads: list(reads.rows("model")))
    other = [row for row in known if row["digest"] != digest]
    if other:
        name = msgspec.json.decode(other[0]["identity"])["name"]
        raise ModelMismatch(
            f"this store was built with model {name} ({other[0]['digest'][:12]}), the configured model is "
            f"{identity.name} ({digest[:12]}). Configure the first, or use another data directory."
        )
    coordinator.model_is_checked()
    reader = await children.query.identity()
    if model_digest(reader) != digest:
        raise ModelMismatch(
            f"the model's files changed while the server started: {identity.name} ({digest[:12]}) ingests, "
            f"{reader.name} ({model_digest(reader)[:12]}) would read queries. Start it again."
        )


def _ledger_probe(ledger: "SqliteLedger", clock: Any) -> Callable[[], Any]:
    from muniment.model import command

    async def probe() -> None:
        await ledger.check_identity()
        await ledger.write(command.Probe(now=clock.now_us()))
        await ledger.read(lambda reads: reads.head())

    return probe


def _storage_probe(directory: "DataDirectory", config: Config) -> Callable[[], Any]:
    async def probe() -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, directory.probe, config.storage_reserve_bytes)

    return probe


class _Front(msgspec.Struct, frozen=True):
    """The open door: the bound socket, its URL, and who is told of it."""

    listener: socket.socket
    url: str
    announce: Callable[[str], None]


async def _listen(
    config: Config, service: "Service", directory: "DataDirectory", front: _Front, ending: _Ending
) -> None:
    """Serve HTTP until the end is asked for, then let open requests finish within the drain time."""
    import uvicorn

    from muniment.adapters.files.directory import Owner
    from muniment.interfaces.http.app import create_app

    def opened() -> None:
        try:
            directory.announce(Owner(url=front.url, pid=os.getpid(), incarnation=service.incarnation))
        except OSError as error:
            # A full disk takes nothing new, and still serves what it holds; others then need the URL told.
            structlog.get_logger("server").warning("server.json cannot be written", reason=error.strerror)
        gc.freeze()  # What is there by now stays: no collection need look at it again.
        front.announce(front.url)
        structlog.get_logger("server").info("listening", url=front.url, data_dir=str(config.data_path))

    class Server(uvicorn.Server):
        """Signals are this module's business; the URL is told as soon as the port is open."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                opened()

    server = Server(
        uvicorn.Config(
            create_app(service),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=LISTEN_BACKLOG,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[front.listener]), name="http")
    serving.add_done_callback(lambda _: ending.asked.set())
    await ending.asked.wait()
    service.close_streams()
    if ending.fault is not None:
        await asyncio.sleep(FATAL_GRACE_SECONDS)
    server.should_exit = True
    seconds = config.drain_seconds if ending.fault is None else FATAL_GRACE_SECONDS
    try:
        async with asyncio.timeout(seconds):
            await asyncio.shield(serving)
    except TimeoutError:
        server.force_exit = True
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    if not serving.cancelled() and (error := serving.exception()) is not None:
        ending.fatal(error)


__all__ = ["EXIT_DONE", "EXIT_FAULT", "check", "model_problem", "owner", "serve", "storage_problem"]
