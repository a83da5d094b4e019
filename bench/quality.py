"""How much of the evidence for real questions recall finds, for one window of the plan or several.

For each window a server with the bundled model gets every turn of a public set as one memory, over the HTTP
API, and is asked every question through recall, in its default configuration but for the window. What is
measured is what comes back, in its order, beside the same turns in random order and the latest first.

Wanted in --data, or in directories of it named after the sets: locomo5_dev.json.gz for locomo;
s_haystacks_dev.jsonl.xz and s_user_sessions.jsonl.xz for longmemeval. They are no part of this repository:
bench/README.md tells where they come from. Without --set, every set that is there is measured.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import quality_data as data
from bench.measure.machine import load, machine
from bench.quality_recall import Step, by_rule, through_server
from bench.quality_report import Run, text
from muniment.config import Config

QUESTIONS: Final = 24
SEED: Final = 20261201


def sets_of(chosen: argparse.Namespace) -> dict[data.SetName, Path]:
    """The sets to measure, and where each is; ends the program where one that is wanted is not complete."""
    wanted: tuple[data.SetName, ...] = (chosen.set_name,) if chosen.set_name else tuple(data.FILES)
    found = {name: at for name in wanted if (at := data.directory(chosen.data, name)) is not None}
    if not found:
        files = "; ".join(f"{name}: {', '.join(data.FILES[name])}" for name in wanted)
        raise SystemExit(f"nothing to measure in {chosen.data}. Wanted are {files}")
    return found


def scopes_of(chosen: argparse.Namespace, set_name: data.SetName, at: Path) -> tuple[data.Scope, ...]:
    """What is imported and asked."""
    if set_name == "longmemeval":
        return data.longmemeval(at, chosen.questions or QUESTIONS, chosen.seed)
    return limited(data.locomo(at, chosen.conversations), chosen.questions)


def described(set_name: data.SetName, seed: int, scopes: Sequence[data.Scope]) -> str:
    """What exactly is measured."""
    turns = sum(len(scope.turns) for scope in scopes)
    asked = sum(len(scope.questions) for scope in scopes)
    if set_name == "locomo":
        names = ", ".join(scope.name for scope in scopes)
        return f"{asked} questions about {names}; {turns:,} turns, each conversation a scope"
    return (
        f"{asked} questions drawn with seed {seed}, each with its whole haystack (user turns) as a "
        f"scope of its own; {turns:,} turns"
    )


def limited(scopes: Sequence[data.Scope], most: int | None) -> tuple[data.Scope, ...]:
    """At most so many questions of each conversation, evenly spread; all where ``most`` is None."""
    if not most:
        return tuple(scopes)
    return tuple(
        msgspec.structs.replace(scope, questions=scope.questions[:: max(1, -(-len(scope.questions) // most))])
        for scope in scopes
    )


def measured(chosen: argparse.Namespace, command: str) -> list[Run]:
    """Every set and window, one after the other; the result so far is written after each."""
    runs: list[Run] = []
    for set_name, at in sets_of(chosen).items():
        scopes = scopes_of(chosen, set_name, at)
        runs.append(
            Run(
                command=command,
                began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                machine=machine(Path.cwd()),
                set_name=set_name,
                measured=described(set_name, chosen.seed, scopes),
                seed=chosen.seed,
                held_out=frozenset(chosen.held_out),
                ranked=tuple(by_rule(scopes, chosen.seed)),
            )
        )
        _add_windows(runs, scopes, chosen)
    return runs


def _add_windows(runs: list[Run], scopes: Sequence[data.Scope], chosen: argparse.Namespace) -> None:
    before = load()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for window in chosen.part_tokens:
            found = through_server(scopes, window, shown_by(progress))
            runs[-1] = msgspec.structs.replace(
                runs[-1], ranked=(*runs[-1].ranked, found), load=(before, load())
            )
            written(runs, chosen.json)


def shown_by(progress: Progress) -> Step:
    """One bar for each thing that goes on."""
    bars = {}

    def step(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = progress.add_task(what, total=total)
        progress.update(bars[what], completed=done)

    return step


def written(runs: Sequence[Run], path: Path | None) -> None:
    """Keep the results, where a file was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(runs) + b"\n")


def numbers(given: str) -> tuple[int, ...]:
    """``16,32`` as numbers."""
    return tuple(int(each) for each in given.split(","))


def names(given: str) -> tuple[str, ...]:
    """``conv-26,conv-30`` as names."""
    return tuple(given.split(","))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench quality", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = Config().part_tokens_max
    parser.add_argument("--data", type=Path, help="directory of the sets")
    parser.add_argument("--set", dest="set_name", choices=tuple(data.FILES), help="else each that is there")
    parser.add_argument(
        "--part-tokens", type=numbers, default=(default,), metavar="N,N", help=f"windows; else {default}"
    )
    parser.add_argument(
        "--conversations", type=names, default=(), help="of locomo: conv-26,conv-30; else all"
    )
    parser.add_argument("--held-out", type=names, default=(), help="of these: reported apart from the others")
    parser.add_argument(
        "--questions",
        type=int,
        help=f"longmemeval: so many, else {QUESTIONS}; locomo: at most so many of a conversation, else all",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help="of the sample, the resamples, the random order"
    )
    parser.add_argument("--json", type=Path, help="the result is written here after each window")
    parser.add_argument("--show", type=Path, help="measure nothing, print the tables of such a file")
    chosen = parser.parse_args(arguments)
    if chosen.data is None and chosen.show is None:
        parser.error("--data is needed")
    return chosen


def main() -> int:
    chosen = parsed(sys.argv[1:])
    if chosen.show is not None:
        runs = msgspec.json.decode(chosen.show.read_bytes(), type=list[Run])
        if chosen.held_out:
            runs = [msgspec.structs.replace(run, held_out=frozenset(chosen.held_out)) for run in runs]
    else:
        runs = measured(chosen, shlex.join(["scripts/bench", "quality", *sys.argv[1:]]))
    print("\n\n".join(text(run, Config().part_tokens_max) for run in runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
