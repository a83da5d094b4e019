"""``muniment import``: a file of messages, each kept exactly once, however often the import is run again.

A line without an ``operation_id`` gets one from its content: prefix, SHA-256 of the canonical payload, and
which of the equal payloads of the file it is. Running a file again, also one that has grown or was reordered,
therefore asks for the same operations again, and the server answers with what it has (ADR 0013).

Messages of one session are accepted in the order of the file: it is their order where they say nothing else.
"""

import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from muniment.cli import exits, options, outcome
from muniment.cli.attach import attached
from muniment.cli.output import fail, note, safe_line, say, say_json
from muniment.core import canonical
from muniment.errors import Conflict, InvalidField, Malformed, MunimentError, RequestError, Unavailable
from muniment.model.operation import TERMINAL, Kind, Receipt, State

if TYPE_CHECKING:  # brings httpx, which `muniment --help` does not need
    from muniment.client import Admission, Client

DIGEST_CHARACTERS: Final = 32
IN_FLIGHT: Final = 16
IN_FLIGHT_MAX: Final = 64
_PLAIN_SECONDS: Final = 10.0
_AGAIN: Final = "not finished: run the same command again, nothing is kept twice"

Show = Callable[[str, int, int | None], None]
"""Called with what is being done, how far it is, and how far it goes, if that is known."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the file, ready to be sent."""

    line: int
    operation_id: str
    payload: dict[str, Any]


class Tally(msgspec.Struct, kw_only=True):
    """What became of the lines."""

    accepted: int = 0
    already_there: int = 0
    conflicting: int = 0
    invalid: int = 0
    committed: int = 0
    rejected: int = 0
    open: int = 0

    @property
    def exit_code(self) -> int:
        """5 where an outcome is open, 1 where an answer was no, 2 where a line was wrong, else 0."""
        if self.open:
            return exits.OPEN
        if self.rejected or self.conflicting:
            return exits.FAILED
        return exits.WRONG if self.invalid else exits.DONE


class Reader:
    """Turns lines into entries. Remembers eight bytes a line, to tell equal payloads apart."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._seen: dict[int, int] = {}

    def entry(self, line: int, text: bytes) -> Entry:
        """Raises ``Malformed`` and ``InvalidField`` for a line that is no JSON object with usable fields."""
        value = canonical.parse(text)
        if not isinstance(value, dict):
            raise InvalidField("line", "must be a JSON object")
        payload: dict[str, Any] = dict(value)
        operation_id = payload.pop("operation_id", None)
        if operation_id is None:
            operation_id = self._derived(payload)
        elif not isinstance(operation_id, str) or not operation_id:
            raise InvalidField("operation_id", "must be a string that is not empty")
        return Entry(line=line, operation_id=operation_id, payload=payload)

    def _derived(self, payload: dict[str, Any]) -> str:
        digest = hashlib.sha256(canonical.encode(payload))
        key = int.from_bytes(digest.digest()[:8], "big")
        occurrence = self._seen[key] = self._seen.get(key, 0) + 1
        return f"{self._prefix}{digest.hexdigest()[:DIGEST_CHARACTERS]}-{occurrence}"


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON Lines; - reads them from stdin.")],
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Begins the operation IDs that are derived.")
    ] = "import-",
    in_flight: Annotated[
        int,
        typer.Option("--in-flight", metavar="N", min=1, max=IN_FLIGHT_MAX, help="Requests open at one time."),
    ] = IN_FLIGHT,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return once all lines are durably accepted.")
    ] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Remember a file of messages: one JSON object a line, with content and any other field of add_memory.

    It can be ended at any time and run again: every line is kept exactly once. Wrong lines are reported with
    their number, the others are kept. Exit code 0: all committed (with --no-wait: accepted). 1: something was
    rejected or has the ID of other content. 2: only wrong lines. 5: run it again, the rest is not known yet.
    """
    where = options.target(url, data_dir, config, assigned)
    with (
        _opened(file) as (lines, size),
        attached(where, creates=True) as client,
        _progress() as show,
    ):
        run = Import(client, Reader(prefix), in_flight, show)
        try:
            run.send(lines, size)
            if not no_wait:
                run.settle()
        except (KeyboardInterrupt, MunimentError):
            note(_AGAIN)
            _print(run.tally, as_json=as_json)
            raise
    _print(run.tally, as_json=as_json)
    code = run.tally.exit_code
    if run.stopped is not None:
        fail(str(run.stopped))
        note(_AGAIN)
        code = exits.OPEN
    elif no_wait and code == exits.OPEN:
        code = msgspec.structs.replace(run.tally, open=0).exit_code
    outcome.finish(code)


