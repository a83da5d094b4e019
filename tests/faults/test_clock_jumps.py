"""Jumps of the wall clock under a running server (R14): nothing is taken for a stall, no time runs backwards.

libfaketime stands between the server and its clock and reads what time it is from a file, in the server and
in its children. The monotonic clock stays real, as it does where an administrator or NTP sets the time.
Whether the clock jumped is read in the server's own receipts.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

from muniment.model.times import parse_rfc3339, rfc3339
from tests.support import submissions, truth
from tests.support.live import OPERATIONS, patched
from tests.support.seed_contract import OURS, operation_path
from tests.support.server import Server, group
from tests.support.truth import Accepted, Fact, Stood

DAY: Final = 86_400
SECOND_US: Final = 1_000_000
JUMP_SECONDS: Final = 60.0
"""Two readings that are further apart than the time between them by this much: the clock jumped."""
JUMPS_MIN: Final = 28
SETTLE_SECONDS: Final = 30.0
KEEPALIVE_SECONDS: Final = 0.1
KEEPALIVES_MIN: Final = 3
POLL_SECONDS: Final = 0.02
POLLS_MIN: Final = 40
SILENCE_SECONDS: Final = 2.0
TERMINAL: Final = ("committed", "rejected")
TEXT: Final = "The lighthouse keeper paints the railing every spring."


class Clock:
    """The wall clock of a server and its children, which this process sets."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self.set("+0")

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to see this clock."""
        return {
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",  # Otherwise it looks into the file every ten seconds.
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # With it, waits for the interpreter lock return at once.
            "NO_FAKE_STAT": "1",  # The times of files come from the kernel's clock.
            "TZ": "UTC",
        }

    def set(self, text: str) -> None:
        """Say what libfaketime is to make of the time; whoever looks sees the old text or the new one."""
        whole = self._file.with_suffix(".next")
        whole.write_text(text + "\n", "ascii")
        whole.replace(self._file)

    def shift(self, seconds: float) -> None:
        """Let the clock run on, so many seconds away from the real time."""
        self.set(f"{seconds:+.0f}")

    def run_from(self, moment: str) -> None:
        """Let the clock run on from ``moment``, an RFC 3339 time."""
        self.shift(parse_rfc3339(moment) / SECOND_US - time.time())

    def stop(self) -> None:
        """Stop the clock at the real time."""
        self.set(datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))


def _library() -> str:
    """The library that ``faketime`` puts in front of the C library."""
    assert shutil.which("faketime"), "this needs faketime; on Debian or Ubuntu: apt-get install faketime"
    shown = subprocess.run(
        ["faketime", "-m", "-f", "+0d", "printenv", "LD_PRELOAD"], check=True, capture_output=True, text=True
    )
    return shown.stdout.strip()


Setting = Callable[[Clock], None]
CASES: Final[Mapping[str, Sequence[Setting]]] = {
    "30 days back": [lambda clock: clock.shift(-30 * DAY)],
    "a day ahead": [lambda clock: clock.shift(DAY)],
    "1970": [lambda clock: clock.run_from("1970-01-01T00:00:01Z")],
    "2038, over the end of 32 bits": [lambda clock: clock.run_from("2038-01-19T03:14:06Z")],
    "before 1970": [lambda clock: clock.run_from("1969-12-31T23:00:00Z")],
    "2106, over the end of 32 bits without a sign": [lambda clock: clock.run_from("2106-02-07T06:28:14Z")],
    "frozen": [Clock.stop],
    "back and forth": [lambda clock: clock.shift(-30 * DAY), lambda clock: clock.shift(DAY)] * 10,
    "right again": [lambda clock: clock.shift(0)],
}
START_CASES: Final = ("30 days back", "2106, over the end of 32 bits without a sign", "frozen")


# What is watched all the time


class Watch:
    """Asks ``/ready`` again and again, and keeps every answer that is not an unreserved yes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self.polls = 0
        self.wrong: list[Any] = []

    def _poll(self) -> None:
        with httpx.Client(base_url=self._url, timeout=SETTLE_SECONDS) as client:
            while not self._over.is_set():
                try:
                    answer = client.get("/ready")
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return
                self.polls += 1
                if answer.status_code != 200 or not answer.json()["search_ready"]:
                    self.wrong.append(answer.json())
                time.sleep(POLL_SECONDS)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SETTLE_SECONDS)


class Idle:
    """An open stream of an operation that waits; counts the signs of life that the server sends on it."""

    def __init__(self, url: str, operation_id: str) -> None:
        self._url = url + operation_path(operation_id, "/events")
        self._thread = threading.Thread(target=self._read, name="idle", daemon=True)
        self._over = threading.Event()
        self.comments = 0

    def _read(self) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.stream("GET", self._url, timeout=60) as response:
            for chunk in response.iter_raw():
                self.comments += chunk.startswith(b":")
                if self._over.is_set():
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SETTLE_SECONDS)


# What is done in each case


