"""R13: a stall is not slowness. Simulated children under the watchdog's rules, a thousand of each kind."""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

import pytest

from muniment.executor import watchdog
from muniment.executor.watchdog import Watch, heard, passed, stalled

HISTORIES: Final = 1000
STALL: Final = 10.0
TICK: Final = STALL / 20
HEARTBEAT: Final = 0.5

Judge = Callable[[Watch, float], str | None]
Step = tuple[float, int | None, bool, bool]
"""Seconds since the last tick, progress of a heartbeat (None: an answer), whether a frame came, busy."""


def ended_at(history: Iterator[Step], rules: Judge = stalled) -> float:
    """The simulated moment at which the child is ended; infinity if it never is."""
    watch, now = Watch(), 0.0
    for seconds, progress, frame, busy in history:
        now += seconds
        if frame:
            watch = heard(watch, progress)
        watch = passed(watch, seconds, tick_seconds=TICK, busy=busy)
        if rules(watch, STALL) is not None:
            return now
    return math.inf


def stands_still(random: Random, at: float, seconds: float) -> Iterator[Step]:
    """It works for a while, then its heart beats on and nothing is done any more."""
    now, progress = 0.0, 0
    while now < at + seconds:
        step = random.uniform(0.5, 1.0) * TICK
        now += step
        progress += now < at and random.random() < 0.5
        yield step, progress, random.random() < 0.9, True


def goes_silent(random: Random, at: float, seconds: float) -> Iterator[Step]:
    """Stopped, or cut off: busy or idle, no frame comes."""
    now, busy = 0.0, random.random() < 0.5
    progress = 0
    while now < at + seconds:
        step = random.uniform(0.5, 1.0) * TICK
        now += step
        progress += now < at
        yield step, progress, now < at, busy


def is_slow(random: Random, seconds: float) -> Iterator[Step]:
    """Each piece of work takes up to eight tenths of the budget; requests come and go."""
    now, progress, due = 0.0, 0, random.uniform(0.1, 0.8) * STALL
    busy = True
    while now < seconds:
        step = random.uniform(0.5, 1.0) * TICK
        now += step
        if now >= due:
            progress += 1
            due = now + random.uniform(0.1, 0.8) * STALL
            if random.random() < 0.2:
                busy = not busy
                yield step, None, True, busy
                continue
        yield step, progress, True, busy


def is_held_up(random: Random, seconds: float) -> Iterator[Step]:
    """The supervisor itself does not run now and then, for far longer than the budget."""
    for step, progress, frame, busy in is_slow(random, seconds):
        yield (step if random.random() < 0.9 else random.uniform(1.0, 30.0) * STALL), progress, frame, busy


def test_what_stands_still_is_ended_within_its_budget() -> None:
    for seed in range(HISTORIES):
        random = Random(seed)
        at = random.uniform(0.0, 5 * STALL)
        end = ended_at(stands_still(random, at, 3 * STALL))
        # The last progress may have come a little before.
        assert at - 2 * STALL < end <= at + STALL + 3 * TICK, f"seed {seed}"
        assert end >= STALL, f"seed {seed}"


def test_what_is_silent_is_ended_within_its_budget() -> None:
    for seed in range(HISTORIES):
        random = Random(seed)
        at = random.uniform(0.0, 5 * STALL)
        end = ended_at(goes_silent(random, at, 3 * STALL))
        assert at < end <= at + STALL + 2 * TICK, f"seed {seed}"


def test_what_is_slow_and_goes_on_is_never_ended() -> None:
    assert [seed for seed in range(HISTORIES) if ended_at(is_slow(Random(seed), 30 * STALL)) < math.inf] == []


def test_a_supervisor_that_was_held_up_ends_nobody() -> None:
    late = [seed for seed in range(HISTORIES) if ended_at(is_held_up(Random(seed), 20 * STALL)) < math.inf]
    assert late == []


def test_nothing_to_do_is_no_standstill() -> None:
    idle = ((TICK, 7, True, False) for _ in range(10_000))
    assert ended_at(iter(idle)) == math.inf


def test_work_that_begins_after_a_long_rest_gets_its_whole_budget() -> None:
    watch = Watch()
    for _ in range(100):
        watch = passed(heard(watch, 3), TICK, tick_seconds=TICK, busy=False)
    for _ in range(20):
        watch = passed(heard(watch, 3), TICK, tick_seconds=TICK, busy=True)
    assert stalled(watch, STALL) is None
    watch = passed(heard(watch, 3), TICK, tick_seconds=TICK, busy=True)
    assert stalled(watch, STALL) == "no progress for 10.5 seconds"


def test_a_clock_that_goes_back_counts_nothing() -> None:
    assert passed(Watch(), -5.0, tick_seconds=TICK, busy=True) == Watch()


# Controls


def never(watch: Watch, stall_seconds: float) -> str | None:
    return None


def too_soon(watch: Watch, stall_seconds: float) -> str | None:
    return stalled(watch, stall_seconds / 2)


def silence_alone(watch: Watch, stall_seconds: float) -> str | None:
    return "silent" if watch.silent_seconds > stall_seconds else None


def standstill_alone(watch: Watch, stall_seconds: float) -> str | None:
    return "still" if watch.still_seconds > stall_seconds else None


@pytest.mark.parametrize("rules", [never, silence_alone])
def test_control_a_standstill_that_is_overlooked_is_noticed(rules: Judge) -> None:
    assert ended_at(stands_still(Random(1), STALL, 3 * STALL), rules) == math.inf


@pytest.mark.parametrize("rules", [never, standstill_alone])
def test_control_a_silence_that_is_overlooked_is_noticed(rules: Judge) -> None:
    ends = [ended_at(goes_silent(Random(seed), STALL, 3 * STALL), rules) for seed in range(20)]
    assert math.inf in ends


def test_control_a_budget_that_is_too_short_ends_the_slow() -> None:
    assert any(ended_at(is_slow(Random(seed), 30 * STALL), too_soon) < math.inf for seed in range(20))


def test_control_time_that_counts_in_full_ends_children_of_a_supervisor_that_was_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_full(watch: Watch, seconds: float, *, tick_seconds: float, busy: bool) -> Watch:
        return Watch(
            silent_seconds=watch.silent_seconds + seconds,
            still_seconds=watch.still_seconds + seconds if busy else 0.0,
            progress=watch.progress,
        )

    monkeypatch.setattr(watchdog, "passed", in_full)
    monkeypatch.setitem(globals(), "passed", in_full)
    assert any(ended_at(is_held_up(Random(seed), 20 * STALL)) < math.inf for seed in range(20))
