"""The wire between supervisor and child: frames, messages, and a decoder that is fed bytes and does no I/O.

A frame is a 4-byte big-endian length and that many bytes of MessagePack, which hold one message. Every
message names the generation it belongs to; requests and their answers also carry the request's ID. Either
side treats anything else as ``ExecutorProtocolBroken``: a stream that has lost its place is never read on
(ADR 0010).
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from muniment.errors import ExecutorProtocolBroken
from muniment.model.plan import ModelIdentity, PlannedPart

PROTOCOL_VERSION: Final = 2
HEADER_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Longest frame: the plan of an 8 MiB text of nothing but punctuation, in parts of three tokens, fits."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to load and how it is to work; made from the configuration. Holds no secret."""

    embedder: str
    directory: str | None = None
    url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself never travels."""
    dimensions: int | None = None
    timeout_seconds: float = 30.0
    threads: int = 1
    part_tokens_max: int = 64
    heartbeat_seconds: float = 0.5
    nice: int = 0
    """How far the child steps back for other processes."""
    tally: str | None = None


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, tag=True
):
    generation: int


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message to a child: it loads what ``spec`` says, then says Ready, or Failed without request."""

    protocol: int
    spec: Spec


class PlanRequest(_Message, frozen=True, kw_only=True, tag="plan"):
    """Plan texts; answered by Planned or Failed. A label names its text in logs."""

    request_id: int
    texts: tuple[str, ...]
    labels: tuple[str, ...]


class EmbedRequest(_Message, frozen=True, kw_only=True, tag="embed"):
    """Embed texts; answered by Embedded or Failed. Each label is one line of the tally; a query has none."""

    request_id: int
    texts: tuple[str, ...]
    labels: tuple[str, ...]


class Shutdown(_Message, frozen=True, kw_only=True, tag="shutdown"):
    """End now, with exit status 0, whatever is being computed."""


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """Tokenizer and model are loaded and were used once."""

    protocol: int
    identity: ModelIdentity


class Heartbeat(_Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by a thread of its own from the start on, while loading and computing too."""

    sequence: int
    """Counts the heartbeats of this child from 1."""
    request_id: int | None
    """What is being computed."""
    progress: int
    """Units of work that this child has done: only a rising number is progress, a heartbeat alone is none."""
    tokenizer_problem: str | None
    """Why a child that is started now could not load its tokenizer."""


class PlannedText(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The plan of one text."""

    profile: str
    token_count: int
    parts: tuple[PlannedPart, ...]


class Planned(_Message, frozen=True, kw_only=True, tag="planned"):
    """One plan a text, in order."""

    request_id: int
    plans: tuple[PlannedText, ...]


class Embedded(_Message, frozen=True, kw_only=True, tag="embedded"):
    """One float32 little-endian row a text, in order."""

    request_id: int
    vectors: tuple[bytes, ...]


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The child cannot do this request and goes on; without a request: it cannot start, and ends."""

    request_id: int | None
    error: str


Request = PlanRequest | EmbedRequest
ToChild = Hello | PlanRequest | EmbedRequest | Shutdown
Answer = Planned | Embedded | Failed
ToParent = Ready | Heartbeat | Planned | Embedded | Failed

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def frame(message: ToChild | ToParent) -> bytes:
    """One message as it goes over the wire. ``ExecutorProtocolBroken`` when it is too long for a frame."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ExecutorProtocolBroken(
            f"a message of {len(body)} bytes does not fit a frame of {FRAME_BYTES_MAX}"
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameDecoder:
    """Takes bytes in any pieces and gives the bodies of whole frames. Of no use after it raised once."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that has not arrived completely."""
        return len(self._held)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every frame that is complete now; iterate to the end before feeding again.

        Raises ``ExecutorProtocolBroken`` for a length of 0 or above the limit, as soon as the length is
        known.
        """
        self._held += data
        at = 0
        while len(self._held) - at >= HEADER_BYTES:
            length = int.from_bytes(self._held[at : at + HEADER_BYTES], "big")
            if not 0 < length <= self._frame_bytes_max:
                raise ExecutorProtocolBroken(
                    f"a frame of {length} bytes; at most {self._frame_bytes_max} are allowed"
                )
            end = at + HEADER_BYTES + length
            if len(self._held) < end:
                break
            yield bytes(self._held[at + HEADER_BYTES : end])
            at = end
        del self._held[:at]


def read_to_child(body: bytes) -> ToChild:
    """The message in a frame that the parent wrote. Raises ``ExecutorProtocolBroken``."""
    try:
        return _to_child.decode(body)
    except msgspec.DecodeError as error:
        raise ExecutorProtocolBroken(f"the parent sent no message: {error}") from error


def read_to_parent(body: bytes) -> ToParent:
    """The message in a frame that a child wrote. Raises ``ExecutorProtocolBroken``."""
    try:
        return _to_parent.decode(body)
    except msgspec.DecodeError as error:
        raise ExecutorProtocolBroken(f"the child sent no message: {error}") from error
