"""Time and randomness come in by argument."""

from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now_us(self) -> int:
        """Wall-clock microseconds since 1970 UTC, for people; order never depends on it."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for waiting."""
        ...


class Entropy(Protocol):
    """Where randomness comes from."""

    def salt(self) -> bytes:
        """Sixteen unpredictable bytes."""
        ...
