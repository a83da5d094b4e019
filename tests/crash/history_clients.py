"""Eight clients that race for the same IDs, and write down what they are told (R26).

``python -m tests.crash.history_clients PORT SEED LEAST FILE`` works until its standard input ends and LEAST
calls were ok, then writes all records to FILE as JSON. It prints a line after the first ``WARM_CALLS``. Each
client has a connection of its own. None of them knows of the faults; a call that gets no whole answer is
*unknown*, and the client goes on.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.support import submissions
from tests.support.history import Record, Told, Verb, noted
from tests.support.live import OPERATIONS, Reply, post_bytes, request_bytes

CLIENTS: Final = 8
ANSWER_SECONDS: Final = 0.6
STREAM_SECONDS: Final = 2.5
THINK_SECONDS: Final = (0.01, 0.1)
AFTER_UNKNOWN_SECONDS: Final = 0.15
RECENT: Final = 12
"""So many of the newest IDs are the ones that clients race for."""
PAGE: Final = 40
RESUMES_MAX: Final = 4
WARM_CALLS: Final = 50
WARM: Final = b"at work\n"
FAILURES: Final = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError)
NOUNS: Final = ("kettle", "ledger", "lantern", "anchor", "orchard", "violin", "harbour", "pencil", "saddle")
VERBS: Final = {"submit": 50, "get": 12, "events": 9, "memory": 9, "recall": 6, "list": 5, "invalid": 4}


# What is submitted: all of it follows from the number of an operation and the variant


def operation(number: int, variant: int) -> dict[str, Any]:
    """The submission under one of the shared IDs. Variants differ in their payload, so they conflict."""
    stream, name = f"chores-{number // 20}", f"op-{number:04}"
    match number % 10:
        case 0:
            return submissions.stream(name, stream, description=f"by version {variant}")
        case 1 | 5:
            step = {
                "stream_name": stream,
                "name": f"step {variant}",
                "idempotency_key": f"key-{number // 10}",
            }
            return submissions.envelope(name, "add_task_step", step)
        case 6 | 8:
            key = {"stream_name": stream, "idempotency_key": f"key-{number // 10}", "result": {"by": variant}}
            return submissions.envelope(name, "complete_step", key)
        case _:
            return submissions.memory(name, _text(number, variant), session_id=f"session-{number % 3}")


def _text(number: int, variant: int) -> str:
    noun, other = NOUNS[number % len(NOUNS)], NOUNS[(number // 9 + variant) % len(NOUNS)]
    first = f"In version {variant} the {noun} {number} stands beside the {other}."
    if number % 7:
        return first
    more = (f"Line {line} says that {noun} {number} was moved {line} times." for line in range(9))
    return " ".join((first, *more))


INVALID: Final[tuple[Callable[[str], dict[str, Any]], ...]] = (
    # The hash of another payload; a blank content; a field that nobody knows.
    lambda name: {**submissions.memory(name, "Never kept."), "payload_hash": submissions.payload_hash({})},
    lambda name: submissions.memory(name, "  "),
    lambda name: submissions.memory(name, "Never kept.", catgories=["a"]),
)


class Known:
    """What the clients tell one another, so that they meet."""

    def __init__(self) -> None:
        self.newest = 0
        self.sent: dict[str, dict[str, Any]] = {}
        self.stood: dict[str, str] = {}
        self.memories: dict[str, str] = {}
        """Key to operation ID."""

    def see(self, shown: Told) -> None:
        """Remember an operation that the server has shown."""
        self.stood[shown.operation_id] = shown.state
        if shown.memory is not None:
            self.memories[shown.memory] = shown.operation_id


class Connection:
    """One connection, opened when it is needed, dropped at the first failure."""

    def __init__(
        self, port: int, answer_seconds: float = ANSWER_SECONDS, stream_seconds: float = STREAM_SECONDS
    ) -> None:
        self._port = port
        self._answer_seconds = answer_seconds
        self._stream_seconds = stream_seconds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, request: bytes) -> Reply | None:
        """Send a request; return its whole answer, or None where there is none in time."""
        with self._dropped_on_failure():
            async with asyncio.timeout(self._answer_seconds):
                reader, status, headers = await self._asked(request)
                return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
        return None

    async def follow(self, request: bytes, frames: list[bytes]) -> Reply | None:
        """Add the frames of a stream as they come; return once the server has ended it in order."""
        with self._dropped_on_failure():
            async with asyncio.timeout(self._stream_seconds):
                reader, status, headers = await self._asked(request)
                if "content-length" in headers:
                    return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
                rest = b""
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    rest += (await reader.readexactly(size + 2))[:-2]
                    *whole, rest = rest.split(b"\n\n")
                    frames += [frame + b"\n\n" for frame in whole if not frame.startswith(b":")]
                await reader.readexactly(2)
                return Reply(status, headers, b"")
        return None

    async def _asked(self, request: bytes) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        pairs = (line.partition(":") for line in lines)
        return reader, int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except FAILURES:
            self.close()

    def close(self) -> None:
        """Close at once, whatever is under way."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


