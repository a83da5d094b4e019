"""The device on NumPy: a float32 scan finds a provable superset, integers decide (ruling 21)."""

import math
import mmap
import threading
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from muniment.core.scoring import SCALE, shown, slack
from muniment.errors import InvariantBroken, SearchUnavailable
from muniment.ports.device import Eligible, Hit, MemoryDelta

ROWS_MIN: Final = 1024
NEVER_US: Final = np.iinfo(np.int64).max
EVER_US: Final = int(np.iinfo(np.int64).min)
ABSENT: Final = -1
COLUMNS: Final = 7
"""Of integers."""
KEY_BYTES: Final = 105
"""What the key of a memory and its place in a list take, beside its columns."""
MAPPED_BYTES_MIN: Final = 64 * 1024
"""Arrays from this size on have a mapping of their own."""

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class _Columns(msgspec.Struct, frozen=True):
    """Append-only columns, the catalogue a row a memory; rows past a snapshot's counts are not its own."""

    vectors: Floats
    part_memory: Integers
    first_part: Integers
    owner: Integers
    agent: Integers
    session: Integers
    expires_us: Integers
    object: Integers

    @property
    def memory_columns(self) -> tuple[Integers, ...]:
        return (self.first_part, self.owner, self.agent, self.session, self.expires_us, self.object)


class Snapshot(msgspec.Struct, frozen=True):
    """What one query sees."""

    columns: _Columns
    memories: int
    parts: int
    position: int


