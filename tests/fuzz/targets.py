"""What is fuzzed: every decoder that takes bytes from outside, with what must hold for any bytes at all.

Each function returns a label of what the decoder did, and raises where a promise is broken: an error other
than the named ones, a value that does not come back from its own encoding, a difference to a second reader.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, get_args
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec

from muniment import config
from muniment.client import failures, http, sse
from muniment.core import canonical, commitment, payloads, replay
from muniment.errors import (
    ConfigError,
    Corrupt,
    ExecutorProtocolBroken,
    InvalidField,
    Malformed,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from muniment.executor import protocol
from muniment.interfaces.http import percent, query, recall_body, routes
from muniment.model import times
from muniment.model.operation import Event, Kind
from muniment.stages import accept
from tests.fuzz.engine import Target
from tests.support import submissions

FRAME_MAX: Final = 96
"""So small that a few bytes are too many: the limit is the decoder's argument."""
EVENT_MAX: Final = 96
FROM_INPUT: Final = re.compile(r"[^A-Za-z_, -]|/|\bsupplied\b")
"""Where a refusal begins to say what it was given: at a number, a quote or a colon."""


def words(error: BaseException) -> str:
    """The kind of a refusal: its class, and its text as far as nothing of the input can be in it."""
    if isinstance(error, NotFound):
        return "NotFound"
    # Without the name of the field, which may be anything.
    name = getattr(error, "field", getattr(error, "setting", None))
    text = str(error).removeprefix(f"{name}: ")
    return f"{type(error).__name__} {FROM_INPUT.split(text, maxsplit=1)[0][:50].strip()}"


