"""Target 12: how much longer a query takes while eight writers ingest."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Final

from bench.measure.figures import quantile
from bench.measure.ingestion import ingested
from bench.measure.mixed_load import Did, MixedLoad, Plan, uncommitted
from bench.measure.rounds import Loads, Measured, Options, Step, in_turns
from bench.measure.store_rows import reading, states
from bench.measure.worker import Worker
from tests.support.server import Server

WRITERS: Final = 8
MEMORIES: Final = 100
"""What there is to be found from the beginning."""
LONGER: Final = 2.5
ROUNDS_MAX: Final = 3


def steps(options: Options) -> int:
    """How often ``step`` is called."""
    return 2 * min(options.rounds, ROUNDS_MAX)


def measure(options: Options, step: Step) -> Measured:
    """One query after the other, in turns with and without writers, each of whom waits for its commits."""
    seconds = LONGER * options.seconds
    with (
        Server(options.directory / "queries", embedder="bundled", log_level="error") as server,
        Worker(partial(MixedLoad, "stored")) as writers,
        Worker(partial(MixedLoad, "query")) as asking,
    ):
        server.wait_ready("search_ready")
        ingested(server, writers, MEMORIES)
        loads = Loads()
        written: list[Did] = []
        asked = Plan(seconds=seconds, queries=1)

        def alone() -> Did:
            step("queries")
            return asking.call(MixedLoad.run, server.url, asked)

        def beside() -> Did:
            step("queries beside writers")
            stored = Plan(seconds=seconds, writers=WRITERS, followers=WRITERS)
            writers.begin(MixedLoad.run, server.url, stored)
            did = asking.call(MixedLoad.run, server.url, asked)
            written.append(writers.result())
            return did

        found = [in_turns(number, [alone, beside]) for number in range(min(options.rounds, ROUNDS_MAX))]
        with reading(server.data_dir) as connection:
            names = [name for did in written for name in did.acknowledged]
            wrong = uncommitted(names, states(connection))
        server.terminate()
    wrong += [error for did in (*written, *itertools.chain(*found)) for error in did.errors]
    pairs = [(quantile(busy.query, 0.95) * 1e3, quantile(idle.query, 0.95) * 1e3) for idle, busy in found]
    return Measured((loads.figure("12", pairs, _note(found, written)),), tuple(wrong))


def _note(found: Sequence[Sequence[Did]], written: Sequence[Did]) -> str:
    idle = [seconds for alone, _ in found for seconds in alone.query]
    busy = [seconds for _, beside in found for seconds in beside.query]
    commits, seconds = sum(len(did.commit) for did in written), sum(did.seconds for did in written)
    return (
        f"median {quantile(idle, 0.5) * 1e3:.1f} ms idle ({len(idle)} queries), "
        f"{quantile(busy, 0.5) * 1e3:.1f} ms beside the writers ({len(busy)}), who committed "
        f"{commits / seconds:.0f} memories/s."
    )
