"""What is given back is what was sent, byte for byte: scripts, odd characters, long texts; the real model."""

import hashlib
import random
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

from muniment import wiring
from tests.support.live import OPERATIONS, patched
from tests.support.seed_contract import ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory

RECALL: Final = "/api/v2/recall"
SCRIPTS_MIN: Final = 20
LONG_BYTES: Final = 200_000
LONG_PARTS_MIN: Final = 200
LONG_WORDS: Final = (
    "international development particularly government responsible environment information communication "
    "experience university competition administration professional performance traditional manufacturing "
    "considered department significant independent organization construction immediately association"
)
PLANTED: Final = "The blue kettle on the windowsill belongs to Marguerite."

# Written for this test: a boat leaves at seven, or a greeting, or the language's own name.
SCRIPTS: Final[Mapping[str, str]] = {
    "Latin": "Le bateau part à sept heures ; la mer est calme, dit Æthelred à Łukasz.",
    "Cyrillic": "Лодка отходит в семь часов, и море спокойно.",
    "Greek": "Το πλοίο φεύγει στις επτά και η θάλασσα είναι ήρεμη.",
    "Armenian": "Նավը մեկնում է ժամը յոթին։",
    "Georgian": "ნავი შვიდ საათზე გადის, ზღვა წყნარია.",
    "Hebrew": "הספינה יוצאת בשעה שבע והים רגוע.",
    "Arabic": "تغادر السفينة في الساعة السابعة والبحر هادئ.",
    "Syriac": "ܫܠܡܐ ܠܟܘܢ",
    "Thaana": "ދިވެހި ބަސް",
    "Devanagari": "नाव सात बजे निकलती है और समुद्र शांत है।",
    "Bengali": "নৌকা সাতটায় ছাড়ে এবং সমুদ্র শান্ত।",
    "Gurmukhi": "ਕਿਸ਼ਤੀ ਸੱਤ ਵਜੇ ਚੱਲਦੀ ਹੈ।",
    "Gujarati": "હોડી સાત વાગ્યે નીકળે છે.",
    "Oriya": "ଡଙ୍ଗା ସାତଟାରେ ଛାଡ଼େ।",
    "Tamil": "படகு ஏழு மணிக்குப் புறப்படுகிறது.",
    "Telugu": "పడవ ఏడు గంటలకు బయలుదేరుతుంది.",
    "Kannada": "ದೋಣಿ ಏಳು ಗಂಟೆಗೆ ಹೊರಡುತ್ತದೆ.",
    "Malayalam": "ബോട്ട് ഏഴ് മണിക്ക് പുറപ്പെടുന്നു.",
    "Sinhala": "බෝට්ටුව හතට පිටත් වේ.",
    "Thai": "เรือออกเจ็ดโมงเช้าและทะเลสงบ",
    "Lao": "ເຮືອອອກເຈັດໂມງ",
    "Khmer": "ទូកចេញដំណើរម៉ោងប្រាំពីរ។",
    "Myanmar": "လှေသည် ခုနစ်နာရီတွင် ထွက်သည်။",
    "Tibetan": "བཀྲ་ཤིས་བདེ་ལེགས།",
    "Mongolian": "ᠮᠣᠩᠭᠣᠯ ᠬᠡᠯᠡ",
    "Ethiopic": "ጀልባው በሰባት ሰዓት ይነሳል።",
    "Cherokee": "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
    "Canadian": "ᐃᓄᒃᑎᑐᑦ",
    "Tifinagh": "ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "Nko": "ߒߞߏ",
    "Runic": "ᚠᚢᚦᚨᚱᚲ",
    "Gothic": "𐌲𐌿𐍄𐌹𐍃𐌺",
    "Hiragana": "ふねは しちじに でます。うみは しずかです。",
    "Katakana": "フェリーハ シチジニ デマス。",
    "Cjk": "船七点开，海很平静。",
    "Hangul": "배는 일곱 시에 떠나고 바다는 잔잔합니다.",
}
ODD: Final[Mapping[str, str]] = {
    "joined emoji": "👨‍👩‍👧‍👦 and 👩🏽‍🚀 fly 🏴‍☠️, 🏳️‍🌈, ❤️‍🔥, 1️⃣, 🇫🇷🇯🇵; " * 9,
    "one emoji": "👩🏽‍🚀",
    "nul": "before\0after\0\0end\0",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f visible",
    "right to left": "\u202bשלום\u202c \u2067عربي 123\u2069 abc\u200f. \u202egnorw\u202c",
    "combining marks": "Vi\u0302\u0323t Nam e\u0301 \u00e9 \u212b A\u030a a"
    + "\u0300\u0323\u0334\u0489" * 200,
    "hangul, composed and not": "\ud55c\uae00 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "no space in 100 KB": "".join(
        random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=100_000)
    ),
    "no space, many tokens": "漢字" * 1500,
    "a lone full stop": ".",
    "lone punctuation": "?!",
    "a dash": "\u2014",
    "a full stop of another script": "。",
    "rows of punctuation": "..." * 300 + "!?" * 200,
    "a very long line": "the ferry leaves at seven and " * 700,
    "crlf": "first line\r\nsecond line\r\n\r\nthird\rfourth\n\nfifth\r\n",
    "unusual line ends": "a\x0bb\x0cc\x85d\u2028e\u2029f",
    "spaces at both ends": " \t\n  padded \u00a0\u3000\u2003 text \ufeff\n\n\t ",
    "a byte order mark": "\ufeffmarked",
    "invisible": "zero\u200bwidth\u200cnon\u200djoiner\u2060 and soft\u00adhyphen, tag \U000e0041\U000e007f",
    "noncharacters": "\ufffe \uffff \ufdd0 \U0010ffff \ufffd",
    "private use": "\ue000 \U000f0000 \U00100000",
    "escapes": '\\u0041 \\n "quoted" \\ / <script>&amp;</script> %00 ${x} {{y}}',
    "one letter": "x",
}


