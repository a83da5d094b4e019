"""The query string: known names only, each at most once, strictly decoded."""

import re
from collections.abc import Collection
from typing import Final

from muniment.errors import InvalidField
from muniment.interfaces.http.percent import decoded

UINT64_MAX: Final = 2**64 - 1
_WHOLE_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,19}", re.ASCII)


def parameters(query_string: bytes, allowed: Collection[str]) -> dict[str, str]:
    """Return the parameters by name; ``+`` stands for a space, as HTML forms write it.

    Raises ``InvalidField`` that names the parameter which is unknown, repeated or badly encoded.
    """
    found: dict[str, str] = {}
    for pair in filter(None, query_string.split(b"&")):
        raw_name, _, raw_value = pair.replace(b"+", b" ").partition(b"=")
        name = decoded(raw_name, "query")
        if name not in allowed:
            raise InvalidField(name or "query", "unknown query parameter" if name else "has a nameless part")
        if name in found:
            raise InvalidField(name, "is given more than once")
        found[name] = decoded(raw_value, name)
    return found


def uint64(text: str) -> int | None:
    """Return the number that ``text`` writes in plain decimal digits, or None if it is no uint64."""
    if not _WHOLE_NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if number <= UINT64_MAX else None


def uint64_parameter(found: dict[str, str], name: str, default: int) -> int:
    """Read a uint64, ``default`` where it is absent. Raises ``InvalidField`` that names it."""
    if name not in found:
        return default
    number = uint64(found[name])
    if number is None:
        raise InvalidField(name, f"must be an integer from 0 to {UINT64_MAX}")
    return number


def limit_parameter(found: dict[str, str], default: int, maximum: int) -> int:
    """Read ``limit``, from 1 to ``maximum``. Raises ``InvalidField``."""
    limit = uint64_parameter(found, "limit", min(default, maximum))
    if not 1 <= limit <= maximum:
        raise InvalidField("limit", f"must be from 1 to {maximum}")
    return limit


def choice_parameter(found: dict[str, str], name: str, allowed: Collection[str]) -> str | None:
    """Read one of ``allowed`` words, None where it is absent. Raises ``InvalidField`` that names it."""
    value = found.get(name)
    if value is not None and value not in allowed:
        raise InvalidField(name, f"must be one of {', '.join(allowed)}")
    return value
