"""Imports point one way, and each contract that says so can fail."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
STAGES: Final = ROOT / "src" / "muniment" / "stages"

# Contract -> files of the package and the lines that break it. A new contract needs its line here.
PLANTED: Final[dict[str, dict[str, str]]] = {
    "Imports point one way": {"stages/__init__.py": "import muniment.runtime"},
    "No cycles between the parts of a package": {
        "core/planted_left.py": "import muniment.core.planted_right",
        "core/planted_right.py": "import muniment.core.planted_left",
    },
    "Core and model have no I/O, clock, randomness, threads, SQL or arrays": {
        "core/lifecycle.py": "import sqlite3"
    },
    "Only the wirings name adapters": {"cli/__init__.py": "from muniment.adapters import sqlite"},
    "The data path knows ports, not adapters or the executor": {
        "stages/__init__.py": "from muniment.adapters import sqlite"
    },
    "The executor child cannot reach the database": {"executor/__init__.py": "import apsw"},
    "The client needs only the words, the canonical form and the errors": {
        "client/__init__.py": "from muniment.core import lifecycle"
    },
    "Interfaces do not know each other": {
        "interfaces/planted.py": "import muniment.interfaces.http",
    },
}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of ``folder/pyproject.toml`` on ``folder/src``."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_tree_keeps_every_contract() -> None:
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PLANTED)} kept, 0 broken" in done.stdout


def test_every_contract_has_a_violation_planted_here() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]

    assert {contract["name"] for contract in contracts} == PLANTED.keys()


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_violation_breaks_its_contract(copy: Path, contract: str) -> None:
    for name, line in PLANTED[contract].items():
        with (copy / "src" / "muniment" / name).open("a", encoding="utf-8") as module:
            module.write(f"\n{line}\n")

    done = lint_imports(copy)

    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout, done.stdout + done.stderr


def test_a_module_outside_the_picture_is_noticed(copy: Path) -> None:
    (copy / "src" / "muniment" / "planted.py").write_text('"""Belongs nowhere."""\n', encoding="utf-8")

    done = lint_imports(copy)

    assert done.returncode != 0
    assert "Imports point one way BROKEN" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", [STAGES / "__init__.py", ROOT / "docs" / "ARCHITECTURE.md"], ids=lambda p: p.name
)
def test_the_stages_are_named_where_a_newcomer_looks(page: Path) -> None:
    stages = {path.stem for path in STAGES.glob("*.py")} - {"__init__"}
    text = page.read_text("utf-8")

    assert stages
    assert [stage for stage in sorted(stages) if stage not in text] == []
