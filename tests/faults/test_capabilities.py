"""Each capability is measured by using the real thing: break one, and its bit alone goes, and comes back.

A server on a small disk of its own, without the right to pass over file modes, with a model directory whose
tokenizer can be taken away. What has no handle outside the process, the coordinator and the device, is
stopped and dropped inside it by a signal.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from muniment.adapters.embedders.weights import bundled_directory
from tests.faults.test_disk_full import reserve_reached
from tests.support import submissions
from tests.support.live import OPERATIONS, executor_pid, patched
from tests.support.wrapped import WrappedServer

BITS: Final = ("ledger", "storage", "coordinator", "tokenizer", "model_executor", "search_index")
INGESTION: Final = {"ledger", "storage", "coordinator"}
NOTICED_SECONDS: Final = 5.0
BACK_SECONDS: Final = 20.0
RESERVE_BYTES: Final = 1 << 20

HANDLES: Final = """
import asyncio, signal
from muniment.runtime import coordinator, feed

class Stoppable(coordinator.Coordinator):
    '''SIGUSR1 stops it, and lets it go on.'''

    async def run(self):
        going = asyncio.Event()
        going.set()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: going.clear() if going.is_set() else going.set()
        )
        wait = self._wake.wait
        async def held():
            await going.wait()
            await wait()
            await going.wait()
        self._wake.wait = held
        await super().run()

coordinator.Coordinator = Stoppable

run = feed.Feed.run
async def droppable(self):
    '''SIGUSR2 drops what the device holds.'''
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._device.clear)
    await run(self)
feed.Feed.run = droppable
"""

BLIND: Final = """
import msgspec
from muniment.model import readiness
measured = readiness.Readiness.body
def body(self):
    told = measured(self)
    told["capabilities"]["{bit}"] = True
    told["search_ready"] = all(told["capabilities"].values())
    told["ingestion_ready"] = all(told["capabilities"][name] for name in ("ledger", "storage", "coordinator"))
    told["status"] = "ready" if told["ingestion_ready"] else "not_ready"
    return told
readiness.Readiness.body = body
"""


class Broken(msgspec.Struct, frozen=True):
    """What is broken, which bits go with it, how it is done and undone."""

    down: frozenset[str]
    do: Callable[["Place"], object]
    undo: Callable[["Place"], object]


class Place:
    """One server with everything that can be broken about it."""

    def __init__(self, directory: Path, code: str = "", embedder: str = "synthetic") -> None:
        self.data = directory / "store"
        self.data.mkdir(mode=0o700)
        self.model = directory / "model"
        self._copy_model()
        self.server = WrappedServer(
            self.data,
            unprivileged(),
            environ=patched(directory / "patch", HANDLES + code),
            embedder=embedder,
            embedder_dir=self.model,
            storage_reserve_bytes=RESERVE_BYTES,
            probe_seconds=0.2,
            # Far longer than a test: what a stopped child does to readiness is seen, and not its end.
            executor_stall_seconds=300,
        )

    def _copy_model(self) -> None:
        """The bundled model as a directory; only its tokenizer is a file of its own."""
        (self.model / "onnx").mkdir(parents=True)
        for name in ("model.onnx", "model.onnx_data"):
            (self.model / "onnx" / name).symlink_to(bundled_directory() / "onnx" / name)
        (self.model / "tokenizer.json").write_bytes((bundled_directory() / "tokenizer.json").read_bytes())

    def down(self, client: httpx.Client) -> frozenset[str]:
        return down(client)


def down(client: httpx.Client) -> frozenset[str]:
    """The capabilities that are false; the rest of the body must follow from them."""
    reply = client.get("/ready")
    told: dict[str, Any] = reply.json()
    assert reply.status_code == (200 if told["ingestion_ready"] else 503)
    assert told["status"] == ("ready" if told["ingestion_ready"] else "not_ready")
    capabilities = told["capabilities"]
    assert told["ingestion_ready"] == all(capabilities[bit] for bit in INGESTION)
    assert told["search_ready"] == all(capabilities.values())
    return frozenset(bit for bit, up in capabilities.items() if not up)


def unprivileged() -> list[str]:
    """Root passes over file modes; a server that is started so does not."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]


def mode(of: Path, bits: int) -> None:
    of.chmod(bits)


BROKEN: Final = {
    "file mode of the database": Broken(
        frozenset({"ledger"}),
        lambda place: mode(place.data / "ledger.db", 0o000),
        lambda place: mode(place.data / "ledger.db", 0o600),
    ),
    "database file taken away": Broken(
        frozenset({"ledger"}),
        lambda place: (place.data / "ledger.db").rename(place.data / "elsewhere"),
        lambda place: (place.data / "elsewhere").rename(place.data / "ledger.db"),
    ),
    "coordinator stopped": Broken(
        frozenset({"coordinator"}),
        lambda place: os.kill(place.server.pid, signal.SIGUSR1),
        lambda place: os.kill(place.server.pid, signal.SIGUSR1),
    ),
    "tokenizer file gone": Broken(
        frozenset({"tokenizer"}),
        lambda place: (place.model / "tokenizer.json").rename(place.model / "elsewhere"),
        lambda place: (place.model / "elsewhere").rename(place.model / "tokenizer.json"),
    ),
    "query child stopped": Broken(
        frozenset({"model_executor"}),
        lambda place: os.kill(executor_pid(place.server, "query"), signal.SIGSTOP),
        lambda place: os.kill(executor_pid(place.server, "query"), signal.SIGCONT),
    ),
    # The tokenizer lives in the child that plans.
    "ingest child stopped": Broken(
        frozenset({"model_executor", "tokenizer"}),
        lambda place: os.kill(executor_pid(place.server, "ingest"), signal.SIGSTOP),
        lambda place: os.kill(executor_pid(place.server, "ingest"), signal.SIGCONT),
    ),
}


