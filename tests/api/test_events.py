"""Event streams: live and replayed frames are the same bytes, resumed anywhere, ended by the last event."""

import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support import wire
from tests.support.seed_contract import OURS, ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory, stream

POST: Final = "/api/v2/operations"


def events_path(operation_id: str) -> str:
    return operation_path(operation_id, "/events")


def accept(client: ContractClient, submission: dict[str, Any]) -> str:
    assert client.post(POST, json=submission).status_code == 202
    return str(submission["operation_id"])


def replay(client: ContractClient, operation_id: str, **options: Any) -> bytes:
    """The stream of a finished operation, to its end, without comment lines."""
    with client.following(events_path(operation_id), **options) as followed:
        return frames(followed.read())


def frames(received: bytes) -> bytes:
    return b"".join(part + b"\n\n" for part in received.split(b"\n\n") if part and not part.startswith(b":"))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def finished(client: ContractClient) -> str:
    """A committed memory that was blocked for a while: seven events."""
    unique = str(uuid.uuid4())
    submission = memory(f"late-{unique}") | {"dependencies": [f"first-{unique}"]}
    operation_id = accept(client, submission)
    with client.following(events_path(operation_id)) as followed:
        followed.read(3)
    accept(client, stream(f"first-{unique}", name=unique))
    replay(client, operation_id)
    return operation_id


def test_a_replay_has_the_bytes_that_were_live(client: ContractClient) -> None:
    unique = str(uuid.uuid4())
    operation_id = accept(client, memory(f"é/{unique}") | {"dependencies": [f"first-{unique}"]})
    with client.following(events_path(operation_id)) as followed:
        blocked = frames(followed.read(3))
        accept(client, stream(f"first-{unique}", name=unique))
        live = frames(followed.read())

    assert followed.response.status_code == 200
    assert followed.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert followed.response.headers["cache-control"] == "no-store"
    assert followed.response.headers["x-accel-buffering"] == "no"
    assert live.startswith(blocked)
    assert replay(client, operation_id) == replay(client, operation_id) == live
    events = OURS.check_frames(live)
    assert [event["to_state"] for event in events] == [
        "accepted",
        "validated",
        "blocked",
        "planned",
        "processing",
        "indexed",
        "committed",
    ]
    assert [event["sequence"] for event in events] == [1, 2, 3, 4, 5, 6, 7]
    assert [event["from_state"] for event in events[1:]] == [event["to_state"] for event in events[:-1]]


def test_many_followers_see_the_same_bytes_wherever_they_begin(
    client: ContractClient, server: Server
) -> None:
    unique = str(uuid.uuid4())
    operation_id = accept(client, memory(f"many-{unique}") | {"dependencies": [f"first-{unique}"]})
    seen: dict[int, bytes] = {}
    failures: list[BaseException] = []

    def follow(after: int) -> None:
        try:
            with ContractClient(server.url) as own:
                seen[after] = replay(own, operation_id, params={"after": str(after)})
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=follow, args=(after,)) for after in range(9)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    accept(client, stream(f"first-{unique}", name=unique))
    for thread in threads:
        thread.join()

    whole = replay(client, operation_id)
    each = [part + b"\n\n" for part in whole.split(b"\n\n")[:-1]]
    assert failures == []
    assert len(each) == 7
    assert seen == {after: b"".join(each[after:]) for after in range(9)}


def test_a_stream_resumes_after_any_event_by_either_name(client: ContractClient, finished: str) -> None:
    whole = replay(client, finished)
    each = [part + b"\n\n" for part in whole.split(b"\n\n")[:-1]]
    resumed = 0
    for last in range(len(each) + 1):
        rest = b"".join(each[last:])
        assert replay(client, finished, params={"after": str(last)}) == rest
        assert replay(client, finished, headers={"Last-Event-ID": str(last)}) == rest
        for other in range(len(each) + 1):
            both = {"params": {"after": str(other)}, "headers": {"Last-Event-ID": str(last)}}
            assert replay(client, finished, **both) == b"".join(each[max(last, other) :])
            resumed += 1
    assert resumed == 64


@pytest.mark.parametrize("header", ["", "x", "-1", "1.5", "18446744073709551616", "memory:7"])
def test_a_last_event_id_that_is_none_of_ours_is_ignored(
    client: ContractClient, finished: str, header: str
) -> None:
    sent = {"Last-Event-ID": header}

    assert replay(client, finished, headers=sent) == replay(client, finished)
    assert replay(client, finished, headers=sent, params={"after": "7"}) == b""


@pytest.mark.parametrize(
    "after", ["7", "8", "9223372036854775807", "9223372036854775808", "18446744073709551615"]
)
def test_after_the_end_of_a_finished_operation_there_is_nothing(
    client: ContractClient, finished: str, after: str
) -> None:
    assert replay(client, finished, params={"after": after}) == b""


