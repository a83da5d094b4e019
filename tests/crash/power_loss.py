"""What is wrong with a store after a loss of power: each image is opened, asked for *truth*, and goes on."""

import contextlib
import hashlib
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muniment.adapters.sqlite import check
from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader, SqliteStore
from tests.crash.kill_points import opened
from tests.crash.recorded_ledger import Line, Step
from tests.support import truth
from tests.support.powerloss import Image
from tests.support.truth import Fact

DIGEST_BYTES: Final = 16
GoOn = Callable[[SqliteStore], list[str]]


class Seen(msgspec.Struct):
    """What has been tried."""

    distinct: int = 0
    """Images that differ in a byte."""
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    """Images by kind, also those that are equal to one of another kind."""
    steps: Counter[str] = msgspec.field(default_factory=Counter)
    """By what the process did at that time, and which file had changes that were not flushed."""
    recovered: int = 0
    """Different files after recovery; those that are equal, byte for byte, are driven to their end once."""
    facts: int = 0
    """Acknowledged facts that were looked for."""


class Judge:
    """Judges the images of one recording, in a directory of its own.

    ``told`` are the lines of the recording, ``sent`` the IDs of all operations that anybody asked for;
    ``go_on`` drives a store to its end.
    """

    def __init__(
        self, directory: Path, told: bytes, sent: Collection[str], go_on: GoOn | None = None
    ) -> None:
        self._directory = directory
        self._sent = frozenset(sent)
        self._lines: list[Line] = [msgspec.json.decode(line, type=Line) for line in told.splitlines()]
        self._go_on = go_on
        self._images: set[bytes] = set()
        # Of images, and of stores after recovery, that nothing is wrong with: until which line that is known.
        self._right: dict[bytes, int] = {}
        self._recovered: dict[bytes, int] = {}
        self.seen = Seen()

    def step(self, image: Image) -> str:
        """What the process did when the power went, and what was not flushed then."""
        steps = [line.name for line in self._lines[: image.told] if isinstance(line, Step)]
        return f"{steps[-1] if steps else 'work'}: {' '.join(sorted(image.waiting)) or 'nothing'}"

    def group(self, image: Image) -> object:
        """What a sample is to have as many of."""
        return self.step(image), image.kind

    def during(self, step: str) -> int:
        """Different images of a step."""
        return self.seen.steps[step]

    def complaints(self, image: Image) -> list[str]:
        """Return what is wrong with an image; nothing for one that was judged before."""
        files = image.files()
        digest = _digest(*(part for name in sorted(files) for part in (name.encode(), files[name])))
        self.seen.kinds[image.kind] += 1
        if self._right.get(digest, -1) >= image.told:
            return []
        if digest not in self._images:
            self._images.add(digest)
            self.seen.distinct += 1
            self.seen.steps[self.step(image)] += 1
        path = self._directory / "image"
        shutil.rmtree(
            path, ignore_errors=True
        )  # One with complaints is left for whoever looks for the cause.
        image.restore(path)
        try:
            found = self._judged(path, self._facts(image.told))
        except Exception as error:  # noqa: BLE001 what is damaged may break anything, and that is the finding
            found = [f"recovery failed: {type(error).__name__}: {error}"]
        if not found:
            self._right[digest] = image.told
            shutil.rmtree(path)
        return found

    def _facts(self, told: int) -> list[Fact]:
        return [line for line in self._lines[:told] if not isinstance(line, Step)]

    def _judged(self, path: Path, facts: Sequence[Fact]) -> list[str]:
        with opened(SqliteStore, path):
            pass  # This is the recovery; closing leaves one file.
        digest = _digest((path / LEDGER_FILE).read_bytes())
        known = self._recovered.get(digest, -1)
        found = _checked(path) if known < 0 else []
        if found:
            return found  # Nothing more can be asked of it.
        if known < len(facts):
            self.seen.facts += len(facts)
            with contextlib.closing(SqliteReader(path / LEDGER_FILE)) as reader:
                found += reader.read(lambda reads: truth.missing(facts, reads))
        if known < 0:
            self.seen.recovered += 1
            found += self._whole(path)
        if not found:
            self._recovered[digest] = max(known, len(facts))
        return found

    def _whole(self, path: Path) -> Iterator[str]:
        """What holds of each state of the ledger, whoever was told of it."""
        with opened(SqliteStore, path) as store:
            yield from store.read(truth.problems)
            there = {row["id"] for row in store.read(lambda reads: truth.rows(reads, "operation"))}
            yield from (f"nobody sent it: {name}" for name in sorted(there - self._sent))
            if self._go_on is None:
                return
            store._connection.execute("PRAGMA synchronous = OFF")  # The power does not go again.
            yield from self._go_on(store)
            yield from store.read(truth.problems)
        yield from _checked(path)


def _checked(path: Path) -> list[str]:
    return [f"check: {finding}" for finding in check.check(path).findings]


def _digest(*parts: bytes) -> bytes:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()


def spread(images: Sequence[Image], group: Callable[[Image], object], count: int, seed: int) -> list[Image]:
    """A sample that has as many of each group as there is room for."""
    chooser = random.Random(seed)
    groups: defaultdict[object, list[Image]] = defaultdict(list)
    for image in images:
        groups[group(image)].append(image)
    for each in groups.values():
        chooser.shuffle(each)
    chosen: list[Image] = []
    while groups and len(chosen) < count:
        for name in list(groups):
            chosen.append(groups[name].pop())
            if not groups[name]:
                del groups[name]
    return chosen[:count]
