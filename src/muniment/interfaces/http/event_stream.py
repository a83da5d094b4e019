"""Sending server-sent events until they end or the client leaves, whichever is first."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from muniment.interfaces.http.exchange import Receive, Send

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # A proxy that collects frames before it passes them on breaks following.
)


async def send_events(chunks: AsyncGenerator[bytes, None], receive: Receive, send: Send) -> None:
    """Send 200 and the chunks. ``chunks`` is closed on return, and no task is left, however the stream ends.

    What ``chunks`` raises is raised here, and the response is left incomplete: the client sees a cut
    connection, never a stream that seems to have ended.
    """
    async with aclosing(chunks):
        sending = asyncio.ensure_future(_send_all(chunks, send))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            outcomes = await asyncio.gather(sending, leaving, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _send_all(chunks: AsyncGenerator[bytes, None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
    async for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        del (
            chunk
        )  # An idle stream would keep it until the next one comes, and that for each of its followers.
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
