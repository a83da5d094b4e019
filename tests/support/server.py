"""A real server process on a real port, started, killed and started again as a supervisor would."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from muniment.config import ENVIRONMENT_PREFIX

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"
START_SECONDS: Final = 60.0
READY_SECONDS: Final = 120.0
END_SECONDS: Final = 30.0
LOG_TAIL_CHARS: Final = 6000


class Server:
    """``muniment serve`` on ``data_dir``, started by ``with``, at the end of which no process is left.

    ``settings`` are those of ``muniment.config``; ``environ`` is added to the environment of the process.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        embedder: str = "synthetic",
        environ: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.data_dir = data_dir
        self._settings = {"embedder": embedder, **settings}
        self._environ = dict(environ or {})
        self._log_path = data_dir.with_name(data_dir.name + ".log")
        self._out_path = data_dir.with_name(data_dir.name + ".out")
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """The base URL, new after each start."""
        assert self._url is not None, "the server is not started"
        return self._url

    @property
    def pid(self) -> int:
        """The process that serves."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that all starts so far wrote to stderr."""
        return self._log_path.read_text("utf-8", "replace") if self._log_path.exists() else ""

    def start(self) -> Self:
        """Start, and return once the port is open. Raises AssertionError with the log where that fails."""
        self.launch()
        give_up = time.monotonic() + START_SECONDS
        while not (line := self._out_path.read_text("utf-8").partition("\n"))[1]:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.close()
                raise AssertionError(f"the server did not start:\n{self.log[-LOG_TAIL_CHARS:]}")
            time.sleep(0.01)
        self._url = line[0]
        return self

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start the process and wait for nothing."""
        assert self._process is None, "the server is running"
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        chosen = {ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in self._settings.items()}
        with self._log_path.open("ab") as log, self._out_path.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "muniment", "serve", "--port", "0", "--data-dir", str(self.data_dir)],
                env={**os.environ, "PYTHONPATH": str(SOURCE), **chosen, **self._environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,  # Its group is all that it starts, so nothing is overlooked.
            )
        return self._process

    def kill(self) -> None:
        """SIGKILL the server; return when it and its children are gone."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM the server; return its exit status when it and its children are gone."""
        return self._end(signal.SIGTERM)

    def wait(self, seconds: float = END_SECONDS) -> int:
        """Wait until the server ends by itself; return its exit status."""
        return self._end(None, seconds)

    def restart(self) -> Self:
        """Kill the server if it still runs, then start it on the same directory; the URL changes."""
        if self._process is not None:
            self.kill()
        return self.start()

    def wait_ready(self, what: str = "ingestion_ready", seconds: float = READY_SECONDS) -> Self:
        """Wait until ``/ready`` says that ``ingestion_ready`` or ``search_ready`` is true."""
        give_up = time.monotonic() + seconds
        with httpx.Client(base_url=self.url) as client:
            while not (shown := client.get("/ready").json())[what]:
                if time.monotonic() > give_up:
                    raise AssertionError(f"no {what}: {shown}\n{self.log[-LOG_TAIL_CHARS:]}")
                time.sleep(0.02)
        return self

    def close(self) -> None:
        """Leave no process, whatever happened before."""
        if self._process is not None:
            self.kill()

    def _end(self, number: signal.Signals | None, seconds: float = END_SECONDS) -> int:
        process = self._process
        assert process is not None, "the server is not started"
        if number is not None and process.poll() is None:
            process.send_signal(number)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"the server did not end:\n{self.log[-LOG_TAIL_CHARS:]}") from None
        finally:
            self._process = self._url = None
        give_up = time.monotonic() + END_SECONDS
        while left := group(process.pid):
            if time.monotonic() > give_up:
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"the server ended and left processes: {left}")
            time.sleep(0.01)
        return status

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"log of the server:\n{self.log[-LOG_TAIL_CHARS:]}")
        self.close()


def group(leader: int) -> dict[int, bytes]:
    """Return the living processes of a process group with their command lines."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text("ascii", "replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == leader and state not in "ZX":
                found[int(stat.parent.name)] = stat.with_name("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # Gone between the two reads.
    return found
