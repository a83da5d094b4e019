"""The NumPy device gives what a scan in integers gives: same rows, same order, every filter, at any time."""

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from muniment.adapters.devices import numpy_device
from muniment.adapters.devices.numpy_device import EVER_US, ROWS_MIN, NumpyDevice
from muniment.core.scoring import SCALE
from muniment.errors import InvariantBroken, SearchUnavailable
from muniment.ports.device import Eligible, Hit, MemoryDelta

WORLDS: Final = 200  # Each under a dozen filters and four limits.
NAMES: Final = (None, "ann", "bob")
CATEGORIES: Final = ("work", "home", "garden")
TIMES: Final = (None, 10, 20)

Floats = NDArray[np.float32]


def unit(rows: NDArray[Any]) -> Floats:
    wide = rows.astype(np.float64)
    scaled: Floats = (wide / np.linalg.norm(wide, axis=-1, keepdims=True)).astype(np.float32)
    return scaled


def delta(number: int, vectors: Floats, **columns: Any) -> MemoryDelta:
    fields: dict[str, Any] = {
        "key": f"memory:{number:06d}",
        "owner": None,
        "agent": None,
        "session": None,
        "categories": (),
        "expires_us": None,
    }
    return MemoryDelta(
        object=number,
        dimensions=vectors.shape[1],
        vectors=vectors.astype("<f4").tobytes(),
        **fields | columns,
    )


def integers(data: bytes) -> list[int]:
    return [round(value * SCALE) for value in np.frombuffer(data, dtype="<f4").tolist()]


def hit(memory: MemoryDelta, query: Sequence[int]) -> Hit:
    """The best part of a memory, the first of equals, in Python integers."""
    values, wide = integers(memory.vectors), memory.dimensions
    scores = [
        sum(x * q for x, q in zip(values[start : start + wide], query, strict=True))
        for start in range(0, len(values), wide)
    ]
    best = max(scores)
    return Hit(object=memory.object, key=memory.key, part_index=scores.index(best), score=best)


def passes(memory: MemoryDelta, eligible: Eligible) -> bool:
    return (
        eligible.owner in (None, memory.owner)
        and eligible.agent in (None, memory.agent)
        and eligible.session in (None, memory.session)
        and (not eligible.categories or bool(set(eligible.categories) & set(memory.categories)))
        and (memory.expires_us is None or memory.expires_us > eligible.as_of_us)
    )


def oracle(world: Sequence[MemoryDelta], query: bytes, eligible: Eligible, limit: int) -> tuple[Hit, ...]:
    wanted = integers(query)
    hits = [hit(memory, wanted) for memory in world if passes(memory, eligible)]
    return tuple(sorted(hits, key=lambda each: (-each.score, each.key))[:limit])


def random_world(chance: np.random.Generator) -> list[MemoryDelta]:
    """Few different vectors, so that equal and nearly equal scores are common."""
    wide = int(chance.choice([2, 8, 32]))
    pool = unit(chance.standard_normal((6, wide)))
    near = unit(pool + chance.standard_normal(pool.shape) * 1e-5)
    vectors = np.concatenate([pool, near])
    numbers = chance.permutation(100)[: int(chance.integers(1, 25))]
    return [
        delta(
            int(number),
            vectors[chance.integers(0, len(vectors), size=int(chance.integers(1, 4)))],
            owner=NAMES[chance.integers(3)],
            agent=NAMES[chance.integers(3)],
            session=NAMES[chance.integers(3)],
            categories=tuple(name for name in CATEGORIES if chance.random() < 0.4),
            expires_us=TIMES[chance.integers(3)],
        )
        for number in numbers
    ]


def filters(chance: np.random.Generator) -> Iterator[Eligible]:
    yield Eligible(as_of_us=EVER_US)
    for as_of in (9, 10, 20):
        yield Eligible(as_of_us=as_of)
    for name in ("ann", "nobody"):
        yield Eligible(owner=name, as_of_us=0)
        yield Eligible(agent=name, as_of_us=0)
        yield Eligible(session=name, as_of_us=0)
    for categories in ((), ("work",), ("work", "garden"), ("work", "unheard"), ("unheard",)):
        yield Eligible(categories=categories, as_of_us=0)
    yield Eligible(
        owner="ann" if chance.random() < 0.5 else None,
        agent="bob" if chance.random() < 0.5 else None,
        session="ann",
        categories=("home",),
        as_of_us=int(chance.integers(0, 21)),
    )


