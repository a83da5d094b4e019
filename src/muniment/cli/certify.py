"""``muniment certify``: whether a running server keeps what the Durable Operations API promises."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from muniment.cli import exits, options, outcome
from muniment.cli.output import note, safe_line, say, say_json
from muniment.cli.settings import configured, flags
from muniment.config import Config
from muniment.errors import MunimentError

if TYPE_CHECKING:  # brings httpx, which `muniment --help` does not need
    from muniment.cli.certify_checks import Run
    from muniment.client.certification import Check, Line

TIMEOUT_SECONDS: Final = 300.0
"""As long as a model may take to load (``executor_startup_seconds``)."""


def certify(
    long_memory: Annotated[
        bool,
        typer.Option(
            "--long-memory",
            help="Also kill the server's executor child in the middle of a long memory. Needs the data "
            "directory, on the machine of the server.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0, help="Longest wait, for the model and for operations."
        ),
    ] = TIMEOUT_SECONDS,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
) -> None:
    """Certify a running server: a line a check, with what was seen; a failed one says what to do.

    It leaves about fifteen small operations behind, for ever, as a server forgets none: their IDs begin with
    certify-, their owner is certify. No server is started for it. With --long-memory other memories that are
    embedded at that moment count an exit too.

    Exit code 0: everything holds. 1: a line failed. 5: no server answers.
    """
    from muniment.cli.certify_checks import ALWAYS, Run
    from muniment.cli.certify_long_memory import long_memory as killed
    from muniment.client import certification as rules
    from muniment.client.probe import Probe

    settings = configured(flags(data_dir=data_dir), config)
    where = url or os.environ.get("MUNIMENT_URL") or None
    if where is None:
        from muniment import wiring

        owner = wiring.owner(settings.data_path)
        where = owner.url if owner is not None else served_at(settings)
    checks = (*ALWAYS, (rules.LONG_MEMORY, killed)) if long_memory else ALWAYS
    with Probe(where) as probe:
        probe.get("/health")  # Nobody there: Unreachable, exit code 5.
        run = Run(probe, seconds=timeout, data_path=settings.data_path, tell=note)
        note(f"certifying {safe_line(where)} as {run.name}")
        lines = _lines(run, checks, as_json=as_json)
    failed = [line for line in lines if not line.ok]
    if as_json:
        say_json({"url": where, "run": run.name, "certified": not failed, "checks": lines})
    else:
        say(
            f"certified: {len(lines)} checks"
            if not failed
            else f"not certified: {len(failed)} of {len(lines)} failed"
        )
    outcome.finish(exits.FAILED if failed else exits.DONE)


def _lines(
    run: "Run", checks: "tuple[tuple[Check, Callable[[Run], str]], ...]", *, as_json: bool
) -> "list[Line]":
    """Run one check after the other. What needs a server that is ready fails where it is not."""
    from muniment.client import certification as rules

    lines: list[Line] = []
    ready = True
    for check, carry_out in checks:
        line = _line(run, check, carry_out) if ready else _not_run(check)
        ready = ready and (line.ok or check not in (rules.HEALTH, rules.READINESS))
        lines.append(line)
        if not as_json:
            say(text_of(line))
    return lines


def _line(run: "Run", check: "Check", carry_out: "Callable[[Run], str]") -> "Line":
    from muniment.client.certification import Line, RuleBroken

    began = time.monotonic()
    todo = None
    try:
        seen, ok = carry_out(run), True
    except RuleBroken as broken:
        seen, ok, todo = str(broken), False, broken.todo or check.todo
    except MunimentError as error:  # No answer, or none in time.
        seen, ok, todo = str(error), False, "the server's log says why it did not answer"
    ms = round(1000 * (time.monotonic() - began))
    return Line(name=check.name, ok=ok, seen=seen, todo=todo, ms=ms)


def _not_run(check: "Check") -> "Line":
    from muniment.client.certification import Line

    return Line(
        name=check.name,
        ok=False,
        seen="not run: the server is not ready",
        todo="correct what failed above first",
        ms=0,
    )


def served_at(settings: Config) -> str:
    """Where a server with these settings listens."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def text_of(line: "Line") -> str:
    """One line: verdict, name, milliseconds, what was seen, what to do."""
    todo = "" if line.todo is None else f". To do: {line.todo}"
    return safe_line(
        f"{'ok' if line.ok else 'FAILED':<6}  {line.name:<30}  {line.ms:>6} ms  {line.seen}{todo}"
    )
