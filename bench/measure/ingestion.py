"""Target 11: ingestion with the bundled model, nobody asking, against the bare inference session.

Both infer on one thread and have stepped back for others equally far (nice). What is timed of the server goes
from the first POST to the last commit: accept, plan, embed, save and commit.
"""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from bench.measure.bare_session import BareSession, Ran
from bench.measure.mixed_load import MixedLoad
from bench.measure.rounds import Loads, Measured, Options, Step, in_turns
from bench.measure.store_rows import number, part_texts, reading, wait_for_memories
from bench.measure.worker import Worker
from muniment.config import Config
from tests.support.live import executor_pid
from tests.support.server import Server

WARM_UP: Final = 24
LONGER: Final = 2.5
"""A round is so many times as long as a round of the others."""
ROUNDS_MAX: Final = 3


class Ingested(msgspec.Struct, frozen=True, kw_only=True):
    """One round of the server."""

    memories: int
    tokens: int
    seconds: float
    server_cpu: float
    child_cpu: float
    texts: tuple[str, ...]
    """Of its parts."""


def steps(options: Options) -> int:
    """How often ``step`` is called."""
    return 2 * min(options.rounds, ROUNDS_MAX)


def measure(options: Options, step: Step) -> Measured:
    """The server and the session on the same parts, in turns."""
    config = Config()
    with (
        Server(options.directory / "ingestion", embedder="bundled", log_level="error") as server,
        Worker(partial(MixedLoad, "ingest")) as load,
        Worker(partial(BareSession, config.embed_threads), nice=config.ingest_nice) as session,
    ):
        server.wait_ready("search_ready")
        last = ingested(server, load, WARM_UP)
        session.call(BareSession.prepare, last.texts)
        first = session.call(BareSession.run)
        rate = first.tokens / first.seconds
        memories = max(WARM_UP, round(LONGER * options.seconds * rate * last.memories / last.tokens))
        done: list[Ingested] = [last]
        ran: list[Ran] = []

        def ours() -> float:
            step("ingestion")
            done.append(ingested(server, load, memories))
            return done[-1].tokens / done[-1].seconds

        def bare() -> float:  # Where it comes first, on the parts of the round before.
            step("the bare session")
            session.call(BareSession.prepare, done[-1].texts)
            ran.append(session.call(BareSession.run))
            return ran[-1].tokens / ran[-1].seconds

        loads = Loads()
        found = [in_turns(number, [ours, bare]) for number in range(min(options.rounds, ROUNDS_MAX))]
        wrong = _wrong(server.data_dir)
        server.terminate()
    pairs = [(rate, limit) for rate, limit in found]
    return Measured((loads.figure("11", pairs, _note(done[1:], ran)),), tuple(wrong))


def ingested(server: Server, load: Worker[MixedLoad], memories: int) -> Ingested:
    """Submit so many memories and wait until all are committed."""
    child = executor_pid(server)
    with reading(server.data_dir) as connection:
        count = number(connection, "SELECT count(*) FROM memory")
        plan = number(connection, "SELECT coalesce(max(n), 0) FROM plan")
        cpu = cpu_seconds(server.pid), cpu_seconds(child)
        began = time.perf_counter()
        did = load.call(MixedLoad.submit, server.url, memories)
        assert not did.errors, did.errors
        ended = wait_for_memories(connection, count + memories)
        return Ingested(
            memories=memories,
            tokens=number(connection, f"SELECT sum(token_count) FROM plan WHERE n > {plan}"),
            seconds=ended - began,
            server_cpu=cpu_seconds(server.pid) - cpu[0],
            child_cpu=cpu_seconds(child) - cpu[1],
            texts=tuple(part_texts(connection, plan)),
        )


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _note(done: Sequence[Ingested], ran: Sequence[Ran]) -> str:
    """How much it was, and the processor time that a thousand tokens took: what contention changes least."""
    tokens = sum(each.tokens for each in done)
    server = sum(each.server_cpu for each in done) * 1000 / tokens
    child = sum(each.child_cpu for each in done) * 1000 / tokens
    bare = sum(each.cpu_seconds for each in ran) * 1000 / sum(each.tokens for each in ran)
    return (
        f"{sum(each.memories for each in done)} memories, {sum(len(each.texts) for each in done)} parts, "
        f"{tokens} tokens; processor time for a thousand: {child:.3f} s in the child and {server:.3f} s in "
        f"the server, {bare:.3f} s in the bare session. Both infer at nice {Config().ingest_nice}."
    )


def _wrong(data_dir: Path) -> list[str]:
    with reading(data_dir) as connection:
        counts = [number(connection, f"SELECT count(*) FROM {table}") for table in ("part", "vector")]
    return [] if counts[0] == counts[1] else [f"{counts[0]} parts have {counts[1]} vectors"]
