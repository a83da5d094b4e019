"""Recall, memories and task streams over HTTP: shapes, and what is refused by name."""

import hashlib
import json
import uuid
from typing import Any, Final

import pytest

from tests.api.conftest import LIMITS
from tests.support.seed_contract import ContractClient, operation_path
from tests.support.submissions import envelope, memory, stream

POST: Final = "/api/v2/operations"
RECALL: Final = "/api/v2/recall"


def committed(client: ContractClient, submission: dict[str, Any]) -> dict[str, Any]:
    """Submit, follow to the end, and return the terminal receipt."""
    assert client.post(POST, json=submission).status_code == 202
    with client.following(operation_path(submission["operation_id"], "/events")) as followed:
        followed.read()
    receipt: dict[str, Any] = client.get(operation_path(submission["operation_id"])).json()
    assert receipt["state"] == "committed", receipt
    return receipt


def test_a_memory_is_read_and_recalled_with_its_provenance(client: ContractClient) -> None:
    owner, content = str(uuid.uuid4()), "Ünsere Katze heißt Mimi 💩.\r\nShe sleeps.\0"
    said = {
        "user_id": owner,
        "agent_id": "agent",
        "session_id": "session",
        "categories": ["pets", "home"],
        "visibility": "instance",
        "speaker": "bob",
        "role": "user",
        "quotes": [{"start": 0, "end": 8, "speaker": None}],
        "mentions": ["Mimi"],
        "session_seq": 7,
        "occurred_at": "2026-08-03T14:00:00.5+02:00",
        "expires_at": "2999-01-01T00:00:00Z",
        "metadata": {"big": 1e16, "n": 2**63, "nested": [None, {"é": True}]},
    }
    receipt = committed(client, memory(owner, content, **said))
    shown = client.get(f"/api/v2/memories/{receipt['result']['id']}").json()
    answer = client.post(RECALL, json={"query": "katze mimi", "user_id": owner}).json()

    assert shown["id"] == receipt["result"]["id"]
    assert shown["content"] == content
    assert shown["byte_count"] == len(content.encode())
    assert shown["content_sha256"] == hashlib.sha256(content.encode()).hexdigest()
    expected = {("owner" if name == "user_id" else name): value for name, value in said.items()}
    expected |= {"operation_id": owner, "submitter": None, "space": None}
    assert {name: shown["provenance"][name] for name in expected} == expected
    assert len(shown["parts"]) == receipt["result"]["parts"]
    assert "".join(part["content"] for part in shown["parts"]) == content
    assert {part["embedding_state"] for part in shown["parts"]} == {"indexed"}

    hit = answer["results"][0]
    assert (len(answer["results"]), hit["id"]) == (1, shown["id"])
    assert hit["provenance"] == shown["provenance"]
    assert content.encode()[hit["span"]["start"] : hit["span"]["end"]].decode() == hit["text"]
    assert answer["model"] == shown["model"]


