"""What went wrong in others and is not shown elsewhere; docs/incidents.md lists all of it with its tests."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from muniment import wiring
from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
from muniment.core.event_ring import Place, Slice
from muniment.model import command
from muniment.runtime import follow
from tests.support import operations as ops
from tests.support import stores
from tests.support.live import OPERATIONS, ROOT, patched
from tests.support.operations import ACCOUNT, NOW
from tests.support.server import SOURCE, Server
from tests.support.submissions import memory

WAIT_SECONDS: Final = 60.0

# What the server asks of its ledger

WAITING: Final = 120
CHAIN: Final = 20
LARGE_ID: Final = "large"
MARKER: Final = "What no receipt ever shows."
LARGE: Final = MARKER + " Shelf after shelf." * 40_000
RECEIPT_BYTES_MAX: Final = 1500
RECEIPTS: Final = 20
QUIET_SECONDS: Final = 1.2
BEAT_SECONDS: Final = 0.05

# Writes down each statement, for a SELECT with its parameters. While the file ``planted`` is there, a receipt
# loads the payload first, and the ledger is searched for the unfinished after each commit.
TRACED: Final = """
import asyncio, os
from muniment.adapters.sqlite import store
from muniment.model import journal
from muniment.runtime import coordinator, service
LOG = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(cursor, sql, bindings):
    told = " ".join(sql.split())
    told += f" with {{bindings}}" if told.startswith("SELECT") else ""
    os.write(LOG, (told + "\\n").encode())
    return True

def traced(opened):
    def opening(path):
        made = opened(path)
        made.set_exec_trace(note)
        return made
    return opening

store.open_writer, store.open_reader = traced(store.open_writer), traced(store.open_reader)

receipt = service.Service.receipt
async def loading(self, operation_id):
    if os.path.exists({planted!r}):
        row = await self._ledger.read(lambda reads: reads.find_operation(1, operation_id))
        await self._ledger.read(lambda reads: reads.payload(row["object_n"]))
    return await receipt(self, operation_id)
service.Service.receipt = loading

observe = coordinator.Coordinator._observe
def searching(self, sealed):
    observe(self, sealed)
    if os.path.exists({planted!r}) and any(isinstance(each.unit, journal.Commit) for each in sealed):
        self.searches = asyncio.ensure_future(self._ledger.read(coordinator.unfinished))
coordinator.Coordinator._observe = searching
"""


class Statements:
    """What was asked of the ledger since the last look."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._seen = 0

    def new(self) -> list[str]:
        told = self._log.read_text("utf-8")
        fresh, self._seen = told[self._seen :], len(told)
        return fresh.splitlines()


def reads_of(table: str, statements: list[str], number: int | None = None) -> list[str]:
    """Those that read rows of a table; of one object, if a number is given."""
    found = [each for each in statements if f" FROM {table} " in each or f" JOIN {table} " in each]
    return [each for each in found if number is None or f"'object_n': {number}}}" in each]


def searches(statements: list[str]) -> int:
    """How often the unfinished operations of the whole store were looked for."""
    return sum("INDEXED BY operation_unfinished WHERE state IN" in each for each in statements)


def waiting_store(directory: Path) -> int:
    """A store of a killed server: many memories wait, none planned. Returns the object of the large one.

    Dependants sort before what they wait for, one was accepted before it, and a chain needs a wave a link.
    """
    free = [
        ops.memory(f"free-{number:03d}", f"Note {number} of many.") for number in range(WAITING - CHAIN - 2)
    ]
    chain = [
        ops.memory(
            f"chain-{CHAIN - number:03d}",
            f"Link {number}.",
            [f"chain-{CHAIN - number + 1:03d}"] if number else [],
        )
        for number in range(CHAIN)
    ]
    pair = [
        ops.memory("a-dependant", "It waits.", ["z-prerequisite"]),
        ops.memory("z-prerequisite", "It comes first."),
    ]
    with closing(stores.sqlite(directory)) as store:
        store.transact([ops.memory(LARGE_ID, LARGE, ["never"])])
        store.transact([command.Advance(n=1, now=NOW)])
        store.transact([*free, *chain, *pair])
        [large] = store.read(lambda reads: [row for row in reads.rows("operation") if row["id"] == LARGE_ID])
    return int(large["object_n"])


def until(held: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not held():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.05)


def open_operations(client: httpx.Client) -> int:
    return int(client.get("/api/v2/status").json()["operations"]["open"])


