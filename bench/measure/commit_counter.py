"""A listener at the ledger of a measured server: how many commits there were, and how many carried accepts.

It is planted by ``sitecustomize`` and counts in a file that others can read meanwhile. The ledger tells its
listeners of each batch after its commit, so one call is one commit; what changes no row of the history (the
readiness probe) is not told.
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from muniment.model.journal import Accept
from muniment.ports.ledger import Ledger, SealedUnit
from muniment.runtime import follow

COUNTS: Final = struct.Struct("<QQQ")


class Counts(msgspec.Struct, frozen=True):
    """Since the start of a server."""

    commits: int
    bearing: int
    """Commits that carried at least one accept."""
    accepts: int

    def since(self, before: "Counts") -> "Counts":
        """The difference."""
        return Counts(
            self.commits - before.commits, self.bearing - before.bearing, self.accepts - before.accepts
        )


class Counter:
    """Counts into a mapped file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(COUNTS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), COUNTS.size)
        self._counts = [0, 0, 0]

    def __call__(self, sealed: Sequence[SealedUnit]) -> None:
        """Count one commit."""
        accepts = sum(type(each.unit) is Accept for each in sealed)
        self._counts[0] += 1
        self._counts[1] += accepts > 0
        self._counts[2] += accepts
        COUNTS.pack_into(self._map, 0, *self._counts)


def plant(path: str) -> None:
    """Let every ledger of this process count into ``path``."""
    began = follow.Followers.__init__

    def beginning(self: follow.Followers, ledger: Ledger, **settings: Any) -> None:
        began(self, ledger, **settings)
        ledger.subscribe(Counter(Path(path)))

    follow.Followers.__init__ = beginning  # type: ignore[method-assign]


def code(path: Path) -> str:
    """What ``sitecustomize`` runs."""
    return f"from bench.measure import commit_counter\ncommit_counter.plant({str(path)!r})"


def read(path: Path) -> Counts:
    """What has been counted by now."""
    return Counts(*COUNTS.unpack(path.read_bytes()))