def test_a_limit_and_filters_bound_what_is_recalled(client: ContractClient) -> None:
    owner = str(uuid.uuid4())
    for n in range(3):
        said = {"session_id": f"s{n}", "agent_id": "a", "categories": [f"c{n}", "all"]}
        committed(client, memory(f"{owner}-{n}", f"kettle {n}", user_id=owner, **said))

    def count(**asked: Any) -> int:
        answer = client.post(RECALL, json={"query": "kettle", "user_id": owner} | asked)
        assert answer.status_code == 200
        return len(answer.json()["results"])

    assert [count(limit=limit) for limit in (1, 2.0, 3, 200, None)] == [1, 2, 3, 3, 3]
    assert count(session_id="s1") == 1
    assert count(session_id=None, agent_id=None, categories=None) == 3
    assert count(session_id="s3") == 0
    assert count(agent_id="b") == 0
    named = [["none"], ["c1"], ["c1", "c2", "none"], ["all"], []]
    assert [count(categories=categories) for categories in named] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({}, "query"),
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": " \t\n"}, "query"),
        ({"query": ["x"]}, "query"),
        ({"query": "é" * (LIMITS["query_bytes_max"] // 2 + 1)}, "query"),
        ({"query": "x", "limit": 0}, "limit"),
        ({"query": "x", "limit": 201}, "limit"),
        ({"query": "x", "limit": "1"}, "limit"),
        ({"query": "x", "limit": 1.5}, "limit"),
        ({"query": "x", "limit": True}, "limit"),
        ({"query": "x", "user_id": 1}, "user_id"),
        ({"query": "x", "agent_id": []}, "agent_id"),
        ({"query": "x", "session_id": {}}, "session_id"),
        ({"query": "x", "categories": "a"}, "categories"),
        ({"query": "x", "categories": ["a", None]}, "categories[1]"),
        ({"query": "x", "owner": "ann"}, "owner"),
        ([], "body"),
    ],
)
def test_a_wrong_recall_is_refused_by_name(client: ContractClient, asked: Any, field: str) -> None:
    refused = client.post(RECALL, json=asked)

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b'{"query": "x", "query": "y"}', "application/json", "duplicate key"),
        (b'{"query": "\xff"}', "application/json", "not UTF-8"),
        (b"", "application/json", "not JSON"),
        (b'{"query": "x"}', "text/plain", "Content-Type: "),
        (b'{"query": "x"}' + b" " * LIMITS["body_bytes_max"], "application/json", "body: "),
    ],
)
def test_a_recall_body_is_read_as_strictly(
    client: ContractClient, body: bytes, content_type: str, words: str
) -> None:
    refused = client.post(RECALL, content=body, headers={"content-type": content_type})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(words)


def test_the_longest_query_is_answered(client: ContractClient) -> None:
    assert client.post(RECALL, json={"query": "x" * LIMITS["query_bytes_max"]}).status_code == 200


@pytest.mark.parametrize("memory_id", ["memory:missing", "x", "a%2Fb", "%00", "memory%3Amissing"])
def test_an_unknown_memory_is_not_found(client: ContractClient, memory_id: str) -> None:
    assert client.get(f"/api/v2/memories/{memory_id}").status_code == 404


def test_task_streams_are_read_with_their_steps(client: ContractClient) -> None:
    unique = str(uuid.uuid4())
    name, key = f"a/b {unique}", f"key {unique}"
    made = committed(client, stream(f"s-{unique}", name, description="Ship it", user_id="ann"))
    step = {"stream_name": name, "name": "tag", "idempotency_key": key, "ordinal": 4, "user_id": "ann"}
    added = committed(client, envelope(f"t-{unique}", "add_task_step", step))
    path = f"/api/v2/task-streams/a%2Fb%20{unique}"
    pending = client.get(path).json()
    done = {"idempotency_key": key, "result": {"tag": "v1", "n": [1, None]}}
    committed(client, envelope(f"c-{unique}", "complete_step", done))
    completed = client.get(path, params={"user_id": "ann"}).json()

    assert pending["name"] == name
    shown = pending["streams"][0]
    assert {
        field: shown[field] for field in ("id", "description", "user_id", "agent_id", "operation_id")
    } == {
        "id": made["result"]["id"],
        "description": "Ship it",
        "user_id": "ann",
        "agent_id": None,
        "operation_id": f"s-{unique}",
    }
    assert [each["id"] for each in shown["steps"]] == [added["result"]["id"]]
    assert (shown["steps"][0]["status"], shown["steps"][0]["result"]) == ("pending", None)
    finished = completed["streams"][0]["steps"][0]
    assert (finished["status"], finished["result"], finished["ordinal"]) == ("completed", done["result"], 4)
    assert client.get(path, params={"user_id": "bob"}).status_code == 404
    assert client.get(path, params={"agent_id": "x"}).status_code == 404
    assert client.get(path, params={"owner": "ann"}).status_code == 400
    assert json.dumps(completed)
