"""The gate before a memory: every part is re-read, or nothing is committed (ruling 7)."""

import math
import struct
from collections.abc import Mapping, Sequence

from muniment.core.replay import salted
from muniment.core.tables import Row


def broken(
    plan: Row,
    parts: Sequence[Row],
    vectors: Mapping[int, Row],
    *,
    salt: bytes,
    content: bytes,
    dimensions: int,
) -> str | None:
    """Return what is wrong with a plan that is about to be committed, or None.

    Checked: indexes 0..n-1, contiguous token and byte ranges that cover the source exactly, each part's
    digest against the source's bytes, each part indexed with one finite vector of ``dimensions`` values
    whose digest holds.
    """
    if len(parts) != plan["part_count"] or not parts:
        return f"plan has {plan['part_count']} parts, {len(parts)} are stored"
    token, byte = 0, 0
    for index, part in enumerate(parts):
        problem = _range_problem(index, part, token, byte) or _bytes_problem(part, salt, content)
        if problem is None:
            problem = _vector_problem(part, vectors.get(index), salt, dimensions)
        if problem is not None:
            return f"part {index}: {problem}"
        token, byte = part["token_end"], part["byte_end"]
    if byte != len(content) or token != plan["token_count"]:
        return (
            f"parts end at byte {byte}, token {token}; the source has {len(content)}, {plan['token_count']}"
        )
    return None


def _range_problem(index: int, part: Row, token: int, byte: int) -> str | None:
    if part["part_index"] != index:
        return f"has index {part['part_index']}"
    if part["token_start"] != token or part["token_end"] < token:
        return f"has tokens {part['token_start']}..{part['token_end']} after {token}"
    if part["byte_start"] != byte or part["byte_end"] <= byte:
        return f"has bytes {part['byte_start']}..{part['byte_end']} after {byte}"
    return None


def _bytes_problem(part: Row, salt: bytes, content: bytes) -> str | None:
    if salted(salt, content[part["byte_start"] : part["byte_end"]]) != part["digest"]:
        return "has another digest than the source's bytes"
    return None


def _vector_problem(part: Row, vector: Row | None, salt: bytes, dimensions: int) -> str | None:
    if part["embedding_state"] != "indexed" or vector is None:
        return "is not indexed with a vector"
    data: bytes = vector["bytes"]
    if len(data) != 4 * dimensions:
        return f"has a vector of {len(data)} bytes, not {4 * dimensions}"
    if salted(salt, data) != vector["digest"]:
        return "has a vector with another digest"
    if not finite(data):
        return "has a vector that is not finite"
    return None


def finite(vector: bytes) -> bool:
    """Whether float32 little-endian bytes hold finite values only."""
    # A sum is finite only if every term is, unless it overflows, which float64 cannot from float32 terms.
    return math.isfinite(math.fsum(abs(value) for value in struct.unpack(f"<{len(vector) // 4}f", vector)))
