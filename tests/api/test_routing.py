"""A path is split first and decoded after, strictly; a query string names known parameters once."""

from collections.abc import Callable
from typing import Final
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muniment.errors import InvalidField, MethodNotAllowed, NotFound
from muniment.interfaces.http.app import routes
from muniment.interfaces.http.handlers import get_operation, last_event_id, list_operations, stream_events
from muniment.interfaces.http.query import parameters, uint64
from muniment.interfaces.http.routes import Router
from tests.support.seed_contract import operation_path

ROUTER: Final = Router(routes())
# What a reader of paths could take for something else.
PIECES: Final = (
    "/",
    "events",
    "..",
    ".",
    "%2F",
    "%",
    "?",
    "#",
    ";",
    "+",
    " ",
    "\0",
    "a",
    "é",
    "💩",
    "\u202e",
    "\\",
    "//",
)
IDS: Final = st.one_of(
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join),
)


def found(method: str, raw_path: bytes) -> tuple[str, tuple[str, ...]]:
    match = ROUTER.find(method, raw_path)
    return match.handler.__name__, match.values


@pytest.mark.parametrize(
    ("raw_path", "handler", "values"),
    [
        (b"/api/v2/operations/a%2Fb", "get_operation", ("a/b",)),
        (b"/api/v2/operations/%2E%2E", "get_operation", ("..",)),
        (b"/api/v2/operations/..", "get_operation", ("..",)),
        (b"/api/v2/operations/x/events", "stream_events", ("x",)),
        (b"/api/v2/operations/x%2Fevents", "get_operation", ("x/events",)),
        (b"/api/v2/operations/x%2Fevents/events", "stream_events", ("x/events",)),
        (b"/api/v2/operations/events", "get_operation", ("events",)),
        (b"/api/v2/operations/%252F", "get_operation", ("%2F",)),
        (b"/api/v2/operations/a+b", "get_operation", ("a+b",)),
        (b"/api/v2/operations/%00", "get_operation", ("\0",)),
        (b"/api/v2/operations/%F0%9F%92%A9", "get_operation", ("💩",)),
        (b"/api/v2/operations/%f0%9f%92%a9", "get_operation", ("💩",)),
        ("/api/v2/operations/💩".encode(), "get_operation", ("💩",)),
        (b"/api/v2/%6Fperations/x", "get_operation", ("x",)),
        (b"/api/v2/operations", "list_operations", ()),
        (b"/api/v2/memories/memory:x", "get_memory", ("memory:x",)),
        (b"/api/v2/task-streams/a%2Fb", "get_task_streams", ("a/b",)),
        (b"/health", "health", ()),
        (b"/ready", "ready", ()),
        (b"/openapi.json", "openapi", ()),
    ],
)
def test_a_raw_path_finds_its_route(raw_path: bytes, handler: str, values: tuple[str, ...]) -> None:
    assert found("GET", raw_path) == (handler, values)


@pytest.mark.parametrize(
    "raw_path",
    [
        b"",
        b"/",
        b"/api/v2/operations/",
        b"/api/v2/operations//events",
        b"/api/v2/operations/x/",
        b"/api/v2/operations/x/events/",
        b"/api/v2/operations/x/events/1",
        b"/api/v2/operations/x/event",
        b"/api%2Fv2/operations",
        b"//api/v2/operations",
        b"/API/v2/operations",
        b"/api/v2/actions",
        b"*",
    ],
)
def test_any_other_path_is_no_route(raw_path: bytes) -> None:
    with pytest.raises(NotFound, match="no route"):
        ROUTER.find("GET", raw_path)


@pytest.mark.parametrize(
    "bad", [b"%", b"%2", b"%zz", b"%2g", b"a%", b"%%41", b"%C3", b"%ED%A0%80", b"%FF", b"\xff"]
)
@pytest.mark.parametrize("place", [b"/api/v2/operations/%s", b"/api/v2/operations/%s/events", b"/%s"])
def test_a_path_without_one_meaning_is_refused(place: bytes, bad: bytes) -> None:
    with pytest.raises(InvalidField) as refused:
        ROUTER.find("GET", place % bad)
    assert refused.value.field == "path"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "get", "QUERY"])
def test_another_method_is_refused_with_those_that_there_are(method: str) -> None:
    for route in routes():
        with pytest.raises(MethodNotAllowed) as refused:
            ROUTER.find(method, route.path.encode())
        assert refused.value.allow == tuple(route.methods)


@given(IDS)
@example("..")
@example("x/events")
@example("%2Fevents")
def test_every_id_is_one_segment_of_its_routes(operation_id: str) -> None:
    receipt, events = operation_path(operation_id).encode(), operation_path(operation_id, "/events").encode()

    assert ROUTER.find("GET", receipt).handler is get_operation
    assert ROUTER.find("GET", receipt).values == (operation_id,)
    assert ROUTER.find("GET", events).handler is stream_events
    assert ROUTER.find("GET", events).values == (operation_id,)
    assert ROUTER.find("GET", b"/api/v2/operations").handler is list_operations


def misrouted(
    find: Callable[[bytes], tuple[str, tuple[str, ...]]], operation_ids: tuple[str, ...]
) -> list[str]:
    return [
        operation_id
        for operation_id in operation_ids
        if find(operation_path(operation_id).encode()) != ("get_operation", (operation_id,))
    ]


def test_control_a_router_that_decodes_before_it_splits_mixes_up_ids() -> None:
    def decoded_first(raw_path: bytes) -> tuple[str, tuple[str, ...]]:
        return found("GET", quote(unquote(raw_path.decode())).encode())

    ids = ("a", "x/events")

    assert misrouted(lambda raw_path: found("GET", raw_path), ids) == []
    assert misrouted(decoded_first, ids) == ["x/events"]


def test_query_parameters_are_decoded() -> None:
    read = parameters(b"after=a%2Bb+c%26d&&limit=&state=%F0%9F%92%A9=", ("after", "limit", "state"))

    assert read == {"after": "a+b c&d", "limit": "", "state": "💩="}
    assert parameters(b"", ()) == {}
    assert parameters(b"%61fter=1", ("after",)) == {"after": "1"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"aftr=1", "aftr"),
        (b"after=1&after=1", "after"),
        (b"after=1&%61fter=2", "after"),
        (b"after=%zz", "after"),
        (b"after=%FF", "after"),
        (b"%zz=1", "query"),
        (b"=1", "query"),
        (b"x", "x"),
    ],
)
def test_a_query_without_one_meaning_is_refused_by_name(query: bytes, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        parameters(query, ("after",))
    assert refused.value.field == field


@given(st.integers(0, 2**64 - 1))
@example(0)
@example(2**64 - 1)
def test_every_uint64_is_read(number: int) -> None:
    assert uint64(str(number)) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        " 1",
        "1 ",
        "01",
        "00",
        "1.0",
        "1e3",
        "0x1",
        "1_000",
        "١",
        "18446744073709551616",
        "9" * 5000,
    ],
)
def test_nothing_else_is_a_uint64(text: str) -> None:
    assert uint64(text) is None


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ((), 0),
        ((b"7",), 7),
        ((b" 7 ",), 7),
        ((b"7", b"9"), 9),
        ((b"",), 0),
        ((b"seven",), 0),
        ((b"-7",), 0),
        ((b"\xff",), 0),
        ((b"18446744073709551615",), 2**64 - 1),
        ((b"18446744073709551616",), 0),
    ],
)
def test_a_last_event_id_that_is_none_of_ours_is_no_obstacle(values: tuple[bytes, ...], number: int) -> None:
    assert last_event_id([(b"last-event-id", value) for value in values]) == number
