"""When to try again: the pause after a failure, and how long patience lasts."""

import random
import time
from typing import Final

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0


def pause_seconds(failures: int, advised_seconds: float | None, chance: float) -> float:
    """The pause after the n-th failure in a row (from 1), in seconds.

    The server's advice (``Retry-After``) is followed; without it the pause doubles up to 2 s. ``chance`` from
    0 to 1 spreads clients that failed together over half of the pause.
    """
    if advised_seconds is not None:
        return advised_seconds * (1 + chance / 2)
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + chance / 2)


def advised_seconds(header: str | None) -> float | None:
    """``Retry-After`` in seconds; None where it is absent or a date, since clocks differ."""
    if header is None or not header.strip().isdecimal():
        return None
    return float(header)


class Patience:
    """Sleeps between tries until no progress was made for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.progress()

    def progress(self) -> None:
        """Start again: something was heard."""
        self._failures = 0
        self._over = time.monotonic() + self._seconds

    def pause(self, advised: float | None = None) -> bool:
        """Sleep before the next try. False, without sleeping, where the next try would come too late."""
        self._failures += 1
        pause = pause_seconds(self._failures, advised, random.random())  # noqa: S311 - spreads load only
        if time.monotonic() + pause > self._over:
            return False
        time.sleep(pause)
        return True
