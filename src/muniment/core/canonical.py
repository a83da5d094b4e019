"""Canonical JSON: the one byte form of a JSON value, and its SHA-256.

ADR 0003; the rule for other languages is docs/reference/canonical-json.md.

Object keys are sorted by code point, there are no spaces, non-ASCII is literal UTF-8, numbers are written as
orjson 3.11 writes them, ``-0`` reads as ``0``, arrays keep their order. ``parse`` refuses every text that two
readers could understand differently, so that equal hashes mean equal values.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import orjson

from muniment.errors import Malformed

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""A JSON value. ``parse`` returns lists and dicts; ``encode`` takes tuples too, and writes them as arrays."""

DEPTH_MAX: Final = 127
"""Arrays and objects that may stand inside one another: what serde_json reads, the hash of other clients."""

REFUSED: Final[Mapping[str, str]] = {
    "utf-8": "not UTF-8",
    "byte-order-mark": "byte order mark",
    "syntax": "not JSON",
    "surrogate": "lone surrogate",
    "duplicate-key": "duplicate key",
    "number": "number out of range",
    "nesting": "nested too deep",
}
"""Class of refusal (as published in the hash vectors) to the words with which its error text begins."""

_INTEGER_MIN: Final = -(2**63)
_INTEGER_MAX: Final = 2**64 - 1
_INTEGER_CHARS_SAFE: Final = 19  # no integer of so few characters is out of range
_INTEGER_CHARS_MAX: Final = 20  # of -2^63 and of 2^64-1; also keeps int() below its limit of 4300 digits
_EXCERPT_CHARS_MAX: Final = 40

_WHITESPACE: Final = " \t\n\r"
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_TOKEN: Final = re.compile(
    rb'(?P<string>"(?:[^"\\]++|\\.)*+")(?P<colon>[ \t\n\r]*+:)?+'
    rb"|(?P<open>[\[{])|(?P<close>[\]}])"
    rb"|(?<![-+.eE0-9])(?P<integer>-?[0-9]{19,}+)(?![.eE])",  # the shorter ones are in range
    re.DOTALL,
)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NO_FLOATS: Final = frozenset({str, int, bool, type(None)})
"""Types of most values: neither a float, nor able to hold one."""
_PLACE_BYTES_MAX: Final = 128 * 1024

_NOT_BRACKET: Final = bytes(set(range(256)) - set(b"[{]}"))
_STEP: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # read as signed bytes: one down, one up

# A date or a dataclass has no JSON form that everybody agrees on: refuse it instead of choosing one.
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def parse(data: bytes | memoryview, *, depth_max: int = DEPTH_MAX) -> JSON:
    """Return the value of one JSON document that has exactly one meaning.

    Refused as ``Malformed``, with the byte offset (but in documents over 128 KiB, where looking for it would
    keep others waiting): what is not UTF-8 or not RFC 8259 JSON, a byte order
    mark, content after the document, a key that occurs twice in one object (compared after unescaping), a
    lone surrogate, an integer outside -2^63 .. 2^64-1, a number that overflows a double, and more than
    ``depth_max`` (at most 127) arrays and objects inside one another, counted over the whole of ``data``.

    ``-0`` is the integer 0 and ``-0.0`` the float; a number with a fraction or an exponent is the nearest
    double.
    """
    raw = bytes(data)
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise _malformed("utf-8", error.start) from None
    try:
        value: JSON = orjson.loads(raw)
        # Before the second reader, which recurses in C on behalf of Python.
        if _nests_deeper(raw, depth_max):
            raise _malformed("nesting")
        # orjson keeps the last of two equal keys and makes a long integer a float; this reader sees both.
        _SECOND_READER.raw_decode(text, len(text) - len(text.lstrip(_WHITESPACE)))
    except json.JSONDecodeError as error:  # the class of either reader
        raise _not_json(error, text, raw, depth_max) from None
    except Malformed as error:
        raise (_first_refusal(raw, depth_max) or error) from None
    return value


def encode(value: JSON) -> bytes:
    """Return the canonical bytes of ``value``, which do not depend on the order of its keys.

    ``parse(encode(v))`` equals ``v`` (a tuple comes back as a list). Raises ``Malformed``, naming the place,
    for what has no canonical form: NaN and infinities, keys that are not strings, lone surrogates, integers
    outside -2^63 .. 2^64-1, more than 127 levels, other types. Three types that are not ``JSON`` pass when
    running, as orjson knows them: an Enum is its value, a UUID its text, a Fragment its unchecked bytes.
    """
    try:
        canonical = orjson.dumps(value, option=_OPTIONS)
    except TypeError as error:
        raise Malformed(f"no canonical form: {next(_inexpressible(value), str(error))}") from None
    # orjson writes a float that is not finite as null, and stops at 254 levels only.
    if (b"null" in canonical and _holds_not_finite(value)) or _nests_deeper(canonical, DEPTH_MAX):
        raise Malformed(f"no canonical form: {next(_inexpressible(value), 'nested too deep')}")
    return canonical


def digest(value: JSON) -> bytes:
    """Return the 32 bytes of SHA-256 over ``encode(value)``."""
    return hashlib.sha256(encode(value)).digest()


