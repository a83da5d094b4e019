"""R8: the reply to a POST is cut after every one of its bytes, and so is the request: one operation, whole.

The client does what the contract asks of it: it repeats the same body. Nothing is stored by half or twice.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from muniment import wiring
from tests.support import submissions
from tests.support.live import OPERATIONS, Wire, judge, patched, post_bytes
from tests.support.lossy_proxy import LossyProxy
from tests.support.server import Server

REPLY_CASES_MIN: Final = 750
REQUEST_CASES_MIN: Final = 350
SETTLE_SECONDS: Final = 60.0
CONTENT: Final = "The ferry to the island leaves at seven, and on Sundays at nine."


def submission(name: str) -> dict[str, object]:
    """Every one has the same length on the wire, and so has its reply."""
    return submissions.memory(f"lost-{name}", CONTENT, session_id=name)


def through(proxy: LossyProxy, request: bytes) -> bytes:
    """Send a request; return what arrived of the reply until the connection ended."""
    arrived = b""
    with socket.create_connection(("127.0.0.1", proxy.port), 30) as client:
        client.settimeout(30)
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
            while data := client.recv(65536):
                arrived += data
    return arrived


async def settled(wire: Wire, operation_id: str) -> dict[str, object]:
    give_up = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while True:
        reply = await wire.get(f"{OPERATIONS}/{operation_id}")
        assert reply.status == 200, f"{operation_id}: {reply}"
        receipt: dict[str, object] = reply.json()
        if receipt["state"] in ("committed", "rejected"):
            return receipt
        assert asyncio.get_running_loop().time() < give_up, receipt
        await asyncio.sleep(0.02)


async def listed(wire: Wire) -> list[str]:
    """Every operation of the store, page by page."""
    found: list[str] = []
    after = ""
    while True:
        page = (await wire.get(f"{OPERATIONS}?limit=200{after}")).json()
        found += [each["operation_id"] for each in page["operations"]]
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"


async def lose_replies(url: str, proxy: LossyProxy, cuts: Iterable[int]) -> int:
    """For each of ``cuts``, lose the reply to a new operation after so many bytes; every third time again.

    Returns how many replies were really cut. Raises AssertionError unless each is one operation, one memory.
    """
    async with Wire.open(url) as wire:
        before = proxy.cuts
        names = {cut: f"{cut:04d}" for cut in cuts}
        for cut, name in names.items():
            await lose(wire, proxy, submission(name), cut, (202,) if cut % 3 else (202, 200))
        await all_stand(wire, names)
    return proxy.cuts - before


async def lose(
    wire: Wire, proxy: LossyProxy, body: dict[str, object], cut: int, statuses: Iterable[int]
) -> None:
    """Post once for each of ``statuses``, which is what the server says and the client does not hear."""
    proxy.reply_bytes = cut
    for status in statuses:
        arrived = await asyncio.to_thread(through, proxy, post_bytes(body))
        assert arrived == proxy.replied[:cut], f"cut {cut}: {arrived!r} of {proxy.replied!r}"
        head = b"HTTP/1.1 %d " % status
        assert proxy.replied.startswith(head), f"cut {cut}: not {status} but {proxy.replied!r}"
    again = await wire.post(body)
    assert again.status == 200, f"cut {cut}: repeated, and answered {again}"
    if cut % 10 == 0:
        judge("POST", OPERATIONS, again)
    assert again.json()["payload_hash"] == body["payload_hash"]


async def all_stand(wire: Wire, names: Mapping[int, str]) -> None:
    """Each operation has ended as one memory, and a repetition is answered with its receipt."""
    memories = set()
    for cut, name in names.items():
        receipt = await settled(wire, f"lost-{name}")
        again = await wire.post(submission(name))
        assert (again.status, again.json()) == (200, receipt), f"cut {cut}"
        assert receipt["state"] == "committed", f"cut {cut}: {receipt}"
        result = receipt["result"]
        assert isinstance(result, dict)
        memory = (await wire.get(f"/api/v2/memories/{result['id']}")).json()
        assert (memory["content"], memory["operation_id"]) == (CONTENT, f"lost-{name}")
        memories.add(memory["id"])
    assert len(memories) == len(names)


@contextlib.contextmanager
def proxied(server: Server) -> Iterator[LossyProxy]:
    with LossyProxy(server.url) as proxy:
        yield proxy


async def reply_length(proxy: LossyProxy) -> int:
    """How long the reply to a first submission is: the whole of one is let through."""
    proxy.reply_bytes = None
    async with Wire.open(f"http://127.0.0.1:{proxy.port}") as wire:
        assert (await wire.post(submission("full"))).status == 202
        return len(proxy.replied)


def test_reply_lost_after_every_byte(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        server.wait_ready("search_ready")
        with proxied(server) as proxy:
            length = asyncio.run(reply_length(proxy))
            lost = asyncio.run(lose_replies(server.url, proxy, range(length)))
            stored = asyncio.run(everything(server.url))
        server.terminate()
    print(f"replies cut: {lost}, after each of the bytes 0 to {length - 1}, every third of them twice")
    assert lost == length + len(range(0, length, 3))
    assert lost >= REPLY_CASES_MIN
    assert sorted(stored) == sorted(["lost-full", *(f"lost-{cut:04d}" for cut in range(length))])
    assert wiring.check(tmp_path / "store").findings == ()


async def everything(url: str) -> list[str]:
    async with Wire.open(url) as wire:
        return await listed(wire)


def test_request_cut_after_every_byte_stores_nothing(tmp_path: Path) -> None:
    body = submission("half")
    request = post_bytes(body)
    with Server(tmp_path / "store") as server:
        server.wait_ready()
        with proxied(server) as proxy:
            for cut in range(len(request)):
                proxy.request_bytes = cut
                assert through(proxy, request) == b"", f"cut {cut}"
            assert proxy.cuts == len(request)

        async def after() -> None:
            async with Wire.open(server.url) as wire:
                # Whatever the server still had to read of the cut requests, it has read before this one.
                assert (await wire.post(submission("full"))).status == 202
                assert (await wire.get(f"{OPERATIONS}/lost-half")).status == 404
                assert await listed(wire) == ["lost-full"]
                first = await wire.post(body)
                assert (first.status, first.json()["progress_seq"]) == (202, 1)
                assert (await settled(wire, "lost-half"))["state"] == "committed"
                assert await listed(wire) == ["lost-full", "lost-half"]

        asyncio.run(after())
        server.terminate()
    print(f"requests cut: {len(request)}, after byte 0 to {len(request) - 1}")
    assert len(request) >= REQUEST_CASES_MIN
    assert wiring.check(tmp_path / "store").findings == ()


# Controls: servers with a planted fault, which the same steps must find.

ANSWERS_BEFORE_THE_LEDGER: Final = """
import asyncio
from muniment.model.operation import Receipt, State
from muniment.runtime import service
from muniment.stages import accept

