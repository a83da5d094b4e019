"""How a text is cut into parts, and parts are grouped into embedding requests. Pure: offsets in, ranges out.

Rule of the cuts (ADR 0010). Whole sentences are packed greedily into a part while they fit; a sentence that
does not fit is cut into windows of nearly equal size, and such a window shares its part with nothing else.
Every byte of the source belongs to exactly one part: what the tokenizer skips (spaces, control characters)
goes with the token before it.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from muniment.core.canonical import payload_hash
from muniment.errors import InvariantBroken
from muniment.model.plan import ModelIdentity, PlannedPart

PLANNING_VERSION = 1
"""Raised whenever the same text, offsets and limit would give other parts; part of every profile name."""


def plan(
    byte_length: int,
    token_starts: Sequence[int],
    token_ends: Sequence[int],
    sentence_starts: Sequence[int],
    part_tokens_max: int,
) -> tuple[PlannedPart, ...]:
    """Cut a text of ``byte_length`` UTF-8 bytes into parts that cover it without gap or overlap.

    Tokens are half-open byte ranges with starts that never fall; ``sentence_starts`` are byte offsets in
    rising order. All offsets stand between code points, therefore every cut does. Cuts are made at token
    starts only, and never inside another token: tokens that share bytes (pieces of one emoji) stay together,
    and only such a group, being longer than ``part_tokens_max`` by itself, may exceed the limit. A text
    without tokens is one part, tokens 0..0.

    The same arguments give the same parts. Raises ``InvariantBroken`` when the offsets break these rules.
    """
    if part_tokens_max < 1:
        raise InvariantBroken(f"part_tokens_max is {part_tokens_max}")
    cuts = _cuts(byte_length, token_starts, token_ends)
    starts = list(_part_starts(cuts, token_starts, sentence_starts, part_tokens_max))
    token_count = len(token_starts)
    parts = tuple(
        PlannedPart(
            token_start=start,
            token_end=end,
            byte_start=token_starts[start] if start else 0,
            byte_end=token_starts[end] if end < token_count else byte_length,
        )
        for start, end in zip(starts, [*starts[1:], token_count], strict=True)
    )
    verify(parts, byte_length)
    return parts


def _cuts(byte_length: int, token_starts: Sequence[int], token_ends: Sequence[int]) -> "array[int]":
    """Indexes of the tokens before which a cut is allowed, then the token count as the last one."""
    if len(token_starts) != len(token_ends):
        raise InvariantBroken(f"{len(token_starts)} token starts and {len(token_ends)} token ends")
    cuts = array("q")
    reached = previous = 0
    for index, (start, end) in enumerate(zip(token_starts, token_ends, strict=True)):
        if not previous <= start <= end <= byte_length:
            raise InvariantBroken(f"token {index} is {start}..{end} after {previous} in {byte_length} bytes")
        # A cut at a start seen before, or at the very end, would leave a part without bytes.
        if index and reached <= start < byte_length and start > previous:
            cuts.append(index)
        reached, previous = max(reached, end), start
    cuts.append(len(token_starts))
    return cuts


def _part_starts(
    cuts: "array[int]", token_starts: Sequence[int], sentence_starts: Sequence[int], part_tokens_max: int
) -> Iterator[int]:
    """The token index at which each part begins; always 0 first."""
    yield 0
    part = 0  # where the open part begins
    for start, end in _sentences(cuts, token_starts, sentence_starts):
        if end - part <= part_tokens_max:
            continue  # the open part takes this sentence
        if start > part:
            yield start
            part = start
        if end - start > part_tokens_max:
            yield from _windows(cuts, start, end, part_tokens_max)
            part = end
            if end < cuts[-1]:
                yield end


def _sentences(
    cuts: "array[int]", token_starts: Sequence[int], sentence_starts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Sentences as half-open token ranges; a boundary moves to the next place where a cut is allowed."""
    token_count = cuts[-1]
    start = 0
    for boundary in sentence_starts:
        token = bisect_left(token_starts, boundary)
        end = cuts[bisect_left(cuts, token)] if token > 0 else 0
        if end > start:
            yield start, end
            start = end
    if token_count > start:
        yield start, token_count


def _windows(cuts: "array[int]", start: int, end: int, part_tokens_max: int) -> Iterator[int]:
    """Where to cut inside one long sentence: the fewest windows, nearly equal in size."""
    while end - start > part_tokens_max:
        windows = -(-(end - start) // part_tokens_max)
        target = start + -(-(end - start) // windows)
        at = bisect_right(cuts, target) - 1
        if at < 0 or cuts[at] <= start:
            at += 1  # one group of tokens that share bytes is longer than the limit
        start = cuts[at]
        if start >= end:
            return
        yield start


def verify(parts: Sequence[PlannedPart], byte_length: int) -> None:
    """Raise ``InvariantBroken`` unless the parts cover all bytes and all tokens once and in order."""
    if not parts:
        raise InvariantBroken("a plan has no part")
    byte = token = 0
    for index, part in enumerate(parts):
        if part.byte_start != byte or part.token_start != token:
            raise InvariantBroken(
                f"part {index} is at byte {part.byte_start}, token {part.token_start}; not {byte}, {token}"
            )
        if part.token_end < token or (part.byte_end <= byte and byte_length > 0):
            raise InvariantBroken(f"part {index} ends at byte {part.byte_end}, token {part.token_end}")
        if part.token_end == token and len(parts) > 1:
            raise InvariantBroken(f"part {index} has no token")
        byte, token = part.byte_end, part.token_end
    if byte != byte_length:
        raise InvariantBroken(f"the parts end at byte {byte} of {byte_length}")


def profile_name(part_tokens_max: int) -> str:
    """Name of these rules with their parameter: plans under two names are two plans (ruling 18)."""
    return f"sentences-{part_tokens_max}-{PLANNING_VERSION}"


def model_digest(identity: ModelIdentity) -> str:
    """Lower-case SHA-256 hex of the canonical JSON of an identity: the key of a model in the store."""
    return payload_hash(msgspec.to_builtins(identity))


def batches(token_counts: Sequence[int], tokens_max: int) -> tuple[range, ...]:
    """Group consecutive parts into requests of at most ``tokens_max`` tokens; a longer part goes alone.

    The ranges follow each other from 0 to ``len(token_counts)``; none is empty.
    """
    groups: list[range] = []
    first = total = 0
    for index, count in enumerate(token_counts):
        if index > first and total + count > tokens_max:
            groups.append(range(first, index))
            first, total = index, 0
        total += count
    if len(token_counts) > first:
        groups.append(range(first, len(token_counts)))
    return tuple(groups)
