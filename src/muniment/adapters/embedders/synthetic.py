"""Hashed words instead of a model: fast, deterministic, without meaning. For load and executor tests."""

import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muniment.adapters.embedders.vectors import unit_rows
from muniment.model.plan import ModelIdentity
from muniment.ports.embedder import Advance, unobserved

DIMENSIONS: Final = 384
WINDOW_TOKENS: Final = 512
WORD: Final = re.compile(r"\w+|[^\w\s]")
VERSION: Final = "1"


class SyntheticEmbedder:
    """An ``Embedder`` in which texts that share words have a larger cosine, and nothing more."""

    def __init__(self) -> None:
        digest = hashlib.sha256(f"{VERSION} {WORD.pattern}".encode()).hexdigest()
        self._identity = ModelIdentity(
            name="synthetic-hashed-words",
            dimensions=DIMENSIONS,
            window_tokens=WINDOW_TOKENS,
            files={},
            tokenizer_digest=digest,
        )

    @property
    def identity(self) -> ModelIdentity:
        """Says that this is no model: no file, and the word synthetic in its name."""
        return self._identity

    @property
    def text_tokens_max(self) -> int:
        """As large as that of a real model."""
        return WINDOW_TOKENS - 2

    def tokenizer_problem(self) -> str | None:
        """There is no file."""
        return None

    def offsets(self, text: str, advance: Advance = unobserved) -> NDArray[np.int64]:
        """Words and single punctuation marks."""
        spans = [match.span() for match in WORD.finditer(text)]
        return np.array(spans, dtype=np.int64).reshape(len(spans), 2)

    def embed(self, texts: Sequence[str], advance: Advance = unobserved) -> NDArray[np.float32]:
        """Each word adds a signed unit in two dimensions; a text without words gets the first axis."""
        words = [WORD.findall(text.lower()) for text in texts]
        hashes = np.array([zlib.crc32(word.encode()) for row in words for word in row], dtype=np.uint64)
        owners = np.repeat(np.arange(len(texts)), [len(row) for row in words])
        rows = np.zeros(len(texts) * DIMENSIONS)
        for salt in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F):
            mixed = (hashes * np.uint64(salt)) >> np.uint64(40)
            cells = owners * DIMENSIONS + (mixed % np.uint64(DIMENSIONS)).astype(np.int64)
            signs = np.where(mixed >> np.uint64(23), 1.0, -1.0)
            rows += np.bincount(cells, weights=signs, minlength=len(rows))
        table = rows.reshape(len(texts), DIMENSIONS)
        table[~table.any(axis=1), 0] = 1.0
        return unit_rows(table)
