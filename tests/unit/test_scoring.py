"""A float32 dot product is never farther from the exact integer score than search allows for."""

import numpy as np
import pytest
from numpy.typing import NDArray

from muniment.core.scoring import SCALE, shown, slack

DIMENSIONS = (8, 384, 1024)
PAIRS = 300

Vectors = NDArray[np.float32]


def unit(rows: NDArray[np.float64]) -> Vectors:
    scaled: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def just_below_the_half(dimensions: int) -> Vectors:
    """A unit vector all of whose values are rounded down by nearly half a step: the worst for a sum."""
    value = (np.floor(SCALE / np.sqrt(dimensions)) - 1 + 0.49) / SCALE
    row = np.full(dimensions, value)
    row[-1] = np.sqrt(1.0 - value**2 * (dimensions - 1))
    return row.astype(np.float32)


def exact(left: Vectors, right: Vectors) -> float:
    """The score in Python integers, which neither round nor overflow."""
    return shown(
        sum(
            round(float(x) * SCALE) * round(float(y) * SCALE)
            for x, y in zip(left.tolist(), right.tolist(), strict=True)
        )
    )


def pairs(dimensions: int) -> list[tuple[Vectors, Vectors]]:
    chance = np.random.default_rng(dimensions)
    rows = unit(chance.standard_normal((PAIRS, dimensions)))
    near = unit(rows + chance.standard_normal((PAIRS, dimensions)) * 1e-4)
    sparse = np.eye(1, dimensions, dtype=np.float32)[0]
    worst = just_below_the_half(dimensions)
    return [
        *zip(rows, np.roll(rows, 1, axis=0), strict=True),
        *zip(rows, near, strict=True),
        *((row, -row) for row in rows[:20]),
        (sparse, sparse),
        (sparse, worst),
        (worst, worst),
    ]


def errors(dimensions: int) -> list[float]:
    return [abs(float(left @ right) - exact(left, right)) for left, right in pairs(dimensions)]


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_the_slack_holds(dimensions: int) -> None:
    assert max(errors(dimensions)) <= slack(dimensions)


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_a_third_of_the_slack_would_not_do(dimensions: int) -> None:
    assert max(errors(dimensions)) > slack(dimensions) / 3


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_the_order_of_summation_does_not_matter(dimensions: int) -> None:
    for left, right in pairs(dimensions)[::20]:
        one_by_one = np.float32(0.0)
        for x, y in zip(left, right, strict=True):
            one_by_one = np.float32(one_by_one + x * y)
        assert abs(float(one_by_one) - exact(left, right)) <= slack(dimensions)


def test_a_score_is_shown_as_about_the_cosine() -> None:
    assert shown(SCALE**2) == 1.0
    assert shown(-(SCALE**2)) == -1.0
    assert shown(0) == 0.0
