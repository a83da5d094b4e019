"""The reference pages say what the code does, and links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from muniment.config import Config, field_names

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "configuration.md"
LINK: Final = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
CODE: Final = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def rows(page: str) -> dict[str, tuple[str, str]]:
    """Return the default and the meaning of each setting in the table of the page."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 6 and cells[1].startswith("`"):
            found[cells[1].strip("`")] = (cells[3], cells[4])
    return found


def complaints(page: str, defaults: Mapping[str, object]) -> list[str]:
    """Return how the page differs from the settings, read apart from the program that makes it."""
    table = rows(page)
    found = [f"{name}: not a setting" for name in table if name not in defaults]
    for name, default in defaults.items():
        if name not in table:
            found.append(f"{name}: not on the page")
            continue
        shown, meaning = table[name]
        expected = "none" if default is None else f"`{msgspec.json.encode(default).decode()}`"
        if shown.split(" (")[0] != expected:
            found.append(f"{name}: the page says {shown}, the default is {expected}")
        if not meaning.endswith("."):
            found.append(f"{name}: no sentence says what it is")
    return found


def defaults() -> dict[str, object]:
    config = Config()
    return {name: getattr(config, name) for name in field_names()}


def broken_links(page: Path, text: str) -> list[str]:
    targets = LINK.findall(CODE.sub("", text))
    return [target for target in targets if not (page.parent / target).exists()]


def test_every_setting_is_on_its_page() -> None:
    assert complaints(PAGE.read_text("utf-8"), defaults()) == []


def test_the_page_is_what_its_program_prints() -> None:
    program = ROOT / "scripts" / "config-reference"
    printed = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout

    assert PAGE.read_text("utf-8") == printed


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changelog.d").glob("*.md")]

    assert len(pages) > 4
    assert {str(page.relative_to(ROOT)): broken_links(page, page.read_text("utf-8")) for page in pages} == {
        str(page.relative_to(ROOT)): [] for page in pages
    }


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "| `port` | integer >= 0, <= 65535 | `23001` |",
            "| `port` | integer | `23002` |",
            "the page says `23002`",
        ),
        ("| `host` |", "| `hosts` |", "hosts: not a setting"),
        ("| `host` |", "| `hosts` |", "host: not on the page"),
        ("Longest request body.", "", "body_bytes_max: no sentence"),
    ],
)
def test_control_a_changed_page_is_noticed(old: str, new: str, complaint: str) -> None:
    page = PAGE.read_text("utf-8")
    assert old in page

    assert any(complaint in found for found in complaints(page.replace(old, new), defaults()))


def test_control_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.touch()

    text = "[a](page.md#x) [b](gone.md) [c](https://example.org) `[d](code.md)` [e](#here)"

    assert broken_links(page, text) == ["gone.md"]