async def submit(self, body):
    request = accept.read(body)
    asked = accept.admission(request, self._limits, account=1, clock=self._clock, entropy=self._entropy)
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, lambda: loop.create_task(self._ledger.write(asked)))
    moment = "2026-01-01T00:00:00.000000Z"
    return service.Submitted(True, Receipt(
        operation_id=request.operation_id, schema_version=2, kind=request.kind,
        payload_hash=request.payload_hash, dependencies=(), state=State.ACCEPTED, blocked_by=(), result=None,
        error=None, executor_generation=0, executor_progress_seq=0, executor_exit_count=0,
        executor_last_exit=None, executor_error=None, progress_seq=1, created_at=moment, updated_at=moment))

service.Service.submit = submit
"""
STORES_UNDER_A_FRESH_ID: Final = """
import itertools
import msgspec
from muniment.stages import accept

numbers, read = itertools.count(1000), accept.read
accept.read = lambda body: msgspec.structs.replace(
    read(body), operation_id=f"{read(body).operation_id[:-4]}{next(numbers)}")
"""
STORES_HALF: Final = """
import json
from muniment.interfaces.http import body, handlers

async def read(exchange):
    message = {"type": "http.request", "more_body": True}
    chunks = b""
    while message["type"] == "http.request" and message.get("more_body"):
        message = await exchange.receive()
        chunks += message.get("body", b"")
    try:
        json.loads(chunks)
    except ValueError:
        from tests.support import submissions
        return json.dumps(submissions.memory("lost-guessed", "half")).encode()
    return chunks

handlers.read_json_body = read
"""


@pytest.mark.parametrize(
    "code",
    [ANSWERS_BEFORE_THE_LEDGER, STORES_UNDER_A_FRESH_ID],
    ids=["answers before the ledger", "stores under a fresh ID"],
)
def test_control_a_server_that_forgets_is_noticed(tmp_path: Path, code: str) -> None:
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", code)) as server:
        server.wait_ready("search_ready")
        with proxied(server) as proxy, pytest.raises(AssertionError, match="not 200 but"):
            asyncio.run(lose_replies(server.url, proxy, range(0, 500, 100)))


def test_control_a_server_that_stores_half_is_noticed(tmp_path: Path) -> None:
    request = post_bytes(submission("half"))
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", STORES_HALF)) as server:
        server.wait_ready()
        with proxied(server) as proxy:
            for cut in range(0, len(request), 20):
                proxy.request_bytes = cut
                through(proxy, request)
            assert proxy.cuts > 10
        assert asyncio.run(everything(server.url)) == ["lost-guessed"]
