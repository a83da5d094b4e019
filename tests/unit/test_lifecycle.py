"""R17: the lifecycle is total. Each of 9 states x 12 facts has one answer, here and wherever it is repeated.

``complaints`` judges a table by calling ``step`` with it: against the matrix below, pair by pair, and against
rules that hold whatever the matrix says. The controls give it tables with one thing wrong.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.adapters.sqlite import queries
from muniment.core import lifecycle
from muniment.core.lifecycle import TRANSITIONS, Fact, IllegalTransition, Transition, step, walk
from muniment.errors import InvariantBroken
from muniment.model.operation import TERMINAL, State

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "lifecycle.md"
PROGRAM: Final = ROOT / "scripts" / "lifecycle-page"
SEED: Final = ROOT / "tests" / "contract" / "seed" / "durable-operations-1.8.0.openapi.json"
OURS: Final = ROOT / "src" / "muniment" / "interfaces" / "http" / "openapi.json"
SCHEMA: Final = Path(queries.__file__).with_name("schema.sql")

Table = Mapping[tuple[State | None, Fact], State]
Pair = tuple[State | None, Fact]
STATES: Final[tuple[State | None, ...]] = (None, *State)
PAIRS: Final[tuple[Pair, ...]] = tuple((state, fact) for state in STATES for fact in Fact)
LOST: Final = (Fact.EXECUTOR_EXITED, Fact.EXECUTOR_STALLED)

# Written by hand from the contract, not made from the code. A dot is IllegalTransition, "=" leaves the state.
EXACT: Final = """
                    none     accepted  validated blocked  planned    processing indexed   committed rejected