def same(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are three values."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other) and str(one) == str(other)


def shape(value: object) -> str:
    """A coarse picture of a value: the types in it."""
    if isinstance(value, dict):
        return "{" + "".join(sorted({shape(each)[0] for each in value.values()})) + "}"
    if isinstance(value, list | tuple):
        return "[" + "".join(sorted({shape(each)[0] for each in value})) + "]"
    return type(value).__name__


def floats_in(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(floats_in, value.values()))
    return isinstance(value, float) or (isinstance(value, list | tuple) and any(map(floats_in, value)))


# Canonical JSON


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len({key for key, _ in pairs}) == len(pairs), "a key that occurs twice was accepted"
    return dict(pairs)


def _not_json(text: str) -> object:
    raise ValueError(text)


def canonical_json(data: bytes) -> str:
    """A value that comes back from its canonical bytes, as a second reader has it, or ``Malformed``."""
    try:
        value = canonical.parse(data)
    except Malformed as error:
        if str(error).startswith("not JSON"):
            try:
                json.loads(data.decode(), parse_constant=_not_json)
            except (ValueError, RecursionError):
                pass
            else:
                raise AssertionError("a second reader takes it for JSON") from error
        return words(error)
    second = json.loads(data, object_pairs_hook=_members, parse_constant=_not_json)
    assert same(value, second), "a second reader reads another value"
    _comes_back(value, canonical.encode(value))
    return f"a value {shape(value)}"


def _comes_back(value: object, written: bytes) -> None:
    again = canonical.parse(written)
    assert same(value, again), "parse(encode(x)) is not x"
    assert canonical.encode(again) == written, "encode(parse(b)) is not b"
    assert canonical.payload_hash(value) == hashlib.sha256(written).hexdigest()  # type: ignore[arg-type]
    if not floats_in(value):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert text.encode() == written, "the canonical bytes are not those of the rule"


def canonical_value(data: bytes) -> str:
    """Any Python value, also one that has no JSON form: canonical bytes that come back, or ``Malformed``."""
    value = _value(iter(data), 0)
    try:
        written = canonical.encode(value)
    except Malformed as error:
        if _expressible(value):
            raise AssertionError("refused without a reason") from error
        return re.sub(r".* (?=is|holds|has)", "", str(error))[:24]
    assert _expressible(value), "written, and no reader would understand it"
    _comes_back(value, written)
    return f"bytes of {shape(value)}"


def _value(program: Iterator[int], depth: int) -> Any:
    """Build a value as the bytes say; every byte string is a program."""
    taken = next(program, 0)
    argument = taken >> 4
    match taken & 15:
        case 0:
            return (None, False, True)[argument % 3]
        case 1 | 2:
            return argument - 8
        case 3:
            return (1 << (argument * 5)) * (-1 if argument % 2 else 1)
        case 4:
            return struct.unpack("<d", bytes(next(program, 0) for _ in range(8)))[0]
        case 5:
            return float(argument - 8) / 4
        case 6 | 7:
            return "".join(chr(next(program, 65)) for _ in range(argument))
        case 8:
            return chr(0xD000 + argument * 0x100 + next(program, 0))
        case 9:
            return chr(0x10000 * (argument + 1) + next(program, 0))
        case 10 | 11:
            return [_value(program, depth + 1) for _ in range(min(argument, 4))] if depth < 200 else []
        case 12 | 13:
            keys = [_key(program) for _ in range(min(argument, 4))]
            return {key: _value(program, depth + 1) for key in keys} if depth < 200 else {}
        case 14:
            return (_value(program, depth + 1),) if depth < 200 else ()
        case _:
            return _nest(argument * 17, next(program, 0))


def _key(program: Iterator[int]) -> Any:
    taken = next(program, 65)
    if taken == 255:
        return taken
    return chr(0xD7F0 + next(program, 0)) if taken == 254 else chr(taken) * (taken % 3)


def _nest(levels: int, inner: int) -> Any:
    value: Any = inner
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def _expressible(value: object, depth: int = 0) -> bool:
    """Whether the rule has a canonical form for it, read off the rule."""
    match value:
        case None | bool():
            return True
        case int():
            return -(2**63) <= value < 2**64
        case float():
            return math.isfinite(value)
        case str():
            return not any(0xD800 <= ord(char) <= 0xDFFF for char in value)
        case list() | tuple():
            return depth < canonical.DEPTH_MAX and all(_expressible(each, depth + 1) for each in value)
        case dict():
            keys = all(isinstance(key, str) and _expressible(key) for key in value)
            inside = all(_expressible(each, depth + 1) for each in value.values())
            return depth < canonical.DEPTH_MAX and keys and inside
        case _:
            return False


def json_seeds() -> list[bytes]:
    """Documents of every kind, and one for each refusal."""
    return [
        b'{"content":"Jos\\u00e9 said \\ud83d\\ude00","n":[1,-0,1.5,1e3,true,null],"o":{"b":1,"a":{}}}',
        b'{"a":1,"\\u0061":2}',
        b'{"b":1,"\xc3\xa9":2,"a":{"d":[],"c":null}}',
        b'{"a":{"a":1},"b":{"a":1,"a":1}}',
        b"[18446744073709551615,-9223372036854775808,18446744073709551616]",
        b"[1e400]",
        b'"\\ud800"',
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b"[" * 128 + b"]" * 128,
        b'{"a":' * 64 + b"[]" + b"}" * 64,
        b' \t\r\n{"a" : [ ] } ',
        b"1 2",
        b"1" * 4400,
        # orjson 3.12 and 3.13 write past their buffer here, where nothing is reserved after an inner array.
        b"[" * 120 + b"0" + (b",null" * 8 + b"]") * 120,
        b"[" * 90 + b"0" + (b",null" * 16 + b"]") * 90,
        b"[0.1,5e-324,1.7976931348623157e308,1e21,123456789.123]",
    ]


def value_seeds() -> list[bytes]:
    """Programs: every instruction, and each value that has no canonical form."""
    numbers = (math.inf, -math.inf, math.nan, 0.1, 1e300)
    return [
        bytes(range(256)),
        *(bytes([0x1A, 4]) + struct.pack("<d", number) for number in numbers),
        *(bytes([0x2A, 0x13, taken]) for taken in (0xD3, 0xC3, 0xE3, 0xF3, 0x02, 0x05)),
        b"\x8f\xff",
        b"\x1a\x7f\x00",
        b"\x2c\xff\x01\x02",
        b"\x2c\xfe\x20ab\x01\x02",
        b"\x18\x88\x10",
        b"\x4b\x1e\x36AAA\x2d12\x00\x10\x20",
        b"\xac" * 9,
    ]


# Frames of the executor


def _cut(data: bytes) -> tuple[list[bytes], bytes]:
    """Read where a stream is split from its first bytes; return the pieces and the stream."""
    if not data:
        return [], b""
    count = data[0] % 8
    places, stream = data[1 : 1 + count], data[1 + count :]
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in pairwise(edges)], stream


