"""Every state of the disk that a loss of power may leave: what was acknowledged is there (R3).

One recording of a ledger's system calls, made by the real store under the real stages, is taken apart into
the images of ``tests.support.powerloss``. Each is opened by the real store; then *truth* is asked, ``check``
finds nothing, and the work goes on to the outcome of an undisturbed run.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from muniment.adapters.sqlite.store import SqliteStore
from tests.crash.kill_points import opened
from tests.crash.power_loss import GoOn, Judge, spread
from tests.crash.recorded_ledger import MUTANTS, SENT, WHOLE
from tests.crash.workloads import Driver
from tests.support import submissions, truth
from tests.support.crashpoints import all_cases, seed
from tests.support.live import OPERATIONS, ROOT, Wire
from tests.support.powerloss import (
    ANSWERS,
    HEXADECIMAL,
    RECORDED,
    Image,
    Recording,
    descriptor,
    told_by_202,
    told_to,
)
from tests.support.server import SOURCE
from tests.support.strace import Call, options
from tests.support.wrapped import WrappedServer

SAMPLE: Final = 1500
IMAGES_MIN: Final = 1200
KIND_MIN: Final = {"none": 50, "all": 150, "one dropped": 250, "last only": 150, "torn": 250}
STEP_MIN: Final = {
    "open: ledger.db-wal": 150,
    "open: ledger.db": 100,
    "work: ledger.db-wal": 200,
    "work: ledger.db": 150,
    "close: ledger.db": 50,
}
"""By what the process did, and the file of which something was not flushed: the database is a checkpoint."""
RECOVERED_MIN: Final = 40
CLIENTS: Final = 6
EACH: Final = 4
SERVER_SAMPLE: Final = 500
SERVER_IMAGES_MIN: Final = 300
CONTROL_IMAGES: Final = 200
CONTROL_SEED: Final = 3
MEMORY_BYTES_MIN: Final = 32 << 20
HARMED_MIN: Final = 10
"""With a mutant, so many of the images must be wrong."""
GONE: Final = "acknowledged and gone: "
MEMORY: Final = Path("/dev/shm")

# Mutant -> complaints, of which one proves that it was understood.
CONTROLS: Final = {
    "NORMAL": (GONE,),
    "checkpoint without flush": (GONE, "Corrupt", "check: "),
    "acknowledge before commit": (GONE,),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where images are opened: in memory if there is room, since nothing is shown by waiting for a disk."""
    in_memory = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN
    with tempfile.TemporaryDirectory(prefix="images-", dir=MEMORY if in_memory else tmp_path) as directory:
        yield Path(directory)


