"""The executor process: frames in on stdin and out on stdout, one model in between, no way to the store.

It ends when its parent does. stdin is read by a thread of its own, which ends the process at end of file
whatever the main thread computes; on Linux the kernel is asked for the same. Work is done on the main thread,
heartbeats are sent by a third. An answer ``Failed`` is for what the model cannot do; a bug ends the process,
and its exit is evidence.
"""

import ctypes
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from muniment.core import planning
from muniment.errors import (
    ConfigError,
    ExecutorFailed,
    ExecutorProtocolBroken,
    InvariantBroken,
    MunimentError,
)
from muniment.executor.protocol import (
    PROTOCOL_VERSION,
    Embedded,
    EmbedRequest,
    Failed,
    FrameDecoder,
    Heartbeat,
    Hello,
    Planned,
    PlannedText,
    PlanRequest,
    Ready,
    Shutdown,
    Spec,
    ToChild,
    ToParent,
    frame,
    read_to_child,
)
from muniment.model.plan import PlannedPart
from muniment.ports.embedder import Advance, Embedder, SentenceStarts, unobserved

Load = Callable[[Spec], tuple[Embedder, SentenceStarts]]

PR_SET_PDEATHSIG: Final = 1
WARM_UP_TEXT: Final = "The executor is ready when it has embedded this."
EXIT_OK: Final = 0
EXIT_REFUSED: Final = 1
EXIT_PROTOCOL: Final = 2
EXIT_THREAD: Final = 3
READ_BYTES: Final = 1 << 16


def run(load: Load) -> NoReturn:
    """Serve the parent at the other end of stdin and stdout until it is gone or says Shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Sent to the whole group, they are for the parent to decide.
    threading.excepthook = _thread_died
    _die_with_parent()
    source, wire = _claim_streams()
    inbox: SimpleQueue[ToChild] = SimpleQueue()
    threading.Thread(target=_read, args=(source, inbox), name="executor-reader", daemon=True).start()
    hello = inbox.get()
    if not isinstance(hello, Hello):
        _protocol_broken(f"the first message is {type(hello).__name__}")
    Child(hello, wire, inbox, load).serve()


def _claim_streams() -> tuple[int, int]:
    """Keep the pipes for frames alone: later reads of stdin find nothing, later prints go to stderr."""
    source, wire = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return source, wire


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent's thread ends. Best effort; end of file is the sure way."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(source: int, inbox: "SimpleQueue[ToChild]") -> None:
    """Hand on what the parent sends; end the process at its end, even in the middle of an inference."""
    decoder = FrameDecoder()
    while data := os.read(source, READ_BYTES):
        try:
            messages = [read_to_child(body) for body in decoder.feed(data)]
        except ExecutorProtocolBroken as error:
            _protocol_broken(str(error))
        for message in messages:
            if isinstance(message, Shutdown):
                os._exit(EXIT_OK)
            inbox.put(message)
    os._exit(EXIT_OK)


def _thread_died(died: threading.ExceptHookArgs) -> None:
    """A child without its reader or its heartbeat must not live on."""
    traceback.print_exception(died.exc_type, died.exc_value, died.exc_traceback)
    os._exit(EXIT_THREAD)


def _protocol_broken(problem: str) -> NoReturn:
    sys.stderr.write(f"executor child: {problem}\n")
    sys.stderr.flush()
    os._exit(EXIT_PROTOCOL)


class Child:
    """One generation at work."""

    def __init__(self, hello: Hello, wire: int, inbox: "SimpleQueue[ToChild]", load: Load) -> None:
        self._hello = hello
        self._wire = wire
        self._inbox = inbox
        self._load = load
        self._writing = threading.Lock()
        self._working_on: int | None = None
        self._progress = 0
        self._embedder: Embedder | None = None

    def serve(self) -> NoReturn:
        """Heartbeat, load, say Ready, then answer requests one by one."""
        os.nice(self._hello.spec.nice)
        threading.Thread(target=self._beat, name="executor-heartbeat", daemon=True).start()
        try:
            embedder, sentence_starts, tally = self._loaded()
        except MunimentError as error:
            self._send(Failed(generation=self._hello.generation, request_id=None, error=str(error)))
            os._exit(EXIT_REFUSED)
        self._send(
            Ready(generation=self._hello.generation, protocol=PROTOCOL_VERSION, identity=embedder.identity)
        )
        while True:
            request = self._inbox.get()
            if (
                not isinstance(request, PlanRequest | EmbedRequest)
                or request.generation != self._hello.generation
            ):
                _protocol_broken(f"{type(request).__name__} of generation {request.generation} is no request")
            self._working_on = request.request_id
            answer = self._answer(request, embedder, sentence_starts, tally)
            self._working_on = None
            self._send_answer(answer)

    def _loaded(self) -> tuple[Embedder, SentenceStarts, int | None]:
        if self._hello.protocol != PROTOCOL_VERSION:
            raise ExecutorProtocolBroken(
                f"the child speaks {PROTOCOL_VERSION}, the parent {self._hello.protocol}"
            )
        embedder, sentence_starts = self._load(self._hello.spec)
        tally = None if self._hello.spec.tally is None else _open_tally(self._hello.spec.tally)
        plan_text(embedder, sentence_starts, WARM_UP_TEXT, self._hello.spec.part_tokens_max)
        embedder.embed([WARM_UP_TEXT])
        self._embedder = embedder
        return embedder, sentence_starts, tally

    def _answer(
        self,
        request: PlanRequest | EmbedRequest,
        embedder: Embedder,
        sentence_starts: SentenceStarts,
        tally: int | None,
    ) -> Planned | Embedded | Failed:
        generation, request_id = request.generation, request.request_id
        try:
            if isinstance(request, PlanRequest):
                limit = part_limit(embedder, self._hello.spec.part_tokens_max)
                plans = tuple(self._plan(embedder, sentence_starts, text, limit) for text in request.texts)
                return Planned(generation=generation, request_id=request_id, plans=plans)
            vectors = row_bytes(
                embedder.embed(request.texts, self._advance),
                len(request.texts),
                embedder.identity.dimensions,
            )
        except ExecutorFailed as error:
            return Failed(generation=generation, request_id=request_id, error=str(error))
        if tally is not None and request.labels:
            # Before the answer: it counts what was computed, whether or not the answer arrives.
            _append(tally, tally_lines(generation, request.labels))
        return Embedded(generation=generation, request_id=request_id, vectors=vectors)

    def _plan(
        self, embedder: Embedder, sentence_starts: SentenceStarts, text: str, limit: int
    ) -> PlannedText:
        parts = plan_text(embedder, sentence_starts, text, limit, self._advance)
        return PlannedText(profile=planning.profile_name(limit), token_count=parts[-1].token_end, parts=parts)

    def _advance(self) -> None:
        self._progress += 1

    def _beat(self) -> None:
        pause = threading.Event()
        for sequence in itertools.count(1):
            embedder = self._embedder
            self._send(
                Heartbeat(
                    generation=self._hello.generation,
                    sequence=sequence,
                    request_id=self._working_on,
                    progress=self._progress,
                    tokenizer_problem=None if embedder is None else embedder.tokenizer_problem(),
                )
            )
            pause.wait(self._hello.spec.heartbeat_seconds)

    def _send(self, message: ToParent) -> None:
        self._write(frame(message))

    def _send_answer(self, answer: Planned | Embedded | Failed) -> None:
        try:
            data = frame(answer)
        except ExecutorProtocolBroken as error:
            data = frame(Failed(generation=answer.generation, request_id=answer.request_id, error=str(error)))
        self._write(data)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        with self._writing:
            try:
                while left:
                    left = left[os.write(self._wire, left) :]
            except BrokenPipeError:
                os._exit(EXIT_OK)  # the parent is gone


def part_limit(embedder: Embedder, part_tokens_max: int) -> int:
    """The configured part size, or what the model's window leaves if that is less; named in the profile."""
    return min(part_tokens_max, embedder.text_tokens_max)


