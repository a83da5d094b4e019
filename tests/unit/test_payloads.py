"""Payload rules: the first wrong field is named, null is absent, a divided payload is a whole one."""

from typing import Any, Final

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.core import canonical
from muniment.core.payloads import FIELDS, REQUIRED, Limits, divide, validate
from muniment.errors import InvalidField
from muniment.model.operation import Kind

LIMITS: Final = Limits(content_bytes_max=20, attributes_bytes_max=400)
LEAST: Final[dict[Kind, dict[str, Any]]] = {
    Kind.ADD_MEMORY: {"content": "Text."},
    Kind.CREATE_TASK_STREAM: {"name": "s"},
    Kind.ADD_TASK_STEP: {"stream_name": "s", "name": "n", "idempotency_key": "k"},
    Kind.COMPLETE_STEP: {"idempotency_key": "k"},
}
WHOLE: Final[dict[str, Any]] = {
    "content": "Text.",
    "user_id": "u",
    "agent_id": "",
    "session_id": "s",
    "categories": ["a", "a"],
    "visibility": "instance",
    "speaker": "x",
    "role": "tool",
    "quotes": [{"start": 0, "end": 5, "speaker": "y"}, {"start": 1, "end": 2, "speaker": None}],
    "mentions": [],
    "session_seq": 2**63 - 1,
    "occurred_at": "2024-01-01T00:00:00Z",
    "expires_at": "2024-01-01T00:00:00+01:00",
    "metadata": {"deep": [1, None]},
}


def fault(kind: Kind, payload: dict[str, Any], limits: Limits = LIMITS) -> tuple[str, str]:
    with pytest.raises(InvalidField) as refused:
        validate(kind, payload, limits)
    return refused.value.field, refused.value.problem


def field(kind: Kind, **changed: Any) -> str:
    return fault(kind, LEAST[kind] | changed)[0]


@pytest.mark.parametrize("kind", Kind)
def test_the_least_is_enough_and_null_is_absent(kind: Kind) -> None:
    validate(kind, LEAST[kind], LIMITS)
    optional = dict.fromkeys(FIELDS[kind].keys() - set(REQUIRED[kind]))
    validate(kind, LEAST[kind] | optional, LIMITS)


def test_everything_that_is_known_is_accepted() -> None:
    assert FIELDS[Kind.ADD_MEMORY].keys() - WHOLE.keys() == {"space"}
    validate(Kind.ADD_MEMORY, WHOLE, LIMITS)
    results: tuple[Any, ...] = (0, False, "", [], {})
    for result in results:
        validate(Kind.COMPLETE_STEP, {"idempotency_key": "k", "result": result}, LIMITS)


@pytest.mark.parametrize("kind", Kind)
def test_what_is_required_and_missing_null_or_blank_is_named(kind: Kind) -> None:
    for name in REQUIRED[kind]:
        without = {key: value for key, value in LEAST[kind].items() if key != name}
        assert fault(kind, without)[0] == f"payload.{name}"
        for value in (None, "", " \t\n", "\u2003", 5, ["x"]):
            assert field(kind, **{name: value}) == f"payload.{name}"


@pytest.mark.parametrize("kind", Kind)
def test_an_unknown_field_is_named_even_if_null(kind: Kind) -> None:
    assert fault(kind, LEAST[kind] | {"catgories": None}) == (
        "payload.catgories",
        f"unknown field of {kind}",
    )


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("user_id", 1, ""),
        ("session_id", {}, ""),
        ("categories", "a", ""),
        ("categories", ["a", None], "[1]"),
        ("mentions", [1], "[0]"),
        ("space", "here", ""),
        ("visibility", "public", ""),
        ("visibility", True, ""),
        ("role", "User", ""),
        ("session_seq", -1, ""),
        ("session_seq", 2**63, ""),
        ("session_seq", True, ""),
        ("session_seq", 1.0, ""),
        ("occurred_at", "yesterday", ""),
        ("expires_at", "2024-01-01T00:00:00", ""),
        ("expires_at", 5, ""),
        ("metadata", [], ""),
        ("quotes", {}, ""),
        ("quotes", [[]], "[0]"),
        ("quotes", [{"start": 0, "end": 1, "who": "x"}], "[0].who"),
        ("quotes", [{"end": 1}], "[0].start"),
        ("quotes", [{"start": 0, "end": 1}, {"start": 0}], "[1].end"),
        ("quotes", [{"start": 0, "end": None}], "[0].end"),
        ("quotes", [{"start": False, "end": 1}], "[0].start"),
        ("quotes", [{"start": 0, "end": 1, "speaker": 1}], "[0].speaker"),
        ("quotes", [{"start": 1, "end": 1}], "[0]"),
        ("quotes", [{"start": 2, "end": 1}], "[0]"),
        ("quotes", [{"start": 0, "end": 6}], "[0]"),
    ],
)
def test_a_wrong_field_is_named_to_the_place(name: str, value: Any, where: str) -> None:
    assert field(Kind.ADD_MEMORY, **{name: value}) == f"payload.{name}{where}"


def test_an_ordinal_has_32_bits() -> None:
    for ordinal in (0, 2**32 - 1):
        validate(Kind.ADD_TASK_STEP, LEAST[Kind.ADD_TASK_STEP] | {"ordinal": ordinal}, LIMITS)
    for wrong in (-1, 2**32, True, "1", 1.5):
        assert field(Kind.ADD_TASK_STEP, ordinal=wrong) == "payload.ordinal"


@given(st.text("aé漢😀", min_size=1, max_size=5), st.data())
def test_a_quote_stands_on_whole_characters(content: str, data: st.DataObject) -> None:
    octets = content.encode()
    start = data.draw(st.integers(0, len(octets) - 1))
    end = data.draw(st.integers(start + 1, len(octets)))
    payload = {"content": content, "quotes": [{"start": start, "end": end}]}
    edges = {len(content[:at].encode()) for at in range(len(content) + 1)}
    if {start, end} <= edges:
        validate(Kind.ADD_MEMORY, payload, LIMITS)
    else:
        wrong = "start" if start not in edges else "end"
        assert fault(Kind.ADD_MEMORY, payload) == (
            f"payload.quotes[0].{wrong}",
            "stands inside a character",
        )


def test_sizes_are_bytes_and_the_limit_itself_fits() -> None:
    validate(Kind.ADD_MEMORY, {"content": "é" * 10}, LIMITS)
    assert fault(Kind.ADD_MEMORY, {"content": "é" * 10 + "a"}) == (
        "payload.content",
        "is 21 bytes, the limit is 20",
    )
    room = LIMITS.attributes_bytes_max - len(b'{"name":""}')
    validate(Kind.CREATE_TASK_STREAM, {"name": "é" * (room // 2)}, LIMITS)
    assert fault(Kind.CREATE_TASK_STREAM, {"name": "a" * (room + 1)})[0] == "payload"
    long = {"content": "a" * 20, "metadata": {"a": "b" * 300}}
    validate(Kind.ADD_MEMORY, long, LIMITS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["content", "a", "b"]), json_values, max_size=3))
def test_a_divided_payload_is_the_whole_payload(payload: dict[str, Any]) -> None:
    divided = divide(payload)
    whole = orjson.loads(divided.attributes)
    assert (divided.content is None) is not isinstance(payload.get("content"), str)
    if divided.content is not None:
        assert "content" not in whole
        whole["content"] = divided.content.decode()
    assert canonical.payload_hash(whole) == canonical.payload_hash(payload)
