"""What the code cites is written down: decision records, and the rulings that the project began with."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RECORDS: Final = ROOT / "docs" / "adr"
RULINGS: Final = re.compile(r"\b[Rr]ulings? (\d+(?:(?:, | and | to )\d+)*)")
CITING: Final = ("*.py", "*.sql", "*.toml", "*.json")


def cited_rulings(text: str) -> Iterator[int]:
    for numbers in RULINGS.findall(text):
        for part in re.split(r", | and ", numbers):
            first, _, last = part.partition(" to ")
            yield from range(int(first), int(last or first) + 1)


def cited_records(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\bADR (\d+)", text)}


def texts() -> list[str]:
    folders = (ROOT / "src", ROOT / "tests", ROOT / "docs")
    paths = [path for folder in folders for pattern in CITING for path in folder.rglob(pattern)]
    return [path.read_text("utf-8", "replace") for path in paths] + [
        page.read_text("utf-8") for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    ]


def listed_rulings(index: str) -> set[int]:
    section = index.partition("\n## Rulings\n")[2]
    return {int(number) for number in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}


def missing(citing: Iterable[str], index: str, records: set[int]) -> list[str]:
    """Return what is cited and cannot be looked up."""
    whole = "\n".join(citing)
    rulings = set(cited_rulings(whole)) - listed_rulings(index)
    return [f"ruling {n}" for n in sorted(rulings)] + [
        f"ADR {n}" for n in sorted(cited_records(whole) - records)
    ]


def test_everything_that_is_cited_can_be_looked_up() -> None:
    records = {int(path.name[:4]) for path in RECORDS.glob("[0-9]*.md")}
    citing = texts()

    assert len(set(cited_rulings("\n".join(citing)))) > 10
    assert missing(citing, (RECORDS / "README.md").read_text("utf-8"), records) == []


def test_control_a_number_that_is_nowhere_is_noticed() -> None:
    index = "| 5 | x |\n\n## Rulings\n\n| 1 | in short | 1 |\n| 2 | in short | 1 |\n| 3 | in short | 1 |\n"
    nowhere = ("ADR " + "0009", "rul" + "ing 5")  # In pieces, or this file would cite them.

    assert missing(["# (rul" + "ings 1 to 3)", *nowhere], index, {1}) == ["ruling 5", "ADR 9"]
