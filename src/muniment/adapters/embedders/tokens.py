"""Tokenizer files: loading, hashing, and token offsets in bounded time and memory."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from muniment.errors import ConfigError
from muniment.ports.embedder import Advance, unobserved

BLOCK_CODE_POINTS_MAX: Final = 16 * 1024
"""Most code points in one call of the tokenizer. Each holds the interpreter lock (a million full stops: 2 s,
500 MB), and the child's heartbeat needs that lock."""


def file_digest(path: Path) -> str:
    """Lower-case SHA-256 hex of a file. Raises ``ConfigError`` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError("embedder", f"cannot read {path}: {error.strerror}") from error


def load_tokenizer(path: Path) -> tuple[Tokenizer, int]:
    """Read a ``tokenizer.json``; return it without its padding and truncation, and its padding ID.

    Truncation would cut texts silently (the bundled file asks for 128 tokens). Raises ``ConfigError`` when
    it cannot be read or is not such a file.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("embedder", f"cannot read tokenizer {path}: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a file that it does not understand
        raise ConfigError("embedder", f"{path} is not a tokenizer.json: {error}") from error
    padding: dict[str, Any] | None = tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if padding is not None:
        return tokenizer, int(padding["pad_id"])
    named = (tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>"))
    return tokenizer, next((found for found in named if found is not None), 0)


class TokenizerFile:
    """The file that a tokenizer was loaded from: is it still there, and still the same?"""

    def __init__(self, path: Path, digest: str) -> None:
        """``digest`` is what the file had when it was loaded."""
        self._path = path
        self._digest = digest
        self._seen: tuple[int, int, int] | None = None
        self._problem: str | None = None

    def problem(self) -> str | None:
        """What is wrong with it; its bytes are read again only when its name shows another file."""
        try:
            found = self._opened()
        except OSError as error:
            self._seen = None
            return f"tokenizer file {self._path}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            self._seen = None
            return f"tokenizer file {self._path} is no file any more"
        seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        if seen != self._seen:
            self._problem = self._compare()
            self._seen = seen
        return self._problem

    def _opened(self) -> os.stat_result:
        """Opened, not only looked up: a file that may no longer be read shows in nothing else."""
        # What is a pipe by now must not hold the caller up.
        file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.fstat(file)
        finally:
            os.close(file)

    def _compare(self) -> str | None:
        try:
            digest = file_digest(self._path)
        except ConfigError as error:
            return str(error)
        return None if digest == self._digest else f"tokenizer file {self._path} is another than was loaded"


def token_offsets(tokenizer: Tokenizer, text: str, advance: Advance = unobserved) -> NDArray[np.int64]:
    """Code point ranges of all tokens, special tokens left out, made block by block.

    For a tokenizer that first splits at white space this equals the offsets of the whole text, unless a run
    without white space is longer than half a block; then a block may end inside a word.
    """
    found = [np.empty((0, 2), dtype=np.int64)]
    for start, block in _blocks(text):
        offsets = tokenizer.encode(block, add_special_tokens=False).offsets
        if offsets:
            found.append(np.asarray(offsets, dtype=np.int64) + start)
        advance()
    return np.concatenate(found)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    while start < len(text):
        end = min(start + BLOCK_CODE_POINTS_MAX, len(text))
        if end < len(text):
            end = _cut(text, start, end)
        yield start, text[start:end]
        start = end


def _cut(text: str, start: int, end: int) -> int:
    """The last place behind a line end in the block's second half, else behind white space, else its end."""
    half = start + (end - start) // 2
    line_end = text.rfind("\n", half, end)
    if line_end >= 0:
        return line_end + 1
    for index in range(end - 1, half, -1):
        if text[index].isspace():
            return index + 1
    return end
