"""The canonical bytes of journal units are pinned: what is written once is read for ever (ADR 0005)."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from muniment.core import replay
from muniment.model import journal
from muniment.model.operation import Kind, State

AT: Final = journal.At(State.PROCESSING, 4)
WORKED: Final = journal.Snapshot(2, 5, 1, "signal 9 (SIGKILL)", None)
STEP: Final[dict[str, Any]] = {"at": 1_700_000_000_000_005, "n": 7, "was": AT, "executor": WORKED}
MOVED: Final = (
    journal.Moved(5, State.PROCESSING, State.INDEXED, None),
    journal.Moved(6, State.INDEXED, State.COMMITTED, {"outcome": "committed"}),
)
ENDED: Final[dict[str, Any]] = {**STEP, "to": journal.At(State.COMMITTED, 6), "events": MOVED, "account": 1}
UNITS: Final[list[journal.AnyUnit]] = [
    journal.Genesis(at=-1, lineage="5eed" * 8),
    journal.Account(at=0, n=1, key="local"),
    journal.Model(at=1, n=1, digest="d1", identity={"name": "modèle", "files": {"b": "2", "a": "1"}}),
    journal.Executor(at=2, witness=journal.Witness(1, "reserved", 1, None)),
    journal.Accept(
        at=3,
        n=7,
        account=1,
        id='a/b "é" \\ \x00\x1f\x7f\u2028\U0001f600',
        kind=Kind.ADD_MEMORY,
        payload_hash="a1",
        dependencies=(("z", True), ("y", False)),
        object=8,
        content=journal.Held(5, "b1"),
        attributes=journal.Held(2, "c1"),
        to=journal.At(State.ACCEPTED, 1),
    ),
    journal.Accept(
        at=3,
        n=9,
        account=1,
        id="s",
        kind=Kind.CREATE_TASK_STREAM,
        payload_hash="a1",
        dependencies=(),
        object=9,
        content=None,
        attributes=journal.Held(2, "c1"),
        to=journal.At(State.ACCEPTED, 1),
    ),
    journal.Advance(**STEP, to=AT, events=(journal.Moved(2, None, State.VALIDATED, {"blocked_by": ["z"]}),)),
    journal.Reject(**STEP, to=AT, error="no", result={"share": 1e16, "small": 0.1, "none": None}),
    journal.Plan(
        **STEP,
        to=AT,
        evidence=(journal.Witness(5, "start", 2, None),),
        plan=3,
        object=8,
        model=1,
        profile="sentences-64-1",
        token_count=2,
        parts=(journal.Part(0, 2, 0, 5, "e1"),),
    ),
    journal.Parts(**STEP, to=AT, plan=3, vectors=((0, "f1"),)),
    journal.Evidence(**STEP, to=AT, evidence=(journal.Witness(5, "stall", 2, "no progress"),)),
    journal.Commit(
        **ENDED,
        id="m",
        result={"id": "memory:a"},
        memory=journal.Memory(
            object=8,
            key="memory:a",
            plan=3,
            space=None,
            visibility="private",
            submitter=None,
            role="user",
            session_seq=4,
            occurred_at=-62_135_596_800_000_000,
            expires_at=None,
        ),
    ),
    journal.Commit(
        **ENDED, id="s", result={}, stream=journal.Stream(object=8, key="stream:a", status="active")
    ),
    journal.Commit(
        **ENDED,
        id="t",
        result=[True, 2],
        step=journal.TaskStep(object=8, key="step:a", stream=2, ordinal=1, status="pending"),
    ),
    journal.Commit(**ENDED, id="c", result=None, completion=journal.Completion(step=8, by=9)),
]

# Text of each unit and SHA-256 of its UTF-8 bytes. A change there needs another version of the vocabulary.
PINNED: Final = [
    (each["bytes"].encode(), each["sha256"])
    for each in json.loads((Path(__file__).parent / "data" / "journal-units.json").read_text("utf-8"))
]
CHAIN: Final = "4da9e7333de4a9d221e4db352866d9b5ea04a1b3fd2fd152c3807f2642790522"
"""The link after all of them."""


def test_every_kind_of_unit_is_pinned() -> None:
    assert {type(unit) for unit in UNITS} == set(get_args(journal.AnyUnit))
    assert len(UNITS) == len(PINNED)


def test_the_bytes_and_the_digest_of_a_unit_never_change() -> None:
    for unit, (data, digest) in zip(UNITS, PINNED, strict=True):
        assert replay.encode(unit) == data
        assert replay.digest(data).hex() == hashlib.sha256(data).hexdigest() == digest


def test_what_was_written_is_read_again() -> None:
    for unit, (data, _) in zip(UNITS, PINNED, strict=True):
        found = replay.decode(data)
        assert found == unit
        assert type(found) is type(unit)


def test_the_chain_over_all_of_them_never_changes() -> None:
    chain = bytes(32)
    for data, _ in PINNED:
        chain = replay.link(chain, replay.digest(data))

    assert chain.hex() == CHAIN


@pytest.mark.parametrize("order", [None, "sorted"])
def test_control_another_encoder_is_noticed(order: Any) -> None:
    """One that keeps the order of the fields, and one that writes a large number without its sign."""
    other = msgspec.json.Encoder(order=order)

    assert [other.encode(unit) for unit in UNITS] != [data for data, _ in PINNED]
