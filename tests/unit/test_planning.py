"""Plans cover every byte once, cut where they may, follow sentences, depend on their arguments alone."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muniment.core import planning
from muniment.errors import InvariantBroken
from muniment.model.plan import ModelIdentity, PlannedPart

ALPHABET = "ab. é漢😀\u0301\u200b\n"


class Source(NamedTuple):
    """A text with token and sentence offsets in bytes, as a tokenizer and a segmenter could give them."""

    text: str
    starts: list[int]
    ends: list[int]
    sentences: list[int]

    @property
    def octets(self) -> bytes:
        return self.text.encode()

    def plan(self, part_tokens_max: int) -> tuple[PlannedPart, ...]:
        return planning.plan(len(self.octets), self.starts, self.ends, self.sentences, part_tokens_max)


def source(text: str, tokens: Sequence[tuple[int, int]], sentences: Sequence[int] = ()) -> Source:
    """A source from code point offsets."""
    byte_of = [len(text[:at].encode()) for at in range(len(text) + 1)]
    return Source(
        text,
        [byte_of[start] for start, _ in tokens],
        [byte_of[end] for _, end in tokens],
        [byte_of[at] for at in sentences],
    )


@st.composite
def sources(draw: st.DrawFn, *, overlapping: bool) -> Source:
    """Random texts and token ranges: gaps anywhere; tokens that share bytes only where they are asked for."""
    text = draw(st.text(ALPHABET, max_size=60))
    edges = st.integers(0, len(text))
    if overlapping:
        tokens = sorted(
            draw(st.lists(st.tuples(edges, edges).map(lambda two: (min(two), max(two))), max_size=60))
        )
    else:
        points = sorted(draw(st.sets(edges, max_size=60)))
        cut = draw(st.lists(st.booleans(), min_size=len(points), max_size=len(points)))
        pairs = zip(pairwise(points), cut, strict=False)
        tokens = [(start, end if whole else start + 1) for (start, end), whole in pairs]
    return source(text, tokens, sorted(draw(st.sets(edges, max_size=12))))


LIMITS = st.integers(1, 9)


@given(sources(overlapping=True), LIMITS)
@example(source("", []), 1)
@example(source("\u200b\u200b", []), 4)
@example(source("😀😀", [(0, 1)] * 4 + [(1, 2)] * 4), 2)
def test_parts_cover_every_byte_and_never_cut_a_code_point_or_a_token(
    given_source: Source, limit: int
) -> None:
    parts = given_source.plan(limit)
    octets = given_source.octets
    texts = [octets[part.byte_start : part.byte_end].decode("utf-8", "strict") for part in parts]
    assert "".join(texts) == given_source.text
    assert parts[0].token_start == 0
    assert parts[-1].token_end == len(given_source.starts)
    for part in parts[1:]:
        assert part.byte_start == given_source.starts[part.token_start]
        tokens = zip(given_source.starts, given_source.ends, strict=True)
        assert not any(start < part.byte_start < end for start, end in tokens)


@given(sources(overlapping=True), LIMITS)
def test_only_tokens_that_share_bytes_make_a_part_too_long(given_source: Source, limit: int) -> None:
    for part in given_source.plan(limit):
        if part.token_end - part.token_start > limit:
            inside = range(part.token_start + 1, part.token_end)
            starts, ends = given_source.starts, given_source.ends
            assert not any(
                max(ends[:index]) <= starts[index] < len(given_source.octets)
                and starts[index] > starts[index - 1]
                for index in inside
            )


@given(sources(overlapping=False), LIMITS)
def test_equal_arguments_give_equal_parts_whatever_holds_the_numbers(
    given_source: Source, limit: int
) -> None:
    starts, ends, sentences = (array("q", one) for one in given_source[1:])
    again = planning.plan(
        len(given_source.octets), memoryview(starts), memoryview(ends), memoryview(sentences), limit
    )
    assert again == given_source.plan(limit) == given_source.plan(limit)


def sentence_ranges(given_source: Source) -> list[tuple[int, int]]:
    """Token ranges of the sentences, by counting."""
    edges = [sum(start < at for start in given_source.starts) for at in given_source.sentences]
    points = sorted({0, *edges, len(given_source.starts)})
    return list(pairwise(points))


def packed_by_hand(given_source: Source, limit: int) -> list[tuple[int, int]]:
    """The rule of ADR 0010 once more, written the slow way for tokens that share no bytes."""
    parts: list[tuple[int, int]] = []
    may_grow = False
    for start, end in sentence_ranges(given_source):
        if end - start > limit:
            windows = -(-(end - start) // limit)
            size, larger = divmod(end - start, windows)
            at = start
            for window in range(windows):
                width = size + (window < larger)
                parts.append((at, at + width))
                at += width
            may_grow = False
        elif may_grow and end - parts[-1][0] <= limit:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((start, end))
            may_grow = True
    return parts or [(0, 0)]


@given(sources(overlapping=False), LIMITS)
def test_whole_sentences_are_packed_and_long_ones_cut_evenly(given_source: Source, limit: int) -> None:
    planned = [(part.token_start, part.token_end) for part in given_source.plan(limit)]
    assert planned == packed_by_hand(given_source, limit)


def words(*sentence_lengths: int) -> Source:
    """Sentences of so many one-letter words."""
    total = sum(sentence_lengths)
    edges = [2 * sum(sentence_lengths[:index]) for index in range(1, len(sentence_lengths))]
    return source("a " * total, [(2 * index, 2 * index + 1) for index in range(total)], edges)


@pytest.mark.parametrize(
    ("sentence_lengths", "limit", "expected"),
    [
        ((3, 3, 3), 6, [6, 3]),
        ((3, 4, 2), 6, [3, 6]),
        ((2, 13, 2), 6, [2, 5, 4, 4, 2]),
        ((64, 64), 64, [64, 64]),
        ((65, 1), 64, [33, 32, 1]),
        ((7,), 1, [1] * 7),
    ],
)
def test_examples(sentence_lengths: tuple[int, ...], limit: int, expected: list[int]) -> None:
    parts = words(*sentence_lengths).plan(limit)
    assert [part.token_end - part.token_start for part in parts] == expected


def test_bytes_without_a_token_go_with_the_token_before_them() -> None:
    parts = source("  a \u200b\u200b b  ", [(2, 3), (7, 8)]).plan(1)
    assert [(part.byte_start, part.byte_end) for part in parts] == [(0, 11), (11, 14)]


def test_a_text_without_tokens_is_one_part() -> None:
    assert source("\u200b", []).plan(64) == (PlannedPart(0, 0, 0, 3),)
    assert source("", []).plan(64) == (PlannedPart(0, 0, 0, 0),)


def test_one_token_may_be_very_long() -> None:
    text = "x" * 100_000 + " y"
    parts = source(text, [(0, 100_000), (100_001, 100_002)]).plan(1)
    assert [part.byte_end - part.byte_start for part in parts] == [100_001, 1]


def test_a_million_tokens_are_planned_in_one_pass() -> None:
    count = 1_000_000
    starts = array("q", range(0, 2 * count, 2))
    ends = array("q", range(1, 2 * count, 2))
    parts = planning.plan(2 * count, starts, ends, (), 64)
    assert len(parts) == count // 64


@pytest.mark.parametrize(
    ("starts", "ends"),
    [([0, 2, 1], [1, 3, 2]), ([0], [9]), ([3], [2]), ([0, 1], [1]), ([-1], [0])],
    ids=["falling", "beyond the text", "negative length", "ends missing", "before the text"],
)
def test_broken_offsets_are_refused(starts: list[int], ends: list[int]) -> None:
    with pytest.raises(InvariantBroken):
        planning.plan(4, starts, ends, (), 2)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InvariantBroken):
        words(2).plan(0)


# verify: each planted planner error turns it red


def dropping_gaps(given_source: Source, parts: Sequence[PlannedPart]) -> list[PlannedPart]:
    """A planner that ends each part at its last token, as if all bytes belonged to tokens."""
    return [
        msgspec.structs.replace(
            part,
            byte_start=given_source.starts[part.token_start],
            byte_end=given_source.ends[part.token_end - 1],
        )
        for part in parts
    ]


MUTANTS: dict[str, Callable[[Source, Sequence[PlannedPart]], Sequence[PlannedPart]]] = {
    "gap bytes dropped": dropping_gaps,
    "first part lost": lambda _, parts: parts[1:],
    "last part lost": lambda _, parts: parts[:-1],
    "a part doubled": lambda _, parts: [parts[0], *parts],
    "parts swapped": lambda _, parts: [parts[1], parts[0], *parts[2:]],
    "no part": lambda _, parts: [],
    "an empty part": lambda _, parts: [
        parts[0],
        PlannedPart(parts[0].token_end, parts[0].token_end, parts[0].byte_end, parts[0].byte_end),
        *parts[1:],
    ],
    "one byte short": lambda _, parts: [
        *parts[:-1],
        msgspec.structs.replace(parts[-1], byte_end=parts[-1].byte_end - 1),
    ],
    "one byte over": lambda _, parts: [
        *parts[:-1],
        msgspec.structs.replace(parts[-1], byte_end=parts[-1].byte_end + 1),
    ],
    "overlapping windows": lambda _, parts: [
        parts[0],
        msgspec.structs.replace(parts[1], byte_start=parts[1].byte_start - 1),
        *parts[2:],
    ],
    "token counted twice": lambda _, parts: [
        parts[0],
        msgspec.structs.replace(parts[1], token_start=parts[1].token_start - 1),
        *parts[2:],
    ],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_verify_catches(mutant: str) -> None:
    given_source = words(3, 3, 3, 3)
    parts = given_source.plan(3)
    byte_length = len(given_source.octets)
    planning.verify(parts, byte_length)
    with pytest.raises(InvariantBroken):
        planning.verify(MUTANTS[mutant](given_source, parts), byte_length)


@given(sources(overlapping=False), LIMITS)
def test_a_planner_that_drops_gaps_is_caught_whenever_it_loses_a_byte(
    given_source: Source, limit: int
) -> None:
    if not given_source.starts:
        return
    mutated = dropping_gaps(given_source, given_source.plan(limit))
    kept = sum(part.byte_end - part.byte_start for part in mutated)
    if kept == len(given_source.octets):
        planning.verify(mutated, kept)
    else:
        with pytest.raises(InvariantBroken):
            planning.verify(mutated, len(given_source.octets))


# batches, names, digests


@given(st.lists(st.integers(0, 70), max_size=40), st.integers(1, 128))
def test_batches_follow_each_other_and_are_as_large_as_they_may_be(
    counts: list[int], tokens_max: int
) -> None:
    groups = planning.batches(counts, tokens_max)
    assert [index for group in groups for index in group] == list(range(len(counts)))
    sums = [sum(counts[index] for index in group) for group in groups]
    assert all(group for group in groups)
    assert all(total <= tokens_max or len(group) == 1 for group, total in zip(groups, sums, strict=True))
    for total, following in zip(sums, groups[1:], strict=False):
        assert total + counts[following[0]] > tokens_max


def test_profile_name_holds_the_limit_and_the_version_of_the_rules() -> None:
    assert planning.profile_name(64) == "sentences-64-1"


IDENTITY = ModelIdentity(
    name="m", dimensions=3, window_tokens=8, files={"b": "22", "a": "11"}, tokenizer_digest="33"
)


def test_model_digest_is_the_hash_of_canonical_json() -> None:
    text = '{"dimensions":3,"files":{"a":"11","b":"22"},"name":"m","tokenizer_digest":"33","window_tokens":8}'
    assert planning.model_digest(IDENTITY) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "n"},
        {"dimensions": 4},
        {"window_tokens": 9},
        {"files": {"a": "11", "b": "23"}},
        {"files": {"a": "11"}},
        {"tokenizer_digest": "34"},
    ],
    ids=str,
)
def test_model_digest_changes_with_each_field(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(IDENTITY, **change)
    assert planning.model_digest(changed) != planning.model_digest(IDENTITY)
