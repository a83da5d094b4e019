"""R24: any bytes at all, and every decoder gives a value that holds or a named error.

Each target (``tests.fuzz.targets``) gets 20,000 cases in a process of its own: what code makes, what was kept
in ``corpus``, and mutations of both. ``scripts/fuzz`` goes on for longer.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
import orjson
import pytest

from muniment import config
from muniment.client import sse
from muniment.client.failures import UnexpectedAnswer
from muniment.core import canonical, commitment, replay
from muniment.errors import Corrupt, ExecutorProtocolBroken
from muniment.executor import protocol
from muniment.interfaces.http import query, routes
from muniment.model import times
from muniment.stages import accept
from tests.fuzz.engine import CORPUS, SEED_BYTES_MAX, apart, campaign, corpus
from tests.fuzz.targets import TARGETS

CASES: Final = 20_000
CONTROL_CASES: Final = 20_000
# Target -> kinds of outcome at least, how the label of what is taken begins, and how often that at least.
REACHED: Final[dict[str, tuple[int, str | tuple[str, ...], int]]] = {
    "canonical-json": (20, "a value", 400),
    "canonical-value": (60, "bytes of", 4000),
    "executor-frames": (30, ("1 ", "2 ", "3 "), 4000),
    "journal-unit": (12, "a unit", 200),
    "event-stream": (12, "frames", 4000),
    "settings": (8, "settings", 200),
    "url": (30, "a route", 400),
    "body": (15, ("add_memory", "create_task_stream", "add_task_step", "complete_step"), 100),
    "vector": (14, tuple(f"{count} None" for count in range(8)), 100),
    "time": (10, "a moment", 200),
}


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_a_value_or_a_named_error(name: str) -> None:
    seed = random.randrange(2**31)

    found = apart(name, seed, cases=CASES)

    kinds, taken, least = REACHED[name]
    count = sum(times for label, times in found.labels.items() if label.startswith(taken))
    print(f"fuzz: {name}: seed {seed}, {found}; {count} taken")
    assert found.error is None, f"keep it in {CORPUS.name}/{name}.txt: {found}"
    assert found.cases == CASES
    assert len(found.labels) >= kinds, found.labels
    assert count >= least, found.labels


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_is_one_literal_a_line(name: str) -> None:
    kept = corpus(name)

    assert (CORPUS / f"{name}.txt").read_text("ascii") == "".join(f"{data!r}\n" for data in sorted(set(kept)))
    assert all(len(data) <= SEED_BYTES_MAX for data in kept)


# Controls: decoders with a planted fault, each of which must be found by the cases that pass otherwise.

Plant = Callable[[pytest.MonkeyPatch], None]


def replaces(module: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


class BuffersWhatItShouldRefuse(protocol.FrameDecoder):
    """Looks at a length when its frame is complete."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._held += data
        while len(self._held) >= max(4, 4 + int.from_bytes(self._held[:4], "big")):
            length = int.from_bytes(self._held[:4], "big")
            if not 0 < length <= self._frame_bytes_max:
                raise ExecutorProtocolBroken("too long")
            body = bytes(self._held[4 : 4 + length])
            del self._held[: 4 + length]
            yield body


