"""Accept: faults are told in the ruled order; the command is complete before the ledger sees it."""

from typing import Any, Final

import orjson
import pytest

from muniment.core import canonical, payloads
from muniment.errors import HashMismatch, InvalidField, Malformed
from muniment.model import command
from muniment.model.operation import Kind, OperationRequest
from muniment.stages import accept

PAYLOAD: Final = {"content": "Text.", "user_id": None}
LIMITS: Final = accept.Limits(
    operation_id_bytes_max=8,
    dependencies_max=2,
    payload=payloads.Limits(content_bytes_max=100, attributes_bytes_max=100),
)
ENVELOPE: Final[dict[str, Any]] = {
    "operation_id": "op",
    "schema_version": 2,
    "kind": "add_memory",
    "dependencies": ["b", "a", "b"],
    "payload_hash": canonical.payload_hash(PAYLOAD),
    "payload": PAYLOAD,
}


class Fixed:
    """A clock and a source of salts."""

    def __init__(self) -> None:
        self.salts = 0

    def now_us(self) -> int:
        return 77

    def monotonic(self) -> float:
        return 0.0

    def salt(self) -> bytes:
        self.salts += 1
        return bytes([self.salts]) * 16


def body(**changed: Any) -> bytes:
    return orjson.dumps(ENVELOPE | changed)


def field(data: bytes) -> str:
    with pytest.raises(InvalidField) as refused:
        accept.read(data)
    return refused.value.field


def without(name: str) -> bytes:
    return orjson.dumps({key: value for key, value in ENVELOPE.items() if key != name})


def test_a_right_body_is_a_request() -> None:
    assert accept.read(body()) == OperationRequest(
        operation_id="op",
        kind=Kind.ADD_MEMORY,
        payload_hash=ENVELOPE["payload_hash"],
        payload=PAYLOAD,
        dependencies=("b", "a", "b"),
    )
    assert accept.read(without("dependencies")).dependencies == ()
    assert accept.read(body(schema_version=2.0)).operation_id == "op"


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'"x"', b"{", b'{"a":1,"a":1}', b"\xff"])
def test_what_is_no_object_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        accept.read(data)


@pytest.mark.parametrize("name", accept.REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    assert field(without(name)) == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("operation_id", ["", None, 1, []]),
        ("schema_version", [1, 3, "2", True, None, 2.5]),
        ("kind", ["add", "", None, 1, [], {}]),
        ("dependencies", [None, "a", [1], ["a", None], {}]),
        ("payload_hash", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, None, 1, "0" * 64 + "\n"]),
        ("payload", [None, [], "x", 1]),
        ("extra", [None]),
    ],
)
def test_a_wrong_field_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        assert field(body(**{name: value})) == name, value


def test_faults_are_told_in_order() -> None:
    wrong: dict[str, Any] = {
        "extra": 1,
        "operation_id": "",
        "schema_version": 1,
        "kind": "x",
        "dependencies": 1,
        "payload_hash": 1,
        "payload": 1,
    }
    order = list(wrong)
    for told in range(len(order)):
        assert field(body(**{name: wrong[name] for name in order[told:]})) == order[told]


def test_the_hash_is_compared_before_the_payload_is_looked_at() -> None:
    with pytest.raises(HashMismatch) as refused:
        accept.read(body(payload={"catgories": 1}))
    assert ENVELOPE["payload_hash"] in str(refused.value)
    assert canonical.payload_hash({"catgories": 1}) in str(refused.value)


def request(**changed: Any) -> OperationRequest:
    whole = ENVELOPE | {"dependencies": []} | changed
    return accept.read(orjson.dumps(whole | {"payload_hash": canonical.payload_hash(whole["payload"])}))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"operation_id": "é" * 4}, None),
        ({"operation_id": "é" * 4 + "a"}, "operation_id"),
        ({"dependencies": ["a", "b"]}, None),
        ({"dependencies": ["a", "b", "c"]}, "dependencies"),
        ({"dependencies": ["a", ""]}, "dependencies[1]"),
        ({"dependencies": ["op"]}, "dependencies[0]"),
        ({"dependencies": ["a", "é" * 5]}, "dependencies[1]"),
        ({"payload": {}}, "payload.content"),
        ({"dependencies": [""], "payload": {}}, "dependencies[0]"),
    ],
)
def test_a_static_fault_is_kept_for_the_ledger_to_tell(changed: dict[str, Any], named: str | None) -> None:
    problem = accept.problem(request(**changed), LIMITS)
    assert (problem and problem[0]) == named


def test_the_command_holds_everything() -> None:
    fixed = Fixed()
    made = accept.admission(request(dependencies=["b", "b"]), LIMITS, account=5, clock=fixed, entropy=fixed)
    assert made == command.Accept(
        account=5,
        operation_id="op",
        kind=Kind.ADD_MEMORY,
        payload_hash=canonical.payload_hash(PAYLOAD),
        dependencies=("b", "b"),
        invalid=None,
        content=b"Text.",
        attributes=b'{"user_id":null}',
        content_salt=b"\1" * 16,
        attributes_salt=b"\2" * 16,
        now=77,
    )


@pytest.mark.parametrize(
    ("payload", "content"),
    [({"content": 5}, None), ({"content": None}, None), ({"content": ""}, b""), ({"a": 1}, None)],
)
def test_a_wrong_payload_is_admitted_with_its_fault_beside_it(
    payload: dict[str, Any], content: bytes | None
) -> None:
    fixed = Fixed()
    made = accept.admission(request(payload=payload), LIMITS, account=1, clock=fixed, entropy=fixed)
    assert made.invalid is not None
    assert made.content == content
