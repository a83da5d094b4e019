"""Exit codes. They tell the truth about what was asked for, so that a script need not read the output."""

from typing import Final

from muniment.errors import (
    ConfigError,
    Conflict,
    MunimentError,
    NotFound,
    RefusedStart,
    RequestError,
    Unavailable,
)

DONE: Final = 0
"""What was asked for has happened; for a write: it is committed (with ``--no-wait``: accepted)."""

FAILED: Final = 1
"""The answer is no: rejected, the ID belongs to other content, ``check`` found something; or a fault."""

WRONG: Final = 2
"""The command line, a setting or the request is wrong; nothing was stored."""

REFUSED: Final = 3
"""The server refuses to start on this directory: owned by another, too new, corrupt, another model."""

NOT_FOUND: Final = 4
"""No such operation, memory or task stream."""

OPEN: Final = 5
"""No server answers, or the outcome is not known yet. The ID and the command that asks for it are printed."""

INTERRUPTED: Final = 130
"""Ended by Ctrl-C; the ID, where there is one, is printed."""

CLOSED: Final = 141
"""Whoever read the output stopped reading, as of a program that SIGPIPE ended."""

TAKEN: Final = 10
"""Of a temporary server alone: the directory has another owner by now, to which the command attaches."""


class TemporaryServerFailed(MunimentError):
    """The server that a command started for itself did not start; ``code`` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


_CODES: Final[tuple[tuple[type[MunimentError], int], ...]] = (
    (ConfigError, WRONG),
    (RefusedStart, REFUSED),
    (RequestError, WRONG),
    (NotFound, NOT_FOUND),
    (Conflict, FAILED),
    (Unavailable, OPEN),
)


def code_of(error: MunimentError) -> int:
    """The exit code that says what ``error`` says."""
    if isinstance(error, TemporaryServerFailed):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
