"""The last step of every embedder: rows of length 1, all finite."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from muniment.errors import ExecutorFailed


def unit_rows(rows: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Divide each row by its length. Raises ``ExecutorFailed`` for a row that is zero or not finite."""
    exact = rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # told apart below
        lengths = np.sqrt(np.square(exact).sum(axis=1, keepdims=True))
    if not np.all(np.isfinite(lengths)) or not np.all(lengths > 0):
        raise ExecutorFailed("the model made a vector that is zero or not finite")
    unit: NDArray[np.float32] = (exact / lengths).astype(np.float32)
    return unit
