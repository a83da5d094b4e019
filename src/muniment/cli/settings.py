"""From the flags of a command to a checked ``Config``."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from muniment.config import Config, field_names, load
from muniment.errors import ConfigError


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``--set name=value``; the value is text, converted as one from the environment would be.

    Raises ``ConfigError`` that names the setting.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError("--set", f"{text!r} is not name=value")
        if name not in field_names():
            raise ConfigError(name, "unknown setting from --set; `muniment config show` lists them all")
        try:
            checked = msgspec.convert({name: value}, Config, strict=False)
        except msgspec.ValidationError as error:
            problem = str(error).split(" - at ")[0]
            raise ConfigError(name, f"{problem} (from --set, which says {value!r})") from error
        found[name] = getattr(checked, name)
    return found


def flags(*, assigned: Sequence[str] | None = None, **given: Any) -> dict[str, Any]:
    """Only what was given on the command line; a flag goes before ``--set`` of the same setting."""
    return assignments(assigned or ()) | {name: value for name, value in given.items() if value is not None}


def configured(given: Mapping[str, Any], file: str | None) -> Config:
    """Merge the flags with the environment and the file."""
    return load(given, file=file)
