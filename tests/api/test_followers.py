"""A thousand followers of one operation, from another process: the same bytes for each, at a bounded cost."""

import contextlib
import resource
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support import streams, submissions
from tests.support.crowd import Crowd, Group, many_descriptors
from tests.support.live import OPERATIONS, patched
from tests.support.received import received
from tests.support.seed_contract import operation_path
from tests.support.server import Server

FOLLOWERS: Final = 1000
EARLY: Final = 20
BYTES_EACH_MAX: Final = 60_000
"""What the server may take for one open stream, its connection included."""
BYTES_LEFT_MAX: Final = 10_000
"""What may be left of one that has ended, after as many have been there before."""
DESCRIPTORS_SPARE: Final = 40
DESCRIPTORS_FEW: Final = 228
CONNECTIONS: Final = 200
BUSY_MAX: Final = 0.5
WAIT_SECONDS: Final = 30.0


@contextlib.contextmanager
def served(directory: Path, code: str = "") -> Iterator[Server]:
    environ = patched(directory / "patch", code) if code else None
    with many_descriptors() as limit:
        assert limit > 2 * FOLLOWERS, (
            f"this needs {2 * FOLLOWERS} file descriptors a process; allowed are {limit}"
        )
        with Server(directory / "store", environ=environ, event_keepalive_seconds=5) as server:
            yield server.wait_ready("search_ready")


def post(server: Server, *several: dict[str, Any]) -> None:
    with httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
        for submission in several:
            answer = client.post(OPERATIONS, json=submission)
            assert answer.status_code == 202, answer.text


def blocked(operation_id: str, dependency: str) -> dict[str, Any]:
    return submissions.memory(operation_id) | {"dependencies": [dependency]}