def plan_text(
    embedder: Embedder,
    sentence_starts: SentenceStarts,
    text: str,
    part_tokens_max: int,
    advance: Advance = unobserved,
) -> tuple[PlannedPart, ...]:
    """Tokenize, find sentences, and plan; all offsets become UTF-8 bytes of the text here."""
    byte_of = byte_offsets(text)
    tokens = embedder.offsets(text, advance)
    starts, ends = byte_of[tokens[:, 0]], byte_of[tokens[:, 1]]
    sentences = byte_of[np.asarray(sentence_starts(text, advance), dtype=np.int64)]
    # memoryview: a sequence of integers that needs no Python object for each of a million tokens.
    return planning.plan(int(byte_of[-1]), starts.data, ends.data, sentences.data, part_tokens_max)


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Byte offset of each code point in the UTF-8 form of a text, and last the length of that form."""
    octets = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    first_bytes = np.flatnonzero((octets & 0xC0) != 0x80)
    return np.append(first_bytes, len(octets)).astype(np.int64)


def row_bytes(rows: NDArray[np.float32], count: int, dimensions: int) -> tuple[bytes, ...]:
    """Rows as they are stored. An embedder that breaks its contract is a bug and ends the process."""
    if rows.shape != (count, dimensions) or rows.dtype != np.float32 or not np.all(np.isfinite(rows)):
        raise InvariantBroken(
            f"the embedder made {rows.dtype} {rows.shape} for {count} x {dimensions}, or not finite"
        )
    return tuple(row.tobytes() for row in rows.astype("<f4", copy=False))


def _open_tally(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError("executor_tally", f"cannot open {path}: {error.strerror}") from error


def tally_lines(generation: int, labels: Sequence[str]) -> bytes:
    """One line a label. Backslash and line ends in a label are escaped, so that lines can be counted."""
    return b"".join(
        f"{generation} {label}\n".encode("utf-8", "backslashreplace")
        for label in (one.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for one in labels)
    )


def _append(tally: int, lines: bytes) -> None:
    if os.write(tally, lines) != len(lines):
        raise OSError(f"the tally took only a part of {len(lines)} bytes")