class Story:
    """Operations that are told to one server while its clock jumps, and what was heard of them."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.ids: list[str] = []
        self.facts: list[Fact] = []
        self.receipts: dict[str, dict[str, Any]] = {}
        self.jumps = 0
        self.polls = 0
        self._seen: tuple[int, float] | None = None

    def post(self, submission: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post(OPERATIONS, json=submission)
        assert answer.status_code == 202, answer.text
        receipt: dict[str, Any] = answer.json()
        self.ids.append(submission["operation_id"])
        self.facts.append(Accepted(submission["operation_id"], submission["payload_hash"]))
        return receipt

    def look_at_the_clock(self, name: str) -> int:
        """What time the ledger takes it to be, in microseconds; counts a jump since the last look."""
        now = parse_rfc3339(self.post(submissions.stream(f"clock-{name}", f"clock {name}"))["created_at"])
        real = time.monotonic()
        if self._seen is not None:
            before, then = self._seen
            self.jumps += abs((now - before) / SECOND_US - (real - then)) > JUMP_SECONDS
        self._seen = now, real
        return now

    def settled(self, operation_id: str) -> dict[str, Any]:
        give_up = time.monotonic() + SETTLE_SECONDS
        while True:
            receipt: dict[str, Any] = self._client.get(operation_path(operation_id)).json()
            if receipt["state"] in TERMINAL:
                self.facts.append(Stood(operation_id, receipt["state"]))
                self.receipts[operation_id] = receipt
                return receipt
            assert time.monotonic() < give_up, f"{operation_id} does not go on: {receipt}"
            time.sleep(0.01)

    def recalled(self) -> list[str]:
        """Which operations a recall finds now."""
        answer = self._client.post("/api/v2/recall", json={"query": TEXT, "limit": 50})
        assert answer.status_code == 200, answer.text
        return [each["provenance"]["operation_id"] for each in answer.json()["results"]]

    def times(self, operation_id: str) -> list[str]:
        """When the events of an ended operation occurred, as they are told."""
        answer = self._client.get(operation_path(operation_id, "/events"))
        return [event["occurred_at"] for event in OURS.check_frames(answer.content)]

    def check_times(self) -> None:
        """No time of an operation is before an earlier one of the same operation."""
        for operation_id in self.ids:
            receipt = self.receipts.get(operation_id) or self.settled(operation_id)
            moments = [parse_rfc3339(each) for each in self.times(operation_id)]
            assert moments == sorted(moments), f"event times of {operation_id} decrease: {moments}"
            created, updated = (parse_rfc3339(receipt[name]) for name in ("created_at", "updated_at"))
            assert created <= updated, f"{operation_id} was updated before it was created: {receipt}"
            assert (created, updated) == (moments[0], moments[-1])

    def check_executor(self) -> None:
        """Nothing is told of an executor that ended, or of a second one."""
        shown = list(self.receipts.values())
        assert {receipt["executor_exit_count"] for receipt in shown} == {0}
        assert {receipt["executor_last_exit"] for receipt in shown} == {None}
        assert len({receipt["executor_generation"] for receipt in shown} - {0}) == 1


def blocked_by(operation_id: str, dependency: str) -> dict[str, Any]:
    return submissions.memory(operation_id, f"{TEXT} {operation_id}") | {"dependencies": [dependency]}


def tell(story: Story, clock: Clock, name: str, settings: Sequence[Setting], expires_us: int) -> None:
    """Set the clock; then what was under way ends, new work ends, and recall hides what has expired."""
    story.post(blocked_by(f"over {name}", f"release {name}"))
    now = 0
    for number, each in enumerate(settings):
        each(clock)
        now = story.look_at_the_clock(f"{name} {number}")
        story.post(submissions.memory(f"memory {name} {number}", f"{TEXT} {name} {number}"))
    story.post(submissions.stream(f"release {name}", f"release {name}"))
    last = f"memory {name} {len(settings) - 1}"
    for operation_id in (f"over {name}", last, f"release {name}"):
        assert story.settled(operation_id)["state"] == "committed"
    found = story.recalled()
    assert last in found
    assert ("ages" in found) == (now < expires_us), f"{name}: it is {rfc3339(now)}"


def executors(server: Server) -> dict[int, bytes]:
    """The server's children."""
    return {pid: command for pid, command in group(server.pid).items() if pid != server.pid}


def live_through(server: Server, clock: Clock, names: tuple[str, ...]) -> Story:
    """Let the clock of a server that is ready jump; raises AssertionError for whatever must not follow."""
    children = executors(server)
    assert children
    expires = datetime.now(UTC) + timedelta(hours=1)
    with httpx.Client(base_url=server.url, timeout=SETTLE_SECONDS) as client:
        story = Story(client)
        story.post(submissions.memory("ages", TEXT, expires_at=expires.isoformat()))
        story.settled("ages")
        story.post(blocked_by("idle", "end"))
        story.look_at_the_clock("at first")
        with Watch(server.url) as watch, Idle(server.url, "idle") as idle:
            for name in names:
                before = idle.comments
                tell(story, clock, name, CASES[name], parse_rfc3339(expires.isoformat()))
                _until(
                    lambda before=before: idle.comments >= before + KEEPALIVES_MIN,  # type: ignore[misc]
                    f"no sign of life: {name}",
                )
                assert not watch.wrong, f"{name}: not ready: {watch.wrong[0]}"
                assert executors(server) == children, f"{name}: other children: {executors(server)}"
        story.polls = watch.polls
        story.post(submissions.stream("end", "end"))
        story.check_times()
        story.check_executor()
    return story


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + SETTLE_SECONDS
    while not condition():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.005)


