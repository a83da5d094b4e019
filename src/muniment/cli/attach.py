"""How a command gets its server: named, the owner of the data directory, or one of its own (ADR 0013)."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from muniment.cli import exits
from muniment.cli.options import Target
from muniment.cli.output import note, safe
from muniment.cli.settings import configured, flags
from muniment.errors import ConfigError, NotFound, Unavailable

if TYPE_CHECKING:  # brings httpx, which `muniment --help` does not need
    from muniment.client import Client

PATIENCE_SECONDS: Final = 20.0
"""How long a command goes on trying when its server went away: long enough for a restart."""

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1
_QUIET_SECONDS: Final = 1.0
_NOTED_BYTES: Final = 4096


@contextmanager
def attached(target: Target, *, creates: bool = False) -> "Iterator[Client]":
    """Give a client of the server that ``target`` means, and stop what was started for it afterwards.

    Where nobody owns the data directory, a server is started for the time of this command. Without
    ``creates`` the directory must exist (``NotFound``): asking must not make an empty memory where a path is
    mistyped. Raises ``Unreachable`` where a named server does not answer.
    """
    from muniment.client import Client

    url = target.url or os.environ.get("MUNIMENT_URL") or None
    if url is not None:
        with Client(url, patience_seconds=PATIENCE_SECONDS) as client:
            client.ready()
            yield client
        return
    attachment = Attachment(target, creates=creates)
    try:
        with Client(
            attachment.locate(), locate=attachment.locate, patience_seconds=PATIENCE_SECONDS
        ) as client:
            yield client
    finally:
        attachment.end()


class Attachment:
    """The server of a data directory, found again when it moved, and started where there is none."""

    def __init__(self, target: Target, *, creates: bool) -> None:
        self._target = target
        given = flags(assigned=target.assigned, data_dir=target.data_dir)
        self._path = configured(given, target.config).data_path
        self._url: str | None = None
        self._lasting = False
        self._turn = Turn(self._path)
        self._child: TemporaryServer | None = None
        if not creates and not self._path.exists():
            raise NotFound(
                f"there is no memory in {self._path}: `muniment add` or `muniment serve` makes one"
            )
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise ConfigError("data_dir", f"{self._path} cannot be used: {error.strerror}") from error

    def locate(self) -> str:
        """The base URL of the server that owns the directory now; starts one where there was none before.

        A server that somebody else runs, and that went away, is waited for and never replaced: it would be
        refused the directory when it comes back.
        """
        url = self._found()
        if url is None and self._lasting and self._url is not None:
            url = self._url
        if url is None:
            url = self._started()
        self._url = url
        return url

    def end(self) -> None:
        """Stop the server that was started here, if any."""
        if self._child is not None:
            self._child.stop()
        self._turn.release()

    def _found(self) -> str | None:
        from muniment import wiring

        owner = wiring.owner(self._path)
        if owner is None:
            return None
        self._lasting = self._child is None and not self._turn.taken_by_another()
        return owner.url

    def _started(self) -> str:
        """Start a server, unless another command comes first: then that one's server is shared."""
        over = time.monotonic() + _START_SECONDS
        while time.monotonic() < over:
            if (url := self._found()) is not None:
                return url
            if self._turn.take():
                if self._child is None:
                    note(f"no server runs on {safe(str(self._path))}: starting one for this command")
                else:  # It ended by itself. What it left behind, the next one finds out.
                    self._child.stop()
                    self._child = None
                child = TemporaryServer(self._target, self._path)
                url = child.announced()
                if url is not None:
                    self._child = child
                    return url
                self._turn.release()
            time.sleep(_POLL_SECONDS)
        raise Unavailable(f"the process that owns {self._path} does not say where it serves")


class Turn:
    """Which command may run a temporary server on a directory: an flock on the directory itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    def take(self) -> bool:
        """Whether it is this command's turn."""
        if self._held is not None:
            return True
        self._held = self._locked(fcntl.LOCK_EX)
        return self._held is not None

    def taken_by_another(self) -> bool:
        """Whether another command runs a temporary server."""
        if self._held is not None:
            return False
        looked = self._locked(fcntl.LOCK_SH)
        if looked is not None:
            os.close(looked)
        return looked is None

    def release(self) -> None:
        """Let the next one."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _locked(self, kind: int) -> int | None:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            return None
        return folder


class TemporaryServer:
    """A ``muniment serve`` child. It ends with this process, however this process ends."""

    def __init__(self, target: Target, path: Path) -> None:
        # ``-P``: a file in the working directory cannot pass for a module of ours.
        command = [sys.executable, "-P", "-m", "muniment", "serve", "--temporary", "--port", "0"]
        command += ["--data-dir", str(path)]
        command += [] if target.config is None else ["--config", target.config]
        command += [word for text in target.assigned for word in ("--set", text)]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the command, which then ends its server in order.
        )

    def announced(self) -> str | None:
        """The base URL; None where another process has the directory.

        Raises ``TemporaryServerFailed`` with what the server said.
        """
        assert self._process.stdout is not None
        try:
            readable, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
            line = self._process.stdout.readline().decode(errors="replace").strip() if readable else ""
        except BaseException:  # Ctrl-C while it starts
            self.stop()
            raise
        if line:
            return line
        if readable:
            code = self._process.wait(_STOP_SECONDS)
        else:
            self.stop()
            code = exits.FAILED
        said = self._said()
        self._close()
        if code == exits.TAKEN:
            return None
        raise exits.TemporaryServerFailed(
            f"no server could be started: {said or f'exit code {code}'}", code if code > 0 else exits.FAILED
        )

    def stop(self) -> None:
        """SIGTERM, so that open requests end in order; says so where the server had failed by itself."""
        ended = self._process.poll()
        if ended is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                note("the temporary server does not end: killing it; what was accepted is kept")
                self._process.kill()
                self._process.wait()
        elif ended != 0:
            note(f"the temporary server ended with exit code {ended}: {safe(self._said())}")
        self._close()

    def _said(self) -> str:
        """The last line of the server's stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _NOTED_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("muniment: ") if lines else ""

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()


def wait_for_search(client: "Client", seconds: float) -> None:
    """Return once search answers. Raises ``Unavailable`` that names what is missing when the time is over."""
    over = time.monotonic() + seconds
    told = False
    while True:
        readiness = client.ready()
        if readiness.get("search_ready"):
            return
        if time.monotonic() > over:
            capabilities = readiness.get("capabilities") or {}
            missing = ", ".join(name for name, up in capabilities.items() if not up)
            raise Unavailable(
                f"search is not ready after {seconds:g} seconds; missing: {missing or 'unknown'}"
            )
        if not told and time.monotonic() > over - seconds + _QUIET_SECONDS:
            note("waiting until search is ready")
            told = True
        time.sleep(_POLL_SECONDS)
