"""docs/reference/payloads.md names every field of every kind, what is required, and every rejection."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from muniment.core import payloads
from muniment.model.operation import Kind

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "payloads.md"
CODE: Final = (
    ROOT / "src/muniment/core/tasks.py",
    ROOT / "src/muniment/stages/ledger.py",
    ROOT / "src/muniment/runtime/ingestion.py",
)
REASON: Final = re.compile(r"""["']?reason["']?\s*[=:]\s*["'](\w+)["']""")
NO_REJECTION: Final = {"dependencies_not_committed"}  # the detail of an event that blocks


def fields(page: str) -> dict[str, dict[str, bool]]:
    """Return for each kind its fields, with whether the page calls them required."""
    found: dict[str, dict[str, bool]] = {}
    kind = ""
    for line in page.splitlines():
        if line.startswith("## "):
            kind = line.removeprefix("## ")
        row = re.match(r"\| `(\w+)` \| ([^|]*) \| \S", line)
        if row and kind in tuple(Kind):
            found.setdefault(kind, {})[row[1]] = row[2].endswith(", required")
    return found


def complaints(page: str, kinds: Mapping[Kind, Iterable[str]], reasons: Iterable[str]) -> list[str]:
    shown = fields(page)
    found = []
    for kind, names in kinds.items():
        expected = {name: name in payloads.REQUIRED[kind] for name in names}
        if list(shown.get(kind, {}).items()) != list(expected.items()):
            found.append(f"{kind}: the page has {shown.get(kind)}, the code {expected}")
    return found + [f"{reason}: not on the page" for reason in reasons if f"`{reason}`" not in page]


def reasons() -> set[str]:
    return {word for path in CODE for word in REASON.findall(path.read_text("utf-8"))} - NO_REJECTION


def test_the_page_has_every_field_in_the_order_of_the_checks() -> None:
    assert complaints(PAGE.read_text("utf-8"), payloads.FIELDS, reasons()) == []


def test_the_reasons_are_found_in_the_code() -> None:
    assert reasons() == {
        "dependency_rejected",
        "too_many_parts",
        "stream_differs",
        "stream_not_found",
        "step_differs",
        "step_not_found",
        "step_ambiguous",
        "completion_differs",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| `content` | filled text, required |", "| `content` | filled text |"),
        ("| `mentions` |", "| `mentioned` |"),
        ("| `ordinal` | integer, 0 to 2^32-1 | Order", "| ordinal | integer, 0 to 2^32-1 | Order"),
        ("`step_ambiguous`", "`step_unclear`"),
        ("| `too_many_parts` |", "| too many |"),
    ],
)
def test_control_a_changed_page_is_noticed(old: str, new: str) -> None:
    page = PAGE.read_text("utf-8")
    assert page.count(old) == 1

    assert complaints(page.replace(old, new), payloads.FIELDS, reasons()) != []