SETTINGS: Final[dict[str, Any]] = {
    "event_keepalive_seconds": KEEPALIVE_SECONDS,
    "probe_seconds": 0.05,
    "executor_silence_seconds": SILENCE_SECONDS,
    "executor_heartbeat_seconds": 0.5,
}


@contextlib.contextmanager
def served(directory: Path, clock: Clock, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    chosen = {**clock.environ, **(environ or {})}
    with Server(directory / "store", environ=chosen, **SETTINGS) as server:
        yield server.wait_ready("search_ready")


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    with served(tmp_path, clock) as server:
        story = live_through(server, clock, tuple(CASES))
        server.terminate()
    print(
        f"the clock was set in {len(CASES)} ways; jumps that the ledger saw: {story.jumps}; "
        f"found ready {story.polls} times"
    )
    assert story.jumps >= JUMPS_MIN
    assert story.polls >= POLLS_MIN
    truth.verify(tmp_path / "store", story.facts)


def test_a_frozen_clock_stands_still_in_receipts(tmp_path: Path) -> None:
    """And silence of the executor is still found out, since it is not the wall clock that measures it."""
    clock = Clock(tmp_path)
    clock.stop()
    with served(tmp_path, clock) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        story = Story(client)
        story.post(submissions.memory("frozen", TEXT))
        receipt = story.settled("frozen")
        assert {*story.times("frozen"), receipt["created_at"], receipt["updated_at"]} == {
            receipt["created_at"]
        }
        children = executors(server)
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        _until(lambda: not client.get("/ready").json()["search_ready"], "silence is not noticed")
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # Killed for its silence.
                os.kill(pid, signal.SIGCONT)
        _until(lambda: client.get("/ready").json()["search_ready"], "not ready again")
        server.terminate()
    truth.verify(tmp_path / "store", story.facts)


def test_restarts_under_a_clock_that_jumped(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    facts: list[Fact] = []
    generations, moments = [], []
    with served(tmp_path, clock) as server:
        for number, name in enumerate((*START_CASES, None)):
            with httpx.Client(base_url=server.url, timeout=30) as client:
                story = Story(client)
                moments.append(story.look_at_the_clock(f"start {number}"))
                story.post(submissions.memory(f"start {number}", f"{TEXT} {number}"))
                generations.append(story.settled(f"start {number}")["executor_generation"])
                if number:
                    story.post(submissions.stream(f"release {number - 1}", f"release {number - 1}"))
                    story.ids.append(f"over {number - 1}")
                story.check_times()
                story.post(blocked_by(f"over {number}", f"release {number}"))
                facts += story.facts
            if name is not None:
                server.terminate() if number % 2 else server.kill()
                CASES[name][-1](clock)
                server.start().wait_ready("search_ready")
        server.terminate()
    print(f"generations {generations}, at {[rfc3339(moment) for moment in moments]}")
    assert generations == sorted(set(generations))
    assert len(generations) == len(START_CASES) + 1
    steps = [abs(after - before) for before, after in itertools.pairwise(moments)]
    assert sum(step > JUMP_SECONDS * SECOND_US for step in steps) >= len(START_CASES)
    truth.verify(tmp_path / "store", facts)


# Controls: servers with a planted fault, and a clock that does not jump; the same steps must find each.

TIMES_ARE_THE_RAW_CLOCK: Final = """
from muniment.stages import ledger
ledger._at = lambda row, now: now
"""
WAITS_BY_THE_WALL_CLOCK: Final = """
import time
time.monotonic = time.time
"""


@pytest.mark.parametrize(
    ("code", "names", "found"),
    [
        (TIMES_ARE_THE_RAW_CLOCK, ("a day ahead", "30 days back"), "event times of .* decrease"),
        (
            WAITS_BY_THE_WALL_CLOCK,
            ("a day ahead", "right again", "back and forth", "a day ahead"),
            "not ready|other children",
        ),
    ],
    ids=["event times are the raw clock", "silence is measured by the wall clock"],
)
def test_control_a_server_that_believes_its_clock_is_noticed(
    tmp_path: Path, code: str, names: tuple[str, ...], found: str
) -> None:
    clock = Clock(tmp_path)
    with (
        served(tmp_path, clock, patched(tmp_path / "patch", code)) as server,
        pytest.raises(AssertionError, match=found),
    ):
        live_through(server, clock, names)


def test_control_a_clock_that_does_not_jump_is_noticed(tmp_path: Path) -> None:
    """The file is written and nobody reads it."""
    clock = Clock(tmp_path)
    with served(tmp_path, clock, {"LD_PRELOAD": ""}) as server:
        assert live_through(server, clock, ("right again",)).jumps == 0
