"""POST /api/v2/operations: one 202 and then 200, 409 for other content, 400 that names what is wrong."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.api.conftest import LIMITS
from tests.support import wire
from tests.support.seed_contract import SEED, ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import envelope, memory, payload_hash, stream

POST: Final = "/api/v2/operations"
JSONObject = dict[str, Any]


def fresh(prefix: str = "submit") -> str:
    """An ID that no other test has used on the shared server."""
    return f"{prefix}-{uuid.uuid4()}"


def is_stored(client: ContractClient, operation_id: str) -> bool:
    return client.get(operation_path(operation_id)).status_code == 200


def settled(client: ContractClient, operation_id: str) -> JSONObject:
    """The terminal receipt, after following the operation to its end."""
    with client.following(operation_path(operation_id, "/events")) as followed:
        followed.read()
    receipt: JSONObject = client.get(operation_path(operation_id)).json()
    return receipt


def test_a_new_id_is_accepted_once_and_replayed_after(client: ContractClient) -> None:
    submission = memory(fresh(), "Receipts are the acknowledgement boundary.", user_id="ann")
    first = client.post(POST, json=submission)
    final = settled(client, submission["operation_id"])
    again = client.post(POST, json=submission)

    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["state"] == "accepted"
    assert first.json()["progress_seq"] == 1
    assert final["state"] == "committed"
    assert final["progress_seq"] == 6
    assert again.json() == final == client.get(operation_path(submission["operation_id"])).json()


def test_the_examples_of_the_seed_are_accepted(client: ContractClient) -> None:
    examples = SEED.document["paths"][POST]["post"]["requestBody"]["content"]["application/json"]["examples"]
    for name, status in (("addMemory", 202), ("responseLossReconciliation", 200), ("longLogicalMemory", 202)):
        submission = SEED.resolve(examples[name])["value"]
        assert client.post(POST, json=submission).status_code == status, name
        assert settled(client, submission["operation_id"])["state"] == "committed"


def test_other_content_under_a_known_id_is_a_conflict(client: ContractClient) -> None:
    submission = memory(fresh(), "first")
    client.post(POST, json=submission)
    before = settled(client, submission["operation_id"])
    refused = client.post(POST, json=memory(submission["operation_id"], "second"))

    assert refused.status_code == 409
    known, stored = submission["operation_id"], submission["payload_hash"]
    assert refused.json()["error"] == f"operation_id '{known}' already exists with payload_hash {stored}"
    assert client.get(operation_path(known)).json() == before


def test_a_wrong_hash_is_refused_with_both_hashes(client: ContractClient) -> None:
    submission = memory(fresh(), "x") | {"payload_hash": "0" * 64}
    refused = client.post(POST, json=submission)

    assert refused.status_code == 400
    assert refused.json()["error"] == (
        f"payload_hash mismatch: request supplied {'0' * 64}, "
        f"canonical payload is {payload_hash(submission['payload'])}"
    )
    assert not is_stored(client, submission["operation_id"])


def without(name: str) -> Callable[[JSONObject], JSONObject]:
    return lambda submission: {key: value for key, value in submission.items() if key != name}


def changed(**fields: Any) -> Callable[[JSONObject], JSONObject]:
    return lambda submission: submission | fields


def paid(kind: str, payload: Any) -> Callable[[JSONObject], JSONObject]:
    return lambda submission: envelope(submission["operation_id"], kind, payload)


ENVELOPE: Final = [
    (without("operation_id"), "operation_id"),
    (without("schema_version"), "schema_version"),
    (without("kind"), "kind"),
    (without("payload_hash"), "payload_hash"),
    (without("payload"), "payload"),
    (changed(operation_id=""), "operation_id"),
    (changed(operation_id=7), "operation_id"),
    (changed(operation_id=None), "operation_id"),
    (changed(operation_id="i" * 1025), "operation_id"),
    (changed(operation_id="é" * 513), "operation_id"),
    (changed(schema_version=1), "schema_version"),
    (changed(schema_version="2"), "schema_version"),
    (changed(schema_version=True), "schema_version"),
    (changed(kind="remove_memory"), "kind"),
    (changed(kind="record_context"), "kind"),
    (changed(kind=["add_memory"]), "kind"),
    (changed(payload_hash="A" * 64), "payload_hash"),
    (changed(payload_hash="0" * 63), "payload_hash"),
    (changed(payload_hash=None), "payload_hash"),
    (changed(payload=[]), "payload"),
    (changed(payload=None), "payload"),
    (changed(dependencies=None), "dependencies"),
    (changed(dependencies="a"), "dependencies"),
    (changed(dependencies={}), "dependencies"),
    (changed(dependencies=[1]), "dependencies"),
    (changed(dependencies=["a", ""]), "dependencies[1]"),
    (lambda each: each | {"dependencies": [each["operation_id"]]}, "dependencies[0]"),
    (changed(dependencies=["d" * 1025]), "dependencies[0]"),
    (changed(dependencies=[f"d{n}" for n in range(LIMITS["dependencies_max"] + 1)]), "dependencies"),
    (changed(dependancies=[]), "dependancies"),
    (changed(metadata={}), "metadata"),
]
PAYLOAD: Final = [
    (paid("add_memory", {}), "payload.content"),
    (paid("add_memory", {"content": None}), "payload.content"),
    (paid("add_memory", {"content": ""}), "payload.content"),
    (paid("add_memory", {"content": " \n\t\u3000"}), "payload.content"),
    (paid("add_memory", {"content": ["x"]}), "payload.content"),
    (paid("add_memory", {"content": "x" * (LIMITS["content_bytes_max"] + 1)}), "payload.content"),
    (paid("add_memory", {"content": "é" * (LIMITS["content_bytes_max"] // 2 + 1)}), "payload.content"),
    (paid("add_memory", {"content": "x", "metadata": {"k": "x" * 10_000}}), "payload"),
    (paid("add_memory", {"content": "x", "catgories": []}), "payload.catgories"),
    (paid("add_memory", {"content": "x", "categories": "a"}), "payload.categories"),
    (paid("add_memory", {"content": "x", "categories": ["a", 1]}), "payload.categories[1]"),
    (paid("add_memory", {"content": "x", "user_id": 7}), "payload.user_id"),
    (paid("add_memory", {"content": "x", "session_id": {}}), "payload.session_id"),
    (paid("add_memory", {"content": "x", "role": "narrator"}), "payload.role"),
    (paid("add_memory", {"content": "x", "space": "kitchen"}), "payload.space"),
    (paid("add_memory", {"content": "x", "visibility": "public"}), "payload.visibility"),
    (paid("add_memory", {"content": "x", "session_seq": -1}), "payload.session_seq"),
    (paid("add_memory", {"content": "x", "session_seq": True}), "payload.session_seq"),
    (paid("add_memory", {"content": "x", "occurred_at": "yesterday"}), "payload.occurred_at"),
    (paid("add_memory", {"content": "x", "expires_at": "2026-01-01T00:00:00"}), "payload.expires_at"),
    (paid("add_memory", {"content": "x", "metadata": []}), "payload.metadata"),
    (paid("add_memory", {"content": "x", "quotes": [{"start": 0}]}), "payload.quotes[0].end"),
    (paid("add_memory", {"content": "x", "quotes": [{"start": 0, "end": 2}]}), "payload.quotes[0]"),
    (paid("add_memory", {"content": "é", "quotes": [{"start": 0, "end": 1}]}), "payload.quotes[0].end"),
    (paid("create_task_stream", {}), "payload.name"),
    (paid("create_task_stream", {"name": " "}), "payload.name"),
    (paid("create_task_stream", {"name": "x", "content": "y"}), "payload.content"),
    (paid("add_task_step", {"name": "x", "idempotency_key": "k"}), "payload.stream_name"),
    (paid("add_task_step", {"stream_name": "s", "name": "x"}), "payload.idempotency_key"),
    (
        paid("add_task_step", {"stream_name": "s", "name": "x", "idempotency_key": "k", "ordinal": "1"}),
        "payload.ordinal",
    ),
    (paid("complete_step", {}), "payload.idempotency_key"),
    (paid("complete_step", {"idempotency_key": "k", "stream": "s"}), "payload.stream"),
]


@pytest.mark.parametrize(("change", "field"), [*ENVELOPE, *PAYLOAD])
def test_what_is_wrong_is_named_and_nothing_is_stored(
    client: ContractClient, change: Callable[[JSONObject], JSONObject], field: str
) -> None:
    submission = change(memory(fresh()))
    refused = client.post(POST, json=submission)

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"{field}: "), refused.json()
    operation_id = submission.get("operation_id")
    if isinstance(operation_id, str) and operation_id:
        assert not is_stored(client, operation_id)


def body_of(submission: JSONObject) -> bytes:
    return json.dumps(submission, ensure_ascii=False).encode()


def doubled(submission: JSONObject) -> bytes:
    return body_of(submission).replace(b'"schema_version": 2', b'"schema_version": 2, "schema_version": 2')


MALFORMED: Final[list[tuple[Callable[[JSONObject], bytes], str]]] = [
    (lambda each: b"", "not JSON"),
    (lambda each: b"[" + body_of(each) + b"]", "the body must be a JSON object"),
    (lambda each: b'"text"', "the body must be a JSON object"),
    (lambda each: body_of(each)[:-1], "not JSON"),
    (lambda each: body_of(each) + b"{}", "not JSON"),
    (lambda each: body_of(each).replace(b"}", b",}", 1), "not JSON"),
    (lambda each: b"\xef\xbb\xbf" + body_of(each), "byte order mark"),
    (lambda each: body_of(each).replace(b"kettle", b"kettl\xe9"), "not UTF-8"),
    (lambda each: body_of(each).replace(b"kettle", b"\xed\xa0\x80"), "not UTF-8"),
    (lambda each: body_of(each).decode().encode("utf-16"), "not UTF-8"),
    (lambda each: body_of(each).replace(b"kettle", b"\\ud800"), "lone surrogate"),
    (doubled, "duplicate key"),
    (lambda each: body_of(each).replace(b'{"content"', b'{"content": "a", "content"'), "duplicate key"),
    (lambda each: body_of(each).replace(b'{"content"', b'{"m": 1e400, "content"'), "number out of range"),
    (lambda each: body_of(each).replace(b'{"content"', b'{"m": NaN, "content"'), "not JSON"),
    (
        lambda each: body_of(each).replace(b'{"content"', b'{"m": 18446744073709551616, "content"'),
        "number out of range",
    ),
    (
        lambda each: body_of(each).replace(
            b'{"content"', b'{"m": ' + b"[" * 130 + b"]" * 130 + b', "content"'
        ),
        "nested too deep",
    ),
]


@pytest.mark.parametrize(("make", "words"), MALFORMED)
def test_a_body_without_one_meaning_is_refused(
    client: ContractClient, make: Callable[[JSONObject], bytes], words: str
) -> None:
    submission = memory(fresh())
    assert b"kettle" in body_of(submission)
    refused = client.post(POST, content=make(submission), headers={"content-type": "application/json"})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith(words), refused.json()
    assert not is_stored(client, submission["operation_id"])


def test_checks_come_in_the_order_of_the_contract(client: ContractClient) -> None:
    stored = memory(fresh(), "stored")
    client.post(POST, json=stored)
    known = stored["operation_id"]

    def answer(submission: JSONObject, **options: Any) -> tuple[int, str]:
        response = client.post(POST, **({"json": submission} | options))
        return response.status_code, response.json().get("error", "")

    # Parse before envelope, envelope before hash.
    assert answer({}, content=doubled(stored | {"kind": "none"}))[1].startswith("duplicate key")
    assert answer(stored | {"kind": "none", "payload_hash": "0" * 64})[1].startswith("kind: ")
    # The hash before the look-up: a false body gets neither 200 nor 409.
    assert answer(stored | {"payload": {"content": "other"}})[1].startswith("payload_hash mismatch")
    assert answer(stored | {"payload_hash": "0" * 64})[1].startswith("payload_hash mismatch")
    # The look-up before payload and dependencies: what is wrong in them does not hide that the ID is taken.
    assert answer(envelope(known, "add_memory", {"content": " "}))[0] == 409
    assert answer(envelope(known, "add_memory", {"content": "other", "unknown": 1}))[0] == 409
    assert answer(stored | {"dependencies": [""]})[0] == 200
    assert answer(stored | {"dependencies": [known]})[0] == 200
    # Dependencies before the payload.
    assert answer(envelope(fresh(), "add_memory", {}, dependencies=[""]))[1].startswith("dependencies[0]: ")


def test_a_replay_does_not_fail_on_a_limit_that_came_later(tmp_path: Path) -> None:
    submission = memory("long", "word " * 100)
    with Server(tmp_path / "memory") as server, ContractClient(server.url) as client:
        server.wait_ready()
        assert client.post(POST, json=submission).status_code == 202
        first = settled(client, "long")
        assert server.terminate() == 0
    with Server(tmp_path / "memory", content_bytes_max=10) as server, ContractClient(server.url) as client:
        server.wait_ready()
        again = client.post(POST, json=submission)
        assert (again.status_code, again.json()) == (200, first)
        assert client.post(POST, json=memory("longer", "word " * 100)).status_code == 400


def test_a_dependency_that_closes_a_cycle_is_refused(client: ContractClient) -> None:
    one, two, three = fresh(), fresh(), fresh()
    assert (
        client.post(
            POST,
            json=memory(
                one,
                "1",
            )
            | {"dependencies": [two]},
        ).status_code
        == 202
    )
    assert client.post(POST, json=memory(two, "2") | {"dependencies": [three]}).status_code == 202
    refused = client.post(POST, json=memory(three, "3") | {"dependencies": [one]})

    assert refused.status_code == 400
    assert refused.json()["error"].startswith("dependencies: ")
    assert not is_stored(client, three)


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        'application/json; charset="utf-8"',
        "application/json;",
    ],
)
def test_a_json_content_type_or_none_is_accepted(client: ContractClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}

    assert client.post(POST, content=body_of(stream(fresh())), headers=headers).status_code == 202


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "application/json, text/plain",
        "application/merge-patch+json",
        "multipart/form-data; boundary=application/json",
        "é",
    ],
)
def test_another_content_type_is_refused(client: ContractClient, content_type: str) -> None:
    submission = memory(fresh())
    refused = client.post(
        POST, content=body_of(submission), headers=[(b"content-type", content_type.encode("latin-1"))]
    )

    assert refused.status_code == 400
    assert refused.json()["error"].startswith("Content-Type: ")
    assert not is_stored(client, submission["operation_id"])


def test_a_query_parameter_is_refused(client: ContractClient) -> None:
    submission = memory(fresh())
    refused = client.post(f"{POST}?dry_run=1", json=submission)

    assert (refused.status_code, refused.json()["error"]) == (400, "dry_run: unknown query parameter")
    assert not is_stored(client, submission["operation_id"])


# Bodies as they come over the wire.

LIMIT: Final = LIMITS["body_bytes_max"]
JSON_HEADER: Final = "Content-Type: application/json"


def judged(client: ContractClient, server: Server, response: httpx.Response) -> httpx.Response:
    client.judge(
        httpx.Request("POST", server.url + POST), response.status_code, response.headers, response.content
    )
    return response


def padded(submission: JSONObject, byte_count: int) -> bytes:
    body = body_of(submission)
    return body + b" " * (byte_count - len(body))


def test_a_body_may_be_as_long_as_the_limit(client: ContractClient) -> None:
    exactly, over = memory(fresh()), memory(fresh())
    answers = [
        client.post(POST, content=padded(exactly, LIMIT)),
        client.post(POST, content=padded(over, LIMIT + 1)),
    ]

    assert [answer.status_code for answer in answers] == [202, 400]
    assert answers[1].json()["error"] == f"body: is {LIMIT + 1} bytes, the limit is {LIMIT}"
    assert answers[1].headers["connection"] == "close"
    assert not is_stored(client, over["operation_id"])


def test_a_body_that_is_announced_too_long_is_refused_unread(client: ContractClient, server: Server) -> None:
    for expect in ((), ("Expect: 100-continue",)):
        request = wire.head("POST", POST, JSON_HEADER, f"Content-Length: {10**12}", *expect)
        refused = judged(client, server, wire.exchange(server.url, [request]))

        assert refused.status_code == 400
        assert refused.json()["error"] == f"body: is {10**12} bytes, the limit is {LIMIT}"
        assert refused.headers["connection"] == "close"


def test_a_chunked_body_is_refused_once_it_passes_the_limit(client: ContractClient, server: Server) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield wire.head("POST", POST, JSON_HEADER, "Transfer-Encoding: chunked")
        while sent < 100 * LIMIT:
            yield wire.chunk(b" " * 50_000)
            sent += 50_000

    refused = judged(client, server, wire.exchange(server.url, endless()))

    assert refused.status_code == 400
    assert refused.json()["error"] == f"body: is longer than the limit of {LIMIT} bytes"
    assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_a_chunked_body_is_one_body(client: ContractClient, server: Server, piece_bytes: int) -> None:
    submission = memory(fresh(), "Zwölf Boxkämpfer 💩")
    body = body_of(submission)
    pieces = [wire.chunk(body[start : start + piece_bytes]) for start in range(0, len(body), piece_bytes)]
    request = wire.head("POST", POST, JSON_HEADER, "Transfer-Encoding: chunked")
    accepted = judged(client, server, wire.exchange(server.url, [request, *pieces, wire.chunk(b"")]))

    assert accepted.status_code == 202
    assert settled(client, submission["operation_id"])["state"] == "committed"


def test_a_slow_body_holds_up_nobody(client: ContractClient, server: Server) -> None:
    submission = memory(fresh())
    body = body_of(submission)
    answers: list[httpx.Response] = []

    def slowly() -> Iterator[bytes]:
        yield wire.head("POST", POST, JSON_HEADER, f"Content-Length: {len(body)}")
        for start in range(0, len(body), 10):
            time.sleep(0.02)
            yield body[start : start + 10]

    sending = threading.Thread(target=lambda: answers.append(wire.exchange(server.url, slowly())))
    sending.start()
    others = 0
    while sending.is_alive():
        assert client.post(POST, json=stream(fresh())).status_code == 202
        others += 1
    sending.join()

    assert others >= 5
    assert judged(client, server, answers[0]).status_code == 202


def test_a_client_that_leaves_before_the_end_has_said_nothing(client: ContractClient, server: Server) -> None:
    submission = memory(fresh())
    body = body_of(submission)
    for cut in (0, 1, len(body) // 2, len(body) - 1):
        with wire.connect(server.url) as connection:
            connection.sendall(
                wire.head("POST", POST, JSON_HEADER, f"Content-Length: {len(body)}") + body[:cut]
            )
            time.sleep(0.05)
    time.sleep(0.1)

    assert not is_stored(client, submission["operation_id"])
    assert "request failed" not in server.log


def test_arrays_that_go_on_after_deep_ones_end_no_server(tmp_path: Path) -> None:
    """A JSON writer that reserves too little writes past its buffer here, and takes the process with it."""
    deep: Any = None
    for _ in range(120):
        deep = [deep, *([None] * 16)]
    with Server(tmp_path / "store") as server, ContractClient(server.url) as client:
        server.wait_ready("ingestion_ready")
        for number in range(20):
            body = memory(f"deep-{number}", metadata={"deep": deep})
            assert client.post("/api/v2/operations", json=body).status_code == 202
        assert client.get("/api/v2/operations/deep-0").status_code == 200
        assert server.terminate() == 0
