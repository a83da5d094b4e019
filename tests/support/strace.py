"""Programs under strace: what they asked of the kernel, in order, and faults put into the n-th call.

strace counts calls for each thread apart. Filtered by path, it sees and counts only those on the ledger's
files. It runs as a daemon (``-D``), so that the process that is started is the one that is traced.
"""

import functools
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.support.wrapped import WrappedServer

LEDGER_FILES: Final = ("ledger.db", "ledger.db-wal")
STRING_BYTES: Final = 8192
"""More than a page, so that everything that is written is in the record."""

KILL: Final = "KILL"

LINE: Final = re.compile(r"(?P<thread>\d+) +(?P<time>\d+\.\d+) (?P<rest>.*)")
BEGUN: Final = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)")
RESUMED: Final = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<arguments>.*)")
RESULT: Final = re.compile(r"\) += (?P<result>-?\d+)[^\"]*$")
UNFINISHED: Final = "<unfinished ...>"
INJECTED: Final = "(INJECTED)"


class Injection(msgspec.Struct, frozen=True):
    """An error in place of the ``when``-th call of a thread, and of all after it if ``lasting``.

    ``KILL`` is no error: the call is made, and the process is killed by SIGKILL as it returns.
    """

    call: str
    error: str
    when: int
    lasting: bool = False

    def option(self) -> str:
        does = "signal=SIGKILL" if self.error == KILL else f"error={self.error}"
        return f"inject={self.call}:{does}:when={self.when}{'+' if self.lasting else ''}"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call: the lines of the record where it began and where it returned, and what strace shows of it."""

    thread: int
    name: str
    arguments: str
    began: int
    returned: int
    seconds: float
    """Wall-clock time at which it began, as of ``time.time()``."""
    result: int
    injected: bool

    def concerns(self, name: str) -> bool:
        """Whether the descriptor is one of this file."""
        return f"/{name}>" in self.arguments.partition(",")[0]


@functools.cache
def required() -> None:
    """Fail where strace is missing or may not trace: a program that it cannot trace would run undisturbed."""
    command = ["strace", "-f", "-o", "/dev/null", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise AssertionError("these tests need strace, see CONTRIBUTING.md") from None
    assert (done.returncode, done.stderr) == (0, ""), f"strace may not trace here: {done.stderr}"


def options(
    record: Path, calls: Sequence[str], data_dir: Path | None = None, injection: Injection | None = None
) -> list[str]:
    """The command line before that of the program; with ``data_dir``, its ledger's files alone are seen."""
    required()
    chosen = ["strace", "-f", "-D", "-qq", "-ttt", "-y", "-s", str(STRING_BYTES)]
    if injection is not None:
        chosen += ["-e", injection.option()]
    if injection is None or injection.error != KILL:
        chosen.append("--seccomp-bpf")  # Much faster; with it, strace does not send signals.
    chosen += ["-o", str(record), "-e", f"trace={','.join(calls)}", "-e", "signal=none"]
    if data_dir is not None:
        for name in LEDGER_FILES:
            chosen += ["-P", str(data_dir.resolve() / name)]
    return chosen


def straced(
    data_dir: Path,
    record: Path,
    calls: Sequence[str],
    injection: Injection | None = None,
    *,
    ledger_only: bool = True,
    **settings: Any,
) -> WrappedServer:
    """A server whose calls are recorded, and one of them injected."""
    wrapper = options(record, calls, data_dir if ledger_only else None, injection)
    return WrappedServer(data_dir, wrapper, **settings)


def calls_in(record: Path) -> list[Call]:
    """Every call that has returned, in the order in which they began."""
    return sorted(_returned(record.read_text("latin-1").splitlines()), key=lambda call: call.began)


def _returned(lines: Sequence[str]) -> Iterator[Call]:
    open_calls: dict[int, tuple[int, float, str, str]] = {}
    for number, line in enumerate(lines):
        found = LINE.match(line)
        if found is None:
            continue
        thread, rest = int(found["thread"]), found["rest"]
        if (resumed := RESUMED.match(rest)) and thread in open_calls:
            began, seconds, name, arguments = open_calls.pop(thread)
            arguments += resumed["arguments"]
        elif begun := BEGUN.match(rest):
            began, seconds, name, arguments = number, float(found["time"]), begun["name"], begun["arguments"]
            if arguments.endswith(UNFINISHED):
                open_calls[thread] = (began, seconds, name, arguments.removesuffix(UNFINISHED))
                continue
        else:
            continue
        result = RESULT.search(arguments)
        if result is not None:
            yield Call(
                thread=thread,
                name=name,
                arguments=arguments,
                began=began,
                returned=number,
                seconds=seconds,
                result=int(result["result"]),
                injected=INJECTED in arguments[result.start() :],
            )