def _frames_of(stream: bytes) -> tuple[list[bytes], int | None]:
    """The whole frames of a stream by the rule, and where a length is refused."""
    bodies: list[bytes] = []
    at = 0
    while len(stream) - at >= 4:
        [length] = struct.unpack_from(">I", stream, at)
        if not 0 < length <= FRAME_MAX:
            return bodies, at + 4
        if len(stream) - at - 4 < length:
            break
        bodies.append(stream[at + 4 : at + 4 + length])
        at += 4 + length
    return bodies, None


def executor_frames(data: bytes) -> str:
    """The frames of a stream, however it is split, or ``ExecutorProtocolBroken`` as soon as it must be."""
    pieces, stream = _cut(data)
    wanted, broken_at = _frames_of(stream)
    decoder = protocol.FrameDecoder(FRAME_MAX)
    found: list[bytes] = []
    fed = 0
    for piece in pieces:
        fed += len(piece)
        must_break = broken_at is not None and fed >= broken_at
        try:
            found += decoder.feed(piece)
        except ExecutorProtocolBroken:
            assert must_break, "refused without a reason"
            break
        assert not must_break, "a length that is too long was taken, and what follows would be held"
        assert decoder.held_bytes < FRAME_MAX + protocol.HEADER_BYTES, "more is held than one frame"
    assert found == wanted, "other frames than the stream has"
    read = [_message(body) for body in found]
    return f"{min(len(read), 3)} {' '.join(sorted(set(read)))} {'broken' if broken_at else 'open'}"


def _message(body: bytes) -> str:
    """What either side reads from a frame; a message comes back from its own frame."""
    labels = []
    for read in (protocol.read_to_parent, protocol.read_to_child):
        try:
            message = read(body)
        except ExecutorProtocolBroken:
            continue
        again = protocol.frame(message)
        assert again[:4] == struct.pack(">I", len(again) - 4)
        assert same_message(read(again[4:]), message), "a message does not come back"
        labels.append(type(message).__name__)
    return "+".join(labels) or "none"


def same_message(one: object, other: object) -> bool:
    """Equal, where a number that is none equals itself."""
    return one == other or str(one) == str(other)


