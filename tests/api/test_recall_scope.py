"""What recall shows, in which order, and how fresh: every combination of filters against a plain oracle."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from muniment import wiring
from tests.support.live import OPERATIONS, Wire, judge, patched, request_bytes
from tests.support.seed_contract import ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory

RECALL: Final = "/api/v2/recall"
FRESH_RECALLS: Final = 200
USERS: Final = (None, "ann", "bob", "ann ")
AGENTS: Final = (None, "coder", "Coder")
SESSIONS: Final = (None, "s-1", "会话")
CATEGORIES: Final[tuple[list[str] | None, ...]] = (
    None,
    ["tools"],
    ["food", "tools"],
    ["travel"],
    ["tools", "tools"],
)
ASKED: Final = {
    "user_id": (None, "ann", "bob", "ann ", "nobody", ""),
    "agent_id": (None, "coder", "Coder", "nobody"),
    "session_id": (None, "s-1", "会话", "nobody"),
    "categories": (None, [], ["food"], ["travel", "tools"], ["nothing"], ["nothing", "food"]),
}
Submission = Mapping[str, Any]


def corpus() -> list[Submission]:
    """A memory for each combination of what a filter can ask for; every text shares words with the query."""
    combinations = itertools.product(USERS, AGENTS, SESSIONS, CATEGORIES)
    return [
        memory(
            f"m{number:03d}",
            f"The kettle and the ferry, note {number % 7}" + " again" * (number % 5),
            **{
                name: value
                for name, value in (
                    ("user_id", user),
                    ("agent_id", agent),
                    ("session_id", session),
                    ("categories", categories),
                )
                if value is not None
            },
        )
        for number, (user, agent, session, categories) in enumerate(combinations)
    ]


def fits(payload: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """The rule of the reference page: every given filter must hold, and of the categories any."""
    for name in ("user_id", "agent_id", "session_id"):
        if asked.get(name) is not None and payload.get(name) != asked[name]:
            return False
    wanted = asked.get("categories")
    return not wanted or bool(set(wanted) & set(payload.get("categories") or ()))


class Store:
    """A server whose memories are known by their operation IDs."""

    def __init__(self, client: ContractClient) -> None:
        self.client = client
        self.ids: dict[str, str] = {}
        self.payloads: dict[str, Mapping[str, Any]] = {}

    def remember(self, submissions: Sequence[Submission]) -> None:
        for each in submissions:
            assert self.client.post(OPERATIONS, json=each).status_code == 202
        for each in submissions:
            name = each["operation_id"]
            with self.client.following(operation_path(name, "/events")) as followed:
                followed.read()
            receipt = self.client.get(operation_path(name)).json()
            assert receipt["state"] == "committed", receipt
            self.ids[receipt["result"]["id"]] = name
            self.payloads[name] = each["payload"]

    def recall(self, query: str = "kettle ferry", **asked: Any) -> list[dict[str, Any]]:
        answer = self.client.post(RECALL, json={"query": query} | asked)
        assert answer.status_code == 200
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def names(self, query: str = "kettle ferry", **asked: Any) -> list[str]:
        return [self.ids[hit["id"]] for hit in self.recall(query, **asked)]


def questions() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*ASKED.values()):
        yield {name: value for name, value in zip(ASKED, values, strict=True) if value is not None}


def wrong_answers(store: Store, asked_all: Sequence[dict[str, Any]]) -> list[str]:
    """Ask each; return where the answer is not exactly the memories that fit, or not in order."""
    found = []
    for asked in asked_all:
        results = store.recall(limit=200, **asked)
        names = [store.ids[hit["id"]] for hit in results]
        expected = {name for name, payload in store.payloads.items() if fits(payload, asked)}
        if len(names) != len(set(names)) or set(names) != expected:
            found.append(f"{asked}: {len(names)} memories where {len(expected)} fit")
        ranked = sorted(results, key=lambda hit: (-hit["score"], hit["id"]))
        if ranked != results:
            found.append(f"{asked}: not in the order of score, then ID")
    return found


@contextmanager
def served(directory: Path, submissions: Sequence[Submission]) -> Iterator[Store]:
    """A server with these memories; at the end its store is verified."""
    with Server(directory, operations_in_flight_max=64) as server:
        server.wait_ready("search_ready")
        with ContractClient(server.url) as client:
            filled = Store(client)
            filled.remember(submissions)
            yield filled
        server.terminate()
    assert wiring.check(directory).findings == ()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with served(tmp_path_factory.mktemp("scope") / "store", corpus()) as filled:
        yield filled


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with served(tmp_path_factory.mktemp("scope") / "store", ()) as empty:
        yield empty


def test_every_combination_of_filters(store: Store) -> None:
    asked = list(questions())
    answers = [sum(fits(payload, each) for payload in store.payloads.values()) for each in asked]

    assert len(store.payloads) == 180
    assert len(asked) == 576
    assert (answers.count(0) > 100, max(answers)) == (True, 180)
    assert wrong_answers(store, asked) == []


def test_a_limit_cuts_the_same_order(store: Store) -> None:
    whole = store.recall(limit=200)

    assert len({hit["score"] for hit in whole}) > 5
    assert len({hit["score"] for hit in whole}) < len(whole)  # There are ties, and the ID breaks them.
    for limit in (1, 2, 9, 10, 57, 199):
        assert store.recall(limit=limit) == whole[:limit]
    assert store.recall() == whole[:10]
    assert (
        store.names(limit=3, user_id="bob")
        == [
            store.ids[hit["id"]]
            for hit in whole
            if store.payloads[store.ids[hit["id"]]].get("user_id") == "bob"
        ][:3]
    )


def test_a_memory_stands_in_the_answer_once_with_its_best_part(other: Store) -> None:
    filler = "Nothing of note was written in this long and quiet week by anybody who keeps a diary here. " * 6
    texts = {
        "best-last": filler + "The marmalade zeppelin landed.",
        "best-first": "The marmalade zeppelin landed. " + filler,
        "everywhere": "The marmalade zeppelin landed. " * 60,
    }
    other.remember([memory(name, text, session_id="once") for name, text in texts.items()])
    hits = {other.ids[hit["id"]]: hit for hit in other.recall("marmalade zeppelin landed", session_id="once")}
    kept = {name: other.client.get(f"/api/v2/memories/{hit['id']}").json() for name, hit in hits.items()}

    assert hits.keys() == texts.keys()
    assert min(len(each["parts"]) for each in kept.values()) > 1
    assert hits["best-last"]["part_index"] == len(kept["best-last"]["parts"]) - 1
    assert hits["best-first"]["part_index"] == 0
    assert hits["everywhere"]["part_index"] == 0  # The first of equal parts.
    for name, hit in hits.items():
        part = kept[name]["parts"][hit["part_index"]]
        assert hit["span"] == {"start": part["byte_start"], "end": part["byte_end"]}
        assert hit["text"] == part["content"]


def moment(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def test_what_has_expired_is_not_recalled(other: Store) -> None:
    soon = time.monotonic() + 4
    other.remember(
        [
            memory("expired", "Parsnip schedule", session_id="expiry", expires_at="2001-01-01T00:00:00Z"),
            memory("expires", "Parsnip schedule", session_id="expiry", expires_at=moment(4)),
            memory("stays", "Parsnip schedule", session_id="expiry", expires_at=moment(3600)),
            memory("for-ever", "Parsnip schedule", session_id="expiry"),
        ]
    )

    def shown() -> set[str]:
        return set(other.names("parsnip schedule", session_id="expiry"))

    before = shown()
    assert time.monotonic() < soon, "this machine was too slow to ask in time"
    while shown() == before:
        assert time.monotonic() < soon + 10
        time.sleep(0.05)
    assert before == {"expires", "stays", "for-ever"}
    assert shown() == {"stays", "for-ever"}
    assert time.monotonic() > soon - 0.1
    # Expiry hides from recall, it does not delete.
    [gone] = [key for key, name in other.ids.items() if name == "expired"]
    assert other.client.get(f"/api/v2/memories/{gone}").json()["content"] == "Parsnip schedule"


async def read_their_writes(url: str, count: int) -> list[str]:
    """Submit, wait for ``committed`` and recall at once; return where recall did not show the memory."""
    unseen = []
    async with Wire.open(url) as wire:
        for number in range(count):
            name = f"fresh-{number:04d}"
            body = memory(name, f"Token{number:04d} was written down.", session_id=name)
            assert (await wire.post(body)).status == 202
            while (await wire.get(f"{OPERATIONS}/{name}")).json()["state"] != "committed":
                await asyncio.sleep(0)
            asked = {"query": f"token{number:04d}", "session_id": name}
            reply = await wire.send(
                request_bytes("POST", RECALL, httpx.Request("POST", url, json=asked).content)
            )
            judge("POST", RECALL, reply)
            shown = [hit["provenance"]["operation_id"] for hit in reply.json().get("results", [])]
            if (reply.status, shown) != (200, [name]):
                unseen.append(f"{name}: {reply.status} {shown}")
    return unseen


def test_what_is_committed_is_recalled_at_once(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        server.wait_ready("search_ready")
        with ContractClient(server.url) as client:
            empty = client.post(RECALL, json={"query": "anything"})
        assert (empty.status_code, empty.json()["results"]) == (200, [])
        assert asyncio.run(read_their_writes(server.url, FRESH_RECALLS)) == []
        server.terminate()
    assert wiring.check(tmp_path / "store").findings == ()


# Controls: servers with a planted fault, which the same questions must find.

FORGETS_THE_SESSION: Final = """
import msgspec
from muniment.stages import recall
eligible = recall.eligible
recall.eligible = lambda request, now: msgspec.structs.replace(eligible(request, now), session=None)
"""
WANTS_ALL_CATEGORIES: Final = """
import msgspec
from muniment.stages import recall
eligible = recall.eligible