def test_random_worlds_are_searched_as_in_integers() -> None:
    ties = cut = compared = 0
    for seed in range(WORLDS):
        chance = np.random.default_rng(seed)
        world = random_world(chance)
        device = NumpyDevice()
        for batch in _batches(world, 7):
            device.apply(batch, batch[-1].object)
        wide = world[0].dimensions
        for eligible in filters(chance):
            own = np.frombuffer(world[chance.integers(len(world))].vectors, dtype="<f4")[:wide]
            query = (own if chance.random() < 0.5 else unit(chance.standard_normal(wide))).tobytes()
            everything = oracle(world, query, eligible, len(world))
            ties += any(one.score == two.score for one, two in itertools.pairwise(everything))
            for limit in (1, 3, len(world), 1000):
                found = device.search(query, eligible, limit)
                assert found == everything[:limit], (seed, eligible, limit)
                compared += bool(found)
                cut += len(found) < len(everything)
    assert min(ties, cut) > WORLDS, (ties, cut, compared)


def _batches(world: Sequence[MemoryDelta], size: int) -> Iterator[Sequence[MemoryDelta]]:
    for start in range(0, len(world), size):
        yield world[start : start + size]


# The margin


def world_where_float32_misleads() -> tuple[list[MemoryDelta], bytes]:
    """The later memory is better in float32, the earlier one in integers, by half steps rounded down."""
    query = np.full(8, 1 / np.sqrt(8))
    base = float(np.floor(SCALE / np.sqrt(8)))
    rounded_up = np.array([base + 0.51, base + 0.3] * 4) / SCALE
    rounded_down = np.full(8, base + 0.49) / SCALE
    worlds = [np.atleast_2d(row).astype(np.float32) for row in (rounded_up, rounded_down)]
    return [delta(number, row) for number, row in enumerate(worlds)], query.astype("<f4").tobytes()


def test_what_float32_misleads_about_is_decided_in_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    world, query = world_where_float32_misleads()
    up, down = (np.frombuffer(each.vectors, dtype="<f4") for each in world)
    asked = np.frombuffer(query, dtype="<f4")
    assert down @ asked > up @ asked
    device = NumpyDevice()
    device.apply(world, 1)
    everything = Eligible(as_of_us=0)
    expected = oracle(world, query, everything, 1)
    assert expected[0].object == 0
    assert device.search(query, everything, 1) == expected
    monkeypatch.setattr(numpy_device, "slack", lambda dimensions: 0.0)
    assert device.search(query, everything, 1) != expected, "a device without the margin passed"


# Applying


def test_repeated_deltas_change_nothing_and_the_position_never_goes_back() -> None:
    chance = np.random.default_rng(1)
    vectors = unit(chance.standard_normal((4, 8)))
    first, second = delta(1, vectors[:2], owner="ann"), delta(2, vectors[2:3])
    changed = delta(1, vectors[3:], owner="bob")
    device = NumpyDevice()
    device.apply([first, changed, first], 5)
    device.apply([second, changed], 4)
    device.apply([], 6)
    assert (device.count(), device.position) == ((2, 3), 6)
    for vector in vectors:
        query = vector.tobytes()
        assert device.search(query, Eligible(as_of_us=0), 9) == oracle(
            [first, second], query, Eligible(as_of_us=0), 9
        )
    assert device.search(vectors[0].tobytes(), Eligible(owner="bob", as_of_us=0), 9) == ()


def test_nothing_is_found_where_nothing_is() -> None:
    device = NumpyDevice()
    query = unit(np.ones(8)).tobytes()
    assert device.search(query, Eligible(as_of_us=0), 5) == ()
    device.apply([delta(1, unit(np.ones((1, 8))))], 1)
    assert device.search(query, Eligible(as_of_us=0), 0) == ()
    assert len(device.search(query, Eligible(as_of_us=0), 1)) == 1


