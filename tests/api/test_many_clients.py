"""R10: 32 clients submit one operation ID at once, round after round: it is stored once, and all hear of it.

Every client has a connection of its own, and all write their request before any answer is read.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from muniment import wiring
from tests.support import submissions
from tests.support.live import OPERATIONS, Reply, Wire, judge, patched
from tests.support.server import Server

CLIENTS: Final = 32
ROUNDS: Final = 100
HASHES: Final = 4
WAIT_SECONDS: Final = 60.0


@contextlib.asynccontextmanager
async def connections(url: str) -> AsyncIterator[list[Wire]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Wire.open(url)) for _ in range(CLIENTS)]


async def at_once(wires: Sequence[Wire], bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
    replies = await asyncio.gather(*(wire.post(body) for wire, body in zip(wires, bodies, strict=True)))
    for reply in {(reply.status, reply.body): reply for reply in replies}.values():
        judge("POST", OPERATIONS, reply)
    return replies


def same_hash_complaints(operation_id: str, replies: Sequence[Reply]) -> list[str]:
    """Exactly one 202, the rest 200, and one account of the operation in all of them."""
    statuses = Counter(reply.status for reply in replies)
    if statuses != {202: 1, 200: len(replies) - 1}:
        return [f"{operation_id}: {dict(statuses)}"]
    told = {(reply.json()["payload_hash"], reply.json()["created_at"]) for reply in replies}
    return [] if len(told) == 1 else [f"{operation_id}: {told}"]


def mixed_hash_complaints(
    operation_id: str, bodies: Sequence[Mapping[str, Any]], replies: Sequence[Reply]
) -> list[str]:
    """One hash won: its clients share one 202 and 200s, all others have 409 with the hash that won."""
    won = [body["payload_hash"] for body, reply in zip(bodies, replies, strict=True) if reply.status == 202]
    if len(won) != 1:
        return [f"{operation_id}: {len(won)} clients have 202"]
    text = f"operation_id '{operation_id}' already exists with payload_hash {won[0]}"
    found = []
    for body, reply in zip(bodies, replies, strict=True):
        expected = (200, 202) if body["payload_hash"] == won[0] else (409,)
        if reply.status not in expected:
            found.append(f"{operation_id}: {reply.status} where {expected} fits")
        elif reply.status == 409 and reply.json() != {"error": text}:
            found.append(f"{operation_id}: {reply.json()}")
    return found


def body_of(operation_id: str, variant: int = 0) -> dict[str, Any]:
    return submissions.memory(operation_id, f"{operation_id} was told in version {variant}.")


def bodies_of(operation_id: str, hashes: int) -> list[dict[str, Any]]:
    """One body a client; which client has which hash differs from round to round."""
    first = int(operation_id.rpartition("-")[2])
    return [body_of(operation_id, (first + client) % hashes) for client in range(CLIENTS)]


async def rounds(url: str, names: Iterator[str], hashes: int) -> list[str]:
    """Run rounds with ``hashes`` different payloads; return what was wrong."""
    complaints = []
    async with connections(url) as wires:
        for name in names:
            bodies = bodies_of(name, hashes)
            replies = await at_once(wires, bodies)
            if hashes == 1:
                complaints += same_hash_complaints(name, replies)
            else:
                complaints += mixed_hash_complaints(name, bodies, replies)
    return complaints


async def left_behind(url: str, names: Sequence[str]) -> list[str]:
    """Wait for each operation's end; return what differs from one committed memory of one of the bodies."""
    found, memories = [], set()
    async with Wire.open(url) as wire:
        for name in names:
            receipt = await committed(wire, name)
            memory = (await wire.get(f"/api/v2/memories/{receipt['result']['id']}")).json()
            memories.add(memory["id"])
            if submissions.payload_hash({"content": memory["content"]}) != receipt["payload_hash"]:
                found.append(f"{name}: the memory is not what the receipt names")
            if receipt["progress_seq"] != 6:
                found.append(f"{name}: {receipt['progress_seq']} transitions")
    return found if len(memories) == len(names) else [*found, f"{len(memories)} memories"]


