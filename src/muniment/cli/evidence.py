"""``muniment evidence``: what the executor did for an operation."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from muniment.cli import options
from muniment.cli.attach import attached
from muniment.cli.output import json_text, safe_line, say


def evidence(
    operation_id: Annotated[str, typer.Argument(metavar="ID", help="Operation ID.")],
    after: Annotated[
        int, typer.Option("--after", metavar="N", min=0, help="Only records after this sequence number.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Most records. [default: all]")
    ] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Show what the executor did for an operation: starts, progress, exits, restarts. It decides nothing.

    Exit code 0: shown, also where there is none yet. 4: there is no such operation. With --json a record a
    line.
    """
    count = 0
    place: int | None = after
    with attached(options.target(url, data_dir, config, assigned)) as client:
        while place is not None and count != limit:
            page = client.evidence(operation_id, after=place)
            for record in page["evidence"]:
                if count == limit:
                    break
                count += 1
                say(json_text(record) if as_json else _line(record))
            place = page["next"]
    if count == 0 and not as_json:
        say("no evidence")


def _line(record: Mapping[str, Any]) -> str:
    message = "" if record["message"] is None else f"  {record['message']}"
    return safe_line(
        f"{record['sequence']:>5}  {record['kind']:<10}  generation {record['generation']:<5}"
        f"  {record['occurred_at']}{message}"
    )