def answers_about(client: httpx.Client, operation_id: str) -> list[bytes]:
    """Everything that tells of an operation: receipt, list, replay of its POST, evidence, first events."""
    path = f"{OPERATIONS}/{operation_id}"
    again = client.post(OPERATIONS, json=memory(LARGE_ID, LARGE) | {"dependencies": ["never"]})
    assert again.status_code == 200
    told = [client.get(path) for _ in range(RECEIPTS)]
    told += [client.get(OPERATIONS, params={"state": "blocked"}), client.get(path + "/evidence"), again]
    assert {each.status_code for each in told} == {200}
    with client.stream("GET", path + "/events") as events:
        first = next(events.iter_raw())
    assert b'"blocked"' in first
    return [*(each.content for each in told), first]


def test_what_the_server_asks_of_its_ledger(tmp_path: Path) -> None:
    """Incidents 8, 17, 18, 27, 29, 31, 41, 47: a start with a backlog, receipts, heartbeats and a recall."""
    log, planted = tmp_path / "statements", tmp_path / "planted"
    large = waiting_store(tmp_path / "store")
    environ = patched(tmp_path / "patch", TRACED.format(log=str(log), planted=str(planted)))
    server = Server(
        tmp_path / "store",
        environ=environ,
        operations_in_flight_max=2,
        executor_heartbeat_seconds=BEAT_SECONDS,
    )
    statements = Statements(log)
    with server, httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
        server.wait_ready("search_ready")
        until(lambda: open_operations(client) == 1, "the backlog does not come to an end")
        recovery = statements.new()
        assert len(reads_of("payload", recovery)) >= WAITING, "the trace sees nothing"
        assert reads_of("payload", recovery, large) == []
        assert searches(recovery) == 1, "once at the start, and never for what was committed"

        told = answers_about(client, LARGE_ID)
        asked = statements.new()
        assert len(reads_of("operation", asked)) >= RECEIPTS
        assert [each for name in ("payload", "attribute", "vector") for each in reads_of(name, asked)] == []
        assert all(MARKER.encode() not in each for each in told)
        assert max(len(each) for each in told) <= RECEIPT_BYTES_MAX

        nothing_is_written_by_heartbeats(client, statements)
        a_recall_reads_what_it_shows(client, statements)
        the_planted_faults_are_noticed(client, statements, planted, large)
        server.terminate()
    checked = wiring.check(tmp_path / "store")
    assert checked.findings == ()
    assert checked.memories == WAITING + 1


def nothing_is_written_by_heartbeats(client: httpx.Client, statements: Statements) -> None:
    time.sleep(0.3)
    statements.new()
    began = time.monotonic()
    time.sleep(QUIET_SECONDS)
    assert statements.new() == []
    children = client.get("/api/v2/status").json()["children"]
    elapsed = time.monotonic() - began
    assert [child["role"] for child in children] == ["ingest", "query"]
    # They did beat meanwhile: every 0.05 s, if the machine lets them.
    assert all(child["heartbeat_age_seconds"] < elapsed for child in children), children


def a_recall_reads_what_it_shows(client: httpx.Client, statements: Statements) -> None:
    statements.new()
    answer = client.post("/api/v2/recall", json={"query": "Which note is it?", "limit": 3})
    assert answer.status_code == 200
    hits = answer.json()["results"]
    assert [set(hit) for hit in hits] == [{"id", "score", "text", "part_index", "span", "provenance"}] * 3
    assert len(answer.content) < 3 * RECEIPT_BYTES_MAX, "no vector and nothing else of that size"
    asked = statements.new()
    assert len(reads_of("payload", asked)) == 3
    assert reads_of("vector", asked) == []


def the_planted_faults_are_noticed(
    client: httpx.Client, statements: Statements, planted: Path, large: int
) -> None:
    planted.touch()
    statements.new()
    assert client.get(f"{OPERATIONS}/{LARGE_ID}").status_code == 200
    assert client.post(OPERATIONS, json=memory("one-more")).status_code == 202
    until(lambda: open_operations(client) == 1, "one more memory does not end")
    noticed: list[str] = []

    def seen() -> bool:
        noticed.extend(statements.new())
        return searches(noticed) >= 1

    until(seen, "a search for the unfinished is not noticed")
    assert reads_of("payload", noticed, large) != [], "a receipt that loads the payload is not noticed"
    planted.unlink()


# A follower that lags

EVENTS: Final = 7
EVENT_BYTES: Final = 250


class Followed(msgspec.Struct, frozen=True):
    live: bytes
    replayed: bytes
    lagged: bool

    def sequences(self) -> list[int]:
        lines = self.live.decode().splitlines()
        return [
            json.loads(each.removeprefix("data: "))["sequence"] for each in lines if each.startswith("data: ")
        ]


