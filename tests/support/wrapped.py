"""A real server that is started through another program which becomes it: strace, nsenter, prlimit."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muniment.config import ENVIRONMENT_PREFIX
from tests.support.server import SOURCE, START_SECONDS, Server


class WrappedServer(Server):
    """``Server`` whose command follows ``wrapper``, which becomes the process that serves."""

    def __init__(
        self,
        data_dir: Path,
        wrapper: Sequence[str],
        *,
        log_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """``log_dir`` is for a data directory that only the wrapped process can see."""
        super().__init__(data_dir, environ=environ, **settings)
        self._wrapper = list(wrapper)
        if log_dir is not None:
            self._log_path, self._out_path = log_dir / "server.log", log_dir / "server.out"

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start the process and wait for nothing."""
        assert self._process is None, "the server is running"
        chosen = {ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in self._settings.items()}
        command = [sys.executable, "-m", "muniment", "serve", "--port", "0", "--data-dir", str(self.data_dir)]
        with self._log_path.open("ab") as log, self._out_path.open("wb") as out:
            self._process = subprocess.Popen(
                [*self._wrapper, *command],
                env={**os.environ, "PYTHONPATH": str(SOURCE), **chosen, **self._environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
        return self._process

    def start_or_end(self) -> int | None:
        """Start, and return None once the port is open; the exit status where the server ends before that."""
        process = self.launch()
        give_up = time.monotonic() + START_SECONDS
        while not (line := self._out_path.read_text("utf-8").partition("\n"))[1]:
            if process.poll() is not None:
                return self.wait()
            assert time.monotonic() < give_up, f"the server neither starts nor ends:\n{self.log}"
            time.sleep(0.01)
        self._url = line[0]
        return None
