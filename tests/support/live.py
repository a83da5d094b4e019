"""What tests do to a running server: talk to it with no HTTP library between, find its executor, patch it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import httpx

from tests.support.seed_contract import OURS, SEED
from tests.support.server import SOURCE, Server, group

ROOT: Final = SOURCE.parent
OPERATIONS: Final = "/api/v2/operations"


class Reply(NamedTuple):
    """A whole HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(method: str, path: str, body: bytes = b"", *, close: bool = False) -> bytes:
    """One HTTP/1.1 request as it goes over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    ending = "connection: close\r\n" if close else ""
    return f"{head}{ending}content-length: {len(body)}\r\n\r\n".encode() + body


def post_bytes(body: Mapping[str, Any], *, close: bool = False) -> bytes:
    """The request that submits an operation."""
    return request_bytes("POST", OPERATIONS, json.dumps(body).encode(), close=close)


class Wire:
    """One kept connection, for thousands of requests in a row or 32 at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Self]:
        """A connection to a server, closed at the end of the block."""
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, request: bytes) -> Reply:
        """Send a request made by ``request_bytes`` and return its whole response."""
        self._writer.write(request)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        body = await self._reader.readexactly(int(headers["content-length"]))
        return Reply(int(first.split()[1]), headers, body)

    async def post(self, body: Mapping[str, Any]) -> Reply:
        """Submit an operation."""
        return await self.send(post_bytes(body))

    async def get(self, path: str) -> Reply:
        return await self.send(request_bytes("GET", path))


def judge(method: str, path: str, reply: Reply) -> None:
    """Raise ``ContractBrokenError`` for a response that the contract does not declare."""
    request = httpx.Request(method, "http://localhost" + path)
    for contract in (OURS, SEED):
        if contract.knows(request.url.raw_path):
            contract.check(request, reply.status, httpx.Headers(reply.headers), reply.body)


def executor_pid(server: Server, role: str = "ingest", seconds: float = 30.0) -> int:
    """The process of an executor child; waits until there is one."""
    give_up = time.monotonic() + seconds
    while True:
        for pid, command in group(server.pid).items():
            if command.endswith(f"muniment.executor_wiring\0{role}\0".encode()):
                return pid
        assert time.monotonic() < give_up, f"no {role} child:\n{server.log}"
        time.sleep(0.01)


def patched(directory: Path, code: str) -> dict[str, str]:
    """The environment of a server that runs ``code`` first of all: how a planted fault gets into it."""
    directory.mkdir(parents=True, exist_ok=True)
    guarded = "import sys\nif 'serve' in sys.orig_argv:\n" + "".join(
        f"    {line}\n" for line in code.strip().splitlines()
    )
    (directory / "sitecustomize.py").write_text(guarded, "utf-8")
    return {"PYTHONPATH": os.pathsep.join(map(str, (directory, SOURCE, ROOT)))}