submitted           accepted .         .         .        .          .          .         .         .
payload_valid       .        validated .         .        .          .          .         .         .
dependency_open     .        .         blocked   .        .          .          .         .         .
dependency_rejected .        .         rejected  rejected .          .          .         .         .
parts_planned       .        .         planned   planned  .          .          .         .         .
executor_started    .        .         .         .        processing .          .         .         .
part_indexed        .        .         .         .        .          =          .         .         .
executor_exited     .        .         =         =        =          =          .         .         .
executor_stalled    .        .         =         =        =          =          .         .         .
all_parts_indexed   .        .         .         .        .          indexed    .         .         .
effect_committed    .        .         .         .        .          .          committed .         .
refused             .        .         rejected  rejected rejected   rejected   rejected  .         .
"""


def matrix(text: str) -> dict[tuple[str, str], str]:
    """Return (state, fact) -> following state of a matrix in words; what is illegal is left out."""
    head, *rows = (line.split() for line in text.strip().splitlines())
    return {
        (state, fact): state if cell == "=" else cell
        for fact, *cells in rows
        for state, cell in zip(head, cells, strict=True)
        if cell != "."
    }


def in_words(table: Table) -> dict[tuple[str, str], str]:
    return {(str(state or "none"), str(fact)): str(following) for (state, fact), following in table.items()}


def asked(table: Table) -> dict[Pair, State]:
    """Ask ``step`` about every pair. Anything but a state or IllegalTransition goes up."""
    found = {}
    with mock.patch.object(lifecycle, "TRANSITIONS", table):
        for state, fact in PAIRS:
            with contextlib.suppress(IllegalTransition):
                found[state, fact] = step(state, fact)
    return found


def reached(moves: Table) -> set[State | None]:
    """Return every state that a history which begins with nothing can come to."""
    found: set[State | None] = {None}
    while more := {after for (before, _), after in moves.items() if before in found} - found:
        found |= more
    return found


def complaints(table: Table) -> Iterator[str]:
    """Yield what is wrong with a table."""
    moves = asked(table)
    expected, words = matrix(EXACT), in_words(moves)
    for pair in sorted(expected.keys() | words.keys()):
        if expected.get(pair) != words.get(pair):
            yield f"{pair[1]} in {pair[0]}: {words.get(pair)}, not {expected.get(pair)}"
    for (state, fact), following in moves.items():
        if state in TERMINAL:
            yield f"terminal: {state} is left by {fact}"
        if fact in LOST and following is not state:
            yield f"verdict: {fact} makes {following} of {state}"
        if following is State.BLOCKED and state not in (State.VALIDATED, State.BLOCKED):
            yield f"blocked: before it was {state}"
        if state is not None and following is State.ACCEPTED:
            yield f"accepted: again, after {state}"
    came = reached(moves)
    yield from (f"unreachable: {state}" for state in STATES if state not in came)
    for state in STATES:
        if state not in TERMINAL and not any(
            before is state is not after for (before, _), after in moves.items()
        ):
            yield f"dead end: {state}"


def changed(add: Table | None = None, leave_out: tuple[Pair, ...] = ()) -> Table:
    return {pair: after for pair, after in TRANSITIONS.items() if pair not in leave_out} | dict(add or {})


def test_every_pair_of_state_and_fact_has_one_answer() -> None:
    assert (len(STATES), len(Fact), len(PAIRS)) == (9, 12, 108)
    assert len(TRANSITIONS) == len(matrix(EXACT)) == 24
    assert list(complaints(TRANSITIONS)) == []


def test_what_is_illegal_is_a_bug_and_not_a_refusal() -> None:
    assert issubclass(IllegalTransition, InvariantBroken)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[State.COMMITTED, Fact.REFUSED] = State.REJECTED  # type: ignore[index]


# Controls: a table with one thing wrong, and what is said of it.


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (
            changed({(State.PROCESSING, Fact.EXECUTOR_EXITED): State.REJECTED}),
            "verdict: executor_exited makes rejected of processing",
        ),
        (
            changed({(State.BLOCKED, Fact.EXECUTOR_STALLED): State.COMMITTED}),
            "verdict: executor_stalled makes committed of blocked",
        ),
        (
            changed(leave_out=((State.BLOCKED, Fact.PARTS_PLANNED),)),
            "parts_planned in blocked: None, not planned",
        ),
        (changed(leave_out=((State.INDEXED, Fact.EFFECT_COMMITTED),)), "unreachable: committed"),
        (
            changed(
                leave_out=(
                    (State.BLOCKED, Fact.PARTS_PLANNED),
                    (State.BLOCKED, Fact.DEPENDENCY_REJECTED),
                    (State.BLOCKED, Fact.REFUSED),
                )
            ),
            "dead end: blocked",
        ),
        (
            changed({(State.COMMITTED, Fact.REFUSED): State.REJECTED}),
            "terminal: committed is left by refused",
        ),
        (
            changed({(State.REJECTED, Fact.PART_INDEXED): State.REJECTED}),
            "terminal: rejected is left by part_indexed",
        ),
        (
            changed({(State.ACCEPTED, Fact.DEPENDENCY_OPEN): State.BLOCKED}),
            "blocked: before it was accepted",
        ),
        (
            changed({(State.INDEXED, Fact.SUBMITTED): State.ACCEPTED}),
            "accepted: again, after indexed",
        ),
        (
            changed({(State.VALIDATED, Fact.ALL_PARTS_INDEXED): State.INDEXED}),
            "all_parts_indexed in validated: indexed, not None",
        ),
    ],
)
def test_control_a_wrong_table_is_noticed(table: Table, complaint: str) -> None:
    assert table != TRANSITIONS
    assert complaint in list(complaints(table))


@pytest.mark.parametrize("pair", sorted(TRANSITIONS, key=str))
def test_control_each_missing_transition_is_noticed(pair: Pair) -> None:
    assert list(complaints(changed(leave_out=(pair,)))) != []


# The places that repeat the table


def sql_lists(schema: str) -> list[set[str]]:
    """Return the sets of states that the schema compares the column ``state`` with."""
    found = re.findall(r"\bstate IN \(([^()]*)\)", schema)
    return [set(re.findall(r"'(\w+)'", each)) for each in found]


def states_of(table: Table) -> set[str]:
    return {str(after) for after in table.values()}


def open_states(table: Table) -> set[str]:
    """Return the states that some fact leads out of."""
    return {str(before) for (before, _), after in table.items() if before is not None and before is not after}


def test_the_database_knows_the_states_of_the_table() -> None:
    check, unfinished = sql_lists(SCHEMA.read_text("utf-8"))

    assert check == states_of(TRANSITIONS)
    assert unfinished == open_states(TRANSITIONS)


@pytest.mark.parametrize("document", [SEED, OURS], ids=["seed", "ours"])
def test_the_published_contract_knows_the_states_of_the_table_in_its_order(document: Path) -> None:
    enum: list[Any] = json.loads(document.read_bytes())["components"]["schemas"]["OperationState"]["enum"]

    assert enum == [str(state) for state in State]
    assert set(enum) == states_of(TRANSITIONS)


def on_page(page: str) -> dict[tuple[str, str], str]:
    """Read the table of the page, apart from the program that makes it."""
    rows = [
        [cell.strip(" `*") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"
    ]
    head, _, *rest = rows
    states = ["none" if state == "none yet" else state for state in head[1:]]
    return {
        (state, fact): state if cell == "stays" else cell
        for fact, *cells in rest
        for state, cell in zip(states, cells, strict=True)
        if cell != "-"
    }


def drawn(page: str) -> set[tuple[str, str, str]]:
    """Read the arrows of the drawing as (state, fact, following state)."""
    arrows = re.findall(r"^  (\S+) --> (\w+): (.*)$", page, re.MULTILINE)
    return {
        ("none" if before == "[*]" else before, fact, after)
        for before, after, facts in arrows
        for fact in facts.split(", ")
    }


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text("utf-8")

    assert on_page(page) == in_words(TRANSITIONS)
    assert drawn(page) == {
        (before, fact, after) for (before, fact), after in in_words(TRANSITIONS).items() if before != after
    }
    assert set(re.findall(r"^  (\w+) --> \[\*\]$", page, re.MULTILINE)) == {str(state) for state in TERMINAL}


def test_the_page_is_what_its_program_prints() -> None:
    printed = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True).stdout

    assert PAGE.read_text("utf-8") == printed


def test_control_a_changed_copy_is_noticed() -> None:
    page, schema = PAGE.read_text("utf-8"), SCHEMA.read_text("utf-8")
    assert "| `processing` | - |" in page
    assert "'blocked', " in schema

    assert on_page(page.replace("| `processing` | - |", "| `indexed` | - |")) != in_words(TRANSITIONS)
    assert drawn(page.replace("planned --> processing", "planned --> indexed")) != drawn(page)
    assert sql_lists(schema.replace("'blocked', ", "", 1))[0] != states_of(TRANSITIONS)


# walk


UNDISTURBED: Final = (
    Fact.SUBMITTED,
    Fact.PAYLOAD_VALID,
    Fact.PARTS_PLANNED,
    Fact.EXECUTOR_STARTED,
    Fact.ALL_PARTS_INDEXED,
    Fact.EFFECT_COMMITTED,
)


def test_an_undisturbed_walk_has_six_events_and_seven_with_a_block() -> None:
    blocked = (*UNDISTURBED[:2], Fact.DEPENDENCY_OPEN, *UNDISTURBED[2:])

    assert [each.to_state for each in walk(None, 0, UNDISTURBED)] == [
        state for state in State if state not in (State.BLOCKED, State.REJECTED)
    ]
    assert walk(None, 0, blocked)[-1] == Transition(7, State.INDEXED, State.COMMITTED)


def test_facts_that_leave_the_state_make_no_event_and_take_no_number() -> None:
    facts = (
        Fact.PART_INDEXED,
        Fact.EXECUTOR_EXITED,
        Fact.EXECUTOR_STALLED,
        Fact.ALL_PARTS_INDEXED,
        Fact.REFUSED,
    )

    assert walk(State.PROCESSING, 4, facts) == (
        Transition(5, State.PROCESSING, State.INDEXED),
        Transition(6, State.INDEXED, State.REJECTED),
    )
    assert walk(State.PROCESSING, 4, facts[:3]) == ()


def test_a_walk_stops_at_the_first_illegal_fact() -> None:
    with pytest.raises(IllegalTransition, match="refused is not possible in state committed"):
        walk(State.INDEXED, 5, (Fact.EFFECT_COMMITTED, Fact.REFUSED))


@given(st.data())
def test_walks_in_pieces_are_one_walk_without_a_gap(data: st.DataObject) -> None:
    facts: list[Fact] = []
    state: State | None = None
    for _ in range(data.draw(st.integers(0, 12))):
        possible = [fact for fact in Fact if (state, fact) in TRANSITIONS]
        if not possible:
            break
        facts.append(data.draw(st.sampled_from(possible)))
        state = step(state, facts[-1])
    cut = data.draw(st.integers(0, len(facts)))

    whole = walk(None, 0, facts)
    head = walk(None, 0, facts[:cut])
    before, sequence = (head[-1].to_state, head[-1].sequence) if head else (None, 0)

    assert head + walk(before, sequence, facts[cut:]) == whole
    assert [each.sequence for each in whole] == list(range(1, len(whole) + 1))
    assert [each.from_state for each in whole] == [None, *(each.to_state for each in whole)][: len(whole)]
    assert all(each.from_state is not each.to_state for each in whole)
    assert (whole[-1].to_state if whole else None) is state
