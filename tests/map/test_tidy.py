"""Rules of the tree that no linter knows. Each one is a function from files to complaints, with a control."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
# Kept byte for byte, whatever is in it.
DATA: Final = ("tests/golden/*", "tests/*/data/*", "tests/contract/*.json", "LICENSE")

# Written in pieces, or this file would hold what it looks for.
ELSEWHERE: Final = re.compile(
    "|".join(
        (
            r"(?<![\w.~-])/(?:wo" + r"rk|ro" + r"ot|fa" + r"rm|home/\w+)/",
            r"/tm" + r"p/w\b",
            r"\.libra" + r"ry\b",
            r"pypi\.o" + r"rg",
            r"pythonho" + r"sted\.",
            r"registry\.npm" + r"js\.",
            r"deb\.deb" + r"ian\.",
        )
    )
)
UNFINISHED: Final = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
VAGUE: Final = frozenset({"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"})

ADR_NAME: Final = re.compile(r"(\d{4})-[a-z0-9]+(?:-[a-z0-9]+)*\.md")
ADR_PARTS: Final = (
    r"^(?:## |\*\*|- )?Status\b",
    r"^## Context$",
    r"^## Options$",
    r"^## Decision$",
    r"^## What would change it$",
)
Files = dict[str, bytes]


def names(root: Path) -> list[str]:
    """Return what is or could be committed: from git, else from the disk less what .gitignore names."""
    git = shutil.which("git")
    if git and (root / ".git").exists():
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=False)
        if listed.returncode == 0:  # Otherwise git does not trust a clone that another user owns.
            return sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
    lines = (root / ".gitignore").read_text("utf-8").splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")] + [".git"]
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)

        def kept(name: str, here: Path = here) -> bool:
            return not any(fnmatch(name, rule) or fnmatch(str(here / name), rule) for rule in ignored)

        folders[:] = filter(kept, folders)
        found += [(here / name).as_posix() for name in files if kept(name)]
    return sorted(found)


@pytest.fixture(scope="module")
def files() -> Files:
    read = {name: (ROOT / name).read_bytes() for name in names(ROOT) if (ROOT / name).is_file()}
    assert {"pyproject.toml", "src/muniment/errors.py", "tests/map/test_tidy.py"} <= read.keys()
    return read


def texts(files: Files) -> Iterator[tuple[str, str]]:
    """Yield the files that people write."""
    for name, content in files.items():
        if any(fnmatch(name, rule) for rule in DATA):
            continue
        try:
            yield name, content.decode()
        except UnicodeDecodeError:
            yield name, ""


def lines_with(files: Files, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts(files)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def binary(files: Files) -> list[str]:
    return [name for name, text in texts(files) if not text and files[name]]


def without_end_of_line(files: Files) -> list[str]:
    return [
        name for name, text in texts(files) if text and (not text.endswith("\n") or text.endswith("\n\n"))
    ]


def python(files: Files) -> Iterator[tuple[str, str]]:
    for name, text in texts(files):
        if name.endswith(".py") or re.match(r"#!.*\bpython", text):
            yield name, text


def undocumented_modules(files: Files) -> list[str]:
    return [name for name, text in python(files) if not (ast.get_docstring(ast.parse(text)) or "").strip()]


def vague_modules(names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if name.startswith(("src/", "tests/", "bench/"))
        and VAGUE & {part.split(".")[0] for part in name.split("/")}
    ]


def programs(files: Files) -> list[str]:
    return [
        name for name in files if name.startswith(("scripts/", ".ci/")) and not PurePosixPath(name).suffix
    ]


def unsafe_programs(files: Files) -> list[str]:
    """Return programs whose first line names no interpreter, and shells that go on after an error."""
    found = []
    for name in programs(files):
        text = files[name].decode()
        shell = text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
        if not shell and not text.startswith("#!/usr/bin/env python3\n"):
            found.append(name)
    return found


def adr_names(files: Files) -> list[str]:
    folder = "docs/adr/"
    return sorted(
        name.removeprefix(folder) for name in files if name.startswith(folder) and "README" not in name
    )


def adr_complaints(files: Files) -> list[str]:
    """Return what is wrong with the decision records: number, title, parts, entry in the index."""
    found = []
    index = files.get("docs/adr/README.md", b"").decode()
    for number, name in enumerate(adr_names(files), 1):
        text = files[f"docs/adr/{name}"].decode()
        match = ADR_NAME.fullmatch(name)
        if match is None or int(match[1]) != number:
            found.append(f"{name}: expected the number {number:04}")
        if not re.match(rf"# (?:ADR )?0*{number}\b", text):
            found.append(f"{name}: the title does not begin with its number")
        found += [f"{name}: no {part}" for part in ADR_PARTS if not re.search(part, text, re.MULTILINE)]
        if f"]({name})" not in index:
            found.append(f"{name}: not linked from docs/adr/README.md")
    linked = re.findall(r"\]\((\d{4}-[^)#]*)", index)
    return found + [f"README.md: no such record: {name}" for name in linked if name not in adr_names(files)]


def fragment_complaints(files: Files, kinds: set[str]) -> list[str]:
    fragments = [PurePosixPath(name).name for name in files if name.startswith("changelog.d/")]
    known = {"README.md", "template.md.jinja"}
    pattern = re.compile(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(sorted(kinds))})\.md")
    return [name for name in fragments if name not in known and not pattern.fullmatch(name)]


def test_no_machine_path_and_no_registry_host(files: Files) -> None:
    assert lines_with(files, ELSEWHERE) == []


def test_nothing_is_marked_unfinished(files: Files) -> None:
    assert lines_with(files, UNFINISHED) == []


def test_no_line_ends_in_white_space(files: Files) -> None:
    assert lines_with(files, re.compile(r"[ \t]+$")) == []


def test_every_file_ends_with_one_line_end(files: Files) -> None:
    assert without_end_of_line(files) == []


def test_every_file_outside_the_data_is_text(files: Files) -> None:
    assert binary(files) == []


def test_every_module_says_what_it_is(files: Files) -> None:
    assert undocumented_modules(files) == []


def test_no_module_has_a_name_that_says_nothing(files: Files) -> None:
    assert vague_modules(files) == []


def test_programs_can_be_started_and_stop_at_an_error(files: Files) -> None:
    assert {"scripts/install", "scripts/check", "scripts/test", ".ci/run"} <= set(programs(files))
    assert [name for name in programs(files) if not os.access(ROOT / name, os.X_OK)] == []
    assert unsafe_programs(files) == []


def test_decision_records_are_complete(files: Files) -> None:
    assert adr_names(files)
    assert adr_complaints(files) == []


def test_fragments_are_named_for_the_changelog(files: Files) -> None:
    settings = tomllib.loads(files["pyproject.toml"].decode())
    kinds = {kind["directory"] for kind in settings["tool"]["towncrier"]["type"]}

    assert kinds == {"added", "changed", "fixed", "removed", "security"}
    assert fragment_complaints(files, kinds) == []


# Controls: what each rule is there to find.

GOOD_ADR: Final = b"""# 1. Choice

