"""A process that does one part of a measurement when told to, so that the parts share no interpreter."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar

T = TypeVar("T", bound="Closing")
P = ParamSpec("P")
R = TypeVar("R")

END_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 600.0


class Closing(Protocol):
    """What a worker holds."""

    def close(self) -> None:
        """Let go of everything."""
        ...


class WorkerError(Exception):
    """What was raised in the worker, as text."""


class Worker(Generic[T]):
    """One object in a process of its own; ``make`` makes it there and must be picklable."""

    def __init__(self, make: Callable[[], T], *, nice: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, other, nice), daemon=True)
        self._process.start()
        other.close()

    def call(self, work: Callable[Concatenate[T, P], R], *args: P.args, **named: P.kwargs) -> R:
        """Call a method on the object. Raises ``WorkerError`` with the traceback if that raised."""
        self.begin(work, *args, **named)
        result: R = self.result()
        return result

    def begin(self, work: Callable[Concatenate[T, P], R], *args: P.args, **named: P.kwargs) -> None:
        """The same without waiting; ``result`` fetches what came of it."""
        self._pipe.send((work, args, named))

    def result(self) -> Any:
        """Wait for the end of what was begun."""
        if not self._pipe.poll(ANSWER_SECONDS):
            raise WorkerError(f"no answer within {ANSWER_SECONDS} seconds")
        try:
            done, value = self._pipe.recv()
        except EOFError:
            self._process.join(END_SECONDS)
            raise WorkerError(f"the worker ended with status {self._process.exitcode}") from None
        if not done:
            raise WorkerError(value)
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(END_SECONDS if kind is None else 1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(make: Callable[[], Closing], pipe: Connection, nice: int) -> None:
    os.nice(nice)
    held: Closing | None = None
    try:
        while (asked := pipe.recv()) is not None:
            work, args, named = asked
            try:
                held = make() if held is None else held
                answer = (True, work(held, *args, **named))
            except Exception:  # noqa: BLE001 whatever it is, the process that asked raises it
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    except EOFError:
        return  # The process that asked is gone.
    finally:
        if held is not None:
            held.close()
