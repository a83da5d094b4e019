"""Sending a stream: what has been sent is not kept."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from muniment.interfaces.http.event_stream import send_events


class Chunk(bytes):
    """Bytes that tell when nobody holds them any more."""

    gone = 0

    def __del__(self) -> None:
        Chunk.gone += 1


def test_an_idle_stream_does_not_keep_what_it_has_sent() -> None:
    """It waits for seconds at a time, and there are thousands of streams."""

    async def scenario() -> tuple[list[int], int]:
        idle, over, sizes = asyncio.Event(), asyncio.Event(), []

        async def chunks() -> AsyncGenerator[bytes, None]:
            yield Chunk(b"x" * 1000)
            idle.set()
            await over.wait()

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sizes.append(len(message.get("body", b"")))

        sending = asyncio.create_task(send_events(chunks(), receive, send))
        await idle.wait()
        kept = 1 - Chunk.gone
        over.set()
        await sending
        return sizes, kept

    sizes, kept = asyncio.run(scenario())
    assert sizes == [0, 1000, 0]
    assert kept == 0
