"""What ``bench.quality`` makes of rankings, worked out by hand; and how it reads the public sets' formats."""

import gzip
import json
import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.quality_data import Question, Scope, Turn, cited, locomo, longmemeval
from bench.quality_measures import RESAMPLES, fitting, found_share, interval, measures, resamples
from bench.quality_recall import by_rule

NAMES = [f"t{number}" for number in range(60)]
SMALL = dict.fromkeys(NAMES, 10)
ONE_EACH = {name: f"session of {name}" for name in NAMES}


def sessions_of_four() -> dict[str, str]:
    return {name: f"s{number // 4}" for number, name in enumerate(NAMES)}


# One ranking


@pytest.mark.parametrize(
    ("place", "at_5", "at_10", "at_50"),
    [(0, 1, 1, 1), (4, 1, 1, 1), (5, 0, 1, 1), (9, 0, 1, 1), (10, 0, 0, 1), (49, 0, 0, 1), (50, 0, 0, 0)],
)
def test_a_place_counts_up_to_its_limit_and_not_beyond(
    place: int, at_5: float, at_10: float, at_50: float
) -> None:
    found = measures(NAMES, {NAMES[place]}, SMALL, ONE_EACH)
    assert (found.at_5, found.at_10, found.at_50) == (at_5, at_10, at_50)


def test_the_share_is_of_all_evidence_also_of_what_never_came() -> None:
    found = measures(["t3", "t1", "t0"], {"t1", "t7", "t8", "t9"}, SMALL, ONE_EACH)
    assert (found.at_5, found.at_50, found.in_8k, found.all_in_8k) == (0.25, 0.25, 0.25, 0.0)


@pytest.mark.parametrize("ranking", [["t0"] * 5 + ["t1"], ["nobody", "none", "x", "y", "t0", "t1"]])
def test_a_repeated_and_an_unknown_name_take_up_a_place(ranking: Sequence[str]) -> None:
    found = measures(ranking, {"t0", "t1"}, SMALL, ONE_EACH)
    assert (found.at_5, found.at_10) == (0.5, 1.0)


def test_an_empty_answer_finds_nothing() -> None:
    found = msgspec.structs.astuple(measures([], {"t0"}, SMALL, ONE_EACH))
    assert set(found) == {0.0}


def test_a_budget_is_filled_in_order_and_what_does_not_fit_is_passed_over() -> None:
    byte_counts = {"big": 60, "small": 40, "huge": 61, "tiny": 1}
    assert fitting(["big", "huge", "small", "tiny"], byte_counts, 100) == ["big", "small"]
    assert fitting(["huge", "big", "small"], byte_counts, 100) == ["huge"]
    assert fitting(["small", "small", "nobody", "big"], byte_counts, 100) == ["small", "big"]


def test_the_two_budgets_are_4096_and_8192_bytes_of_whole_texts() -> None:
    byte_counts = {"t0": 4096, "t1": 4096, "t2": 1}
    found = measures(["t0", "t1", "t2"], {"t0", "t1"}, byte_counts, ONE_EACH)
    assert (found.in_4k, found.in_8k, found.all_in_8k) == (0.5, 1.0, 1.0)
    byte_counts["t0"] = 4097
    found = measures(["t0", "t1", "t2"], {"t0", "t1"}, byte_counts, ONE_EACH)
    assert (found.in_4k, found.in_8k, found.all_in_8k) == (0.5, 0.5, 0.0)


def test_a_session_stands_where_its_first_turn_stands() -> None:
    sessions = sessions_of_four()
    first_of_each = NAMES[::4]  # t0, t4, ...: the sessions s0 to s14
    within = measures(["t1", "t2", "t3", *first_of_each], {"t17", "t37"}, SMALL, sessions)
    assert (within.sessions_any_5, within.sessions_all_10) == (1.0, 1.0)  # s4 is the 5th, s9 the 10th
    beyond = measures(["t1", "t2", "t3", *first_of_each], {"t21", "t41"}, SMALL, sessions)
    assert (beyond.sessions_any_5, beyond.sessions_all_10) == (0.0, 0.0)  # s5 is the 6th, s10 the 11th
    assert within.at_50 == 0.0  # A session is found by any of its turns.


def test_no_evidence_is_no_question() -> None:
    with pytest.raises(ZeroDivisionError):
        found_share(["t0"], set())


# The mean over questions


def test_the_interval_holds_the_mean_and_is_that_of_a_share() -> None:
    values = [1.0] * 300 + [0.0] * 100
    found = interval(values, resamples(400, 7))
    assert found.mean == 0.75
    # By the normal approximation: 1.96 times the root of 0.75 * 0.25 / 400.
    assert found.mean - found.low == pytest.approx(0.0424, abs=0.006)
    assert found.high - found.mean == pytest.approx(0.0424, abs=0.006)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    assert resamples(50, 3).shape == (RESAMPLES, 50)
    assert (resamples(50, 3) == resamples(50, 3)).all()
    assert (resamples(50, 3) != resamples(50, 4)).any()


