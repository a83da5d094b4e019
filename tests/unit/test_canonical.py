"""Canonical JSON (ADR 0003): the published vectors, the number rule, both readers, what has no form.

Three implementations are held against one another: the module, the sample in docs/reference/canonical-json.md
(standard library alone), and the outcomes recorded in docs/reference/payload-hash-vectors.json.
"""

import base64
import dataclasses
import datetime as dt
import enum
import hashlib
import json
import math
import random
import re
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muniment.core import canonical
from muniment.core.canonical import JSON, REFUSED, encode, parse
from muniment.errors import Malformed

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(__file__).parent / "data/json/json_test_suite"
PAGE = (ROOT / "docs/reference/canonical-json.md").read_text(encoding="utf-8")
SAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]

# What the suite lets every parser accept and we do not: the hash of such a text would stand for two values.
SUITE_ACCEPTS_WE_REFUSE = {"y_object_duplicated_key", "y_object_duplicated_key_and_value"}

EXAMPLES = settings().max_examples

Canonicalise = Callable[[bytes], bytes]


class Vector(NamedTuple):
    name: str
    document: bytes
    canonical: bytes | None
    sha256: str | None
    refused: str | None


def vectors() -> list[Vector]:
    published = json.loads((ROOT / "docs/reference/payload-hash-vectors.json").read_text(encoding="ascii"))
    assert published["version"] == 1
    return [
        Vector(
            name=vector["name"],
            document=(
                vector["input"].encode() if "input" in vector else base64.b64decode(vector["input_base64"])
            ),
            canonical=vector["canonical"].encode() if "canonical" in vector else None,
            sha256=vector.get("sha256"),
            refused=vector.get("refused"),
        )
        for vector in published["vectors"]
    ]


VECTORS = vectors()


def failures(canonicalise: Canonicalise) -> list[str]:
    """Return the names of the vectors that ``canonicalise`` gets wrong."""

    def wrong(vector: Vector) -> bool:
        try:
            found = canonicalise(vector.document)
        except (ValueError, Malformed):
            return vector.refused is None
        except RecursionError:
            return True
        return found != vector.canonical or hashlib.sha256(found).hexdigest() != vector.sha256

    return [vector.name for vector in VECTORS if wrong(vector)]


def through_module(document: bytes) -> bytes:
    return encode(parse(document))


def sample(source: str = SAMPLE) -> Any:
    names: dict[str, Any] = {}
    exec(compile(source, "canonical-json.md", "exec"), names)
    return names


def outcome(canonicalise: Canonicalise, document: bytes) -> bytes | None:
    try:
        return canonicalise(document)
    except (ValueError, Malformed):
        return None


# The vectors


def test_module_gives_every_vector() -> None:
    assert len(VECTORS) > 500
    assert failures(through_module) == []


def test_refusal_of_every_vector_is_of_its_class() -> None:
    refused = [vector for vector in VECTORS if vector.refused is not None]
    assert {vector.refused for vector in refused} == set(REFUSED)
    for vector in refused:
        assert vector.refused is not None
        with pytest.raises(Malformed, match=f"^{REFUSED[vector.refused]}"):
            parse(vector.document)


def test_sample_in_the_page_gives_every_vector() -> None:
    assert failures(sample()["canonical"]) == []


@pytest.mark.parametrize(
    ("payload", "supplied"),
    [
        (
            {
                "categories": ["architecture", "durability"],
                "content": "Receipts are the acknowledgement boundary.",
                "user_id": "prometheus-skill-pack",
            },
            "a026d7fd122070a74973fa27e3ba92d438ba60e7fa84fd7fd3c8d769e3339a09",
        ),
        (
            {
                "content": "A caller may provide content longer than one model window; the supervised "
                "executor persists and resumes each tokenizer-planned part.",
                "user_id": "prometheus-skill-pack",
            },
            "f253183895943fd544ec79d9b3efdff5ec366346a09d8f4cfa466c7db4d35aca",
        ),
    ],
)
def test_hashes_of_the_seed(payload: JSON, supplied: str) -> None:
    assert canonical.payload_hash(payload) == supplied
    assert canonical.digest(payload) == bytes.fromhex(supplied)
    assert supplied in {vector.sha256 for vector in VECTORS}


