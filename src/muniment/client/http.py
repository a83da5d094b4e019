"""A synchronous client of one Muniment server, over HTTP.

It never guesses: an answer is the server's, an error says what is known, and everything that is repeated
carries the same operation ID, so that the server makes it happen once (ADR 0001).
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from muniment.client.failures import ConflictAnswer, OutcomeOpen, UnexpectedAnswer, Unreachable
from muniment.client.retry import Patience, advised_seconds
from muniment.client.sse import FrameReader
from muniment.core import canonical
from muniment.errors import InvalidField, MunimentError, NotFound, RequestError, Unavailable
from muniment.model.operation import SCHEMA_VERSION, TERMINAL, Event, Kind, Receipt

T = TypeVar("T")

STATUS: Final = "/api/v2/status"
OPERATIONS: Final = "/api/v2/operations"
MEMORIES: Final = "/api/v2/memories"
TASK_STREAMS: Final = "/api/v2/task-streams"
RECALL: Final = "/api/v2/recall"

CONNECT_SECONDS: Final = 5.0
_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_TRY_AGAIN: Final = frozenset({502, 503, 504})


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, and whether the server already had the operation before this call sent it.

    ``known_before`` is False where an earlier try of the same call may have been the one that was accepted.
    """

    receipt: Receipt
    known_before: bool


