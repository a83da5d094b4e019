r"""What a command prints: answers to stdout, everything about the way there to stderr.

Stored text is foreign text. It never reaches a terminal raw: control characters, terminal escapes among
them, are shown as ``\x1b`` or ``\u202e``, and nothing in it is read as markup.
"""

import os
import re
import sys
from typing import Any, Final, TextIO

import msgspec

from muniment.errors import MunimentError

# C0 without tab and the two ends of a line, DEL, C1, and what reorders or hides text: bidirectional controls,
# zero width characters, line and paragraph separators, tags, lone surrogates.
_UNSAFE: Final = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


class OutputClosedError(Exception):
    """Whoever read stdout stopped reading."""


class OutputFailedError(MunimentError):
    """The output could not be written, such as to a full disk."""


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe(text: str) -> str:
    """``text`` with everything escaped that could steer a terminal. Ends of lines and tabs stay."""
    return _UNSAFE.sub(_escaped, text)


def safe_line(text: str) -> str:
    """As ``safe``, in one line: ends of lines and tabs are escaped too."""
    return safe(text).replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def prepare_streams() -> None:
    """Let characters that the terminal's encoding lacks come out escaped instead of ending the command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Python's form of a descriptor that was closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _write(stream: TextIO, line: str) -> None:
    try:
        stream.write(line + "\n")
        stream.flush()
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return OutputClosedError()
    return OutputFailedError(f"cannot write the output: {error.strerror}")


def say(line: str = "") -> None:
    """Print one line (or block) of the answer. Text from a store goes through ``safe`` first."""
    _write(sys.stdout, line)


def say_bytes(data: bytes) -> None:
    """Print ``data`` as it is, for a file or a pipe."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise _unwritten(error) from error


def say_json(value: Any) -> None:
    """Print ``value`` as one indented JSON document, in which nothing can steer a terminal either."""
    say(json_text(value, indent=2))


def json_text(value: Any, indent: int = -1) -> str:
    """``value`` as JSON, in one line unless indented; what ``safe`` escapes has the escapes of JSON."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return _UNSAFE.sub(_json_escaped, text)


def _json_escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def note(line: str) -> None:
    """Tell the user something that is not the answer."""
    _write(sys.stderr, line)


def fail(text: str) -> None:
    """Print why the command fails, as one line."""
    note(f"muniment: {safe_line(text)}")


def leave_quietly() -> None:
    """Point stdout at nothing, so that flushing it at exit cannot fail on a reader that went away."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
