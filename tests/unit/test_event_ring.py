"""The ring of an operation's newest events: whoever asks, from whatever place, misses and repeats nothing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muniment.core import event_ring
from muniment.core.event_ring import EventRing, Frame, Place, Slice

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("event"), st.integers(1, 40)),
        st.tuples(st.just("event that the ring is not told of"), st.just(0)),
        st.tuples(st.just("the same event again"), st.just(0)),
        st.tuples(st.just("shrink"), st.integers(0, 200)),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.just("come"), st.integers(0, 30)),
    ),
    max_size=60,
)


def frame(sequence: int, size: int, *, ends: bool = False) -> Frame:
    return Frame(sequence, ends, b"%d:" % sequence + b"x" * size + b"\n")


class World:
    """A ledger that holds every event, the ring, and followers who read now and then."""

    def __init__(self, ring: type[EventRing]) -> None:
        self.ring = ring()
        self.stored: list[Frame] = [frame(1, 3)]
        self.followers: list[tuple[int, list[bytes]]] = []
        """Where each began, and what it has had since."""
        self.places: list[int] = []
        self.backfills = 0

    def happens(self, what: str, value: int) -> None:
        if what.startswith("event"):
            self.stored.append(frame(len(self.stored) + 1, value))
        if what in ("event", "the same event again"):
            self.ring.append(self.stored[-1])
        elif what == "shrink":
            self.ring.shrink(value)
        elif what == "come":
            self.come(value)
        elif what == "read" and self.places:
            self.read(value % len(self.places))

    def come(self, after: int) -> None:
        """As the server does: read the ledger to its end, and only then the ring."""
        self.followers.append((after, [each.data for each in self.stored[after:]]))
        self.places.append(max(after, len(self.stored)))

    def read(self, number: int) -> bool:
        """Take one slice; false where there is none."""
        place = self.places[number]
        found = self.ring.after(place)
        if found is Place.BEHIND:
            self.backfills += 1
            found = Slice(b"".join(each.data for each in self.stored[place:]), len(self.stored), ends=False)
            assert found.data, "the ledger has nothing that the ring has not"
        if not isinstance(found, Slice):
            return False
        self.followers[number][1].append(found.data)
        self.places[number] = found.last
        return True

    def end(self) -> None:
        """The last event, and everybody reads up to it."""
        self.stored.append(frame(len(self.stored) + 1, 5, ends=True))
        self.ring.append(self.stored[-1])
        for number, (after, had) in enumerate(self.followers):
            for _ in range(200):
                if not self.read(number):
                    break
            assert b"".join(had) == b"".join(each.data for each in self.stored[after:]), f"after {after}"
            assert self.ring.after(self.places[number]) is Place.ENDED


def run(steps: list[tuple[str, int]], ring: type[EventRing] = EventRing) -> World:
    world = World(ring)
    for what, value in steps:
        world.happens(what, value)
        kept = sum(len(each) for each in world.ring._frames)
        assert world.ring.byte_count == kept
        if what == "shrink":
            assert kept <= value or len(world.ring._frames) == 1
    world.end()
    return world


@settings(max_examples=300)
@given(STEPS, st.integers(1, 100))
def test_no_order_of_events_and_reads_loses_or_repeats_one(steps: list[tuple[str, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_ring, "SLICE_BYTES_MAX", most)
        run(steps)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 200))
def test_a_slice_is_as_long_as_it_may_be(sizes: list[int], place: int, most: int) -> None:
    ring = EventRing()
    frames = [frame(number, size) for number, size in enumerate(sizes, start=1)]
    for each in frames:
        ring.append(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_ring, "SLICE_BYTES_MAX", most)
        found = ring.after(place)
    if place >= len(frames):
        assert found is Place.LATEST
        return
    assert isinstance(found, Slice)
    assert len(found.data) <= most or found.last == place + 1
    assert found.last == len(frames) or len(found.data) + len(frames[found.last].data) > most
    assert not found.ends


def test_those_at_one_place_get_the_same_bytes() -> None:
    ring = EventRing()
    ring.append(frame(5, 10))
    ring.append(frame(6, 10, ends=True))
    first, second = ring.after(4), ring.after(4)
    assert first is second
    assert first == Slice(frame(5, 10).data + frame(6, 10).data, 6, ends=True)
    assert ring.after(5) == Slice(frame(6, 10).data, 6, ends=True)
    assert ring.after(3) is Place.BEHIND
    assert ring.after(6) is Place.ENDED
    assert ring.after(2**64) is Place.ENDED


def test_what_was_given_is_not_given_again_once_more_has_come() -> None:
    ring = EventRing()
    ring.append(frame(1, 10))
    assert ring.after(0) == Slice(frame(1, 10).data, 1, ends=False)
    ring.append(frame(2, 10))
    assert ring.after(0) == Slice(frame(1, 10).data + frame(2, 10).data, 2, ends=False)
    ring.append(frame(3, 10))
    ring.append(frame(5, 10))
    assert ring.after(4) == Slice(frame(5, 10).data, 5, ends=False)
    assert ring.after(3) is Place.BEHIND


# Controls: rings with a planted fault, which the same steps must find.


class BeginsOneLate(EventRing):
    """Off by one where a follower resumes."""

    def after(self, position: int) -> Slice | Place:
        return super().after(position + 1)


class SkipsWhatIsDropped(EventRing):
    """Gives what it still has to one that is behind."""

    def after(self, position: int) -> Slice | Place:
        return super().after(max(position, self._first - 1))


class MindsNoGap(EventRing):
    """Takes whatever comes for the next one."""

    def append(self, frame: Frame) -> None:
        super().append(Frame(self._first + len(self._frames), frame.ends, frame.data))


class Repeats(EventRing):
    """Takes an event that it has for a new one."""

    def append(self, frame: Frame) -> None:
        self._frames.append(frame.data)
        self.byte_count += len(frame.data)


class ForgetsTheEnd(EventRing):
    """Never says that nothing will follow."""

    def after(self, position: int) -> Slice | Place:
        found: Any = super().after(position)
        return Place.LATEST if found is Place.ENDED else found


STORY = [
    ("come", 0),
    ("event", 5),
    ("event", 5),
    ("read", 0),
    ("the same event again", 0),
    ("event that the ring is not told of", 0),
    ("event", 5),
    ("come", 2),
    ("read", 0),
    ("event", 5),
    ("event", 5),
    ("shrink", 10),
    ("event", 5),
    ("read", 1),
]


def test_the_story_of_the_controls_is_one_without_fault() -> None:
    assert run(STORY).backfills == 3


@pytest.mark.parametrize("mutant", [BeginsOneLate, SkipsWhatIsDropped, MindsNoGap, Repeats, ForgetsTheEnd])
def test_control_a_broken_ring_is_noticed(mutant: type[EventRing]) -> None:
    with pytest.raises(AssertionError):
        run(STORY, mutant)
