"""The client against a server scripted to fail: nothing is guessed, nothing doubled, no wait is endless."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from muniment.client import Client, OutcomeOpen, UnexpectedAnswer, Unreachable
from muniment.core import canonical
from muniment.errors import Conflict, InvalidField, Malformed, NotFound, RequestError, Unavailable
from muniment.model.operation import Event, Kind, State

PAYLOAD: Final = {"content": "Receipts are the acknowledgement boundary.", "categories": ["b", "a"]}
HASH: Final = canonical.payload_hash(PAYLOAD)
WALK: Final = ("accepted", "validated", "planned", "processing", "indexed", "committed")

Answer = Callable[[BaseHTTPRequestHandler], None]


def receipt(operation_id: str = "op", state: str = "accepted", payload_hash: str = HASH) -> dict[str, Any]:
    return {
        "operation_id": operation_id,
        "schema_version": 2,
        "kind": "add_memory",
        "payload_hash": payload_hash,
        "dependencies": [],
        "state": state,
        "blocked_by": [],
        "result": {"id": "memory:x"} if state == "committed" else None,
        "error": None,
        "executor_generation": 0,
        "executor_progress_seq": 0,
        "executor_exit_count": 0,
        "executor_last_exit": None,
        "executor_error": None,
        "progress_seq": WALK.index(state) + 1,
        "created_at": "2026-08-03T12:00:00.000000Z",
        "updated_at": "2026-08-03T12:00:00.000000Z",
    }


def frame(sequence: int, operation_id: str = "op", detail: Any = None) -> bytes:
    event = {
        "operation_id": operation_id,
        "sequence": sequence,
        "from_state": None if sequence == 1 else WALK[sequence - 2],
        "to_state": WALK[sequence - 1],
        "detail": detail,
        "executor_generation": 0,
        "occurred_at": "2026-08-03T12:00:00.000000Z",
    }
    data = json.dumps(event, ensure_ascii=False).encode()
    return b"id: %d\nevent: operation_state\ndata: %s\n\n" % (sequence, data)


def answers(status: int, body: object, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def streams(*chunks: bytes, ends: bool = True, silence: threading.Event | None = None) -> Answer:
    """A stream that ends in order, or is cut, or goes silent until the test is over."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if silence is not None:
            silence.wait(10)
        if ends:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def cut(handler: BaseHTTPRequestHandler) -> None:
    """The request has arrived and its answer is lost."""
    handler.close_connection = True


def half(handler: BaseHTTPRequestHandler) -> None:
    """The answer breaks off after its headers."""
    handler.send_response(202)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.close_connection = True


class Script:
    """Answers the n-th request with the n-th answer, the last one for ever, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, str, bytes]] = []
        self.over = threading.Event()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                number = len(script.asked)
                script.asked.append((self.command, self.path, body))
                script.answers[min(number, len(script.answers) - 1)](self)

            do_GET = do_POST = _handle  # noqa: N815 - the names that http.server looks for

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def run(self, *answered: Answer) -> str:
        self.answers = list(answered)
        return self.url


@pytest.fixture
def script() -> Iterator[Script]:
    scripted = Script()
    thread = threading.Thread(target=scripted.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    scripted.over.set()
    scripted.server.shutdown()
    thread.join()
    scripted.server.server_close()


def nowhere() -> str:
    """A URL at which nothing listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_address[1]}"


def patient(url: str, seconds: float = 5.0, **given: Any) -> Client:
    return Client(url, patience_seconds=seconds, **given)


# Writing


def test_a_submission_carries_the_canonical_hash_and_returns_the_receipt(script: Script) -> None:
    with patient(script.run(answers(202, receipt()))) as client:
        admission = client.admit(Kind.ADD_MEMORY, PAYLOAD, "op", ["before"])
    assert admission.receipt.state is State.ACCEPTED
    assert not admission.known_before
    method, path, body = script.asked[0]
    assert (method, path) == ("POST", "/api/v2/operations")
    assert json.loads(body) == {
        "operation_id": "op",
        "schema_version": 2,
        "kind": "add_memory",
        "dependencies": ["before"],
        "payload_hash": HASH,
        "payload": PAYLOAD,
    }