Status: accepted

## Context

## Options

## Decision

## What would change it
"""
GOOD_INDEX: Final = b"- [Choice](0001-choice.md)\n"


@pytest.mark.parametrize(
    "line",
    [
        "see /wo" + "rk/x",
        "cd /ro" + "ot/x",
        '"/ho' + 'me/ann/x"',
        "https://pypi.o" + "rg/x",
        "ls /tm" + "p/w",
    ],
)
def test_control_a_path_or_host_is_found(line: str) -> None:
    assert lines_with({"docs/a.md": line.encode()}, ELSEWHERE) == [f"docs/a.md:1: {line}"]


@pytest.mark.parametrize("line", ["framework/parts", "net/ro" + "ot/x", "~/wo" + "rk/x", "GET /home"])
def test_control_other_words_are_not(line: str) -> None:
    assert lines_with({"docs/a.md": line.encode()}, ELSEWHERE) == []


def test_control_an_unfinished_mark_is_found_but_not_in_data() -> None:
    mark = b"# TO" + b"DO: later\n"

    assert lines_with({"src/a.py": mark, "tests/golden/a.txt": mark}, UNFINISHED) == [
        "src/a.py:1: " + mark.decode().strip()
    ]


def test_control_text_rules() -> None:
    files = {"a.md": b"no end", "b.md": b"two\n\n", "c.md": b"good\n", "d.bin": b"\xff\xfe", "e.md": b""}

    assert without_end_of_line(files) == ["a.md", "b.md"]
    assert binary(files) == ["d.bin"]


def test_control_modules() -> None:
    files = {
        "src/a.py": b'"""Says it."""\n',
        "src/b.py": b"x = 1\n",
        "src/c.py": b'""""""\n',
        "scripts/d": b"#!/x python\n",
    }

    assert undocumented_modules(files) == ["src/b.py", "src/c.py", "scripts/d"]
    assert vague_modules(["src/m/utils.py", "src/m/helpers/x.py", "tests/manager.py", "src/m/plan.py"]) == [
        "src/m/utils.py",
        "src/m/helpers/x.py",
        "tests/manager.py",
    ]


def test_control_programs() -> None:
    files = {
        "scripts/a": b"#!/usr/bin/env bash\nset -euo pipefail\n",
        "scripts/b": b"#!/usr/bin/env bash\ntrue\n",
        "scripts/c": b"echo\n",
        "scripts/d.txt": b"\n",
    }

    assert unsafe_programs(files) == ["scripts/b", "scripts/c"]


@pytest.mark.parametrize(
    ("name", "text", "index", "complaint"),
    [
        ("0001-choice.md", GOOD_ADR, GOOD_INDEX, None),
        ("0002-choice.md", GOOD_ADR, GOOD_INDEX, "expected the number 0001"),
        ("0001_Choice.md", GOOD_ADR, GOOD_INDEX, "expected the number 0001"),
        ("0001-choice.md", GOOD_ADR.replace(b"## Options", b"## Others"), GOOD_INDEX, "no ^## Options$"),
        ("0001-choice.md", GOOD_ADR.replace(b"Status", b"State"), GOOD_INDEX, "Status"),
        ("0001-choice.md", GOOD_ADR.replace(b"# 1.", b"# 7."), GOOD_INDEX, "title"),
        ("0001-choice.md", GOOD_ADR, b"", "not linked"),
        ("0001-choice.md", GOOD_ADR, GOOD_INDEX + b"[x](0002-gone.md)", "no such record"),
    ],
)
def test_control_decision_records(name: str, text: bytes, index: bytes, complaint: str | None) -> None:
    found = adr_complaints({f"docs/adr/{name}": text, "docs/adr/README.md": index})

    assert (found == []) if complaint is None else any(complaint in line for line in found)


def test_control_fragments() -> None:
    files = {
        f"changelog.d/{name}": b""
        for name in ("README.md", "a-b.added.md", "a.news.md", "A.added.md", "a.added")
    }

    assert fragment_complaints(files, {"added", "fixed"}) == ["a.news.md", "A.added.md", "a.added"]


def test_control_the_list_without_git_is_the_list_with_git(tmp_path: Path) -> None:
    for name in (
        ".gitignore",
        "src/a.py",
        "src/__pycache__/a.pyc",
        ".venv/x",
        "bench/results/r.json",
        "bench/b.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n", encoding="utf-8")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    walked = names(tmp_path)

    assert walked == [".gitignore", "bench/b.py", "src/a.py"]
    git = shutil.which("git")
    if git:
        subprocess.run([git, "init", "--quiet"], cwd=tmp_path, check=True)
        assert names(tmp_path) == walked