class Client:
    """One client: chooses what to do, does it, and writes down what came of it."""

    def __init__(self, number: int, port: int, seed: int, known: Known) -> None:
        self._number = number
        self._known = known
        self._dice = random.Random(f"{seed}/{number}")
        self._connection = Connection(port)
        self.records: list[Record] = []

    async def work(self, ending: asyncio.Event) -> None:
        """Call after call until the end is asked for."""
        try:
            while not ending.is_set():
                [verb] = self._dice.choices(list(VERBS), list(VERBS.values()))
                await getattr(self, f"_{verb}")()
                unknown = bool(self.records) and self.records[-1].outcome == "unknown"
                await asyncio.sleep(AFTER_UNKNOWN_SECONDS if unknown else self._dice.uniform(*THINK_SECONDS))
        finally:
            self._connection.close()

    # What a client does

    async def _submit(self) -> None:
        dice, known = self._dice, self._known
        if dice.random() < 0.55:
            known.newest += 1
        back = dice.choice((0, 0, 1, dice.randrange(RECENT), dice.randrange(known.newest + 1)))
        number = known.newest - back
        body = operation(max(0, number), dice.choice((0, 0, 0, 0, 1, 2)))
        candidates = list(known.stood)[-RECENT:]
        if body["kind"] == "add_memory" and candidates and dice.random() < 0.2:
            body["dependencies"] = [dice.choice(candidates)]
        record = await self._submitted(body)
        while record.outcome == "unknown" and dice.random() < 0.7:
            await asyncio.sleep(AFTER_UNKNOWN_SECONDS)
            record = await self._submitted(body)

    async def _invalid(self) -> None:
        wrong = self._dice.choice(INVALID)
        await self._submitted(wrong(f"op-{self._known.newest + self._dice.randrange(3):04}"))

    async def _get(self) -> None:
        name = self._some(self._known.sent, "op-0000")
        await self._called("get", name, f"{OPERATIONS}/{name}")

    async def _list(self) -> None:
        last = self._some(self._known.stood, "")
        query = f"?limit={PAGE}" + (f"&after={last}" if last else "")
        await self._called("list", last, OPERATIONS + query)

    async def _memory(self) -> None:
        if self._known.memories:
            key = self._some(self._known.memories, "")
            await self._called("memory", key, f"/api/v2/memories/{key}")

    async def _recall(self) -> None:
        number = self._dice.randrange(self._known.newest + 1)
        query = _text(number, 0)
        if "Line" not in query:
            body = json.dumps({"query": query, "limit": 5}).encode()
            await self._called("recall", query, "/api/v2/recall", body)

    async def _events(self) -> None:
        """Follow an operation to its end, from the last event that came where the stream is cut."""
        name, after = self._some(self._known.stood, "op-0000"), 0
        for _ in range(RESUMES_MAX):
            frames: list[bytes] = []
            began = time.monotonic()
            path = f"{OPERATIONS}/{name}/events?after={after}"
            reply = await self._connection.follow(request_bytes("GET", path), frames)
            self._note("events", name, began, reply, after=after, frames=tuple(frames))
            after += len(frames)
            if reply is not None:
                return
            await asyncio.sleep(AFTER_UNKNOWN_SECONDS)

    # How it is written down

    async def _submitted(self, body: dict[str, Any]) -> Record:
        name = body["operation_id"]
        self._known.sent[name] = body
        began = time.monotonic()
        reply = await self._connection.call(post_bytes(body))
        return self._note(
            "submit", name, began, reply, payload_hash=body["payload_hash"], payload=body["payload"]
        )

    async def _called(self, verb: Verb, subject: str, path: str, body: bytes = b"") -> None:
        began = time.monotonic()
        reply = await self._connection.call(request_bytes("POST" if body else "GET", path, body))
        self._note(verb, subject, began, reply)

    def _note(self, verb: Verb, subject: str, began: float, reply: Reply | None, **more: Any) -> Record:
        record = noted(self._number, verb, subject, began, reply, **more)
        for shown in record.told:
            self._known.see(shown)
        self.records.append(record)
        return record

    def _some(self, names: Mapping[str, object], otherwise: str) -> str:
        """One of the newest as often as one of all."""
        found = list(names)
        near = found[-RECENT:] if self._dice.random() < 0.5 else found
        return self._dice.choice(near) if near else otherwise


async def clients(port: int, seed: int, least: int) -> list[Record]:
    """Let all clients work until standard input ends and ``least`` calls were ok; return all records."""
    known, ending = Known(), asyncio.Event()
    all_of_them = [Client(number, port, seed, known) for number in range(CLIENTS)]

    async def answered(count: int) -> None:
        while sum(record.outcome == "ok" for client in all_of_them for record in client.records) < count:
            await asyncio.sleep(0.02)

    async def end() -> None:
        await answered(WARM_CALLS)
        sys.stdout.buffer.write(WARM)
        sys.stdout.buffer.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await answered(least)
        ending.set()

    await asyncio.gather(end(), *(client.work(ending) for client in all_of_them))
    return [record for client in all_of_them for record in client.records]


if __name__ == "__main__":
    records = asyncio.run(clients(*map(int, sys.argv[1:4])))
    Path(sys.argv[4]).write_bytes(msgspec.json.encode(records))
