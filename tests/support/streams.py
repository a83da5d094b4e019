"""Event streams byte by byte: what was received before a connection was cut, and where a client reads on.

A client library hides in which chunk a frame came and what was lost of the last one; here nothing is hidden.
"""

import contextlib
import socket
import struct
import time
from typing import Any, Final

from tests.support import wire
from tests.support.received import READ_BYTES, Received, received
from tests.support.seed_contract import operation_path

RESET: Final = struct.pack("ii", 1, 0)


def request(operation_id: str, last: int = 0, way: int = 0) -> bytes:
    """Ask for what follows ``last``: by ``after``, by ``Last-Event-ID``, or by both, ``after`` being less."""
    path = operation_path(operation_id, "/events")
    if last == 0 and way % 2 == 0:
        return wire.head("GET", path)
    after = (f"?after={last}", "", f"?after={last - 1 if last else 0}")[way % 3]
    header = () if way % 3 == 0 else (f"Last-Event-ID: {last}",)
    return wire.head("GET", path + after, *header)


def read(
    url: str, asked: bytes, upto: int | None = None, *, seconds: float = 30.0, reset: bool = False
) -> bytes:
    """Send a request; return the first ``upto`` bytes of the response, or all of it to its last chunk.

    What has not come after ``seconds`` is not waited for. The connection is closed, with a reset if asked.
    """
    raw = bytearray()
    over = time.monotonic() + seconds
    with wire.connect(url) as connection, contextlib.suppress(TimeoutError):
        connection.sendall(asked)
        while upto is None or len(raw) < upto:
            connection.settimeout(max(0.001, over - time.monotonic()))
            data = connection.recv(READ_BYTES if upto is None else upto - len(raw))
            raw += data
            if not data or time.monotonic() > over or (upto is None and received(bytes(raw)).ended):
                break
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return bytes(raw)


def receive(connection: socket.socket) -> bytes:
    """Read a response to its last chunk, or to the end of the connection."""
    raw = bytearray()
    while not raw.endswith(b"0\r\n\r\n") and (data := connection.recv(READ_BYTES)):
        raw += data
    return bytes(raw)


def replay(url: str, operation_id: str, **options: Any) -> Received:
    """The stream of an operation that ends, from its first event to its last chunk."""
    whole = received(read(url, request(operation_id), **options))
    assert whole.status == 200, whole
    assert whole.ended, whole
    return whole


def stuck(url: str, operation_id: str, receive_bytes: int = 2048) -> socket.socket:
    """A connection that asks for a stream and never reads; its receive buffer is as small as it can be."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)  # Before the handshake.
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection.settimeout(wire.TIMEOUT_SECONDS)
    connection.connect((host, int(port)))
    connection.sendall(request(operation_id))
    return connection
