"""A program that follows operations over many sockets at once: a process of its own, as agents are.

``python -m tests.support.crowd URL SECONDS`` reads groups of followers (``Group``) from its standard input,
one JSON object a line, to an empty line. It prints the name of each group once all of its followers are in
place, and at the end, or when nothing more is waited for, one JSON object with what each has ``Heard``.
"""

import asyncio
import contextlib
import hashlib
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

from tests.support.received import FRAME_ID, READ_BYTES, received

ROOT: Final = Path(__file__).resolve().parents[2]
OPENING: Final = 64
"""Followers of one group that connect at the same time."""


class Group(msgspec.Struct, frozen=True):
    """Followers that do the same."""

    name: str
    request: bytes
    count: int = 1
    events: int = 0
    """In place are those that have received so many; without a number, those that have received a head."""
    early: bool = False
    """They ask before the operation exists, again and again; in place are those that were told so."""
    unread: bool = False
    """They never read until all others have heard the end, and are in place when they have asked."""


class Heard(msgspec.Struct):
    """What the followers of a group heard."""

    frames: dict[str, int] = {}
    """SHA-256 of all event frames, and how many followers heard these."""
    sequences: dict[str, int] = {}
    ended: int = 0
    """Followers whose stream ended with its last chunk."""
    refusals: int = 0
    """How often one was told that there is no such operation."""
    broken: int = 0
    """Followers whose connection was not to be had, or closed without an answer."""


class Crowd:
    """The program as a child, for tests."""

    def __init__(self, url: str, groups: Sequence[Group], seconds: float = 60.0) -> None:
        """``seconds`` are given to all followers to be in place, and then to hear the end."""
        self._process = Popen(
            [sys.executable, "-m", "tests.support.crowd", url, str(seconds)],
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(msgspec.json.encode(group) + b"\n" for group in groups) + b"\n")
        self._process.stdin.flush()
        self._left = {group.name for group in groups}

    def in_place(self) -> None:
        """Return when every follower is in place."""
        assert self._process.stdout is not None
        while self._left:
            line = self._process.stdout.readline()
            assert line, f"the crowd ended before these were in place: {self._left}"
            self._left.remove(line.decode().strip())

    def heard(self) -> dict[str, Heard]:
        """Return when every follower has heard the end."""
        self.in_place()
        assert self._process.stdout is not None
        return msgspec.json.decode(self._process.stdout.read(), type=dict[str, Heard])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def many_descriptors() -> Iterator[int]:
    """Take as many file descriptors as this process may have, and give the limit back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The program


class _Follower:
    """One connection."""

    def __init__(self, url: str, group: Group) -> None:
        self._address = urlsplit(url)
        self._group = group
        self.placed = asyncio.Event()
        self.raw = bytearray()
        self.refusals = 0

    async def follow(self, others_are_done: asyncio.Event) -> None:
        """Ask until there is a stream, and hear it to its end."""
        with contextlib.suppress(ConnectionError):
            while not await self._ask(others_are_done):
                self.refusals += 1
                self.placed.set()
                await asyncio.sleep(0.001)
        self.placed.set()

    async def _ask(self, others_are_done: asyncio.Event) -> bool:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        if self._group.unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # Before the handshake.
        loop = asyncio.get_running_loop()
        with connection:
            await loop.sock_connect(connection, (self._address.hostname, self._address.port))
            await loop.sock_sendall(connection, self._group.request)
            if self._group.unread:
                self.placed.set()
                await others_are_done.wait()
            self.raw.clear()
            while data := await loop.sock_recv(connection, READ_BYTES):
                self.raw += data
                if self.raw.startswith(b"HTTP/1.1 404 "):
                    return not self._group.early
                if not self.placed.is_set() and self._is_placed():
                    self.placed.set()
                if self.raw.endswith(b"0\r\n\r\n"):
                    break
            return True

    def _is_placed(self) -> bool:
        if self._group.early:
            return False
        return b"\r\n\r\n" in self.raw and self.raw.count(b"\nevent: ") >= self._group.events


async def _run(
    url: str, seconds: float, groups: Sequence[Group], tell: Callable[[str], None]
) -> dict[str, Heard]:
    others_are_done = asyncio.Event()
    crowd = {group.name: [_Follower(url, group) for _ in range(group.count)] for group in groups}
    readers: list[asyncio.Task[None]] = []
    unread: list[asyncio.Task[None]] = []

    async def place(group: Group) -> None:
        opening = asyncio.Semaphore(OPENING)

        async def one(follower: _Follower) -> None:
            async with opening:
                following = asyncio.create_task(follower.follow(others_are_done))
                (unread if group.unread else readers).append(following)
                await follower.placed.wait()

        await asyncio.gather(*map(one, crowd[group.name]))
        tell(group.name)

    async with asyncio.timeout(seconds):
        await asyncio.gather(*map(place, groups))
    _, late = await asyncio.wait(readers, timeout=seconds)
    others_are_done.set()
    _, later = await asyncio.wait(unread or readers, timeout=seconds)
    for task in late | later:
        task.cancel()
    await asyncio.gather(*readers, *unread, return_exceptions=True)
    return {name: _heard(followers) for name, followers in crowd.items()}


def _heard(followers: Sequence[_Follower]) -> Heard:
    frames: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    heard = Heard(refusals=sum(each.refusals for each in followers))
    for each in followers:
        came = received(bytes(each.raw))
        frames[hashlib.sha256(came.frames).hexdigest()] += 1
        sequences[b",".join(FRAME_ID.findall(came.frames)).decode()] += 1
        heard.ended += came.ended
        heard.broken += came.status is None
    heard.frames, heard.sequences = dict(frames), dict(sequences)
    return heard


def _main() -> None:
    def tell(name: str) -> None:
        print(name, flush=True)

    groups = [msgspec.json.decode(line, type=Group) for line in iter(sys.stdin.buffer.readline, b"\n")]
    with many_descriptors():
        heard = asyncio.run(_run(sys.argv[1], float(sys.argv[2]), groups, tell))
    sys.stdout.buffer.write(msgspec.json.encode(heard))


if __name__ == "__main__":
    _main()
