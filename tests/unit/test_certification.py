"""The rules of a certificate, each against an answer that keeps it and answers that break it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pytest

from muniment.client import certification as rules
from muniment.client import probe
from muniment.client.certification import Hit, Memory, Part, Record, RuleBroken
from muniment.core import canonical
from muniment.model.operation import Kind, Receipt
from tests.support.seed_contract import SEED

EXAMPLES: Final = SEED.document["components"]["examples"]
READY: Final = EXAMPLES["Ready"]["value"]
COMMITTED: Final[dict[str, Any]] = {
    **EXAMPLES["CommittedReceipt"]["value"],
    "executor_progress_seq": 7,
    "executor_generation": 2,
    "executor_exit_count": 1,
    "executor_last_exit": "signal 9 (SIGKILL)",
}
KINDS: Final = ("start", "plan", "progress", "exit", "restart", "progress", "completion")
TIMES: Final = tuple(f"2026-08-03T12:00:0{second}.000000Z" for second in range(9))


def receipt(**changes: Any) -> Receipt:
    return rules.receipt(json.dumps({**COMMITTED, **changes}).encode())


def before(**changes: Any) -> Receipt:
    earlier = {"state": "processing", "executor_generation": 1, "executor_exit_count": 0, "progress_seq": 4}
    return receipt(**earlier, executor_last_exit=None, **changes)


def evidence(kinds: Sequence[str] = KINDS, generations: Sequence[int] | None = None) -> list[Record]:
    ended = next((place for place, kind in enumerate(kinds) if kind in rules.ENDS), len(kinds))
    ran = generations or [1 if place <= ended else 2 for place in range(len(kinds))]
    return [
        Record(place + 1, kind, ran[place], None, TIMES[min(place, 8)]) for place, kind in enumerate(kinds)
    ]


def test_the_examples_of_the_seed_keep_the_rules() -> None:
    health = SEED.document["paths"]["/health"]["get"]["responses"]["200"]["content"]["application/json"]
    not_ready = SEED.document["paths"]["/ready"]["get"]["responses"]["503"]["content"]["application/json"]

    assert rules.health(200, json.dumps(health["example"]).encode()) == "200, surreal-memory-server 1.8.0"
    assert rules.readiness(200, json.dumps(READY).encode()) == READY
    assert rules.missing(READY) == "tokenizer, model_executor, search_index"
    assert rules.readiness(503, json.dumps(not_ready["example"]).encode())["ingestion_ready"] is False
    for name in ("AcceptedReceipt", "CommittedReceipt"):
        value = EXAMPLES[name]["value"]
        assert msgspec.to_builtins(rules.receipt(json.dumps(value).encode())) == {
            **value,
            "dependencies": (),
            "blocked_by": (),
        }


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (503, {}),
        (200, {"service": "muniment"}),
        (200, {"status": "up"}),
        (200, {"version": 1}),
        (200, {"uptime": 1}),
    ],
)
def test_another_answer_is_no_health(status: int, changes: dict[str, Any]) -> None:
    with pytest.raises(RuleBroken):
        rules.health(
            status, json.dumps({"service": rules.SERVICE, "status": "ok", "version": "1"} | changes).encode()
        )


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (503, {}),
        (200, {"status": "not_ready"}),
        (200, {"ingestion_ready": False}),
        (200, {"search_ready": True}),
        (200, {"search_ready": 0}),
        (200, {"capabilities": READY["capabilities"] | {"storage": False}}),
        (200, {"capabilities": READY["capabilities"] | {"storage": "true"}}),
        (200, {"capabilities": READY["capabilities"] | {"disk": True}}),
        (200, {"reason": "none"}),
    ],
)
def test_a_readiness_that_contradicts_itself_is_none(status: int, changes: dict[str, Any]) -> None:
    with pytest.raises(RuleBroken):
        rules.readiness(status, json.dumps(READY | changes).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "done"},
        {"schema_version": 1},
        {"payload_hash": "A" * 64},
        {"progress_seq": -1},
        {"progress_seq": "6"},
        {"created_at": "yesterday"},
        {"created_at": "2026-08-03T12:00:00"},
        {"dependencies": None},
        {"advice": "none"},
    ],
)
def test_another_shape_is_no_receipt(changes: dict[str, Any]) -> None:
    with pytest.raises(RuleBroken):
        receipt(**changes)


def test_a_submission_is_right_and_so_is_its_other_spelling() -> None:
    body = rules.memory("certify-1-x", "A text.", "certify-1-s", ["before"])
    other = json.loads(rules.respelled(body))

    assert body["payload_hash"] == canonical.payload_hash(body["payload"])
    assert body["payload"]["user_id"] == rules.OWNER
    assert other == body
    assert [*other] != [*body]
    assert rules.respelled(body) != canonical.encode(body)
    assert rules.task_stream("a", "b", "c")["kind"] == Kind.CREATE_TASK_STREAM.value


def test_the_long_text_is_the_same_each_time_and_nowhere_alike() -> None:
    text = rules.long_text(500, "run")

    assert text == rules.long_text(500, "run") != rules.long_text(500, "other")
    assert text.startswith(rules.long_text(20, "run"))
    assert len(set(text.split(". "))) >= 500
    assert rules.sentence(250, "run") in text


@pytest.mark.parametrize("name", ["payload_hash", "created_at", "kind", "dependencies"])
def test_what_is_settled_must_not_change(name: str) -> None:
    other: dict[str, Any] = {
        "payload_hash": "0" * 64,
        "created_at": TIMES[8],
        "kind": "complete_step",
        "dependencies": ["x"],
    }
    rules.same_operation(before(), receipt())
    with pytest.raises(RuleBroken, match=name):
        rules.same_operation(before(), receipt(**{name: other[name]}))
    with pytest.raises(RuleBroken, match="went back from event 6 to 4"):
        rules.same_operation(receipt(), before())


def test_equal_receipts_are_equal_in_every_field() -> None:
    rules.equal(receipt(), receipt(), "a replay")
    with pytest.raises(RuleBroken, match="a replay: result of"):
        rules.equal(receipt(), receipt(result=None), "a replay")


def test_a_killed_executor_is_evidence_and_no_verdict() -> None:
    assert rules.killed(before(), receipt(), evidence()) == 1


@pytest.mark.parametrize(
    ("after", "kinds", "generations", "says"),
    [
        ({"executor_exit_count": 0}, KINDS, None, "rose by 0"),
        ({"executor_exit_count": 2}, KINDS, None, "rose by 2"),
        ({"executor_last_exit": None}, KINDS, None, "executor_last_exit"),
        ({"executor_generation": 1}, KINDS, None, "not later"),
        ({}, KINDS[:-1], None, "gap"),
        ({}, (*KINDS[:3], "mystery", *KINDS[4:]), None, "unknown kinds"),
        ({}, (*KINDS[:-1], "progress"), None, "does not end with completion"),
        ({}, (*KINDS[:3], "progress", *KINDS[4:]), None, "expected one exit"),
        ({}, (*KINDS[:4], "progress", *KINDS[5:]), None, "expected progress, exit, restart, progress"),
        ({}, ("start", "plan", "plan", "exit", *KINDS[4:]), None, "expected progress, exit"),
        ({}, ("plan", *KINDS[1:]), None, "planned 2 times"),
        ({}, KINDS, [1] * 7, "not after the one that ended"),
    ],
)
def test_control_a_kill_that_was_taken_for_something_else(
    after: dict[str, Any], kinds: tuple[str, ...], generations: list[int] | None, says: str
) -> None:
    with pytest.raises(RuleBroken, match=says):
        rules.killed(before(), receipt(**after), evidence(kinds, generations))


CONTENT: Final = "One sentence. Another one."
PARTS: Final = (
    Part(0, 0, 3, 0, 14, "One sentence. ", "indexed", TIMES[2]),
    Part(1, 3, 6, 14, 26, "Another one.", "indexed", TIMES[5]),
)


def memory(parts: tuple[Part, ...] = PARTS, content: str = CONTENT) -> Memory:
    data = content.encode()
    return Memory("memory:x", content, hashlib.sha256(data).hexdigest(), len(data), parts)


def changed(index: int, **changes: Any) -> tuple[Part, ...]:
    parts = [*PARTS]
    parts[index] = msgspec.structs.replace(parts[index], **changes)
    return tuple(parts)


def test_a_whole_memory_keeps_what_was_indexed() -> None:
    rules.whole_memory(memory(), CONTENT)
    assert rules.kept_parts(memory(), evidence()) == 1


@pytest.mark.parametrize(
    "broken",
    [
        memory(content="One sentence. Another two."),
        memory(PARTS[:1]),
        memory(PARTS[1:]),
        memory((PARTS[0], *PARTS)),
        memory(changed(0, embedding_state="planned")),
        memory(changed(1, content="Another 1.")),
        memory(changed(1, token_start=4)),
        memory(changed(1, byte_start=15)),
        memory(()),
    ],
)
def test_control_a_memory_that_is_not_whole(broken: Memory) -> None:
    with pytest.raises(RuleBroken):
        rules.whole_memory(broken, CONTENT)


def test_control_a_part_that_was_embedded_again() -> None:
    with pytest.raises(RuleBroken, match="embedded again"):
        rules.kept_parts(memory(changed(0, updated_at=TIMES[5])), evidence())


def frame(sequence: int, state: str = "accepted", came_from: str | None = None) -> bytes:
    event = {
        "operation_id": "x",
        "sequence": sequence,
        "from_state": came_from,
        "to_state": state,
        "detail": None,
        "executor_generation": 2,
        "occurred_at": TIMES[0],
    }
    return b"id: %d\nevent: operation_state\ndata: %s\n\n" % (sequence, json.dumps(event).encode())


WALK: Final = frame(1) + b": keep-alive\n\n" + frame(2, "validated", "accepted")


def test_a_stream_is_its_whole_frames() -> None:
    assert [sequence for sequence, _ in rules.frames(WALK)] == [1, 2]
    assert rules.whole(WALK[:-1]) == frame(1) + b": keep-alive\n\n"
    assert rules.whole(WALK[:20]) == b""
    assert [event.to_state for event in rules.events(WALK, "x")] == ["accepted", "validated"]
    rules.union([frame(1), frame(2, "validated", "accepted")], WALK, "resumed")


@pytest.mark.parametrize(
    "broken",
    [
        lambda: rules.frames(WALK[:-1]),
        lambda: rules.frames(WALK.replace(b"operation_state", b"message")),
        lambda: rules.events(WALK, "y"),
        lambda: rules.events(frame(2), "x"),
        lambda: rules.events(frame(1) + frame(3, "validated", "accepted"), "x"),
        lambda: rules.events(frame(1) + frame(2, "validated", "blocked"), "x"),
        lambda: rules.events(WALK.replace(b"id: 2", b"id: 3"), "x"),
        lambda: rules.events(WALK.replace(TIMES[0].encode(), b"now"), "x"),
        lambda: rules.union([frame(1)], WALK, "a gap"),
        lambda: rules.union([frame(1), WALK], WALK, "twice"),
        lambda: rules.union([WALK.replace(b'"sequence"', b' "sequence"')], WALK, "other bytes"),
        lambda: rules.told_by_last_event(receipt(), rules.events(WALK, "x")),
        lambda: rules.told_by_last_event(receipt(), []),
    ],
)
def test_control_a_stream_of_another_form(broken: Callable[[], object]) -> None:
    with pytest.raises(RuleBroken):
        broken()


def test_one_submission_is_one_operation_and_one_memory() -> None:
    first, second = receipt(), receipt(operation_id="again")
    rules.once_each([first.payload_hash], [first, receipt(payload_hash="0" * 64)])
    rules.exactly(["a", "b"], [Hit("b"), Hit("a")], "found")
    for operations in ([first, second], []):
        with pytest.raises(RuleBroken, match="one submission became"):
            rules.once_each([first.payload_hash], operations)
    for results in ([Hit("a"), Hit("a")], [], [Hit("a"), Hit("b")]):
        with pytest.raises(RuleBroken, match="expected exactly"):
            rules.exactly(["a"], results, "found")
    assert rules.key(first) == "memory:example"
    with pytest.raises(RuleBroken, match="names no memory"):
        rules.key(receipt(result={"id": 3}))


def test_errors_have_one_key() -> None:
    assert rules.error_text(409, b'{"error": "taken"}', 409, "x") == "taken"
    for status, body in (
        (200, b'{"error": "taken"}'),
        (409, b'{"error": "a", "b": 1}'),
        (409, b"[]"),
        (409, b"<"),
    ):
        with pytest.raises(RuleBroken):
            rules.error_text(status, body, 409, "x")


CHILD: Final = ("python", "-P", "-m", "muniment.executor_wiring")


def test_the_child_that_embeds_what_is_written_is_the_one_to_kill() -> None:
    assert rules.ingest_child({7: ["sh"], 8: CHILD}, 1) == 8
    assert rules.ingest_child({8: [*CHILD, "query"], 9: [*CHILD, "ingest"]}, 1) == 9
    both: dict[int, Sequence[str]] = {8: CHILD, 9: CHILD}
    for children in ({}, {7: ["sh"]}, both):
        with pytest.raises(RuleBroken, match="executor children that could be the one") as broken:
            rules.ingest_child(children, 1)
        assert broken.value.todo is not None


def test_a_cut_is_counted_in_events_and_not_in_comments() -> None:
    assert probe._end_of(WALK, 1) == len(frame(1))
    assert probe._end_of(b": keep-alive\n\n" + WALK, 1) == len(frame(1)) + 14
    assert probe._end_of(WALK, 2) == len(WALK)
    assert probe._end_of(WALK[:-1], 2) is None
    assert probe._end_of(b"", 1) is None


def test_what_is_left_of_an_answer_is_read_from_its_head() -> None:
    head = b"HTTP/1.1 202 Accepted\r\nContent-Length: 10\r\n\r\n"
    assert probe._left(head[:-1]) > 1
    assert [probe._left(head + b"x" * count) for count in (0, 9, 10)] == [10, 1, 0]
    assert probe._left(b"HTTP/1.1 202 Accepted\r\n\r\n") == 0
