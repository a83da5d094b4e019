"""The gate: a plan that covers the source with a finite vector a part passes, and any one fault is told."""

import struct
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.core.commitment import broken, finite
from muniment.core.replay import salted
from muniment.core.tables import Row

SALT: Final = b"s" * 16
DIMENSIONS: Final = 3
CONTENT: Final = "One. Zwölf. Three.".encode()
FLOAT32_MAX: Final = 3.4028234663852886e38


def packed(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


class Saved:
    """A plan of three parts as it stands in the store, with nothing wrong."""

    def __init__(self) -> None:
        edges = [0, 5, 13, len(CONTENT)]
        self.content = CONTENT
        self.plan: Row = {"part_count": 3, "token_count": 6}
        self.parts: list[Row] = [
            {
                "part_index": index,
                "token_start": 2 * index,
                "token_end": 2 * index + 2,
                "byte_start": edges[index],
                "byte_end": edges[index + 1],
                "digest": salted(SALT, CONTENT[edges[index] : edges[index + 1]]),
                "embedding_state": "indexed",
            }
            for index in range(3)
        ]
        self.vectors: dict[int, Row] = {}
        for index in range(3):
            self.vector(index, packed(1.0, 0.0, -float(index)))

    def vector(self, index: int, data: bytes) -> None:
        self.vectors[index] = {"bytes": data, "digest": salted(SALT, data)}

    def move(self, index: int, name: str, value: int) -> None:
        """Change a range and give the part the digest of its new bytes, so that only the range is wrong."""
        part = self.parts[index]
        part[name] = value
        part["digest"] = salted(SALT, CONTENT[part["byte_start"] : part["byte_end"]])

    def empty(self) -> None:
        self.parts.clear()
        self.plan["part_count"] = 0

    def broken(self) -> str | None:
        return broken(
            self.plan, self.parts, self.vectors, salt=SALT, content=self.content, dimensions=DIMENSIONS
        )


Fault = Callable[[Saved], Any]
FAULTS: Final[dict[str, tuple[Fault, str]]] = {
    "no part": (lambda saved: saved.empty(), "0 are stored"),
    "a part missing": (lambda saved: saved.parts.pop(), "3 parts, 2 are stored"),
    "a part too many": (lambda saved: saved.parts.append(saved.parts[-1]), "3 parts, 4 are stored"),
    "order": (lambda saved: saved.parts.reverse(), "part 0: has index 2"),
    "a gap of bytes": (lambda saved: saved.move(1, "byte_start", 6), "part 1: has bytes 6..13 after 5"),
    "an overlap": (lambda saved: saved.move(1, "byte_start", 4), "part 1: has bytes 4..13 after 5"),
    "an empty part": (lambda saved: saved.move(0, "byte_end", 0), "part 0: has bytes 0..0 after 0"),
    "bytes at the end": (lambda saved: saved.move(2, "byte_end", 18), "parts end at byte 18"),
    "a gap of tokens": (lambda saved: saved.move(1, "token_start", 3), "part 1: has tokens 3..4 after 2"),
    "tokens backwards": (lambda saved: saved.move(2, "token_end", 3), "part 2: has tokens 4..3 after 4"),
    "tokens at the end": (lambda saved: saved.plan.update(token_count=7), "the source has 19, 7"),
    "a changed source": (
        lambda saved: setattr(saved, "content", CONTENT.replace(b"One", b"Two")),
        "part 0: has another digest",
    ),
    "not indexed": (lambda saved: saved.parts[1].update(embedding_state="planned"), "part 1: is not indexed"),
    "no vector": (lambda saved: saved.vectors.pop(2), "part 2: is not indexed"),
    "a short vector": (lambda saved: saved.vector(1, packed(1.0, 0.0)), "8 bytes, not 12"),
    "a long vector": (lambda saved: saved.vector(1, packed(1.0, 0.0, 0.0, 0.0)), "16 bytes, not 12"),
    "a changed vector": (
        lambda saved: saved.vectors[1].update(bytes=packed(1.0, 0.0, 0.5)),
        "vector with another digest",
    ),
    "not a number": (lambda saved: saved.vector(0, packed(1.0, float("nan"), 0.0)), "part 0: has a vector"),
    "infinite": (lambda saved: saved.vector(2, packed(0.0, 0.0, -float("inf"))), "is not finite"),
}


def test_what_is_whole_passes() -> None:
    assert Saved().broken() is None


@pytest.mark.parametrize("name", FAULTS)
def test_any_one_fault_is_told(name: str) -> None:
    change, told = FAULTS[name]
    saved = Saved()
    change(saved)
    problem = saved.broken()
    assert problem is not None
    assert told in problem


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_any_changed_byte_of_the_source_is_told(at: int, mask: int) -> None:
    saved = Saved()
    saved.content = CONTENT[:at] + bytes([CONTENT[at] ^ mask]) + CONTENT[at + 1 :]
    assert "another digest" in (saved.broken() or "")


def test_large_values_are_finite_and_opposite_infinities_are_not() -> None:
    assert finite(b"")
    assert finite(packed(*[FLOAT32_MAX] * 4096))
    assert finite(packed(-0.0, 1e-45))
    assert not finite(packed(float("inf"), -float("inf")))
    assert not finite(packed(float("nan")))