def resident_bytes(server: Server) -> int:
    [line] = [each for each in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmRSS" in each]
    return int(line.split()[1]) * 1024


class Round:
    """Many followers come, hear the end of an operation and go."""

    def __init__(
        self, server: Server, number: int, *, followers: int, early: int, seconds: float = WAIT_SECONDS
    ) -> None:
        self.followers, self.early = followers, early
        operation_id, early_id, release = f"é {number}", f"early {number}", f"release {number}"
        post(server, blocked(operation_id, release))
        whole = streams.request(operation_id)
        groups = [
            Group("readers", whole, followers - 1, events=3),
            Group("unread", whole, unread=True),
            Group("in the middle", streams.request(operation_id, 2), events=1),
            Group("early", streams.request(early_id), early, early=True),
        ]
        before = resident_bytes(server)
        with Crowd(server.url, groups, seconds) as crowd:
            crowd.in_place()
            self.bytes_each = (resident_bytes(server) - before) / followers
            post(server, submissions.memory(early_id), submissions.stream(release, release))
            began = time.monotonic()
            self.heard = crowd.heard()
            self.seconds = time.monotonic() - began
        self.whole = streams.replay(server.url, operation_id).frames
        self.nothing_left = received(streams.read(server.url, streams.request(operation_id, 7)))
        self.whole_early = streams.replay(server.url, early_id).frames
        _until_closed(server)
        self.bytes_left = (resident_bytes(server) - before) / followers

    def check(self) -> None:
        """Raise AssertionError unless each follower heard what it should have, to its end."""
        each = [part + b"\n\n" for part in self.whole.split(b"\n\n")[:-1]]
        assert len(each) == 7
        asked = {
            "readers": (self.whole, self.followers - 1),
            "unread": (self.whole, 1),
            "in the middle": (b"".join(each[2:]), 1),
            "early": (self.whole_early, self.early),
        }
        for name, (frames, count) in asked.items():
            heard = self.heard[name]
            assert heard.frames == {sha256(frames).hexdigest(): count}, f"other bytes: {name}: {heard}"
            assert heard.ended == count, f"not ended: {name}: {heard}"
        assert self.heard["early"].refusals >= self.early
        assert (self.nothing_left.frames, self.nothing_left.ended) == (b"", True)
        assert self.bytes_each <= BYTES_EACH_MAX, f"{self.bytes_each:.0f} bytes for each follower"


def test_a_thousand_followers(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        rounds = [Round(server, number, followers=FOLLOWERS, early=EARLY) for number in range(2)]
        assert server.terminate() == 0
    for each in rounds:
        print(
            f"{FOLLOWERS} followers: {each.bytes_each:.0f} bytes each, {each.bytes_left:.0f} left; all told "
            f"after {each.seconds:.2f} s; early ones were refused {each.heard['early'].refusals} times"
        )
        each.check()
    assert rounds[1].bytes_left <= BYTES_LEFT_MAX, "followers that have gone leave something behind"


def _descriptors(server: Server) -> int:
    return len([*Path(f"/proc/{server.pid}/fd").iterdir()])


def _until_closed(server: Server) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while _descriptors(server) > FOLLOWERS // 10:
        assert time.monotonic() < give_up, "connections stay open"
        time.sleep(0.02)


# No file descriptor is left


def test_a_server_without_free_descriptors_lives_on(tmp_path: Path) -> None:
    """It refuses new connections, and writes with a reason; it does not spin, and recovers by itself."""
    with served(tmp_path) as server, httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as kept:
        post(server, blocked("waits", "release"))
        assert kept.get("/health").status_code == 200
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        allowed = _descriptors(server) + DESCRIPTORS_SPARE
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (allowed, hard))
        with Crowd(server.url, [Group("many", streams.request("waits"), CONNECTIONS, events=3)]) as crowd:
            crowd.in_place()
            assert _descriptors(server) >= allowed - 2
            refused = _used_at_the_limit(kept, server)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
            give_up = time.monotonic() + WAIT_SECONDS
            while kept.post(OPERATIONS, json=submissions.stream("release", "release")).status_code != 202:
                assert time.monotonic() < give_up, kept.get("/ready").text
                time.sleep(0.05)
            heard = crowd.heard()["many"]
        print(
            f"{allowed} descriptors: {heard.ended} of {CONNECTIONS} streams were served, {heard.broken} "
            f"connections refused; {refused} writes refused at the limit"
        )
        assert heard.broken >= CONNECTIONS - DESCRIPTORS_SPARE
        assert heard.ended >= DESCRIPTORS_SPARE // 2
        assert heard.ended + heard.broken == CONNECTIONS
        whole = streams.replay(server.url, "waits").frames
        assert heard.frames == {sha256(whole).hexdigest(): heard.ended, sha256(b"").hexdigest(): heard.broken}
        assert len(server.log.splitlines()) < 100
        assert server.terminate() == 0


def few_descriptors(directory: Path, code: str = "") -> Server:
    """A server that is started with a low soft limit and may raise it to a few more than it reserves."""
    limits = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, {DESCRIPTORS_FEW}))\n"
    return Server(directory / "store", environ=patched(directory / "patch", limits + code))


def fill_with_streams(server: Server) -> tuple[int, list[int]]:
    """Open more streams than there are descriptors, and meanwhile write over new connections.

    Return how many streams the server took, and the answers to the writes.
    """
    post(server, blocked("waits", "release"))
    with Crowd(server.url, [Group("many", streams.request("waits"), DESCRIPTORS_FEW + 20)], 5) as crowd:
        crowd.in_place()
        time.sleep(0.5)  # Longer than a measurement of readiness is kept: the next one is made now.
        answers = []
        for number in range(10):
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(
                    server.url + OPERATIONS, json=submissions.stream(f"more {number}"), timeout=5
                )
                answers.append(answer.status_code)
            time.sleep(0.1)
        if len(answers) == 10:
            post(server, submissions.stream("release", "release"))
            return crowd.heard()["many"].ended, answers
    return 0, answers