class _Names:
    """Caller texts as small integers, so that a filter is one comparison a row."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        return ABSENT if text is None else self._numbers.setdefault(text, len(self._numbers))

    def find(self, text: str) -> int | None:
        return self._numbers.get(text)


def _zeros(shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """A new array of zeros; a large one takes memory only for the pages that are written, and gives all back.

    The allocator would keep the arrays that others have replaced: it stops mapping sizes once it has seen
    them freed, and what lies behind them on its heap holds them there.
    """
    size = math.prod(shape) * np.dtype(kind).itemsize
    if size < MAPPED_BYTES_MIN:
        return np.zeros(shape, dtype=kind)
    return np.frombuffer(mmap.mmap(-1, size, access=mmap.ACCESS_COPY), dtype=kind).reshape(shape)


def _grown(column: NDArray[Any], rows: int) -> NDArray[Any]:
    if rows <= len(column):
        return column
    wider = _zeros((max(rows, 2 * len(column)), *column.shape[1:]), column.dtype.type)
    wider[: len(column)] = column
    return wider


class NumpyDevice:
    """``ports.device.Device`` in the memory of this process."""

    def __init__(self) -> None:
        self._applying = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._applying:
            self._empty()

    def _empty(self) -> None:
        self._dimensions: int | None = None
        self._owners, self._agents, self._sessions = _Names(), _Names(), _Names()
        self._categories: dict[str, list[int]] = {}
        self._keys: list[str] = []
        self._known = _zeros((ROWS_MIN,), np.bool_)
        """Which object numbers are here; they are given out one after the other, from 1."""
        columns = _Columns(
            _zeros((0, 0), np.float32), *(_zeros((ROWS_MIN,), np.int64) for _ in range(COLUMNS))
        )
        self._snapshot = Snapshot(columns, 0, 0, 0)

    @property
    def position(self) -> int:
        return self._snapshot.position

    def count(self) -> tuple[int, int]:
        snapshot = self._snapshot  # One read: both numbers are of the same snapshot.
        return snapshot.memories, snapshot.parts

    def byte_count(self) -> int:
        columns = self._snapshot.columns
        arrays: tuple[NDArray[Any], ...] = (
            columns.vectors,
            columns.part_memory,
            *columns.memory_columns,
            self._known,
        )
        return sum(array.nbytes for array in arrays) + KEY_BYTES * len(self._keys)

    # Applying

    def apply(self, deltas: Sequence[MemoryDelta], position: int) -> None:
        with self._applying:
            first: dict[int, MemoryDelta] = {}
            for delta in deltas:
                first.setdefault(delta.object, delta)
            fresh = [delta for delta in first.values() if not self._is_known(delta.object)]
            columns, memories, parts = self._snapshot.columns, self._snapshot.memories, self._snapshot.parts
            if fresh:
                columns, parts = self._append(columns, fresh, memories, parts)
            self._snapshot = Snapshot(columns, memories + len(fresh), parts, max(position, self.position))

    def _is_known(self, number: int) -> bool:
        return number < len(self._known) and bool(self._known[number])

    def _append(
        self, columns: _Columns, fresh: Sequence[MemoryDelta], memories: int, parts: int
    ) -> tuple[_Columns, int]:
        rows = [self._rows_of(delta) for delta in fresh]
        total = parts + sum(len(each) for each in rows)
        vectors = columns.vectors
        if vectors.shape[1] == 0:
            vectors = _zeros((ROWS_MIN, self._dimensions or 0), np.float32)
        grown = _Columns(
            _grown(vectors, total),
            _grown(columns.part_memory, total),
            *(_grown(column, memories + len(fresh)) for column in columns.memory_columns),
        )
        for memory, (delta, each) in enumerate(zip(fresh, rows, strict=True), start=memories):
            grown.vectors[parts : parts + len(each)] = each
            grown.part_memory[parts : parts + len(each)] = memory
            grown.first_part[memory] = parts
            self._catalogue(grown, memory, delta)
            parts += len(each)
        return grown, parts

    def _rows_of(self, delta: MemoryDelta) -> Floats:
        if self._dimensions is None:
            self._dimensions = delta.dimensions
        if delta.dimensions != self._dimensions:
            raise InvariantBroken(
                f"{delta.key} has {delta.dimensions} dimensions, the device {self._dimensions}"
            )
        return np.frombuffer(delta.vectors, dtype="<f4").reshape(-1, delta.dimensions)

    def _catalogue(self, columns: _Columns, memory: int, delta: MemoryDelta) -> None:
        columns.owner[memory] = self._owners.number(delta.owner)
        columns.agent[memory] = self._agents.number(delta.agent)
        columns.session[memory] = self._sessions.number(delta.session)
        columns.expires_us[memory] = NEVER_US if delta.expires_us is None else delta.expires_us
        for category in dict.fromkeys(delta.categories):
            self._categories.setdefault(category, []).append(memory)
        columns.object[memory] = delta.object
        self._keys.append(delta.key)
        self._known = _grown(self._known, delta.object + 1)
        self._known[delta.object] = True

    # Searching

    def search(self, query: bytes, eligible: Eligible, limit: int) -> tuple[Hit, ...]:
        snapshot = self._snapshot
        if snapshot.memories == 0 or limit < 1:
            return ()
        wanted = np.frombuffer(query, dtype="<f4")
        if len(wanted) != self._dimensions:
            raise InvariantBroken(f"a query of {len(wanted)} dimensions for a device of {self._dimensions}")
        mask = self._eligible(snapshot, eligible)
        memories = np.flatnonzero(mask)
        if len(memories) == 0:
            return ()
        return self._best(snapshot, wanted, memories, limit)

    def probe(self) -> None:
        snapshot = self._snapshot
        if snapshot.parts == 0:
            return
        own = snapshot.columns.vectors[snapshot.parts - 1].tobytes()
        hits = self.search(own, Eligible(as_of_us=EVER_US), 1)
        # Whatever is best for it is at least as near as it is to itself.
        if not hits or shown(hits[0].score) < 1.0 - slack(self._dimensions or 0):
            raise SearchUnavailable("the device does not find a memory by its own vector")

    def _eligible(self, snapshot: Snapshot, eligible: Eligible) -> NDArray[np.bool_]:
        columns, count = snapshot.columns, snapshot.memories
        mask = columns.expires_us[:count] > eligible.as_of_us
        for text, names, column in (
            (eligible.owner, self._owners, columns.owner),
            (eligible.agent, self._agents, columns.agent),
            (eligible.session, self._sessions, columns.session),
        ):
            if text is not None:
                number = names.find(text)
                mask &= np.zeros(count, dtype=bool) if number is None else column[:count] == number
        if eligible.categories:
            named = np.zeros(count, dtype=bool)
            for category in eligible.categories:
                rows = np.array(tuple(self._categories.get(category, ())), dtype=np.int64)
                named[rows[rows < count]] = True
            mask &= named
        return mask

    def _best(self, snapshot: Snapshot, query: Floats, memories: Integers, limit: int) -> tuple[Hit, ...]:
        columns = snapshot.columns
        starts = columns.first_part[memories]
        ends = np.where(
            memories + 1 < snapshot.memories, _at(columns.first_part, memories + 1), snapshot.parts
        )
        scores, offsets = _scores(columns.vectors, snapshot.parts, query, starts, ends)
        best = np.maximum.reduceat(scores, offsets)
        if len(best) > limit:
            threshold = np.partition(best, len(best) - limit)[len(best) - limit]
            near = np.flatnonzero(best >= threshold - 2.0 * slack(len(query)))
        else:
            near = np.arange(len(best))
        hits = [
            self._exact(columns, query, int(memories[each]), int(starts[each]), int(ends[each]))
            for each in near
        ]
        hits.sort(key=lambda hit: (-hit.score, hit.key))
        return tuple(hits[:limit])

    def _exact(self, columns: _Columns, query: Floats, memory: int, start: int, end: int) -> Hit:
        rows = np.rint(columns.vectors[start:end].astype(np.float64) * SCALE).astype(np.int64)
        exact = rows @ np.rint(query.astype(np.float64) * SCALE).astype(np.int64)
        part = int(np.argmax(exact))  # the first of equals
        return Hit(
            object=int(columns.object[memory]),
            key=self._keys[memory],
            part_index=part,
            score=int(exact[part]),
        )


def _at(column: Integers, rows: Integers) -> Integers:
    """Values at rows of which the last may lie past the end; that one's value is not used."""
    return column[np.minimum(rows, len(column) - 1)]


def _scores(
    vectors: Floats, parts: int, query: Floats, starts: Integers, ends: Integers
) -> tuple[Floats, Integers]:
    """Float32 scores of all parts of the eligible memories, and where each memory's begin among them."""
    lengths = ends - starts
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    total = int(lengths.sum())
    if total == parts:
        return vectors[:parts] @ query, offsets
    if total * 2 > parts:  # Reading all rows in order costs less than gathering most of them.
        everything = vectors[:parts] @ query
        return everything[_spread(starts, lengths, offsets)], offsets
    return vectors[_spread(starts, lengths, offsets)] @ query, offsets


def _spread(starts: Integers, lengths: Integers, offsets: Integers) -> Integers:
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))
