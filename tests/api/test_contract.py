"""The seed's file is the published one, our document contains it, and the judge of both can say no."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pytest

from muniment.config import Config
from muniment.core import canonical, payloads
from muniment.interfaces.http.app import routes
from muniment.interfaces.http.document import openapi_bytes
from muniment.interfaces.http.handlers import PAGE_ROWS_DEFAULT
from muniment.interfaces.http.recall_body import FIELDS, LIMIT_DEFAULT
from muniment.model.operation import Kind, State
from tests.support.seed_contract import (
    OURS,
    SEED,
    SEED_FILE,
    SEED_SHA256,
    Contract,
    ContractBrokenError,
    ContractClient,
    JSONObject,
    Pair,
)

WHAT_A_SERVER_ADDS: Final = "400"  # To GET routes: for a URL that the seed does not allow either.


def differences(ours: JSONObject, seed: JSONObject) -> list[str]:
    """Return where our document says something else than the seed. Texts and links may be added."""
    found = []
    mine, theirs = Contract(ours), Contract(seed)
    for path, item in seed["paths"].items():
        for method, operation in item.items():
            if method == "parameters":
                if ours["paths"][path]["parameters"] != operation:
                    found.append(f"{path}: parameters")
                continue
            shown = ours["paths"].get(path, {}).get(method, {})
            where = f"{method} {path}"
            added = shown.get("responses", {}).keys() - operation["responses"].keys()
            if not added <= ({WHAT_A_SERVER_ADDS} if method == "get" else set()):
                found.append(f"{where}: adds {sorted(added)}")
            found += [
                f"{where}: {field}"
                for field in ("operationId", "summary", "requestBody")
                if shown.get(field) != operation.get(field)
            ]
            found += [
                f"{where}: parameter {parameter['name']}"
                for parameter in operation.get("parameters", ())
                if parameter not in shown.get("parameters", ())
            ]
            if any(
                each.get("required")
                for each in shown.get("parameters", ())[len(operation.get("parameters", ())) :]
            ):
                found.append(f"{where}: a new required parameter")
            for status, response in theirs.resolve(operation["responses"]).items():
                mine_here = mine.resolve(shown.get("responses", {})).get(status, {}).get("content", {})
                for media_type, content in response["content"].items():
                    if {**content, **mine_here.get(media_type, {})} != mine_here.get(media_type):
                        found.append(f"{where}: {status} {media_type}")
                    if mine_here.get(media_type, {}).get("schema") != content["schema"]:
                        found.append(f"{where}: {status} schema")
                if mine_here.keys() != response["content"].keys():
                    found.append(f"{where}: {status} media types")
    for group, members in seed["components"].items():
        for name, member in members.items():
            if ours["components"].get(group, {}).get(name) != member:
                found.append(f"components/{group}/{name}")
    return found


def examples(document: JSONObject) -> Iterator[tuple[str, Any, Any]]:
    """Yield place, schema and value of every example that stands beside a schema."""

    def walk(where: str, node: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(node, dict):
            if "schema" in node and "example" in node:
                yield where, node["schema"], node["example"]
            for name, example in node.get("examples", {}).items() if "schema" in node else ():
                yield f"{where}/{name}", node["schema"], example["value"]
            for name, item in node.items():
                yield from walk(f"{where}/{name}", item)
        elif isinstance(node, list):
            for index, item in enumerate(node):
                yield from walk(f"{where}/{index}", item)

    yield from walk("", Contract(document).resolve(document))


def objects(node: Any) -> Iterator[JSONObject]:
    if isinstance(node, dict):
        yield node
    for item in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from objects(item)


def test_the_seed_is_kept_byte_for_byte() -> None:
    assert hashlib.sha256(SEED_FILE.read_bytes()).hexdigest() == SEED_SHA256


def test_our_document_contains_the_seed() -> None:
    assert differences(OURS.document, SEED.document) == []
    assert SEED.pairs() <= OURS.pairs()
    assert OURS.document["info"]["title"] == "Muniment"
    assert OURS.document["info"]["version"] == SEED.document["info"]["version"] == "1.8.0"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["paths"]["/ready"]["get"]["responses"].pop("503"), "get /ready: 503"),
        (lambda d: d["paths"]["/api/v2/operations"]["post"]["responses"].update({"422": {}}), "adds ['422']"),
        (
            lambda d: d["components"]["schemas"]["OperationReceipt"]["required"].pop(),
            "schemas/OperationReceipt",
        ),
        (
            lambda d: d["components"]["schemas"]["OperationState"]["enum"].append("lost"),
            "schemas/OperationState",
        ),
        (lambda d: d["paths"]["/health"]["get"].update(operationId="alive"), "operationId"),
        (
            lambda d: d["paths"]["/api/v2/operations/{operation_id}/events"]["get"]["parameters"].pop(0),
            "after",
        ),
    ],
)
def test_control_a_document_that_says_something_else_is_noticed(
    change: Callable[[JSONObject], object], complaint: str
) -> None:
    changed = copy.deepcopy(OURS.document)
    change(changed)

    assert any(complaint in found for found in differences(changed, SEED.document))


def test_the_router_has_the_routes_of_the_document() -> None:
    declared = {
        (path, method.upper())
        for path, item in OURS.document["paths"].items()
        for method in item
        if method != "parameters"
    }

    assert {(route.path, method) for route in routes() for method in route.methods} == declared


def test_every_example_is_true() -> None:
    seen = 0
    for where, schema, value in examples(OURS.document):
        OURS.validate(value, schema) if schema["type"] != "string" else OURS.check_frames(value.encode())
        seen += 1
        assert where
    hashes = [
        (each["payload_hash"], canonical.payload_hash(each["payload"]))
        for each in objects(OURS.document)
        if "payload_hash" in each
        and isinstance(each.get("payload"), dict)
        and "schema_version" in each
        and "type" not in each["payload"]
    ]

    assert seen >= 20
    assert len(hashes) >= 2
    assert [pair for pair in hashes if pair[0] != pair[1]] == []
    shown = OURS.document["components"]["examples"]["Memory"]["value"]
    assert hashlib.sha256(shown["content"].encode()).hexdigest() == shown["content_sha256"]


def test_every_link_leads_to_an_operation_and_its_parameters() -> None:
    operations = {
        operation["operationId"]: {
            each["name"]
            for each in OURS.resolve([*item.get("parameters", ()), *operation.get("parameters", ())])
        }
        for item in OURS.document["paths"].values()
        for method, operation in item.items()
        if method != "parameters"
    }
    links = [link for each in objects(OURS.document["paths"]) for link in each.get("links", {}).values()]

    assert len(links) >= 9
    assert [link for link in links if not link["parameters"].keys() <= operations[link["operationId"]]] == []


def test_the_document_says_what_the_code_does() -> None:
    schemas, config = OURS.document["components"]["schemas"], Config()
    listed = {
        each["name"]: each["schema"]
        for each in OURS.document["paths"]["/api/v2/operations"]["get"]["parameters"]
    }
    kinds = {
        Kind.ADD_MEMORY: "AddMemoryPayload",
        Kind.CREATE_TASK_STREAM: "CreateTaskStreamPayload",
        Kind.ADD_TASK_STEP: "AddTaskStepPayload",
        Kind.COMPLETE_STEP: "CompleteStepPayload",
    }

    assert schemas["OperationState"]["enum"] == list(State)
    assert schemas["OperationKind"]["enum"] == list(Kind)
    assert {*schemas["RecallRequest"]["properties"]} == {*FIELDS}
    assert schemas["RecallRequest"]["properties"]["limit"]["maximum"] == config.recall_limit_max
    assert schemas["RecallRequest"]["properties"]["limit"]["default"] == LIMIT_DEFAULT
    assert listed["limit"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": config.page_rows_max,
        "default": PAGE_ROWS_DEFAULT,
    }
    for kind, name in kinds.items():
        assert {*schemas[name]["properties"]} == {*payloads.FIELDS[kind]}
        assert schemas[name]["required"] == list(payloads.REQUIRED[kind])


def test_not_blank_means_the_same_to_the_document_and_to_the_code() -> None:
    schemas = OURS.document["components"]["schemas"]
    patterns = {each["pattern"] for each in objects(schemas) if str(each.get("pattern", "")).startswith("[^")}
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]

    assert len(patterns) == 1
    filled = re.compile(patterns.pop())
    assert [each for each in characters if (filled.search(each) is None) != each.isspace()] == []


def test_the_document_is_served_as_it_is_shipped(client: ContractClient) -> None:
    assert client.get("/openapi.json").content == openapi_bytes()


# Controls of the judge: one answer for each thing that it is there to refuse.

RECEIPT: Final = SEED.document["components"]["examples"]["CommittedReceipt"]["value"]
FRAME: Final = SEED.document["paths"]["/api/v2/operations/{operation_id}/events"]["get"]["responses"]["200"][
    "content"
]["text/event-stream"]["example"].encode()
POST: Final = ("POST", "/api/v2/operations")
GET: Final = ("GET", "/api/v2/operations/x")
STREAM: Final = ("GET", "/api/v2/operations/x/events")


def judged(
    contract: Contract,
    method: str,
    target: str,
    status: int,
    value: object,
    media_type: str = "application/json",
) -> Pair | None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = httpx.Headers({"content-type": media_type} | ({"retry-after": "1"} if status == 503 else {}))
    return contract.check(httpx.Request(method, f"http://127.0.0.1{target}"), status, headers, body)


def test_the_judge_accepts_what_the_seed_shows() -> None:
    assert judged(SEED, *POST, 202, RECEIPT) == Pair("POST", "/api/v2/operations", 202)
    assert judged(SEED, *GET, 200, RECEIPT) == Pair("GET", "/api/v2/operations/{operation_id}", 200)
    assert judged(SEED, *STREAM, 200, FRAME, "text/event-stream; charset=utf-8") is not None
    assert judged(SEED, *GET, 404, {"error": "operation 'x' not found"}) is not None
    assert judged(SEED, "GET", "/api/v2/operations/x?after=1", 400, {"error": "after: unknown"}) is not None
    assert judged(SEED, "GET", "/api/v2/operations/%zz", 400, {"error": "path"}) is not None
    assert judged(SEED, "GET", "/api/v2/operations/", 404, {"error": "no route"}) is None


@pytest.mark.parametrize(
    ("method", "target", "status", "value", "media_type"),
    [
        (*GET, 500, {"error": "x"}, "application/json"),
        (*GET, 400, {"error": "x"}, "application/json"),
        (*STREAM, 400, {"error": "x"}, "application/json"),
        (
            "GET",
            "/api/v2/operations/x/events?after=18446744073709551615",
            400,
            {"error": "x"},
            "application/json",
        ),
        (*POST, 422, {"error": "x"}, "application/json"),
        (*POST, 413, {"error": "x"}, "application/json"),
        (*POST, 409, {"error": "x", "advice": "y"}, "application/json"),
        (*POST, 409, {"error": None}, "application/json"),
        (*POST, 409, {"error": "x"}, "text/plain"),
        (*POST, 202, {**RECEIPT, "advice": "y"}, "application/json"),
        (*POST, 202, {**RECEIPT, "created_at": "2026-08-03 12:00:00Z"}, "application/json"),
        (*POST, 202, {**RECEIPT, "created_at": "2026-08-33T12:00:00Z"}, "application/json"),
        (*POST, 202, {**RECEIPT, "progress_seq": -1}, "application/json"),
        (*POST, 202, {**RECEIPT, "progress_seq": 2**64}, "application/json"),
        (*POST, 202, {**RECEIPT, "state": "done"}, "application/json"),
        (*POST, 202, {**RECEIPT, "schema_version": 3}, "application/json"),
        (*POST, 202, {name: RECEIPT[name] for name in RECEIPT if name != "error"}, "application/json"),
        (*POST, 202, b"not json", "application/json"),
        (*STREAM, 200, FRAME, "application/json"),
        (*STREAM, 200, FRAME.replace(b"id: 1", b"id: 2"), "text/event-stream"),
        (*STREAM, 200, FRAME.replace(b'"detail":null,', b""), "text/event-stream"),
        (*STREAM, 200, FRAME.replace(b"\n\n", b"\n"), "text/event-stream"),
        (*STREAM, 200, FRAME.replace(b"operation_state", b"message"), "text/event-stream"),
        ("GET", "/api/v2/nothing", 400, {"error": "x"}, "application/json"),
        ("PUT", "/api/v2/operations", 405, {"error": "no Allow"}, "application/json"),
    ],
)
def test_control_the_judge_refuses(
    method: str, target: str, status: int, value: object, media_type: str
) -> None:
    with pytest.raises((ContractBrokenError, ValueError)):
        judged(SEED, method, target, status, value, media_type)