async def committed(wire: Wire, operation_id: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            receipt: dict[str, Any] = (await wire.get(f"{OPERATIONS}/{operation_id}")).json()
            if receipt["state"] == "committed":
                return receipt
            await asyncio.sleep(0.01)


async def operation_count(url: str) -> int:
    count, after = 0, ""
    async with Wire.open(url) as wire:
        while True:
            page = (await wire.get(f"{OPERATIONS}?limit=200{after}")).json()
            count += len(page["operations"])
            if page["next"] is None:
                return count
            after = f"&after={page['next']}"


def names(prefix: str, count: int = ROUNDS) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def test_32_clients_and_one_id(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        server.wait_ready("search_ready")

        async def all_rounds() -> None:
            assert await rounds(server.url, iter(names("same")), 1) == []
            assert await rounds(server.url, iter(names("mixed")), HASHES) == []
            assert await left_behind(server.url, [*names("same"), *names("mixed")]) == []
            assert await operation_count(server.url) == 2 * ROUNDS
            # Long after it has ended, another payload under its ID changes nothing.
            async with Wire.open(server.url) as wire:
                before = await wire.get(f"{OPERATIONS}/same-7")
                late = await wire.post(body_of("same-7", 9))
                assert late.status == 409
                assert before.json()["payload_hash"] in late.json()["error"]
                assert (await wire.get(f"{OPERATIONS}/same-7")).body == before.body

        asyncio.run(all_rounds())
        server.terminate()
    print(f"requests: {2 * ROUNDS * CLIENTS} in {2 * ROUNDS} rounds of {CLIENTS} at once")
    assert wiring.check(tmp_path / "store").findings == ()


# Controls: servers with a planted fault, which the same rounds must find.

SAYS_202_TO_ALL: Final = """
from muniment.runtime import service
submit = service.Service.submit

async def created(self, body):
    return service.Submitted(True, (await submit(self, body)).receipt)

service.Service.submit = created
"""
LOOKS_BEFORE_IT_WRITES: Final = """
import asyncio
import itertools
import msgspec
from muniment.stages import accept
from muniment.runtime import service

submit, number = service.Service.submit, itertools.count()

async def looked(self, body):
    request = accept.read(body)
    known = await self._ledger.read(lambda reads: reads.find_operation(1, request.operation_id))
    await asyncio.sleep(0.01)
    if known is not None:
        return await submit(self, body)
    fresh = msgspec.structs.replace(request, operation_id=f"{request.operation_id}+{next(number)}")
    admitted = await self._ledger.write(
        accept.admission(fresh, self._limits, account=1, clock=self._clock, entropy=self._entropy))
    named = msgspec.structs.replace(admitted.receipt, operation_id=request.operation_id)
    return service.Submitted(True, named)

service.Service.submit = looked
"""
TAKES_EVERY_HASH: Final = """
from muniment.stages import ledger
accept = ledger._accept

def accepting(rows, asked):
    stored = rows.find_operation(asked.account, asked.operation_id)
    return accept(rows, asked) if stored is None else ledger.command.Admitted(
        receipt=ledger._receipt(rows, stored), created=False)

ledger._accept = accepting
"""
NAMES_THE_LOSER: Final = """
from muniment import errors
from muniment.stages import ledger
accept = ledger._accept

def accepting(rows, asked):
    try:
        return accept(rows, asked)
    except errors.Conflict as conflict:
        raise errors.Conflict(asked.operation_id, asked.payload_hash) from conflict

ledger._accept = accepting
"""


@pytest.mark.parametrize(
    ("code", "hashes", "complaint"),
    [
        (SAYS_202_TO_ALL, 1, "{202: 32}"),
        (LOOKS_BEFORE_IT_WRITES, 1, "202: "),
        (TAKES_EVERY_HASH, HASHES, "200 where (409,) fits"),
        (NAMES_THE_LOSER, HASHES, "already exists with payload_hash"),
    ],
    ids=["says 202 to all", "looks before it writes", "takes every hash", "names the loser"],
)
def test_control_a_server_that_is_wrong_about_it_is_noticed(
    tmp_path: Path, code: str, hashes: int, complaint: str
) -> None:
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", code)) as server:
        server.wait_ready()
        found = asyncio.run(rounds(server.url, itertools.islice(names("control"), 3), hashes))
    assert len(found) >= 3
    assert all(complaint in each for each in found), found
