"""What every ledger store promises: one suite, each backend (ports/ledger.py; rulings 4 to 8, 11, 12, 16)."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from muniment.core import identity, replay
from muniment.core.planning import model_digest
from muniment.errors import Conflict, InvalidField, InvariantBroken, LedgerUnavailable, StorageFull
from muniment.model import command, journal
from muniment.model.operation import Kind, State
from muniment.model.times import rfc3339
from muniment.ports.ledger import Reads
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import ACCOUNT, NOW
from tests.support.stores import LINEAGE, Driver, units

A, V, B, P, R, I, C, X = State  # noqa: E741 the states in the seed's order
WALK = [A, V, P, R, I, C]


def nothing_happens(ledger: Driver, *commands: command.Command) -> None:
    """Assert that commands which lost their condition leave no unit and no trace in any row."""
    before, tables = ledger.head(), ledger.store.read(lambda reads: list(reads.rows("operation")))
    for each in commands:
        ledger.write(each)
    assert ledger.head() == before
    assert ledger.rows("operation") == tables


# A new history


def test_a_history_begins_with_its_lineage_and_the_local_account(ledger: Driver) -> None:
    first, second = ledger.store.read(units)

    assert first == journal.Genesis(at=NOW, lineage=LINEAGE)
    assert second == journal.Account(at=NOW, n=ACCOUNT, key="local")
    assert ledger.rows("account") == [{"n": ACCOUNT, "key": "local", "created_us": NOW}]
    assert ledger.store.read(lambda reads: reads.meta("incarnation")) == "test"


# Accept


def test_an_accepted_operation_has_its_receipt_its_event_and_its_bytes(ledger: Driver) -> None:
    asked = ops.memory("first", "Zwölf Fässer.", user_id="ann", now=NOW + 7)
    admitted = ledger.write(asked)
    receipt = admitted.receipt

    assert admitted.created
    assert receipt == ledger.receipt("first")
    assert (receipt.operation_id, receipt.schema_version, receipt.kind) == ("first", 2, Kind.ADD_MEMORY)
    assert (receipt.state, receipt.progress_seq, receipt.payload_hash) == (A, 1, asked.payload_hash)
    assert (receipt.dependencies, receipt.blocked_by, receipt.result, receipt.error) == ((), (), None, None)
    assert (receipt.executor_generation, receipt.executor_progress_seq, receipt.executor_exit_count) == (
        0,
        0,
        0,
    )
    assert receipt.created_at == receipt.updated_at == rfc3339(NOW + 7)
    [event] = ledger.events("first")
    assert (event.sequence, event.from_state, event.to_state, event.detail) == (1, None, A, None)
    [payload], [attribute] = ledger.rows("payload"), ledger.rows("attribute")
    assert (payload["bytes"], payload["byte_count"]) == ("Zwölf Fässer.".encode(), 15)
    assert attribute["bytes"] == b'{"user_id":"ann"}'
    assert payload["digest"] == replay.salted(asked.content_salt, "Zwölf Fässer.".encode())


def test_the_journal_names_bytes_and_does_not_hold_them(ledger: Driver) -> None:
    """Ruling 14: a unit says nothing once the bytes and their salt are erased."""
    ledger.remember(ops.memory("m", "A very private sentence.", user_id="somebody", speaker="me"))
    ledger.apply(ledger.accept(ops.stream("s", "private stream", user_id="somebody")))

    written = b"".join(row.data for row in ledger.store.read(lambda reads: reads.units(0, 100)))

    assert b"private" not in written.replace(b'"visibility":"private"', b"")
    assert b"somebody" not in written


def test_the_same_submission_again_is_answered_and_stores_nothing(ledger: Driver) -> None:
    first = ledger.write(ops.memory("m"))
    head = ledger.head()

    again = ledger.write(ops.memory("m", now=NOW + 99))

    assert (again.created, again.receipt) == (False, first.receipt)
    assert ledger.head() == head


def test_a_replay_is_answered_whatever_rules_came_later(ledger: Driver) -> None:
    """Ruling 2: look-up comes before the rules, so a replay never fails on one of them."""
    ledger.write(ops.memory("m"))
    later = msgspec.structs.replace(
        ops.memory("m", dependencies=["m"]), invalid=("payload.content", "is late")
    )

    assert ledger.write(later).created is False
    assert ledger.receipt("m").dependencies == ()


def test_the_first_receipt_is_that_of_the_stored_rows(ledger: Driver) -> None:
    ledger.remember(ops.memory("done"))
    for asked in (
        ops.memory("m", dependencies=["z", "done", "é", "z"], now=NOW + 1_234_567),
        ops.stream("s", dependencies=["done"], now=-1),
    ):
        assert ledger.write(asked).receipt == ledger.receipt(asked.operation_id)


def test_a_replay_after_the_end_has_the_terminal_receipt(ledger: Driver) -> None:
    ledger.remember(ops.memory("m"))

    again = ledger.write(ops.memory("m"))

    assert (again.created, again.receipt.state) == (False, C)
    assert again.receipt == ledger.receipt("m")


def test_another_payload_under_the_same_id_is_a_conflict_that_names_the_winner(ledger: Driver) -> None:
    winner = ops.memory("m", "first")
    ledger.write(winner)
    before = ledger.receipt("m")
    head = ledger.head()

    with pytest.raises(Conflict, match=winner.payload_hash):
        ledger.write(ops.memory("m", "second", now=NOW + 1))

    assert ledger.receipt("m") == before
    assert ledger.head() == head


def test_a_conflict_is_told_before_a_wrong_field(ledger: Driver) -> None:
    ledger.write(ops.memory("m", "first"))
    wrong = msgspec.structs.replace(ops.memory("m", "second"), invalid=("payload.x", "unknown field"))

    with pytest.raises(Conflict):
        ledger.write(wrong)


def test_a_wrong_field_is_refused_and_nothing_is_stored(ledger: Driver) -> None:
    head = ledger.head()

    with pytest.raises(InvalidField, match=r"payload\.x: unknown field"):
        ledger.write(msgspec.structs.replace(ops.memory("m"), invalid=("payload.x", "unknown field")))

    assert ledger.head() == head
    assert ledger.rows("attribute") == []


@pytest.mark.parametrize(
    "operation_id", ["a/b", "..", "x/events", "%2F", "\U0001f600", "\u00e9", "e\u0301", "\x00", " "]
)
def test_ids_are_compared_byte_for_byte(ledger: Driver, operation_id: str) -> None:
    ledger.write(ops.memory(operation_id))
    ledger.write(ops.memory(operation_id + "a"))

    assert ledger.receipt(operation_id).operation_id == operation_id
    assert ledger.write(ops.memory(operation_id)).created is False


# Batches


def test_an_error_of_one_command_is_its_own(ledger: Driver) -> None:
    replies = ledger.transact(
        ops.memory("a", "one"),
        ops.memory("a", "two"),
        ops.memory("w", dependencies=["b"]),
        ops.memory("b", dependencies=["w"]),
        msgspec.structs.replace(ops.memory("c"), invalid=("payload", "no")),
        ops.memory("a", "one"),
        ops.memory("d"),
        command.Advance(n=1, now=NOW),
    )

    assert [type(reply.error) for reply in replies] == [
        type(None),
        Conflict,
        type(None),
        InvalidField,
        InvalidField,
        type(None),
        type(None),
        type(None),
    ]
    assert [reply.value.created for reply in (replies[0], replies[5], replies[6])] == [True, False, True]
    assert [(row["n"], row["id"]) for row in ledger.rows("operation")] == [(1, "a"), (2, "w"), (3, "d")]


def test_a_bug_takes_the_whole_batch_with_it_and_the_next_one_is_served(ledger: Driver) -> None:
    ledger.write(ops.memory("before"))
    head = ledger.head()

    with pytest.raises(InvariantBroken, match="operation 99 does not exist"):
        ledger.transact(ops.memory("a"), ops.memory("b"), command.CommitMemory(n=99, now=NOW))

    assert ledger.head() == head
    assert [row["id"] for row in ledger.rows("operation")] == ["before"]
    assert ledger.accept(ops.memory("after")) == 2


@pytest.mark.parametrize("fault", [StorageFull(), LedgerUnavailable()])
def test_a_store_that_cannot_take_a_batch_takes_none_of_it(
    ledger: Driver, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    head = ledger.head()
    from muniment.stages import ledger as stage

    def full(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_advance", full)
        with pytest.raises(type(fault)):
            ledger.transact(ops.memory("a"), command.Advance(n=1, now=NOW))

    assert ledger.head() == head
    assert ledger.rows("operation") == []
    assert ledger.accept(ops.memory("a")) == 1


# Cycles


@pytest.mark.parametrize(
    "graph",
    [
        {"a": ["b"], "b": ["a"]},
        {"a": ["b"], "b": ["c"], "c": ["a"]},
        {"a": ["x", "b"], "b": ["y", "c"], "c": ["z", "a"]},
        {"b": ["c"], "a": ["b"], "c": ["q", "a"]},
        {"a": ["b", "b"], "b": ["b2"], "b2": ["a"]},
    ],
)
def test_what_closes_a_cycle_is_refused_with_the_field_named(
    ledger: Driver, graph: dict[str, list[str]]
) -> None:
    """Ruling 4: also through IDs that nobody had submitted when they were named."""
    *others, last = graph
    for each in others:
        ledger.write(ops.memory(each, dependencies=graph[each]))
    head = ledger.head()

    with pytest.raises(InvalidField, match=r"dependencies: operation '.*' would wait for itself"):
        ledger.write(ops.memory(last, dependencies=graph[last]))

    assert ledger.head() == head


def test_a_cycle_is_found_among_the_commands_of_one_batch(ledger: Driver) -> None:
    replies = ledger.transact(ops.memory("a", dependencies=["b"]), ops.memory("b", dependencies=["a"]))

    assert [type(reply.error) for reply in replies] == [type(None), InvalidField]


@pytest.mark.parametrize(
    "graph",
    [
        {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []},
        {"a": ["missing"], "b": ["a", "missing"]},
        {"b": ["a"], "a": ["c"], "c": ["missing"]},
    ],
)
def test_what_is_no_cycle_is_accepted(ledger: Driver, graph: dict[str, list[str]]) -> None:
    for each, dependencies in graph.items():
        ledger.accept(ops.memory(each, dependencies=dependencies))


def test_what_has_ended_waits_for_nothing_and_closes_no_cycle(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("a", dependencies=["b"]))
    ledger.write(ops.refuse(n))

    ledger.accept(ops.memory("b", dependencies=["a"]))


# Validate and block


def test_an_operation_without_dependencies_is_validated_once(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))

    assert ledger.advance(n) is V
    assert ledger.walk("m") == [A, V]
    nothing_happens(ledger, command.Advance(n=n, now=NOW + 5))


def test_open_dependencies_block_sorted_by_bytes_unique_and_missing_ones_included(ledger: Driver) -> None:
    done = ledger.remember(ops.memory("done"))
    asked = ops.memory("m", dependencies=["z", "\uffff", "done", "z", "\U0001f600", "é", "A"])
    n = ledger.accept(asked)

    assert ledger.advance(n) is B

    receipt = ledger.receipt("m")
    assert done
    assert receipt.dependencies == asked.dependencies
    # UTF-8 bytes, not UTF-16 units: U+FFFF is before U+1F600.
    assert receipt.blocked_by == ("A", "z", "é", "\uffff", "\U0001f600")
    assert ledger.walk("m") == [A, V, B]
    assert ledger.events("m")[-1].detail == {
        "reason": "dependencies_not_committed",
        "blocked_by": list(receipt.blocked_by),
    }
    nothing_happens(ledger, command.Advance(n=n, now=NOW + 5))


def test_a_commit_meets_every_dependency_on_it_without_an_event(ledger: Driver) -> None:
    """Ruling 6: blocked_by shrinks in the transaction of the commit."""
    waiting = ledger.accept(ops.memory("waiting", dependencies=["a", "b", "a"]))
    ledger.advance(waiting)
    ledger.accept(ops.memory("not yet advanced", dependencies=["a"]))
    ledger.remember(ops.memory("a"), now=NOW + 50)

    assert ledger.receipt("waiting").blocked_by == ("b",)
    assert ledger.receipt("waiting").updated_at == rfc3339(NOW + 50)
    assert ledger.walk("waiting") == [A, V, B]
    assert ledger.receipt("not yet advanced").blocked_by == ()
    assert [row["met"] for row in ledger.rows("dependency")] == [1, 0, 1, 1]


def test_a_dependency_that_is_committed_already_is_met_from_the_start(ledger: Driver) -> None:
    ledger.remember(ops.memory("a"))
    n = ledger.accept(ops.memory("m", dependencies=["a"]))

    assert ledger.receipt("m").blocked_by == ()
    assert ledger.advance(n) is V


def test_dependencies_reach_only_into_the_own_account(
    ledger: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ruling 1: a name elsewhere is another name. No command makes an account, so a unit is appended."""
    unit = journal.Account(at=NOW, n=2, key="other")
    with monkeypatch.context() as patch:
        patch.setattr(ledger.store, "_handle", lambda rows, _: rows.append(unit, {}))
        ledger.transact(command.Probe(now=NOW))
    ledger.remember(ops.memory("a"))

    admitted = ledger.write(ops.accept("m", Kind.ADD_MEMORY, {"content": "x"}, ["a"], account=2))

    assert admitted.receipt.blocked_by == ("a",)
    assert ledger.write(ops.accept("a", Kind.ADD_MEMORY, {"content": "y"}, account=2)).created


