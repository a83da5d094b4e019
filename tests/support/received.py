"""What the first bytes of an event stream say, wherever it was cut.

It imports next to nothing, so that a program of a thousand clients starts at once.
"""

import re
from typing import Final, NamedTuple

FRAME_ID: Final = re.compile(rb"id: (\d+)\n")
READ_BYTES: Final = 65536


class Received(NamedTuple):
    """What a prefix of a response says."""

    status: int | None
    """None while the head is not complete."""
    body: bytes
    """Without the framing of chunks, also that part of a chunk which has come."""
    ended: bool
    """Whether the last chunk has come."""

    @property
    def frames(self) -> bytes:
        """The whole event frames, without comments."""
        parts = self.body.split(b"\n\n")[:-1]
        return b"".join(part + b"\n\n" for part in parts if not part.startswith(b":"))

    @property
    def comments(self) -> int:
        """How many whole comments came."""
        return sum(part.startswith(b":") for part in self.body.split(b"\n\n")[:-1])

    @property
    def rest(self) -> bytes:
        """What came of the frame that was cut."""
        return self.body.rpartition(b"\n\n")[2]

    @property
    def last(self) -> int:
        """The sequence of the last whole frame, 0 where there is none: where to read on."""
        ids = FRAME_ID.findall(self.frames)
        return int(ids[-1]) if ids else 0


def received(raw: bytes) -> Received:
    """Read a response with a chunked body that may end after any byte."""
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return Received(None, b"", ended=False)
    status = int(head.split()[1])
    assert status != 200 or b"\r\ntransfer-encoding: chunked" in head.lower(), head
    body = bytearray()
    while True:
        length, found, rest = rest.partition(b"\r\n")
        if not found:
            return Received(status, bytes(body), ended=False)
        size = int(length, 16)
        body += rest[:size]
        if size == 0 or len(rest) < size + 2:
            return Received(status, bytes(body), ended=size == 0 and rest == b"\r\n")
        rest = rest[size + 2 :]
