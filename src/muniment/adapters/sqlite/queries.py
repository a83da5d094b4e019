"""Statements by name, from ``queries.sql``: Python has no SQL text."""

import re
from functools import cache
from importlib import resources
from typing import Final

from muniment.errors import InvariantBroken

_MARK: Final = "-- name: "
_PARAMETER: Final = re.compile(r":(\w+)")
_ROW: Final = re.compile(r"VALUES (\([^()]*\))")
_TABLE: Final = re.compile(r"\b(?:FROM|JOIN|INTO|UPDATE) (\w+)")


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


@cache
def repeated(name: str, count: int) -> str:
    """The statement with the row after VALUES ``count`` times, its parameters by position (ADR 0020)."""

    def rows(match: re.Match[str]) -> str:
        return "VALUES " + ", ".join([_PARAMETER.sub("?", match[1])] * count)

    return _ROW.sub(rows, statements()[name])


@cache
def parameters(name: str) -> tuple[str, ...]:
    """The names of a statement's parameters in order."""
    return tuple(_PARAMETER.findall(statements()[name]))


@cache
def tables(name: str) -> frozenset[str]:
    """The tables that a statement reads or writes."""
    return frozenset(_TABLE.findall(statements()[name]))


def migrations() -> list[tuple[int, str]]:
    """Number and text of each migration, in order; a migration only goes forward and is never edited."""
    folder = resources.files(__package__) / "migrations"
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name.split("_")[0]), (folder / name).read_text("utf-8")) for name in files]