def test_published_file_is_what_the_script_writes() -> None:
    script = ROOT / "scripts/payload-hash-vectors"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_page_lists_the_classes_of_refusal() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|.*\| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert dict(listed) == REFUSED


def test_json_test_suite_is_followed() -> None:
    decided: dict[str, dict[bool, int]] = {}
    documents = {path.stem: path.read_bytes() for path in (SUITE / "test_parsing").glob("*.json")}
    documents["n_structure_100000_opening_arrays"] = b"[" * 100_000
    documents["n_structure_open_array_object"] = b'[{"":' * 50_000 + b"\n"
    for name, document in documents.items():
        accepted = outcome(through_module, document) is not None
        counts = decided.setdefault(name[:2], {False: 0, True: 0})
        counts[accepted] += 1
        if name[:2] != "i_":
            assert accepted == (name[:2] == "y_" and name not in SUITE_ACCEPTS_WE_REFUSE), name
    print({rule: {"refused": n[False], "accepted": n[True]} for rule, n in sorted(decided.items())})
    assert {rule: sum(counts.values()) for rule, counts in decided.items()} == {"y_": 95, "n_": 188, "i_": 35}


# Controls: canonicalisers that are wrong in one thing are caught


MUTANTS_OF_THE_SAMPLE = {
    "non-ASCII is escaped": ("ensure_ascii=False", "ensure_ascii=True", "string/non-ascii-is-raw"),
    "the last of two equal keys wins": (
        'raise ValueError("duplicate key")',
        "pass",
        "duplicate-key/one-escaped",
    ),
    "keys by UTF-16 unit": (
        "sorted(value)",
        'sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))',
        "order/code-point-not-utf16",
    ),
    "keys as they came": ("in sorted(value)", "in value", "order/nested-keys"),
    "numbers as Python writes them": ("return number(value)", "return repr(value)", "float/1e-5"),
    "numbers as older serde_json writes them": ("e{e:+d}", "e{e:d}", "float/1e16"),
    "numbers as JavaScript writes them": (
        "return number(value)",
        "return number(value).removesuffix('.0')",
        "float/1.0",
    ),
    "fixed notation ends one early": ("-5 <= e <= 15", "-5 <= e <= 14", "float/1e15"),
    "fixed notation begins one late": ("-5 <= e <= 15", "-4 <= e <= 15", "float/1e-5"),
    "-0 is a float": ("return int(text)", 'return -0.0 if text == "-0" else int(text)', "integer/-0"),
    "a long integer becomes a float": (
        'raise ValueError("number out of range")\n    return int(text)',
        "return float(text)\n    return int(text)",
        "integer/out-of-range/18446744073709551616",
    ),
    "integers are read as doubles": (
        "return int(text)",
        "return int(float(text))",
        "integer/9007199254740993",
    ),
    "NaN is accepted": ('raise ValueError(f"not JSON: {text}")', "return None", "float/not-json/NaN"),
    "one level more": ("depth == 127", "depth == 128", "nesting/128-arrays"),
    "one level less": ("depth == 127", "depth == 126", "nesting/127-arrays"),
    "a byte order mark is skipped": ('"utf-8"),\n', '"utf-8-sig"),\n', "byte-order-mark/utf-8"),
    "bytes that are not UTF-8 are replaced": (
        'document.decode("utf-8")',
        'document.decode("utf-8", "replace")',
        "utf-8/stray-byte",
    ),
    "surrogates are replaced": (
        'write(value, 0).encode("utf-8")',
        'write(value, 0).encode("utf-8", "replace")',
        "surrogate/high-alone",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS_OF_THE_SAMPLE)
def test_vectors_catch_a_wrong_canonicaliser(mutant: str) -> None:
    right, wrong, caught_by = MUTANTS_OF_THE_SAMPLE[mutant]
    assert right in SAMPLE
    assert caught_by in failures(sample(SAMPLE.replace(right, wrong))["canonical"])


@pytest.mark.parametrize(
    ("name", "replacement", "caught_by"),
    [
        ("_SECOND_READER", json.JSONDecoder(), "duplicate-key/one-escaped"),
        ("_SECOND_READER", json.JSONDecoder(), "integer/out-of-range/18446744073709551616"),
        ("_nests_deeper", lambda raw, depth_max: False, "nesting/128-arrays"),
        ("_STRING", re.compile(b"(?!)"), "nesting/brackets-in-strings-do-not-count"),
        ("_OPTIONS", 0, "order/nested-keys"),
        ("_OPTIONS", orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE, "scalar/null"),
    ],
)
def test_vectors_catch_a_rule_taken_out_of_the_module(
    monkeypatch: pytest.MonkeyPatch, name: str, replacement: object, caught_by: str
) -> None:
    monkeypatch.setattr(canonical, name, replacement)
    assert caught_by in failures(through_module)


# Values


def finite(bits: int) -> float | None:
    x: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return x if math.isfinite(x) else None


def number_text(x: float) -> str:
    """The rule of the page, from the shortest digits that ``repr`` gives."""
    negative, digits, exponent = Decimal(repr(x)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    sign = "-" if negative else ""
    if x == 0:
        return f"{sign}0.0"
    if 1e-5 <= abs(x) < 1e16:
        plain = f"{Decimal((0, digits, exponent)):f}"
        return sign + (plain if "." in plain else plain + ".0")
    power = exponent + len(text) - 1
    return f"{sign}{text[0]}{'.' + text[1:] if len(text) > 1 else ''}e{'+' if power > 0 else '-'}{abs(power)}"


def test_numbers_follow_the_rule() -> None:
    seed = random.getrandbits(32)
    source = random.Random(seed)
    bit_patterns = [x for x in (finite(source.getrandbits(64)) for _ in range(20_000)) if x is not None]
    decimals = [
        round(source.uniform(-10, 10) * 10.0 ** source.randint(-9, 20), source.randint(0, 12))
        for _ in range(5_000)
    ]
    powers = [math.ldexp(1.0, e) for e in range(-1074, 1024)] + [float(f"1e{e}") for e in range(-323, 309)]
    bounds = [math.nextafter(x, y) for x in (1e-5, 1e15, 1e16, 1e21, 1e22) for y in (0.0, x, math.inf)]
    doubles = [*bit_patterns, *decimals, *powers, *bounds, 0.0, -0.0]
    assert len(doubles) > 27_000
    wrong = [x for x in doubles if encode(x).decode() != number_text(x)]
    assert wrong == [], f"seed {seed}"
    assert [x for x in doubles if repr(parse(encode(x))) != repr(x)] == [], f"seed {seed}"


def test_numbers_are_read_to_the_nearest_double() -> None:
    seed = random.getrandbits(32)
    source = random.Random(seed)
    texts = [
        f"{source.getrandbits(130)}.{source.getrandbits(90)}e{source.randint(-340, 250)}"
        for _ in range(3_000)
    ]
    lower = [x for x in (finite(source.getrandbits(63)) for _ in range(3_000)) if x is not None and x < 1e308]
    between = [(Decimal(x) + Decimal(math.nextafter(x, math.inf))) / 2 for x in lower if 1e-5 < x < 1e11]
    texts += [f"{middle:f}{tail}" for middle in between for tail in ("", "0001") if "." in f"{middle:f}"]
    assert len(texts) > 3_100
    assert [text for text in texts if parse(text.encode()) != float(text)] == [], f"seed {seed}"


INTEGERS = st.integers(-(2**63), 2**64 - 1)
DOUBLES = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | INTEGERS | DOUBLES | st.text(max_size=12)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=5),
    max_leaves=25,
)


