"""A fuzzer in one file: seeded mutations of a corpus, and every new kind of outcome joins the corpus.

It needs no instrumentation, so it runs wherever the tests run, and the same seed gives the same cases. What
it hears from a target is a short label (which refusal, which shape of value); an input with a label that was
not seen before is kept and mutated further. Where atheris is installed, ``scripts/fuzz`` drives the same
targets by coverage instead.

A target runs in a process of its own, with Python's checks of its heap switched on, and notes each case
before it is run: a library in C that writes past its buffer ends that process, and the case is known.
"""

import argparse
import ast
import importlib
import importlib.util
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

# Nothing of the package may be imported here: only what is imported later is driven by coverage.
ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src"
CORPUS: Final = Path(__file__).with_name("corpus")
CASE_BYTES_MAX: Final = 1024
POOL_MAX: Final = 1000
SEED_BYTES_MAX: Final = 8192
LENGTH_BYTES: Final = 4
INTERESTING: Final = (
    0,
    1,
    0x0A,
    0x0D,
    0x20,
    0x22,
    0x25,
    0x2B,
    0x2D,
    0x5C,
    0x7B,
    0x7F,
    0x80,
    0xC1,
    0xED,
    0xFF,
)
NUMBERS: Final = (
    b"0",
    b"-1",
    b"-0",
    b"127",
    b"255",
    b"4294967296",
    b"9223372036854775808",
    b"1e308",
    b"1e999",
)
GRACE_SECONDS: Final = 120.0


class Target(NamedTuple):
    """What is fuzzed. ``run`` returns a label, or raises where a promise is broken; code makes ``seeds``."""

    run: Callable[[bytes], str]
    seeds: Callable[[], Sequence[bytes]]
    tokens: Sequence[bytes] = ()


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run: how often each label, and the input that broke a promise, if any."""

    labels: dict[str, int]
    error: str | None = None
    data: bytes = b""

    @property
    def cases(self) -> int:
        """How many inputs kept every promise."""
        return sum(self.labels.values())

    def __str__(self) -> str:
        found = "nothing" if self.error is None else f"{self.error}\nfor {self.data!r}"
        return f"{self.cases} cases, {len(self.labels)} kinds of outcome, found: {found}"


def corpus(name: str) -> list[bytes]:
    """The kept inputs of a target, a bytes literal a line."""
    lines = (CORPUS / f"{name}.txt").read_text("ascii").splitlines()
    return [ast.literal_eval(line) for line in lines]


def campaign(
    name: str,
    target: Target,
    seed: int,
    *,
    cases: int,
    seconds: float | None = None,
    note: Callable[[bytes], object] = bool,
) -> Campaign:
    """Run all seeds and kept inputs, then mutations of them, to the first finding or the time's end."""
    dice = random.Random(f"{name}/{seed}")
    pool = list(dict.fromkeys([*target.seeds(), *corpus(name)]))
    labels: Counter[str] = Counter()
    give_up = None if seconds is None else time.monotonic() + seconds
    for number in range(cases):
        if give_up is not None and number % 64 == 0 and time.monotonic() > give_up:
            break
        data = pool[number] if number < len(pool) else mutated(pool, target.tokens, dice)
        note(data)
        try:
            label = target.run(data)
        except Exception as error:  # noqa: BLE001 whatever it is, it is the finding
            return Campaign(labels=labels, error=f"{type(error).__name__}: {error}", data=data)
        if label not in labels and number >= len(pool) and len(pool) < POOL_MAX:
            pool.append(data)
        labels[label] += 1
    return Campaign(labels=labels)


# A process of its own


def apart(
    name: str, seed: int, *, cases: int, seconds: float | None = None, coverage: bool = False
) -> Campaign:
    """Run a campaign in a child; one that is ended by a signal has found what it noted last."""
    with tempfile.TemporaryDirectory(prefix="muniment-fuzz-") as directory:
        noted, said = Path(directory) / "case", Path(directory) / "campaign"
        command = [sys.executable, "-m", "tests.fuzz.engine", name, str(seed), str(cases), directory]
        command += [] if seconds is None else [str(seconds)]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SOURCE))))
        limit = GRACE_SECONDS + (seconds or cases / 100)
        done = subprocess.run(
            [*command, *(["coverage"] if coverage else [])],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONMALLOC": "debug"},
            capture_output=True,
            timeout=limit,
            check=False,
        )
        if said.exists():
            return msgspec.json.decode(said.read_bytes(), type=Campaign)
        held = noted.read_bytes()
        size = int.from_bytes(held[:LENGTH_BYTES], "big")
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        error = f"the process ended by {how}: {done.stderr.decode(errors='replace')[-2000:]}"
        return Campaign(labels={}, error=error, data=held[LENGTH_BYTES : LENGTH_BYTES + size])


