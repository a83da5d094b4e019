"""R15: an event stream is cut after each of its bytes, and the client reads on after the last whole frame.

What was heard before and after is the whole stream: no gap, nothing twice, the bytes of a stream that was not
cut. A server that is killed in the middle goes on too, and a client that never reads holds up nobody.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support import crashpoints, streams, submissions
from tests.support.live import OPERATIONS, patched
from tests.support.received import FRAME_ID, READ_BYTES, Received, received
from tests.support.seed_contract import OURS, operation_path
from tests.support.server import Server

ODD_ID: Final = "coupé/語𝄞"
"""Its characters take 1 to 4 bytes, and each event names it."""
REPLAYED_CUTS_MIN: Final = 1600
LIVE_CUTS_MIN: Final = 600
IN_CHARACTERS_MIN: Final = 40
IN_COMMENTS_MIN: Final = 10
BATCH: Final = 180
LIVE_BYTES: Final = 2150
COMMENTS: Final = 2
KEEPALIVE_SECONDS: Final = 0.05
WAIT_SECONDS: Final = 30.0
SHORT_SECONDS: Final = 1.0
UNREAD: Final = 2
UNREAD_SETTINGS: Final[dict[str, Any]] = {
    "event_keepalive_seconds": 0.01,
    "drain_seconds": 2,
    "operation_id_bytes_max": 4096,
    "dependencies_max": 2000,
}
UNREAD_COMMENTS_MAX: Final = 20
FULL_SECONDS: Final = 0.5
LARGE_EVENT_BYTES: Final = 4 * 1024 * 1024
UNREAD_BYTES_MAX: Final = 6 * LARGE_EVENT_BYTES
LARGE_ID_BYTES: Final = 4096
PACE_POSTS: Final = 30
PACE_MEMORIES: Final = 6
SLOWER_MAX: Final = 5.0
KILLS: Final = 2
KILLED_STREAMS_MIN: Final = 36


class Cut(NamedTuple):
    """A stream that was cut after so many bytes, and what came on the connection after."""

    place: int
    before: Received
    after: Received | None
    """None where the stream had ended before the cut."""


def problem(cut: Cut, whole: bytes) -> str | None:
    """Say what a client that was cut off has not got as it should have, None where all is well."""
    if cut.after is None:
        return None if cut.before.frames == whole else "the whole stream is not that of another client"
    if cut.after.status != 200:
        return f"answered {cut.after.status}"
    if not cut.after.ended:
        return "the stream does not end after the terminal event"
    if cut.before.frames + cut.after.frames != whole:
        sequences = FRAME_ID.findall(cut.before.frames), FRAME_ID.findall(cut.after.frames)
        return f"heard {sequences}, and the bytes are not those of the whole stream"
    return None


def in_character(cut: Cut) -> bool:
    """Whether the cut went through a character."""
    try:
        cut.before.rest.decode()
    except UnicodeDecodeError:
        return True
    return False


class Sorts(NamedTuple):
    """Where the cuts went through."""

    cuts: int
    in_characters: int
    in_comments: int
    after_comments: int

    @classmethod
    def of(cls, cuts: Iterable[Cut]) -> "Sorts":
        real = [cut for cut in cuts if cut.after is not None]
        return cls(
            len(real),
            sum(map(in_character, real)),
            sum(cut.before.rest.startswith(b":") for cut in real),
            sum(cut.before.comments > 0 for cut in real),
        )


def post(server: Server, *several: dict[str, Any]) -> None:
    with httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
        for submission in several:
            answer = client.post(OPERATIONS, json=submission)
            assert answer.status_code == 202, answer.text


def blocked(operation_id: str, *dependencies: str) -> dict[str, Any]:
    return submissions.memory(operation_id) | {"dependencies": [*dependencies]}


def task(operation_id: str) -> dict[str, Any]:
    return submissions.stream(operation_id, operation_id)


def rejected_of(name: str) -> tuple[dict[str, Any], ...]:
    """Operations of which the last is rejected, since the one that it waits for is."""
    return (
        submissions.stream(f"{name} a", name),
        submissions.stream(f"{name} b", name, description="another") | {"dependencies": [f"{name} late"]},
        blocked(f"{name} c", f"{name} b"),
        task(f"{name} late"),
    )


# Replayed streams: cut after each byte


def cut_replayed(
    url: str, operation_id: str, places: Iterable[int], seconds: float = WAIT_SECONDS
) -> list[Cut]:
    """Cut the stream of an ended operation after so many bytes, by a close or a reset; then read on."""
    cuts = []
    for place in places:
        raw = streams.read(url, streams.request(operation_id), place, reset=place % 2 == 0)
        assert len(raw) == place
        before = received(raw)
        asked = streams.request(operation_id, before.last, place)
        cuts.append(Cut(place, before, received(streams.read(url, asked, seconds=seconds))))
    return cuts


def check(cuts: Iterable[Cut], whole: bytes) -> None:
    """Raise AssertionError with the first thing that is wrong."""
    for cut in cuts:
        wrong = problem(cut, whole)
        assert wrong is None, f"cut after byte {cut.place}, read on after {cut.before.last}: {wrong}"


@contextlib.contextmanager
def served(directory: Path, code: str = "", **settings: Any) -> Iterator[Server]:
    environ = patched(directory / "patch", code) if code else None
    settings = {"event_keepalive_seconds": KEEPALIVE_SECONDS, **settings}
    with Server(directory / "store", environ=environ, **settings) as server:
        yield server.wait_ready("search_ready")


@pytest.fixture(scope="module", name="server")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("cut")) as started:
        yield started


def ended(server: Server) -> dict[str, int]:
    """Operations that have ended, and how long the response is that tells of each."""
    post(server, blocked(ODD_ID, "first"), task("plain"), *rejected_of("no"))
    post(server, task("first"), submissions.memory("memory"))
    found = {}
    for operation_id, events in {ODD_ID: 7, "plain": 6, "memory": 6, "no b": 4, "no c": 4}.items():
        sequences = [
            each["sequence"] for each in OURS.check_frames(streams.replay(server.url, operation_id).frames)
        ]
        assert sequences == [*range(1, events + 1)]
        found[operation_id] = len(streams.read(server.url, streams.request(operation_id)))
    return found


def test_a_replayed_stream_is_cut_after_every_byte(server: Server) -> None:
    seed = crashpoints.seed()
    cuts: list[Cut] = []
    for operation_id, length in ended(server).items():
        stride = 1 if operation_id == ODD_ID or crashpoints.all_cases() else 13
        found = cut_replayed(server.url, operation_id, range(seed % stride, length, stride))
        check(found, streams.replay(server.url, operation_id).frames)
        cuts += found
    sorts = Sorts.of(cuts)
    print(f"seed {seed}; {sorts}")
    assert sorts.cuts >= REPLAYED_CUTS_MIN
    assert sorts.in_characters >= IN_CHARACTERS_MIN


# Live streams: comments inside, and the events still to come


async def hear(
    url: str, asked: bytes, upto: int | None = None, each: Callable[[bytes], object] = len
) -> bytes:
    """As ``streams.read``, beside others; ``each`` is told of all that has come so far.

    A connection that the server breaks ends what comes.
    """
    address = urlsplit(url)
    raw = b""
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    with contextlib.suppress(ConnectionError):
        writer.write(asked)
        async with asyncio.timeout(WAIT_SECONDS):
            while upto is None or len(raw) < upto:
                data = await reader.read(READ_BYTES if upto is None else upto - len(raw))
                raw += data
                each(raw)
                if not data or received(raw).ended:
                    break
    if (upto or 0) % 2:
        writer.transport.abort()
    writer.close()
    return raw


async def cut_one(url: str, operation_id: str, place: int, waits: asyncio.Event) -> Cut:
    """Cut one stream and go on; ``waits`` is set when it was cut or waits for what is still to come."""

    def told(raw: bytes) -> None:
        if received(raw).comments >= COMMENTS:
            waits.set()

    before = received(await hear(url, streams.request(operation_id), place, told))
    waits.set()
    if before.ended:
        return Cut(place, before, None)
    asked = streams.request(operation_id, before.last, place)
    return Cut(place, before, received(await hear(url, asked)))


async def cut_together(
    url: str, operation_id: str, places: Iterable[int], release: Callable[[], None]
) -> list[Cut]:
    """Cut streams of one operation, each after another byte; ``release`` is called when all of them wait."""
    waits = {place: asyncio.Event() for place in places}
    cutting = [asyncio.create_task(cut_one(url, operation_id, *each)) for each in waits.items()]
    async with asyncio.timeout(WAIT_SECONDS):
        for event in waits.values():
            await event.wait()
    await asyncio.to_thread(release)
    return await asyncio.gather(*cutting)


def cut_live(server: Server, places: Iterable[int], name: str = ODD_ID) -> list[Cut]:
    """Cut streams of operations that wait, and let those end. Raises AssertionError as ``check`` does."""
    cuts: list[Cut] = []
    left = [*places]
    for number in range(0, len(left), BATCH):
        operation_id = f"{name} {number:04d}"
        release = task(f"release {number:04d}")
        post(server, blocked(operation_id, release["operation_id"]))
        together = left[number : number + BATCH]
        found = asyncio.run(cut_together(server.url, operation_id, together, partial(post, server, release)))
        check(found, streams.replay(server.url, operation_id).frames)
        cuts += found
    return cuts


def test_a_live_stream_is_cut_anywhere(server: Server) -> None:
    seed = crashpoints.seed()
    stride = 1 if crashpoints.all_cases() else 3
    places = [*range(seed % stride, LIVE_BYTES, stride)]
    random.Random(seed).shuffle(places)
    cuts = cut_live(server, places)
    sorts = Sorts.of(cuts)
    print(f"seed {seed}; {sorts}; not cut, since they had ended: {len(cuts) - sorts.cuts}")
    assert sorts.cuts >= LIVE_CUTS_MIN
    assert sorts.in_comments >= IN_COMMENTS_MIN
    assert sorts.after_comments >= LIVE_CUTS_MIN // 4
    assert {cut.before.last for cut in cuts} == set(range(8))


# A server that is killed in the middle


class Listener:
    """A client that follows one operation through every restart of the server."""

    def __init__(self, operation_id: str) -> None:
        self.operation_id = operation_id
        self.frames = b""
        self.ended = False
        self.cuts = 0

    async def listen(self, url: str) -> None:
        """Read on from the last event that was heard."""
        last = int(([b"0", *FRAME_ID.findall(self.frames)])[-1])
        heard = received(await hear(url, streams.request(self.operation_id, last, len(self.frames))))
        self.frames += heard.frames
        self.ended = heard.ended
        self.cuts += not heard.ended


async def listen_until(url: str, listeners: Iterable[Listener], what: Callable[[], object]) -> None:
    """Let all listen that have not heard the end, and do ``what`` meanwhile."""
    listening = [asyncio.create_task(each.listen(url)) for each in listeners if not each.ended]
    await asyncio.sleep(2 * KEEPALIVE_SECONDS)
    await asyncio.to_thread(what)
    await asyncio.gather(*listening)


def test_a_stream_goes_on_after_each_kill_of_the_server(tmp_path: Path) -> None:
    seed = crashpoints.seed()
    chance = random.Random(seed)
    listeners: list[Listener] = []
    waiting: list[str] = []

    def release_and_kill(kill: bool) -> None:
        post(server, *(task(f"release {name}") for name in waiting))
        if kill:
            time.sleep(chance.uniform(0, 0.05))
            server.kill()

    with served(tmp_path) as server:
        for kill in range(KILLS):
            names = [f"{ODD_ID} {kill} {number}" for number in range(3)]
            post(server, *(blocked(name, f"release {name}") for name in names))
            listeners += [Listener(name) for name in names for _ in range(6)]
            asyncio.run(listen_until(server.url, listeners, partial(release_and_kill, kill=True)))
            server.start().wait_ready()
            waiting = names
        asyncio.run(listen_until(server.url, listeners, partial(release_and_kill, kill=False)))
        for name in {each.operation_id for each in listeners}:
            whole = streams.replay(server.url, name).frames
            assert [event["sequence"] for event in OURS.check_frames(whole)] == [1, 2, 3, 4, 5, 6, 7]
            for each in listeners:
                assert each.operation_id != name or each.frames == whole, each.frames
        server.terminate()
    cuts = sum(each.cuts for each in listeners)
    print(f"seed {seed}; {KILLS} kills, {cuts} streams cut by them")
    assert all(each.ended for each in listeners)
    assert cuts >= KILLED_STREAMS_MIN


# A client that never reads


class Unread(NamedTuple):
    """What a server did while some clients did not read what it sent to them."""

    slower: float
    """Median time of a POST, and of a memory until its end, as multiples of those without such clients."""
    slower_memory: float
    bytes_each: float
    """Memory of the server for each such client."""
    comments_each: int
    """Most comments that had been kept for one of them."""


def large(operation_id: str, dependency: str) -> dict[str, Any]:
    """An operation of which one event takes more than all that the kernel keeps for a connection."""
    ids = (
        f"{number:04d}".ljust(LARGE_ID_BYTES, "x") for number in range(LARGE_EVENT_BYTES // LARGE_ID_BYTES)
    )
    return blocked(operation_id, dependency, *ids)


def paces(server: Server, name: str) -> tuple[float, float]:
    """The median times of a POST and of a memory from POST to its end."""
    posts, memories = [], []
    with httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as client:
        for number in range(PACE_POSTS):
            began = time.perf_counter()
            assert client.post(OPERATIONS, json=task(f"{name} {number}")).status_code == 202
            posts.append(time.perf_counter() - began)
        for number in range(PACE_MEMORIES):
            submission = submissions.memory(f"{name} memory {number}")
            began = time.perf_counter()
            assert client.post(OPERATIONS, json=submission).status_code == 202
            assert (
                client.get(operation_path(submission["operation_id"], "/events")).content.count(b"id: ") == 6
            )
            memories.append(time.perf_counter() - began)
    return statistics.median(posts), statistics.median(memories)


def memory_of(server: Server) -> int:
    """Resident bytes of the process that serves."""
    [line] = [each for each in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmRSS" in each]
    return int(line.split()[1]) * 1024


def leave_unread(server: Server) -> Unread:
    """Follow with clients that do not read; raises AssertionError unless they get it all once they do."""
    names = [f"large {number}" for number in range(UNREAD)]
    first, bad, _, late = rejected_of("unread")
    post(server, first, bad, *(large(name, bad["operation_id"]) for name in names))
    streams.read(server.url, streams.request(names[0]), 1000)
    before, had = paces(server, "before"), memory_of(server)
    with contextlib.ExitStack() as open_:
        unread = [open_.enter_context(streams.stuck(server.url, name)) for name in names]
        time.sleep(FULL_SECONDS)
        pace, has = paces(server, "with"), memory_of(server)
        time.sleep(FULL_SECONDS)
        post(server, late)
        comments = 0
        for name, connection in zip(names, unread, strict=True):
            whole = streams.replay(server.url, name)
            heard = received(streams.receive(connection))
            assert heard.ended
            assert heard.frames == whole.frames
            assert len(OURS.check_frames(heard.frames)) == 4
            comments = max(comments, heard.comments)
    without = [*map(max, before, paces(server, "after"))]
    return Unread(pace[0] / without[0], pace[1] / without[1], (has - had) / UNREAD, comments)


def check_pace(found: Unread) -> None:
    """Raise AssertionError where others had to wait."""
    assert found.slower <= SLOWER_MAX, f"others wait: {found}"
    assert found.slower_memory <= SLOWER_MAX, f"others wait: {found}"


def check_kept(found: Unread) -> None:
    """Raise AssertionError where everything was kept for those who do not read."""
    assert found.comments_each <= UNREAD_COMMENTS_MAX, f"more and more is kept: {found}"
    assert found.bytes_each <= UNREAD_BYTES_MAX, f"more and more is kept: {found}"


def test_clients_that_never_read_hold_up_nobody(tmp_path: Path) -> None:
    with served(tmp_path, **UNREAD_SETTINGS) as server:
        found = leave_unread(server)
        print(f"{UNREAD} clients do not read: {found}")
        check_pace(found)
        check_kept(found)
        post(server, large("last", "never"))
        with streams.stuck(server.url, "last"):
            time.sleep(FULL_SECONDS)
            began = time.monotonic()
            assert server.terminate() == 0
            assert time.monotonic() - began < 20  # It is given the two seconds of ``drain_seconds``, no more.


# Controls: servers with a planted fault, which the same steps must find.

FAULTY: Final = """
import time
import msgspec
import orjson
from muniment.interfaces.http import handlers
from muniment.runtime import follow
from uvicorn.protocols.http import flow_control

