"""The two public sets as scopes of turns with questions, from files that are no part of this repository.

A scope is what one question may see: a conversation of LoCoMo, or the haystack of one question of
LongMemEval. bench/README.md tells where the files come from.
"""

import gzip
import json
import lzma
import random
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

SetName = Literal["locomo", "longmemeval"]

LOCOMO_FILE: Final = "locomo5_dev.json.gz"
HAYSTACKS_FILE: Final = "s_haystacks_dev.jsonl.xz"
SESSIONS_FILE: Final = "s_user_sessions.jsonl.xz"
FILES: Final[dict[SetName, tuple[str, ...]]] = {
    "locomo": (LOCOMO_FILE,),
    "longmemeval": (HAYSTACKS_FILE, SESSIONS_FILE),
}
MULTI_HOP: Final = "multi-hop"
CATEGORIES: Final = {1: MULTI_HOP, 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
EVIDENCE: Final = re.compile(r"D:?(\d+):(\d+)")
"""Where a turn is cited: also inside `D8:6; D9:17`, `D:11:26` and `D30:05`, as some citations are written."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, which becomes one memory. ``name`` is unique in its scope."""

    name: str
    text: str
    session: str
    place: int
    occurred_at: str
    speaker: str | None = None
    role: str | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question and the turns in which its answer stands."""

    name: str
    category: str
    text: str
    evidence: frozenset[str]


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What the questions may see, in the order in which it was said."""

    name: str
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]


def directory(data: Path, set_name: SetName) -> Path | None:
    """Where all files of a set are: ``data`` or its directory of that name; None where in neither."""
    for at in (data, data / set_name):
        if all((at / name).is_file() for name in FILES[set_name]):
            return at
    return None


def locomo(data: Path, conversations: Sequence[str] = ()) -> tuple[Scope, ...]:
    """The conversations in the order of the file; all where none are named."""
    with gzip.open(data / LOCOMO_FILE) as file:
        samples = {str(sample["sample_id"]): sample for sample in json.load(file)}
    unknown = set(conversations) - samples.keys()
    if unknown:
        raise SystemExit(f"no conversation {', '.join(sorted(unknown))}: there are {', '.join(samples)}")
    return tuple(
        _conversation(samples[name]) for name in samples if not conversations or name in conversations
    )


def _conversation(sample: dict[str, Any]) -> Scope:
    name = str(sample["sample_id"])
    turns = tuple(_locomo_turns(sample["conversation"]))
    known = {turn.name for turn in turns}
    questions = (
        Question(
            name=f"{name}/{number}",
            category=CATEGORIES[asked["category"]],
            text=asked["question"],
            evidence=cited(asked.get("evidence", ())) & known,
        )
        for number, asked in enumerate(sample["qa"])
    )
    return Scope(name=name, turns=turns, questions=tuple(each for each in questions if each.evidence))


def _locomo_turns(conversation: dict[str, Any]) -> Iterator[Turn]:
    number = 0
    while (session := f"session_{(number := number + 1)}") + "_date_time" in conversation:
        began = datetime.strptime(conversation[session + "_date_time"], "%I:%M %p on %d %B, %Y")  # noqa: DTZ007
        for place, turn in enumerate(conversation.get(session) or ()):
            photo = f" [shares a photo: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            yield Turn(
                name=turn["dia_id"],
                text=f"{turn['speaker']}: {turn['text']}{photo}",
                session=session,
                place=place,
                occurred_at=f"{began.isoformat()}Z",
                speaker=turn["speaker"],
            )


def cited(evidence: Sequence[str]) -> frozenset[str]:
    """The turns that the annotation names, however it writes them."""
    places = (place for text in evidence for place in EVIDENCE.findall(text))
    return frozenset(f"D{int(session)}:{int(turn)}" for session, turn in places)


def longmemeval(data: Path, questions: int, seed: int) -> tuple[Scope, ...]:
    """So many questions of LongMemEval-S with their haystacks; a larger sample holds every smaller one.

    The turns are those of the user, as in the retrieval protocol of its paper. Questions that are to be
    answered with "not known", and those without evidence in a turn of the user, are left out first.
    """
    with lzma.open(data / HAYSTACKS_FILE, "rt", encoding="utf-8") as file:
        haystacks = [json.loads(line) for line in file]
    eligible = [each for each in haystacks if not each["question_id"].endswith("_abs")]
    with lzma.open(data / SESSIONS_FILE, "rt", encoding="utf-8") as file:
        said = {record["session_id"]: record["user_turns"] for record in map(json.loads, file)}
    scopes = [scope for scope in (_haystack(each, said) for each in eligible) if scope.questions[0].evidence]
    random.Random(seed).shuffle(scopes)
    return tuple(scopes[:questions])


def _haystack(asked: dict[str, Any], said: dict[str, list[tuple[int, str]]]) -> Scope:
    # Some haystacks hold a session twice: it counts where it stands first.
    dates: dict[str, str] = {}
    for session, date in zip(asked["haystack_session_ids"], asked["haystack_dates"], strict=True):
        dates.setdefault(session, _instant(date))
    turns = tuple(
        Turn(name=f"{session}#{place}", text=text, session=session, place=place, occurred_at=at, role="user")
        for session, at in sorted(dates.items(), key=lambda each: each[1])
        for place, text in said[session]
    )
    answers = {f"{session}#{place}" for session, places in asked["answer_turns"].items() for place in places}
    question = Question(
        name=asked["question_id"],
        category=asked["question_type"],
        text=asked["question"],
        evidence=frozenset(turn.name for turn in turns if turn.name in answers),
    )
    return Scope(name=question.name, turns=turns, questions=(question,))


def _instant(date: str) -> str:
    """``2023/04/10 (Mon) 10:15`` as RFC 3339; the set names no zone."""
    return f"{datetime.strptime(date, '%Y/%m/%d (%a) %H:%M').isoformat()}Z"  # noqa: DTZ007
