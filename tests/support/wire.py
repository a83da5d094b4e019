"""HTTP by hand: requests that a client library would correct, cut or hold back."""

import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx

TIMEOUT_SECONDS = 30.0


def connect(url: str) -> socket.socket:
    """Open a connection to the server at ``url``."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=TIMEOUT_SECONDS)


def head(method: str, target: str, *headers: str) -> bytes:
    """The request line and headers, ``Host`` among them."""
    return "\r\n".join((f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers, "", "")).encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def exchange(url: str, pieces: Iterable[bytes]) -> httpx.Response:
    """Send the pieces as they come, until the server ends the connection; return the response."""
    with connect(url) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # The server has answered and closed; what it said can still be read.
        return receive(connection)


def receive(connection: socket.socket) -> httpx.Response:
    """Read one response with a Content-Length."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    top, _, body = bytes(data).partition(b"\r\n\r\n")
    status, *lines = top.split(b"\r\n")
    headers = httpx.Headers([(name, value) for name, _, value in (line.partition(b": ") for line in lines)])
    while len(body) < int(headers["content-length"]):
        body += _more(connection)
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the server closed the connection before it answered"
    return data
