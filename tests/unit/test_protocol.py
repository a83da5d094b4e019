"""Frames survive any split of the stream; what is no frame or no message is refused, by one named error."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.errors import ExecutorProtocolBroken
from muniment.executor import protocol
from muniment.executor.protocol import FrameDecoder, frame, read_to_child, read_to_parent
from muniment.model.plan import ModelIdentity, PlannedPart

IDS = st.integers(0, 2**63 - 1)
TEXTS = st.text(max_size=30)
IDENTITIES = st.builds(
    ModelIdentity,
    name=TEXTS,
    dimensions=IDS,
    window_tokens=IDS,
    files=st.dictionaries(TEXTS, TEXTS, max_size=3),
    tokenizer_digest=TEXTS,
)
SPECS = st.builds(
    protocol.Spec, embedder=TEXTS, directory=st.none() | TEXTS, timeout_seconds=st.floats(0.1, 9)
)
TO_CHILD: st.SearchStrategy[protocol.ToChild] = st.one_of(
    st.builds(protocol.Hello, generation=IDS, protocol=IDS, spec=SPECS),
    st.builds(
        protocol.PlanRequest,
        generation=IDS,
        request_id=IDS,
        texts=st.lists(TEXTS, max_size=4).map(tuple),
        labels=st.lists(TEXTS, max_size=4).map(tuple),
    ),
    st.builds(
        protocol.EmbedRequest,
        generation=IDS,
        request_id=IDS,
        texts=st.lists(TEXTS, max_size=4).map(tuple),
        labels=st.lists(TEXTS, max_size=4).map(tuple),
    ),
    st.builds(protocol.Shutdown, generation=IDS),
)
TO_PARENT: st.SearchStrategy[protocol.ToParent] = st.one_of(
    st.builds(protocol.Ready, generation=IDS, protocol=IDS, identity=IDENTITIES),
    st.builds(
        protocol.Heartbeat,
        generation=IDS,
        sequence=IDS,
        request_id=st.none() | IDS,
        progress=IDS,
        tokenizer_problem=st.none() | TEXTS,
    ),
    st.builds(
        protocol.Planned,
        generation=IDS,
        request_id=IDS,
        plans=st.lists(
            st.builds(
                protocol.PlannedText,
                profile=TEXTS,
                token_count=IDS,
                parts=st.lists(st.builds(PlannedPart, IDS, IDS, IDS, IDS), max_size=4).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(
        protocol.Embedded,
        generation=IDS,
        request_id=IDS,
        vectors=st.lists(st.binary(max_size=40), max_size=4).map(tuple),
    ),
    st.builds(protocol.Failed, generation=IDS, request_id=st.none() | IDS, error=TEXTS),
)


def pieces(stream: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return (stream[start:end] for start, end in pairwise(edges))


@given(st.lists(TO_PARENT, max_size=6), st.lists(IDS, max_size=20))
def test_messages_to_the_parent_survive_any_split(messages: list[protocol.ToParent], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    stream = b"".join(frame(message) for message in messages)
    read = [read_to_parent(body) for piece in pieces(stream, cuts) for body in decoder.feed(piece)]
    assert read == messages
    assert decoder.held_bytes == 0


@given(st.lists(TO_CHILD, max_size=6), st.lists(IDS, max_size=20))
def test_messages_to_the_child_survive_any_split(messages: list[protocol.ToChild], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    stream = b"".join(frame(message) for message in messages)
    read = [read_to_child(body) for piece in pieces(stream, cuts) for body in decoder.feed(piece)]
    assert read == messages
    assert decoder.held_bytes == 0


def test_byte_by_byte_gives_each_frame_with_its_last_byte() -> None:
    one = frame(protocol.Shutdown(generation=7))
    decoder = FrameDecoder()
    for byte in one[:-1]:
        assert list(decoder.feed(bytes([byte]))) == []
    assert decoder.held_bytes == len(one) - 1
    assert [read_to_child(body) for body in decoder.feed(one[-1:])] == [protocol.Shutdown(generation=7)]


def test_a_length_above_the_limit_is_refused_before_its_bytes_arrive() -> None:
    decoder = FrameDecoder(frame_bytes_max=10)
    assert list(decoder.feed((10).to_bytes(4, "big") + b"x" * 10)) == [b"x" * 10]
    with pytest.raises(ExecutorProtocolBroken, match="11 bytes"):
        list(decoder.feed((11).to_bytes(4, "big")))


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(ExecutorProtocolBroken):
        list(FrameDecoder().feed(bytes(4)))


def test_a_message_too_long_for_a_frame_is_refused_by_its_writer() -> None:
    text = "x" * protocol.FRAME_BYTES_MAX
    with pytest.raises(ExecutorProtocolBroken, match="does not fit"):
        frame(protocol.PlanRequest(generation=1, request_id=1, texts=(text,), labels=("",)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode(["unknown", 1]),
        msgspec.msgpack.encode(["ready", 1]),
        msgspec.msgpack.encode(["heartbeat", 1, 1, None, "one more"]),
        msgspec.msgpack.encode(["heartbeat", "1", 1, None]),
        msgspec.msgpack.encode(["shutdown", 1]),
        msgspec.msgpack.encode(["heartbeat", 1, 1, None]) + b"\x00",
        msgspec.msgpack.encode({"type": "heartbeat"}),
        b"\x94\xa6failed\x01\x01\xa2\xff\xff",
    ],
    ids=[
        "reserved byte", "text", "unknown tag", "too short", "too long", "wrong type", "other direction",
        "trailing byte", "map", "not UTF-8",
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ExecutorProtocolBroken):
        read_to_parent(body)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_random_bytes_are_messages_or_one_named_error(chunks: list[bytes]) -> None:
    decoder = FrameDecoder()
    try:
        for chunk in chunks:
            for body in decoder.feed(chunk):
                read_to_parent(body)
    except ExecutorProtocolBroken:
        return
    assert decoder.held_bytes <= sum(map(len, chunks))


@given(TO_PARENT, IDS, st.integers(0, 255))
def test_one_changed_byte_is_a_message_or_one_named_error(
    message: protocol.ToParent, position: int, value: int
) -> None:
    stream = bytearray(frame(message))
    stream[position % len(stream)] = value
    try:
        for body in FrameDecoder().feed(bytes(stream)):
            read_to_parent(body)
    except ExecutorProtocolBroken:
        return
