"""``bench.quality`` on two small sets of our own, through a real server with the bundled model."""

import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from bench.quality_data import HAYSTACKS_FILE, LOCOMO_FILE, SESSIONS_FILE
from bench.quality_report import Run
from tests.support.live import ROOT

SAID: Final = (
    "The lighthouse keeper repairs old clocks in the winter.",
    "My sister moved to Lisbon because of the trams.",
    "We planted three plum trees behind the school.",
    "The bakery on the corner closes at four on Sundays.",
    "I am learning to play the accordion from my neighbour.",
    "The ferry to the island was cancelled by the storm.",
    "Our cat sleeps in the drawer with the tablecloths.",
    "He keeps his stamps in a tin that once held biscuits.",
)
ASKED: Final = (("Where did the sister move?", 1, 4), ("When does the bakery close?", 3, 1), ("Fruit?", 2, 2))


def locomo_set(directory: Path) -> None:
    directory.mkdir(parents=True)
    turns = [{"speaker": "Ana", "dia_id": f"D1:{n}", "text": text} for n, text in enumerate(SAID)]
    sample = {
        "sample_id": "one",
        "conversation": {"session_1_date_time": "1:56 pm on 8 May, 2023", "session_1": turns},
        "qa": [{"question": text, "evidence": [f"D1:{n}"], "category": kind} for text, n, kind in ASKED],
    }
    with gzip.open(directory / LOCOMO_FILE, "wt") as file:
        json.dump([sample], file)


def longmemeval_set(directory: Path) -> None:
    directory.mkdir(parents=True)
    sessions = [{"session_id": f"s{n}", "user_turns": [[0, text]]} for n, text in enumerate(SAID)]
    haystacks = [
        {
            "question_id": f"q{place}",
            "question_type": "single-session-user",
            "question": text,
            "haystack_session_ids": [each["session_id"] for each in sessions],
            "haystack_dates": [f"2023/05/{1 + number:02d} (Mon) 10:15" for number in range(len(SAID))],
            "answer_turns": {f"s{n}": [0]},
        }
        for place, (text, n, _) in enumerate(ASKED[:2])
    ]
    _write_lines(directory / SESSIONS_FILE, sessions)
    _write_lines(directory / HAYSTACKS_FILE, haystacks)


def _write_lines(path: Path, records: Iterable[Any]) -> None:
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def quality(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.quality", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_both_sets_go_through_a_server_and_are_reported(tmp_path: Path) -> None:
    locomo_set(tmp_path / "data" / "locomo")
    longmemeval_set(tmp_path / "data" / "longmemeval")
    result = tmp_path / "result" / "found.json"

    done = quality("--data", str(tmp_path / "data"), "--part-tokens", "64", "--json", str(result))

    assert done.returncode == 0, done.stderr
    runs = msgspec.json.decode(result.read_bytes(), type=list[Run])
    assert [run.set_name for run in runs] == ["locomo", "longmemeval"]
    for run, questions in zip(runs, (3, 2), strict=True):
        drawn, latest, ours = run.ranked
        assert {len(each.answered) for each in (drawn, latest, ours)} == {questions}
        assert [answer.measures.at_5 for answer in ours.answered] == [1.0] * questions
        assert sum(answer.measures.at_5 for answer in latest.answered) < questions
        assert ours.cost is not None
        assert ours.cost.memories == ours.cost.parts == len(SAID) * (1 if questions == 3 else 2)
        assert f"{questions} questions" in done.stdout
        assert run.load is not None
    shown = quality("--show", str(result))
    assert shown.stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"), [((), LOCOMO_FILE), (("--set", "longmemeval"), SESSIONS_FILE)]
)
def test_a_directory_without_the_sets_is_refused_by_name(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    locomo_set(tmp_path / "elsewhere")
    done = quality("--data", str(tmp_path), *arguments)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
