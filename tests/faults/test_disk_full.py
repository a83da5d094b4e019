"""A disk that is full, then freed (R6): a clean no, reads go on, and writes go on again without a restart.

The disk is a tmpfs of a few megabytes in a mount namespace, which an ordinary user may have inside a user
namespace; or a limit on the size of files, which is raised again.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from os import kill
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec
import pytest

from tests.support import submissions, truth
from tests.support.live import OPERATIONS, executor_pid, patched
from tests.support.server import Server
from tests.support.truth import Accepted, Fact, Stood
from tests.support.wrapped import WrappedServer

DISK_BYTES: Final = 6 * 1024 * 1024
FILE_BYTES_MAX: Final = 900 * 1024
BLOCK_BYTES: Final = 16 * 1024
FREED_SECONDS: Final = 5.0
NOT_READY_SECONDS: Final = 3.0
PROBE_SECONDS: Final = 0.1
SETTLE_SECONDS: Final = 30.0
REFUSALS_MIN: Final = 3
FILLERS_MAX: Final = 2000
TERMINAL: Final = ("committed", "rejected")
READY_KEYS: Final = {"capabilities", "ingestion_ready", "search_ready", "status"}


class Disk(Protocol):
    """Where a server keeps its data, and how that place is filled and freed."""

    def server(self, environ: Mapping[str, str] | None = None) -> WrappedServer: ...
    def fill(self, server: WrappedServer, client: httpx.Client) -> list[dict[str, Any]]:
        """Leave no room; return the operations that were accepted on the way."""
        ...

    def free(self, server: WrappedServer) -> None: ...
    def copy_out(self, to: Path) -> None: ...


class SmallDisk:
    """A tmpfs that only processes in its namespace see; held by a process that ends when its input does."""

    WAYS: Final = (("--user", "--map-root-user", "--mount"), ("--mount",))
    HOLD: Final = 'mount -t tmpfs -o "size=$1" tmpfs "$0" && echo mounted && exec cat'

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._mount_point = directory / "disk"
        self._mount_point.mkdir()
        self._log_dir = directory
        self._reserve_bytes = reserve_bytes
        self._holder, self._enter = self._held()

    def _held(self) -> tuple["subprocess.Popen[str]", list[str]]:
        said = []
        for way in self.WAYS:
            holder = subprocess.Popen(
                ["unshare", *way, "sh", "-c", self.HOLD, str(self._mount_point), str(DISK_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert holder.stdout is not None
            if holder.stdout.readline() == "mounted\n":
                user = ["--user", "--preserve-credentials"] if "--user" in way else []
                return holder, ["nsenter", "--target", str(holder.pid), *user, "--mount", "--"]
            said.append(holder.communicate()[1].strip())
        raise AssertionError(f"no small disk can be mounted here, neither as a user nor as root: {said}")

    def close(self) -> None:
        """Let go of the disk; what is on it is gone."""
        self._holder.communicate()

    @property
    def _seen(self) -> Path:
        """The disk as this process can reach it."""
        return Path(f"/proc/{self._holder.pid}/root") / self._mount_point.relative_to("/")

    def server(self, environ: Mapping[str, str] | None = None) -> WrappedServer:
        return WrappedServer(
            self._mount_point / "store",
            self._enter,
            log_dir=self._log_dir,
            environ=environ,
            storage_reserve_bytes=self._reserve_bytes,
            probe_seconds=PROBE_SECONDS,
        )

    def fill(self, server: WrappedServer, client: httpx.Client) -> list[dict[str, Any]]:
        """Leave half of the reserve, or nothing at all."""
        size = BLOCK_BYTES
        with (self._seen / "ballast").open("wb", buffering=0) as ballast:
            while self._free_bytes() > self._reserve_bytes // 2:
                try:
                    ballast.write(bytes(size))
                except OSError:
                    break
        return []

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._seen).free

    def free(self, server: WrappedServer) -> None:
        (self._seen / "ballast").unlink()

    def copy_out(self, to: Path) -> None:
        shutil.copytree(self._seen / "store", to)


class LimitedFiles:
    """A limit on the size of each file that the server writes, as a quota would be; its log runs into it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def server(self, environ: Mapping[str, str] | None = None) -> WrappedServer:
        limit = ["prlimit", f"--fsize={FILE_BYTES_MAX}:unlimited", "--"]
        return WrappedServer(
            self._directory / "store",
            limit,
            environ=environ,
            log_dir=self._directory,
            log_level="error",  # The limit is on its log too.
            probe_seconds=PROBE_SECONDS,
        )

    def fill(self, server: WrappedServer, client: httpx.Client) -> list[dict[str, Any]]:
        """Write until the log may not grow any more, not even by the smallest operation."""
        stored, refused_in_a_row = [], 0
        for number in range(FILLERS_MAX):
            words = {} if refused_in_a_row else {"description": "x" * 2000}
            operation = submissions.stream(f"filler-{number}", f"filler {number}", **words)
            if client.post(OPERATIONS, json=operation).status_code == 202:
                stored.append(operation)
                refused_in_a_row = min(refused_in_a_row, 1)
            elif (refused_in_a_row := refused_in_a_row + 1) == REFUSALS_MIN:
                return stored
        raise AssertionError("the files may grow for ever")

    def free(self, server: WrappedServer) -> None:
        subprocess.run(["prlimit", f"--pid={server.pid}", "--fsize=unlimited:unlimited"], check=True)

    def copy_out(self, to: Path) -> None:
        shutil.copytree(self._directory / "store", to)


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[Disk]:
    with contextlib.closing(SmallDisk(directory, 0)) as disk:
        yield disk


