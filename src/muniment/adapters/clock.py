"""The real clock and the real entropy."""

import secrets
import time
from collections import deque
from typing import Final

SALT_BYTES: Final = 16
SALTS_AT_ONCE: Final = 256


class SystemClock:
    """``ports.clock.Clock`` of this machine."""

    def now_us(self) -> int:
        """Wall-clock microseconds since 1970 UTC."""
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()


class SystemEntropy:
    """``ports.clock.Entropy`` of this machine.

    Asking the kernel lets go of the interpreter's lock, which a busy ledger then holds for a while: so it is
    asked for many salts at once. None is ever given twice.
    """

    def __init__(self) -> None:
        self._ready: deque[bytes] = deque()

    def salt(self) -> bytes:
        """Sixteen bytes from the kernel."""
        try:
            return self._ready.popleft()
        except IndexError:
            fresh = secrets.token_bytes(SALT_BYTES * SALTS_AT_ONCE)
            salts = [fresh[first : first + SALT_BYTES] for first in range(0, len(fresh), SALT_BYTES)]
            self._ready.extend(salts[1:])
            return salts[0]
