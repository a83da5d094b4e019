"""``muniment add``: keep one memory and wait until it is committed."""

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muniment.cli import options, outcome
from muniment.cli.attach import attached
from muniment.cli.output import note, safe_line, say, say_json
from muniment.core import canonical
from muniment.errors import InvalidField, Malformed
from muniment.model.operation import TERMINAL, Kind, Receipt

if TYPE_CHECKING:  # brings httpx, which `muniment --help` does not need
    from muniment.client import Client


def add(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What to remember; - reads it from stdin.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="PATH", help="Read it from a file, byte for byte.")
    ] = None,
    operation_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Operation ID; the same again changes nothing. [default: new]"
        ),
    ] = None,
    user: options.User = None,
    agent: options.Agent = None,
    session: options.Session = None,
    category: options.Category = None,
    speaker: Annotated[
        str | None, typer.Option("--speaker", metavar="NAME", help="Who says the words.")
    ] = None,
    role: Annotated[
        str | None, typer.Option("--role", metavar="ROLE", help="user, assistant, system or tool.")
    ] = None,
    occurred_at: Annotated[
        str | None,
        typer.Option("--occurred-at", metavar="TIME", help="RFC 3339, such as 2026-08-03T12:00:00Z."),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option("--metadata", metavar="JSON", help="A JSON object kept beside the content.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once it is durably accepted.")] = False,
    timeout: options.Timeout = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Remember a text. Prints the operation ID before anything is sent, then what became of it.

    Exit code 0: committed (with --no-wait: accepted). 1: rejected, or the ID has other content. 5: not known
    yet.
    """
    payload = _payload(
        content=content_of(text, file),
        user_id=user,
        agent_id=agent,
        session_id=session,
        categories=category or None,
        speaker=speaker,
        role=role,
        occurred_at=occurred_at,
        metadata=None if metadata is None else metadata_of(metadata),
    )
    operation_id = operation_id if operation_id is not None else f"add-{secrets.token_hex(16)}"
    (note if as_json else say)(f"operation  {safe_line(operation_id)}")
    where = options.target(url, data_dir, config, assigned)
    with outcome.asked_later(operation_id, where), attached(where, creates=True) as client:
        receipt = _added(client, payload, operation_id, wait=not no_wait, timeout_seconds=timeout)
    if as_json:
        say_json(receipt)
    else:
        say(outcome.line_of(receipt))
    if not no_wait or receipt.state in TERMINAL:
        outcome.finish(outcome.code_of(receipt))


def _payload(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def content_of(text: str | None, file: str | None) -> str:
    """The content, from where the command line says it is. Raises ``InvalidField``."""
    if (text is None) == (file is None):
        raise InvalidField("content", "give either a TEXT (- for stdin) or --file PATH")
    if text is not None and text != "-":
        return text
    try:
        raw = sys.stdin.buffer.read() if file is None else Path(file).read_bytes()
    except OSError as error:
        raise InvalidField("--file", f"cannot read {file}: {error.strerror}") from error
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidField("content", f"is not UTF-8 at byte {error.start}") from error


def metadata_of(text: str) -> Any:
    """Read ``--metadata``. Raises ``InvalidField``; whether it is an object is for the server to say."""
    try:
        return canonical.parse(text.encode("utf-8", "surrogateescape"))
    except Malformed as error:
        raise InvalidField("--metadata", str(error)) from error


def _added(
    client: "Client",
    payload: dict[str, Any],
    operation_id: str,
    *,
    wait: bool,
    timeout_seconds: float | None,
) -> Receipt:
    admission = client.admit(Kind.ADD_MEMORY, payload, operation_id)
    if admission.known_before:
        note("already there: the same operation was accepted before")
    if not wait or admission.receipt.state in TERMINAL:
        return admission.receipt
    with outcome.states_shown() as show:
        for event in client.events(operation_id, timeout_seconds=timeout_seconds):
            show(event.to_state.value)
    return client.receipt(operation_id)
