"""An ASGI app in a process of its own, on uvicorn as ``muniment serve`` sets it up."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self

import uvicorn
import uvloop

from muniment.interfaces.http.app import Application
from muniment.wiring import GIL_SWITCH_SECONDS, LISTEN_BACKLOG
from tests.support.live import ROOT
from tests.support.server import SOURCE

END_SECONDS: Final = 20.0


def serve(made: Callable[[], Coroutine[Any, Any, Application]]) -> None:
    """Serve the app on a free port, print its URL, and end at SIGTERM. ``made`` runs on the event loop."""
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        app = runner.run(made())
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                backlog=LISTEN_BACKLOG,
                timeout_graceful_shutdown=1,
            )
        )
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            runner.run(server.serve(sockets=[listener]))


class AppProcess:
    """A module that calls ``serve``, as a child; started by ``with``."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, ROOT)))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        if not self.url:
            raise AssertionError(f"{self._command} did not start: status {self._process.wait(END_SECONDS)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