class Notebook:
    """The case that is run now, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LENGTH_BYTES + SEED_BYTES_MAX))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def note(self, data: bytes) -> None:
        """Remember a case."""
        end = LENGTH_BYTES + len(data)
        self._memory[:end] = len(data).to_bytes(LENGTH_BYTES, "big") + data


def _child(
    name: str, seed: int, cases: int, directory: Path, seconds: float | None, *, coverage: bool
) -> None:
    atheris: Any = importlib.import_module("atheris") if coverage else None
    if atheris is None:
        targets = importlib.import_module("tests.fuzz.targets")
    else:
        with atheris.instrument_imports(include=["muniment"]):
            targets = importlib.import_module("tests.fuzz.targets")
    notebook, target = Notebook(directory / "case"), targets.TARGETS[name]
    if atheris is None:
        found = campaign(name, target, seed, cases=cases, seconds=seconds, note=notebook.note)
        (directory / "campaign").write_bytes(msgspec.json.encode(found))
        return
    limits = [
        f"-max_total_time={int(seconds or 60)}",
        f"-max_len={CASE_BYTES_MAX}",
        f"-seed={seed % 2**31 or 1}",
    ]
    kept = directory / "kept"
    kept.mkdir()
    for number, data in enumerate([*target.seeds(), *corpus(name)]):
        (kept / str(number)).write_bytes(data)
    run = _covered(target, notebook, directory / "campaign")
    atheris.Setup(["fuzz", str(kept), *limits, f"-artifact_prefix={directory}/"], run)
    atheris.Fuzz()


def _covered(target: Target, notebook: Notebook, said: Path) -> Callable[[bytes], None]:
    """What atheris calls; it ends the process by itself, so what was seen is written as it goes."""
    labels: Counter[str] = Counter()
    written = time.monotonic()

    def write(**found: Any) -> None:
        said.write_bytes(msgspec.json.encode(Campaign(labels=labels, **found)))

    def run(data: bytes) -> None:
        nonlocal written
        notebook.note(data)
        try:
            labels[target.run(data)] += 1
        except Exception as error:
            write(error=f"{type(error).__name__}: {error}", data=data)
            raise
        if time.monotonic() - written > 1.0:
            written = time.monotonic()
            write()

    return run


def main() -> int:
    """The program of ``scripts/fuzz``."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="*", help=f"of {', '.join(TARGETS)}; all of them by default")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="for each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--plain", action="store_true", help="mutations alone, also where atheris is there")
    chosen = parser.parse_args()
    coverage = not chosen.plain and importlib.util.find_spec("atheris") is not None
    print(
        f"fuzz: seed {chosen.seed}, {'by coverage (atheris)' if coverage else 'mutations without coverage'}"
    )
    failed = False
    for name in chosen.target or TARGETS:
        found = apart(name, chosen.seed, cases=10**12, seconds=chosen.seconds, coverage=coverage)
        print(f"fuzz: {name}: {found}", flush=True)
        failed |= found.error is not None
    return int(failed)


# Mutations


def mutated(pool: Sequence[bytes], tokens: Sequence[bytes], dice: random.Random) -> bytes:
    """A neighbour of one of the pool: one change as often as two, and so on."""
    data = bytearray(dice.choice(pool))
    while True:
        dice.choice(MUTATIONS)(data, pool, tokens, dice)
        if dice.random() < 0.5:
            return bytes(data[:CASE_BYTES_MAX])


def _place(data: bytearray, dice: random.Random) -> int:
    return dice.randrange(len(data) + 1)


def _span(data: bytes | bytearray, dice: random.Random) -> slice:
    start = dice.randrange(len(data) + 1)
    return slice(start, min(len(data), start + 1 + int(dice.expovariate(0.15))))


def _flip(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    if data:
        value = dice.choice(INTERESTING) if dice.random() < 0.5 else dice.randrange(256)
        data[dice.randrange(len(data))] = value


def _insert(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    place = _place(data, dice)
    data[place:place] = dice.randbytes(1 + int(dice.expovariate(0.5)))


def _delete(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    del data[_span(data, dice)]


def _copy(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    place = _place(data, dice)
    data[place:place] = data[_span(data, dice)]


def _repeat(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    place, piece = _place(data, dice), data[_span(data, dice)]
    data[place:place] = piece * dice.choice((2, 3, 10, 64, 129))
    del data[CASE_BYTES_MAX:]


def _splice(data: bytearray, pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    other = dice.choice(pool)
    data[_span(data, dice)] = other[_span(other, dice)]


def _join(data: bytearray, pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    other = dice.choice(pool)
    data[_place(data, dice) :] = other[dice.randrange(len(other) + 1) :]


def _token(data: bytearray, _pool: Sequence[bytes], tokens: Sequence[bytes], dice: random.Random) -> None:
    data[_span(data, dice) if dice.random() < 0.5 else slice(place := _place(data, dice), place)] = (
        dice.choice(tokens or NUMBERS)
    )


def _number(data: bytearray, _pool: Sequence[bytes], _tokens: Sequence[bytes], dice: random.Random) -> None:
    digits = [place for place, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if digits:
        start = end = dice.choice(digits)
        while end < len(data) and 0x30 <= data[end] <= 0x39:
            end += 1
        data[start:end] = dice.choice(NUMBERS)


MUTATIONS: Final = (_flip, _set, _insert, _delete, _copy, _repeat, _splice, _join, _token, _token, _number)


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[3].isdigit():
        _child(
            sys.argv[1],
            int(sys.argv[2]),
            int(sys.argv[3]),
            Path(sys.argv[4]),
            float(sys.argv[5]) if len(sys.argv) > 5 else None,
            coverage="coverage" in sys.argv[6:],
        )
    else:
        sys.exit(main())
