"""R26: eight clients race on a server that is killed, stopped and cut off; nobody is told what is not so.

The clients are a process of their own (``history_clients``), the nemesis acts from here, and a pure checker
(``tests.support.history``) judges every answer by what is there in the end. Then the accepted operations are
given to an undisturbed server in the order of their acceptance, and both outcomes must be equal.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import pytest

from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader
from muniment.ports.ledger import Reads
from tests.crash.history_clients import CLIENTS, WARM, Connection
from tests.support import history, truth
from tests.support.crashpoints import all_cases, seed
from tests.support.history import TERMINAL, Found, Record, Told, noted, violations
from tests.support.live import OPERATIONS, ROOT, Reply, Wire, patched, request_bytes
from tests.support.nemesis import HAND, Action, CuttingProxy, Nemesis, hand
from tests.support.server import SOURCE, Server

GAMES: Final = 3 if all_cases() else 1
HANDS: Final = 4 if all_cases() else 1
OK_MIN: Final = 200
UNKNOWN_MIN: Final = 20
CONFLICTS_MIN: Final = 20
ACTIONS_MIN: Final = 10
SERVER_KILLS_MIN: Final = 5
SETTLE_SECONDS: Final = 60.0
CONTROL_SETTLE_SECONDS: Final = 4.0
"""What depends on a lost operation never ends."""
READ_SECONDS: Final = 30.0
CLIENTS_END_SECONDS: Final = 60.0
PAGE: Final = 200
SETTINGS: Final[dict[str, Any]] = {
    # Small parts, one a batch: a memory is worked on in several steps, and a fault can come between them.
    "part_tokens_max": 24,
    "embed_batch_tokens_max": 24,
    "executor_backoff_seconds_max": 0.5,
}


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one game of the nemesis against a server."""

    records: list[Record]
    end: history.End
    tally: Counter[Action]
    seconds: float


def played(
    data: Path,
    chosen_by: int,
    actions: Sequence[Action],
    *,
    calls_min: int = 0,
    environ: Mapping[str, str] | None = None,
    settle_seconds: float = SETTLE_SECONDS,
) -> Game:
    """Let the clients work while the nemesis acts; then let everything end, and read what is there."""
    began = time.monotonic()
    with CuttingProxy() as proxy, Server(data, environ=environ, **SETTINGS) as server:
        server.wait_ready("search_ready")
        proxy.upstream = server.url
        nemesis = Nemesis(server, proxy, chosen_by)
        told = data.with_name("told.json")
        with clients(proxy.port, chosen_by, calls_min, told):
            nemesis.play(actions)
        seconds = time.monotonic() - began
        records = msgspec.json.decode(told.read_bytes(), type=list[Record])
        audit = asyncio.run(audited(server.url, settle_seconds))
        server.terminate()
    end = history.End(operations=audit.operations, frames=audit.frames, memories=memories(data))
    return Game(records=[*records, *audit.records], end=end, tally=nemesis.tally, seconds=seconds)


@contextlib.contextmanager
def clients(port: int, chosen_by: int, calls_min: int, told: Path) -> Iterator[None]:
    """Clients that have been at work before the block begins, and have written down all when it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.history_clients", *map(str, (port, chosen_by, calls_min, told))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == WARM, "the clients do not begin"
        yield
        _, said = process.communicate(timeout=CLIENTS_END_SECONDS)
        assert process.returncode == 0, said.decode()
    finally:
        process.kill()
        process.communicate()


# What is there in the end


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, read over HTTP by one more client that is never disturbed."""

    records: list[Record]
    operations: tuple[Told, ...]
    frames: dict[str, tuple[bytes, ...]]


async def audited(url: str, settle_seconds: float) -> Audit:
    """Wait until everything has ended, then read every receipt, every event and every memory."""
    connection = Connection(urlsplit(url).port or 0, READ_SECONDS, READ_SECONDS)
    frames: dict[str, tuple[bytes, ...]] = {}

    async def read(verb: history.Verb, subject: str, path: str) -> Record:
        began = time.monotonic()
        reply = await connection.call(request_bytes("GET", path))
        return noted(CLIENTS, verb, subject, began, reply)

    try:
        records = await settled(connection, settle_seconds)
        operations = tuple(shown for record in records for shown in record.told)
        for shown in operations:
            path = f"{OPERATIONS}/{shown.operation_id}"
            records.append(await read("get", shown.operation_id, path))
            if shown.memory is not None:
                records.append(await read("memory", shown.memory, f"/api/v2/memories/{shown.memory}"))
            if shown.state in TERMINAL:  # The stream of another would not end.
                came: list[bytes] = []
                await connection.follow(request_bytes("GET", f"{path}/events"), came)
                frames[shown.operation_id] = tuple(came)
    finally:
        connection.close()
    assert all(record.status == 200 for record in records), "the last look at the server failed"
    return Audit(records=records, operations=operations, frames=frames)


