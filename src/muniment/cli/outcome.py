"""From a receipt to what a command prints and returns: the words for an outcome, and for one that is open."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from muniment.cli import exits
from muniment.cli.options import Target
from muniment.cli.output import json_text, note, safe, safe_line
from muniment.errors import Unavailable
from muniment.model.operation import Receipt, State


def code_of(receipt: Receipt) -> int:
    """0 committed, 1 rejected, 5 not ended."""
    return {State.COMMITTED: exits.DONE, State.REJECTED: exits.FAILED}.get(receipt.state, exits.OPEN)


def object_key(receipt: Receipt) -> str | None:
    """The key of what an operation made, where it has one."""
    key = receipt.result.get("id") if isinstance(receipt.result, dict) else None
    return key if isinstance(key, str) else None


def line_of(receipt: Receipt) -> str:
    """The state, and the object or the reason that goes with it."""
    if receipt.state is State.REJECTED:
        return f"rejected   {safe_line(receipt.error or 'without a reason')}"
    key = object_key(receipt)
    return f"{receipt.state.value:<9}  {safe_line(key)}" if key else receipt.state.value


def lines_of(receipt: Receipt) -> Iterator[str]:
    """All that a receipt says, a field a line; what is empty is left out."""
    for name in receipt.__struct_fields__:
        value = getattr(receipt, name)
        if value in (None, ()) or name == "schema_version":
            continue
        text = value if isinstance(value, str) else json_text(value)
        yield f"{name:<21}  {safe_line(text)}"


def ask_command(operation_id: str, target: Target) -> str:
    """The command that asks for an outcome where this one would have."""
    words = ["muniment", "operation", operation_id]
    for option, value in (
        ("--url", target.url),
        ("--data-dir", target.data_dir),
        ("--config", target.config),
    ):
        words += [] if value is None else [option, value]
    return safe(shlex.join(words))


@contextmanager
def asked_later(operation_id: str, target: Target) -> Iterator[None]:
    """Whatever ends the block before the outcome is known, say how to ask for it."""
    try:
        yield
    except (KeyboardInterrupt, Unavailable, exits.TemporaryServerFailed):
        note(f"to ask what became of it: {ask_command(operation_id, target)}")
        raise


def finish(code: int) -> None:
    """End the command with ``code``."""
    raise typer.Exit(code)


@contextmanager
def states_shown() -> Iterator[Callable[[str], None]]:
    """Give a function that shows the newest state: in place on a terminal, else as lines on stderr."""
    if not sys.stderr.isatty():
        yield note
        return
    from rich.console import Console
    from rich.text import Text

    # Signs that every terminal has; no markup, no emoji codes.
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with console.status(Text("sending"), spinner="line") as status:
        walked: list[str] = []

        def show(text: str) -> None:
            walked.append(text)
            status.update(Text(" > ".join(walked)))

        yield show
