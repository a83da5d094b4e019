"""Server-sent events: bytes in, frames out (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from muniment.client.failures import UnexpectedAnswer

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")


class Frame(msgspec.Struct, frozen=True):
    """One dispatched frame; a block without data, such as a keep-alive comment, has ``data`` None."""

    data: bytes | None


class FrameReader:
    """Put frames together from chunks that may be cut anywhere."""

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that ``chunk`` completes. Raises ``UnexpectedAnswer`` for one without an end."""
        *lines, self._pending = _LINE_END.split(self._pending + chunk)
        for line in lines:
            if not line:
                yield Frame(b"\n".join(self._data) if self._data else None)
                self._data, self._size = [], 0
            elif line.startswith(b"data"):
                _, colon, value = line.partition(b":")
                if line == b"data" or (colon and line.startswith(b"data:")):
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(value)
        if self._size + len(self._pending) > FRAME_BYTES_MAX:
            raise UnexpectedAnswer(f"an event of more than {FRAME_BYTES_MAX} bytes")
