"""Targets, measured rounds and ratios. Pure: no clock, no file.

A target is a ratio of two figures of one run, taken in turns: what Muniment does, and what limits it on the
same machine at the same moment. A round is one such pair.
"""

import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Better = Literal["higher", "lower"]

BELOW_THE_FLOOR: Final = "below the floor"
REACHES_THE_FLOOR: Final = "reaches the floor"
REACHES_THE_AIM: Final = "reaches the aim"
NO_TARGET: Final = ""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for: the ratio that must be reached, and the one that is aimed at."""

    key: str
    number: int
    """The number of the target, as ``--only`` takes it."""
    what: str
    unit: str
    """Of both figures."""
    floor: float | None = None
    aim: float | None = None
    better: Better = "higher"


class Round(msgspec.Struct, frozen=True):
    """One pair, one after the other. ``limit`` is 1 where the figure itself is the ratio."""

    ours: float
    limit: float

    @property
    def ratio(self) -> float:
        """Ours over the limit."""
        return self.ours / self.limit


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured for one target."""

    key: str
    rounds: tuple[Round, ...]
    load_before: float
    """Load average of one minute when the measurement began."""
    load_after: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """The median over the rounds of the ratio within a round: drift of the machine cancels out."""
        return statistics.median(each.ratio for each in self.rounds)

    @property
    def ours(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.ours for each in self.rounds)

    @property
    def limit(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.limit for each in self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a round."""
        ratios = [each.ratio for each in self.rounds]
        return min(ratios), max(ratios)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what it was measured."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    python: str
    versions: dict[str, str]
    commit: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of ``bench.targets``, as it is written to a file."""

    command: str
    began: str
    seconds: float
    machine: Machine
    figures: tuple[Figure, ...]
    wrong: tuple[str, ...]
    """What was not as it must be; nothing about speed."""


def verdict(target: Target, ratio: float) -> str:
    """How a ratio stands to floor and aim; a ratio that equals one reaches it."""

    def reached(bound: float) -> bool:
        return ratio >= bound if target.better == "higher" else ratio <= bound

    if target.aim is not None and reached(target.aim):
        return REACHES_THE_AIM
    if target.floor is None:
        return NO_TARGET
    return REACHES_THE_FLOOR if reached(target.floor) else BELOW_THE_FLOOR


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    assert ordered, "nothing was measured"
    rank = -int(-share * len(ordered) // 1)  # Rounded up.
    return ordered[min(len(ordered), max(1, rank)) - 1]


def serial_bound(bare: float, ledger: float) -> float:
    """The rate of two steps that share one processor: 1 / (1/H + 1/L)."""
    return 1.0 / (1.0 / bare + 1.0 / ledger)


TARGETS: Final = (
    Target(
        key="1-raw",
        number=1,
        what="ledger alone, one operation a commit, against an append and fdatasync of 1 KiB",
        unit="/s",
        floor=0.60,
        aim=0.72,
    ),
    Target(
        key="1-sql",
        number=1,
        what="the same, against a bare script with the same SQL",
        unit="/s",
        floor=0.80,
        aim=0.90,
    ),
    Target(
        key="1-thread",
        number=1,
        what="through the writer thread and back, one at a time, against the raw append",
        unit="/s",
    ),
    Target(
        key="2",
        number=2,
        what="ledger alone, 32 operations a commit, operations/s against raw fdatasync/s",
        unit="/s",
        floor=3.0,
        aim=4.5,
    ),
    Target(
        key="3",
        number=3,
        what="durable accepts over HTTP, 32 connections, executor stopped, against the app alone (H)",
        unit="/s",
        floor=0.33,
        aim=0.45,
    ),
    Target(
        key="4",
        number=4,
        what="the same, against 1/(1/H + 1/L), L being the ledger alone at 32 a commit",
        unit="/s",
        floor=0.80,
        aim=1.0,
    ),
    Target(
        key="5",
        number=5,
        what="accept p99 at half the most, open loop, against the p99 of the ledger's commits at that rate",
        unit=" ms",
        floor=3.0,
        aim=1.5,
        better="lower",
    ),
    Target(
        key="6",
        number=6,
        what="commits that carried accepts, per accept, at 32 connections",
        unit="",
        floor=0.2,
        better="lower",
    ),
    Target(
        key="7-delivered",
        number=7,
        what="200 followers at 1,000 events/s: delivered of due",
        unit="/s",
        floor=0.98,
    ),
    Target(
        key="7-slowest",
        number=7,
        what="the same: the slowest follower of the mean",
        unit=" events",
        floor=0.95,
    ),
    Target(
        key="7-bare",
        number=7,
        what="for comparison, a bare app that joins 20 ms of events: delivered of due",
        unit="/s",
    ),
    Target(
        key="7-many",
        number=7,
        what="1,000 followers at 1,000 events/s: delivered of due",
        unit="/s",
        aim=0.98,
    ),
    Target(
        key="7-many-slowest",
        number=7,
        what="the same: the slowest follower of the mean",
        unit=" events",
        aim=0.95,
    ),
    Target(
        key="7-many-bare",
        number=7,
        what="for comparison, the bare app with 1,000 followers",
        unit="/s",
    ),
    Target(
        key="11",
        number=11,
        what="ingestion, queries idle, against the bare inference session on the same parts",
        unit=" tokens/s",
        floor=0.85,
        aim=0.95,
    ),
    Target(
        key="12",
        number=12,
        what="query p95 while 8 writers ingest, against idle",
        unit=" ms",
        floor=3.0,
        aim=1.5,
        better="lower",
    ),
)
BY_KEY: Final = {target.key: target for target in TARGETS}
NUMBERS: Final = tuple(sorted({target.number for target in TARGETS}))