def same(left: object, right: object) -> bool:
    """Equal in types too, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def turned_round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: turned_round(value[key]) for key in reversed(value)}
    return list(map(turned_round, value)) if isinstance(value, list) else value


@given(VALUES)
def test_canonical_bytes_read_back_as_the_value(value: Any) -> None:
    written = encode(value)
    assert same(parse(written), value)
    assert encode(parse(written)) == written
    assert canonical.digest(value) == hashlib.sha256(written).digest()
    assert canonical.payload_hash(value) == hashlib.sha256(written).hexdigest()


@given(VALUES)
def test_order_of_keys_does_not_matter(value: Any) -> None:
    assert encode(turned_round(value)) == encode(value)


@given(VALUES, VALUES)
def test_different_values_have_different_bytes(left: Any, right: Any) -> None:
    assert (encode(left) == encode(right)) == same(left, right)


def test_tuples_and_states_are_written_as_what_they_hold() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    assert encode({"a": (1, (2,)), "b": Colour.RED}) == b'{"a":[1,[2]],"b":"red"}'
    assert encode({"a": (None, 1.5)}) == b'{"a":[null,1.5]}'
    assert encode({"a": uuid.UUID(int=0)}) == b'{"a":"00000000-0000-0000-0000-000000000000"}'  # type: ignore[dict-item]


# Documents: other spellings of values, and what is no document


class Spelling(NamedTuple):
    document: bytes
    value: Any
    duplicates: int


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    """One of the many texts of a value; in some of them a key occurs twice in an object."""
    value = draw(VALUES)
    doubled: list[str] = []
    text = "".join(spelled(value, draw, doubled))
    return Spelling(text.encode(), value, len(doubled))


def spelled(value: Any, draw: st.DrawFn, doubled: list[str]) -> Iterator[str]:
    space = st.sampled_from(["", "", "", " ", "\n", "\t\r "])
    yield draw(space)
    if isinstance(value, dict):
        members = list(value.items())
        if members and draw(st.integers(0, 5)) == 0:
            members.append(members[0])
            doubled.append(members[0][0])
        yield "{" + draw(space)
        for index, (key, member) in enumerate(members):
            yield from ("," * (index > 0), draw(space), spelled_string(key, draw), draw(space), ":")
            yield from spelled(member, draw, doubled)
        yield "}"
    elif isinstance(value, list):
        yield "[" + draw(space)
        for index, item in enumerate(value):
            yield "," * (index > 0)
            yield from spelled(item, draw, doubled)
        yield "]"
    elif isinstance(value, str):
        yield spelled_string(value, draw)
    elif isinstance(value, float):
        yield draw(st.sampled_from([repr(value), f"{value:.25e}", f"{value:.17E}"]))
    else:
        yield json.dumps(value)
    yield draw(space)


def spelled_string(text: str, draw: st.DrawFn) -> str:
    form = draw(st.integers(0, 2))
    if form == 0:
        return json.dumps(text, ensure_ascii=False)
    if form == 1:
        return json.dumps(text)
    units = struct.unpack(f"<{len(text.encode('utf-16-le')) // 2}H", text.encode("utf-16-le"))
    return '"' + "".join(f"\\u{unit:04{draw(st.sampled_from('xX'))}}" for unit in units) + '"'


# fmt: off
PIECES = [
    "{", "}", "[", "]", ",", ":", " ", "\n", '"', "\\", "null", "true", "-", "-0", "1", "0", ".5", "e5",
    "NaN", '"a"', '"\\u0061"', '"a":1', '"b":[]', '"\\ud800"', '"\\ud83d\\ude00"', "é", "\ufeff",
    "\x00", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1e400", "1e-400",
    "9" * 25, "[" * 130, "]" * 130, "1" * 4400,
]
# fmt: on
FRAGMENTS = st.lists(st.sampled_from(PIECES), max_size=12).map(lambda parts: "".join(parts).encode())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    document = bytearray(draw(spellings()).document)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(document)))
        document[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(document)


PAGE_CANONICAL: Canonicalise = sample()["canonical"]


HOSTILE = [
    b"[" * 200_000,
    b'{"":' * 50_000,
    b"[" + b"[" * 130 + b"]" * 130 + b',{"a":1,"a":1}]',
    b'{"a":' + b"[" * 1020 + b"]" * 1020 + b',"a":1}',
    b"9" * 5_000,
    b"[1e-" + b"9" * 5_000 + b"]",
    b'"' + b"\\n" * 500_000 + b'"',
    b"[" + b"[]," * 50_000 + b"0]",
    b'["' + b"[" * 200_000 + b'"]',
]


def refusal(document: bytes) -> str | None:
    try:
        parse(document)
    except Malformed as error:
        return str(error)
    return None


def check_agreement(document: bytes) -> bool:
    """parse raises nothing but Malformed; what it takes means the same to the page's sample and to json."""
    assert outcome(PAGE_CANONICAL, document) == outcome(through_module, document)
    text = refusal(document)
    if text is None:
        assert same(parse(document), json.loads(document))
        return True
    assert any(text.startswith(f"{words} at byte ") for words in REFUSED.values())
    assert len(text) < 200
    return False


