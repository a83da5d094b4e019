"""Receipts by ID, whatever is in the ID; lists in acceptance order; paths and methods that are none."""

import uuid
from typing import Final

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.api.conftest import LIMITS
from tests.api.test_routing import PIECES
from tests.support import wire
from tests.support.seed_contract import OURS, ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory, stream

POST: Final = "/api/v2/operations"
ID_BYTES_MAX: Final = LIMITS["operation_id_bytes_max"]
CHARACTERS: Final = st.characters(codec="utf-8")


def cut(text: str) -> str:
    """The longest start of ``text`` that is an ID within the limit."""
    return text.encode()[:ID_BYTES_MAX].decode("utf-8", "ignore")


IDS: Final = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=40),
    st.text(CHARACTERS, min_size=300, max_size=ID_BYTES_MAX).map(cut),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(IDS)
@example("..")
@example(".")
@example("a/b")
@example("x")
@example("x/events")
@example("x%2Fevents")
@example("\0")
@example("💩" * (ID_BYTES_MAX // 4))
@example("/" * ID_BYTES_MAX)
def test_every_accepted_id_can_be_read_on_all_its_routes(client: ContractClient, operation_id: str) -> None:
    submission = stream(operation_id, name="of every id")
    accepted = client.post(POST, json=submission)
    assert accepted.status_code in (202, 200)  # Hypothesis may ask twice.
    with client.following(operation_path(operation_id, "/events")) as followed:
        events = OURS.check_frames(followed.read())
    receipt = client.get(operation_path(operation_id))

    assert receipt.status_code == 200
    assert receipt.json()["operation_id"] == accepted.json()["operation_id"] == operation_id
    assert receipt.json()["state"] == "committed"
    assert {event["operation_id"] for event in events} == {operation_id}
    assert [event["sequence"] for event in events] == [*range(1, receipt.json()["progress_seq"] + 1)]
    page = client.get(POST, params={"after": operation_id, "limit": "1"})
    assert page.status_code == 200
    assert operation_id not in [each["operation_id"] for each in page.json()["operations"]]


def test_ids_that_look_alike_are_different_operations(client: ContractClient) -> None:
    base = str(uuid.uuid4())
    # Byte for byte: neither case, nor Unicode form, nor white space, nor an escape is folded.
    ids = [
        base + end
        for end in (
            "é",
            "e\u0301",
            "É",
            " é",
            "é ",
            "é\n",
            "%C3%A9",
            "é/",
            "/é",
            "é\0",
            "é/events",
            "é\u200b",
            "ｅ́",
            "é+",
            "é%20",
        )
    ]
    for operation_id in ids:
        assert client.post(POST, json=stream(operation_id, name=repr(operation_id))).status_code == 202

    assert [client.get(operation_path(each)).json()["operation_id"] for each in ids] == ids


def test_an_unknown_operation_is_not_found_on_both_routes(client: ContractClient) -> None:
    for operation_id in ("missing-operation", "a/b/c", "..", "/", "%", "é", "\0x", "i" * 5000):
        for rest in ("", "/events"):
            missing = client.get(operation_path(f"not-there-{operation_id}", rest))
            assert missing.status_code == 404
            assert missing.json() == {"error": f"operation 'not-there-{operation_id}' not found"}


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/api",
        "/api/v2/operations/",
        "/api/v2/operations//events",
        "/api/v2/operations/x/events/",
        "/api/v2/actions",
        "/api/v1/operations",
        "/docs",
        "/health/",
    ],
)
def test_a_path_that_is_no_route_is_not_found(client: ContractClient, target: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert client.request(method, target).status_code == 404


@pytest.mark.parametrize(
    "target", ["/api/v2/operations/%zz", "/api/v2/operations/%C3/events", "/%", "/health%F"]
)
def test_a_path_that_cannot_be_decoded_is_refused(client: ContractClient, target: str) -> None:
    refused = client.get(target)

    assert refused.status_code == 400
    assert refused.json()["error"].startswith("path: ")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST", "GET"])
def test_another_method_is_not_allowed(client: ContractClient, method: str) -> None:
    routes = {
        path.replace("{operation_id}", "x").replace("{memory_id}", "x").replace("{name}", "x"): item
        for path, item in OURS.document["paths"].items()
    }
    refused = 0
    for path, item in routes.items():
        if method.lower() not in item:
            response = client.request(method, path)
            assert response.status_code == 405
            assert {each.lower() for each in response.headers["allow"].split(", ")} == {*item} - {
                "parameters"
            }
            refused += 1
    assert refused >= 1


@pytest.mark.parametrize(
    "target",
    [
        "/health?x=1",
        "/ready?x=1",
        "/openapi.json?x=1",
        operation_path("x") + "?x=1",
        "/api/v2/memories/m?x=1",
    ],
)
def test_an_unknown_query_parameter_is_refused_by_name(client: ContractClient, target: str) -> None:
    refused = client.get(target)

    assert (refused.status_code, refused.json()["error"]) == (400, "x: unknown query parameter")


def test_health_and_readiness_have_the_shape_of_the_seed(client: ContractClient) -> None:
    assert client.get("/health").json() == {
        "service": "surreal-memory-server",
        "status": "ok",
        "version": "1.8.0",
    }
    ready = client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "ready"


def listed(client: ContractClient, **parameters: str) -> list[str]:
    """All pages of a list, read to the end."""
    found: list[str] = []
    while True:
        page = client.get(POST, params=parameters)
        assert page.status_code == 200
        found += [each["operation_id"] for each in page.json()["operations"]]
        if page.json()["next"] is None:
            return found
        assert page.json()["next"] == found[-1]
        parameters["after"] = page.json()["next"]


def test_lists_are_pages_in_acceptance_order(client: ContractClient) -> None:
    first = str(uuid.uuid4())
    client.post(POST, json=stream(first, name=first))
    ids = [f"{n}-{first}" for n in (9, 3, 7, 1, 8)]
    for operation_id in ids:
        client.post(POST, json=stream(operation_id, name=first))
    blocked = f"blocked-{first}"
    client.post(POST, json=memory(blocked) | {"dependencies": ["never-" + first]})
    for operation_id in ids:
        with client.following(operation_path(operation_id, "/events")) as followed:
            followed.read()
    with client.following(operation_path(blocked, "/events")) as followed:
        followed.read(3)

    for limit in ("1", "2", "5", "200"):
        assert listed(client, after=first, limit=limit) == [*ids, blocked]
        assert listed(client, after=first, limit=limit, state="committed") == ids
        assert listed(client, after=first, limit=limit, state="blocked") == [blocked]
        assert listed(client, after=first, limit=limit, kind="add_memory") == [blocked]
        assert listed(client, after=first, limit=limit, kind="create_task_stream", state="committed") == ids
    assert listed(client, after=blocked) == []
    for each in client.get(POST, params={"after": first}).json()["operations"]:
        assert each == client.get(operation_path(each["operation_id"])).json()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("state=done", "state"),
        ("state=", "state"),
        ("kind=remove_memory", "kind"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=-1", "limit"),
        ("limit=ten", "limit"),
        ("limit=", "limit"),
        ("after=there-is-no-such-operation", "after"),
        ("after=", "after"),
        ("limit=1&limit=2", "limit"),
        ("cursor=1", "cursor"),
    ],
)
def test_a_wrong_list_parameter_is_refused_by_name(client: ContractClient, query: str, field: str) -> None:
    refused = client.get(f"{POST}?{query}")

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"{field}: ")


def test_requests_on_one_connection_do_not_disturb_each_other(client: ContractClient, server: Server) -> None:
    """A refused body is not taken for the next request."""
    body = b'{"not": "read", "GET /health HTTP/1.1": 1}'
    with wire.connect(server.url) as connection:
        for _ in range(3):
            connection.sendall(
                wire.head("POST", POST, "Content-Type: text/plain", f"Content-Length: {len(body)}") + body
            )
            refused = wire.receive(connection)
            assert refused.status_code == 400
            assert refused.json()["error"].startswith("Content-Type: ")
            connection.sendall(wire.head("GET", "/health"))
            assert wire.receive(connection).json()["status"] == "ok"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"this is no request\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
)
def test_a_request_that_is_no_http_does_not_reach_a_route(server: Server, request_bytes: bytes) -> None:
    answer = wire.exchange(server.url, [request_bytes])

    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("text/plain")
    assert httpx.get(f"{server.url}/health").status_code == 200
