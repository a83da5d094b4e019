"""Statements by name, from ``queries.sql``: Python has no SQL text."""

from functools import cache
from importlib import resources
from typing import Final

from muniment.errors import InvariantBroken

_MARK: Final = "-- name: "


@cache
def statements() -> dict[str, str]:
    """All named statements. A name that stands twice, or an empty statement, is a bug."""
    text = (resources.files(__package__) / "queries.sql").read_text("utf-8")
    found: dict[str, str] = {}
    for block in text.split(_MARK)[1:]:
        name, _, body = block.partition("\n")
        sql = "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        if name in found or not sql.endswith(";"):
            raise InvariantBroken(f"queries.sql: statement {name!r} is there twice or does not end")
        found[name] = sql
    return found


def migrations() -> list[tuple[int, str]]:
    """Number and text of each migration, in order; a migration only goes forward and is never edited."""
    folder = resources.files(__package__) / "migrations"
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name.split("_")[0]), (folder / name).read_text("utf-8")) for name in files]