def test_a_replay_is_told_from_a_new_operation(script: Script) -> None:
    with patient(script.run(answers(200, receipt(state="committed")))) as client:
        admission = client.admit(Kind.ADD_MEMORY, PAYLOAD, "op")
    assert admission.known_before
    assert admission.receipt.result == {"id": "memory:x"}


@pytest.mark.parametrize("fault", [cut, half, answers(500, b"oops"), answers(503, {"error": "not now"})])
def test_what_is_sent_again_after_a_lost_answer_is_the_same_bytes(script: Script, fault: Answer) -> None:
    with patient(script.run(fault, fault, answers(200, receipt()))) as client:
        admission = client.admit(Kind.ADD_MEMORY, PAYLOAD, "op")
    assert len(script.asked) == 3
    assert len(set(script.asked)) == 1
    # An earlier try of this very call may be the one that was accepted.
    assert not admission.known_before


def test_retry_after_is_honoured(script: Script) -> None:
    busy = answers(503, {"error": "queue is full"}, Retry_After="1")
    with patient(script.run(busy, answers(202, receipt()))) as client:
        began = time.monotonic()
        client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")
    assert time.monotonic() - began >= 1.0


def test_when_patience_is_over_the_ledger_is_asked(script: Script) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        (cut if handler.command == "POST" else answers(200, receipt(state="planned")))(handler)

    with patient(script.run(answer), seconds=0.3) as client:
        assert client.submit(Kind.ADD_MEMORY, PAYLOAD, "op").state is State.PLANNED
    assert [method for method, _, _ in script.asked].count("GET") == 1


@pytest.mark.parametrize(
    "then", [answers(404, {"error": "operation 'op' not found"}), answers(503, {"error": "no"}), cut]
)
def test_what_cannot_be_known_is_said_to_be_open(script: Script, then: Answer) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        (cut if handler.command == "POST" else then)(handler)

    with patient(script.run(answer), seconds=0.3) as client, pytest.raises(OutcomeOpen) as caught:
        client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")
    assert caught.value.operation_id == "op"
    assert caught.value.retry == "same_id"
    assert sum(method == "POST" for method, _, _ in script.asked) >= 3


def test_another_payload_under_the_id_is_a_conflict_also_when_reconciled(script: Script) -> None:
    other = receipt(payload_hash="0" * 64)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        (cut if handler.command == "POST" else answers(200, other))(handler)

    with (
        patient(script.run(answer), seconds=0.2) as client,
        pytest.raises(Conflict, match="already exists with payload_hash 0000"),
    ):
        client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")


def test_nothing_was_sent_where_nothing_listens() -> None:
    with patient(nowhere(), seconds=0.3) as client:
        with pytest.raises(Unreachable):
            client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")
        with pytest.raises(Unreachable):
            client.receipt("op")
        with pytest.raises(Unreachable):
            client.ready()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestError), (404, NotFound), (409, Conflict), (401, UnexpectedAnswer), (302, UnexpectedAnswer)],
)
def test_a_no_is_not_repeated_and_keeps_its_words(script: Script, status: int, kind: type[Exception]) -> None:
    with (
        patient(script.run(answers(status, {"error": "its own words"}))) as client,
        pytest.raises(kind, match="its own words"),
    ):
        client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")
    assert len(script.asked) == 1


@pytest.mark.parametrize("status", [400, 404, 409])
@pytest.mark.parametrize("body", [b"<html>", b'{"detail": "Not Found"}', b'{"error": 1}', b"[]"])
def test_somebody_elses_no_is_not_the_servers(script: Script, status: int, body: bytes) -> None:
    with patient(script.run(answers(status, body))) as client:
        with pytest.raises(UnexpectedAnswer):
            client.receipt("op")
        with pytest.raises(UnexpectedAnswer):
            client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")
        with pytest.raises(UnexpectedAnswer):
            client.ready()


@pytest.mark.parametrize(
    "body", [b"<html>", b"", b"[]", b"\xff", receipt("another"), receipt(payload_hash="0" * 64)]
)
def test_an_answer_outside_the_contract_proves_nothing(script: Script, body: object) -> None:
    with patient(script.run(answers(202, body))) as client, pytest.raises(UnexpectedAnswer):
        client.submit(Kind.ADD_MEMORY, PAYLOAD, "op")