class LosesASplitHeader(protocol.FrameDecoder):
    """Takes it that four bytes come at once."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        if len(self._held) + len(data) < protocol.HEADER_BYTES:
            return iter(())
        return super().feed(data)


class EndsAtLineFeeds(sse.FrameReader):
    """Knows one of the three line ends."""

    def feed(self, chunk: bytes) -> Iterator[sse.Frame]:
        return super().feed(chunk.replace(b"\r", b""))


class HoldsEverything(sse.FrameReader):
    """Has no limit."""

    def feed(self, chunk: bytes) -> Iterator[sse.Frame]:
        try:
            yield from super().feed(chunk)
        except UnexpectedAnswer:
            return


def by_key(data: bytes) -> Any:
    """Looks into the unit before it knows that it is one."""
    try:
        raw = msgspec.json.decode(data)
        if raw["v"] != 1:
            raise Corrupt("version")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt("unit") from error
    return replay_decode(data)


replay_decode, unit_encode, url_parameters = replay.decode, replay.encode, query.parameters
read_submission, read_time = accept.read, times.parse_rfc3339


def lenient(raw: bytes, where: str) -> str:
    return unquote_to_bytes(raw).decode("utf-8", "replace")


def last_one_wins(query_string: bytes, allowed: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in query_string.split(b"&"):
        found |= url_parameters(pair, allowed)
    return found


def hash_unread(body: bytes) -> Any:
    sent = json.loads(body) if body.startswith(b'{"operation_id"') else {}
    if isinstance(sent, dict) and isinstance(sent.get("payload"), dict):
        sent["payload_hash"] = canonical.payload_hash(sent["payload"])
        return read_submission(json.dumps(sent).encode())
    return read_submission(body)


def known_settings(path: Any) -> Any:
    import tomllib

    return tomllib.loads(path.read_text("utf-8"))


def forgets_the_offset(text: str) -> int:
    read_time(text)
    return read_time(text[:19] + "Z")


CONTROLS: Final[dict[str, tuple[str, Plant, str]]] = {
    "takes a key twice": (
        "canonical-json",
        replaces(canonical, "_SECOND_READER", json.JSONDecoder(parse_int=canonical._refuse_long_integer)),
        "a key that occurs twice was accepted",
    ),
    "makes a long integer a float": (
        "canonical-json",
        replaces(
            canonical, "_SECOND_READER", json.JSONDecoder(object_pairs_hook=canonical._refuse_duplicates)
        ),
        "a second reader reads another value",
    ),
    "leaves keys as they come": (
        "canonical-json",
        replaces(canonical, "_OPTIONS", canonical._OPTIONS & ~orjson.OPT_SORT_KEYS),
        "the canonical bytes are not those of the rule",
    ),
    "writes infinity as null": (
        "canonical-value",
        replaces(canonical, "_holds_not_finite", lambda value: False),
        "written, and no reader would understand it",
    ),
    "nests without end": (
        "canonical-value",
        replaces(canonical, "_nests_deeper", lambda raw, depth_max: False),
        "written, and no reader would understand it",
    ),
    "buffers what it should refuse": (
        "executor-frames",
        replaces(protocol, "FrameDecoder", BuffersWhatItShouldRefuse),
        "a length that is too long was taken",
    ),
    "loses a split header": (
        "executor-frames",
        replaces(protocol, "FrameDecoder", LosesASplitHeader),
        "AssertionError",
    ),
    "lets the library's error out": (
        "executor-frames",
        replaces(protocol, "read_to_parent", protocol._to_parent.decode),
        "ValidationError",
    ),
    "raises KeyError": ("journal-unit", replaces(replay, "decode", by_key), "KeyError"),
    "forgets a field of a unit": (
        "journal-unit",
        replaces(replay, "encode", lambda unit: unit_encode(msgspec.structs.replace(unit, at=unit.at + 1))),
        "decode(encode(u)) is not u",
    ),
    "knows one line end": (
        "event-stream",
        replaces(sse, "FrameReader", EndsAtLineFeeds),
        "AssertionError: events are left out",
    ),
    "holds everything": (
        "event-stream",
        replaces(sse, "FrameReader", HoldsEverything),
        "more is held than one event",
    ),
    "lets the TOML reader's error out": (
        "settings",
        replaces(config, "_from_file", known_settings),
        "Error",
    ),
    "takes any address": (
        "settings",
        replaces(config, "_check", lambda checked: None),
        "an address that others reach was taken",
    ),
    "guesses what is no UTF-8": (
        "url",
        replaces(routes, "decoded", lenient),
        "another text than the path has",
    ),
    "takes a parameter twice": (
        "url",
        replaces(query, "parameters", last_one_wins),
        "a second reader reads other parameters",
    ),
    "takes any hash": ("body", replaces(accept, "read", hash_unread), "another hash than was sent"),
    "lets infinity pass": ("vector", replaces(commitment, "finite", lambda vector: True), "None: ["),
    "cancels infinities": (
        "vector",
        replaces(commitment, "finite", lambda vector: sum(memoryview(vector).cast("f")) < float("inf")),
        "None: [",
    ),
    "forgets the offset": (
        "time",
        replaces(times, "parse_rfc3339", forgets_the_offset),
        "a second reader reads another moment",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_decoder_with_a_fault_is_found_out(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, complaint = CONTROLS[control]
    plant(monkeypatch)

    found = campaign(name, TARGETS[name], 1, cases=CONTROL_CASES)

    print(f"{control}: after {found.cases} cases: {found.error} for {found.data!r}")
    assert complaint in (found.error or ""), found