def test_what_is_accepted_means_the_same_to_every_reader() -> None:
    accepted = dict.fromkeys((True, False), 0)

    @settings(max_examples=max(400, EXAMPLES))
    @given(
        spellings().map(lambda spelling: spelling.document) | FRAGMENTS | damaged() | st.binary(max_size=40)
    )
    def agree(document: bytes) -> None:
        accepted[check_agreement(document)] += 1

    agree()
    print(accepted)
    assert min(accepted.values()) >= 50


@pytest.mark.parametrize("document", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_documents_end_in_a_value_or_a_refusal(document: bytes) -> None:
    check_agreement(document)


def test_spelling_does_not_matter() -> None:
    seen = dict.fromkeys((True, False), 0)

    @settings(max_examples=max(200, EXAMPLES))
    @given(spellings())
    def read(spelling: Spelling) -> None:
        seen[spelling.duplicates > 0] += 1
        if spelling.duplicates:
            assert (refusal(spelling.document) or "").startswith("duplicate key at byte ")
        else:
            assert same(parse(spelling.document), spelling.value)
            assert through_module(spelling.document) == encode(spelling.value)

    read()
    print(seen)
    assert min(seen.values()) >= 5


def test_no_integer_is_converted_that_is_too_long_for_int() -> None:
    with pytest.raises(ValueError, match="4300 digits"):
        int("9" * 5_000)
    for reader in (canonical._refuse_long_integer, canonical._SECOND_READER.decode):
        with pytest.raises(Malformed, match=r"^number out of range"):
            reader("9" * 5_000)


@pytest.mark.parametrize("wrap", [bytes, memoryview, lambda data: memoryview(b"x" + data + b"x")[1:-1]])
def test_bytes_and_views_are_read_alike(wrap: Callable[[bytes], bytes | memoryview]) -> None:
    assert parse(wrap(b' {"a":[1,-0,-0.0]} ')) == {"a": [1, 0, 0.0]}
    with pytest.raises(Malformed, match="duplicate key at byte 7"):
        parse(wrap(b'{"a":1,"a":1}'))


@pytest.mark.parametrize("depth", [1, 2, 126, 127])
@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_counted_over_the_whole_document(depth: int, pair: tuple[bytes, bytes]) -> None:
    document = pair[0] * depth + b"1" + pair[1] * depth
    assert encode(parse(document, depth_max=depth)) == document
    with pytest.raises(Malformed, match=f"^nested too deep at byte {(depth - 1) * len(pair[0])}: "):
        parse(document, depth_max=depth - 1)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"", "not JSON at byte 0: "),
        (b'{"a":1', "not JSON at byte 6: "),
        ('["é",]'.encode(), "not JSON at byte 5: "),
        (b'["\xc3\xa9\xff"]', "not UTF-8 at byte 4"),
        (b"\xef\xbb\xbf{}", "byte order mark at byte 0"),
        ('["é","\\ud800"]'.encode(), "lone surrogate at byte 7"),
        ('{"é":1,"\\u00e9":2}'.encode(), 'duplicate key at byte 8: "\\u00e9"'),
        (b'{"a":{"b":1},"c":{"b":1,"b":1},"a":1}', 'duplicate key at byte 24: "b"'),
        (
            ('{"' + "k" * 100 + '":1,"' + "k" * 100 + '":1}').encode(),
            'duplicate key at byte 106: "' + "k" * 39,
        ),
        ('["é",18446744073709551616]'.encode(), "number out of range at byte 6: 18446744073709551616"),
        (b'["18446744073709551616",-9223372036854775809]', "number out of range at byte 24: -92233720368547"),
        (
            b"[18446744073709551616.0,1E-18446744073709551616,18446744073709551616]",
            "number out of range at byte 48",
        ),
        ('{"é":-1e400}'.encode(), "number out of range at byte 6"),
        (b'["' + b"[" * 9 + b'",' + b"[" * 128 + b"]" * 129, "nested too deep at byte 139: over 127 "),
        (b"[" * 5000, "nested too deep at byte 127: over 127 arrays and objects"),
    ],
)
def test_refusal_says_what_and_where(document: bytes, text: str) -> None:
    with pytest.raises(Malformed, match="^" + re.escape(text)):
        parse(document)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@dataclasses.dataclass(frozen=True)
