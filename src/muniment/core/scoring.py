"""The one definition of a dense score, and the error of computing it in float32 (ruling 21)."""

import math
from typing import Final

SCALE: Final = 2**15
"""A score is the integer sum of ``rint(x * SCALE) * rint(q * SCALE)``: every device gives the same."""


def shown(score: int) -> float:
    """The score as callers see it: about the cosine of query and part."""
    return score / SCALE**2


def slack(dimensions: int) -> float:
    """How far a float32 dot product of two unit vectors may be from their exact score, as ``shown``.

    Rounding to 1/SCALE moves each value by at most 2^-16, so the sum by at most 2^-16 (|x|_1 + |q|_1) + d
    2^-32, and |x|_1 is at most sqrt(d) for a unit vector; float32 summation in any order adds at most d
    2^-23. Doubled, for vectors that are unit only to float32.
    """
    rounding = 2.0**-16 * 2.0 * math.sqrt(dimensions) + dimensions * 2.0**-32
    return 2.0 * (rounding + dimensions * 2.0**-23)
