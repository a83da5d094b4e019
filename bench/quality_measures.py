"""How good one ranking is for one question, and how far the mean over questions can be trusted. Pure.

A ranking is a list of names, the best first. A name that is not known, or that comes a second time, takes up
its place and counts as a miss there.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 2000
PLACES: Final = (5, 10, 50)
BUDGETS: Final = (4096, 8192)
SESSIONS_ANY: Final = 5
SESSIONS_ALL: Final = 10

Drawn = NDArray[np.int64]
"""Numbers of questions, one row for each resample."""


class Interval(msgspec.Struct, frozen=True):
    """A mean and the middle 95 % of the means of its resamples."""

    mean: float
    low: float
    high: float


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """One question: shares from 0 to 1."""

    at_5: float
    """Of the evidence, what is among the first 5."""
    at_10: float
    at_50: float
    in_4k: float
    """Of the evidence, what is in the texts that fit into 4,096 bytes, taken in order of rank."""
    in_8k: float
    all_in_8k: float
    """1 where all of the evidence is in them, else 0."""
    sessions_any_5: float
    """1 where a session that holds evidence is among the first 5 sessions, else 0."""
    sessions_all_10: float
    """1 where all such sessions are among the first 10 sessions, else 0."""


def measures(
    ranking: Sequence[str],
    evidence: Collection[str],
    byte_counts: Mapping[str, int],
    sessions: Mapping[str, str],
) -> Measures:
    """Measure a ranking of turns against the turns that are evidence, of which there is at least one.

    ``byte_counts`` and ``sessions`` have the UTF-8 length and the session of every turn that there is.
    """
    wanted = {sessions[turn] for turn in evidence}
    order = list(dict.fromkeys(sessions[turn] for turn in ranking if turn in sessions))
    at_5, at_10, at_50 = (found_share(ranking[:place], evidence) for place in PLACES)
    in_4k, in_8k = (found_share(fitting(ranking, byte_counts, budget), evidence) for budget in BUDGETS)
    return Measures(
        at_5=at_5,
        at_10=at_10,
        at_50=at_50,
        in_4k=in_4k,
        in_8k=in_8k,
        all_in_8k=float(in_8k == 1.0),
        sessions_any_5=float(not wanted.isdisjoint(order[:SESSIONS_ANY])),
        sessions_all_10=float(wanted.issubset(order[:SESSIONS_ALL])),
    )


def found_share(found: Iterable[str], evidence: Collection[str]) -> float:
    """The share of the evidence that is among what was found."""
    return len(set(found).intersection(evidence)) / len(evidence)


def fitting(ranking: Iterable[str], byte_counts: Mapping[str, int], budget: int) -> list[str]:
    """The turns that fit into ``budget`` bytes together: in order, what does not fit is passed over."""
    taken: dict[str, None] = {}
    for turn in ranking:
        if turn not in taken and byte_counts.get(turn, budget + 1) <= budget:
            taken[turn] = None
            budget -= byte_counts[turn]
    return list(taken)


def resamples(count: int, seed: int) -> Drawn:
    """Which of ``count`` questions each resample holds; the same for the same arguments."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def interval(values: Sequence[float], drawn: Drawn) -> Interval:
    """The mean of one value a question. ``drawn`` is ``resamples`` of as many questions.

    The interval of a difference is that of the differences question by question: give those as values.
    """
    means = np.asarray(values, dtype=np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(np.mean(values)), float(low), float(high))