# Rejections carry over


def test_a_rejection_ends_its_blocked_dependants_over_chains_and_diamonds(ledger: Driver) -> None:
    root = ledger.accept(ops.memory("root"))
    graph = {"b": ["root"], "c": ["root"], "d": ["b", "c"], "e": ["d"], "apart": ["elsewhere"]}
    for each, on in graph.items():
        ledger.advance(ledger.accept(ops.memory(each, dependencies=on)))

    assert ledger.write(ops.refuse(root)).state is X

    for each in ("b", "c", "d", "e"):
        receipt = ledger.receipt(each)
        assert receipt.state is X
        cause = receipt.result["dependency"]
        assert cause in graph[each]
        assert receipt.error == f"dependency '{cause}' was rejected"
        assert receipt.result == {
            "outcome": "rejected",
            "reason": "dependency_rejected",
            "dependency": cause,
        }
        assert ledger.walk(each) == [A, V, B, X]
        assert ledger.events(each)[-1].detail == receipt.result
    assert ledger.receipt("apart").state is B


@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_a_dependant_that_is_only_accepted_is_rejected_when_it_is_validated(
    ledger: Driver, kind: str
) -> None:
    admit: Callable[..., command.Accept] = getattr(ops, kind)
    root = ledger.accept(ops.memory("root"))
    n = ledger.accept(admit("late", dependencies=["other", "root"]))
    ledger.write(ops.refuse(root))

    assert ledger.receipt("late").state is A
    assert (ledger.advance(n) if kind == "memory" else ledger.apply(n)) is X
    assert ledger.walk("late") == [A, V, X]
    assert ledger.receipt("late").result["dependency"] == "root"