@contextlib.contextmanager
def up(place: Place) -> Iterator[httpx.Client]:
    with place.server as server, httpx.Client(base_url=server.url, timeout=20.0) as client:
        server.wait_ready("search_ready")
        post(client, "known", "The spare key hangs behind the clock.", 202)
        wait(lambda: recalled(client) == ["known"], BACK_SECONDS, "it is not found")
        yield client


def post(client: httpx.Client, name: str, text: str, *statuses: int) -> int:
    status = client.post(OPERATIONS, json=submissions.memory(name, text)).status_code
    assert status in statuses, (name, status)
    return status


def recalled(client: httpx.Client) -> list[str]:
    reply = client.post("/api/v2/recall", json={"query": "Where is the spare key?", "limit": 5})
    if reply.status_code == 503:
        return []
    return [hit["provenance"]["operation_id"] for hit in reply.json()["results"]]


def wait(held: Callable[[], bool], seconds: float, otherwise: object) -> float:
    began = time.monotonic()
    while not held():
        assert time.monotonic() - began < seconds, str(otherwise)
        time.sleep(0.05)
    return time.monotonic() - began


def flips(place: Place, client: httpx.Client, broken: Broken) -> tuple[float, float]:
    """Break it, see exactly its bits go; undo it, see them come back. Return how long both took."""
    assert place.down(client) == frozenset()
    broken.do(place)
    seen: list[frozenset[str]] = []

    def gone() -> bool:
        seen.append(place.down(client))
        return seen[-1] == broken.down

    noticed = wait(gone, NOTICED_SECONDS, seen)
    # A stopped child is noticed by two clocks that need not tick together; never anything else on the way.
    assert all(each <= broken.down for each in seen), seen
    if broken.down & INGESTION:
        post(client, "refused", "Never stored.", 503)
        assert client.get(f"{OPERATIONS}/refused").status_code in (404, 503)
    else:
        post(client, f"during-{len(broken.down)}", "Accepted all the same.", 202, 200)
    assert client.get("/health").status_code == 200
    assert place.down(client) == broken.down, "it stays so"
    broken.undo(place)
    back = wait(lambda: place.down(client) == frozenset(), BACK_SECONDS, "it does not come back")
    return noticed, back


def test_each_real_thing_flips_its_own_bit_and_returns(tmp_path: Path) -> None:
    place = Place(tmp_path, embedder="onnx")
    took = {}
    with up(place) as client:
        for name, broken in BROKEN.items():
            print(name)
            took[name] = flips(place, client, broken)
        post(client, "after", "And on it goes.", 202)
        assert "known" in recalled(client)
    for name, (noticed, back) in took.items():
        print(f"{name}: noticed after {noticed:.1f} s, back after {back:.1f} s")
    assert {bit for broken in BROKEN.values() for bit in broken.down} == set(BITS) - {
        "storage",
        "search_index",
    }


def test_a_disk_that_is_full_flips_storage_alone_and_it_returns(tmp_path: Path) -> None:
    with reserve_reached(tmp_path) as disk, disk.server() as server:
        server.wait_ready("search_ready")
        with httpx.Client(base_url=server.url, timeout=20.0) as client:
            seen: list[frozenset[str]] = []

            def full() -> bool:
                seen.append(down(client))
                return seen[-1] == {"storage"}

            assert down(client) == frozenset()
            disk.fill(server, client)
            wait(full, NOTICED_SECONDS, seen)
            assert set(seen) <= {frozenset(), frozenset({"storage"})}
            post(client, "refused", "Never stored.", 503)
            disk.free(server)
            wait(lambda: down(client) == frozenset(), BACK_SECONDS, "it does not come back")
            post(client, "after", "There is room.", 202)


def test_a_device_that_was_dropped_is_noticed_and_filled_again(tmp_path: Path) -> None:
    """The bit is down for the moment that filling takes; recall never says a shorter list meanwhile."""
    slow = """
load = feed.Feed._load
async def slowly(self):
    await asyncio.sleep(1.5)
    await load(self)
feed.Feed._load = slowly
"""
    place = Place(tmp_path, slow)
    with up(place) as client:
        os.kill(place.server.pid, signal.SIGUSR2)
        seen = []

        def gone() -> bool:
            reply = client.post("/api/v2/recall", json={"query": "Where is the spare key?", "limit": 5})
            assert reply.status_code == 503 or reply.json()["results"], "an empty answer hides a dead index"
            seen.append(place.down(client))
            return seen[-1] == {"search_index"}

        wait(gone, NOTICED_SECONDS, seen)
        assert set(seen) <= {frozenset(), frozenset({"search_index"})}
        post(client, "during", "Accepted all the same.", 202)
        wait(lambda: place.down(client) == frozenset(), BACK_SECONDS, "it does not come back")
        wait(lambda: recalled(client)[:1] == ["known"], BACK_SECONDS, "it is lost")


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        ("ledger", "file mode of the database"),
        ("coordinator", "coordinator stopped"),
        ("tokenizer", "tokenizer file gone"),
        ("model_executor", "query child stopped"),
    ],
)
def test_control_a_bit_that_says_true_is_noticed(tmp_path: Path, bit: str, name: str) -> None:
    embedder = "onnx" if bit == "tokenizer" else "synthetic"
    place = Place(tmp_path, BLIND.format(bit=bit), embedder)
    with up(place) as client, pytest.raises(AssertionError):
        flips(place, client, BROKEN[name])
