"""Generated requests against a live server: every answer is one that the documents declare.

Both documents are fuzzed: ours with the payloads of the kinds spelled out, and the seed's with links added. A
schema cannot say that a hash is right, so most generated submissions are completed before they are sent; some
stay wrong on purpose and must be refused.
"""

import copy
import itertools
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import hypothesis
import pytest
import requests
import schemathesis
from requests.adapters import HTTPAdapter
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance

from muniment.core import canonical
from muniment.errors import Malformed
from tests.support import submissions
from tests.support.seed_contract import OURS, SEED, JSONObject
from tests.support.server import Server

Case: TypeAlias = "schemathesis.Case[Any]"
CASES: Final = int(os.environ.get("MUNIMENT_FUZZ_CASES", "500"))
"""Generated cases an endpoint; a smaller number is for a quick look only."""
SCENARIOS: Final = max(1, CASES // 5)
"""Chains of requests along the links, each of several steps."""
RUN: Final = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # One for all processes of a run.
SEED_OF_RUN: Final = int(os.environ.get("MUNIMENT_FUZZ_SEED", zlib.crc32(RUN.encode())))
STREAM_SECONDS: Final = 0.15
REQUEST_SECONDS: Final = 20.0
ID_BYTES_MAX: Final = 1024
PAYLOADS: Final = {
    "add_memory": "AddMemoryPayload",
    "create_task_stream": "CreateTaskStreamPayload",
    "add_task_step": "AddTaskStepPayload",
    "complete_step": "CompleteStepPayload",
}


def with_kinds(document: JSONObject) -> JSONObject:
    """Our document with the payloads of the kinds spelled out, so that they are fuzzed too."""
    changed = copy.deepcopy(document)
    schemas = changed["components"]["schemas"]
    request = schemas["OperationRequest"]
    schemas["OperationRequest"] = {
        "anyOf": [
            {
                **request,
                "properties": {
                    **request["properties"],
                    "kind": {"const": kind},
                    "payload": {"$ref": f"#/components/schemas/{name}"},
                },
            }
            for kind, name in PAYLOADS.items()
        ]
    }
    return changed


def with_links(document: JSONObject) -> JSONObject:
    """The seed with the links of our document, and with what it leaves unsaid: wrong URLs, our list."""
    changed = copy.deepcopy(document)
    for item in changed["paths"].values():
        if "get" in item:
            item["get"]["responses"]["400"] = OURS.document["components"]["responses"]["BadQuery"]
    changed["paths"]["/api/v2/operations"]["get"] = OURS.resolve(
        OURS.document["paths"]["/api/v2/operations"]["get"]
    )
    for status in ("200", "202"):
        links = OURS.document["paths"]["/api/v2/operations"]["post"]["responses"][status]["links"]
        changed["paths"]["/api/v2/operations"]["post"]["responses"][status]["links"] = links
    return changed


def seldom(value: object, one_in: int) -> bool:
    """True for one in so many values, and always for the same ones."""
    return digest(value) % one_in == 0


def digest(value: object) -> int:
    return zlib.crc32(repr(value).encode("utf-8", "backslashreplace"))


def payload_of(kind: str, given: Mapping[str, Any]) -> JSONObject:
    """A right payload of a kind that holds what was generated, where the document leaves payloads open."""
    text = json.dumps(given)[:2000]
    match kind:
        case "add_memory":
            return {"content": text, "metadata": given}
        case "create_task_stream":
            return {"name": "fuzz", "description": None}
        case "add_task_step":
            return {"stream_name": "fuzz", "name": text, "idempotency_key": text}
        case _:
            return {"idempotency_key": text, "result": given}


def completed(body: JSONObject, operation_id: str, *, open_payload: bool) -> JSONObject:
    """A generated submission made right: what a schema cannot say about hash, ID, dependencies and quotes."""
    operation_id = operation_id.encode()[-ID_BYTES_MAX:].decode("utf-8", "ignore")
    payload = payload_of(body["kind"], body["payload"]) if open_payload else dict(body["payload"])
    for name in ("session_seq", "ordinal"):
        if isinstance(payload.get(name), float):  # 1.0 is an integer to a schema; to a hash it is not 1.
            payload[name] = int(payload[name])
    if payload.get("quotes"):
        end = len(payload["content"].encode())
        payload["quotes"] = [{**quote, "start": 0, "end": end} for quote in payload["quotes"]]
    right = {**body, "operation_id": operation_id, "payload": payload}
    if "dependencies" in body:
        # An operation waits only for smaller IDs: a cycle would be refused.
        right["dependencies"] = [
            each
            for each in body["dependencies"]
            if each < operation_id and len(each.encode()) <= ID_BYTES_MAX
        ]
    return {**right, "payload_hash": canonical.payload_hash(payload)}


def prepared(case: Case, *, open_payload: bool, unique: str | None = None) -> tuple[int, ...]:
    """Complete a case that its document calls right; for one that was left wrong, return what may follow."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return ()
    name, body = case.operation.definition.raw.get("operationId"), case.body
    if name == "submitOperation" and isinstance(body, dict):
        if seldom(body, 8):
            return () if has_hash(body) else (400,)
        try:
            case.body = completed(body, told_apart(body, unique), open_payload=open_payload)
        except Malformed:  # An integer that has no canonical form.
            return (400,)
    if name == "listOperations" and "after" in (case.query or {}):
        if seldom(case.query, 4):
            return (200, 400)  # Some other case may have made that operation.
        case.query = {key: value for key, value in case.query.items() if key != "after"}
    return ()


def has_hash(body: JSONObject) -> bool:
    """Whether the hash of a generated submission happens to be right."""
    try:
        return canonical.payload_hash(body["payload"]) == str(body["payload_hash"])
    except Malformed:
        return False


def told_apart(body: JSONObject, unique: str | None) -> str:
    """The ID to send: generated ones are mostly the same few, and would be conflicts. Some stay."""
    operation_id: str = body["operation_id"]
    if unique is not None:
        return f"{operation_id}/{unique}"
    return operation_id if seldom(body, 3) else f"{operation_id}/{digest(body)}"


class Adapter(HTTPAdapter):
    """Reads of an event stream what comes within a moment: those of unfinished operations have no end."""

    def send(self, request: Any, **options: Any) -> requests.Response:  # type: ignore[override]
        options |= {"stream": True, "timeout": REQUEST_SECONDS}
        response = super().send(request, **options)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            give_up = time.monotonic() + STREAM_SECONDS
            received = b""
            for chunk in response.raw.stream(65536):
                received += chunk
                if time.monotonic() > give_up:
                    break
            response.close()
            response._content = received
            response._content_consumed = True
        return response


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("fuzz") / "memory"
    with Server(directory, event_keepalive_seconds=0.05, operation_id_bytes_max=ID_BYTES_MAX) as server:
        server.wait_ready("search_ready")
        # A list that is not empty: chains begin with it, whichever test is the first one here.
        for number in range(3):
            body = submissions.memory(f"there-before-{number}")
            assert requests.post(f"{server.url}/api/v2/operations", json=body, timeout=10).status_code == 202
        yield server
        assert "request failed" not in server.log


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        opened.mount("http://", Adapter())
        yield opened


class Tally:
    """What was answered how often, of the cases of one test."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()

    def add(self, case: Case, status: int) -> None:
        self.answers[case.operation.label, status] += 1

    def count(self, *statuses: int) -> int:
        return sum(count for (_, status), count in self.answers.items() if not statuses or status in statuses)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    counted = Tally()
    yield counted
    print(f"repeat with MUNIMENT_FUZZ_SEED={SEED_OF_RUN}; answers: {sorted(counted.answers.items())}")
    labels = {label for label, _ in counted.answers}
    if labels == {SUBMIT}:
        # Every kind of answer, or the bodies are not completed as they should be.
        assert counted.count(202) >= CASES // 10
        assert counted.count(400) >= CASES // 10
        assert counted.count(200) + counted.count(409) >= 1
    if len(labels) == 1 and not labels & WITHOUT_PARAMETERS:
        assert counted.count() >= CASES


def sent(case: Case, server: Server, session: requests.Session, tally: Tally, *, open_payload: bool) -> None:
    """Send a case and check the answer with all checks of the library, and that what is wrong is refused."""
    expected = prepared(case, open_payload=open_payload)
    response = case.call_and_validate(
        base_url=server.url, session=session, excluded_checks=[positive_data_acceptance] if expected else []
    )
    assert not expected or response.status_code in expected
    tally.add(case, response.status_code)


def loaded(document: JSONObject) -> schemathesis.BaseSchema:
    """A document for the library, which does not know what format uint64 means."""
    changed = copy.deepcopy(document)
    for parameter in changed["paths"]["/api/v2/operations/{operation_id}/events"]["get"]["parameters"]:
        if parameter["schema"].get("format") == "uint64":
            parameter["schema"]["maximum"] = 2**64 - 1
    schema = schemathesis.openapi.from_dict(changed)
    schema.config.seed = SEED_OF_RUN
    schema.config.output.sanitization.update(enabled=False)
    return schema


SUBMIT: Final = "POST /api/v2/operations"
WITHOUT_PARAMETERS: Final = {"GET /health", "GET /ready", "GET /openapi.json", "GET /api/v2/status"}
SETTINGS: Final = hypothesis.settings(max_examples=CASES, suppress_health_check=list(hypothesis.HealthCheck))
ours: Final = loaded(with_kinds(OURS.document))
# What both documents have is fuzzed as the seed's, but for the payloads, which only ours describes.
OURS_ALONE: Final = ours.exclude(operation_id=["health", "ready", "getOperation", "streamOperationEvents"])
seed: Final = loaded(with_links(SEED.document)).exclude(operation_id="listOperations")


@OURS_ALONE.parametrize()
@SETTINGS
def test_our_document(case: Case, fuzzed: Server, session: requests.Session, tally: Tally) -> None:
    sent(case, fuzzed, session, tally, open_payload=False)


@seed.parametrize()
@SETTINGS
def test_the_seed(case: Case, fuzzed: Server, session: requests.Session, tally: Tally) -> None:
    sent(case, fuzzed, session, tally, open_payload=True)


# The status leads nowhere.
@pytest.mark.parametrize(
    ("schema", "open_payload"),
    [(ours.exclude(operation_id="getStatus"), False), (seed, True)],
    ids=["ours", "seed"],
)
def test_links_lead_from_one_answer_to_the_next(
    schema: schemathesis.BaseSchema,
    open_payload: bool,
    request: pytest.FixtureRequest,
    fuzzed: Server,
    session: requests.Session,
    tally: Tally,
) -> None:
    steps = itertools.count()

    class Chains(schema.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Case) -> None:
            # A step that is repeated must go the same way, so each submission is a new one.
            self.expected = prepared(
                case, open_payload=open_payload, unique=f"{request.node.name}/{next(steps)}"
            )

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"base_url": fuzzed.url, "session": session}

        def validate_response(self, response: schemathesis.Response, case: Case, **kwargs: Any) -> None:
            case.validate_response(
                response,
                excluded_checks=[positive_data_acceptance] if self.expected else [],
                transport_kwargs=kwargs,
                recorder=self.recorder,
            )
            assert not self.expected or response.status_code in self.expected
            tally.add(case, response.status_code)

    Chains.run(
        settings=hypothesis.settings(
            max_examples=SCENARIOS,
            stateful_step_count=6,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
    )

    read = tally.answers["GET /api/v2/operations/{operation_id}", 200]
    beyond = (
        "operations/{operation_id}/events",
        "operations/{operation_id}/evidence",
        "memories/{memory_id}",
    )
    assert read >= SCENARIOS // 5
    followed = sum(tally.answers[f"GET /api/v2/{path}", 200] for path in beyond)
    assert followed >= SCENARIOS // 20


def test_control_an_answer_that_is_not_declared_is_found(fuzzed: Server, session: requests.Session) -> None:
    lacking = copy.deepcopy(OURS.document)
    del lacking["paths"]["/api/v2/operations/{operation_id}"]["get"]["responses"]["404"]
    operation = loaded(lacking)["/api/v2/operations/{operation_id}"]["GET"]

    @hypothesis.given(operation.as_strategy())
    @hypothesis.settings(max_examples=20)
    def fuzz(case: Case) -> None:
        case.call_and_validate(base_url=fuzzed.url, session=session)

    with pytest.raises(FailureGroup, match="Undocumented status code"):
        fuzz()


def test_control_an_answer_of_another_shape_is_found(fuzzed: Server, session: requests.Session) -> None:
    other = copy.deepcopy(OURS.document)
    other["components"]["schemas"]["Health"]["properties"]["version"] = {"type": "integer"}
    operation = loaded(other)["/health"]["GET"]

    @hypothesis.given(operation.as_strategy())
    @hypothesis.settings(max_examples=5)
    def fuzz(case: Case) -> None:
        case.call_and_validate(base_url=fuzzed.url, session=session)

    with pytest.raises(FailureGroup, match="schema"):
        fuzz()
