"""The device port: where the active set lives and all selection happens. Operations, not arrays."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class MemoryDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One committed memory as the device takes it: catalogue columns, and one vector a part in part order."""

    object: int
    key: str
    owner: str | None
    agent: str | None
    session: str | None
    categories: tuple[str, ...]
    expires_us: int | None
    dimensions: int
    vectors: bytes
    """``parts x dimensions`` float32 little-endian values."""


class Eligible(msgspec.Struct, frozen=True, kw_only=True):
    """Which memories may be chosen: a filter that is None lets everything pass. Acts before ranking."""

    owner: str | None = None
    agent: str | None = None
    session: str | None = None
    categories: tuple[str, ...] | None = None
    as_of_us: int
    """Memories that expired at or before this time are not eligible."""


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One chosen memory with its best part. ``score`` is the integer dot product of ``core.scoring``."""

    object: int
    key: str
    part_index: int
    score: int


class Device(Protocol):
    """Holds the active set. ``apply`` and ``search`` may run on different threads at one time."""

    @property
    def position(self) -> int:
        """Journal position up to which everything has been applied."""
        ...

    def apply(self, deltas: Sequence[MemoryDelta], position: int) -> None:
        """Add memories and publish a new immutable snapshot; a memory that is there already is left alone.

        Raises ``InvariantBroken`` for vectors of another length than the device holds.
        """
        ...

    def search(self, query: bytes, eligible: Eligible, limit: int) -> tuple[Hit, ...]:
        """The best ``limit`` eligible memories, one hit each: best score first, ties by key (ruling 21).

        ``query`` holds ``dimensions`` float32 little-endian values. One call pins one snapshot.
        """
        ...

    def clear(self) -> None:
        """Forget everything; the position is 0 again."""
        ...

    def probe(self) -> None:
        """Find the newest memory by a vector of its own, else raise ``SearchUnavailable``."""
        ...

    def count(self) -> tuple[int, int]:
        """Memories and parts of the current snapshot."""
        ...

    def byte_count(self) -> int:
        """Bytes of memory that it takes, spare room included; that of Python objects is an estimate."""
        ...