@contextlib.contextmanager
def reserve_reached(directory: Path) -> Iterator[Disk]:
    with contextlib.closing(SmallDisk(directory, 1024 * 1024)) as disk:
        yield disk


@contextlib.contextmanager
def limited_files(directory: Path) -> Iterator[Disk]:
    yield LimitedFiles(directory)


DISKS: Final[Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Disk]]]] = {
    "full disk": full_disk,
    "reserve reached": reserve_reached,
    "limited files": limited_files,
}

EARLY: Final = tuple(
    submissions.memory(
        f"early-{number}", f"The spare key number {number} hangs behind the clock.", user_id="ann"
    )
    for number in range(3)
)
WAITS: Final = submissions.memory("waits", "Accepted while there was room, done when there is room again.")
LATE: Final = (
    submissions.memory("late-1", "Refused at first."),
    submissions.stream("late-2", "refused at first"),
    submissions.memory("late-3", "Long and refused. " * 500),
)


class Seen(msgspec.Struct):
    """What a run has shown."""

    facts: list[Fact] = []
    refusals: int = 0
    reads: int = 0
    seconds_until_accepted: float = 0.0


def post(client: httpx.Client, operation: Mapping[str, Any], seen: Seen) -> httpx.Response:
    answer = client.post(OPERATIONS, json=operation)
    if answer.is_success:
        receipt = answer.json()
        seen.facts += [
            Accepted(receipt["operation_id"], receipt["payload_hash"]),
            Stood(receipt["operation_id"], receipt["state"]),
        ]
    return answer


def accepted(client: httpx.Client, operation: Mapping[str, Any], seen: Seen) -> None:
    answer = post(client, operation, seen)
    assert answer.status_code == 202, answer.text


def refused(client: httpx.Client, operation: Mapping[str, Any], seen: Seen) -> None:
    answer = post(client, operation, seen)
    assert answer.status_code == 503, f"{answer.status_code}: {answer.text}"
    assert answer.json().keys() == {"error"}
    assert "operation ledger unavailable" in answer.json()["error"]
    assert "unknown" not in answer.json()["error"], "the outcome of this write is unknown"
    seen.refusals += 1


