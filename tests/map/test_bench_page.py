"""The page of the measurements lists every program of bench/, and no other."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ROW: Final = re.compile(r"^\| `scripts/bench (\w+)", re.MULTILINE)
MAIN: Final = 'if __name__ == "__main__":'


def complaints(page: str, modules: Mapping[str, str]) -> list[str]:
    """How the table differs from the modules that are programs; ``modules`` are texts by name."""
    programs = {name for name, text in modules.items() if MAIN in text}
    listed = set(ROW.findall(page))
    return [f"{name}: not on the page" for name in sorted(programs - listed)] + [
        f"{name}: not a program" for name in sorted(listed - programs)
    ]


def modules() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in (ROOT / "bench").glob("*.py")}


def page() -> str:
    return (ROOT / "bench" / "README.md").read_text("utf-8")


def test_the_page_lists_every_program() -> None:
    assert len(ROW.findall(page())) >= 5
    assert complaints(page(), modules()) == []


def test_control_a_program_that_is_missing_and_one_that_is_gone_are_noticed() -> None:
    assert complaints(page(), modules() | {"fresh": MAIN}) == ["fresh: not on the page"]
    assert complaints(page(), {name: text for name, text in modules().items() if name != "targets"}) == [
        "targets: not a program"
    ]
