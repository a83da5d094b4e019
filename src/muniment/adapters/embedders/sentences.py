"""Sentence boundaries: split at line ends, then ``sentencex`` on each line, in the language of its script."""

import re
from collections.abc import Iterator
from typing import Final

import sentencex

from muniment.ports.embedder import Advance, unobserved

BLOCK_CODE_POINTS_MAX: Final = 1024
"""Most code points handed to ``sentencex`` at once. On non-ASCII text its time grows with length x sentences
(90,000 code points of Japanese in one line: 4 s), in blocks of this size with length alone."""

LINE: Final = re.compile(
    r"[^\r\n\v\f\x1c-\x1e\x85\u2028\u2029]*(?:\r\n|[\r\n\v\f\x1c-\x1e\x85\u2028\u2029])?"
)

SCRIPTS: Final = {
    "ja": re.compile(r"[\u3040-\u30ff]"),  # kana; looked at first, since Japanese also has Han letters
    "zh": re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "ko": re.compile(r"[\u1100-\u11ff\uac00-\ud7af]"),
    "ar": re.compile(r"[\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff]"),
    "he": re.compile(r"[\u0590-\u05ff]"),
    "hi": re.compile(r"[\u0900-\u097f]"),
    "bn": re.compile(r"[\u0980-\u09ff]"),
    "ta": re.compile(r"[\u0b80-\u0bff]"),
    "te": re.compile(r"[\u0c00-\u0c7f]"),
    "th": re.compile(r"[\u0e00-\u0e7f]"),
    "hy": re.compile(r"[\u0530-\u058f]"),
    "ka": re.compile(r"[\u10a0-\u10ff]"),
    "am": re.compile(r"[\u1200-\u137f]"),
    "el": re.compile(r"[\u0370-\u03ff]"),
    "ru": re.compile(r"[\u0400-\u052f]"),
}
LATIN: Final = re.compile(r"[A-Za-z\u00c0-\u024f]")


def language(text: str) -> str:
    """The language of the script with most letters in the text; ``en`` for Latin script, ties and no letters.

    A guess by script cannot tell Spanish from English: the abbreviations of English are used for both.
    """
    if text.isascii():
        return "en"
    counts = {code: len(letters.findall(text)) for code, letters in SCRIPTS.items()}
    if counts["ja"]:
        counts["ja"] += counts.pop("zh")
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > len(LATIN.findall(text)) else "en"


def sentence_starts(text: str, advance: Advance = unobserved) -> list[int]:
    """Code point offsets at which sentences begin, rising, the first one (0) left out."""
    return [at for start, line in _lines(text) for at in _starts_in_line(start, line, advance)][1:]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for match in LINE.finditer(text):
        if match.end() > match.start():
            yield match.start(), match.group()


def _starts_in_line(start: int, line: str, advance: Advance) -> Iterator[int]:
    """Sentence starts of one line, its own first; long lines go through in blocks.

    The last sentence of a block may continue behind it, so the next block begins where that one does. A block
    that is one sentence is left at its last space instead, and no boundary is claimed there.
    """
    yield start
    at = 0
    while at < len(line):
        block = line[at : at + BLOCK_CODE_POINTS_MAX]
        found = [
            sentence["start_index"] for sentence in sentencex.get_sentence_boundaries(language(block), block)
        ]
        advance()
        inner = [offset for offset in found if offset > 0]
        yield from (start + at + offset for offset in inner)
        if at + len(block) == len(line):
            return
        at += inner[-1] if inner else _last_space(block)


def _last_space(block: str) -> int:
    """Where to leave a block without a boundary: behind the last space of its second half, or at its end."""
    for index in range(len(block) - 1, len(block) // 2, -1):
        if block[index].isspace():
            return index + 1
    return len(block)
