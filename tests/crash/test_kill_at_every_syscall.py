"""The real server, killed by SIGKILL as its n-th write or flush returns, while clients submit (R2).

strace kills it; nothing of the program is changed. Then a server is started again on what is left: each
operation that was accepted is there, the clients repeat everything, and it ends as if nothing had happened.
"""

import asyncio
import contextlib
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.support import submissions, truth
from tests.support.crashpoints import all_cases, seed
from tests.support.live import OPERATIONS, Reply, Wire, patched
from tests.support.server import Server
from tests.support.strace import KILL, Injection, calls_in, straced
from tests.support.truth import Accepted, Fact, Stood

CALLS: Final = ("fdatasync", "pwrite64")
SETTINGS: Final[dict[str, Any]] = {
    "probe_seconds": 0.02,  # Whoever asks whether it is ready causes a commit, so each place is reached.
    "wal_pages_max": 60,  # A checkpoint every few commits, which has calls of its own.
}
CLIENTS: Final = 6
EACH: Final = 4
WRITE_STRIDE: Final = 4
SAMPLE: Final = 4
"""Places of each call, one from each quarter of all."""
AT_WORK_MIN: Final = 4
FACTS_MIN: Final = 300
SETTLE_SECONDS: Final = 60.0
FAULT_SECONDS: Final = 30.0
ENDED: Final = ("committed", "rejected")
CUT: Final = (OSError, EOFError, asyncio.IncompleteReadError)
SENTENCES: Final = " ".join(f"Shelf {number} holds box {number * 7}." for number in range(40))


def sent(client: int, number: int) -> dict[str, Any]:
    """What a client sends: memories of one part and of several, and a kind that needs no model."""
    name = f"kill-{client}-{number}"
    match (client + number) % 4:
        case 0:
            return submissions.stream(name, f"chores {name}")
        case 1:
            return submissions.memory(name, f"List {name}. {SENTENCES}")
        case 2:
            waits_for = [f"kill-{(client + 1) % CLIENTS}-{number}"]
            return {**submissions.memory(name, f"After {waits_for}."), "dependencies": waits_for}
        case _:
            return submissions.memory(name, f"Box {name} is on the shelf.", user_id="ann")


SENT: Final = tuple(tuple(sent(client, number) for number in range(EACH)) for client in range(CLIENTS))


class Clean(msgspec.Struct, frozen=True):
    """A run that nobody disturbs, and the store on which each run begins."""

    store: Path
    """Empty, and made before: calls are counted for each thread, and making it takes a hundred of one."""
    outcome: str
    calls: Mapping[str, int]
    """How many calls the busiest thread made."""


class Killed(msgspec.Struct, frozen=True):
    """A server that was killed: in which phase, and what it had told until then."""

    phase: str
    facts: tuple[Fact, ...]


def heard(reply: Reply) -> Iterator[Fact]:
    """What an answer acknowledges."""
    shown = reply.json()
    for receipt in shown.get("operations", [shown]):
        yield Accepted(receipt["operation_id"], receipt["payload_hash"])
        yield Stood(receipt["operation_id"], receipt["state"])


async def submit(url: str, client: int, facts: list[Fact]) -> None:
    """One client sends what is its own, one after the other."""
    async with Wire.open(url) as wire:
        for operation in SENT[client]:
            reply = await wire.post(operation)
            assert reply.status in {200, 202}, reply
            facts += heard(reply)


async def watch(url: str, facts: list[Fact]) -> None:
    """Read until everything that is there has ended."""
    async with Wire.open(url) as wire, asyncio.timeout(SETTLE_SECONDS):
        while True:
            reply = await wire.get(OPERATIONS + "?limit=100")
            facts += heard(reply)
            operations = reply.json()["operations"]
            if len(operations) == CLIENTS * EACH and all(each["state"] in ENDED for each in operations):
                return
            await asyncio.sleep(0.05)


async def load(url: str, facts: list[Fact]) -> None:
    """All clients at once, and one that watches."""
    await asyncio.gather(watch(url, facts), *(submit(url, client, facts) for client in range(CLIENTS)))


async def until_killed(url: str, facts: list[Fact]) -> None:
    """The same until the server is gone. Once everything has ended, probes alone commit."""
    tasks = [submit(url, client, facts) for client in range(CLIENTS)]
    for found in await asyncio.gather(watch(url, facts), *tasks, return_exceptions=True):
        if isinstance(found, BaseException) and not isinstance(found, CUT):
            raise found
    with contextlib.suppress(*CUT):
        async with Wire.open(url) as wire, asyncio.timeout(FAULT_SECONDS):
            while True:
                await wire.get("/ready")
                await asyncio.sleep(SETTINGS["probe_seconds"])


def killed(
    directory: Path, clean: Clean, place: Injection, environ: Mapping[str, str] | None = None
) -> Killed:
    """Run a server under load until strace has killed it."""
    data, record = directory / "store", directory / "record"
    shutil.copytree(clean.store, data)
    server = straced(data, record, CALLS, place, environ=environ, **SETTINGS)
    facts: list[Fact] = []
    try:
        status = server.start_or_end()
        started = status is None
        if started:
            asyncio.run(until_killed(server.url, facts))
            status = server.wait(FAULT_SECONDS)
    finally:
        server.close()
    assert status == -signal.SIGKILL, f"not killed: status {status}\n{server.log}"
    last = calls_in(record)[-1] if calls_in(record) else None
    where = "log" if last is not None and last.concerns("ledger.db-wal") else "database"
    ended = {fact.id for fact in facts if isinstance(fact, Stood) and fact.state in ENDED}
    when = "starting" if not started else "at work" if len(ended) < CLIENTS * EACH else "idle"
    return Killed(f"{when}, {where}", tuple(facts))


