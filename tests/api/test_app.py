"""The application by itself: a bug answers 500 and ends the server, a stream leaves nothing behind.

A bug cannot be had from the real service on purpose, so a stand-in has one.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, cast

import pytest
import structlog.testing

from muniment.config import Config
from muniment.errors import Corrupt, InvariantBroken, LedgerUnavailable, ModelMismatch, NotFound
from muniment.interfaces.http import create_app
from muniment.interfaces.http.event_stream import send_events
from muniment.interfaces.http.exchange import Message, Receive, Send
from muniment.interfaces.http.service import Service
from muniment.model.readiness import Readiness

RECEIPT: Final = b"/api/v2/operations/x"
EVENTS: Final = b"/api/v2/operations/x/events"


class Failing:
    """A service whose every answer is an error, and whose streams break after ``chunks``."""

    def __init__(self, error: BaseException, *chunks: bytes) -> None:
        self.config = Config()
        self.ended_by: list[BaseException] = []
        self.closed = False
        self._error = error
        self._chunks = chunks

    async def receipt(self, operation_id: str) -> Any:
        raise self._error

    async def ready(self) -> Readiness:
        raise self._error

    async def follow(self, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        if not self._chunks:
            raise self._error
        return self._broken()

    async def _broken(self) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in self._chunks:
                yield chunk
            raise self._error
        finally:
            self.closed = True

    def fatal(self, error: BaseException) -> None:
        self.ended_by.append(error)


def asked(service: Failing, raw_path: bytes, method: str = "GET") -> list[Message]:
    """What the application sends for one request; the client stays."""
    sent: list[Message] = []

    async def receive() -> Message:
        if sent:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": raw_path.decode(),
        "raw_path": raw_path,
        "query_string": b"",
        "headers": [],
    }
    asyncio.run(asyncio.wait_for(run(create_app(cast("Service", service))(scope, receive, send)), 10))
    return sent


async def run(work: Awaitable[None]) -> None:
    """Await the work, and find no task that it left."""
    before = asyncio.all_tasks()
    await work
    assert asyncio.all_tasks() == before


def status_and_error(sent: list[Message]) -> tuple[int, dict[str, str]]:
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("raw_path", [RECEIPT, EVENTS, b"/ready"])
@pytest.mark.parametrize("error", [KeyError("secret"), InvariantBroken("secret"), ModelMismatch("secret")])
def test_a_bug_is_500_logged_and_not_told(raw_path: bytes, error: Exception) -> None:
    service = Failing(error)
    with structlog.testing.capture_logs() as logged:
        status, body = status_and_error(asked(service, raw_path))

    assert (status, list(body)) == (500, ["error"])
    assert "secret" not in body["error"]
    assert [(line["event"], line["path"]) for line in logged] == [("request failed", raw_path.decode())]
    assert "secret" in str(logged[0]["exc_info"])


@pytest.mark.parametrize("raw_path", [RECEIPT, EVENTS])
def test_a_broken_invariant_ends_the_server_and_another_bug_does_not(raw_path: bytes) -> None:
    broken, other = Failing(InvariantBroken("a bug")), Failing(ValueError("a bug"))
    with structlog.testing.capture_logs():
        asked(broken, raw_path)
        asked(other, raw_path)

    assert [str(error) for error in broken.ended_by] == ["a bug"]
    assert other.ended_by == []


@pytest.mark.parametrize("error", [LedgerUnavailable(), Corrupt("ledger.db: damaged")])
def test_what_is_not_known_to_be_wrong_is_503(error: Exception) -> None:
    for raw_path in (RECEIPT, EVENTS):
        sent = asked(Failing(error), raw_path)
        status, body = status_and_error(sent)
        assert status == 503
        assert body["error"].startswith("operation ledger unavailable")
        assert (b"retry-after", b"1") in sent[0]["headers"]


def test_hidden_and_unknown_have_the_words_of_the_service() -> None:
    assert status_and_error(asked(Failing(NotFound("operation 'x' not found")), RECEIPT)) == (
        404,
        {"error": "operation 'x' not found"},
    )


@pytest.mark.parametrize(
    ("error", "ends"), [(LedgerUnavailable(), False), (InvariantBroken("a bug"), True), (KeyError(), False)]
)
def test_a_stream_that_breaks_is_cut_and_never_completed(error: Exception, ends: bool) -> None:
    service = Failing(error, b"id: 1\n\n", b"id: 2\n\n")
    with structlog.testing.capture_logs() as logged:
        sent = asked(service, EVENTS)

    assert [message.get("body") for message in sent] == [None, b"id: 1\n\n", b"id: 2\n\n"]
    assert all(message.get("more_body", True) for message in sent)
    assert len(logged) == 1
    assert service.closed
    assert len(service.ended_by) == ends


def test_only_http_is_spoken() -> None:
    application = create_app(cast("Service", Failing(KeyError())))

    with pytest.raises(NotImplementedError):
        asyncio.run(
            cast("Any", application({"type": "websocket"}, cast("Receive", None), cast("Send", None)))
        )


# Streams from the inside.


class Following:
    """A stream whose frames are given by hand, and which notices that it is closed."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = False
        self.left = asyncio.Event()
        self.sent: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while (frame := await self.frames.get()) is not None:
                yield frame
        finally:
            self.closed = True

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.room.wait()
        self.sent.append(message.get("body", b""))

    def serve(self) -> "asyncio.Task[None]":
        return asyncio.create_task(send_events(self.chunks(), self.receive, self.send))


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def ends_when_the_client_leaves(following: Following, serving: "asyncio.Task[None]") -> None:
    following.left.set()
    await asyncio.wait_for(serving, 10)


async def ends_when_cancelled(following: Following, serving: "asyncio.Task[None]") -> None:
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 10)


@pytest.mark.parametrize("end", [ends_when_the_client_leaves, ends_when_cancelled])
@pytest.mark.parametrize("blocked", [False, True])
def test_a_stream_that_ends_early_is_closed_with_its_tasks(
    end: Callable[[Following, "asyncio.Task[None]"], Awaitable[None]], blocked: bool
) -> None:
    async def scenario() -> None:
        following = Following()
        before = asyncio.all_tasks()
        serving = following.serve()
        following.frames.put_nowait(b"1")
        await soon(lambda: following.sent == [b"", b"1"])
        if blocked:  # The client does not read: the frame is handed over and cannot be sent.
            following.room.clear()
            following.frames.put_nowait(b"2")
            await soon(following.frames.empty)
            await asyncio.sleep(0.01)
        await end(following, serving)

        assert following.closed
        assert following.sent == [b"", b"1"]
        assert asyncio.all_tasks() == before

    asyncio.run(scenario())


def test_control_without_closing_a_blocked_stream_stays_open() -> None:
    async def scenario() -> None:
        following = Following()
        following.frames.put_nowait(b"1")
        chunks = following.chunks()
        await anext(chunks)

        assert not following.closed
        await chunks.aclose()
        assert following.closed

    asyncio.run(scenario())


def test_a_stream_that_ends_by_itself_is_completed() -> None:
    async def scenario() -> None:
        following = Following()
        before = asyncio.all_tasks()
        serving = following.serve()
        for frame in (b"1", b"2", None):
            following.frames.put_nowait(frame)
        await asyncio.wait_for(serving, 10)

        assert following.sent == [b"", b"1", b"2", b""]
        assert following.closed
        assert asyncio.all_tasks() == before

    asyncio.run(scenario())