@pytest.mark.parametrize("payload", [{"content": float("nan")}, {"content": "\ud800"}, {"n": 2**64}])
def test_what_has_no_canonical_form_is_never_sent(script: Script, payload: dict[str, Any]) -> None:
    with patient(script.run(answers(202, receipt()))) as client, pytest.raises(Malformed):
        client.submit(Kind.ADD_MEMORY, payload, "op")
    assert script.asked == []


# Following


def test_events_go_on_where_they_broke_off_and_come_once(script: Script) -> None:
    cut_frame = frame(3)[:-20]
    url = script.run(
        streams(b": keep-alive\n\n", frame(1), frame(2)[:9], frame(2)[9:], cut_frame, ends=False),
        streams(frame(2), frame(3), ends=True),  # one again, then an orderly end before the terminal event
        answers(200, receipt(state="planned")),
        answers(503, {"error": "recovering"}),
        streams(frame(4) + frame(5) + frame(6)),
    )
    with patient(url) as client:
        events = list(client.events("op"))
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event.to_state for event in events] == [State(name) for name in WALK]
    followed = [path for _, path, _ in script.asked if "/events" in path]
    assert [parse_qs(urlsplit(path).query)["after"] for path in followed] == [["0"], ["2"], ["3"], ["3"]]


def test_a_line_separator_inside_a_text_is_no_end_of_line(script: Script) -> None:
    detail = {"text": "a\u2028b\u0085c\x0bd"}
    with patient(script.run(streams(frame(6, detail=detail)))) as client:
        events = list(client.events("op", after=5))
    assert [event.detail for event in events] == [detail]


@pytest.mark.parametrize("bad", [frame(3), frame(2, "another"), b"data: {}\n\n"])
def test_a_gap_or_a_foreign_event_is_not_passed_on(script: Script, bad: bytes) -> None:
    passed: list[int] = []
    with patient(script.run(streams(frame(1) + bad))) as client, pytest.raises(UnexpectedAnswer):
        passed.extend(event.sequence for event in client.events("op"))
    assert passed == [1]


def test_following_what_has_ended_returns_nothing(script: Script) -> None:
    with patient(script.run(streams(), answers(200, receipt(state="committed")))) as client:
        assert list(client.events("op", after=6)) == []


def test_following_the_unknown_is_not_found(script: Script) -> None:
    unknown = answers(404, {"error": "operation 'x' not found"})
    with patient(script.run(unknown)) as client, pytest.raises(NotFound):
        next(client.events("x"))
    assert len(script.asked) == 1


def test_waiting_has_an_end_that_is_no_verdict(script: Script) -> None:
    silent = streams(frame(2), ends=False, silence=script.over)
    began = time.monotonic()
    url = script.run(answers(200, receipt()), silent)
    with patient(url) as client, pytest.raises(OutcomeOpen, match=r"not ended after 0\.3 seconds"):
        client.wait("op", timeout_seconds=0.3)
    assert 0.3 <= time.monotonic() - began < 5.0


def test_a_silent_stream_is_opened_anew(script: Script) -> None:
    url = script.run(streams(frame(1), ends=False, silence=script.over), streams(*map(frame, range(2, 7))))
    with patient(url, silence_seconds=0.2) as client:
        assert [event.sequence for event in client.events("op")] == [1, 2, 3, 4, 5, 6]


def test_waiting_gives_up_on_a_server_that_is_gone() -> None:
    with patient(nowhere(), seconds=0.3) as client, pytest.raises(Unavailable):
        list(client.events("op"))


def test_waiting_for_what_has_ended_asks_once(script: Script) -> None:
    with patient(script.run(answers(200, receipt(state="committed")))) as client:
        assert client.wait("op").state is State.COMMITTED
    assert len(script.asked) == 1


# Reaching


