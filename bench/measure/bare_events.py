"""The least that could fan out events: frames made once, joined over 20 ms, the same bytes to everybody.

``python -m bench.measure.bare_events`` prints its URL and takes the requests of ``event_server``. No ledger,
no queue, no history: what it delivers is what this machine and the HTTP server can do.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from bench.measure.event_server import DETAIL, Asked
from bench.measure.serving import serve
from muniment.core import receipts, replay
from muniment.interfaces.http.app import Application
from muniment.model import journal
from muniment.model.operation import State

TICK_SECONDS: Final = 0.02
Message = Any


class BareEvents:
    """One operation at a time."""

    def __init__(self) -> None:
        self._log: list[bytes] = []
        self._more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = False

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Serve one request."""
        if scope["method"] == "POST":
            await self._post((await receive())["body"])
            await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await self._stream(send)

    async def _post(self, body: bytes) -> None:
        asked = msgspec.json.decode(body, type=Asked)
        if asked.rate is None:
            self._log, self._ended = [_frame(asked.operation_id, 1)], False
            return
        loop = asyncio.get_running_loop()
        began, count, made = loop.time(), round(asked.rate * asked.seconds) + 1, 0  # One more for the end.
        while made < count:
            await asyncio.sleep(TICK_SECONDS)
            due = min(count, int((loop.time() - began) * asked.rate))
            frames = [_frame(asked.operation_id, 2 + number) for number in range(made, due)]
            made = due
            if frames:
                self._log.append(b"".join(frames))
                self._ended = made == count
                self._more.set_result(None)
                self._more = loop.create_future()

    async def _stream(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        place = 0
        while True:
            data, place = b"".join(self._log[place:]), len(self._log)
            await send({"type": "http.response.body", "body": data, "more_body": not self._ended})
            if self._ended:
                return
            await self._more


def _frame(operation_id: str, sequence: int) -> bytes:
    moved = journal.Moved(sequence, State.PROCESSING, State.PROCESSING, DETAIL)
    return receipts.frame(receipts.event(operation_id, replay.event_row(1, moved, 1, 0)))


async def made() -> Application:
    """The app."""
    return BareEvents()


if __name__ == "__main__":
    serve(made)