def recorded(directory: Path, *mutant: str) -> Recording:
    """Run the ledger under strace."""
    data, record, told = directory / "store", directory / "record", directory / "told"
    data.mkdir()
    done = subprocess.run(
        [
            *options(record, RECORDED),
            HEXADECIMAL,
            sys.executable,
            "-m",
            "tests.crash.recorded_ledger",
            str(data),
            str(told),
            *mutant,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return Recording(record, data, told_to(told))


def goes_on(directory: Path) -> GoOn:
    """Clients that heard nothing send everything again, and it ends as if nothing had happened."""

    def outcome(store: SqliteStore) -> str:
        driver = Driver(store, WHOLE, lambda fact: None)
        driver.settle()
        driver.play()
        return store.read(truth.outcome_digest)

    directory.mkdir()
    with opened(SqliteStore, directory) as store:
        clean = outcome(store)
        assert store.read(truth.open_operations) == []

    def go_on(store: SqliteStore) -> list[str]:
        if outcome(store) == clean:
            return []
        return ["the outcome differs from that of an undisturbed run", *store.read(truth.open_operations)]

    return go_on


def judged(judge: Judge, images: Sequence[Image], sample: int) -> None:
    """Judge a sample, or all."""
    chosen_by = seed()
    number = {id(image): place for place, image in enumerate(images)}
    chosen = images if all_cases() else spread(images, judge.group, sample, chosen_by)

    for image in chosen:
        complaints = judge.complaints(image)
        assert not complaints, (
            f"image {number[id(image)]} of {len(images)} ({judge.step(image)}, {image.kind}, line "
            f"{image.line} of the record): {complaints}; again: scripts/crash --seed {chosen_by}"
        )

    seen = judge.seen
    print(
        f"{len(chosen)} of {len(images)} images, {seen.distinct} differ ({dict(seen.kinds)}; "
        f"{dict(seen.steps)}), {seen.recovered} stores after recovery, seed {chosen_by}"
    )


@pytest.mark.timeout(3000)
def test_no_loss_of_power_loses_what_was_acknowledged(tmp_path: Path, place: Path) -> None:
    images, told = recorded(tmp_path).images()
    judge = Judge(place, told, SENT, goes_on(place / "clean"))

    judged(judge, images, SAMPLE)

    seen = judge.seen
    assert seen.distinct >= IMAGES_MIN
    assert [kind for kind, least in KIND_MIN.items() if seen.kinds[kind] < least] == []
    assert [step for step, least in STEP_MIN.items() if judge.during(step) < least] == []
    assert seen.recovered >= RECOVERED_MIN


# A real server, of which clients ask something at one time


def sent(client: int, each: int) -> str:
    """The ID of an operation."""
    return f"power-{client}-{each}"


async def load(url: str) -> None:
    """Clients at once; return when what they sent has ended."""

    async def client(number: int) -> None:
        async with Wire.open(url) as wire:
            for each in range(EACH):
                name = sent(number, each)
                body = (
                    submissions.memory(name, f"Box {name}.") if each % 2 else submissions.stream(name, name)
                )
                assert (await wire.post(body)).status == 202

    await asyncio.gather(*map(client, range(CLIENTS)))
    async with Wire.open(url) as wire, asyncio.timeout(60):
        while True:
            shown = (await wire.get(f"{OPERATIONS}?limit=100")).json()["operations"]
            if {receipt["state"] for receipt in shown} == {"committed"}:
                return
            await asyncio.sleep(0.02)


@pytest.mark.timeout(3000)
def test_no_loss_of_power_loses_what_a_server_accepted(tmp_path: Path, place: Path) -> None:
    data, record = tmp_path / "store", tmp_path / "record"
    calls = dict.fromkeys((*RECORDED, *ANSWERS))
    with WrappedServer(data, [*options(record, list(calls)), HEXADECIMAL], wal_pages_max=60) as server:
        asyncio.run(load(server.url))
        assert server.terminate() == 0
    images, told = Recording(record, data, told_by_202).images()
    assert told.count(b"\n") == CLIENTS * EACH
    judge = Judge(place, told, [sent(client, each) for client in range(CLIENTS) for each in range(EACH)])

    judged(judge, images, SERVER_SAMPLE)

    assert judge.seen.distinct >= SERVER_IMAGES_MIN
    assert judge.during("work: ledger.db-wal") >= SERVER_IMAGES_MIN // 4
    assert judge.during("work: ledger.db") >= SERVER_IMAGES_MIN // 4


# Controls


class Harm(msgspec.Struct, frozen=True):
    """Of so many images so many were wrong, in these ways."""

    images: int
    harmed: int
    complaints: frozenset[str]

    def shows(self, *complaints: str) -> bool:
        return any(complaint in line for complaint in complaints for line in self.complaints)


def harm(
    directory: Path,
    recording: Recording,
    operations: Collection[str] = SENT,
    count: int = CONTROL_IMAGES,
) -> Harm:
    """Judge a sample to its end."""
    images, told = recording.images()
    judge = Judge(directory, told, operations)
    found = [judge.complaints(image) for image in spread(images, judge.group, count, CONTROL_SEED)]
    wrong = Harm(
        judge.seen.distinct,
        len([complaints for complaints in found if complaints]),
        frozenset(line for complaints in found for line in complaints),
    )
    print(f"{wrong.harmed} of {wrong.images} images are wrong")
    return wrong


@pytest.mark.parametrize("mutant", MUTANTS)
def test_control_a_ledger_that_does_not_flush_is_noticed(tmp_path: Path, place: Path, mutant: str) -> None:
    found = harm(place, recorded(tmp_path, mutant))

    assert found.harmed >= HARMED_MIN
    assert found.shows(*CONTROLS[mutant]), found.complaints


def directory_flush(call: Call) -> bool:
    return call.name in {"fsync", "fdatasync"} and descriptor(call).endswith("/store")


def test_control_names_that_were_not_flushed_are_gone(tmp_path: Path, place: Path) -> None:
    recording = msgspec.structs.replace(recorded(tmp_path), ignored=directory_flush)

    found = harm(place, recording)

    assert found.harmed >= HARMED_MIN
    assert found.shows(GONE), found.complaints


UNSENT: Final = "short-1"
UNSENT_IMAGES: Final = 50


def test_control_an_operation_that_nobody_sent_is_noticed(tmp_path: Path, place: Path) -> None:
    found = harm(place, recorded(tmp_path), SENT - {UNSENT}, UNSENT_IMAGES)

    assert found.harmed >= HARMED_MIN
    assert found.complaints == {f"nobody sent it: {UNSENT}"}


def test_every_mutant_has_its_control() -> None:
    assert CONTROLS.keys() == MUTANTS.keys()
