"""GET /api/v2/operations/{operation_id}/evidence: what the executor did, in pages that are never long."""

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from muniment.cli.main import run
from muniment.client import Client
from muniment.errors import NotFound
from tests.api.test_seed_pairs import emptied, noticed
from tests.support.live import patched
from tests.support.seed_contract import ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory, stream

POST: Final = "/api/v2/operations"
TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
LONG: Final = " ".join(f"Sentence number {number} has a few words in it." for number in range(1500))
IDS: Final = ("a/b", "../", "./", "x/evidence", "x%2Fevidence", "é", "💩", "\0", " ", "evidence", "?", "a+b")


def evidence_path(operation_id: str) -> str:
    return operation_path(operation_id, "/evidence")


def finished(client: ContractClient, submission: dict[str, Any]) -> dict[str, Any]:
    """Submit it, wait for its end, return its receipt."""
    operation_id = submission["operation_id"]
    assert client.post(POST, json=submission).status_code in (202, 200)
    with client.following(operation_path(operation_id, "/events")) as followed:
        followed.read()
    receipt: dict[str, Any] = client.get(operation_path(operation_id)).json()
    return receipt


@pytest.fixture
def long(client: ContractClient) -> dict[str, Any]:
    """The receipt of a memory with some thirty batches of parts."""
    return finished(client, memory(f"long-{uuid.uuid4()}", LONG))


def pages(
    ask: Callable[..., dict[str, Any]], operation_id: str, limit: int, after: int = 0
) -> list[dict[str, Any]]:
    """All evidence after a sequence, read page by page; a page that is too long or does not follow fails."""
    found: list[dict[str, Any]] = []
    place: int | None = after
    while place is not None:
        page = ask(operation_id, after=place, limit=limit)
        assert page["operation_id"] == operation_id
        assert len(page["evidence"]) <= limit, f"{len(page['evidence'])} records where {limit} were asked for"
        found += page["evidence"]
        assert page["next"] is None or page["next"] == found[-1]["sequence"] > place
        assert page["next"] is None or len(page["evidence"]) == limit
        place = page["next"]
    return found


def asking(client: ContractClient) -> Callable[..., dict[str, Any]]:
    def ask(operation_id: str, **params: int) -> dict[str, Any]:
        page: dict[str, Any] = client.get(evidence_path(operation_id), params=params).json()
        return page

    return ask


def test_a_memory_has_the_evidence_that_its_receipt_counts(client: ContractClient) -> None:
    receipt = finished(client, memory(f"short-{uuid.uuid4()}"))
    page = client.get(evidence_path(receipt["operation_id"])).json()

    assert [record["kind"] for record in page["evidence"]] == ["start", "plan", "progress", "completion"]
    assert [record["sequence"] for record in page["evidence"]] == [1, 2, 3, 4]
    assert receipt["executor_progress_seq"] == 4
    assert {record["generation"] for record in page["evidence"]} == {receipt["executor_generation"]}
    assert [TIME.fullmatch(record["occurred_at"]) is not None for record in page["evidence"]] == [True] * 4
    assert page["next"] is None


def test_what_needs_no_model_has_none(client: ContractClient) -> None:
    receipt = finished(client, stream(f"tasks-{uuid.uuid4()}", name=str(uuid.uuid4())))

    assert receipt["executor_progress_seq"] == 0
    assert client.get(evidence_path(receipt["operation_id"])).json() == {
        "operation_id": receipt["operation_id"],
        "evidence": [],
        "next": None,
    }


