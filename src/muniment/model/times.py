"""Times are integer microseconds since 1970 UTC inside and RFC 3339 with ``Z`` outside (ruling 17)."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


def rfc3339(microseconds: int) -> str:
    """Render with six fraction digits, so that text order is time order."""
    moment = _EPOCH + timedelta(microseconds=microseconds)
    return (
        f"{moment.year:04d}-{moment.month:02d}-{moment.day:02d}T"
        f"{moment.hour:02d}:{moment.minute:02d}:{moment.second:02d}.{moment.microsecond:06d}Z"
    )


def parse_rfc3339(text: str) -> int:
    """Read an RFC 3339 time with its offset; digits past the microsecond are cut.

    Raises ``ValueError`` for anything else, a time without an offset included: it would be a guess.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError("is not an RFC 3339 time with Z or an offset")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    fraction, sign, offset_hours, offset_minutes = match.groups()[6:]
    leap = second == 60  # RFC 3339 allows a leap second; it is read as the second after.
    moment = datetime(year, month, day, hour, minute, 59 if leap else second, tzinfo=UTC)
    microsecond = int(((fraction or "") + "000000")[:6])
    shift = timedelta(seconds=1 if leap else 0)
    if sign is not None:
        if int(offset_hours) > 23 or int(offset_minutes) > 59:
            raise ValueError("has an offset out of range")
        offset = timedelta(hours=int(offset_hours), minutes=int(offset_minutes))
        shift += -offset if sign == "+" else offset
    try:
        moment += shift
    except OverflowError as error:
        raise ValueError("is out of range") from error
    return (moment - _EPOCH) // timedelta(microseconds=1) + microsecond
