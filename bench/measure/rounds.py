"""What every measurement is given and gives back, and the taking of turns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.measure.figures import Figure, Round
from bench.measure.machine import load

T = TypeVar("T")
Step = Callable[[str], None]
"""Told what is done next; once for each of the steps that were announced."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How long, how often, where."""

    seconds: float
    rounds: int
    directory: Path
    """Empty, on the disk that is to be measured."""


class Measured(msgspec.Struct, frozen=True):
    """What came of a measurement."""

    figures: tuple[Figure, ...]
    wrong: tuple[str, ...] = ()


class Loads:
    """The load average from the beginning of a measurement on."""

    def __init__(self) -> None:
        self._before = load()

    def figure(self, key: str, pairs: Sequence[tuple[float, float]], note: str = "") -> Figure:
        """The figure of a measurement that ends now; each pair is ours and the limit."""
        return Figure(
            key=key,
            rounds=tuple(Round(ours, limit) for ours, limit in pairs),
            load_before=self._before,
            load_after=load(),
            note=note,
        )


def in_turns(number: int, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Call all of them, in every second round from the last to the first; results in the order given."""
    found = [(place, call()) for place, call in list(enumerate(calls))[:: -1 if number % 2 else 1]]
    return [result for _, result in sorted(found, key=lambda each: each[0])]