async def settled(connection: Connection, settle_seconds: float) -> list[Record]:
    """The list of operations once all have ended, or as it is when the time is over."""
    give_up = time.monotonic() + settle_seconds
    while True:
        records = await pages(connection)
        states = {shown.state for record in records for shown in record.told}
        if states <= set(TERMINAL) or time.monotonic() > give_up:
            return records
        await asyncio.sleep(0.2)


async def pages(connection: Connection) -> list[Record]:
    """The whole list of operations, a record a page."""
    found: list[Record] = []
    while not found or found[-1].more:
        after = found[-1].told[-1].operation_id if found else ""
        path = f"{OPERATIONS}?limit={PAGE}" + (f"&after={after}" if after else "")
        began, reply = time.monotonic(), await connection.call(request_bytes("GET", path))
        found.append(noted(CLIENTS, "list", after, began, reply))
    return found


def memories(data: Path) -> tuple[Found, ...]:
    """Every memory of a store that nobody serves."""

    def query(reads: Reads) -> tuple[Found, ...]:
        names = {row["n"]: row["id"] for row in reads.rows("operation")}
        held = {row["object_n"]: row["bytes"] for row in reads.rows("payload")}
        return tuple(
            Found(
                key=row["key"],
                operation_id=names[row["operation_n"]],
                text=held[row["object_n"]].decode(),
                start=0,
                end=len(held[row["object_n"]]),
            )
            for row in reads.rows("memory")
        )

    with contextlib.closing(SqliteReader(data / LEDGER_FILE)) as reader:
        return reader.read(query)


def facts(records: Sequence[Record]) -> set[truth.Fact]:
    """Everything that a receipt has told anybody."""
    return {
        fact
        for record in records
        for shown in record.told
        for fact in (
            truth.Accepted(shown.operation_id, shown.payload_hash),
            truth.Stood(shown.operation_id, shown.state),
        )
    }


# The same without a nemesis


def undisturbed(data: Path, game: Game) -> str:
    """Give what was accepted to a fresh server, in the order of its acceptance; return the outcome digest."""
    sent = {(each.subject, each.payload_hash): each.payload for each in game.records if each.verb == "submit"}
    bodies: list[dict[str, Any]] = [
        {
            "operation_id": shown.operation_id,
            "schema_version": 2,
            "kind": shown.kind,
            "dependencies": list(shown.dependencies),
            "payload_hash": shown.payload_hash,
            "payload": sent[shown.operation_id, shown.payload_hash],
        }
        for shown in game.end.operations
    ]

    async def everything(url: str) -> None:
        async with Wire.open(url) as wire:
            replies: list[Reply] = [await wire.post(body) for body in bodies]
        assert {reply.status for reply in replies} == {202}
        connection = Connection(urlsplit(url).port or 0, READ_SECONDS)
        ended = {shown.state for record in await settled(connection, SETTLE_SECONDS) for shown in record.told}
        connection.close()
        assert ended <= set(TERMINAL)

    with Server(data, **SETTINGS) as server:
        asyncio.run(everything(server.url))
        server.terminate()
    return truth.verify(data)


def shortfalls(game: Game) -> list[str]:
    """What did not happen often enough for the proof to say anything."""
    outcomes = Counter(each.outcome for each in game.records if each.client < CLIENTS)
    counted: dict[str, tuple[int, int]] = {
        "ok": (outcomes["ok"], OK_MIN),
        "unknown": (outcomes["unknown"], UNKNOWN_MIN),
        "conflicts": (sum(each.status == 409 for each in game.records), CONFLICTS_MIN),
        "actions": (game.tally.total(), ACTIONS_MIN),
        "kills of the server": (game.tally["kill the server"], SERVER_KILLS_MIN),
        "answers lost": (len(unheard(game)), 1),
        **{action: (game.tally[action], 1) for action in HAND},
    }
    return [f"{count} {what} of {least}" for what, (count, least) in counted.items() if count < least]