def test_long_evidence_comes_in_pages(client: ContractClient, long: dict[str, Any]) -> None:
    operation_id, count = long["operation_id"], long["executor_progress_seq"]
    everything = pages(asking(client), operation_id, 200)

    assert count > 20
    assert [record["sequence"] for record in everything] == list(range(1, count + 1))
    for limit in (1, 7, count - 1, count):
        assert pages(asking(client), operation_id, limit) == everything
    for after in (1, count - 1, count, count + 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert pages(asking(client), operation_id, 9, after) == everything[after:]
    assert len(client.get(evidence_path(operation_id)).json()["evidence"]) == min(50, count)


def it_has_its_evidence(client: ContractClient, operation_id: str) -> None:
    receipt = finished(client, memory(operation_id))
    page = client.get(evidence_path(operation_id)).json()
    assert page["operation_id"] == operation_id
    assert len(page["evidence"]) == receipt["executor_progress_seq"] >= 4


def test_every_id_that_is_accepted_has_its_evidence(client: ContractClient) -> None:
    unique = str(uuid.uuid4())
    for each in IDS:
        it_has_its_evidence(client, each + unique)


def test_an_unknown_operation_is_not_found(client: ContractClient) -> None:
    for operation_id in ("missing-operation", "a/b", "..-", "é", "x/evidence"):
        missing = client.get(evidence_path(f"not-there-{operation_id}"))
        assert missing.status_code == 404
        assert missing.json() == {"error": f"operation 'not-there-{operation_id}' not found"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("after=-1", "after"),
        ("after=18446744073709551616", "after"),
        ("after=one", "after"),
        ("after=", "after"),
        ("after=1&after=2", "after"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=1.5", "limit"),
        ("limit=", "limit"),
        ("kind=exit", "kind"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(client: ContractClient, query: str, field: str) -> None:
    for operation_id in (finished(client, memory("asked-wrongly"))["operation_id"], "not-there-at-all"):
        refused = client.get(f"{evidence_path(operation_id)}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"].startswith(f"{field}: ")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_another_method_is_not_allowed(client: ContractClient, method: str) -> None:
    refused = client.request(method, evidence_path("x"))

    assert refused.status_code == 405
    assert refused.headers["allow"] == "GET"


def test_the_client_reads_it(client: ContractClient, server: Server, long: dict[str, Any]) -> None:
    with Client(server.url) as connected:
        read = pages(connected.evidence, long["operation_id"], 9)
        assert read == pages(asking(client), long["operation_id"], 200)
        assert len(connected.evidence(long["operation_id"])["evidence"]) == min(
            50, long["executor_progress_seq"]
        )
        with pytest.raises(NotFound, match="operation 'none' not found"):
            connected.evidence("none")


def test_the_command_shows_it(
    client: ContractClient, server: Server, long: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    operation_id, count = long["operation_id"], long["executor_progress_seq"]
    everything = pages(asking(client), operation_id, 200)

    def told(*words: str) -> tuple[int, list[str]]:
        capfd.readouterr()
        code = run(["evidence", *words, "--url", server.url])
        return code, capfd.readouterr().out.splitlines()

    code, lines = told(operation_id, "--json")
    assert (code, [json.loads(line) for line in lines]) == (0, everything)
    code, lines = told(operation_id, "--after", "2", "--limit", "3")
    assert code == 0
    assert [line.split()[:2] for line in lines] == [["3", "progress"], ["4", "progress"], ["5", "progress"]]
    assert len(told(operation_id, "--limit", str(count + 5))[1]) == count
    without = finished(client, stream(f"tasks-{uuid.uuid4()}", name=str(uuid.uuid4())))["operation_id"]
    assert told(without) == (0, ["no evidence"])
    assert told(without, "--json") == (0, [])
    assert told("none") == (4, [])
    assert told(operation_id, "--limit", "0")[0] == told(operation_id, "--after", "-1")[0] == 2


# The control: an answer without an end.
WITHOUT_LIMIT: Final = """
from muniment.runtime import service

asked = service.Service.evidence

async def without_limit(self, operation_id, *, after, limit):
    return await asked(self, operation_id, after=after, limit=10**9)

service.Service.evidence = without_limit
"""


def test_a_broken_ledger_is_503_and_control_an_unbounded_answer_is_noticed(tmp_path: Path) -> None:
    environ = patched(tmp_path / "patch", WITHOUT_LIMIT)
    with (
        Server(tmp_path / "memory", environ=environ, probe_seconds=0.05) as server,
        ContractClient(server.wait_ready().url) as client,
    ):
        receipt = finished(client, memory("kept", LONG[:20_000]))
        with pytest.raises(AssertionError, match="records where 3 were asked for"):
            pages(asking(client), "kept", 3)
        assert len(pages(asking(client), "kept", 200)) == receipt["executor_progress_seq"]

        for dots in (".", ".."):  # Not on the server of all tests, where another test has them.
            it_has_its_evidence(client, dots)
        assert emptied(server.data_dir) >= 1
        noticed(client)
        refused = client.get(evidence_path("kept"))
        assert refused.status_code == 503
        assert refused.json()["error"].startswith("operation ledger unavailable")