def receipt(client: httpx.Client, name: str) -> dict[str, Any]:
    answer = client.get(f"{OPERATIONS}/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def settled(client: httpx.Client, names: list[str], seen: Seen) -> None:
    give_up = time.monotonic() + SETTLE_SECONDS
    for name in names:
        while (found := receipt(client, name))["state"] not in TERMINAL:
            assert time.monotonic() < give_up, found
            time.sleep(0.02)
        assert found["state"] == "committed", found
        seen.facts.append(Stood(name, "committed"))


def names(operations: tuple[dict[str, Any], ...] | list[dict[str, Any]]) -> list[str]:
    return [operation["operation_id"] for operation in operations]


def not_ready(client: httpx.Client) -> dict[str, Any]:
    """Wait until the measurement from before is too old."""
    give_up = time.monotonic() + NOT_READY_SECONDS
    while (ready := client.get("/ready")).status_code != 503:
        assert time.monotonic() < give_up, f"there is no room, and /ready says {ready.text}"
        time.sleep(0.02)
    shown: dict[str, Any] = ready.json()
    return shown


def while_full(client: httpx.Client, seen: Seen, *, in_reserve: bool) -> None:
    """Nothing is written, and everything that can be read is read."""
    shown = not_ready(client)
    assert shown.keys() == READY_KEYS
    assert not (shown["capabilities"]["ledger"] and shown["capabilities"]["storage"]), shown
    assert shown["ingestion_ready"] is False
    for operation in LATE:
        refused(client, operation, seen)
        assert client.get(f"{OPERATIONS}/{operation['operation_id']}").status_code == 404
    assert client.get("/health").status_code == 200
    for name in names(EARLY):
        found = receipt(client, name)
        assert found["state"] == "committed"
        assert client.get(f"/api/v2/memories/{found['result']['id']}").json()["operation_id"] == name
        stream = client.get(f"{OPERATIONS}/{name}/events", params={"after": 0})
        assert [line for line in stream.text.splitlines() if line.startswith("id:")] == [
            f"id: {sequence}" for sequence in range(1, 7)
        ]
        seen.reads += 3
    recalled = client.post("/api/v2/recall", json={"query": "spare key behind the clock", "user_id": "ann"})
    assert recalled.status_code == 200, recalled.text
    assert {row["provenance"]["operation_id"] for row in recalled.json()["results"]} == set(names(EARLY))
    if in_reserve:
        settled(client, ["waits"], seen)
    else:
        assert receipt(client, "waits")["state"] not in TERMINAL
    # A replay changes nothing, but POST says 503 whenever ingestion is not ready.
    refused(client, EARLY[0], seen)


def run(
    disk: Disk,
    directory: Path,
    environ: Mapping[str, str] | None = None,
    *,
    in_reserve: bool = False,
) -> tuple[Seen, str]:
    """Fill the disk under a server that has work to do, then free it.

    A reserve that is reached is noticed when storage is looked at next, a full disk by whoever writes. In the
    reserve, what was accepted goes on.
    """
    seen = Seen()
    server = disk.server(environ)
    with server:
        pid = server.wait_ready("search_ready").pid
        child = executor_pid(server)
        with httpx.Client(base_url=server.url, timeout=20.0) as client:
            for operation in EARLY:
                accepted(client, operation, seen)
            settled(client, names(EARLY), seen)
            kill(child, signal.SIGSTOP)
            accepted(client, WAITS, seen)
            fillers = disk.fill(server, client)
            seen.facts += [Accepted(each["operation_id"], each["payload_hash"]) for each in fillers]
            kill(child, signal.SIGCONT)
            if not in_reserve:
                refused(client, LATE[0], seen)
            while_full(client, seen, in_reserve=in_reserve)
            for operation in LATE:
                assert client.get(f"{OPERATIONS}/{operation['operation_id']}").status_code == 404

            disk.free(server)
            began = time.monotonic()
            while post(client, LATE[0], seen).status_code != 202:
                assert time.monotonic() - began < FREED_SECONDS, "there is room, and nothing is accepted"
                time.sleep(0.05)
            seen.seconds_until_accepted = time.monotonic() - began
            assert client.get(f"{OPERATIONS}/{LATE[1]['operation_id']}").status_code == 404
            for operation in LATE[1:]:
                accepted(client, operation, seen)
            settled(client, names([*EARLY, WAITS, *LATE, *fillers]), seen)
            assert client.get("/ready").status_code == 200
        assert server.pid == pid
        assert server.terminate() == 0
    disk.copy_out(directory / "out")
    return seen, truth.verify(directory / "out", seen.facts)


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk_is_a_clean_no_until_it_is_freed(tmp_path: Path, kind: str) -> None:
    with DISKS[kind](tmp_path) as disk:
        seen, digest = run(disk, tmp_path, in_reserve=kind == "reserve reached")

    print(
        f"{kind}: {seen.refusals} refusals, {seen.reads} reads while full, accepted again after "
        f"{seen.seconds_until_accepted:.2f} s, {len(seen.facts)} facts kept"
    )
    assert seen.refusals >= REFUSALS_MIN
    assert kind == "limited files" or digest == undisturbed(tmp_path / "undisturbed")


def undisturbed(directory: Path) -> str:
    """The outcome of the same operations with room for all."""
    with Server(directory) as server:
        with httpx.Client(base_url=server.url, timeout=20.0) as client:
            for operation in (*EARLY, WAITS, *LATE):
                accepted(client, operation, Seen())
            settled(client, names([*EARLY, WAITS, *LATE]), Seen())
        assert server.terminate() == 0
    return truth.verify(directory)


# Controls

LIMIT_IS_UNKNOWN: Final = """
from muniment.adapters.sqlite import connection
connection.FULL_ERRNOS = frozenset()
"""

PROBES_SAY_TRUE: Final = """
from muniment.runtime import readiness
async def fine(probe):
    return None
readiness._reason = fine
"""

NEVER_LOOKS_AGAIN: Final = """
from muniment.runtime.readiness import ReadinessGauge
start = ReadinessGauge._start
def once(self):
    if self._last is not None and not self._last.ingestion_ready:
        return self._running
    return start(self)
ReadinessGauge._start = once
"""

FULL_IS_A_BUG: Final = """
from muniment.adapters.sqlite import ledger
from muniment.errors import InvariantBroken
commit = ledger.SqliteLedger._committed
def fragile(self, batch):
    replies, sealed = commit(self, batch)
    if replies and replies[0].error is not None and 'full' in str(replies[0].error):
        raise InvariantBroken('the disk is full')
    return replies, sealed
ledger.SqliteLedger._committed = fragile
"""


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (LIMIT_IS_UNKNOWN, "outcome of this write is unknown|ConnectError|ReadError|RemoteProtocolError"),
        (PROBES_SAY_TRUE, "there is no room, and /ready says"),
        (NEVER_LOOKS_AGAIN, "there is room, and nothing is accepted"),
        (FULL_IS_A_BUG, "outcome of this write is unknown|ConnectError|ReadError|RemoteProtocolError"),
    ],
    ids=["limit is unknown", "probes say true", "never looks again", "full is a bug"],
)
def test_control_a_server_that_breaks_the_rule_is_noticed(tmp_path: Path, code: str, complaint: str) -> None:
    with limited_files(tmp_path) as disk, pytest.raises((AssertionError, httpx.TransportError)) as caught:
        run(disk, tmp_path, patched(tmp_path / "patch", code))

    assert re.search(complaint, f"{caught.type.__name__}: {caught.value}")
