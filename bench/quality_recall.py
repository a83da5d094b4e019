"""Turns through a real server: each one a memory, committed; then every question through recall.

What a ranking is compared with stands here too: the same turns in random order, and the latest first.
"""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from bench.measure.ingestion import cpu_seconds
from bench.quality_data import Question, Scope, Turn
from bench.quality_measures import Measures, measures
from muniment.adapters.sqlite.store import LEDGER_FILE
from tests.support import submissions
from tests.support.live import OPERATIONS, executor_pid
from tests.support.server import Server

RECALL: Final = "/api/v2/recall"
DEPTH: Final = 100
"""Memories that one recall is asked for; the byte budgets are filled from these."""
PAGE: Final = 200
DIMENSIONS: Final = 384
"""Of the bundled model."""
REQUEST_SECONDS: Final = 120.0
STILL_SECONDS: Final = 300.0
"""With no operation committed for so long, the import has failed."""

Step = Callable[[str, int, int], None]
"""Told what goes on, how much of it is done, and of how much."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the turns took."""

    memories: int
    content_bytes: int
    tokens: int
    parts: int
    import_seconds: float
    """From the first POST until nothing is open."""
    child_cpu_seconds: float
    """Processor time of the ingesting child meanwhile: what other work on the machine changes least."""
    device_bytes: int
    """As ``GET /api/v2/status`` tells; capacity grows in steps."""
    ledger_bytes: int
    """The database file after the server has ended."""
    recall_seconds: tuple[float, ...]
    """Each question, one after the other."""

    @property
    def vector_bytes(self) -> int:
        """One row of float32 for each part."""
        return self.parts * DIMENSIONS * 4


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One question and how well it was answered."""

    scope: str
    question: str
    category: str
    measures: Measures


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """All questions under one way to rank."""

    name: str
    answered: tuple[Answered, ...]
    cost: Cost | None = None
    part_tokens_max: int | None = None


def through_server(scopes: Sequence[Scope], part_tokens_max: int, step: Step) -> Ranked:
    """Import everything into a new store with this window, then ask everything."""
    name = f"{part_tokens_max} tokens"
    with tempfile.TemporaryDirectory(prefix="muniment-bench-") as directory:
        store = Path(directory) / "store"
        with Server(store, embedder="bundled", part_tokens_max=part_tokens_max, log_level="error") as server:
            server.wait_ready("search_ready")
            cpu, began = cpu_seconds(executor_pid(server)), time.monotonic()
            imported(server, scopes, lambda done, total: step(f"{name}: import", done, total))
            seconds, cpu = time.monotonic() - began, cpu_seconds(executor_pid(server)) - cpu
            with httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS) as client:
                parts, tokens = committed(client, sum(len(scope.turns) for scope in scopes))
                taken = client.get("/api/v2/status").json()["device"]["bytes"]
                asked = list(_asked(client, scopes, lambda done, total: step(f"{name}: ask", done, total)))
            server.terminate()
        return Ranked(
            name=name,
            part_tokens_max=part_tokens_max,
            answered=tuple(answer for answer, _ in asked),
            cost=Cost(
                memories=sum(len(scope.turns) for scope in scopes),
                content_bytes=sum(len(turn.text.encode()) for scope in scopes for turn in scope.turns),
                tokens=tokens,
                parts=parts,
                import_seconds=seconds,
                child_cpu_seconds=cpu,
                device_bytes=taken,
                ledger_bytes=(store / LEDGER_FILE).stat().st_size,
                recall_seconds=tuple(elapsed for _, elapsed in asked),
            ),
        )


def by_rule(scopes: Sequence[Scope], seed: int) -> Iterator[Ranked]:
    """The same questions answered without looking at them: in random order, and the latest turn first."""
    for name in ("random order", "latest first"):
        answered = []
        for scope in scopes:
            latest = [turn.name for turn in reversed(scope.turns)]
            for question in scope.questions:
                order = list(latest)
                if name == "random order":
                    random.Random(f"{seed}/{question.name}").shuffle(order)
                answered.append(_answered(scope, question, order[:DEPTH]))
        yield Ranked(name=name, answered=tuple(answered))


def imported(server: Server, scopes: Sequence[Scope], step: Callable[[int, int], None]) -> None:
    """Submit every turn, in order, and wait until none is open."""
    bodies = [_submission(scope, turn) for scope in scopes for turn in scope.turns]
    failed: list[BaseException] = []
    writer = threading.Thread(target=_submit, args=(server.url, bodies, failed), daemon=True)
    writer.start()
    done, moved = -1, time.monotonic()
    with httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS) as client:
        while True:
            writes = writer.is_alive()
            shown = client.get("/api/v2/status").json()
            if failed:
                raise AssertionError("the turns could not be submitted") from failed[0]
            if (found := shown["device"]["memories"]) > done:
                done, moved = found, time.monotonic()
                step(done, len(bodies))
            if not writes and shown["operations"]["open"] == 0:
                return
            assert time.monotonic() - moved < STILL_SECONDS, f"{done} of {len(bodies)}, and no more: {shown}"
            time.sleep(0.2)


def _submission(scope: Scope, turn: Turn) -> dict[str, Any]:
    given: dict[str, Any] = {
        "user_id": scope.name,
        "session_id": f"{scope.name}/{turn.session}",
        "session_seq": turn.place,
        "occurred_at": turn.occurred_at,
        "speaker": turn.speaker,
        "role": turn.role,
    }
    given = {field: value for field, value in given.items() if value is not None}
    return submissions.memory(operation_id(scope.name, turn.name), turn.text, **given)


def operation_id(scope: str, turn: str) -> str:
    """The ID under which a turn is submitted."""
    return f"{scope}/{turn}"


def _submit(url: str, bodies: Sequence[dict[str, Any]], failed: list[BaseException]) -> None:
    try:
        with httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as client:
            for body in bodies:
                while (reply := client.post(OPERATIONS, json=body)).status_code == 503:
                    time.sleep(float(reply.headers["retry-after"]))
                assert reply.status_code == 202, reply.text
    except BaseException as error:  # noqa: BLE001 it is raised by who waits
        failed.append(error)


def committed(client: httpx.Client, memories: int) -> tuple[int, int]:
    """Parts and tokens of all memories; raises AssertionError unless there are so many, all committed."""
    parts = tokens = count = 0
    after: str | None = None
    while count == 0 or after is not None:
        page = client.get(
            OPERATIONS, params={"limit": PAGE} | ({} if after is None else {"after": after})
        ).json()
        for receipt in page["operations"]:
            assert receipt["state"] == "committed", receipt
            parts += receipt["result"]["parts"]
            tokens += receipt["result"]["token_count"]
        count, after = count + len(page["operations"]), page["next"]
    assert count == memories, f"{count} operations for {memories} turns"
    return parts, tokens


def _asked(
    client: httpx.Client, scopes: Sequence[Scope], step: Callable[[int, int], None]
) -> Iterator[tuple[Answered, float]]:
    """Ask every question within its scope."""
    questions = [(scope, question) for scope in scopes for question in scope.questions]
    for done, (scope, question) in enumerate(questions):
        step(done, len(questions))
        began = time.monotonic()
        reply = client.post(RECALL, json={"query": question.text, "user_id": scope.name, "limit": DEPTH})
        elapsed = time.monotonic() - began
        assert reply.status_code == 200, reply.text
        ids = [hit["provenance"]["operation_id"] for hit in reply.json()["results"]]
        names = {operation_id(scope.name, turn.name): turn.name for turn in scope.turns}
        foreign = [each for each in ids if each not in names]
        assert not foreign, f"{question.name} was answered from another scope: {foreign}"
        assert len(set(ids)) == len(ids) == min(DEPTH, len(names)), f"{question.name}: {len(ids)} results"
        yield _answered(scope, question, [names[each] for each in ids]), elapsed
    step(len(questions), len(questions))


def _answered(scope: Scope, question: Question, ranking: Sequence[str]) -> Answered:
    return Answered(
        scope=scope.name,
        question=question.name,
        category=question.category,
        measures=measures(
            ranking,
            question.evidence,
            {turn.name: len(turn.text.encode()) for turn in scope.turns},
            {turn.name: turn.session for turn in scope.turns},
        ),
    )
