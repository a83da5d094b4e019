"""One long text through the real model: how fast it is planned and embedded, and whether its end is found.

The text is generated, English-like, the same for the same size, and ends in a sentence about something
else. It is one memory. When it is committed, what is stored must be what was sent, and a question about
the last sentence must find that one first. (The synthetic embedder shows what all but the model costs; it
understands no question.)
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from bench.backlog import resident_bytes
from bench.measure.machine import load, load_line
from tests.support import submissions
from tests.support.live import OPERATIONS, executor_pid
from tests.support.server import Server

LAST: Final = "The blue kettle on the windowsill belongs to Marguerite."
QUESTION: Final = "Whose is the blue kettle on the windowsill?"
SUBJECTS: Final = (
    "the harbour master",
    "a young surveyor",
    "our neighbour",
    "the committee",
    "the baker's son",
    "an old pilot",
)
VERBS: Final = ("wrote down", "measured", "forgot", "repaired", "described", "counted", "promised", "painted")
OBJECTS: Final = ("the tide tables", "three wooden boats", "a letter", "the broken lantern", "every barrel")
PLACES: Final = ("before noon", "near the mill", "during the storm", "in the ledger", "without a word")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Seconds and counts."""

    byte_count: int
    token_count: int
    parts: int
    plan_seconds: float
    embed_seconds: float
    accept_seconds: float
    ready_seconds_max: float
    server_bytes: int
    executor_bytes: int
    wrong: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        plan, embed = self.token_count / self.plan_seconds, self.token_count / self.embed_seconds
        return [
            f"text         {self.byte_count} bytes, {self.token_count} tokens, {self.parts} parts",
            f"accepted     in {self.accept_seconds:.2f} s",
            f"planned      in {self.plan_seconds:.2f} s, {plan:.0f} tokens/s",
            f"embedded     in {self.embed_seconds:.1f} s, {embed:.0f} tokens/s",
            f"meanwhile    the slowest GET /ready took {self.ready_seconds_max * 1e3:.0f} ms",
            f"memory       server {self.server_bytes >> 20} MiB, executor {self.executor_bytes >> 20} MiB",
            *(f"WRONG        {each}" for each in self.wrong),
        ]


def sentences(seed: int) -> Iterator[str]:
    """Sentences without end."""
    dice = random.Random(seed)
    while True:
        parts = [dice.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, PLACES)]
        if dice.random() < 0.4:
            parts.append(f"and {dice.choice(VERBS)} {dice.choice(OBJECTS)} {dice.choice(PLACES)}")
        yield " ".join(parts).capitalize() + dice.choice(".....?!") + dice.choice("     \n")


def text_of(byte_count: int) -> str:
    """A text of about so many bytes, with the last sentence at its end."""
    found, length = [], 0
    for sentence in sentences(byte_count):
        if length >= byte_count - len(LAST):
            break
        found.append(sentence)
        length += len(sentence)
    return "".join([*found, LAST])


def wrong_about(kept: dict[str, Any], text: str) -> list[str]:
    """What is not as it must be about the stored memory."""
    data, parts = text.encode(), kept["parts"]
    found = []
    if kept["content"] != text or kept["content_sha256"] != hashlib.sha256(data).hexdigest():
        found.append("the content is not what was sent")
    edges = [0, *(part["byte_end"] for part in parts)]
    if [part["byte_start"] for part in parts] != edges[:-1] or edges[-1] != len(data):
        found.append("the parts do not cover the text once")
    if "".join(part["content"] for part in parts) != text:
        found.append("the parts together are not the text")
    return found


def last_is_first(hits: list[dict[str, Any]], parts: int) -> list[str]:
    """What is wrong with the answer to the question about the last sentence."""
    if hits and hits[0]["part_index"] == parts - 1 and hits[0]["text"].endswith(LAST):
        return []
    return [f"the last sentence is not found first, but {hits[:1]}"]


def measure(server: Server, text: str, *, understands: bool) -> Report:
    """Import one text into a server that is ready, and look at the result."""
    body = submissions.memory("long-text", text)
    with httpx.Client(base_url=server.url, timeout=600) as client:
        began = time.monotonic()
        assert client.post(OPERATIONS, content=json.dumps(body).encode()).status_code == 202
        accepted = planned = time.monotonic()
        slowest = 0.0
        while True:
            receipt = client.get(f"{OPERATIONS}/long-text").json()
            if receipt["state"] in ("accepted", "validated"):
                planned = time.monotonic()
            elif receipt["state"] == "rejected":
                raise AssertionError(receipt)
            elif receipt["state"] == "committed":
                break
            asked = time.monotonic()
            client.get("/ready")
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.05)
        committed = time.monotonic()
        kept = client.get(f"/api/v2/memories/{receipt['result']['id']}").json()
        hits = client.post("/api/v2/recall", json={"query": QUESTION}).json()["results"]
        return Report(
            byte_count=len(text.encode()),
            token_count=receipt["result"]["token_count"],
            parts=receipt["result"]["parts"],
            accept_seconds=accepted - began,
            plan_seconds=planned - accepted,
            embed_seconds=committed - planned,
            ready_seconds_max=slowest,
            server_bytes=resident_bytes(server.pid),
            executor_bytes=resident_bytes(executor_pid(server)),
            wrong=(
                *wrong_about(kept, text),
                *(last_is_first(hits, len(kept["parts"])) if understands else ()),
            ),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.long_text", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=5_000_000, help="size of the text")
    parser.add_argument("--embedder", choices=("bundled", "synthetic"), default="bundled")
    chosen = parser.parse_args()
    before = load()
    with (
        tempfile.TemporaryDirectory(prefix="muniment-bench-") as directory,
        Server(Path(directory) / "store", embedder=chosen.embedder) as server,
    ):
        server.wait_ready("search_ready")
        report = measure(server, text_of(chosen.bytes), understands=chosen.embedder == "bundled")
        server.terminate()
    print("\n".join([*report.lines(), load_line(before)]))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
