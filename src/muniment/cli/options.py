"""Options that several commands have, each written once."""

from typing import Annotated, TypeAlias

import msgspec
import typer

ConfigFile: TypeAlias = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="TOML file of settings. [env: MUNIMENT_CONFIG]")
]
DataDir: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--data-dir", metavar="DIR", help="Directory that holds the memory. [env: MUNIMENT_DATA_DIR]"
    ),
]
Assigned: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting of `muniment config show`. May be repeated."
    ),
]
Embedder: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--embedder", metavar="KIND", help="bundled, onnx, endpoint or synthetic. [env: MUNIMENT_EMBEDDER]"
    ),
]
Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Server to talk to, instead of the one that owns the data directory. [env: MUNIMENT_URL]",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
User: TypeAlias = Annotated[str | None, typer.Option("--user", metavar="ID", help="Owner of the memory.")]
Agent: TypeAlias = Annotated[str | None, typer.Option("--agent", metavar="ID", help="Agent it belongs to.")]
Session: TypeAlias = Annotated[str | None, typer.Option("--session", metavar="ID", help="Conversation.")]
Category: TypeAlias = Annotated[
    list[str] | None, typer.Option("--category", metavar="NAME", help="Category. May be repeated.")
]
Timeout: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0, help="Stop waiting after this long, with exit code 5."
    ),
]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a command finds its server: what the four options said."""

    url: str | None
    data_dir: str | None
    config: str | None
    assigned: tuple[str, ...] = ()


def target(url: str | None, data_dir: str | None, config: str | None, assigned: list[str] | None) -> Target:
    """Collect the options ``--url``, ``--data-dir``, ``--config`` and ``--set``."""
    return Target(url=url, data_dir=data_dir, config=config, assigned=tuple(assigned or ()))