def test_growing_past_the_first_rows_keeps_everything() -> None:
    chance = np.random.default_rng(2)
    vectors = unit(chance.standard_normal((4 * ROWS_MIN, 4)))
    sizes = chance.integers(1, 3, size=2 * ROWS_MIN)
    ends = np.cumsum(sizes)
    world = [
        delta(number, vectors[end - size : end], owner=NAMES[number % 3])
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    device = NumpyDevice()
    for batch in _batches(world, 300):
        device.apply(batch, batch[-1].object)
        known = world[: batch[-1].object + 1]
        for eligible in (Eligible(as_of_us=0), Eligible(owner="bob", as_of_us=0)):
            query = unit(chance.standard_normal(4)).tobytes()
            assert device.search(query, eligible, 20) == oracle(known, query, eligible, 20)
    assert device.count() == (2 * ROWS_MIN, int(ends[-1]))


def test_vectors_of_another_length_are_refused_and_change_nothing() -> None:
    device = NumpyDevice()
    device.apply([delta(1, unit(np.ones((1, 8))))], 1)
    with pytest.raises(InvariantBroken):
        device.apply([delta(2, unit(np.ones((1, 8)))), delta(3, unit(np.ones((1, 4))))], 2)
    with pytest.raises(InvariantBroken):
        device.search(unit(np.ones(4)).tobytes(), Eligible(as_of_us=0), 1)
    assert (device.count(), device.position) == ((1, 1), 1)
    assert len(device.search(unit(np.ones(8)).tobytes(), Eligible(as_of_us=0), 9)) == 1


def test_the_probe_finds_the_newest_memory_or_says_so() -> None:
    device = NumpyDevice()
    device.probe()
    chance = np.random.default_rng(3)
    device.apply([delta(n, unit(chance.standard_normal((2, 384))), expires_us=1) for n in range(50)], 1)
    device.probe()
    broken = device._snapshot.columns.vectors.copy()
    broken[:] *= 0.9
    columns = msgspec.structs.replace(device._snapshot.columns, vectors=broken)
    device._snapshot = msgspec.structs.replace(device._snapshot, columns=columns)
    with pytest.raises(SearchUnavailable):
        device.probe()


# Both at one time

BATCH: Final = 3
BATCHES: Final = 150


class Torn(NumpyDevice):
    """Publishes a batch in pieces."""

    def apply(self, deltas: Sequence[MemoryDelta], position: int) -> None:
        for each in deltas:
            super().apply([each], position)
            time.sleep(0.0003)


def torn_searches(device: NumpyDevice) -> tuple[int, int]:
    """Search while batches are applied; return the torn results, and how many different states were seen."""
    vector = unit(np.ones((2, 8)))
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for batch in range(BATCHES):
                numbers = range(batch * BATCH, (batch + 1) * BATCH)
                device.apply([delta(n, vector, owner="ann", categories=("all",)) for n in numbers], batch)
                time.sleep(0.001)
        except BaseException as error:
            failed.append(error)
            raise

    writer = threading.Thread(target=write)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    torn, states = 0, set()
    try:
        writer.start()
        while writer.is_alive():
            hits = device.search(
                vector[0].tobytes(), Eligible(owner="ann", categories=("all",), as_of_us=0), 10_000
            )
            assert [each.object for each in hits] == list(range(len(hits)))
            torn += len(hits) % BATCH != 0
            states.add(len(hits))
    finally:
        writer.join()
        sys.setswitchinterval(before)
    assert not failed, failed
    assert device.count() == (BATCH * BATCHES, 2 * BATCH * BATCHES)
    return torn, len(states)


def test_a_search_beside_apply_sees_whole_batches() -> None:
    torn, states = torn_searches(NumpyDevice())
    print(f"{states} different states were seen")
    assert torn == 0
    assert states >= 10


def test_a_device_that_tears_batches_is_seen() -> None:
    torn, _ = torn_searches(Torn())
    assert torn > 0
