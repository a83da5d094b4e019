"""What the executor child needs of a model: who it is, where its tokens lie, and vectors."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from muniment.model.plan import ModelIdentity

Advance = Callable[[], None]
"""Called whenever a piece of the work is done, so that slow work can be told from work that stands still."""


def unobserved() -> None:
    """Nobody follows the work."""


class Embedder(Protocol):
    """One loaded model with its tokenizer. Used by one thread; nothing here writes to disk.

    Every method may raise ``ExecutorFailed`` with a text for people: it could not do this request, and stays
    usable.
    """

    @property
    def identity(self) -> ModelIdentity:
        """Who makes these vectors. Two embedders with one identity make interchangeable vectors."""
        ...

    @property
    def text_tokens_max(self) -> int:
        """Most tokens of a planned part for this model, special tokens not counted."""
        ...

    def tokenizer_problem(self) -> str | None:
        """Why loading the tokenizer again would fail now; None while it would not.

        Cheap, and called from another thread than the rest.
        """
        ...

    def offsets(self, text: str, advance: Advance = unobserved) -> NDArray[np.int64]:
        """Shape (n, 2): the half-open code point range of each token, special tokens left out.

        Starts never fall. The same text gives the same offsets; time and memory grow linearly with its
        length.
        """
        ...

    def embed(self, texts: Sequence[str], advance: Advance = unobserved) -> NDArray[np.float32]:
        """Shape (len(texts), dimensions): finite rows of length 1, in the order of the texts.

        A text that is longer than the model can read is refused with ``ExecutorFailed``, never cut.
        """
        ...


class SentenceStarts(Protocol):
    """Where sentences begin."""

    def __call__(self, text: str, advance: Advance = unobserved) -> Sequence[int]:
        """Rising code point offsets, the one at 0 left out or not; deterministic, in linear time."""
        ...