def test_what_is_accepted_after_the_rejection_of_its_dependency_is_rejected_too(ledger: Driver) -> None:
    ledger.write(ops.refuse(ledger.accept(ops.memory("root"))))
    n = ledger.accept(ops.memory("later", dependencies=["root"]))

    assert ledger.advance(n) is X


def test_a_cascade_passes_by_what_is_only_accepted_and_reaches_it_later(ledger: Driver) -> None:
    root = ledger.accept(ops.memory("root"))
    middle = ledger.accept(ops.memory("middle", dependencies=["root"]))
    last = ledger.accept(ops.memory("last", dependencies=["middle"]))
    ledger.advance(last)
    ledger.write(ops.refuse(root))
    assert [ledger.receipt(each).state for each in ("middle", "last")] == [A, B]

    ledger.advance(middle)

    assert [ledger.receipt(each).state for each in ("middle", "last")] == [X, X]


# Tasks


def streams(ledger: Driver) -> list[tuple[str, Any, Any]]:
    return [(row["name"], row["owner"], row["agent"]) for row in ledger.rows("stream")]


def test_a_stream_is_made_in_one_unit_with_six_events(ledger: Driver) -> None:
    n = ledger.accept(ops.stream("s", "chores", user_id="ann", description="at home"))
    head = ledger.head()

    assert ledger.apply(n) is C

    key = identity.object_key("stream", "local", "s")
    assert ledger.head() == head + 1
    assert ledger.walk("s") == WALK
    assert ledger.receipt("s").progress_seq == 6
    assert ledger.receipt("s").result == {"id": key, "existing": False}
    assert ledger.receipt("s").executor_progress_seq == 0
    assert ledger.events("s")[2].detail == {"parts": 0}
    assert ledger.events("s")[5].detail == {"outcome": "committed"}
    assert streams(ledger) == [("chores", "ann", None)]
    assert ledger.rows("stream")[0]["key"] == key
    nothing_happens(ledger, command.Apply(n=n, now=NOW + 9), command.Advance(n=n, now=NOW + 9))


