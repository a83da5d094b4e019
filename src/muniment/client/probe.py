"""One server looked at from outside: single requests and their exact answers, and connections that are cut.

Unlike ``Client`` it hides nothing and repeats nothing but a 503: whoever certifies wants to see each status.
"""

import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx
import msgspec

from muniment.client.failures import Unreachable
from muniment.client.http import CONNECT_SECONDS, OPERATIONS, checked_base
from muniment.client.retry import Patience, advised_seconds
from muniment.errors import Unavailable

REQUEST_SECONDS: Final = 60.0
BUSY_SECONDS: Final = 15.0
"""How long a 503 is answered by asking again."""
_READ_BYTES: Final = 65536


class Cut(StrEnum):
    """Where a submission loses its connection."""

    HALF_SENT = "half of the request was sent"
    SENT = "the request was sent"
    UNREAD = "the answer had arrived"
    FIRST_BYTE = "the first byte of the answer"
    ALL_BUT_ONE = "all but the last byte of the answer"


class Answer(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    body: bytes


class Probe:
    """Requests to ``base_url``. Closed by a ``with`` block.

    Every other method raises ``Unreachable`` where nobody listens and ``Unavailable`` where no answer comes.
    """

    def __init__(self, base_url: str) -> None:
        """Raises ``InvalidField`` for what is not an http URL."""
        self.base_url = checked_base(base_url)
        self._http = httpx.Client(
            trust_env=False, timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Answer:
        """GET; a 503 is asked again for a while, but on ``/health`` and ``/ready``."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._asked("GET", path, params=given or None)

    def post(self, path: str, body: bytes) -> Answer:
        """POST a JSON body; a 503 is asked again for a while."""
        return self._asked("POST", path, content=body, headers={"Content-Type": "application/json"})

    def submit(self, body: bytes) -> Answer:
        """POST an operation."""
        return self.post(OPERATIONS, body)

    def _asked(self, method: str, path: str, **given: Any) -> Answer:
        patience = Patience(BUSY_SECONDS)
        while True:
            with self._answered(method, path):
                response = self._http.request(method, self.base_url + path, **given)
            advised = advised_seconds(response.headers.get("Retry-After"))
            if response.status_code != 503 or path in ("/health", "/ready") or not patience.pause(advised):
                return Answer(response.status_code, response.content)

    def stream(
        self, path: str, *, after: int | None = None, last_event_id: int | None = None, seconds: float
    ) -> bytes:
        """All that a stream says until it ends by itself. ``Unavailable`` where it does not in time."""
        with self._followed(path, after, last_event_id, seconds) as arriving:
            return b"".join(arriving)

    def stream_cut(self, path: str, events: int, more_bytes: int, *, seconds: float) -> bytes:
        """Read a stream up to so many events and some bytes more, if they come; then hang up.

        Of what came together with the last byte that was wanted, the client is taken to have had nothing.
        """
        received = b""
        with self._followed(path, None, None, seconds) as arriving:
            for chunk in arriving:
                received += chunk
                end = _end_of(received, events)
                if end is not None:
                    return received[: end + more_bytes]
        raise Unavailable(f"the stream {path} ended before its event {events}")

    @contextmanager
    def _followed(
        self, path: str, after: int | None, last_event_id: int | None, seconds: float
    ) -> Iterator[Iterator[bytes]]:
        headers = {} if last_event_id is None else {"Last-Event-ID": str(last_event_id)}
        over = time.monotonic() + seconds
        with (
            self._answered("GET", path),
            self._http.stream(
                "GET",
                self.base_url + path,
                params=None if after is None else {"after": after},
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
            ) as response,
        ):
            if response.status_code != 200:
                raise Unavailable(
                    f"GET {path} was answered {response.status_code}: {response.read()[:200]!r}"
                )
            yield self._chunks(response, path, over, seconds)

    @staticmethod
    def _chunks(response: httpx.Response, path: str, over: float, seconds: float) -> Iterator[bytes]:
        for chunk in response.iter_raw():
            yield chunk
            if time.monotonic() > over:
                raise Unavailable(f"the stream {path} has not ended after {seconds:g} seconds")

    @contextmanager
    def _answered(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(self.base_url, str(error) or type(error).__name__) from error
        except httpx.TransportError as error:
            raise Unavailable(
                f"no answer to {method} {path}: {str(error) or type(error).__name__}"
            ) from error

    def submit_and_cut(self, body: bytes, cut: Cut) -> bytes:
        """POST an operation by hand and hang up at ``cut``; return what was read of the answer."""
        url = urlsplit(self.base_url)
        head = (
            f"POST {url.path}{OPERATIONS} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode("ascii")
        try:
            with self._connected(url.scheme, url.hostname or "", url.port) as connection:
                connection.sendall(head + (body[: len(body) // 2] if cut is Cut.HALF_SENT else body))
                return _read_until(connection, cut)
        except OSError as error:
            raise Unavailable(f"no answer to a POST that was to be cut: {error}") from error

    def _connected(self, scheme: str, host: str, port: int | None) -> socket.socket:
        secure = scheme == "https"
        connection = socket.create_connection((host, port or (443 if secure else 80)), CONNECT_SECONDS)
        connection.settimeout(REQUEST_SECONDS)
        return (
            ssl.create_default_context().wrap_socket(connection, server_hostname=host)
            if secure
            else connection
        )


def _end_of(received: bytes, events: int) -> int | None:
    """Where the n-th event ends; comments are none."""
    place = 0
    while (end := received.find(b"\n\n", place)) >= 0:
        events -= not received.startswith(b":", place)
        place = end + 2
        if events == 0:
            return place
    return None


def _read_until(connection: socket.socket, cut: Cut) -> bytes:
    if cut in (Cut.HALF_SENT, Cut.SENT):
        return b""
    if not select.select([connection], [], [], REQUEST_SECONDS)[0]:
        raise TimeoutError(f"nothing for {REQUEST_SECONDS:g} seconds")
    if cut is Cut.UNREAD:
        return b""
    received = connection.recv(1)
    while cut is Cut.ALL_BUT_ONE and (left := _left(received)) > 1:
        more = connection.recv(min(left - 1, _READ_BYTES))
        if not more:
            break
        received += more
    return received


def _left(received: bytes) -> int:
    """How many bytes of the answer are still to come, as far as its head says; 2 while that is unknown."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return 2
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value) - len(body)
    return 0