def payload_hash(value: JSON) -> str:
    """Return SHA-256 over ``encode(value)`` as 64 lower-case hex digits, the seed's ``payload_hash``."""
    return hashlib.sha256(encode(value)).hexdigest()


def _refuse_duplicates(members: list[tuple[str, object]]) -> None:
    if len(dict(members)) != len(members):
        raise _malformed("duplicate-key")


def _refuse_long_integer(text: str) -> int:
    if len(text) > _INTEGER_CHARS_SAFE and _out_of_range(text):
        raise _malformed("number")
    return 0


_SECOND_READER: Final = json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_int=_refuse_long_integer)


def _out_of_range(integer: str) -> bool:
    return len(integer) > _INTEGER_CHARS_MAX or not _INTEGER_MIN <= int(integer) <= _INTEGER_MAX


def _nests_deeper(raw: bytes, depth_max: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= depth_max:
        return False
    steps = _STRING.sub(b"", raw).translate(_STEP, _NOT_BRACKET)
    return max(accumulate(memoryview(steps).cast("b"))) > depth_max


def _malformed(refusal: str, offset: int | None = None, excerpt: str = "") -> Malformed:
    place = "" if offset is None else f" at byte {offset}"
    return Malformed(f"{REFUSED[refusal]}{place}{excerpt and ': ' + _cut(excerpt)}")


def _cut(text: str) -> str:
    return text if len(text) <= _EXCERPT_CHARS_MAX else text[:_EXCERPT_CHARS_MAX] + "..."


def _not_json(error: json.JSONDecodeError, text: str, raw: bytes, depth_max: int) -> Malformed:
    """Return the refusal of what a JSON reader did not take, in our words where there is a class for it."""
    offset = len(text[: error.pos].encode())  # the readers count characters
    if text.startswith("\ufeff"):
        return _malformed("byte-order-mark", 0)
    if "depth" in error.msg:  # orjson stops at 1,024 levels; the place where we stop lies before that
        return _first_refusal(raw, depth_max) or _malformed("nesting", offset)
    if "surrogate" in error.msg:  # The reader stands behind the escape by now.
        escape = text.rfind("\\u", 0, error.pos)
        return _malformed("surrogate", len(text[:escape].encode()) if escape >= 0 else offset)
    if "infinity" in error.msg:
        return _malformed("number", offset)
    return _malformed("syntax", offset, error.msg)


def _first_refusal(raw: bytes, depth_max: int) -> Malformed | None:
    """Find the place; not in a long document, where whoever sent it would make everybody wait for it."""
    return next(_refusals(raw, depth_max), None) if len(raw) <= _PLACE_BYTES_MAX else None


def _refusals(raw: bytes, depth_max: int) -> Iterator[Malformed]:
    """Yield in document order what ``parse`` refuses in well-formed JSON. Slow; only for the error text."""
    keys_seen: list[set[str]] = []
    for token in _TOKEN.finditer(raw):
        offset = token.start()
        if token["open"]:
            keys_seen.append(set())
            if len(keys_seen) > depth_max:
                yield _malformed("nesting", offset, f"over {depth_max} arrays and objects")
        elif token["close"]:
            keys_seen.pop()
        elif token["colon"]:
            key = orjson.loads(token["string"])
            if key in keys_seen[-1]:
                yield _malformed("duplicate-key", offset, json.dumps(key))
            keys_seen[-1].add(key)
        elif token["integer"] and _out_of_range(str(token["integer"], "ascii")):
            yield _malformed("number", offset, str(token["integer"], "ascii"))


def _holds_not_finite(value: object) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, dict):
            pending += [each for each in item.values() if type(each) not in _NO_FLOATS]
        elif isinstance(item, list | tuple):
            pending += [each for each in item if type(each) not in _NO_FLOATS]
    return False


def _inexpressible(value: object) -> Iterator[str]:
    """Yield where and why ``value`` has no canonical form. Slow; only for the error text."""
    pending: list[tuple[str, int, object]] = [("$", 0, value)]
    while pending:
        path, depth, item = pending.pop()
        if problem := _problem(item, depth):
            yield f"{_cut(path)} {problem}"
        if isinstance(item, dict):
            pending.extend((f"{path}.{key}", depth + 1, member) for key, member in item.items())
        elif isinstance(item, list | tuple):
            pending.extend((f"{path}[{index}]", depth + 1, member) for index, member in enumerate(item))


def _problem(item: object, depth: int) -> str | None:
    match item:
        case int() if not _INTEGER_MIN <= item <= _INTEGER_MAX:
            return "is an integer outside -2^63 .. 2^64-1"
        case float() if not math.isfinite(item):
            return f"is {item}, which is no JSON number"
        case str() if _SURROGATE.search(item):
            return "holds a lone surrogate"
        case dict() | list() | tuple() if depth == DEPTH_MAX:
            return f"is nested over {DEPTH_MAX} arrays and objects"
        case dict() if not all(isinstance(key, str) for key in item):
            return "has a key that is no string"
        case dict() if any(map(_SURROGATE.search, item)):
            return "has a key with a lone surrogate"
        case None | int() | float() | str() | dict() | list() | tuple():
            return None
        case _:
            return f"is of type {type(item).__name__}, which is not JSON"
