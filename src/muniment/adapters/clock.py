"""The real clock and the real entropy."""

import secrets
import time
from typing import Final

SALT_BYTES: Final = 16


class SystemClock:
    """``ports.clock.Clock`` of this machine."""

    def now_us(self) -> int:
        """Wall-clock microseconds since 1970 UTC."""
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()


class SystemEntropy:
    """``ports.clock.Entropy`` of this machine."""

    def salt(self) -> bytes:
        """Sixteen bytes from the kernel."""
        return secrets.token_bytes(SALT_BYTES)
