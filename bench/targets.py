"""The targets that are ratios of Muniment to the limits of the machine, measured in one run.

Each is taken in turns with what limits it, over several rounds: 1 and 2 the ledger alone, 3 to 6 accepts over
HTTP, 7 followers, 11 ingestion, 12 queries beside writers. What is slow is shown and is no failure; what is
wrong (a lost row, a missing event, a 202 before its flush) is listed, and the exit status is 1.

With --render nothing is measured: the section of docs/benchmarks.md is written from the file of the last run.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.measure import accepts, ingestion, ledger_alone, page, queries, sse_fanout
from bench.measure.figures import BY_KEY, NUMBERS, Figure, Run
from bench.measure.machine import ROOT, machine
from bench.measure.rounds import Measured, Options

GROUPS: Final[tuple[tuple[frozenset[int], ModuleType], ...]] = (
    (frozenset({1, 2}), ledger_alone),
    (frozenset({3, 4, 5, 6}), accepts),
    (frozenset({7}), sse_fanout),
    (frozenset({11}), ingestion),
    (frozenset({12}), queries),
)
PAGE: Final = ROOT / "docs" / "benchmarks.md"
RESULT: Final = ROOT / "build" / "targets.json"
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""Where fdatasync costs nothing and means nothing."""
REDRAWS_A_SECOND: Final = 2.0


def numbers(text: str) -> frozenset[int]:
    """The value of ``--only``."""
    chosen = frozenset(int(each) for each in text.split(","))
    if not chosen <= set(NUMBERS):
        raise argparse.ArgumentTypeError(f"numbers of targets are {', '.join(map(str, NUMBERS))}")
    return chosen


def measured(options: Options, chosen: frozenset[int]) -> Measured:
    """Measure the chosen targets, and those that are measured together with them."""
    figures: list[Figure] = []
    wrong: list[str] = []
    groups = [module for known, module in GROUPS if known & chosen]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=REDRAWS_A_SECOND) as progress:
        task = progress.add_task("", total=sum(module.steps(options) for module in groups))
        done = -1

        def step(name: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=name)

        for module in groups:
            found: Measured = module.measure(options, step)
            figures += [figure for figure in found.figures if BY_KEY[figure.key].number in chosen]
            wrong += found.wrong
        progress.update(task, completed=done + 1, description="done")
    order = list(BY_KEY)
    return Measured(tuple(sorted(figures, key=lambda each: order.index(each.key))), tuple(wrong))


def run(arguments: argparse.Namespace, command: str) -> Run:
    """Measure, and describe the run."""
    began, clock = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muniment-bench-", dir=arguments.dir) as directory:
        where = machine(Path(directory))
        if where.file_system in IN_MEMORY:
            raise SystemExit(f"{directory} is in memory ({where.file_system}): name a disk with --dir")
        options = Options(seconds=arguments.seconds, rounds=arguments.rounds, directory=Path(directory))
        found = measured(options, arguments.only)
        return Run(
            command=command,
            began=began.strftime("%Y-%m-%d %H:%M UTC"),
            seconds=time.monotonic() - clock,
            machine=where,
            figures=found.figures,
            wrong=found.wrong,
        )


def render(result: Path, target: Path) -> None:
    """Write the section of the page from a result."""
    found = msgspec.json.decode(result.read_bytes(), type=Run)
    target.write_text(page.replaced(target.read_text("utf-8"), page.section(found)), "utf-8")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench targets", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=numbers, default=frozenset(NUMBERS), help="such as 1,2,7")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one side of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="on the disk to be measured; else the temporary directory")
    parser.add_argument("--json", type=Path, default=RESULT, help="where the result is written, or read from")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    if chosen.dir is not None and not chosen.dir.is_dir():
        parser.error(f"--dir: {chosen.dir} is no directory")
    return chosen


def main() -> int:
    chosen = parsed(sys.argv[1:])
    if chosen.render:
        render(chosen.json, chosen.page)
        return 0
    found = run(chosen, shlex.join(["scripts/bench", "targets", *sys.argv[1:]]))
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(page.table(found))
    print(f"written to {chosen.json}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
