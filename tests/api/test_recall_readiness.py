"""While recall cannot search it says so, with 503 and the reason; never with an empty list instead."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from muniment import wiring
from muniment.adapters.embedders.weights import bundled_directory
from tests.support.live import OPERATIONS, executor_pid, patched
from tests.support.seed_contract import ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory

RECALL: Final = "/api/v2/recall"
REFUSALS_MIN: Final = 20
WAIT_SECONDS: Final = 120.0


def ask(client: ContractClient, query: str = "the kettle") -> tuple[int, Any]:
    answer = client.post(RECALL, json={"query": query})
    return answer.status_code, answer.json()


def refusals(client: ContractClient, count: int) -> list[str]:
    """Ask so many times; each must be refused. Returns the reasons."""
    reasons = []
    for _ in range(count):
        status, said = ask(client)
        assert status == 503, f"{status}: {said}"
        assert said["error"].startswith("search unavailable: ")
        reasons.append(said["error"].removeprefix("search unavailable: "))
        time.sleep(0.02)
    assert all(reasons)
    return reasons


def until_answered(client: ContractClient) -> tuple[list[str], list[dict[str, Any]]]:
    """Ask until recall answers; return the reasons of the refusals before, and the first results."""
    give_up = time.monotonic() + WAIT_SECONDS
    reasons: list[str] = []
    while True:
        status, said = ask(client)
        if status == 200:
            return reasons, said["results"]
        assert (status, time.monotonic() < give_up) == (503, True), said
        reasons.append(said["error"])
        time.sleep(0.02)


def accepted(client: ContractClient, name: str, text: str = "The kettle is on the stove.") -> None:
    assert client.post(OPERATIONS, json=memory(name, text)).status_code == 202


def committed(client: ContractClient, name: str) -> dict[str, Any]:
    with client.following(operation_path(name, "/events")) as followed:
        followed.read()
    receipt: dict[str, Any] = client.get(operation_path(name)).json()
    assert receipt["state"] == "committed", receipt
    return receipt


def test_a_model_that_is_not_there_is_named_until_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    server = Server(tmp_path / "store", embedder="onnx", embedder_dir=model, executor_backoff_seconds_max=0.2)
    with server, ContractClient(server.url) as client:
        server.wait_ready("ingestion_ready")
        reasons = refusals(client, REFUSALS_MIN)
        accepted(client, "early")
        ready = client.get("/ready")
        reasons += refusals(client, REFUSALS_MIN)
        assert ready.json()["ingestion_ready"]
        assert not ready.json()["search_ready"]
        assert not ready.json()["capabilities"]["model_executor"]
        assert any(str(model) in reason for reason in reasons), set(reasons)

        model.symlink_to(bundled_directory())
        more, results = until_answered(client)
        # What was accepted meanwhile may still be on its way; that it is not shown yet is true then.
        receipt = committed(client, "early")
        assert [hit["id"] for hit in ask(client)[1]["results"]] == [receipt["result"]["id"]]
        assert len(results) <= 1
        server.terminate()
    print(f"refused while there was no model: {len(reasons)}, while it loaded: {len(more)}")
    assert wiring.check(tmp_path / "store").findings == ()


def test_an_executor_stopped_before_it_is_ready(tmp_path: Path) -> None:
    with Server(tmp_path / "store", embedder="bundled") as server, ContractClient(server.url) as client:
        child = executor_pid(server, "query")
        os.kill(child, signal.SIGSTOP)
        assert not server.wait_ready("ingestion_ready").log.count('"event": "ready"'), "it was ready already"
        accepted(client, "waits")
        assert set(refusals(client, REFUSALS_MIN)) == {"the model is loading"}
        os.kill(child, signal.SIGCONT)
        until_answered(client)
        committed(client, "waits")
        assert len(ask(client)[1]["results"]) == 1
        server.terminate()
    assert wiring.check(tmp_path / "store").findings == ()


LOADS_SLOWLY: Final = """
import asyncio
from muniment.runtime import feed
load = feed.Feed._load

async def slowly(self):
    await asyncio.sleep(3)
    await load(self)

