"""A nemesis: seeded faults against a running server, its executor children and its clients' connections."""

import asyncio
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from tests.support.server import Server

Action = Literal["kill the server", "stop the server", "kill a child", "stop a child", "cut", "nothing"]
HAND: Final[Mapping[Action, int]] = {
    "kill the server": 5,
    "stop the server": 3,
    "kill a child": 2,
    "stop a child": 2,
    "cut": 2,
    "nothing": 1,
}
"""One dealt hand: so often each, in a seeded order."""
PAUSE_SECONDS: Final = 0.7
REST_SECONDS: Final = 0.35
"""At least so long lies between the end of one action and the next."""
STOP_SECONDS: Final = (0.7, 1.2)
CHILD_STOP_SECONDS: Final = (0.3, 0.9)
CHILD_WAIT_SECONDS: Final = 20.0
CHILD_COMMAND: Final = b"muniment.executor_wiring"
RESET: Final = struct.pack("ii", 1, 0)
READ_BYTES: Final = 65536


def hand(seed: int, *, times: int = 1) -> list[Action]:
    """The actions of one game: ``times`` hands, each shuffled."""
    dice = random.Random(seed)
    cards = [action for action, count in HAND.items() for _ in range(count)]
    return [action for _ in range(times) for action in dice.sample(cards, k=len(cards))]


class CuttingProxy:
    """A TCP proxy for many connections at once that resets all of them on demand.

    It listens on one ``port`` for ever, while ``upstream`` may go and come back elsewhere; without one, or
    with one that does not answer, a new connection is reset.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cutting-proxy", daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[asyncio.StreamWriter] = set()
        self.port: int = self._listener.getsockname()[1]
        self.upstream: str | None = None

    def cut(self) -> int:
        """Reset every connection, in the middle of whatever passes; return how many clients had one."""

        async def reset() -> int:
            open_now, self._open = self._open, set()
            for writer in open_now:
                _reset(writer)
            return len(open_now) // 2

        return asyncio.run_coroutine_threadsafe(reset(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        serving.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = [writer]
        self._open.add(writer)
        try:
            address = urlsplit(self.upstream or "")
            back, forth = await asyncio.open_connection(address.hostname, address.port or 1)
            pair.append(forth)
            self._open.add(forth)
            passing = [asyncio.ensure_future(each) for each in (_pass(reader, forth), _pass(back, writer))]
            _, left = await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
        except OSError:
            pass  # Nobody serves there now.
        finally:
            self._open.difference_update(pair)
            for each in pair:
                _reset(each)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    known = writer.get_extra_info("socket")
    if known is not None and not writer.transport.is_closing():
        known.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


class Nemesis:
    """Acts against ``server``, which serves behind ``proxy``. ``tally`` counts what really happened."""

    def __init__(self, server: Server, proxy: CuttingProxy, seed: int) -> None:
        self._server = server
        self._proxy = proxy
        self._dice = random.Random(seed)
        self.tally: Counter[Action] = Counter()
        self.clients_cut = 0

    def play(self, actions: Sequence[Action]) -> None:
        """Act after act, each at its moment; in the end the server runs."""
        acts: Mapping[Action, Callable[[], object]] = {
            "kill the server": self._kill,
            "stop the server": lambda: self._stop(self._server.pid, STOP_SECONDS),
            "kill a child": lambda: os.kill(self._child(), signal.SIGKILL),
            "stop a child": lambda: self._stop(self._child(), CHILD_STOP_SECONDS),
            "cut": self._cut,
            "nothing": lambda: None,
        }
        began = time.monotonic()
        for action in actions:
            pause = began + PAUSE_SECONDS - time.monotonic()
            time.sleep(max(REST_SECONDS, pause) * self._dice.uniform(0.7, 1.3))
            assert is_alive(self._server.pid), f"the server ended by itself:\n{self._server.log[-6000:]}"
            began = time.monotonic()
            acts[action]()
            self.tally[action] += 1
        time.sleep(REST_SECONDS)

    def _kill(self) -> None:
        self._proxy.upstream = None
        self._server.kill()
        self._proxy.cut()
        self._server.start()
        self._proxy.upstream = self._server.url

    def _cut(self) -> None:
        self.clients_cut += self._proxy.cut()

    def _child(self) -> int:
        """An executor child; one that was killed has a successor in a moment."""
        give_up = time.monotonic() + CHILD_WAIT_SECONDS
        while not (found := children(self._server.pid)):
            assert time.monotonic() < give_up, f"no executor child:\n{self._server.log[-6000:]}"
            time.sleep(0.01)
        return self._dice.choice(found)

    def _stop(self, pid: int, seconds: tuple[float, float]) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self._dice.uniform(*seconds))
        finally:
            with suppress(ProcessLookupError):  # Whoever missed it meanwhile may have ended it.
                os.kill(pid, signal.SIGCONT)


def children(parent: int) -> list[int]:
    """The executor children of a server, lowest number first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text("ascii", "replace").rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state not in "ZX":
                command = stat.with_name("cmdline").read_bytes()
                found += [int(stat.parent.name)] if CHILD_COMMAND in command else []
        except (FileNotFoundError, ProcessLookupError):
            continue  # Gone between the two reads.
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