following, frame, history, keep, publish = (
    follow.Followers.follow, follow._frame, follow.Followers._history, follow.Followers._keep,
    follow.Followers._publish)
stream_events = handlers.stream_events

def resumes(self, account, operation_id, after):
    if operation_id == "replays from the start":
        after = 0
    elif operation_id == "skips one" and after:
        after += 1
    return following(self, account, operation_id, after)

async def one_name_alone(exchange):
    if exchange.values[0] == "does not know Last-Event-ID":
        exchange = msgspec.structs.replace(exchange, headers=())
    return await stream_events(exchange)

def endless_frame(operation_id, row):
    made = frame(operation_id, row)
    return msgspec.structs.replace(made, ends=made.ends and operation_id != "does not end")

async def endless(self, feed, after):
    found, more = await history(self, feed, after)
    if feed.operation_id == "does not end":
        found = msgspec.structs.replace(found, ends=False)
    return found, more

async def does_not_wait_for_readers(self):
    pass

def other_order(self, ring, made):
    [feed] = [each for each in self._feeds.values() if each.ring is ring]
    if feed.operation_id.startswith("other order"):
        head, _, shown = made.data.partition(b"data: ")
        shown = orjson.dumps(orjson.loads(shown), option=orjson.OPT_SORT_KEYS)
        made = msgspec.structs.replace(made, data=head + b"data: " + shown + b"\\n\\n")
    keep(self, ring, made)