async def followed(directory: Path) -> Followed:
    """Open a stream, read one event, let all others happen, then read the rest."""
    fatal: list[BaseException] = []
    ledger = SqliteLedger(stores.sqlite(directory), Batching(), fatal.append)
    followers = follow.Followers(ledger, followers_max=2, keepalive_seconds=WAIT_SECONDS)
    asked = ops.memory("m", dependencies=["first"])
    await ledger.write(asked)
    stream = await followers.follow(ACCOUNT, "m", 0)
    live = await anext(stream)
    for each in (
        command.Advance(n=1, now=NOW),
        ops.stream("first"),
        command.Apply(n=2, now=NOW),
        ops.plan(1, asked),
        ops.vectors(1, 1, [0]),
        command.CommitMemory(n=1, now=NOW),
    ):
        await ledger.write(each)
    [feed] = followers._feeds.values()
    lagged = feed.ring.after(2) is Place.BEHIND
    async with asyncio.timeout(WAIT_SECONDS):
        live += b"".join([chunk async for chunk in stream])
        replayed = b"".join([chunk async for chunk in await followers.follow(ACCOUNT, "m", 0)])
    assert followers.count() == 0
    await ledger.close()
    assert fatal == []
    stores.checked(directory)
    return Followed(live, replayed, lagged)


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_follower_that_lags_gets_every_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    """Incident 28: more events than are kept for it come while it does not read."""
    monkeypatch.setattr(follow, "RING_BYTES_MAX", capacity * EVENT_BYTES)

    found = asyncio.run(followed(tmp_path / "store"))

    assert found.lagged, "nothing was dropped"
    assert found.sequences() == list(range(1, EVENTS + 1))
    assert found.live == found.replayed


def test_control_a_follower_that_is_not_backfilled_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whatever_is_there(
        self: follow.Followers, feed: follow.Feed, last: int, *, expected: bool
    ) -> tuple[Slice | Place, bool]:
        return feed.ring.after(feed.ring._first - 1), False

    monkeypatch.setattr(follow, "RING_BYTES_MAX", 2 * EVENT_BYTES)
    monkeypatch.setattr(follow.Followers, "_backfill", whatever_is_there)

    found = asyncio.run(followed(tmp_path / "store"))

    assert found.sequences() != list(range(1, EVENTS + 1))


# What is installed


def built(directory: Path) -> Path:
    """The wheel that an installation gets."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = directory.glob("*.whl")
    return wheel


def left_out(names: set[str]) -> set[str]:
    """Files of the package that a wheel with these names lacks."""
    files = (path for path in (SOURCE / "muniment").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(SOURCE).as_posix() for path in files} - names


def test_the_wheel_serves_from_where_it_is_installed(tmp_path: Path) -> None:
    """Incident 13: the installed copy has every file of the package, and works with nothing else."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built(tmp_path / "dist")) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(site)
    assert left_out(names) == set()
    environ = {"PYTHONPATH": str(site)}
    where = [sys.executable, "-P", "-c", "import muniment; print(muniment.__file__)"]
    shown = subprocess.run(where, env=os.environ | environ, capture_output=True, text=True, check=True)
    assert Path(shown.stdout.strip()).is_relative_to(site)

    with Server(tmp_path / "store", environ=environ) as server:
        server.wait_ready("search_ready")
        with httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
            assert client.get("/openapi.json").json()["openapi"]
            assert client.post(OPERATIONS, json=memory("installed")).status_code == 202
            until(lambda: open_operations(client) == 0, "it is not committed")
            hits: Any = client.post("/api/v2/recall", json={"query": "Where is the kettle?"}).json()[
                "results"
            ]
        assert server.terminate() == 0
    assert [hit["provenance"]["operation_id"] for hit in hits] == ["installed"]


def test_control_a_wheel_without_one_file_is_noticed() -> None:
    every = left_out(set())
    assert {"muniment/interfaces/http/openapi.json", "muniment/adapters/sqlite/queries.sql"} <= every

    for name in sorted(every)[::25]:
        assert left_out(every - {name}) == {name}


# A timing says how busy the machine was


def test_a_measurement_prints_the_load_of_the_machine() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.backlog",
            "--operations",
            "40",
            "--window",
            "10",
            "--embedder",
            "synthetic",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )

    assert done.returncode == 0, done.stderr
    told = re.search(
        r"^load average: (\d+\.\d) before, (\d+\.\d) after, (\d+) cores$", done.stdout, re.MULTILINE
    )
    assert told is not None, done.stdout
    assert all(0.0 <= float(each) < 10_000.0 for each in told.groups())
    assert int(told[3]) == len(os.sched_getaffinity(0))
