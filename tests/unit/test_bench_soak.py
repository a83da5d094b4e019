"""What the soak calls wrong: memory or file handles that grow, a log that is not recycled."""

import msgspec
import pytest

from bench.soak import FLAT, WARM_SHARE, Sample, verdict

MEMORIES = 100
SAMPLES = 100
REST = 18_000_000
PAGES_MAX = 8000


def at(number: int) -> Sample:
    """A sample of a server that is as it should be: caches fill, then the device alone grows."""
    handles = 29 if number in (0, SAMPLES) else 45 + number % 5
    sample = Sample(
        operations=number * MEMORIES,
        server=0,
        memories=number * MEMORIES,
        parts=number * MEMORIES,
        children=76_000_000 + 10_000 * number,
        handles=handles,
        log=33_000_000,
    )
    filling = min(1.0, 0.5 + number / (2 * WARM_SHARE * SAMPLES))
    return msgspec.structs.replace(sample, server=sample.device + int(filling * REST))


SOUND = [at(number) for number in range(SAMPLES + 1)]


def test_a_server_of_which_the_device_alone_grows_is_flat() -> None:
    lines, wrong = verdict(SOUND, PAGES_MAX)

    assert wrong == []
    assert SOUND[-1].server > 1.4 * SOUND[30].server
    assert "  the rest: 18.0 to 18.0 MB, spread 0.000" in lines


@pytest.mark.parametrize("bytes_each", [150, 1000])
def test_control_what_is_kept_of_each_operation_is_noticed(bytes_each: int) -> None:
    assert bytes_each * SAMPLES * MEMORIES * (1 - WARM_SHARE) > FLAT * REST
    kept = [
        msgspec.structs.replace(each, server=each.server + bytes_each * each.operations) for each in SOUND
    ]

    [wrong] = verdict(kept, PAGES_MAX)[1]
    assert wrong.startswith("the server's memory is not flat")


def test_control_a_device_that_takes_more_than_its_rows_is_noticed() -> None:
    [wrong] = verdict(
        [msgspec.structs.replace(each, server=each.server + each.device // 10) for each in SOUND], PAGES_MAX
    )[1]
    assert wrong.startswith("the server's memory is not flat")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("handles", 30, "file handles grow: 29 to 30"),
        ("children", 90_000_000, "the children's memory is not flat"),
        ("log", 70_000_000, "the write-ahead log is not recycled"),
    ],
)
def test_control_growth_at_the_end_is_noticed(field: str, value: int, complaint: str) -> None:
    last = msgspec.structs.replace(SOUND[-1], **{field: value})

    [wrong] = verdict([*SOUND[:-1], last], PAGES_MAX)[1]
    assert wrong.startswith(complaint)