def test_streams_leave_descriptors_for_everything_else(tmp_path: Path) -> None:
    with few_descriptors(tmp_path) as server:
        server.wait_ready("search_ready")
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (DESCRIPTORS_FEW, DESCRIPTORS_FEW)
        taken, answers = fill_with_streams(server)
        assert (taken, answers) == (DESCRIPTORS_FEW - 128, [202] * 10)
        assert server.terminate() == 0


RESERVES_NOTHING: Final = "from muniment import wiring\nwiring.DESCRIPTORS_RESERVED = 0"
LEAVES_THE_LIMIT: Final = "from muniment import wiring\nwiring._raise_descriptor_limit = lambda: None"


def test_control_a_server_that_reserves_no_descriptor_is_noticed(tmp_path: Path) -> None:
    with few_descriptors(tmp_path, RESERVES_NOTHING) as server:
        server.wait_ready("search_ready")
        _, answers = fill_with_streams(server)
        assert answers != [202] * 10


def test_control_a_server_that_leaves_its_limit_is_noticed(tmp_path: Path) -> None:
    with few_descriptors(tmp_path, LEAVES_THE_LIMIT) as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (64, DESCRIPTORS_FEW)


def _used_at_the_limit(kept: httpx.Client, server: Server) -> int:
    """Use a connection from before for two seconds; return how many writes were refused."""
    refused, began, busy = 0, time.monotonic(), _busy_seconds(server)
    for number in range(20):
        assert kept.get("/health").status_code == 200
        assert kept.get("/ready").status_code in (200, 503)
        assert kept.get(operation_path("waits")).json()["state"] == "blocked"
        answer = kept.post(OPERATIONS, json=submissions.stream(f"full {number}", f"full {number}"))
        assert answer.status_code in (202, 503), answer.text
        assert answer.status_code == 202 or "Too many open files" in answer.json()["error"]
        refused += answer.status_code == 503
        time.sleep(0.1)
    share = (_busy_seconds(server) - busy) / (time.monotonic() - began)
    assert share <= BUSY_MAX, f"{share:.2f} of a core is in use while nothing happens"
    return refused


def _busy_seconds(server: Server) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


# Controls: servers with a planted fault, which the same steps must find.

SERVES_BADLY: Final = """
import itertools
from muniment.core.event_ring import EventRing, Slice
from muniment.interfaces.http import event_stream
from muniment.runtime import follow
import msgspec

keep, after, send_all = follow.Followers._keep, EventRing.after, event_stream._send_all
calls, kept = itertools.count(), []

def losing(self, ring, made):
    if b" 0\\"" not in made.data:
        keep(self, ring, made)

def other_bytes(self, position):
    found = after(self, position)
    if isinstance(found, Slice) and b" 1\\"" in found.data and next(calls) % 7 == 0:
        found = msgspec.structs.replace(found, data=found.data.replace(b"{", b"{ ", 1))
    return found

async def keeping(chunks, send):
    async def keep(message):
        kept.append(bytearray(b"x" * 200_000))
        await send(message)
    await send_all(chunks, keep)

follow.Followers._keep, EventRing.after, event_stream._send_all = losing, other_bytes, keeping
"""
"""Those of the first round are told of nothing live, some of the second get other bytes; all sent is kept."""


def test_control_a_server_that_serves_followers_badly_is_noticed(tmp_path: Path) -> None:
    with served(tmp_path, SERVES_BADLY) as server:
        late, other, kept = (Round(server, number, followers=100, early=5, seconds=4) for number in range(3))
    with pytest.raises(AssertionError, match="other bytes"):
        late.check()
    assert {each.ended for each in late.heard.values()} != {each.ended for each in kept.heard.values()}
    with pytest.raises(AssertionError, match="other bytes: readers"):
        other.check()
    with pytest.raises(AssertionError, match="bytes for each follower"):
        kept.check()
