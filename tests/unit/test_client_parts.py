"""The pure parts of the client: frames out of chunks, and the pauses between tries."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.client import UnexpectedAnswer, sse
from muniment.client.retry import LONGEST_PAUSE_SECONDS, Patience, advised_seconds, pause_seconds
from muniment.client.sse import FrameReader

NO_LINE_END = st.binary(max_size=30).map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b""))


def frames(chunks: list[bytes]) -> list[bytes | None]:
    reader = FrameReader()
    return [frame.data for chunk in chunks for frame in reader.feed(chunk)]


@given(
    texts=st.lists(st.lists(NO_LINE_END, min_size=1, max_size=3), max_size=4),
    end=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_frames_do_not_depend_on_where_the_bytes_are_cut(
    texts: list[list[bytes]], end: bytes, cuts: list[int]
) -> None:
    sent = b"".join(
        b"id: 1" + end + b"".join(b"data: " + line + end for line in lines) + b": note" + end + end
        for lines in texts
    )
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    chunks = [sent[start:stop] for start, stop in pairwise(places)]
    assert frames(chunks) == [b"\n".join(lines) for lines in texts]
    assert frames([bytes([byte]) for byte in sent]) == [b"\n".join(lines) for lines in texts]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b": keep-alive\n\n", [None]),
        (b"event: x\nid: 1\n\n", [None]),
        (b"data\n\n", [b""]),
        (b"data:a\ndata: b\n\n", [b"a\nb"]),
        (b"database: a\n\n", [None]),
        (b"data: a\rdata: b\r\rdata: c\n\n", [b"a\nb", b"c"]),
        (b"data: unfinished", []),
        (b"data: unfinished\n", []),
    ],
)
def test_frames_follow_the_standard(sent: bytes, expected: list[bytes | None]) -> None:
    assert frames([sent]) == expected


def test_a_frame_without_an_end_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FRAME_BYTES_MAX", 100)
    assert frames([b"data: " + b"x" * 80 + b"\n\n"] * 3) == [b"x" * 80] * 3
    with pytest.raises(UnexpectedAnswer):
        frames([b"data: " + b"x" * 50 + b"\n"] * 3)


@given(
    failures=st.integers(1, 10_000),
    advised=st.none() | st.floats(0, 100, allow_nan=False),
    chance=st.floats(0, 1, allow_nan=False),
)
def test_a_pause_is_bounded_and_never_shorter_than_advised(
    failures: int, advised: float | None, chance: float
) -> None:
    pause = pause_seconds(failures, advised, chance)
    if advised is None:
        assert 0 < pause <= LONGEST_PAUSE_SECONDS
    else:
        assert advised <= pause <= advised * 1.5


def test_pauses_grow() -> None:
    pauses = [pause_seconds(failures, None, 0.5) for failures in range(1, 20)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 10 * pauses[0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("1", 1.0),
        (" 30 ", 30.0),
        ("-1", None),
        ("1.5", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_only_seconds_are_advice(header: str | None, seconds: float | None) -> None:
    assert advised_seconds(header) == seconds


def test_patience_ends_before_a_pause_that_would_outlast_it() -> None:
    patience = Patience(0.5)
    assert not patience.pause(advised=10.0)
    assert patience.pause()
