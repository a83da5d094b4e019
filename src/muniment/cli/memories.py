"""``muniment get``: one memory with all that is known of where it comes from."""

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from muniment.cli import options
from muniment.cli.attach import attached
from muniment.cli.output import json_text, safe, safe_line, say, say_bytes, say_json


def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the memory, such as memory:abc...")],
    content: Annotated[
        bool,
        typer.Option("--content", help="Only the content: its exact bytes, unless stdout is a terminal."),
    ] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Show one memory: its content and where it comes from. Exit code 4: there is none with this key."""
    with attached(options.target(url, data_dir, config, assigned)) as client:
        memory = client.memory(key)
    if as_json:
        say_json(memory)
    elif not content:
        say("\n".join(lines_of(memory)))
    elif sys.stdout.isatty():
        say(safe(memory["content"]))
    else:
        say_bytes(memory["content"].encode())


def lines_of(memory: Mapping[str, Any]) -> Iterator[str]:
    """The key, the provenance without what is empty, the sizes, and the content after a blank line."""
    yield f"{'id':<14}  {safe_line(str(memory['id']))}"
    for name, value in memory["provenance"].items():
        if value is not None and value != []:
            yield f"{name:<14}  {safe_line(value if isinstance(value, str) else json_text(value))}"
    yield f"{'bytes':<14}  {memory['byte_count']}"
    yield f"{'parts':<14}  {len(memory['parts'])}"
    yield f"{'content_sha256':<14}  {safe_line(str(memory['content_sha256']))}"
    yield ""
    yield safe(memory["content"])
