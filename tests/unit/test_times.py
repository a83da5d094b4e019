"""Times go out as RFC 3339 text that sorts as they do, and come in only where they leave nothing to guess."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muniment.model.times import parse_rfc3339, rfc3339

SECOND = 1_000_000
HOUR = 3600 * SECOND
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LOW = (datetime(1, 1, 1, tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
HIGH = (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)

moments = st.integers(LOW, HIGH)


@given(moments)
def test_a_time_comes_back_as_it_went_out(moment: int) -> None:
    assert parse_rfc3339(rfc3339(moment)) == moment


@given(moments, moments)
def test_text_order_is_time_order(one: int, two: int) -> None:
    assert (rfc3339(one) < rfc3339(two)) == (one < two)


@given(
    st.datetimes(EPOCH.replace(year=2, tzinfo=None), EPOCH.replace(year=9998, tzinfo=None)),
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
)
def test_any_offset_is_read_as_the_standard_library_reads_it(naive: datetime, minutes: int) -> None:
    moment = naive.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    assert parse_rfc3339(moment.isoformat()) == (moment - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:00z", 0),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T23:00:00-01:00", 0),
        ("1970-01-01T00:00:00-00:00", 0),
        ("1970-01-01T00:00:00.5Z", SECOND // 2),
        ("1970-01-01T00:00:00.0000019Z", 1),
        ("1969-12-31T23:59:59.999999999Z", -1),
        ("1970-01-01T00:00:00." + "9" * 50 + "Z", 999_999),
        ("1969-12-31T23:59:60Z", 0),
        ("1969-12-31T23:59:60.25Z", SECOND // 4),
        ("1970-01-01T00:59:60+01:00", 0),
        ("2024-02-29T00:00:00Z", 1_709_164_800 * SECOND),
        ("1970-01-01T00:00:00-23:59", 24 * HOUR - 60 * SECOND),
    ],
)
def test_what_a_text_means(text: str, moment: int) -> None:
    assert parse_rfc3339(text) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1970-01-01",
        "1970-01-01T00:00:00",
        "1970-01-01 00:00:00Z",
        "1970-01-01T00:00Z",
        "1970-01-01T00:00:00.Z",
        "1970-01-01T00:00:00,5Z",
        "1970-01-01T00:00:00+0100",
        "1970-01-01T00:00:00+01",
        "1970-01-01T00:00:00+24:00",
        "1970-01-01T00:00:00+00:60",
        "1970-13-01T00:00:00Z",
        "2023-02-29T00:00:00Z",
        "1970-01-01T24:00:00Z",
        "1970-01-01T00:60:00Z",
        "1970-01-01T00:00:61Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "9999-12-31T23:59:60Z",
        "19700-01-01T00:00:00Z",
        " 1970-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z\n",
        "١٩٧٠-01-01T00:00:00Z",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rfc3339(text)
