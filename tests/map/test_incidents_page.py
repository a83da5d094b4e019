"""docs/incidents.md has each of 57 incidents once, and the tests that it names exist; and four rules."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "incidents.md"
INCIDENTS: Final = 57
HEAD: Final = ["#", "what happened", "how it is prevented here", "shown by"]
GROUPS: Final = {
    "Executor and model": (1, 15),
    "Ledger and coordinator": (16, 32),
    "Storage and data": (33, 48),
    "Process and operations": (49, 57),
}
NAMED: Final = re.compile(r"\[(test_\w+)\]\((\S+?)\)")
SUMMARY: Final = re.compile(
    r"^(\d+) are shown by tests, (\d+) cannot exist, (\d+) are not shown yet\.$", re.MULTILINE
)
Verdict = Literal["shown", "cannot exist", "not shown yet"]


class Incident(NamedTuple):
    group: str
    number: int
    cells: list[str]


def incidents(page: str) -> Iterator[Incident]:
    group = ""
    for line in page.splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0].isdecimal():
            yield Incident(group, int(cells[0]), cells)


def verdict(cell: str) -> Verdict | None:
    """What the last cell says; None where it says nothing that could be checked."""
    for said in ("cannot exist", "not shown yet"):
        if cell.startswith(f"{said}: ") and len(cell) > len(said) + 20:
            return said
    return "shown" if cell and not re.sub(r"[,\s]", "", NAMED.sub("", cell)) else None


@cache
def functions(path: Path) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def untrue(line: str) -> Iterator[str]:
    """Named tests that do not exist."""
    for name, target in NAMED.findall(line):
        path = (PAGE.parent / target).resolve()
        if not path.is_file():
            yield f"{target}: no such file"
        elif not name.endswith(".py") and name not in functions(path):
            yield f"{target}: no {name}"


def complaints(page: str) -> list[str]:
    """Return what is wrong with a page."""
    found = list(incidents(page))
    numbers = Counter(each.number for each in found)
    wrong = [f"{n}: {numbers[n]} times" for n in range(1, INCIDENTS + 1) if numbers[n] != 1]
    wrong += [f"{n}: there is no such incident" for n in numbers if not 1 <= n <= INCIDENTS]
    for each in found:
        first, last = GROUPS.get(each.group, (0, 0))
        if not first <= each.number <= last:
            wrong.append(f"{each.number}: in the group {each.group!r}")
        if len(each.cells) != len(HEAD) or not all(each.cells):
            wrong.append(f"{each.number}: not four cells")
        elif verdict(each.cells[-1]) is None:
            wrong.append(f"{each.number}: neither tests nor a reason")
    counted = Counter(verdict(each.cells[-1]) for each in found)
    told = SUMMARY.search(page)
    expected = [counted["shown"], counted["cannot exist"], counted["not shown yet"]]
    if told is None or [int(number) for number in told.groups()] != expected:
        wrong.append(f"the summary should say {expected}")
    return wrong + [problem for line in page.splitlines() for problem in untrue(line)]


def test_each_incident_is_there_once_with_tests_that_exist() -> None:
    page = PAGE.read_text("utf-8")

    assert complaints(page) == []
    assert page.count("| " + " | ".join(HEAD) + " |") == len(GROUPS)
    assert len(set(NAMED.findall(page))) > 50


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[test_32_clients_and_one_id]", "[test_32_clients_and_one_ID]", "no test_32_clients_and_one_ID"),
        (
            "tests/api/test_many_clients.py",
            "tests/api/test_few_clients.py",
            "test_few_clients.py: no such file",
        ),
        ("| 30 | ", "| 31 | ", "30: 0 times"),
        ("| 30 | ", "| 31 | ", "31: 2 times"),
        ("| 57 | ", "| 58 | ", "58: there is no such incident"),
        ("| 48 | ", "| 49 | ", "49: in the group 'Storage and data'"),
        (
            "cannot exist: there are no mind maps, and no graph",
            "cannot exist",
            "48: neither tests nor a reason",
        ),
        ("cannot exist: there are no mind maps, and no graph", "obvious", "48: neither tests nor a reason"),
        (
            "cannot exist: there are no mind maps",
            "not shown yet: there are no mind maps",
            "the summary should say",
        ),
        ("| A step of a stream is one row |", "|", "48: not four cells"),
    ],
)
def test_control_a_page_that_says_something_else_is_noticed(old: str, new: str, complaint: str) -> None:
    page = PAGE.read_text("utf-8")
    assert old in page

    assert any(complaint in found for found in complaints(page.replace(old, new)))


# Four rules of the page that nothing else looks after

SELECTING: Final = re.compile(
    r"\s(?:--(?:reruns?|lf|last-failed|deselect|ignore|force-flaky|maxfail)\b|-[kmx]\b)|\|\||;|\|"
)
PORT: Final = re.compile(r"--port[\"', =]+(\d+)")


def selections(programs: Iterable[str]) -> list[str]:
    """Runs of pytest that leave tests out, repeat them, or hide how they ended."""
    lines = (line.strip() for text in programs for line in text.splitlines() if not line.startswith("#"))
    return [line for line in lines if SELECTING.search(line.partition("-m pytest")[2])]


def test_every_run_is_of_all_tests_and_once() -> None:
    run = (ROOT / ".ci" / "run").read_text("utf-8")
    test = (ROOT / "scripts" / "test").read_text("utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]

    assert {"scripts/install", "scripts/check", "scripts/test"} <= set(
        re.findall(r"^step (\S+)$", run, re.MULTILINE)
    )
    assert (settings["testpaths"], settings["xfail_strict"]) == (["tests"], True)
    assert "-m pytest" in test
    assert selections([run, test, f"-m pytest {settings['addopts']}"]) == []
    assert not re.search("rerun|flaky", (ROOT / "constraints.txt").read_text("utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        '.venv/bin/python -m pytest -k "not slow"',
        ".venv/bin/python -m pytest --deselect tests/api",
        ".venv/bin/python -m pytest --reruns 3",
        ".venv/bin/python -m pytest || true",
    ],
)
def test_control_a_run_that_leaves_something_out_is_noticed(line: str) -> None:
    assert selections([line]) == [line]


def fixed_ports(text: str) -> list[int]:
    """Ports that a program is told to listen on, other than whichever is free. 70000 is none."""
    return [port for port in map(int, PORT.findall(text)) if 0 < port < 1 << 16]


def test_no_test_asks_for_a_fixed_port() -> None:
    texts = {
        path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)
    }

    assert sum(len(PORT.findall(text)) for text in texts.values()) > 3
    assert {str(path): ports for path, text in texts.items() if (ports := fixed_ports(text))} == {}


def test_control_a_fixed_port_is_noticed() -> None:
    assert fixed_ports('serve("--port", "8080") + "--port 0 --port=23001"') == [8080, 23001]


PROOFS: Final = ROOT / "docs" / "reliability.md"
LINKED: Final = re.compile(r"\]\((\.\./tests/\S+?\.py)\)")
CONTROL: Final = re.compile(r"^\s*(?:async )?def test_\w*control\w*\(", re.MULTILINE)


def uncontrolled(page: str, texts: Mapping[str, str]) -> list[str]:
    """Proofs of the page that name no planted fault, or whose file has no test that plants one.

    ``texts`` are those of the test files that the page links, by the link.
    """
    head = next(line for line in page.splitlines() if line.startswith("| proof |"))
    assert head.endswith("| controls |")
    found = []
    for line in page[page.index(head) :].partition("\n\n")[0].splitlines()[2:]:
        name, *_, controls = (cell.strip() for cell in line.split("|")[1:-1])
        if not re.search(r"\w", controls):
            found.append(f"{name}: no control on the page")
        files = LINKED.findall(name + controls)
        if files and not any(CONTROL.search(texts[link]) for link in files):
            found.append(f"{name}: no control in {', '.join(files)}")
    return found


def linked(page: str) -> dict[str, str]:
    return {link: (PROOFS.parent / link).read_text("utf-8") for link in LINKED.findall(page)}


def test_every_proof_plants_a_fault_that_it_must_notice() -> None:
    page = PROOFS.read_text("utf-8")

    assert len(linked(page)) >= 20
    assert uncontrolled(page, linked(page)) == []


def test_control_a_proof_that_plants_nothing_is_noticed() -> None:
    page = PROOFS.read_text("utf-8")
    without = re.sub(r"^(\| R10 .*\|)[^|]*\|$", r"\1 - |", page, flags=re.MULTILINE)
    texts = linked(page)
    texts["../tests/api/test_many_clients.py"] = "def test_32_clients_and_one_id() -> None: ..."

    [named] = uncontrolled(without, linked(page))
    assert named.startswith("R10 ")
    assert named.endswith("no control on the page")
    [named] = uncontrolled(page, texts)
    assert named.endswith("no control in ../tests/api/test_many_clients.py")


BENCH: Final = ROOT / "bench"
MEASURE: Final = "bench.measure."
DEFINES_LOAD: Final = "bench.measure.machine"
LOAD_CALLS: Final = frozenset({"load", "load_line"})


def calls(text: str) -> set[str]:
    """Names of the functions that a program calls, and of the parts of bench/measure that it imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(node.func.id)
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.startswith(MEASURE) and module != DEFINES_LOAD:
            found |= calls((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    return found


def unloaded(programs: Mapping[str, str]) -> list[str]:
    """Programs that measure and do not ask how busy the machine was; texts by name."""
    asked = {name: calls(text) for name, text in programs.items()}
    return sorted(name for name, names in asked.items() if "main" in names and not LOAD_CALLS & names)


def test_every_measurement_tells_the_load_of_the_machine() -> None:
    programs = {path.stem: path.read_text("utf-8") for path in BENCH.glob("*.py")}

    assert len(programs) > 6
    assert unloaded(programs) == []


def test_control_a_measurement_that_does_not_tell_the_load_is_noticed() -> None:
    text = (BENCH / "backlog.py").read_text("utf-8")

    assert unloaded({"backlog": text.replace("load_line(", "str(").replace("load()", "0.0")}) == ["backlog"]