def test_the_same_stream_again_commits_to_the_existing_one(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s", description="at home")))
    ledger.apply(ledger.accept(ops.stream("again", description="at home", user_id=None)))

    key = identity.object_key("stream", "local", "s")
    assert ledger.receipt("again").result == {"id": key, "existing": True}
    assert len(ledger.rows("stream")) == 1


def test_a_stream_with_another_description_is_rejected(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s", description="at home")))
    assert ledger.apply(ledger.accept(ops.stream("other", description="abroad"))) is X

    receipt = ledger.receipt("other")
    assert receipt.result == {"outcome": "rejected", "reason": "stream_differs"}
    assert receipt.error is not None
    assert "at home" not in receipt.error, "a receipt is kept for ever, what callers said may be erased"


def test_streams_of_one_name_are_apart_by_owner_and_agent(ledger: Driver) -> None:
    everybody: list[dict[str, Any]] = [
        {},
        {"user_id": "ann"},
        {"agent_id": "a1"},
        {"user_id": "ann", "agent_id": "a1"},
    ]
    for each, whose in enumerate(everybody):
        assert ledger.apply(ledger.accept(ops.stream(f"s{each}", description=str(each), **whose))) is C

    assert len(ledger.rows("stream")) == 4


def test_a_step_belongs_to_its_stream_and_is_keyed_inside_it(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s")))
    assert ledger.apply(ledger.accept(ops.step("a", "wash", ordinal=3))) is C
    assert ledger.apply(ledger.accept(ops.step("same", "wash", ordinal=3))) is C
    assert ledger.apply(ledger.accept(ops.step("differs", "wash", ordinal=4))) is X

    key, stream_key = identity.object_key("step", "local", "a"), identity.object_key("stream", "local", "s")
    assert ledger.receipt("a").result == {"id": key, "task_stream_id": stream_key, "existing": False}
    assert ledger.receipt("same").result == {"id": key, "task_stream_id": stream_key, "existing": True}
    assert ledger.receipt("differs").result["reason"] == "step_differs"
    [row] = ledger.rows("step")
    assert (row["ordinal"], row["status"], row["idempotency_key"]) == (3, "pending", "wash")


def test_a_step_without_its_stream_is_rejected(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s", user_id="ann")))

    assert ledger.apply(ledger.accept(ops.step("a"))) is X
    assert ledger.receipt("a").result["reason"] == "stream_not_found"


def test_steps_are_in_order_of_ordinal_then_of_acceptance(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s")))
    for key, ordinal in (("c", 2), ("a", 1), ("b", 2), ("d", None)):
        ledger.apply(ledger.accept(ops.step(key, key, ordinal=ordinal)))
    stream_n = ledger.rows("stream")[0]["object_n"]

    found = ledger.store.read(lambda reads: reads.steps(stream_n))

    assert [(row["idempotency_key"], row["ordinal"]) for row in found] == [
        ("a", 1),
        ("d", 1),
        ("c", 2),
        ("b", 2),
    ]


def test_a_completion_is_once_equal_again_and_otherwise_rejected(ledger: Driver) -> None:
    ledger.apply(ledger.accept(ops.stream("s")))
    ledger.apply(ledger.accept(ops.step("a")))
    n = ledger.accept(ops.complete("done", result={"ok": [1, 2.5]}, now=NOW + 3))
    assert ledger.apply(n, NOW + 4) is C
    assert ledger.apply(ledger.accept(ops.complete("same", result={"ok": [1, 2.5]}))) is C
    assert ledger.apply(ledger.accept(ops.complete("differs", result={"ok": [1, 2]}))) is X

    key = identity.object_key("step", "local", "a")
    assert ledger.receipt("done").result == {"id": key, "status": "completed", "existing": False}
    assert ledger.receipt("same").result == {"id": key, "status": "completed", "existing": True}
    assert ledger.receipt("differs").result["reason"] == "completion_differs"
    [row] = ledger.rows("step")
    assert (row["status"], row["completed_us"]) == ("completed", NOW + 4)
    assert row["completed_by"] == ledger.operation("done")["object_n"]


def test_a_completion_of_no_step_or_of_several_is_rejected(ledger: Driver) -> None:
    for name in ("one", "two"):
        ledger.apply(ledger.accept(ops.stream(f"s {name}", name)))
        ledger.apply(ledger.accept(ops.step(f"a {name}", "key", name)))
    cases: dict[str, tuple[str, str | None]] = {
        "missing": ("nokey", None),
        "ambiguous": ("key", None),
        "named": ("key", "two"),
        "gone": ("key", "x"),
    }
    for each, (key, where) in cases.items():
        ledger.apply(ledger.accept(ops.complete(each, key, stream_name=where)))

    reasons = {each: (ledger.receipt(each).result or {}).get("reason") for each in cases}
    assert reasons == {
        "missing": "step_not_found",
        "ambiguous": "step_ambiguous",
        "named": None,
        "gone": "step_not_found",
    }
    error = ledger.receipt("ambiguous").error
    assert error is not None
    assert identity.object_key("step", "local", "a one") in error
    assert identity.object_key("step", "local", "a two") in error
    assert [row["status"] for row in ledger.rows("step")] == ["pending", "completed"]


def test_a_task_operation_waits_for_its_dependencies_first(ledger: Driver) -> None:
    n = ledger.accept(ops.stream("s", dependencies=["m"]))
    assert ledger.apply(n) is B
    nothing_happens(ledger, command.Apply(n=n, now=NOW + 1))
    ledger.remember(ops.memory("m"))

    assert ledger.apply(n) is C
    assert ledger.walk("s") == [A, V, B, P, R, I, C]
    assert ledger.receipt("s").progress_seq == 7


def test_apply_is_not_for_memories(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))

    nothing_happens(ledger, command.Apply(n=n, now=NOW + 1))


# Plan, parts, memory


def test_an_undisturbed_memory_of_one_part_has_six_events_and_four_pieces_of_evidence(ledger: Driver) -> None:
    n = ledger.remember(ops.memory("m", "One sentence."))

    receipt = ledger.receipt("m")
    assert ledger.walk("m") == WALK
    assert receipt.progress_seq == 6
    assert (receipt.executor_generation, receipt.executor_progress_seq) == (1, 4)
    assert (receipt.executor_exit_count, receipt.executor_last_exit, receipt.executor_error) == (
        0,
        None,
        None,
    )
    assert ledger.evidence(n) == [(1, "start", 1), (2, "plan", 1), (3, "progress", 1), (4, "completion", 1)]
    key = identity.object_key("memory", "local", "m")
    assert receipt.result == {"id": key, "parts": 1, "token_count": 6}
    assert [event.detail for event in ledger.events("m")] == [
        None,
        None,
        {"parts": 1, "token_count": 6},
        {"executor_generation": 1},
        None,
        {"outcome": "committed"},
    ]
    assert [event.executor_generation for event in ledger.events("m")] == [0, 0, 1, 1, 1, 1]
    assert [row["key"] for row in ledger.rows("memory")] == [key]


def test_a_blocked_memory_has_seven_events(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m", dependencies=["first"]))
    ledger.advance(n)
    ledger.remember(ops.memory("first"))
    ledger.finish(n)

    assert ledger.walk("m") == [A, V, B, P, R, I, C]
    assert ledger.receipt("m").progress_seq == 7


def test_a_memory_is_written_in_few_units(ledger: Driver) -> None:
    """Ruling 7: accept; validated; planned and processing; a batch of parts; indexed and committed."""
    ledger.write(ops.memory("m"))

    ledger.advance(1)
    ledger.vectors(1, ledger.write(ops.plan(1, ops.memory("m"), parts=3)), [0, 1, 2])
    ledger.commit(1)

    kinds = [type(unit).__name__ for unit in ledger.store.read(units)[2:]]
    assert kinds == ["Accept", "Advance", "Model", "Plan", "Parts", "Commit"]


def test_a_committed_memory_has_what_was_said_of_it(ledger: Driver) -> None:
    ledger.remember(
        ops.memory(
            "m",
            user_id="ann",
            agent_id="a1",
            session_id="s1",
            speaker="bob",
            role="user",
            session_seq=7,
            visibility="instance",
            occurred_at="2024-02-29T12:00:00.5+01:00",
            expires_at="2030-01-01T00:00:00Z",
        ),
        parts=2,
        now=NOW + 5,
    )

    [row] = ledger.rows("memory")
    assert (row["owner"], row["agent"], row["session"], row["speaker"]) == ("ann", "a1", "s1", "bob")
    assert (row["role"], row["session_seq"], row["visibility"]) == ("user", 7, "instance")
    assert (rfc3339(row["occurred_us"]), rfc3339(row["expires_us"])) == (
        "2024-02-29T11:00:00.500000Z",
        "2030-01-01T00:00:00.000000Z",
    )
    assert (row["space_n"], row["submitter_n"], row["recorded_us"]) == (None, None, NOW + 5)


def test_nobody_is_filled_in_from_somebody_else(ledger: Driver) -> None:
    """Ruling 19: without user_id the owner is null, whoever speaks."""
    ledger.remember(ops.memory("m", speaker="bob", agent_id="a1"))

    [row] = ledger.rows("memory")
    assert (row["owner"], row["submitter_n"], row["visibility"]) == (None, None, "private")


def test_the_first_plan_that_was_saved_is_the_plan(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))
    ledger.advance(n)
    first = ledger.plan(n, parts=3)

    head = ledger.head()
    assert ledger.plan(n, parts=2, generation=2) == first
    assert ledger.head() == head
    assert len(ledger.rows("part")) == 3
    ledger.vectors(n, first, range(3))
    ledger.commit(n)
    assert ledger.plan(n, parts=1) == first


def test_a_plan_is_saved_only_where_nothing_stands_before_it(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("accepted only"))
    assert ledger.plan(n) is None
    blocked = ledger.accept(ops.memory("blocked", dependencies=["missing"]))
    ledger.advance(blocked)
    assert ledger.plan(blocked) is None
    rejected = ledger.accept(ops.memory("rejected"))
    ledger.write(ops.refuse(rejected))
    assert ledger.plan(rejected) is None
    task = ledger.accept(ops.stream("task", dependencies=["missing"]))
    ledger.apply(task)
    assert ledger.plan(task) is None

    assert ledger.rows("plan") == []
    assert ledger.rows("model") == []


def test_a_plan_of_a_dead_generation_is_not_saved(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))
    ledger.advance(n)
    ledger.write(ops.exited(n, generation=2))

    assert ledger.plan(n, generation=1) is None
    assert ledger.receipt("m").executor_generation == 2
    assert ledger.plan(n, generation=3) is not None


def test_models_are_kept_once(ledger: Driver) -> None:
    for each in "abc":
        ledger.remember(ops.memory(each))

    [row] = ledger.rows("model")
    assert row["digest"] == model_digest(ops.MODEL)
    assert msgspec.json.decode(row["identity"]) == msgspec.to_builtins(ops.MODEL)
    assert [plan["model_n"] for plan in ledger.rows("plan")] == [1, 1, 1]


def processing(ledger: Driver, parts: int = 4) -> tuple[int, int]:
    n = ledger.accept(ops.memory("m", "A content of some length."))
    ledger.advance(n)
    plan_n = ledger.plan(n, parts=parts)
    assert plan_n is not None
    return n, plan_n


def test_a_part_that_is_indexed_is_never_written_again(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.vectors(n, plan_n, [0, 1])
    before = ledger.rows("vector")
    nothing_happens(ledger, ops.vectors(n, plan_n, [1, 0]), ops.vectors(n, plan_n, []))

    other = ops.vectors(n, plan_n, [1, 2], generation=1)
    changed = msgspec.structs.replace(
        other, vectors=((1, ops.vector("another")), (2, ops.vector("the third")))
    )
    ledger.write(changed)

    assert ledger.rows("vector")[:2] == before
    assert [row["part_index"] for row in ledger.rows("vector")] == [0, 1, 2]
    assert [row["embedding_state"] for row in ledger.rows("part")] == ["indexed"] * 3 + ["planned"]
    assert ledger.evidence(n)[2:] == [(3, "progress", 1), (4, "progress", 1)]


def test_an_unknown_part_or_plan_changes_nothing(ledger: Driver) -> None:
    n, plan_n = processing(ledger)

    nothing_happens(ledger, ops.vectors(n, plan_n, [17]), ops.vectors(n, plan_n + 1, [0]))


def test_a_late_frame_of_a_dead_generation_changes_nothing(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.write(ops.exited(n, generation=1))
    ledger.vectors(n, plan_n, [0], generation=2)

    nothing_happens(ledger, ops.vectors(n, plan_n, [1, 2, 3], generation=1))
    assert ledger.receipt("m").executor_generation == 2


def test_a_new_generation_is_shown_with_its_restart(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.vectors(n, plan_n, [0])
    ledger.write(ops.exited(n, generation=1))
    ledger.vectors(n, plan_n, [1], generation=3)
    ledger.vectors(n, plan_n, [2, 3], generation=3)
    ledger.commit(n)

    receipt = ledger.receipt("m")
    assert ledger.evidence(n) == [
        (1, "start", 1),
        (2, "plan", 1),
        (3, "progress", 1),
        (4, "exit", 1),
        (5, "restart", 3),
        (6, "progress", 3),
        (7, "progress", 3),
        (8, "completion", 3),
    ]
    assert (receipt.executor_generation, receipt.executor_progress_seq) == (3, 8)
    assert (receipt.executor_exit_count, receipt.executor_last_exit) == (1, "exit of 1")
    assert [row["generation"] for row in ledger.rows("part")] == [1, 3, 3, 3]
    assert ledger.walk("m") == WALK


def test_vectors_of_another_model_than_the_plan_are_a_bug(ledger: Driver) -> None:
    n, plan_n = processing(ledger)

    with pytest.raises(InvariantBroken, match="one model"):
        ledger.vectors(n, plan_n, [0], model=ops.OTHER_MODEL)


@pytest.mark.parametrize("indexed", [[], [0], [0, 1, 3]])
def test_a_memory_is_never_committed_with_a_part_missing(ledger: Driver, indexed: Sequence[int]) -> None:
    n, plan_n = processing(ledger)
    ledger.vectors(n, plan_n, indexed)
    before = ledger.rows("operation")

    with pytest.raises(InvariantBroken, match="must not commit: part"):
        ledger.commit(n)

    assert ledger.rows("operation") == before
    assert ledger.rows("memory") == []
    ledger.vectors(n, plan_n, sorted({0, 1, 2, 3} - set(indexed)))
    assert ledger.commit(n) is C


def test_a_memory_is_never_committed_with_a_vector_that_is_not_finite(ledger: Driver) -> None:
    """Vector and commit in one batch, so that nothing of it stays behind."""
    n, plan_n = processing(ledger, parts=1)
    broken = struct.pack("<4f", 1.0, float("nan"), 0.0, 0.0)
    asked = msgspec.structs.replace(ops.vectors(n, plan_n, [0]), vectors=((0, broken),))

    with pytest.raises(InvariantBroken, match="not finite"):
        ledger.transact(asked, command.CommitMemory(n=n, now=NOW))

    assert ledger.rows("vector") == []


def test_a_second_commit_changes_nothing(ledger: Driver) -> None:
    n = ledger.remember(ops.memory("m"))

    nothing_happens(
        ledger, command.CommitMemory(n=n, now=NOW + 1), command.CommitMemory(n=n, now=NOW + 2), ops.exited(n)
    )
    assert len(ledger.rows("memory")) == 1


def test_a_commit_before_the_plan_changes_nothing(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))
    nothing_happens(ledger, command.CommitMemory(n=n, now=NOW))
    ledger.advance(n)
    nothing_happens(ledger, command.CommitMemory(n=n, now=NOW))


# Executor evidence


@pytest.mark.parametrize("kind", ["exit", "stall", "protocol", "failure"])
def test_what_happens_to_the_executor_is_evidence_and_never_a_verdict(ledger: Driver, kind: str) -> None:
    """Ruling 8, in every state in which an executor can be at work for an operation."""
    n = ledger.accept(ops.memory("m", dependencies=["other"]))
    ways: tuple[tuple[Callable[[], object], State], ...] = (
        (lambda: ledger.advance(n), B),
        (lambda: ledger.remember(ops.memory("other")), B),
        (lambda: ledger.plan(n, generation=9), R),
        (lambda: ledger.vectors(n, 2, [0], generation=9), R),
    )
    for generation, (reach, state) in enumerate(ways, start=6):
        reach()
        events = ledger.events("m")
        before = ledger.receipt("m")
        assert ledger.write(ops.exited(n, generation=generation, kind=kind)).state is state
        after = ledger.receipt("m")
        assert (after.state, after.progress_seq, ledger.events("m")) == (
            before.state,
            before.progress_seq,
            events,
        )
        assert after.executor_progress_seq == before.executor_progress_seq + 1
        assert after.executor_exit_count == before.executor_exit_count + (kind != "failure")
        text = f"{kind} of {generation}"
        assert (after.executor_error, after.executor_last_exit) == (
            (text, None) if kind == "failure" else (None, text)
        )
        assert ledger.evidence(n)[-1] == (after.executor_progress_seq, kind, generation)
    ledger.commit(n)
    assert ledger.receipt("m").executor_exit_count == (0 if kind == "failure" else 4)


@pytest.mark.parametrize("kind", ["exit", "stall", "protocol"])
def test_the_end_of_a_generation_counts_once(ledger: Driver, kind: str) -> None:
    """However many requests an operation had with the child, and however often the write is repeated."""
    n, plan_n = processing(ledger)
    ledger.write(ops.exited(n, generation=3, kind=kind))
    once = ledger.receipt("m")

    ledger.write(ops.exited(n, generation=3, kind=kind))
    assert ledger.receipt("m") == once

    ledger.vectors(n, plan_n, [0], generation=3)  # An answer that was on its way; evidence of progress.
    ledger.write(ops.exited(n, generation=3, kind="exit"))
    assert ledger.receipt("m").executor_exit_count == 1
    ledger.write(ops.exited(n, generation=4, kind=kind))
    assert ledger.receipt("m").executor_exit_count == 2


def test_a_failure_that_repeats_unchanged_is_no_news(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.write(ops.exited(n, kind="failure"))
    once = ledger.receipt("m")

    ledger.write(ops.exited(n, kind="failure"))
    assert ledger.receipt("m") == once

    ledger.write(ops.exited(n, generation=2, kind="failure"))
    assert ledger.receipt("m").executor_error == "failure of 2"
    ledger.vectors(n, plan_n, [0], generation=2)
    ledger.write(ops.exited(n, generation=2, kind="failure"))
    assert ledger.receipt("m").executor_error == "failure of 2", "after progress it is news again"


def test_a_fenced_write_says_so(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    assert not ledger.write(ops.vectors(n, plan_n, [0], generation=5)).fenced
    assert ledger.write(ops.vectors(n, plan_n, [1], generation=4)).fenced
    assert not ledger.write(ops.vectors(n, plan_n, [1], generation=5)).fenced


def test_missing_parts_come_in_pages(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    total = len(ledger.store.read(lambda reads: reads.parts(plan_n)))
    first = ledger.store.read(lambda reads: reads.missing_parts(plan_n, -1, 1))
    assert [row["part_index"] for row in first] == [0]
    ledger.vectors(n, plan_n, [0])
    left = ledger.store.read(lambda reads: reads.missing_parts(plan_n, -1, 100))
    assert [row["part_index"] for row in left] == list(range(1, total))
    assert ledger.store.read(lambda reads: reads.missing_parts(plan_n, total - 1, 100)) == []


def test_evidence_comes_in_pages(ledger: Driver) -> None:
    n, _ = processing(ledger)
    everything = ledger.store.read(lambda reads: reads.evidence(n))
    assert len(everything) >= 2
    assert ledger.store.read(lambda reads: reads.evidence(n, 0, 1)) == everything[:1]
    assert ledger.store.read(lambda reads: reads.evidence(n, everything[0]["sequence"])) == everything[1:]


def test_progress_clears_the_last_failure(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.write(ops.exited(n, kind="failure"))
    assert ledger.receipt("m").executor_error == "failure of 1"

    ledger.vectors(n, plan_n, [0])

    assert ledger.receipt("m").executor_error is None


def test_an_exit_of_an_older_child_does_not_lower_the_generation(ledger: Driver) -> None:
    n, plan_n = processing(ledger)
    ledger.vectors(n, plan_n, [0], generation=5)

    ledger.write(ops.exited(n, generation=2))

    assert ledger.receipt("m").executor_generation == 5


def test_an_exit_is_not_counted_before_work_can_begin_nor_after_the_end(ledger: Driver) -> None:
    n = ledger.accept(ops.memory("m"))
    nothing_happens(ledger, ops.exited(n))
    ledger.write(ops.refuse(n))
    nothing_happens(ledger, ops.exited(n))


def test_kinds_that_need_no_model_keep_zeros(ledger: Driver) -> None:
    n = ledger.accept(ops.stream("s", dependencies=["missing"]))
    ledger.apply(n)

    nothing_happens(ledger, ops.exited(n), ops.exited(n, kind="failure"))


def test_generations_are_store_wide_and_only_rise(ledger: Driver) -> None:
    reserved = [ledger.write(command.ReserveGeneration(now=NOW)) for _ in range(3)]
    ledger.write(command.Observe(kind="ready", generation=3, message=None, now=NOW))
    ledger.write(command.Observe(kind="exit", generation=2, message="signal 9", now=NOW - 5))
    reserved.append(ledger.write(command.ReserveGeneration(now=NOW)))

    assert reserved == [1, 2, 3, 4]
    assert ledger.store.read(lambda reads: reads.last_generation()) == 4
    assert ledger.evidence(0) == [
        (1, "reserved", 1),
        (2, "reserved", 2),
        (3, "reserved", 3),
        (4, "ready", 3),
        (5, "exit", 2),
        (6, "reserved", 4),
    ]


def test_a_probe_leaves_no_trace_in_the_history(ledger: Driver) -> None:
    ledger.write(ops.memory("m"))
    digest, head = ledger.store.read(lambda reads: reads.head()), ledger.head()

    ledger.transact(command.Probe(now=NOW), command.Probe(now=NOW + 1))

    assert (ledger.store.read(lambda reads: reads.head()), ledger.head()) == (digest, head)


# Refuse


@pytest.mark.parametrize("state", [A, V, B, R])
def test_an_operation_is_refused_from_every_open_state(ledger: Driver, state: State) -> None:
    n = ledger.accept(ops.memory("m", dependencies=["other"] if state is B else []))
    if state is not A:
        ledger.advance(n)
    if state is R:
        ledger.plan(n)
    assert ledger.receipt("m").state is state

    assert ledger.write(ops.refuse(n, reason="too_many_parts")).state is X

    receipt = ledger.receipt("m")
    assert ledger.walk("m")[-2:] == [V if state is A else state, X]
    assert receipt.result == {"outcome": "rejected", "reason": "too_many_parts"}
    assert receipt.error == "too_many_parts"
    assert ledger.events("m")[-1].detail == receipt.result


def test_what_has_ended_stays_as_it_ended(ledger: Driver) -> None:
    committed = ledger.remember(ops.memory("c"))
    rejected = ledger.accept(ops.stream("r"))
    ledger.write(ops.refuse(rejected))
    for n in (committed, rejected):
        plan_n = 1
        nothing_happens(
            ledger,
            ops.refuse(n, reason="again", now=NOW + 9),
            command.Advance(n=n, now=NOW + 9),
            command.Apply(n=n, now=NOW + 9),
            command.CommitMemory(n=n, now=NOW + 9),
            ops.exited(n, now=NOW + 9),
            ops.vectors(n, plan_n, [0], generation=9, now=NOW + 9),
            ops.plan(n, ops.memory("c"), generation=9, now=NOW + 9),
        )


def test_to_advance_all_is_to_advance_each(ledger: Driver) -> None:
    """In their order, with a reply each: what has ended stays, what falls takes its dependants with it."""
    other = Driver(stores.in_memory())
    for each in (ledger, other):
        each.accept(ops.memory("plain"))
        each.write(ops.refuse(each.accept(ops.memory("refused"))))
        each.accept(ops.memory("blocked", dependencies=["later"]))
        each.accept(ops.memory("falls", dependencies=["refused"]))
        each.accept(ops.memory("with it", dependencies=["falls"]))
    numbers = (5, 1, 2, 3, 4)

    together = ledger.write(command.AdvanceAll(numbers=numbers, now=NOW + 5))

    assert together == tuple(other.write(command.Advance(n=n, now=NOW + 5)) for n in numbers)
    assert ledger.head() == other.head()
    for table in ("operation", "event", "dependency"):
        assert ledger.rows(table) == other.rows(table)


def ended_before_its_dependency(ledger: Driver) -> tuple[Any, Any]:
    """The receipt of an operation as it was rejected, and after another dependency of it is committed."""
    n = ledger.accept(ops.memory("m", dependencies=["refused", "later", "later"]))
    never = ledger.accept(ops.memory("given up", dependencies=["later"]))
    ledger.advance(n)
    ledger.write(ops.refuse(ledger.accept(ops.memory("refused")), now=NOW + 10))
    ledger.write(ops.refuse(never, now=NOW + 10))
    ended = [ledger.receipt(each) for each in ("m", "given up")]
    assert {receipt.state for receipt in ended} == {X}
    ledger.remember(ops.memory("later"), now=NOW + 20)
    return ended, [ledger.receipt(each) for each in ("m", "given up")]


def test_the_receipt_of_what_has_ended_never_changes(ledger: Driver) -> None:
    """Not even when what it had waited for is committed later: what has ended waits for nothing."""
    ended, later = ended_before_its_dependency(ledger)

    assert later == ended
    assert later[0].blocked_by == ("later", "refused")
    assert [row["met"] for row in ledger.rows("dependency")] == [0, 0, 0, 0]


def test_control_a_commit_that_touches_what_has_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TERMINAL", frozenset())

    ended, later = ended_before_its_dependency(Driver(stores.in_memory()))

    assert later != ended
    assert later[0].blocked_by == ("refused",)


# Times


def test_times_of_an_operation_never_fall_whatever_the_clock_does(ledger: Driver) -> None:
    waits = ledger.accept(ops.memory("waits", dependencies=["m"], now=NOW + 100))
    ledger.advance(waits, NOW + 90)
    n = ledger.accept(ops.memory("m", now=NOW + 50))
    ledger.advance(n, NOW + 40)
    plan_n = ledger.plan(n, parts=2, now=NOW - 10**9)
    ledger.vectors(n, plan_n, [0], now=NOW + 60)
    ledger.write(ops.exited(n, now=NOW))
    ledger.vectors(n, plan_n, [1], generation=2, now=0)
    ledger.commit(n, NOW + 55)
    ledger.finish(waits, now=NOW)

    assert ledger.receipt("m").updated_at == rfc3339(NOW + 60)
    assert [event.occurred_at for event in ledger.events("m")] == [
        rfc3339(NOW + each) for each in (50, 50, 50, 50, 60, 60)
    ]
    # A commit touches those who wait for it, and must not turn their time back.
    assert {event.occurred_at for event in ledger.events("waits")} == {rfc3339(NOW + 100)}
    assert ledger.receipt("waits").updated_at == rfc3339(NOW + 100)
    for table in ("event", "evidence"):
        for number in (waits, n):
            times = [row["occurred_us"] for row in ledger.rows(table) if row["operation_n"] == number]
            assert times == sorted(times)


# Reads


def page_after(after: int, state: str | None, kind: str | None) -> Callable[[Reads], list[dict[str, Any]]]:
    return lambda reads: reads.operations(ACCOUNT, state=state, kind=kind, after=after, limit=2)


def test_operations_are_paged_in_order_of_acceptance_under_any_filter(ledger: Driver) -> None:
    for each in range(9):
        n = ledger.accept(ops.memory(f"m{each}") if each % 3 else ops.stream(f"s{each}", str(each)))
        if each % 4 == 1:
            ledger.write(ops.refuse(n))
        if each % 3 == 0:
            ledger.apply(n)
        elif each % 4 == 2:
            ledger.advance(n)
    everything = ledger.rows("operation")
    filters: list[tuple[str | None, str | None]] = [
        (state, kind) for state in (None, *State) for kind in (None, *Kind)
    ]

    seen: list[dict[str, Any]] = []
    for state, kind in filters:
        found: list[dict[str, Any]] = []
        while page := ledger.store.read(page_after(found[-1]["n"] if found else 0, state, kind)):
            assert len(page) <= 2
            found += page
        assert found == [
            row for row in everything if state in (None, row["state"]) and kind in (None, row["kind"])
        ]
        seen += found
    assert {row["state"] for row in seen} == {A, V, C, X}
    assert ledger.store.read(lambda r: r.operations(2, state=None, kind=None, after=0, limit=9)) == []


def test_unfinished_operations_are_in_id_order_by_bytes(ledger: Driver) -> None:
    ids = ["b", "a", "\U0001f600", "\uffff", "é", "Z", "ended"]
    for each in ids:
        ledger.accept(ops.memory(each))
    ledger.write(ops.refuse(7))
    ledger.advance(2)

    found = ledger.store.read(lambda reads: [row["id"] for row in reads.unfinished()])

    assert found == ["Z", "a", "b", "é", "\uffff", "\U0001f600"]


def test_every_finder_finds_its_row_and_nothing_else(ledger: Driver) -> None:
    ledger.remember(ops.memory("m"), parts=2)
    ledger.remember(ops.memory("m2"))
    ledger.apply(ledger.accept(ops.stream("s", "chores", user_id="ann")))
    ledger.apply(ledger.accept(ops.stream("s2", "chores")))
    ledger.apply(ledger.accept(ops.step("a")))
    rows = {table: ledger.rows(table) for table in ("account", "model", "operation", "plan", "memory")}
    stream, second = ledger.rows("stream")
    [step_row] = ledger.rows("step")
    key = identity.object_key("memory", "local", "m2")

    def found(query: Callable[[Any], Any]) -> Any:
        return ledger.store.read(query)

    assert found(lambda r: r.find_account("local")) == rows["account"][0]
    assert found(lambda r: (r.find_account("x"), r.account(2), r.account(1))) == (
        None,
        None,
        rows["account"][0],
    )
    assert (
        found(lambda r: r.model(1))
        == found(lambda r: r.find_model(model_digest(ops.MODEL)))
        == rows["model"][0]
    )
    assert found(lambda r: (r.model(2), r.find_model("x"))) == (None, None)
    assert (
        found(lambda r: r.operation(2)) == found(lambda r: r.find_operation(1, "m2")) == rows["operation"][1]
    )
    assert (
        found(lambda r: (r.operation(99), r.find_operation(1, "M2"), r.find_operation(2, "m2")))
        == (None,) * 3
    )
    assert found(lambda r: r.active_plan(2)) == rows["plan"][1]
    assert found(lambda r: r.active_plan(3)) is None
    assert found(lambda r: [part["part_index"] for part in r.parts(1)]) == [0, 1]
    assert found(lambda r: r.part(1, 1)) == ledger.rows("part")[1]
    assert found(lambda r: r.part(1, 2)) is None
    assert found(lambda r: r.vectors(2)) == [row for row in ledger.rows("vector") if row["plan_n"] == 2]
    assert found(lambda r: r.find_memory(key)) == found(lambda r: r.memory(2)) == rows["memory"][1]
    assert found(lambda r: (r.find_memory("x"), r.memory(3))) == (None, None)
    assert found(lambda r: r.memories(0, 1)) == rows["memory"][:1]
    assert found(lambda r: r.memories(1, 9)) == rows["memory"][1:]
    assert found(lambda r: r.streams(1, "chores")) == [stream, second]
    assert found(lambda r: (r.streams(1, "Chores"), r.streams(2, "chores"))) == ([], [])
    assert found(lambda r: r.stream(stream["object_n"])) == stream
    assert found(lambda r: r.stream(1)) is None
    assert (
        found(lambda r: r.steps(second["object_n"])) == found(lambda r: r.find_steps(1, "wash")) == [step_row]
    )
    assert (
        found(lambda r: (r.steps(stream["object_n"]), r.find_steps(2, "wash"), r.find_steps(1, "w")))
        == ([],) * 3
    )
    assert found(lambda r: r.payload(1))["bytes"] == b"One sentence. Another one."
    assert found(lambda r: (r.payload(3), r.attribute(3)["bytes"])) == (
        None,
        b'{"name":"chores","user_id":"ann"}',
    )
    assert found(lambda r: r.attribute(99)) is None
    assert found(lambda r: [row["sequence"] for row in r.events(1, 2, 3)]) == [3, 4, 5]
    assert found(lambda r: r.events(1, 2**63 - 1, 3)) == []
    assert found(lambda r: r.last_evidence(1)["kind"]) == "completion"
    assert found(lambda r: (r.last_evidence(3), r.last_generation())) == (None, 0)


def test_dependants_are_those_who_are_blocked_on_an_open_id(ledger: Driver) -> None:
    for each, on in {"a": ["x"], "b": ["y", "x"], "c": ["y"], "d": ["x"]}.items():
        ledger.accept(ops.memory(each, dependencies=on))
    ledger.advance(1)
    ledger.advance(2)

    def found(name: str, account: int = ACCOUNT) -> tuple[list[int], bool]:
        return ledger.store.read(
            lambda reads: (reads.unsettled_dependents(account, name), reads.has_dependents(account, name))
        )

    assert found("x") == ([1, 2], True)
    assert found("y") == ([2], True)
    assert found("z") == ([], False)
    assert found("x", 2) == ([], False)
    ledger.remember(ops.memory("x"))
    assert found("x") == ([], True)


def test_rows_that_were_read_are_the_readers_own(ledger: Driver) -> None:
    ledger.write(ops.memory("m"))

    ledger.operation("m")["state"] = "committed"
    ledger.rows("operation")[0]["state"] = "committed"

    assert ledger.receipt("m").state is A


def test_units_are_paged_by_position(ledger: Driver) -> None:
    ledger.remember(ops.memory("m"))

    rows = ledger.store.read(lambda reads: reads.units(0, 99))

    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    assert ledger.store.read(lambda reads: reads.units(2, 3)) == rows[2:5]
    assert ledger.store.read(lambda reads: reads.units(len(rows), 3)) == []


# The two backends


def test_both_backends_write_the_same_journal(tmp_path: Any) -> None:
    def history(ledger: Driver) -> tuple[tuple[int, bytes], str]:
        ledger.remember(ops.memory("m", user_id="ann"), parts=3)
        ledger.apply(ledger.accept(ops.stream("s")))
        ledger.apply(ledger.accept(ops.step("a", dependencies=["m"])))
        ledger.apply(ledger.accept(ops.complete("c", dependencies=["a", "b"])))
        ledger.write(ops.refuse(ledger.accept(ops.memory("b"))))
        ledger.write(command.ReserveGeneration(now=NOW))
        return ledger.store.read(lambda reads: (reads.head(), stores.state_digest(reads)))

    opened = stores.sqlite(tmp_path / "data")
    mine, theirs = history(Driver(stores.in_memory())), history(Driver(opened))
    opened.close()

    assert mine == theirs
    assert stores.checked(tmp_path / "data").state_digest == mine[1]