class Record:
    field: int


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "$ is nan, which is no JSON number"),
        ({"a": [None, {"b": -math.inf}]}, "$.a[1].b is -inf, which is no JSON number"),
        ({"a": (1, (math.inf,))}, "$.a[1][0] is inf, which is no JSON number"),
        ({"a": {1: 2}}, "$.a has a key that is no string"),
        ({"a": {None: 2}}, "$.a has a key that is no string"),
        ({"a": ["b\ud800"]}, "$.a[0] holds a lone surrogate"),
        ([{"\udfff": 1}], "$[0] has a key with a lone surrogate"),
        ([2**64], "$[0] is an integer outside -2^63 .. 2^64-1"),
        ([-(2**63) - 1], "$[0] is an integer outside -2^63 .. 2^64-1"),
        (
            {"a": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)},
            "$.a is of type datetime, which is not JSON",
        ),
        ([Record(1)], "$[0] is of type Record, which is not JSON"),
        ([b"a"], "$[0] is of type bytes, which is not JSON"),
        ([{1, 2}], "$[0] is of type set, which is not JSON"),
        ([Decimal(1)], "$[0] is of type Decimal, which is not JSON"),
        ([Vector], "$[0] is of type type, which is not JSON"),
        (nested(128), "$" + "[0]" * 13 + "... is nested over 127 arrays and objects"),
        (nested(253), "$" + "[0]" * 13 + "... is nested over 127 arrays and objects"),
        (nested(2000), "$" + "[0]" * 13 + "... is nested over 127 arrays and objects"),
        (circle(), "$" + "[0]" * 13 + "... is nested over 127 arrays and objects"),
    ],
)
def test_what_has_no_canonical_form_is_refused(value: Any, text: str) -> None:
    for function in (encode, canonical.digest, canonical.payload_hash):
        with pytest.raises(Malformed, match="^" + re.escape(f"no canonical form: {text}") + "$"):
            function(value)


def test_deepest_value_is_written_and_read() -> None:
    assert encode(nested(127)) == b"[" * 127 + b"1" + b"]" * 127
    assert same(parse(encode(nested(127))), nested(127))


@given(
    st.recursive(
        SCALARS | st.floats() | st.integers() | st.binary(max_size=2) | st.characters() | st.just("\ud800"),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner)
            | st.dictionaries(
                st.text(max_size=2) | st.integers() | st.none() | st.just("\udc00"), inner, max_size=4
            )
        ),
        max_leaves=10,
    )
)
def test_encode_writes_what_parse_reads_or_refuses(value: Any) -> None:
    try:
        written = encode(value)
    except Malformed:
        with pytest.raises((TypeError, ValueError)):  # json has no strict form of it either
            strict(value)
    else:
        assert encode(parse(written)) == written
        strict(value)


def strict(value: Any) -> None:
    """Raise for what RFC 8259 with 64-bit integers cannot say."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(key)
            strict(key)
            strict(member)
    elif isinstance(value, list | tuple):
        for item in value:
            strict(item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(value)
    else:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
