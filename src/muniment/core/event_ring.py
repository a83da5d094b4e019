"""The newest events of one operation, rendered once for all who follow it (ruling 9, ADR 0021).

Followers hold only a position, so one that does not read costs nothing here. What has been dropped from the
ring is still in the ledger. Pure: no clock, no locks, no I/O.
"""

from enum import Enum
from typing import Final

import msgspec

SLICE_BYTES_MAX: Final = 32 * 1024
"""Of what is sent at once, so that a client that stops reading leaves no more with its connection."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One event as it is sent."""

    sequence: int
    ends: bool
    """Whether it is the last one of its operation."""
    data: bytes


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Frames that follow a position, as one piece."""

    data: bytes
    last: int
    """The sequence of the last frame; the position itself where there is none."""
    ends: bool
    """Whether nothing will ever follow."""


class Place(Enum):
    """Why a ring gives nothing to a position."""

    BEHIND = "behind"
    """What comes next is not here, or not any more: the ledger has it."""
    LATEST = "latest"
    """Nothing has come since."""
    ENDED = "ended"
    """Nothing has come since, and nothing will."""


class EventRing:
    """Frames without a gap, from some sequence to the newest."""

    def __init__(self) -> None:
        self._first = 0
        self._frames: list[bytes] = []
        self._ended = False
        self._given: tuple[int, Slice] | None = None
        self.byte_count = 0
        """Bytes of the frames that are held."""

    def append(self, frame: Frame) -> None:
        """Take the next frame. One that is here already changes nothing; a gap drops what was before it."""
        following = self._first + len(self._frames)
        if self._frames and frame.sequence < following:
            return
        if frame.sequence != following:
            self._drop(len(self._frames))
            self._first = frame.sequence
        self._frames.append(frame.data)
        self._ended = frame.ends
        self.byte_count += len(frame.data)

    def shrink(self, bytes_max: int) -> None:
        """Drop the oldest frames beyond so many bytes. The newest one stays, so that its place is known."""
        dropped, kept = 0, self.byte_count
        while kept > bytes_max and dropped < len(self._frames) - 1:
            kept -= len(self._frames[dropped])
            dropped += 1
        self._drop(dropped)

    def _drop(self, count: int) -> None:
        if count:
            self.byte_count -= sum(map(len, self._frames[:count]))
            del self._frames[:count]
            self._first += count
            self._given = None

    def after(self, position: int) -> Slice | Place:
        """What follows a sequence: at least one frame, and no more than go into a slice.

        Followers come one after another and most stand at the same place, so the last answer is kept: they
        all get the same bytes.
        """
        index = position + 1 - self._first
        if not self._frames:
            return Place.LATEST
        if index < 0:
            return Place.BEHIND
        if index >= len(self._frames):
            return Place.ENDED if self._ended else Place.LATEST
        until = self._until(index)
        if self._given is None or (self._given[0], self._given[1].last) != (
            position,
            self._first + until - 1,
        ):
            self._given = (position, self._slice(index, until))
        return self._given[1]

    def _until(self, index: int) -> int:
        size, until = len(self._frames[index]), index + 1
        while until < len(self._frames) and size + len(self._frames[until]) <= SLICE_BYTES_MAX:
            size += len(self._frames[until])
            until += 1
        return until

    def _slice(self, index: int, until: int) -> Slice:
        return Slice(
            data=b"".join(self._frames[index:until]),
            last=self._first + until - 1,
            ends=self._ended and until == len(self._frames),
        )
