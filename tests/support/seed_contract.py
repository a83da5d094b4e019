"""The published contract as a judge: what a server may answer to which request.

``SEED`` is the seed's file, byte for byte. ``OURS`` is the document in the package, with our own routes. A
response that its document does not declare raises ``ContractBrokenError``, and so does an error body with a
second key.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote, unquote_to_bytes

import httpx
from jsonschema import Draft202012Validator, FormatChecker, ValidationError  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parents[2]
SEED_FILE: Final = ROOT / "tests" / "contract" / "seed" / "durable-operations-1.8.0.openapi.json"
SEED_SHA256: Final = "ebe99aa8e9226051bb31509efc5a430967c24e507d62697cbec879e5dc4b58f1"
OUR_FILE: Final = ROOT / "src" / "muniment" / "interfaces" / "http" / "openapi.json"
EVENTS: Final = "text/event-stream"
FRAME: Final = re.compile(rb"id: (\d+)\nevent: operation_state\ndata: ([^\r\n]+)\n\n|:[^\r\n]*\n\n")

JSONObject = dict[str, Any]


class ContractBrokenError(AssertionError):
    """The server answered what its document does not declare."""


class Pair(NamedTuple):
    """A route of a document and a status that was answered on it."""

    method: str
    path: str
    status: int


FORMATS: Final = FormatChecker(())


@FORMATS.checks("date-time", ValueError)  # type: ignore[untyped-decorator]
def _is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", value, re.ASCII):
        return False
    return bool(datetime.fromisoformat(value[:19]))


@FORMATS.checks("uint64")  # type: ignore[untyped-decorator]
def _is_uint64(value: object) -> bool:
    return not isinstance(value, int) or 0 <= value < 2**64


class Contract:
    """One OpenAPI document. Checks responses against it; knows the pairs that it declares."""

    def __init__(self, document: JSONObject) -> None:
        self.document = document
        self._templates = [(path.split("/"), path, item) for path, item in document["paths"].items()]

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(json.loads(path.read_bytes()))

    def pairs(self) -> set[Pair]:
        """Every route and status that the document declares."""
        return {
            Pair(method.upper(), path, int(status))
            for path, item in self.document["paths"].items()
            for method, operation in item.items()
            if method != "parameters"
            for status in operation["responses"]
        }

    def resolve(self, value: Any) -> Any:
        """Return ``value`` with every ``$ref`` replaced by what it names."""
        if isinstance(value, dict):
            if "$ref" in value:
                target: Any = self.document
                for step in value["$ref"].removeprefix("#/").split("/"):
                    target = target[step]
                return self.resolve(target)
            return {name: self.resolve(item) for name, item in value.items()}
        return [self.resolve(item) for item in value] if isinstance(value, list) else value

    def validate(self, value: Any, schema: Any) -> None:
        """Raise ``ContractBrokenError`` unless ``value`` fits; JSON Schema 2020-12, formats included."""
        try:
            Draft202012Validator(self.resolve(schema), format_checker=FORMATS).validate(value)
        except ValidationError as error:
            raise ContractBrokenError(f"{error.json_path}: {error.message}") from None

    def knows(self, target: bytes) -> bool:
        """Whether the path of a request target is one of the document's."""
        return self._find(target) is not None

    def check(self, request: httpx.Request, status: int, headers: httpx.Headers, body: bytes) -> Pair | None:
        """Check a whole response; return its pair, None where the document has no such route or method."""
        found = self._find(request.url.raw_path)
        if found is None:
            expected = 400 if _undecodable(request.url.raw_path) else 404
            self._expect_error(expected, status, headers, body)
            return None
        path, item = found
        operation = item.get(request.method.lower())
        if operation is None:
            if "allow" not in headers or request.method in headers["allow"]:
                raise ContractBrokenError(f"405 with Allow: {headers.get('allow')}")
            self._expect_error(405, status, headers, None if request.method == "HEAD" else body)
            return None
        declared = self.resolve(operation["responses"])
        pair = Pair(request.method, path, status)
        if str(status) in declared:
            self._check_content(declared[str(status)]["content"], headers, body)
        elif self._is_wrong(request, [*item.get("parameters", ()), *operation.get("parameters", ())]):
            self._expect_error(400, status, headers, body)
        else:
            raise ContractBrokenError(f"{pair} is not declared: {body[:300]!r}")
        if status == 503 and headers.get("retry-after") != "1" and path != "/ready":
            raise ContractBrokenError("503 without Retry-After")
        return pair

    def check_frames(self, body: bytes) -> list[JSONObject]:
        """Check a part of a stream that consists of whole frames, and return its events."""
        events: list[JSONObject] = []
        place = 0
        while place < len(body):
            frame = FRAME.match(body, place)
            if frame is None:
                raise ContractBrokenError(f"no frame at byte {place}: {body[place : place + 200]!r}")
            place = frame.end()
            if frame[1] is None:
                continue
            event = json.loads(frame[2])
            self.validate(event, {"$ref": "#/components/schemas/OperationEvent"})
            if event["sequence"] != int(frame[1]):
                raise ContractBrokenError(f"id {int(frame[1])} on event {event['sequence']}")
            events.append(event)
        return events

    def _find(self, target: bytes) -> tuple[str, JSONObject] | None:
        segments = target.partition(b"?")[0].decode("ascii").split("/")
        for template, path, item in self._templates:
            if len(template) == len(segments) and all(
                bool(segment) if part.startswith("{") else part == unquote(segment)
                for part, segment in zip(template, segments, strict=True)
            ):
                return path, item
        return None

    def _is_wrong(self, request: httpx.Request, parameters: Sequence[Any]) -> bool:
        """Whether the document does not allow the request's URL: only then may an undeclared 400 follow."""
        if _undecodable(request.url.raw_path):
            return True
        declared = {
            each["name"]: each["schema"] for each in self.resolve(parameters) if each["in"] == "query"
        }
        seen: set[str] = set()
        for pair in filter(None, request.url.query.split(b"&")):
            name, _, value = (unquote_to_bytes(part).decode() for part in pair.partition(b"="))
            if name not in declared or name in seen or not _fits(value, declared[name]):
                return True
            seen.add(name)
        return False

    def _check_content(self, content: Mapping[str, Any], headers: httpx.Headers, body: bytes) -> None:
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in content:
            raise ContractBrokenError(f"content type {media_type!r}, declared is {[*content]}")
        if media_type == EVENTS:
            self.validate(body.decode(), content[media_type]["schema"])
            self.check_frames(body)
        else:
            self.validate(json.loads(body.decode()), content[media_type]["schema"])

    def _expect_error(self, expected: int, status: int, headers: httpx.Headers, body: bytes | None) -> None:
        if status != expected:
            raise ContractBrokenError(f"{status} where only {expected} fits: {(body or b'')[:300]!r}")
        if headers.get("content-type") != "application/json":
            raise ContractBrokenError(f"an error of type {headers.get('content-type')}")
        if body is not None:
            self.validate(json.loads(body.decode()), {"$ref": "#/components/schemas/Error"})