@pytest.mark.parametrize(
    "query",
    [
        "after=18446744073709551616",
        "after=-1",
        "after=1.0",
        "after=one",
        "after=",
        "after=null",
        "after=+1",
        "after=01",
        "after=1&after=2",
        "after=%zz",
    ],
)
def test_an_after_that_is_no_uint64_is_refused_by_name(
    client: ContractClient, finished: str, query: str
) -> None:
    for operation_id in (finished, "there-is-no-such-operation"):
        refused = client.get(f"{events_path(operation_id)}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("after: ")


def test_an_idle_stream_shows_that_it_lives(client: ContractClient) -> None:
    operation_id = accept(client, memory(str(uuid.uuid4())) | {"dependencies": [f"never-{uuid.uuid4()}"]})
    with client.following(events_path(operation_id), params={"after": "18446744073709551615"}) as followed:
        arriving = followed.chunks()
        comments = [next(arriving) for _ in range(3)]

    assert all(comment.startswith(b":") for comment in comments)
    assert OURS.check_frames(b"".join(comments)) == []


def test_a_rejected_operation_ends_its_stream(client: ContractClient) -> None:
    unique = str(uuid.uuid4())
    accept(client, stream(f"a-{unique}", name=unique))
    accept(
        client, stream(f"b-{unique}", name=unique, description="another") | {"dependencies": [f"a-{unique}"]}
    )

    assert OURS.check_frames(replay(client, f"b-{unique}"))[-1]["to_state"] == "rejected"


# Streams take room on a server; that room comes back.


@pytest.fixture
def narrow(tmp_path: Path) -> Any:
    with Server(
        tmp_path / "memory", followers_max=3, event_keepalive_seconds=0.1, drain_seconds=20
    ) as server:
        yield server.wait_ready()


def open_stream(server: Server, operation_id: str) -> socket.socket | None:
    """Open a stream and read its first event; None where the server has no room for it."""
    connection = wire.connect(server.url)
    connection.sendall(wire.head("GET", events_path(operation_id)))
    received = b""
    while b"data: " not in received:
        data = connection.recv(65536)
        assert data
        received += data
        if received.startswith(b"HTTP/1.1 503 "):
            connection.close()
            return None
    return connection


def test_the_place_of_a_client_that_left_is_free_again(narrow: Server) -> None:
    with ContractClient(narrow.url) as client:
        operation_id = accept(client, memory("blocked") | {"dependencies": ["never"]})
        for _ in range(5):
            connections: list[socket.socket] = []

            def one_more(connections: list[socket.socket] = connections) -> bool:
                connection = open_stream(narrow, operation_id)
                connections += [connection] if connection else []
                return len(connections) == 3

            until(one_more)
            refused = client.get(events_path(operation_id))
            assert refused.status_code == 503
            assert "limit is 3" in refused.json()["error"]
            assert client.get(operation_path(operation_id)).status_code == 200
            for connection in connections:
                connection.close()


def test_a_reader_that_stopped_reading_holds_up_nobody(narrow: Server) -> None:
    with ContractClient(narrow.url) as client:
        operation_id = accept(client, memory("blocked") | {"dependencies": ["first"]})
        unread = open_stream(narrow, operation_id)
        assert unread
        with unread:
            accept(client, stream("first"))
            assert len(OURS.check_frames(replay(client, operation_id))) == 7


def test_open_streams_do_not_keep_a_server_from_ending(narrow: Server) -> None:
    with ContractClient(narrow.url) as client:
        operation_id = accept(client, memory("blocked") | {"dependencies": ["never"]})
        with httpx.stream("GET", narrow.url + events_path(operation_id), timeout=30) as response:
            arriving = response.iter_raw()
            received = next(arriving)
            began = time.monotonic()
            status = narrow.terminate()
            took = time.monotonic() - began
            received += b"".join(arriving)

    assert status == 0
    assert took < 10  # Far below drain_seconds: the stream was ended, not waited for.
    assert [event["to_state"] for event in OURS.check_frames(received)] == [
        "accepted",
        "validated",
        "blocked",
    ]


def test_a_stream_goes_on_after_a_kill(narrow: Server) -> None:
    with ContractClient(narrow.url) as client:
        operation_id = accept(client, memory("blocked") | {"dependencies": ["first"]})
        with client.following(events_path(operation_id)) as followed:
            before = frames(followed.read(3))
            narrow.kill()
            with pytest.raises(httpx.HTTPError):
                followed.read()
    narrow.start()
    with ContractClient(narrow.wait_ready().url) as client:
        accept(client, stream("first"))
        rest = replay(client, operation_id, headers={"Last-Event-ID": "3"})

        assert before + rest == replay(client, operation_id)
        assert [event["sequence"] for event in OURS.check_frames(before + rest)] == [1, 2, 3, 4, 5, 6, 7]