def waits(self, sealed):
    if sum(feed.operation_id.startswith("large") for feed in self._feeds.values()) >= 2:
        time.sleep(0.1)
    publish(self, sealed)

follow.Followers.follow, follow._frame, follow.Followers._history, follow.Followers._keep = (
    resumes, endless_frame, endless, other_order)
follow.Followers._publish = waits
handlers.stream_events = one_name_alone
flow_control.FlowControl.drain = does_not_wait_for_readers
"""
"""What is wrong with a stream is the ID of its operation; and all wait while two large ones are followed."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("faulty"), FAULTY, **UNREAD_SETTINGS) as server:
        yield server


@pytest.mark.parametrize("fault", ["replays from the start", "skips one", "does not know Last-Event-ID"])
def test_control_a_server_that_resumes_elsewhere_is_noticed(faulty: Server, fault: str) -> None:
    post(faulty, task(fault), task(f"{fault}, not"))
    for operation_id, found in (
        (fault, pytest.raises(AssertionError, match="not those of the whole stream")),
        (f"{fault}, not", contextlib.nullcontext()),
    ):
        whole = streams.replay(faulty.url, operation_id).frames
        with found:
            check(cut_replayed(faulty.url, operation_id, range(1, 1200, 50)), whole)


def test_control_a_server_whose_live_frames_differ_is_noticed(faulty: Server) -> None:
    with pytest.raises(AssertionError, match="not those of the whole stream"):
        cut_live(faulty, range(0, LIVE_BYTES, 100), "other order")


def test_control_a_stream_that_does_not_end_is_noticed(faulty: Server) -> None:
    post(faulty, task("does not end"))
    cuts = cut_replayed(faulty.url, "does not end", [1000], SHORT_SECONDS)
    with pytest.raises(AssertionError, match="does not end"):
        check(cuts, b"")


def test_control_a_server_that_minds_who_does_not_read_is_noticed(faulty: Server) -> None:
    found = leave_unread(faulty)
    with pytest.raises(AssertionError, match="others wait"):
        check_pace(found)
    with pytest.raises(AssertionError, match="more and more is kept"):
        check_kept(found)
