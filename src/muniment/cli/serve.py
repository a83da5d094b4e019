"""``muniment serve``: run a server in the foreground until SIGTERM or SIGINT."""

import os
import signal
import sys
import threading
from typing import Annotated

import typer

from muniment.cli import exits, options
from muniment.cli.output import say
from muniment.cli.settings import configured, flags
from muniment.errors import DirectoryOwned


def serve(
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="Loopback address to listen on. [env: MUNIMENT_HOST]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", help="Port to listen on; 0 takes a free one. [env: MUNIMENT_PORT]"
        ),
    ] = None,
    data_dir: options.DataDir = None,
    embedder: options.Embedder = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
    temporary: Annotated[bool, typer.Option("--temporary", hidden=True)] = False,
) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    The first line on stdout is the base URL, once the port is open. Logs go to stderr.
    """
    given = flags(assigned=assigned, host=host, port=port, data_dir=data_dir, embedder=embedder)
    settings = configured(given, config)
    if temporary:
        threading.Thread(target=_end_with_stdin, name="stdin-watch", daemon=True).start()
    from muniment import wiring

    try:
        code = wiring.serve(settings, announce=say)
    except DirectoryOwned:
        if temporary:
            raise typer.Exit(exits.TAKEN) from None
        raise
    raise typer.Exit(code)


def _end_with_stdin() -> None:
    """End this server when the command that started it is gone, even by SIGKILL: its pipe closes then."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
