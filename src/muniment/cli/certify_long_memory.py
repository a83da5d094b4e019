"""The last check of ``muniment certify``: the executor is killed in the middle of a long memory.

The child is frozen first, so that the kill is known to lie in the middle, and a request to be with the child.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from muniment.cli.certify_checks import OPERATION_SECONDS, Run, operation_path
from muniment.client import certification as rules
from muniment.client.certification import Record, RuleBroken, expect
from muniment.client.probe import Probe
from muniment.model.operation import Receipt, State

SENTENCES: Final = 600
"""A part or so each with the default part size."""
TRIES: Final = 3
"""A try is made again with a longer text where the server was too fast, or nothing was with the child."""
GROWTH: Final = 4
STILL_SECONDS: Final = 0.3
"""Without new evidence for this long, everything that the frozen child had sent is in the ledger."""
_POLL_SECONDS: Final = 0.002
_GONE_SECONDS: Final = 10.0
_PROC: Final = Path("/proc")


def long_memory(run: Run) -> str:
    """An exit is evidence and no verdict: the memory is committed once, whole, by a later generation."""
    server = _server(run)
    sentences = SENTENCES
    for number in range(1, TRIES + 1):
        session = f"long-{number}"
        name = run.id(session)
        text = rules.long_text(sentences, name)
        run.submitted(rules.memory(name, text, name))
        before = _killed(run, name, server)
        after = run.committed(name, run.seconds)
        if before is None:
            run.tell(f"{name} was committed before its executor could be killed: again with a longer one")
            sentences *= GROWTH
            continue
        if after.executor_exit_count == before.executor_exit_count and number < TRIES:
            run.tell(f"the executor of {name} was killed and no exit counted, as if it had been idle: again")
            continue
        return _judged(run, session, text, before, after)
    raise RuleBroken(
        f"memories of up to {sentences // GROWTH} sentences were committed before a kill",
        "lower the server's embed_batch_tokens_max, so that a kill can come in the middle",
    )


def _judged(run: Run, session: str, text: str, before: Receipt, after: Receipt) -> str:
    evidence = run.evidence(after.operation_id)
    progress = rules.killed(before, after, evidence)
    memory = run.kept(after)
    rules.whole_memory(memory, text)
    kept = rules.kept_parts(memory, evidence)
    query = rules.sentence(SENTENCES // 2, after.operation_id)
    rules.exactly([memory.id], run.recalled(query, session), "a long memory")
    return (
        f"killed after {progress} batches in generation {before.executor_generation}, committed in "
        f"{after.executor_generation}: 1 exit, 1 memory, {len(memory.parts)} parts, {kept} of them kept"
    )


def _server(run: Run) -> int:
    """The process that serves this very memory, from the data directory. Raises ``RuleBroken`` loudly."""
    from muniment import wiring

    url = run.probe.base_url
    todo = (
        f"this check kills a process: run it on the machine of the server at {url}, with --data-dir naming "
        "the directory of that server"
    )
    owner = wiring.owner(run.data_path)
    if owner is None:
        raise RuleBroken(f"not run: no server of this machine owns {run.data_path}", todo)
    body = rules.task_stream(run.id("owner"), run.id("owner"), "Which directory this memory is in.")
    receipt = run.submitted(body)
    with Probe(owner.url) as other:
        answer = other.get(operation_path(receipt.operation_id))
    if answer.status != 200 or rules.receipt(answer.body).created_at != receipt.created_at:
        raise RuleBroken(
            f"not run: the owner of {run.data_path}, at {owner.url}, is not the server at {url}", todo
        )
    return owner.pid


def _killed(run: Run, name: str, server: int) -> Receipt | None:
    """Kill the executor after a part was indexed and before the end; return the receipt just before.

    None where the operation was committed too soon for that.
    """
    _first_progress(run, name)
    child = rules.ingest_child(children(server), server)
    with frozen(child):
        if not _still(run, name):
            return None
        before = run.receipt(name)
        expect(
            before.state is State.PROCESSING,
            f"{name} has progress records and is {before.state}, not processing",
        )
        _signal(child, signal.SIGKILL)
    over = time.monotonic() + _GONE_SECONDS
    while child in children(server):
        expect(time.monotonic() < over, f"process {child} was killed and is still there")
        time.sleep(_POLL_SECONDS)
    run.tell(f"killed process {child}, the executor, in the middle of {name}")
    return before


def _first_progress(run: Run, name: str) -> None:
    """Return as soon as a part is indexed."""
    seconds = min(OPERATION_SECONDS, run.seconds)
    over, last = time.monotonic() + seconds, 0
    while time.monotonic() < over:
        for record in run.evidence(name, last):
            last = record.sequence
            if record.kind == "progress":
                return
        time.sleep(_POLL_SECONDS)
    raise RuleBroken(f"no part of {name} was indexed within {seconds:g} seconds")


def _still(run: Run, name: str) -> bool:
    """Wait until the evidence has stopped growing; False where the operation has completed."""
    last: Record | None = None
    since = time.monotonic()
    while time.monotonic() < since + STILL_SECONDS:
        newer = run.evidence(name, last.sequence if last else 0)
        if newer:
            last, since = newer[-1], time.monotonic()
        time.sleep(STILL_SECONDS / 10)
    return last is not None and last.kind != "completion"


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process for the time of the block, and let it go on afterwards if it still lives."""
    _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError) as error:
        raise RuleBroken(
            f"process {pid} could not be sent {number.name}: {error.strerror}",
            "run certify as the user who runs the server",
        ) from error


def children(parent: int) -> dict[int, Sequence[str]]:
    """The direct children of a process that live, with their command lines, from ``/proc``."""
    found: dict[int, Sequence[str]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text("ascii", "replace").rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state not in "ZX":
                words = stat.with_name("cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[int(stat.parent.name)] = [word.decode("utf-8", "replace") for word in words]
        except (FileNotFoundError, ProcessLookupError):
            continue  # Gone between the two reads.
    return found