def frame_seeds() -> list[bytes]:
    """A stream of each message that there is, made from the types of the protocol."""
    messages = [example(kind) for side in (protocol.ToChild, protocol.ToParent) for kind in get_args(side)]
    framed = [protocol.frame(message) for message in messages]
    return [
        *(b"\x00" + each for each in framed),
        *(bytes([3, 1, 4, len(each) // 2]) + each + each for each in framed),
        b"\x00" + (FRAME_MAX + 1).to_bytes(4, "big"),
        b"\x01\x04" + (FRAME_MAX + 1).to_bytes(4, "big") + bytes(FRAME_MAX),
        b"\x02\x02\x05" + FRAME_MAX.to_bytes(4, "big") + bytes(FRAME_MAX),
        b"\x00\x00\x00\x00\x00",
        b"\x01\x03\xff\xff\xff\xff",
    ]


def example(kind: Any) -> Any:
    """One value of a type, whatever its fields are: so a message that is added later is fuzzed too."""
    info = msgspec.inspect.type_info(kind)
    return _example(info)


def _example(info: Any) -> Any:
    match info:
        case msgspec.inspect.StructType():
            return info.cls(**{field.name: _example(field.type) for field in info.fields})
        case msgspec.inspect.UnionType():
            return _example(info.types[0])
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return (_example(info.item_type),)
        case msgspec.inspect.TupleType():
            return tuple(map(_example, info.item_types))
        case msgspec.inspect.DictType():
            return {_example(info.key_type): _example(info.value_type)}
        case msgspec.inspect.StrType():
            return "t"
        case msgspec.inspect.BytesType():
            return bytes(4)
        case msgspec.inspect.FloatType():
            return 1.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.EnumType():
            return next(iter(info.cls))
        case msgspec.inspect.LiteralType():
            return info.values[0]
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.AnyType():
            return {"any": [1, None, "t"]}
        case _:
            return 1


# The journal


def journal_unit(data: bytes) -> str:
    """A unit that comes back from its own bytes, or ``Corrupt``."""
    try:
        unit = replay.decode(data)
    except Corrupt as error:
        return words(error)
    written = replay.encode(unit)
    again = replay.decode(written)
    assert again == unit, "decode(encode(u)) is not u"
    assert replay.encode(again) == written, "encode(decode(b)) is not b"
    return f"a unit {type(unit).__name__}"


def unit_seeds() -> list[bytes]:
    """A unit of each type, and those that no program knows."""
    from muniment.model import journal

    units = [replay.encode(example(kind)) for kind in get_args(journal.AnyUnit)]
    return [*units, b'{"t":"accept","v":1}', b'{"t":"genesis","v":2,"at":1,"lineage":""}', b'{"t":"else"}']


# Server-sent events


def event_stream(data: bytes) -> str:
    """The frames of a stream, however it is split; never more is held than one event."""
    kept = sse.FRAME_BYTES_MAX
    setattr(sse, "FRAME_BYTES_MAX", EVENT_MAX)  # noqa: B010 it is a constant to everybody else
    try:
        return _event_stream(*_cut(data))
    finally:
        setattr(sse, "FRAME_BYTES_MAX", kept)  # noqa: B010


def _event_stream(pieces: list[bytes], stream: bytes) -> str:
    wanted = _events_of(stream)
    reader = sse.FrameReader()
    found: list[bytes | None] = []
    label = "frames"
    for piece in pieces:
        try:
            found += [frame.data for frame in reader.feed(piece)]
        except failures.UnexpectedAnswer as error:
            label = words(error)
            break
        held = reader._size + len(reader._pending)
        assert held <= EVENT_MAX, "more is held than one event"
    assert found == wanted[: len(found)], "other events than the stream has"
    assert label != "frames" or found == wanted, "events are left out"
    return f"{label} {min(len(found), 4)} {' '.join(sorted({_event(each) for each in found}))}"


def _events_of(stream: bytes) -> list[bytes | None]:
    """The blocks of a whole stream by the rule. A CR at its end may be half of a line end."""
    lines = re.split(rb"\r\n|\r|\n", stream.removesuffix(b"\r"))[:-1]
    events: list[bytes | None] = []
    data: list[bytes] = []
    for line in lines:
        field, _, value = line.partition(b":")
        if not line:
            events.append(b"\n".join(data) if data else None)
            data = []
        elif field == b"data":
            data.append(value[1:] if value.startswith(b" ") else value)
    return events


def _event(data: bytes | None) -> str:
    if data is None:
        return "none"
    try:
        http._decoded(data, Event)
    except failures.UnexpectedAnswer:
        return "no event"
    return "event"


def stream_seeds() -> list[bytes]:
    """Streams with all line ends, comments, and one that does not end."""
    event = (
        b'{"operation_id":"a","sequence":1,"from_state":null,"to_state":"accepted","detail":null,'
        b'"executor_generation":0,"occurred_at":""}'
    )
    frame = b"id: 1\nevent: operation_state\ndata: {}\n\n"
    return [
        b"\x00" + frame + frame,
        b"\x03\x05\x21\x22" + frame.replace(b"\n", b"\r\n") * 2,
        b"\x02\x01\x09" + frame.replace(b"\n", b"\r"),
        b"\x00: keep-alive\n\ndata\n\ndata:\n\ndata:a\ndata: b\n\n",
        b"\x00data:" + event[:60] + b"\ndata:" + event[60:] + b"\n\n",
        b"\x01\x50data: " + b"x" * 200,
        b"\x01\x50" + b"data: xxxxxxxx\n" * 14,
        b"\x00datax: 1\nda: 2\ndata : 3\n\n\r\n\r",
    ]


# The settings


def settings(data: bytes) -> str:
    """A configuration within its limits, that stays as it is when it is loaded again, or ``ConfigError``."""
    file = os.memfd_create("settings")
    try:
        os.write(file, data)
        path = f"/proc/self/fd/{file}"
        try:
            loaded = config.load(file=path, environ={})
        except ConfigError as error:
            return words(error)
    finally:
        os.close(file)
    plain = msgspec.to_builtins(loaded)
    assert msgspec.convert(plain, config.Config) == loaded, "a setting outside of its limits was taken"
    assert config.load(plain, environ={}) == loaded, "other settings when they are given as flags"
    assert config.is_loopback(loaded.host), "an address that others reach was taken"
    changed = [name for name, value in plain.items() if value != getattr(config.Config(), name)]
    return f"settings {min(len(changed), 3)}"


def setting_seeds() -> list[bytes]:
    """Each setting with its default, and values that are none."""
    lines = [
        f"{name} = {json.dumps(value)}"
        for name, value in msgspec.to_builtins(config.Config()).items()
        if value is not None
    ]
    return [
        *(line.encode() for line in lines),
        "\n".join(lines[:8]).encode(),
        b'host = "::1"\nport = 0\n',
        b'embedder = "endpoint"\nembedder_url = "http://localhost"\n',
        b"drain_seconds = inf\nprobe_seconds = nan",
        b"port = 1979-05-27T07:32:00Z",
        b"[port]\nport = 1",
        b"port = [[[[1]]]]",
        b"port = " + b"[" * 1000,
        b"port = " + b"1" * 4400,
        b"port = 1\nport = 2",
        b"catgories = 1",
        b'host = "\\u0000"',
        b"port = 0x_1",
    ]


# URLs

QUERY: Final = ("after", "limit", "state", "user_id")


async def _served(exchange: Any) -> Any:
    """A handler that is never called."""


ROUTER: Final = routes.Router(
    routes.Route(path, {"GET": _served})
    for path in ("/health", "/api/v2/operations", "/api/v2/operations/{id}", "/api/v2/operations/{id}/events")
)


def url(data: bytes) -> str:
    """A path and a query that mean one text each, as a second reader has it, or a named refusal."""
    path, _, asked = data.partition(b"?")
    return f"{_path(path)}, {_query(asked)}"


def _path(path: bytes) -> str:
    try:
        match = ROUTER.find("GET", path)
    except (InvalidField, NotFound, MethodNotAllowed) as error:
        return words(error)
    segments = path.split(b"/")
    for value in match.values:
        assert value.encode() == unquote_to_bytes(segments[4]), "another text than the path has"
        assert ROUTER.find("GET", b"/api/v2/operations/" + quote(value, safe="").encode()).values == (value,)
        assert percent.decoded(quote(value, safe="").encode(), "path") == value
    return f"a route of {len(segments)}"


def _query(asked: bytes) -> str:
    try:
        found = query.parameters(asked, QUERY)
        limit = query.limit_parameter(found, 50, 200)
        after = query.uint64_parameter(found, "after", 0)
        query.choice_parameter(found, "state", ("accepted", "committed"))
    except InvalidField as error:
        return words(error)
    raw = parse_qsl(asked.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    second = [tuple(text.encode("latin-1").decode() for text in pair) for pair in raw]
    assert sorted(found.items()) == sorted(second), "a second reader reads other parameters"
    assert found.keys() <= set(QUERY)
    assert 1 <= limit <= 200
    assert str(after) == found.get("after", "0")
    return f"parameters {' '.join(sorted(found))}"


def url_seeds() -> list[bytes]:
    """Paths and queries of all kinds."""
    return [
        b"/health?",
        b"/api/v2/operations?after=18446744073709551615&limit=200&state=committed&user_id=a+b%20c",
        b"/api/v2/operations/a%2Fb/events?after=18446744073709551616",
        b"/api/v2/operations/%F0%9F%98%80?limit=0",
        b"/api/v2/operations/..?limit=1&limit=2",
        b"/api/v2/operations/%zz?%zz=1",
        b"/api/v2/operations/%ff?user_id=%ff",
        b"/api/v2/operations/%ed%a0%80?user_id=%ed%a0%80",
        b"/api/v2/operations/%00?=1&&user_id",
        b"/api/v2/operations/?after=%EF%BC%91",
        b"//health?after=01",
        b"/api/v2/operations/a;b=c?limit=1;state=x",
    ]


# Bodies

LIMITS: Final = accept.Limits(
    operation_id_bytes_max=32,
    dependencies_max=3,
    payload=payloads.Limits(content_bytes_max=64, attributes_bytes_max=256),
)
CONFIG: Final = config.Config(query_bytes_max=64)


def body(data: bytes) -> str:
    """A submission whose hash is that of its payload, and a recall within its limits, or a named refusal."""
    return f"{_submission(_repaired(data))}, {_recall(data)}"


def _repaired(data: bytes) -> bytes:
    """Every other document gets the hash of its payload, or hardly any would come past that check."""
    if len(data) % 2:
        return data
    try:
        envelope = canonical.parse(data)
    except Malformed:
        return data
    if not isinstance(envelope, dict) or not isinstance(envelope.get("payload"), dict):
        return data
    return canonical.encode({**envelope, "payload_hash": canonical.payload_hash(envelope["payload"])})


def _submission(data: bytes) -> str:
    try:
        asked = accept.read(data)
    except RequestError as error:
        return words(error)
    second = json.loads(data)
    assert asked.payload_hash == second["payload_hash"], "another hash than was sent"
    if not floats_in(asked.payload):
        assert asked.payload_hash == submissions.payload_hash(second["payload"]), (
            "the hash of another payload"
        )
    problem = accept.problem(asked, LIMITS)
    if problem is None:
        assert 0 < len(asked.operation_id.encode()) <= 32
        divided = payloads.divide(asked.payload)
        content = asked.payload["content"].encode() if asked.kind is Kind.ADD_MEMORY else None
        assert divided.content == content, "other content than was sent"
        assert canonical.parse(divided.attributes) == {
            name: value for name, value in asked.payload.items() if name != "content" or content is None
        }
    return f"{asked.kind}: {problem and words(InvalidField(*problem))}"


def _recall(data: bytes) -> str:
    try:
        asked = recall_body.recall_request(data, CONFIG)
    except RequestError as error:
        return words(error)
    assert 1 <= asked.limit <= CONFIG.recall_limit_max
    assert 0 < len(asked.query.encode()) <= 64
    return "a recall"


def body_seeds() -> list[bytes]:
    """Submissions of every kind, wrong ones, and recalls."""
    memory = submissions.memory(
        "a", "Kept.", categories=["x"], occurred_at="2026-01-01T00:00:00Z", role="user"
    )
    step = {"stream_name": "s", "name": "n", "idempotency_key": "k", "ordinal": 1}
    bodies: list[object] = [
        memory,
        {**memory, "dependencies": ["b", "c"]},
        {**memory, "dependencies": ["a", "", "b", "c"]},
        {**memory, "payload_hash": "0" * 64},
        {**memory, "kind": "add_memories"},
        {**memory, "schema_version": 2.0},
        submissions.memory("", " "),
        submissions.memory("b", "x" * 65, quotes=[{"start": 0, "end": 3, "speaker": None}]),
        submissions.stream("c", description="d"),
        submissions.envelope("d", "add_task_step", step),
        submissions.envelope("e", "complete_step", {"idempotency_key": "k", "result": [1, 2.5, None]}),
        {"query": "kettle", "limit": 10, "categories": ["a"], "user_id": None},
        {"query": "kettle", "limit": 10.0},
        {"query": "x" * 65, "limit": True},
        {"query": " "},
        [],
    ]
    return [json.dumps(each).encode() for each in bodies]


# Vectors, and times that a caller writes


def vector(data: bytes) -> str:
    """The gate before a commit lets exactly the finite vectors of the right size pass, and never raises."""
    dimensions, held = (data[0] % 8, data[1:]) if data else (0, b"")
    salt, content = b"salt", b"word"
    part = {
        "part_index": 0,
        "token_start": 0,
        "token_end": 1,
        "byte_start": 0,
        "byte_end": 4,
        "digest": replay.salted(salt, content),
        "embedding_state": "indexed",
    }
    rows = {0: {"bytes": held, "digest": replay.salted(salt, held)}}
    plan = {"part_count": 1, "token_count": 1}
    problem = commitment.broken(plan, [part], rows, salt=salt, content=content, dimensions=dimensions)
    right_size = len(held) == 4 * dimensions
    numbers = [value for (value,) in struct.iter_unpack("<f", held)] if right_size else []
    assert (problem is None) == (right_size and all(map(math.isfinite, numbers))), f"{problem}: {numbers}"
    return f"{dimensions} {problem and words(ValueError(problem))}"


def vector_seeds() -> list[bytes]:
    """Vectors of some sizes, with every kind of number that is none."""
    odd = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -0.0)
    return [
        *(bytes([count]) + struct.pack(f"<{count}f", *range(count)) for count in range(8)),
        *(bytes([2]) + struct.pack("<2f", 1.0, value) for value in odd),
        bytes([2]) + struct.pack("<2f", math.inf, -math.inf),
        bytes([4]) + struct.pack("<4f", *[3.4e38] * 4),
        bytes([3]) + bytes(11),
    ]


def time(data: bytes) -> str:
    """A moment that comes back from its own text and that a second reader has too, or ``ValueError``."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        moment = times.parse_rfc3339(text)
    except ValueError as error:
        return words(error)
    assert times.parse_rfc3339(times.rfc3339(moment)) == moment, "another moment when it is read again"
    if text[17:19] != "60":
        cut = re.sub(r"(\.\d{6})\d+", r"\1", text.upper())
        second = datetime.fromisoformat(cut)
        assert (second - EPOCH) // timedelta(microseconds=1) == moment, "a second reader reads another moment"
    return f"a moment with {min(len(text), 40)} characters"


EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def time_seeds() -> list[bytes]:
    """Moments and what looks like one."""
    return [
        b"2026-02-28T12:34:56Z",
        b"2024-02-29t23:59:60.5z",
        b"2026-01-01T00:30:00+01:00",
        b"2023-02-29T00:00:00Z",
        b"0001-01-01T00:00:00.123456789+23:59",
        b"9999-12-31T23:59:59.999999-23:59",
        b"0000-01-01T00:00:00Z",
        b"2026-01-01T24:00:00Z",
        b"2026-01-01T00:00:00+24:00",
        b"2026-01-01 00:00:00Z",
        b"2026-01-01T00:00:00",
        "\uff12026-01-01T00:00:00Z".encode(),
    ]


TARGETS: Final[Mapping[str, Target]] = {
    "canonical-json": Target(
        canonical_json,
        json_seeds,
        (
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b'"',
            b'"a":',
            b"\\u0061",
            b"\\ud800",
            b"1e5",
            b"-0",
            b"null",
            b"\n",
        ),
    ),
    "canonical-value": Target(canonical_value, value_seeds),
    "executor-frames": Target(
        executor_frames,
        frame_seeds,
        (b"\x00\x00\x00\x01", b"\x00\x00\x00\x61", b"\xff", b"\xc0", b"\x91", b"\xa1"),
    ),
    "journal-unit": Target(
        journal_unit,
        unit_seeds,
        (b'"t":', b'"v":1', b"null", b"[]", b"1e400", b"18446744073709551616", b"1.0", b'"\\ud800"'),
    ),
    "event-stream": Target(
        event_stream, stream_seeds, (b"\r", b"\n", b"\r\n", b"data:", b"data: ", b":", b"\n\n", b"data")
    ),
    "settings": Target(
        settings,
        setting_seeds,
        (b" = ", b"\n", b'"', b"'", b"[", b"]", b"#", b"inf", b"nan", b"true", b"{", b"}", b".", b'"""'),
    ),
    "url": Target(
        url,
        url_seeds,
        (b"%", b"%2F", b"%00", b"&", b"=", b"+", b"?", b"/", b"after=", b"limit=", b"%ED%A0%80"),
    ),
    "body": Target(
        body,
        body_seeds,
        (b"null", b'"kind":', b'"content":', b"{}", b"[]", b'"', b",", b"true", b"2.0", b"\\u0000"),
    ),
    "vector": Target(
        vector, vector_seeds, (b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", bytes(4))
    ),
    "time": Target(
        time, time_seeds, (b"Z", b"+00:00", b"-23:59", b".", b"60", b"T", b":", b"-02-29", b"9999", b"0000")
    ),
}