class Import:
    """One run over the lines."""

    def __init__(self, client: "Client", reader: Reader, in_flight: int, show: Show) -> None:
        self.tally = Tally()
        self.stopped: Unavailable | None = None
        """Why the rest could not be sent or waited for."""
        self._client = client
        self._reader = reader
        self._in_flight = in_flight
        self._show = show
        self._open: deque[tuple[int, str]] = deque()

    def send(self, lines: IO[bytes], size: int | None) -> None:
        """Send every line, a bounded number at one time. Stops at the first that no server takes."""
        at = 0
        with self._pool() as pool:
            running: dict[Future[Admission], Entry] = {}
            for number, text in enumerate(lines, 1):
                at += len(text)
                self._show("sent", at, size)
                if not text.strip():
                    continue
                try:
                    entry = self._reader.entry(number, text.rstrip(b"\r\n"))
                except (Malformed, InvalidField) as error:
                    self._wrong(number, error)
                    continue
                while self._must_wait(running, entry):
                    self._collect(running, wait(running, return_when=FIRST_COMPLETED).done)
                if self.stopped is not None:
                    break
                admit = pool.submit(self._client.admit, Kind.ADD_MEMORY, entry.payload, entry.operation_id)
                running[admit] = entry
            self._collect(running, wait(running).done)

    def _must_wait(self, running: "dict[Future[Admission], Entry]", entry: Entry) -> bool:
        """Whether all places are taken, or one by an earlier message of the same session."""
        session = entry.payload.get("session_id")
        return len(running) >= self._in_flight or (
            session is not None
            and any(other.payload.get("session_id") == session for other in running.values())
        )

    def settle(self) -> None:
        """Wait for the outcome of all that was accepted."""
        total = len(self._open)
        if total == 0 or self.stopped is not None:
            return
        with self._pool() as pool:
            waiting: dict[Future[Receipt], tuple[int, str]] = {}
            while (self._open or waiting) and self.stopped is None:
                while self._open and len(waiting) < self._in_flight:
                    line, operation_id = self._open.popleft()
                    waiting[pool.submit(self._client.wait, operation_id)] = (line, operation_id)
                for ended in wait(waiting, return_when=FIRST_COMPLETED).done:
                    line, operation_id = waiting.pop(ended)
                    self.tally.open -= 1
                    try:
                        self._ended(line, ended.result())
                    except Unavailable as error:
                        self.tally.open += 1
                        self.stopped = error
                self._show("committed", total - len(self._open) - len(waiting), total)

    @contextmanager
    def _pool(self) -> Iterator[ThreadPoolExecutor]:
        pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="import")
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self, running: "dict[Future[Admission], Entry]", done: "set[Future[Admission]]") -> None:
        for future in done:
            entry = running.pop(future)
            try:
                admission = future.result()
            except Conflict as error:
                self.tally.conflicting += 1
                _report(entry.line, error)
            except RequestError as error:
                self._wrong(entry.line, error)
            except Unavailable as error:
                self.tally.open += 1
                self.stopped = self.stopped or error
            else:
                self._admitted(entry, admission)

    def _admitted(self, entry: Entry, admission: "Admission") -> None:
        if admission.known_before:
            self.tally.already_there += 1
        else:
            self.tally.accepted += 1
        if admission.receipt.state in TERMINAL:
            self._ended(entry.line, admission.receipt)
        else:
            self.tally.open += 1
            self._open.append((entry.line, entry.operation_id))

    def _ended(self, line: int, receipt: Receipt) -> None:
        if receipt.state is State.COMMITTED:
            self.tally.committed += 1
        else:
            self.tally.rejected += 1
            _report(line, f"rejected: {receipt.operation_id}: {receipt.error}")

    def _wrong(self, line: int, error: RequestError) -> None:
        self.tally.invalid += 1
        _report(line, error)


def _report(line: int, problem: object) -> None:
    note(f"line {line}: {safe_line(str(problem))}")


def _print(tally: Tally, *, as_json: bool) -> None:
    if as_json:
        say_json(tally)
    else:
        for name in tally.__struct_fields__:
            say(f"{name:<13}  {getattr(tally, name)}")


@contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """The lines, and their size in bytes where it is known."""
    if path == "-":
        yield sys.stdin.buffer, None
        return
    try:
        file = open(path, "rb")  # noqa: PTH123, SIM115 - opened here for a clear error, closed below
    except OSError as error:
        raise InvalidField("FILE", f"cannot read {path}: {error.strerror}") from error
    with file:
        yield file, os.fstat(file.fileno()).st_size


def _progress() -> AbstractContextManager[Show]:
    return _bar() if sys.stderr.isatty() else _plain()


@contextmanager
def _plain() -> Iterator[Show]:
    """A line now and then, for logs."""
    last = time.monotonic()

    def show(what: str, at: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_SECONDS:
            last = time.monotonic()
            note(f"{what}: {at}" if total is None else f"{what}: {at} of {total}")

    yield show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (
        TextColumn("{task.description:<9}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, at: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=at)

        yield show
