"""``muniment operation`` and ``muniment watch``: what became of a write."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from muniment.cli import options, outcome
from muniment.cli.attach import attached
from muniment.cli.output import json_text, safe_line, say, say_json
from muniment.errors import InvalidField
from muniment.model.operation import Event

if TYPE_CHECKING:  # brings httpx, which `muniment --help` does not need
    from muniment.client import Client


def operation(
    operation_id: Annotated[str | None, typer.Argument(metavar="ID", help="Operation ID.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List operations, in acceptance order.")] = False,
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="With --list: only in this state.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="With --list: only of this kind.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="ID", help="With --list: those after this one.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="With --list: most lines. [default: all]"),
    ] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Show the receipt of an operation, or list operations.

    Exit code for one operation: 0 committed, 1 rejected, 4 there is none, 5 not ended yet.
    """
    if listed == (operation_id is not None):
        raise InvalidField("ID", "give either an operation ID or --list")
    if not listed and any(value is not None for value in (state, kind, after, limit)):
        raise InvalidField("--list", "is needed with --state, --kind, --after and --limit")
    with attached(options.target(url, data_dir, config, assigned)) as client:
        if operation_id is None:
            _list(client, state, kind, after, limit, as_json=as_json)
            return
        receipt = client.receipt(operation_id)
    if as_json:
        say_json(receipt)
    else:
        say("\n".join(outcome.lines_of(receipt)))
    outcome.finish(outcome.code_of(receipt))


def _list(
    client: "Client",
    state: str | None,
    kind: str | None,
    after: str | None,
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    """Print page by page. As JSON it is one receipt a line, so that a long list needs no memory either."""
    count = 0
    while True:
        page = client.operations(state=state, kind=kind, after=after)
        for receipt in page["operations"]:
            if count == limit:
                return
            count += 1
            say(json_text(receipt) if as_json else _line(receipt))
        after = page.get("next")
        if after is None:
            break
    if count == 0 and not as_json:
        say("no operations")


def _line(receipt: dict[str, Any]) -> str:
    words = (
        f"{receipt['state']:<10}  {receipt['kind']:<18}  {receipt['created_at']}  {receipt['operation_id']}"
    )
    return safe_line(words)


def watch(
    operation_id: Annotated[str, typer.Argument(metavar="ID", help="Operation ID.")],
    after: Annotated[
        int, typer.Option("--after", metavar="N", min=0, help="Only events after this sequence number.")
    ] = 0,
    timeout: options.Timeout = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Follow the events of an operation to its end, over lost connections and restarts of the server.

    Exit code: 0 committed, 1 rejected, 4 there is none, 5 not known. With --json an event a line.
    """
    where = options.target(url, data_dir, config, assigned)
    with outcome.asked_later(operation_id, where), attached(where) as client:
        for event in client.events(operation_id, after, timeout):
            say(json_text(event) if as_json else _event_line(event))
        receipt = client.receipt(operation_id)
    if not as_json:
        say(outcome.line_of(receipt))
    outcome.finish(outcome.code_of(receipt))


def _event_line(event: Event) -> str:
    came_from = event.from_state.value if event.from_state else "-"
    detail = "" if event.detail is None else f"  {json_text(event.detail)}"
    return safe_line(
        f"{event.sequence:>3}  {came_from:<10} -> {event.to_state.value:<10}  {event.occurred_at}{detail}"
    )