feed.Feed._load = slowly
"""


def test_an_index_that_is_loading(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server, ContractClient(server.url) as client:
        accepted(client, "one")
        committed(client, "one")
        assert len(until_answered(client)[1]) == 1
        server.terminate()
    slow = Server(
        tmp_path / "store", environ=patched(tmp_path / "patch", LOADS_SLOWLY), recall_wait_seconds=0.05
    )
    with slow as server, ContractClient(server.url) as client:
        give_up = time.monotonic() + WAIT_SECONDS
        while not client.get("/ready").json()["capabilities"]["model_executor"]:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        assert set(refusals(client, 5)) == {"the search index is loading"}
        assert not client.get("/ready").json()["capabilities"]["search_index"]
        reasons, results = until_answered(client)
        assert (bool(reasons), len(results)) == (True, 1)
        server.terminate()


QUERIES: Final = ("who keeps the ledger", "boats at noon", "the green book", "rain")


def note(number: int) -> str:
    return f"Entry {number}: the keeper noted {number % 5} boats at noon in the green book. " * (
        1 + number % 4
    )


def answers(client: ContractClient) -> list[Any]:
    return [client.post(RECALL, json={"query": query, "limit": 50}).json() for query in QUERIES]


def stored_lines(tally: Path) -> list[str]:
    return tally.read_text("utf-8").splitlines()


@pytest.mark.parametrize("stop", [Server.terminate, Server.kill], ids=["terminated", "killed"])
def test_a_restart_restores_recall_without_embedding_again(
    tmp_path: Path, stop: Callable[[Server], object]
) -> None:
    tally = tmp_path / "tally"
    server = Server(tmp_path / "store", executor_tally=tally, part_tokens_max=32)
    with server, ContractClient(server.url) as client:
        server.wait_ready("search_ready")
        for number in range(30):
            accepted(client, f"n{number}", note(number))
        parts = sum(committed(client, f"n{number}")["result"]["parts"] for number in range(30))
        before, embedded = answers(client), stored_lines(tally)
        stop(server)
        server.start()
        with ContractClient(server.url) as again:
            server.wait_ready("search_ready")
            assert answers(again) == before
            assert stored_lines(tally) == embedded
            # The tally does count: one more memory is one more line for each of its parts.
            accepted(again, "more", note(3))
            more = committed(again, "more")["result"]["parts"]
            assert len(stored_lines(tally)) == len(embedded) + more
        server.terminate()
    assert len(embedded) == parts
    assert len(set(embedded)) == parts
    assert all(len(answer["results"]) == 30 for answer in before)
    assert json.dumps(before)
    assert wiring.check(tmp_path / "store").findings == ()


ANSWERS_WITH_NOTHING: Final = """
from muniment.errors import SearchUnavailable
from muniment.runtime import service
recall = service.Service.recall

async def empty(self, request):
    try:
        return await recall(self, request)
    except SearchUnavailable:
        return {"results": [], "model": {"name": "none", "digest": ""}}

service.Service.recall = empty
"""


def test_control_an_empty_list_instead_of_a_refusal_is_noticed(tmp_path: Path) -> None:
    environ = patched(tmp_path / "patch", ANSWERS_WITH_NOTHING)
    server = Server(tmp_path / "store", embedder="onnx", embedder_dir=tmp_path / "model", environ=environ)
    with server, ContractClient(server.url) as client:
        server.wait_ready("ingestion_ready")
        with pytest.raises(AssertionError, match="200: "):
            refusals(client, REFUSALS_MIN)


def test_a_child_that_hangs_is_a_refusal_and_not_a_wait(tmp_path: Path) -> None:
    with Server(tmp_path / "store", recall_embed_seconds=1) as server, ContractClient(server.url) as client:
        server.wait_ready("search_ready")
        accepted(client, "hung")
        committed(client, "hung")
        child = executor_pid(server, "query")
        os.kill(child, signal.SIGSTOP)
        try:
            status, said = ask(client)
        finally:
            os.kill(child, signal.SIGCONT)
        assert (status, said["error"]) == (
            503,
            "search unavailable: the model did not read the query within 1.0 seconds",
        )
        _, results = until_answered(client)
        assert [hit["provenance"]["operation_id"] for hit in results] == ["hung"]
        server.terminate()
    assert wiring.check(tmp_path / "store").findings == ()