class Client:
    """Talk to the server at ``base_url``. May be shared by threads; closed by ``close`` or a ``with`` block.

    ``patience_seconds`` bounds how long a call goes on trying while nothing is heard. ``request_seconds``
    bounds one try, ``silence_seconds`` the silence on an event stream before it is opened anew. ``locate``,
    where given, is asked for the base URL again when no connection can be made: a server may come back on
    another port.
    """

    def __init__(
        self,
        base_url: str,
        *,
        transport: httpx.BaseTransport | None = None,
        locate: Callable[[], str] | None = None,
        patience_seconds: float = 30.0,
        request_seconds: float = 60.0,
        silence_seconds: float = 60.0,
    ) -> None:
        """Raises ``InvalidField`` for what is not an http URL. Connects only when the first call is made."""
        self._base = checked_base(base_url)
        self._locate = locate
        self._patience_seconds = patience_seconds
        self._silence_seconds = silence_seconds
        self._locating = threading.Lock()
        # No proxy and no ~/.netrc from the environment: the server is on this machine unless the URL says
        # otherwise, and a memory is nothing to send through a proxy by accident.
        self._http = httpx.Client(
            transport=transport,
            trust_env=False,
            timeout=httpx.Timeout(request_seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    @property
    def base_url(self) -> str:
        """Where the server was found last, without a slash at the end."""
        return self._base

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # Writing

    def submit(
        self, kind: Kind, payload: Mapping[str, Any], operation_id: str, dependencies: Sequence[str] = ()
    ) -> Receipt:
        """As ``admit``, for callers who need the receipt alone."""
        return self.admit(kind, payload, operation_id, dependencies).receipt

    def admit(
        self, kind: Kind, payload: Mapping[str, Any], operation_id: str, dependencies: Sequence[str] = ()
    ) -> Admission:
        """Return the durable receipt of this operation, accepted now or before.

        A lost connection, a timeout and a 5xx are answered by sending the same operation again, for as long
        as patience lasts, and then by asking for its receipt. Raises ``RequestError`` (nothing stored),
        ``Conflict`` (the ID belongs to another payload), ``Unreachable`` (nothing was ever sent) and
        ``OutcomeOpen``.
        """
        payload_hash = canonical.payload_hash(dict(payload))
        body = canonical.encode(
            {
                "operation_id": operation_id,
                "schema_version": SCHEMA_VERSION,
                "kind": kind.value,
                "dependencies": list(dependencies),
                "payload_hash": payload_hash,
                "payload": dict(payload),
            }
        )
        patience = Patience(self._patience_seconds)
        sent = False
        while True:
            advised = None
            try:
                response = self._send("POST", OPERATIONS, content=body)
            except httpx.TransportError as error:
                sent = sent or not isinstance(error, _NEVER_SENT)
                reason = _words(error)
            else:
                if response.status_code in (200, 202):
                    receipt = _same(_decoded(response.content, Receipt), operation_id, payload_hash)
                    return Admission(receipt=receipt, known_before=response.status_code == 200 and not sent)
                if response.status_code < 500:
                    _refuse(response)
                sent = True
                reason = _error_text(response)
                advised = advised_seconds(response.headers.get("Retry-After"))
            if not patience.pause(advised):
                break
        if not sent:
            raise Unreachable(self._base, reason)
        return self._reconciled(operation_id, payload_hash, reason)

    def _reconciled(self, operation_id: str, payload_hash: str, reason: str) -> Admission:
        """What the ledger says, once; a 404 proves nothing, for the last try may still be on its way."""
        try:
            response = self._send("GET", _operation_path(operation_id))
        except httpx.TransportError as error:
            raise OutcomeOpen(operation_id, reason) from error
        if response.status_code != 200:
            raise OutcomeOpen(operation_id, reason)
        receipt = _decoded(response.content, Receipt)
        if receipt.payload_hash != payload_hash:
            raise ConflictAnswer(
                f"operation_id '{operation_id}' already exists with payload_hash {receipt.payload_hash}"
            )
        return Admission(receipt=receipt, known_before=False)

    # Asking for an outcome

    def receipt(self, operation_id: str) -> Receipt:
        """Return the latest durable receipt. Raises ``NotFound`` and ``Unavailable``."""
        return _decoded(self._ask("GET", _operation_path(operation_id)), Receipt)

    def wait(self, operation_id: str, timeout_seconds: float | None = None) -> Receipt:
        """Return the terminal receipt, once there is one.

        Without a timeout it waits for as long as a server can be reached. Raises ``NotFound``,
        ``Unavailable`` and, when the timeout passes, ``OutcomeOpen``.
        """
        receipt = self.receipt(operation_id)
        if receipt.state in TERMINAL:
            return receipt
        for _ in self.events(operation_id, receipt.progress_seq, timeout_seconds):
            pass
        return self.receipt(operation_id)

    def events(
        self, operation_id: str, after: int = 0, timeout_seconds: float | None = None
    ) -> Iterator[Event]:
        """Yield the events after ``after``, each once and in order, up to the terminal one.

        Goes on over lost connections and restarts of the server. Raises ``NotFound``, ``Unavailable`` when
        the server cannot be reached for as long as patience lasts, and ``OutcomeOpen`` when the timeout
        passes.
        """
        path = _operation_path(operation_id) + "/events"
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        last = after
        patience = Patience(self._patience_seconds)
        while True:
            advised = None
            try:
                for event in self._stream(path, last, deadline):
                    patience.progress()
                    if event is None or event.sequence <= last:
                        continue
                    _no_gap(event, last, operation_id)
                    last = event.sequence
                    yield event
                    if event.to_state in TERMINAL:
                        return
                if self._ended(operation_id, last):
                    return
                reason = "the stream ended before the operation did"
            except httpx.TransportError as error:
                reason = _words(error)
            except _NotNow as error:
                reason, advised = str(error), error.advised
            if deadline is not None and time.monotonic() >= deadline:
                raise OutcomeOpen(operation_id, f"not ended after {timeout_seconds:g} seconds")
            if not patience.pause(advised):
                raise Unavailable(f"operation '{operation_id}' cannot be followed: {reason}")

    def _ended(self, operation_id: str, last: int) -> bool:
        receipt = self.receipt(operation_id)
        return receipt.state in TERMINAL and receipt.progress_seq <= last

    def _stream(self, path: str, after: int, deadline: float | None) -> Iterator[Event | None]:
        """Yield the events of one connection, None for each sign of life, until it or the time is over."""
        silence = self._silence_seconds
        if deadline is not None:
            silence = max(0.001, min(silence, deadline - time.monotonic()))
        request = self._request("GET", path, params={"after": after}, read_seconds=silence)
        response = self._handled(request, stream=True)
        try:
            if response.status_code != 200:
                response.read()
                if response.status_code in _TRY_AGAIN:
                    raise _NotNow(response)
                _refuse(response)
            yield None
            reader = FrameReader()
            for chunk in response.iter_raw():
                for frame in reader.feed(chunk):
                    yield None if frame.data is None else _decoded(frame.data, Event)
                if deadline is not None and time.monotonic() >= deadline:
                    return
        finally:
            response.close()

    # Reading

    def operations(
        self,
        *,
        state: str | None = None,
        kind: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """Return one page of receipts, as the server wrote it (docs/reference/http-api.md)."""
        params = {"state": state, "kind": kind, "after": after, "limit": limit}
        return self._object("GET", OPERATIONS, params=params)

    def status(self) -> dict[str, Any]:
        """Return reasons, children and stuck operations, as the server wrote it. Raises ``Unavailable``."""
        return self._object("GET", STATUS)

    def evidence(self, operation_id: str, *, after: int = 0, limit: int | None = None) -> dict[str, Any]:
        """Return one page of the executor evidence of an operation, as the server wrote it.

        Pass its ``next`` as ``after`` until that is None. Raises ``NotFound`` and ``Unavailable``.
        """
        path = _operation_path(operation_id) + "/evidence"
        return self._object("GET", path, params={"after": after, "limit": limit})

    def memory(self, key: str) -> dict[str, Any]:
        """Return one memory, as the server wrote it. Raises ``NotFound`` and ``Unavailable``."""
        return self._object("GET", f"{MEMORIES}/{_segment('key', key)}")

    def task_streams(
        self, name: str, *, user_id: str | None = None, agent_id: str | None = None
    ) -> dict[str, Any]:
        """Return the task streams of a name with their steps, as the server wrote it.

        Raises ``NotFound`` and ``Unavailable``.
        """
        params = {"user_id": user_id, "agent_id": agent_id}
        return self._object("GET", f"{TASK_STREAMS}/{_segment('name', name)}", params=params)

    def recall(
        self,
        query: str,
        *,
        limit: int | None = None,
        user_id: str | None = None,
        agent_id: str | None = None,
        session_id: str | None = None,
        categories: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Return what fits ``query`` best, as the server wrote it. What cannot be searched is never empty.

        Raises ``RequestError``, and ``Unavailable`` where the server cannot search for as long as patience
        lasts.
        """
        asked = {
            "query": query,
            "limit": limit,
            "user_id": user_id,
            "agent_id": agent_id,
            "session_id": session_id,
            "categories": list(categories) if categories else None,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return self._object("POST", RECALL, content=canonical.encode(given))

    def ready(self) -> dict[str, Any]:
        """Return the six capabilities, ready or not. Asks once; raises ``Unreachable``."""
        try:
            response = self._send("GET", "/ready")
        except httpx.TransportError as error:
            raise Unreachable(self._base, _words(error)) from error
        if response.status_code not in (200, 503):
            raise UnexpectedAnswer(f"/ready was answered with status {response.status_code}")
        return _decoded(response.content, dict[str, Any])

    # One try

    def _object(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        return _decoded(self._ask(method, path, **given), dict[str, Any])

    def _ask(self, method: str, path: str, **given: Any) -> bytes:
        """Send what changes nothing until there is an answer; return the body of a 200."""
        patience = Patience(self._patience_seconds)
        while True:
            advised = None
            unreachable = False
            try:
                response = self._send(method, path, **given)
            except httpx.TransportError as error:
                reason, unreachable = _words(error), isinstance(error, _NEVER_SENT)
            else:
                if response.status_code == 200:
                    return response.content
                if response.status_code not in _TRY_AGAIN:
                    _refuse(response)
                reason = _error_text(response)
                advised = advised_seconds(response.headers.get("Retry-After"))
            if not patience.pause(advised):
                raise Unreachable(self._base, reason) if unreachable else Unavailable(reason)

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        return self._handled(self._request(method, path, params=params, content=content), stream=False)

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        read_seconds: float | None = None,
    ) -> httpx.Request:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        headers = {} if content is None else {"Content-Type": "application/json"}
        timeout = self._http.timeout
        if read_seconds is not None:
            timeout = httpx.Timeout(CONNECT_SECONDS, read=read_seconds)
        return self._http.build_request(
            method, self._base + path, params=given or None, content=content, headers=headers, timeout=timeout
        )

    def _handled(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        tried = self._base
        try:
            return self._http.send(request, stream=stream)
        except _NEVER_SENT:
            self._look_again(tried)
            raise

    def _look_again(self, tried: str) -> None:
        if self._locate is None:
            return
        with self._locating:
            if self._base == tried:  # else another thread has found it already
                self._base = checked_base(self._locate())


class _NotNow(Exception):
    """503 where a stream was asked for."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(_error_text(response))
        self.advised = advised_seconds(response.headers.get("Retry-After"))


def checked_base(base_url: str) -> str:
    """An http URL without a slash at its end. Raises ``InvalidField`` for what is none."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise InvalidField("url", f"{base_url!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidField("url", f"{base_url!r} is not a URL such as http://127.0.0.1:23001")
    return base_url.rstrip("/")


def _segment(field: str, text: str) -> str:
    """``text`` as exactly one segment of a path, dots included: ``..`` must not climb."""
    if not text:
        raise InvalidField(field, "must not be empty")
    try:
        return quote(text, safe="").replace(".", "%2E")
    except UnicodeEncodeError as error:
        raise InvalidField(field, "is not Unicode text: it holds a lone surrogate") from error


def _operation_path(operation_id: str) -> str:
    return f"{OPERATIONS}/{_segment('operation_id', operation_id)}"


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnexpectedAnswer(f"the server's answer is no {kind.__name__}: {error}") from error


def _reason(response: httpx.Response) -> str | None:
    """The text of an error body of the contract, None for any other body."""
    try:
        body = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    reason = body.get("error") if isinstance(body, dict) else None
    return reason if isinstance(reason, str) else None


def _error_text(response: httpx.Response) -> str:
    return _reason(response) or f"the server answered {response.status_code} without a reason"


def _refuse(response: httpx.Response) -> NoReturn:
    """Raise what an answer other than success, and other than "not now", says.

    A 404 without our error body comes from somebody else, and does not say that there is no operation.
    """
    known: dict[int, type[MunimentError]] = {400: RequestError, 404: NotFound, 409: ConflictAnswer}
    kind, reason = known.get(response.status_code), _reason(response)
    if kind is None or reason is None:
        raise UnexpectedAnswer(f"{_error_text(response)} (status {response.status_code})")
    raise kind(reason)


def _same(receipt: Receipt, operation_id: str, payload_hash: str) -> Receipt:
    if receipt.operation_id != operation_id or receipt.payload_hash != payload_hash:
        raise UnexpectedAnswer(f"the server answered '{operation_id}' with the receipt of another operation")
    return receipt


def _no_gap(event: Event, last: int, operation_id: str) -> None:
    if event.operation_id != operation_id or event.sequence != last + 1:
        raise UnexpectedAnswer(
            f"a gap in the events of '{operation_id}': after {last} came {event.sequence} "
            f"of '{event.operation_id}'"
        )