def test_a_difference_question_by_question_is_tighter_than_two_intervals() -> None:
    dice = random.Random(1)
    ours = [float(dice.random() < 0.5) for _ in range(200)]
    theirs = [0.0 if place < 10 else value for place, value in enumerate(ours)]
    drawn = resamples(200, 7)
    paired = interval([a - b for a, b in zip(ours, theirs, strict=True)], drawn)
    alone = interval(ours, drawn)
    assert paired.high - paired.low < (alone.high - alone.low) / 2
    assert paired.low >= 0.0


# What a ranking is compared with


def test_the_latest_come_first_and_the_random_order_is_that_of_the_seed() -> None:
    turns = tuple(
        Turn(name=name, text="x" * 10, session="s", place=place, occurred_at="2026-01-01T00:00:00Z")
        for place, name in enumerate(NAMES)
    )
    questions = tuple(
        Question(name=f"q{name}", category="any", text="?", evidence=frozenset({name})) for name in NAMES
    )
    scope = Scope(name="all", turns=turns, questions=questions)
    drawn, latest = by_rule([scope], seed=1)
    at_5 = [answer.measures.at_5 for answer in latest.answered]
    assert at_5 == [0.0] * 55 + [1.0] * 5
    assert 0 < sum(answer.measures.at_10 for answer in drawn.answered) < 25  # 10 are expected.
    assert next(iter(by_rule([scope], seed=1))) == drawn
    assert next(iter(by_rule([scope], seed=2))) != drawn


# The files


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["D1:3"], {"D1:3"}),
        (["D8:6; D9:17"], {"D8:6", "D9:17"}),
        (["D:11:26", "D30:05"], {"D11:26", "D30:5"}),
        (["D", ""], set()),
    ],
)
def test_citations_are_read_however_they_are_written(written: list[str], meant: set[str]) -> None:
    assert cited(written) == meant


def asked(question: str, evidence: list[str], category: int) -> dict[str, Any]:
    return {"question": question, "evidence": evidence, "category": category}


def test_a_conversation_is_a_scope_of_turns_with_their_speakers(tmp_path: Path) -> None:
    said = [
        {"speaker": "Ana", "dia_id": "D1:1", "text": "Look!", "blip_caption": "a red boat"},
        {"speaker": "Bo", "dia_id": "D1:2", "text": "Lovely."},
    ]
    sample = {
        "sample_id": "one",
        "conversation": {
            "session_1_date_time": "1:56 pm on 8 May, 2023",
            "session_1": said,
            "session_2_date_time": "9:00 am on 1 June, 2023",  # Nothing was said then.
        },
        "qa": [asked("What colour?", ["D1:1", "D9:9"], 1), asked("Who?", ["D9:9"], 2), asked("?", [], 5)],
    }
    with gzip.open(tmp_path / "locomo5_dev.json.gz", "wt") as file:
        json.dump([sample, sample | {"sample_id": "two"}], file)
    assert [scope.name for scope in locomo(tmp_path)] == ["one", "two"]
    (scope,) = locomo(tmp_path, ["one"])
    assert [turn.text for turn in scope.turns] == ["Ana: Look! [shares a photo: a red boat]", "Bo: Lovely."]
    assert scope.turns[1] == Turn(
        name="D1:2",
        text="Bo: Lovely.",
        session="session_1",
        place=1,
        occurred_at="2023-05-08T13:56:00Z",
        speaker="Bo",
    )
    (question,) = scope.questions  # Without evidence that is there, a question cannot be measured.
    assert (question.name, question.category, *question.evidence) == ("one/0", "multi-hop", "D1:1")
    with pytest.raises(SystemExit, match="no conversation three"):
        locomo(tmp_path, ["one", "three"])


def haystack(question_id: str, answer_turns: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "question_id": question_id,
        "question_type": "multi-session",
        "question": "Where?",
        "haystack_session_ids": ["late", "early", "late"],
        "haystack_dates": ["2023/05/02 (Tue) 10:15", "2023/05/01 (Mon) 09:00", "2023/06/01 (Thu) 09:00"],
        "answer_turns": answer_turns,
    }


def test_a_haystack_is_a_scope_of_the_users_turns_in_order_of_time(tmp_path: Path) -> None:
    sessions = [
        {"session_id": "early", "user_turns": [[0, "I am in Porto."], [2, "By the sea."]]},
        {"session_id": "late", "user_turns": [[1, "It rains."]]},
    ]
    haystacks = [
        haystack("q1", {"early": [0, 1], "late": [1]}),  # Turn 1 of early is not the user's.
        haystack("q2_abs", {"early": [0]}),
        haystack("q3", {"early": [1]}),
        haystack("q4", {"early": [2]}),
    ]
    for name, records in (("s_user_sessions", sessions), ("s_haystacks_dev", haystacks)):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    scopes = {scope.name: scope for scope in longmemeval(tmp_path, 10, seed=1)}
    assert scopes.keys() == {"q1", "q4"}
    assert [turn.name for turn in scopes["q1"].turns] == ["early#0", "early#2", "late#1"]
    assert scopes["q1"].turns[2].occurred_at == "2023-05-02T10:15:00Z"
    assert scopes["q1"].questions[0].evidence == {"early#0", "late#1"}
    (first,) = longmemeval(tmp_path, 1, seed=1)
    assert next(scope.name for scope in longmemeval(tmp_path, 2, seed=1)) == first.name
