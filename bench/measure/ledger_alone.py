"""Targets 1 and 2: the ledger alone against the disk and against the SQL."""

from functools import partial
from typing import Final

from bench.measure.disk import Disk
from bench.measure.rounds import Loads, Measured, Options, Step
from bench.measure.worker import Worker

BATCH: Final = 32


def steps(options: Options) -> int:
    """How often ``step`` is called."""
    return options.rounds


def measure(options: Options, step: Step) -> Measured:
    """Raw appends, the SQL alone, the store, the store at 32 a commit, and the writer thread, in slices."""
    loads = Loads()
    rounds: list[dict[str, float]] = []
    with Worker(partial(Disk, options.directory / "alone")) as disk:
        for _ in range(options.rounds):
            step("the ledger alone")
            found = disk.call(Disk.turns, options.seconds, BATCH)
            rounds.append({name: calls.rate for name, calls in found.items()})
        wrong = disk.call(Disk.lost)
    return Measured(
        tuple(
            loads.figure(key, [(each[ours], each[limit]) for each in rounds])
            for key, ours, limit in (
                ("1-raw", "store", "raw"),
                ("1-sql", "store", "sql"),
                ("1-thread", "thread", "raw"),
                ("2", "batch", "raw"),
            )
        ),
        tuple(wrong),
    )