def narrowed(request, now):
    asked = eligible(request, now)
    return msgspec.structs.replace(asked, categories=asked.categories and asked.categories[:1])

recall.eligible = narrowed
"""
TURNS_TIES_ROUND: Final = """
from muniment.stages import recall
rendered = recall.rendered
recall.rendered = lambda reads, hits: sorted(
    rendered(reads, hits), key=lambda hit: (hit["score"], hit["id"]), reverse=True)
"""
DOES_NOT_WAIT: Final = """
import asyncio
from muniment.runtime import feed

async def at_once(self, position, seconds):
    pass

apply = feed.Feed._apply

async def late(self, *arguments):
    await asyncio.sleep(0.05)
    await apply(self, *arguments)

feed.Feed.reach, feed.Feed._apply = at_once, late
"""


@pytest.mark.parametrize(
    "code",
    [FORGETS_THE_SESSION, WANTS_ALL_CATEGORIES, TURNS_TIES_ROUND],
    ids=["forgets the session", "wants all categories", "turns ties round"],
)
def test_control_a_wrong_answer_is_noticed(tmp_path: Path, code: str) -> None:
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", code)) as server:
        server.wait_ready("search_ready")
        with ContractClient(server.url) as client:
            filled = Store(client)
            filled.remember(corpus()[:40])
            assert wrong_answers(filled, list(questions())[::11]) != []


def test_control_a_recall_that_does_not_wait_for_the_device_is_noticed(tmp_path: Path) -> None:
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", DOES_NOT_WAIT)) as server:
        server.wait_ready("search_ready")
        unseen = asyncio.run(read_their_writes(server.url, 10))
    assert [each for each in unseen if each.endswith(": 200 []")] != []
