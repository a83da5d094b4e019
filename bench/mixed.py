"""One mixed load: writers, queries and followers at once, on a server with the bundled model.

Each memory is followed from its acknowledgement to its end by one of the followers, and a writer waits for a
free one. At the end everything that was acknowledged must be committed, every query answered with something,
and the store whole (``muniment check``); otherwise the exit status is 1.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from bench.measure.figures import quantile
from bench.measure.ingestion import ingested
from bench.measure.machine import load, machine
from bench.measure.mixed_load import Did, MixedLoad, Plan, uncommitted
from bench.measure.store_rows import reading, states
from bench.measure.worker import Worker
from muniment import wiring
from tests.support.server import Server

SHARES: Final = (0.5, 0.95, 0.99)
KINDS: Final = ("accept", "commit", "query")
STORED: Final = 100
"""What there is to be found from the beginning."""


def summary(did: Did) -> dict[str, Any]:
    """Quantiles in milliseconds, counts and rates of each kind, and the errors."""
    found: dict[str, Any] = {"seconds": round(did.seconds, 2), "errors": did.error_count}
    for kind in KINDS:
        values: list[float] = getattr(did, kind)
        found[kind] = {"count": len(values), "per_second": round(len(values) / did.seconds, 2)}
        if values:
            found[kind] |= {
                f"p{share * 100:.0f}_ms": round(quantile(values, share) * 1e3, 2) for share in SHARES
            }
    return found


def lines(found: dict[str, Any], wrong: Sequence[str]) -> list[str]:
    """The summary as text."""
    what = {"accept": "POST to 202", "commit": "POST to the committed event", "query": "recall"}
    shown = [
        f"{what[kind]:<28} {found[kind]['count']:>7}  {found[kind]['per_second']:>8.1f}/s  "
        + "  ".join(
            f"p{share * 100:.0f} {found[kind].get(f'p{share * 100:.0f}_ms', 0):.1f} ms" for share in SHARES
        )
        for kind in KINDS
    ]
    return [*shown, f"{'errors':<28} {found['errors']:>7}", *(f"WRONG  {each}" for each in wrong)]


@contextmanager
def bar(seconds: float) -> Iterator[None]:
    """A bar that fills while time goes by."""
    over = threading.Event()
    with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("mixed load", total=seconds)

        def move() -> None:
            while not over.wait(0.5):
                progress.advance(task, 0.5)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            yield
        finally:
            over.set()
            mover.join()


def measure(server: Server, plan: Plan) -> tuple[Did, list[str]]:
    """Put the load on a server that is ready, stop it, and say what is wrong with what it left."""
    with Worker(partial(MixedLoad, "stored")) as stored, Worker(partial(MixedLoad, "mixed")) as mixed:
        ingested(server, stored, STORED)
        with bar(plan.seconds):
            did = mixed.call(MixedLoad.run, server.url, plan)
    with reading(server.data_dir) as connection:
        found = states(connection)
    wrong = [*uncommitted(did.acknowledged, found), *did.errors]
    if not did.error_count and len(did.commit) != len(did.acknowledged):
        wrong.append(f"{len(did.acknowledged)} acknowledged, {len(did.commit)} heard of as committed")
    status = server.terminate()
    if status:
        wrong.append(f"the server ended with status {status}")
    wrong += [f"muniment check: {each}" for each in wiring.check(server.data_dir).findings]
    return did, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench mixed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--queries", type=int, default=4, help="loops, each with one query at a time")
    parser.add_argument("--followers", type=int, default=50, help="event streams open at one time")
    parser.add_argument("--embedder", choices=("bundled", "synthetic"), default="bundled")
    parser.add_argument("--trend", type=Path, help="file to which one line of JSON is appended")
    chosen = parser.parse_args()
    plan = Plan(
        seconds=chosen.seconds,
        writers=chosen.writers,
        queries=chosen.queries,
        followers=chosen.followers,
    )
    began, before = datetime.now(UTC), load()
    with tempfile.TemporaryDirectory(prefix="muniment-bench-") as directory:
        where = machine(Path(directory))
        server = Server(Path(directory) / "store", embedder=chosen.embedder, log_level="error")
        with server:
            server.wait_ready("search_ready")
            did, wrong = measure(server, plan)
    found = summary(did)
    print("\n".join(lines(found, wrong)))
    if chosen.trend is not None:
        line = {
            "began": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "revision": where.commit,
            "python": where.python,
            "processor": where.processor,
            "cores": where.cores,
            "load": [round(before, 2), round(load(), 2)],
            "embedder": chosen.embedder,
            "writers": chosen.writers,
            "queries": chosen.queries,
            "followers": chosen.followers,
            **found,
            "wrong": len(wrong),
        }
        with chosen.trend.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
