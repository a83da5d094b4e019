"""``muniment config show``: every setting, its value, and where that came from."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer
from msgspec import inspect

from muniment.cli import options
from muniment.cli.output import json_text, safe_line, say, say_json
from muniment.cli.settings import configured, flags
from muniment.config import ENVIRONMENT_PREFIX, Config, field_names

app = typer.Typer(help="Look at the settings.", no_args_is_help=True, rich_markup_mode=None)

_USERINFO: Final = re.compile(r"(?<=://)[^/?#\s]*@")


@app.callback()
def _group() -> None:
    """Look at the settings."""


@app.command()
def show(
    as_json: options.AsJson = False,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Show every setting with its value, its origin (flag, environment, file or default) and its meaning.

    Passwords in URLs are masked.
    """
    given = flags(assigned=assigned, data_dir=data_dir)
    rows = list(settings(configured(given, config), given, config, os.environ))
    if as_json:
        say_json(rows)
    else:
        for row in rows:
            say(f"{row['name']} = {safe_line(json_text(row['value']))}  ({row['origin']})")
            say(f"    {row['description']}")


def settings(
    config: Config, given: Mapping[str, Any], file: str | None, environ: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield name, value, origin and description of each setting."""
    file = file or environ.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    table = {} if file is None else tomllib.loads(Path(file).expanduser().read_text("utf-8"))
    described = inspect.type_info(Config)
    assert isinstance(described, inspect.StructType)
    descriptions = {field.name: _description(field.type) for field in described.fields}
    for name in field_names():
        if name in given:
            origin = "flag"
        elif environ.get(ENVIRONMENT_PREFIX + name.upper()):
            origin = "environment"
        else:
            origin = "file" if name in table else "default"
        value = getattr(config, name)
        shown = _USERINFO.sub("***@", value) if isinstance(value, str) else value
        yield {"name": name, "value": shown, "origin": origin, "description": descriptions[name]}


def _description(kind: inspect.Type) -> str:
    text = ""
    while isinstance(kind, inspect.Metadata):
        text = (kind.extra_json_schema or {}).get("description", text)
        kind = kind.type
    return text