def complaints(content: str, receipt: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Where a memory is not exactly what was sent."""
    data, parts = content.encode(), kept["parts"]
    windows = [data[part["byte_start"] : part["byte_end"]] for part in parts]
    held = {
        "content": kept["content"] == content and kept["content"].encode() == data,
        "byte_count": kept["byte_count"] == len(data),
        "content_sha256": kept["content_sha256"] == hashlib.sha256(data).hexdigest(),
        "part count": len(parts) == receipt["result"]["parts"],
        "token count": kept["token_count"] == receipt["result"]["token_count"] == parts[-1]["token_end"],
        "part indexes": [part["index"] for part in parts] == list(range(len(parts))),
        "all bytes once": _follow(parts, "byte_start", "byte_end") == len(data),
        "all tokens once": _follow(parts, "token_start", "token_end") == kept["token_count"],
        "part content": [part["content"].encode() for part in parts] == windows,
        "parts together": "".join(part["content"] for part in parts) == content,
        "part hashes": [part["content_sha256"] for part in parts]
        == [hashlib.sha256(window).hexdigest() for window in windows],
        "embedded": {part["embedding_state"] for part in parts} == {"indexed"},
    }
    return [name for name, holds in held.items() if not holds]


def _follow(parts: list[dict[str, Any]], start: str, end: str) -> int | None:
    """The end of the last part, if each begins where the one before ends."""
    edges = list(chain.from_iterable((part[start], part[end]) for part in parts))
    return edges[-1] if edges[0] == 0 and edges[1:-1:2] == edges[2::2] else None


def remember(client: ContractClient, texts: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """Submit each text under its name as its session; return receipt and memory of each."""
    for name, text in texts.items():
        assert client.post(OPERATIONS, json=memory(name, text, session_id=name)).status_code == 202, name
    found = {}
    for name in texts:
        with client.following(operation_path(name, "/events")) as followed:
            followed.read()
        receipt = client.get(operation_path(name)).json()
        assert receipt["state"] == "committed", receipt
        found[name] = receipt, client.get(f"/api/v2/memories/{receipt['result']['id']}").json()
    return found


def wrong(texts: Mapping[str, str], found: Mapping[str, tuple[Any, Any]]) -> dict[str, list[str]]:
    return {name: said for name, text in texts.items() if (said := complaints(text, *found[name]))}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContractClient]:
    """A server with the real model; when all is done, its store is verified."""
    directory = tmp_path_factory.mktemp("texts") / "store"
    with Server(directory, embedder="bundled") as server:
        server.wait_ready("search_ready")
        with ContractClient(server.url, timeout=120) as client:
            yield client
        server.terminate()
    assert wiring.check(directory).findings == ()


def test_every_script_is_kept_and_recalled(real: ContractClient) -> None:
    named = {
        unicodedata.name(next(filter(str.isalpha, text))).split()[0].split("-")[0].capitalize()
        for text in SCRIPTS.values()
    }
    assert named == SCRIPTS.keys()
    assert len(named) >= SCRIPTS_MIN
    found = remember(real, SCRIPTS)

    assert wrong(SCRIPTS, found) == {}
    for name, text in SCRIPTS.items():
        # Many of these letters are unknown to the model, so the question is asked within the session.
        asked = {"query": text, "session_id": name, "limit": 1}
        [hit] = real.post(RECALL, json=asked).json()["results"]
        assert (hit["id"], hit["text"]) == (found[name][1]["id"], text)


def test_odd_texts_are_kept(real: ContractClient) -> None:
    assert wrong(ODD, remember(real, ODD)) == {}


def long_text() -> str:
    """English-like sentences of long words, so that the bytes are many and the tokens are few."""
    dice, words = random.Random(200), LONG_WORDS.split()
    sentences: list[str] = []
    length = 0
    while length < LONG_BYTES:
        sentences.append(" ".join(dice.choices(words, k=dice.randint(5, 14))).capitalize() + ". ")
        length += len(sentences[-1])
    return "".join(sentences) + PLANTED


def test_a_long_text_is_kept_and_its_last_sentence_is_recalled_first(real: ContractClient) -> None:
    text = long_text()
    found = remember(real, {"long": text})
    kept = found["long"][1]
    asked = {"query": "Whose is the blue kettle on the windowsill?", "limit": 5}
    results = real.post(RECALL, json=asked).json()["results"]

    assert len(text.encode()) > LONG_BYTES
    assert wrong({"long": text}, found) == {}
    assert len(kept["parts"]) >= LONG_PARTS_MIN
    assert (results[0]["id"], results[0]["part_index"]) == (kept["id"], len(kept["parts"]) - 1)
    assert results[0]["text"].endswith(PLANTED)
    for hit in results:
        source = real.get(f"/api/v2/memories/{hit['id']}").json()["content"].encode()
        assert source[hit["span"]["start"] : hit["span"]["end"]] == hit["text"].encode()


# Controls: servers that change what they keep.

COMPOSES: Final = """
import unicodedata
from muniment.core import payloads
divide = payloads.divide

def composing(payload):
    return divide({**payload, "content": unicodedata.normalize("NFC", payload["content"])})

payloads.divide = composing
"""
CHANGES_LINE_ENDS: Final = """
from muniment.core import payloads
divide = payloads.divide

def changing(payload):
    return divide({**payload, "content": "\\n".join(payload["content"].splitlines())})

payloads.divide = changing
"""


@pytest.mark.parametrize(
    ("code", "noticed"),
    [
        (COMPOSES, {"combining marks", "hangul, composed and not"}),
        (CHANGES_LINE_ENDS, {"crlf", "unusual line ends", "controls"}),
    ],
    ids=["composes characters", "changes line ends"],
)
def test_control_a_server_that_changes_a_text_is_noticed(
    tmp_path: Path, code: str, noticed: set[str]
) -> None:
    texts = {name: text for name, text in ODD.items() if len(text) < 2000}
    with Server(tmp_path / "store", environ=patched(tmp_path / "patch", code)) as server:
        server.wait_ready("search_ready")
        with ContractClient(server.url) as client:
            assert wrong(texts, remember(client, texts)).keys() == noticed
