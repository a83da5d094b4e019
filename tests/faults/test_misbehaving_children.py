"""A child that dies on a text, hangs on it, answers nonsense to it, or is slow over it: the others go on.

A real server with real children. The ingesting child has a fault planted that one text sets off, and that a
file switches off again. Healthy memories, task operations, queries and the time of a POST must not care; the
marked memory is never lost, never doubled, never rejected for it, and commits once the fault is gone.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from muniment import wiring
from tests.support import submissions
from tests.support.live import OPERATIONS, executor_pid, patched
from tests.support.server import Server

HEALTHY: Final = 40
STALL_SECONDS: Final = 1.5
HEALTHY_SECONDS: Final = 60.0
MARK: Final = "the sealed letter"
MARKED: Final = f"It is about {MARK}. And about nothing else."

# Runs first of all in the server and in its children; only the ingesting child is changed.
PLANTED: Final = """
import os, sys, time
if sys.orig_argv[-1:] == ["ingest"]:
    from muniment.adapters.embedders import synthetic
    from muniment.executor import child
    claim = child._claim_streams
    def claimed():
        source, child.WIRE = claim()
        return source, child.WIRE
    child._claim_streams = claimed
    embed = synthetic.SyntheticEmbedder.embed
    def planted(self, texts, advance=lambda: None):
        if os.path.exists({flag!r}) and any({mark!r} in text for text in texts):
            {behaviour}
        return embed(self, texts, advance)
    synthetic.SyntheticEmbedder.embed = planted
