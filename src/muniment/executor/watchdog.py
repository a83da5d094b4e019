"""The watchdog over one child: work that stands still is told from work that is slow (ADR 0019).

Pure: times go in, a verdict comes out. A heartbeat says that the process lives; only a rising count of done
work, or an answer, is progress. While a child starts nothing is judged: it cannot speak yet, and has a budget
of its own. Time counts only as far as the supervisor was awake for it: one that slept, or was held up, has
not seen the frames that came meanwhile.
"""

import msgspec


class Watch(msgspec.Struct, frozen=True):
    """What was seen of a child that is ready."""

    silent_seconds: float = 0.0
    """Since its last frame."""
    still_seconds: float = 0.0
    """Since its last progress on what it has to do; 0 while it has nothing to do."""
    progress: int = 0


def heard(watch: Watch, progress: int | None) -> Watch:
    """A frame came: a heartbeat with its count of done work, or with None an answer, which is progress."""
    if progress is None:
        return Watch(progress=watch.progress)
    if progress > watch.progress:
        return Watch(progress=progress)
    return Watch(still_seconds=watch.still_seconds, progress=watch.progress)


def passed(watch: Watch, seconds: float, *, tick_seconds: float, busy: bool) -> Watch:
    """Time has passed; of one tick at most its length counts."""
    counted = min(max(seconds, 0.0), tick_seconds)
    return Watch(
        silent_seconds=watch.silent_seconds + counted,
        still_seconds=watch.still_seconds + counted if busy else 0.0,
        progress=watch.progress,
    )


def stalled(watch: Watch, stall_seconds: float) -> str | None:
    """Why the child is to be ended now; None while it is not."""
    if watch.silent_seconds > stall_seconds:
        return f"no sign of life for {watch.silent_seconds:.1f} seconds"
    if watch.still_seconds > stall_seconds:
        return f"no progress for {watch.still_seconds:.1f} seconds"
    return None