def judged(directory: Path, clean: Clean, facts: tuple[Fact, ...]) -> None:
    """Start again, repeat everything, and ask for truth."""
    data, told = directory / "store", list[Fact]()
    with Server(data, **SETTINGS) as server:
        asyncio.run(known(server.url, facts))
        asyncio.run(load(server.url, told))
        assert server.terminate() == 0
    assert truth.verify(data, [*facts, *told]) == clean.outcome, "another outcome"


async def known(url: str, facts: tuple[Fact, ...]) -> None:
    """Each operation that was accepted is shown, with its hash."""
    async with Wire.open(url) as wire:
        for fact in dict.fromkeys(fact for fact in facts if isinstance(fact, Accepted)):
            reply = await wire.get(f"{OPERATIONS}/{fact.id}")
            assert reply.status == 200, f"accepted and gone: {fact}"
            assert reply.json()["payload_hash"] == fact.payload_hash


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    directory = tmp_path_factory.mktemp("clean")
    record, facts = directory / "record", list[Fact]()
    with Server(directory / "empty", **SETTINGS) as server:
        assert server.terminate() == 0
    shutil.copytree(directory / "empty", directory / "store")
    with straced(directory / "store", record, CALLS, **SETTINGS) as server:
        asyncio.run(load(server.url, facts))
        assert server.terminate() == 0
    made = Counter((call.name, call.thread) for call in calls_in(record))
    busiest = {name: max(count for (of, _), count in made.items() if of == name) for name in CALLS}
    return Clean(directory / "empty", truth.verify(directory / "store", facts), busiest)


def places(clean: Clean, chosen_by: int) -> list[Injection]:
    """Each flush and every fourth write; or one from each quarter of them."""
    chooser, chosen = random.Random(chosen_by), list[Injection]()
    for call, stride in zip(CALLS, (1, WRITE_STRIDE), strict=True):
        everywhere = range(1, clean.calls[call] + 1, stride)
        size = len(everywhere) / SAMPLE
        parts = [everywhere[int(part * size) : int((part + 1) * size)] for part in range(SAMPLE)]
        numbers = everywhere if all_cases() else [chooser.choice(part) for part in parts]
        chosen += [Injection(call, KILL, number) for number in numbers]
    return chosen


@pytest.mark.timeout(3000)
def test_a_kill_at_any_call_of_the_server_loses_nothing(tmp_path: Path, clean: Clean) -> None:
    chosen_by = seed()
    chosen = places(clean, chosen_by)
    phases: Counter[str] = Counter()
    facts = 0

    for number, place in enumerate(chosen):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            end = killed(directory, clean, place)
            judged(directory, clean, end.facts)
        except AssertionError as error:
            error.add_note(f"{place.option()}; again: scripts/crash --seed {chosen_by}")
            raise
        phases[end.phase] += 1
        facts += len(end.facts)
        shutil.rmtree(directory)

    print(f"calls of an undisturbed server: {dict(clean.calls)}")
    print(f"{phases.total()} kills ({dict(phases)}), {facts} acknowledged facts, seed {chosen_by}")
    assert phases.total() == len(chosen) >= 2 * SAMPLE
    assert sum(count for phase, count in phases.items() if phase.startswith("at work")) >= AT_WORK_MIN
    assert facts >= FACTS_MIN


ANSWERS_BEFORE_COMMIT: Final = """
from muniment.adapters.sqlite.store import SqliteStore
from muniment.model.command import Accept
from muniment.ports.ledger import attempt
class Undone(Exception):
    pass
transact = SqliteStore.transact
turns, late = [], []
def tried(self, asked):
    try:
        with self._transaction():
            raise Undone(attempt(self._handle, self._rows, asked, lambda: len(self._rows.sealed)))
    except Undone as undone:
        late.append(asked)
        return undone.args[0]
def early(self, commands):
    others = [asked for asked in commands if not isinstance(asked, Accept)]
    replies, sealed = transact(self, others) if others else ([], [])
    rest = iter(replies)
    answers = [tried(self, asked) if isinstance(asked, Accept) else next(rest) for asked in commands]
    turns.append(commands)
    if late and len(turns) % 6 == 0:
        sealed += transact(self, late)[1]
        late.clear()
    return answers, sealed
SqliteStore.transact = early
"""
"""A server that answers each POST at once and commits what was promised with every sixth transaction."""
CONTROL_PLACES: Final = (40, 60, 80)


def test_control_a_server_that_answers_before_commit_is_noticed(tmp_path: Path, clean: Clean) -> None:
    environ = patched(tmp_path / "patch", ANSWERS_BEFORE_COMMIT)
    tried = (place for place in CONTROL_PLACES if loses(tmp_path / str(place), clean, place, environ))

    noticed = next(tried, None)

    print(f"noticed at {noticed} of {CONTROL_PLACES}")
    assert noticed is not None


def loses(directory: Path, clean: Clean, when: int, environ: Mapping[str, str]) -> bool:
    """Whether a server that is killed at this write has lost what it accepted."""
    directory.mkdir()
    end = killed(directory, clean, Injection("pwrite64", KILL, when), environ)
    try:
        judged(directory, clean, end.facts)
    except AssertionError as error:
        return "accepted and gone: " in str(error)
    return False