def _undecodable(target: bytes) -> bool:
    if re.search(rb"%(?![0-9A-Fa-f]{2})", target):
        return True
    try:
        unquote_to_bytes(target).decode()
    except UnicodeDecodeError:
        return True
    return False


def _fits(text: str, schema: JSONObject) -> bool:
    """Whether the text of a query parameter writes a value of ``schema``."""
    value: object = text
    if schema.get("type") == "integer":
        value = int(text) if re.fullmatch(r"0|[1-9]\d*", text, re.ASCII) else text
    return bool(Draft202012Validator(schema, format_checker=FORMATS).is_valid(value))


def verified_seed() -> Contract:
    """The seed, after its bytes were found to be those that were published."""
    assert sha256(SEED_FILE.read_bytes()).hexdigest() == SEED_SHA256
    return Contract.load(SEED_FILE)


SEED: Final = verified_seed()
OURS: Final = Contract.load(OUR_FILE)


def operation_path(operation_id: str, rest: str = "") -> str:
    """The path of an operation: its ID as one segment, dots escaped where they would be a step up."""
    segment = quote(operation_id, safe="")
    return (
        f"/api/v2/operations/{segment.replace('.', '%2E') if operation_id in ('.', '..') else segment}{rest}"
    )


class Stream:
    """An open response of which as much is read as is asked for."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.received = bytearray()
        self._chunks = response.iter_raw()

    def chunks(self) -> Iterator[bytes]:
        """What arrives from now on, as it arrives."""
        for chunk in self._chunks:
            self.received += chunk
            yield chunk

    def read(self, event_count: int | None = None) -> bytes:
        """Read until so many events have been received, or to the end; return all that was received."""
        while event_count is None or self.received.count(b"\nevent: ") < event_count:
            if next(self.chunks(), None) is None:
                assert event_count is None, f"the stream ended early: {bytes(self.received)!r}"
                break
        return bytes(self.received)


class ContractClient:
    """An HTTP client that lets no response pass which the contract does not declare.

    The seed judges its routes; our document judges every route. ``seen`` collects the pairs of the seed.
    """

    def __init__(self, base_url: str, *, timeout: float = 30.0) -> None:
        self.seen: set[Pair] = set()
        self._http = httpx.Client(base_url=base_url, timeout=timeout)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return its whole response, which has passed the contract."""
        response = self._http.request(method, path, **options)
        self.judge(response.request, response.status_code, response.headers, response.content)
        return response

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    @contextmanager
    def following(self, path: str, **options: Any) -> Iterator[Stream]:
        """Open a stream; when it is left, judge what was read of it, up to the last whole frame."""
        with self._http.stream("GET", path, **options) as response:
            stream = Stream(response)
            yield stream
            if response.status_code != 200:
                stream.read()
                whole = bytes(stream.received)
            else:
                whole = bytes(stream.received[: stream.received.rfind(b"\n\n") + 2])
            self.judge(response.request, response.status_code, response.headers, whole)

    def judge(self, request: httpx.Request, status: int, headers: httpx.Headers, body: bytes) -> None:
        OURS.check(request, status, headers, body)
        ours_alone = request.method == "GET" and request.url.path == "/api/v2/operations"
        if SEED.knows(request.url.raw_path) and not ours_alone:
            pair = SEED.check(request, status, headers, body)
            if pair is not None:
                self.seen.add(pair)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