"""


class Behaviour(msgspec.Struct, frozen=True):
    """What the child does on the marked text, and what must be seen of it."""

    code: str
    kind: str | None
    """The evidence; None where nothing happens to the child."""
    last_exit: str = ""


BEHAVIOURS: Final = {
    "dies": Behaviour("os.kill(os.getpid(), 11)", "exit", "signal 11 (SIGSEGV)"),
    "hangs while its heart beats": Behaviour("time.sleep(3600)", "stall", "no progress for"),
    "answers nonsense": Behaviour(
        "os.write(child.WIRE, b'Traceback (most recent'), time.sleep(60)", "protocol", "a frame of"
    ),
    "refuses": Behaviour(
        "raise __import__('muniment.errors').errors.ExecutorFailed('too sad to be read')", "failure"
    ),
    "is slow and goes on": Behaviour("[(time.sleep(0.2), advance()) for _ in range(40)]", None),
}


@contextmanager
def planted(directory: Path, behaviour: Behaviour, **settings: Any) -> Iterator[tuple[Server, Path]]:
    flag = directory / "planted"
    flag.touch()
    environ = patched(directory / "patch", "")
    code = PLANTED.format(flag=str(flag), mark=MARK, behaviour=behaviour.code)
    (directory / "patch" / "sitecustomize.py").write_text(code, "utf-8")
    server = Server(
        directory / "store",
        environ=environ,
        embedder="synthetic",
        executor_stall_seconds=STALL_SECONDS,
        executor_backoff_seconds_max=0.2,
        ingest_retry_seconds_max=3,
        **settings,
    )
    with server:
        server.wait_ready("search_ready")
        yield server, flag


def post(client: httpx.Client, body: dict[str, Any]) -> float:
    began = time.monotonic()
    assert client.post(OPERATIONS, json=body).status_code == 202
    return time.monotonic() - began


def receipt(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{OPERATIONS}/{name}").json()
    return found


def wait(held: Callable[[], bool], seconds: float, otherwise: str) -> float:
    began = time.monotonic()
    while not held():
        assert time.monotonic() - began < seconds, otherwise
        time.sleep(0.05)
    return time.monotonic() - began


def healthy(client: httpx.Client, name: str) -> list[float]:
    """Send healthy memories and a task; return how long each POST took."""
    took = [
        post(
            client,
            submissions.memory(f"{name}-{number}", f"Shelf {number} holds box {number * 7} of {name}."),
        )
        for number in range(HEALTHY)
    ]
    post(client, submissions.stream(f"{name}-task", name=f"tasks of {name}"))
    return took


def committed(client: httpx.Client, name: str) -> bool:
    names = [f"{name}-task", *(f"{name}-{number}" for number in range(HEALTHY))]
    return all(receipt(client, each)["state"] == "committed" for each in names)


def recall(client: httpx.Client) -> float:
    began = time.monotonic()
    reply = client.post("/api/v2/recall", json={"query": "What does shelf 3 hold?", "limit": 3})
    assert reply.status_code == 200, reply.text
    assert reply.json()["results"]
    return time.monotonic() - began


def quiet(client: httpx.Client) -> list[float]:
    """What POSTs take while nothing is wrong."""
    took = healthy(client, "before")
    wait(lambda: committed(client, "before"), HEALTHY_SECONDS, "nothing is wrong, and it does not end")
    return took


def trouble(client: httpx.Client, behaviour: Behaviour) -> dict[str, float]:
    """The marked memory among healthy ones, twice: with it in the same requests, and long after."""
    before = quiet(client)
    post(client, submissions.memory("marked", MARKED))
    during = healthy(client, "among")
    took = {"among": wait(lambda: committed(client, "among"), HEALTHY_SECONDS, "held back")}
    queries = [recall(client) for _ in range(10)]
    if behaviour.kind is not None:
        seen = "executor_error" if behaviour.kind == "failure" else "executor_exit_count"
        least = 1 if behaviour.kind == "failure" else 2
        wait(
            lambda: (
                bool(receipt(client, "marked")[seen])
                and (seen == "executor_error" or receipt(client, "marked")[seen] >= least)
            ),
            HEALTHY_SECONDS,
            "nothing is seen of it",
        )
    during += healthy(client, "after")
    took["after"] = wait(lambda: committed(client, "after"), HEALTHY_SECONDS, "held back")
    took["post"] = statistics.median(during) / statistics.median(before)
    took["query"] = max(queries)
    return took


@pytest.mark.parametrize("behaviour", BEHAVIOURS.values(), ids=BEHAVIOURS.keys())
def test_nothing_else_is_held_back(tmp_path: Path, behaviour: Behaviour) -> None:
    with (
        planted(tmp_path, behaviour) as (server, flag),
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        query_child, ingest_child = executor_pid(server, "query"), executor_pid(server, "ingest")
        took = trouble(client, behaviour)
        marked = receipt(client, "marked")
        print({name: round(value, 2) for name, value in took.items()}, marked["executor_exit_count"])
        # Generous, for machines that are shared; a POST that waits for a child would wait for seconds.
        assert took["post"] < 5
        assert executor_pid(server, "query") == query_child, "queries have a child of their own"
        if behaviour.kind is None:
            wait(lambda: receipt(client, "marked")["state"] == "committed", 60, "slow is not stuck")
            assert receipt(client, "marked")["executor_exit_count"] == 0
            assert executor_pid(server, "ingest") == ingest_child, "slow is not dead"
        else:
            assert marked["state"] in ("validated", "processing")
            assert (marked["result"], marked["error"]) == (None, None)
            told = marked["executor_error"] if behaviour.kind == "failure" else marked["executor_last_exit"]
            assert (behaviour.last_exit or "too sad") in told
            assert client.get(f"{OPERATIONS}/among-0").json()["executor_exit_count"] <= 1, (
                "once together, at most"
            )
        flag.unlink()
        wait(lambda: receipt(client, "marked")["state"] == "committed", 60, "the fault is gone, and it stays")
        assert server.terminate() == 0
    report = wiring.check(tmp_path / "store")
    assert report.findings == ()
    assert report.memories == 3 * HEALTHY + 1


def test_control_a_server_that_never_ends_a_hanging_child_is_noticed(tmp_path: Path) -> None:
    behaviour = BEHAVIOURS["hangs while its heart beats"]
    with (
        planted(tmp_path, behaviour) as (server, _),
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        quiet(client)
    settings = {"executor_stall_seconds": 3600}
    server._settings.update(settings)
    with server, httpx.Client(base_url=server.url, timeout=30) as client:
        server.wait_ready("search_ready")
        post(client, submissions.memory("marked", MARKED))
        healthy(client, "among")
        with pytest.raises(AssertionError, match="held back"):
            wait(lambda: committed(client, "among"), 4 * STALL_SECONDS, "held back")


def test_queries_are_answered_while_a_long_memory_is_read(tmp_path: Path) -> None:
    """The one that reads queries does not wait for the one that ingests, however long that takes."""
    slow = Behaviour("[(time.sleep(0.2), advance()) for _ in range(100)]", None)
    with planted(tmp_path, slow) as (server, _), httpx.Client(base_url=server.url, timeout=30) as client:
        quiet(client)
        post(client, submissions.memory("marked", MARKED))
        wait(lambda: receipt(client, "marked")["state"] == "processing", 20, "it is not begun")
        with ThreadPoolExecutor(4) as pool:
            took = list(pool.map(lambda _: recall(client), range(20)))
        assert receipt(client, "marked")["state"] == "processing", "it was over too soon to show anything"
        assert max(took) < 10
        stream = submissions.stream("meanwhile", name="meanwhile")
        post(client, stream)
        wait(lambda: receipt(client, "meanwhile")["state"] == "committed", 10, "a task waits for a model")
        server.kill()
