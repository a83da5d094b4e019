"""Strict percent-decoding: bytes of a URL mean one text or are refused, never guessed at (ADR 0009)."""

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from muniment.errors import InvalidField

_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def decoded(raw: bytes, where: str) -> str:
    """Return the text behind ``raw``. Raises ``InvalidField(where)`` for a bad escape or other than UTF-8."""
    if b"%" in raw:
        bad = _BAD_ESCAPE.search(raw)
        if bad is not None:
            raise InvalidField(where, f"has a % without two hex digits at byte {bad.start()}")
        raw = unquote_to_bytes(raw)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(where, f"is not UTF-8 at byte {error.start} after percent-decoding") from None