def test_a_server_that_moved_is_found_again(script: Script) -> None:
    script.run(answers(202, receipt()))
    looked: list[str] = []

    def locate() -> str:
        looked.append(script.url)
        return script.url

    with patient(nowhere(), locate=locate) as client:
        assert client.submit(Kind.ADD_MEMORY, PAYLOAD, "op").operation_id == "op"
        assert client.base_url == script.url
    assert len(looked) == 1


@pytest.mark.parametrize(
    "operation_id",
    ["a/b", "..", ".", "x/events", "%2F", "a%2Fb", "é😀", "a?b#c", " ", "a+b", "\x00\x1b", "~._-"],
)
def test_every_operation_id_is_one_segment_of_the_path(script: Script, operation_id: str) -> None:
    with patient(script.run(answers(200, receipt(operation_id)))) as client:
        assert client.receipt(operation_id).operation_id == operation_id
    path = script.asked[0][1]
    before, _, last = path.rpartition("/")
    assert before == "/api/v2/operations"
    assert unquote(last, errors="strict") == operation_id


@pytest.mark.parametrize("operation_id", ["", "\udcff"])
def test_what_is_no_segment_is_refused_here(script: Script, operation_id: str) -> None:
    with patient(script.run(answers(200, receipt()))) as client, pytest.raises(InvalidField):
        client.receipt(operation_id)
    assert script.asked == []


@pytest.mark.parametrize("url", ["", "127.0.0.1:1", "ftp://host", "http://", "http://[::1", "http://a:port"])
def test_what_is_no_url_is_refused_before_the_first_call(url: str) -> None:
    with pytest.raises(InvalidField, match="url"):
        Client(url)


def test_no_proxy_of_the_environment_is_used(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nowhere())
    with patient(script.run(answers(200, receipt()))) as client:
        assert client.receipt("op").operation_id == "op"


def test_reading_is_repeated_while_the_server_says_not_now(script: Script) -> None:
    found = {"results": [], "model": {"name": "m", "digest": "d"}}
    with patient(
        script.run(answers(503, {"error": "the model is loading"}), cut, answers(200, found))
    ) as client:
        assert client.recall("cat", limit=3, categories=["a"], user_id="u") == found
    assert json.loads(script.asked[2][2]) == {"query": "cat", "limit": 3, "user_id": "u", "categories": ["a"]}


def test_unavailable_is_never_empty(script: Script) -> None:
    url = script.run(answers(503, {"error": "search unavailable: the model is loading"}))
    with patient(url, seconds=0.3) as client, pytest.raises(Unavailable, match="the model is loading"):
        client.recall("cat")


def test_readiness_is_an_answer_ready_or_not(script: Script) -> None:
    not_ready = {"status": "not_ready", "ingestion_ready": False, "search_ready": False, "capabilities": {}}
    with patient(script.run(answers(503, not_ready))) as client:
        assert client.ready() == not_ready
    assert len(script.asked) == 1


def test_the_other_reads_ask_their_routes(script: Script) -> None:
    with patient(script.run(answers(200, {}))) as client:
        client.memory("memory:x")
        client.operations(state="committed", after="a&b", limit=2)
        client.task_streams("a/b", user_id="u")
    assert [path for _, path, _ in script.asked] == [
        "/api/v2/memories/memory%3Ax",
        "/api/v2/operations?state=committed&after=a%26b&limit=2",
        "/api/v2/task-streams/a%2Fb?user_id=u",
    ]


def test_threads_share_one_client(script: Script) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        answers(200, receipt(unquote(handler.path.rpartition("/")[2])))(handler)

    got: list[str] = []
    with patient(script.run(answer)) as client:

        def ask(operation_id: str) -> None:
            got.append(client.receipt(operation_id).operation_id)

        threads = [threading.Thread(target=ask, args=(f"op-{number}",)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(got) == sorted(f"op-{number}" for number in range(16))


def test_an_event_has_the_fields_of_the_contract(script: Script) -> None:
    with patient(script.run(streams(frame(6)))) as client:
        [event] = client.events("op", after=5)
    assert event == Event(
        operation_id="op",
        sequence=6,
        from_state=State.INDEXED,
        to_state=State.COMMITTED,
        detail=None,
        executor_generation=0,
        occurred_at="2026-08-03T12:00:00.000000Z",
    )
