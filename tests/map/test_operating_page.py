"""docs/operating.md knows every log event, file, exit code of serve, and limit that there is."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args, get_type_hints

import pytest

from muniment.adapters.files.directory import LOCK_FILE, OWNER_FILE, PROBE_FILE
from muniment.adapters.sqlite.store import LEDGER_FILE
from muniment.cli import exits
from muniment.config import field_names
from muniment.executor.supervisor import ExecutorEvent

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "operating.md"
LOGGED: Final = re.compile(r"""log(?:ger\("\w+"\))?\.(info|warning|error)\(\s*"([^"]*)\"""")


def events() -> set[tuple[str, str]]:
    """Return level and text of every record that the package logs, the executor's own kinds among them."""
    found = {
        (level, text)
        for path in (ROOT / "src").rglob("*.py")
        for level, text in LOGGED.findall(path.read_text("utf-8"))
    }
    return found | {("info", kind) for kind in get_args(get_type_hints(ExecutorEvent)["kind"])}


def listed_events(page: str) -> set[tuple[str, str]]:
    section = page.partition("\n## Logs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (info|warning|error) \|", section, re.MULTILINE)
    return {(level, text) for texts, level in rows for text in re.findall(r"`([^`]+)`", texts)}


def complaints(page: str) -> Iterator[str]:
    for level, text in sorted(events() ^ listed_events(page)):
        yield f"event {text} ({level}) is on one side only"
    for name in (LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-shm", LOCK_FILE, OWNER_FILE, PROBE_FILE):
        if f"\n| `{name}` |" not in page:
            yield f"file {name} is missing"
    for code in (exits.DONE, exits.FAILED, exits.WRONG, exits.REFUSED):
        if not re.search(rf"^\| {code} \| \w", page, re.MULTILINE):
            yield f"exit code {code} is missing"
    limits = page.partition("\n## Limits\n")[2]
    for name in field_names():
        if (
            name.endswith("_max")
            and not name.startswith(("part_", "executor_"))
            and f"`{name}`" not in limits
        ):
            yield f"limit {name} is missing"


def test_the_page_is_complete() -> None:
    assert len(events()) > 10
    assert list(complaints(PAGE.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("old", "complaint"),
    [
        ("| `stream cut` | warning |", "event stream cut (warning)"),
        ("| `listening` | info |", "event listening (info)"),
        ("`protocol_broken`", "event protocol_broken (info)"),
        ("| `ledger.db-wal` |", "file ledger.db-wal"),
        ("| 3 | it", "exit code 3"),
        ("`parts_max`", "limit parts_max"),
    ],
)
def test_control_what_is_left_out_is_noticed(old: str, complaint: str) -> None:
    page = PAGE.read_text("utf-8")
    assert old in page

    assert any(found.startswith(complaint) for found in complaints(page.replace(old, "")))