def unheard(game: Game) -> set[str]:
    """Operations that were accepted while nobody got to hear the 202."""
    heard = {each.subject for each in game.records if each.status == 202}
    return {shown.operation_id for shown in game.end.operations} - heard


@pytest.mark.timeout(900 if all_cases() else 300)
@pytest.mark.parametrize("number", range(GAMES))
def test_nobody_is_told_what_is_not_so(tmp_path: Path, number: int) -> None:
    chosen_by = seed() + number

    game = played(tmp_path / "store", chosen_by, hand(chosen_by, times=HANDS), calls_min=OK_MIN)

    own = [each for each in game.records if each.client < CLIENTS]
    print(
        f"history: seed {chosen_by}, {game.seconds:.0f} s, {dict(game.tally)}; {len(own)} calls, "
        f"{dict(Counter(each.verb for each in own))}, {dict(Counter(each.outcome for each in own))}, "
        f"{sum(each.status == 409 for each in own)} conflicts; {len(game.end.operations)} operations, "
        f"{dict(Counter(shown.state for shown in game.end.operations))}, {len(game.end.memories)} "
        f"memories, {len(unheard(game))} of them without a 202 that was heard"
    )
    wrong = violations(game.records, game.end)
    assert wrong == [], f"scripts/crash --seed {seed()}"
    assert shortfalls(game) == []
    digest = truth.verify(tmp_path / "store", facts(game.records))
    assert digest == undisturbed(tmp_path / "undisturbed", game)


# Controls: servers with a planted fault, of which the same checker must say what is wrong.

ANSWERS_BEFORE_THE_COMMIT: Final = """
from bench import answer_before_commit
answer_before_commit.DELAY_SECONDS = 0.25
answer_before_commit.apply()
"""
KEEPS_IT_IN_MEMORY: Final = """
import shutil, tempfile
from pathlib import Path
from muniment.adapters.sqlite.store import SqliteStore
opened, closed, homes = SqliteStore.open.__func__, SqliteStore.close, {}

def of_a_copy(cls, directory, *given, **named):
    copy = Path(tempfile.mkdtemp(dir=Path(directory).parent)) / "copy"
    shutil.copytree(directory, copy)
    store = opened(cls, copy, *given, **named)
    homes[store] = directory
    return store

def written_back(self):
    closed(self)
    shutil.copytree(self.path.parent, homes[self], dirs_exist_ok=True)

SqliteStore.open, SqliteStore.close = classmethod(of_a_copy), written_back
"""
ANSWERS_A_REPLAY_AS_NEW: Final = """
from muniment.runtime import service
submit = service.Service.submit

async def created(self, body):
    return service.Submitted(True, (await submit(self, body)).receipt)

service.Service.submit = created
"""
SERVES_OLD_RECEIPTS: Final = """
from muniment.runtime import service
submit, receipt, cache = service.Service.submit, service.Service.receipt, {}

async def submitted(self, body):
    done = await submit(self, body)
    cache.setdefault(done.receipt.operation_id, done.receipt)
    return done

async def cached(self, operation_id):
    return cache[operation_id] if operation_id in cache else await receipt(self, operation_id)

service.Service.submit, service.Service.receipt = submitted, cached
"""
CONTROLS: Final[dict[str, tuple[str, tuple[Action, ...], tuple[str, ...]]]] = {
    "answers before the commit": (
        ANSWERS_BEFORE_THE_COMMIT,
        ("kill the server",),
        ("acknowledged and gone", "not found any more"),
    ),
    "keeps it in memory": (KEEPS_IT_IN_MEMORY, ("kill the server",), ("acknowledged and gone",)),
    "answers a replay as new": (ANSWERS_A_REPLAY_AS_NEW, ("nothing",), ("202 said",)),
    "serves old receipts": (SERVES_OLD_RECEIPTS, ("nothing",), ("went back",)),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_server_that_says_what_is_not_so_is_found_out(tmp_path: Path, control: str) -> None:
    code, actions, complaints = CONTROLS[control]

    game = played(
        tmp_path / "store",
        1,
        actions,
        environ=patched(tmp_path / "patch", code),
        settle_seconds=CONTROL_SETTLE_SECONDS,
    )

    found = violations(game.records, game.end)
    print(f"{control}: {Counter(each.partition(':')[0] for each in found)}")
    assert any(each.startswith(complaints) for each in found), found
