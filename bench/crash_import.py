"""Import long conversations while the server is killed again and again; then account for everything.

A client submits one turn after the other and writes each ID that was acknowledged to a file, with fsync,
before it goes on. A driver outside the server kills it with SIGKILL at moments that a printed seed
chooses, and starts it again. Afterwards every acknowledged ID must have exactly one memory, the outcome
must be that of an undisturbed import, nothing that was embedded and saved may have been embedded again,
and both stores must pass ``muniment check``.

Wanted in --data: locomo5_dev.json.gz, a JSON list of conversations in the format of LoCoMo (Maharana et
al., ACL 2024; github.com/snap-research/locomo, data/locomo10.json; CC BY-NC 4.0). No part of this
repository.
"""

import argparse
import contextlib
import gzip
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import apsw
import msgspec

from bench.measure.machine import load, load_line
from muniment import wiring
from tests.support import submissions
from tests.support.live import OPERATIONS, patched
from tests.support.server import Server

FILE: Final = "locomo5_dev.json.gz"
STAGES: Final = ("accepted", "planned", "processing", "indexed")
STAGES_TEXT: Final = """\
An operation that is at rest after a kill, and was not there after the kill before, counts as
  accepted    acknowledged, and no plan is saved (states accepted and validated)
  planned     the plan is saved, no part is indexed (planned and processing are reached in one transaction)
  processing  some parts are indexed, not all
  indexed     all parts are indexed, not committed (indexed and committed are reached in one transaction)"""
KILLS_EACH_MIN: Final = 3
KILLS_MAX_FACTOR: Final = 8
WAIT_SECONDS: Final = 600.0
SETTINGS: Final = {
    # Small parts, one a batch: so a turn is worked on in several steps, and a kill can come between them.
    "part_tokens_max": 24,
    "embed_batch_tokens_max": 24,
    "executor_backoff_seconds_max": 0.5,
}
OPEN: Final = "('accepted', 'validated', 'blocked', 'planned', 'processing', 'indexed')"
STANDING_SQL: Final = f"""
SELECT operation.n, count(part.plan_n), coalesce(sum(part.embedding_state = 'indexed'), 0)
FROM operation
LEFT JOIN plan ON plan.object_n = operation.object_n AND plan.active = 1
LEFT JOIN part ON part.plan_n = plan.n
WHERE operation.state IN {OPEN} AND (:begun = 0 OR operation.state = 'processing')
GROUP BY operation.n
"""

Standing = tuple[str, int]
"""Stage and number of indexed parts of an operation that has not ended."""


# The conversations


def turns(data: Path, conversations: int) -> list[dict[str, Any]]:
    """Every turn of the first so many conversations as a submission, in order."""
    with gzip.open(data / FILE) as file:
        samples = json.load(file)
    return [body for sample in samples[:conversations] for body in _turns_of(sample)]


def _turns_of(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    conversation, number = sample["conversation"], 0
    while (name := f"session_{(number := number + 1)}_date_time") in conversation:
        began = datetime.strptime(conversation[name], "%I:%M %p on %d %B, %Y")  # noqa: DTZ007 no zone is known
        for place, turn in enumerate(conversation.get(f"session_{number}", ())):
            caption = f" [{turn['blip_caption']}]" if turn.get("blip_caption") else ""
            yield submissions.memory(
                f"{sample['sample_id']}:{turn['dia_id']}",
                f"{turn['speaker']}: {turn['text']}{caption}",
                session_id=f"{sample['sample_id']}/{number}",
                speaker=turn["speaker"],
                session_seq=place,
                occurred_at=f"{began.isoformat()}Z",
            )


# The client


class Importer:
    """A client that knows only the contract: it repeats what was not answered, and notes what was.

    It stops before submission ``allowed``, so that the driver can spread its kills over the whole import.
    """

    def __init__(self, bodies: Sequence[dict[str, Any]], acknowledged: Path) -> None:
        self._bodies = bodies
        self._path = acknowledged
        self._stopped = False
        self.url: str | None = None
        self.allowed = 0
        self.done = 0
        self.statuses: Counter[int] = Counter()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="importer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._path.open("ab", buffering=0) as file:
                for number, body in enumerate(self._bodies):
                    while number >= self.allowed and not self._stopped:
                        time.sleep(0.001)
                    if not self._submit(json.dumps(body).encode()):
                        return
                    file.write(f"{body['operation_id']}\n".encode())
                    os.fsync(file.fileno())
                    self.done = number + 1
        except BaseException as failure:  # noqa: BLE001 the driver reports it
            self.failure = failure

    def _submit(self, data: bytes) -> bool:
        """Submit until there is an answer; False where the driver has given up."""
        while not self._stopped:
            try:
                status, said = self._post(data)
            except (OSError, http.client.HTTPException):
                time.sleep(0.005)
                continue
            if status == 503:
                time.sleep(0.05)
                continue
            self.statuses[status] += 1
            if status not in (200, 202):
                raise AssertionError(f"{status}: {said!r}")
            return True
        return False

    _connection: http.client.HTTPConnection | None = None
    _connected: str | None = None

    def _post(self, data: bytes) -> tuple[int, bytes]:
        url = self.url
        if url is None:
            raise ConnectionRefusedError("the server is down")
        if self._connection is None or self._connected != url:
            self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
            self._connected = url
        try:
            self._connection.request("POST", OPERATIONS, data, {"content-type": "application/json"})
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()
            self._connection = None
            raise


# What the database shows


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(directory / "ledger.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield connection
    finally:
        connection.close()


def standing(store: apsw.Connection, *, begun: bool = False) -> dict[int, Standing]:
    """Where each operation stands that has not ended; ``begun`` leaves out those without a plan."""
    rows = store.execute(STANDING_SQL, {"begun": int(begun)})
    counted = (tuple(int(str(value)) for value in row) for row in rows)
    return {n: (_stage(parts, indexed), indexed) for n, parts, indexed in counted}


def is_open(store: apsw.Connection) -> bool:
    """Whether an operation has not ended."""
    return bool(store.execute(f"SELECT 1 FROM operation WHERE state IN {OPEN} LIMIT 1").fetchall())


def _stage(parts: int, indexed: int) -> str:
    if parts == 0:
        return "accepted"
    if indexed == 0:
        return "planned"
    return "processing" if indexed < parts else "indexed"


def indexed_parts(store: apsw.Connection) -> set[str]:
    """Every part with a saved vector, named as in the tally: operation and index."""
    sql = """
    SELECT operation.n || ':' || part.part_index
    FROM part JOIN plan ON plan.n = part.plan_n JOIN operation ON operation.object_n = plan.object_n
    WHERE part.embedding_state = 'indexed'
    """
    return {str(name) for (name,) in store.execute(sql)}


def memories_by_id(store: apsw.Connection) -> Counter[str]:
    """How many memories each operation has; an operation that is not there is not in it."""
    sql = """
    SELECT operation.id, count(memory.object_n)
    FROM operation LEFT JOIN memory ON memory.operation_n = operation.n GROUP BY operation.n
    """
    return Counter({str(name): int(str(count)) for name, count in store.execute(sql)})


# The driver


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One kill and what the database showed after it."""

    aimed_at: str
    acknowledged: int
    standing: dict[int, Standing]
    came: frozenset[int]
    """Operations that came to where they stand in the life that this kill ended."""
    indexed: frozenset[str]
    tally_bytes: int

    def found(self) -> Counter[str]:
        """How many operations had come to each stage in this life and were at rest there."""
        return Counter(self.standing[n][0] for n in self.came)


class Run(msgspec.Struct, kw_only=True):
    """One import into one store."""

    name: str
    directory: Path
    kills: list[Kill] = []
    seconds: float = 0.0
    statuses: dict[int, int] = {}
    problems: list[str] = []

    @property
    def store(self) -> Path:
        """The data directory."""
        return self.directory / "store"

    @property
    def tally(self) -> Path:
        """Where the executor writes a line for each part that it embeds."""
        return self.directory / "tally"

    @property
    def acknowledged(self) -> Path:
        """Where the client writes each ID that was answered."""
        return self.directory / "acknowledged"

    def hits(self) -> Counter[str]:
        """How many kills left an operation at rest in each stage, to which it had come in that life."""
        return Counter(stage for kill in self.kills for stage in kill.found())


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    embedder: str
    seed: int
    kills: int
    mutant: str | None


def imported(run: Run, bodies: Sequence[dict[str, Any]], options: Options, *, disturbed: bool) -> None:
    """Import everything, with kills where ``disturbed``; what goes wrong is in ``run.problems``."""
    run.directory.mkdir()
    environ = {}
    if disturbed and options.mutant is not None:
        code = f"from bench import {options.mutant}\n{options.mutant}.apply()"
        environ = patched(run.directory / "patch", code)
    server = Server(
        run.store, embedder=options.embedder, environ=environ, executor_tally=run.tally, **SETTINGS
    )
    began = time.monotonic()
    with contextlib.closing(server), Importer(bodies, run.acknowledged) as client:
        try:
            if disturbed:
                killed_again_and_again(run, server, client, len(bodies), options)
            server.start()
            client.url, client.allowed = server.url, len(bodies)
            _finish(run, server, client, len(bodies))
            server.terminate()
        except AssertionError as error:
            run.problems.append(f"{run.name}: {error}")
        run.statuses = dict(client.statuses)
    run.seconds = time.monotonic() - began


def killed_again_and_again(run: Run, server: Server, client: Importer, total: int, options: Options) -> None:
    """Kill until there were enough kills of each kind; each life of the server gets a share of the turns."""
    dice = random.Random(options.seed)
    while len(run.kills) < options.kills * KILLS_MAX_FACTOR:
        missing = [stage for stage in STAGES if run.hits()[stage] < KILLS_EACH_MIN]
        if len(run.kills) >= options.kills and not missing:
            return
        first, left = client.done, max(1, options.kills - len(run.kills))
        share = min(total - first, 1 + (total - first) // (left + 1))
        client.allowed = first + share
        server.start()
        client.url = server.url
        aim = dice.choice(missing or STAGES)
        # The moment of the kill: after so many acknowledgements, then as soon as the stage is seen.
        moment = first + (1 + dice.randrange(share) if share else 0)
        aimed = _aim(run, server, client, aim, moment)
        client.url = None
        server.kill()
        run.kills.append(_looked_at(run, client, aim))
        found = run.kills[-1].found()
        shown = "  ".join(f"{stage} {found[stage]:<4}" for stage in STAGES)
        print(
            f"kill {len(run.kills):3}: {client.done:5} acknowledged, aimed at {aim:<10}  {shown}", flush=True
        )
        if not aimed:
            return  # Nothing is left to be killed at.


def _aim(run: Run, server: Server, client: Importer, stage: str, moment: int) -> bool:
    """Wait for the moment; False where it cannot come any more."""
    before = run.kills[-1].standing if run.kills else {}
    give_up = time.monotonic() + WAIT_SECONDS
    with reading(run.store) as store:
        while client.done < moment or not _is_seen(stage, store, before):
            _still_goes_on(server, client, give_up)
            if client.done >= client.allowed and not is_open(store):
                return False
    return True


def _is_seen(stage: str, store: apsw.Connection, before: dict[int, Standing]) -> bool:
    """Whether an operation has come to this stage by now. What is acknowledged next is accepted."""
    if stage == "accepted":
        return True
    now = standing(store, begun=True)
    return any(where[0] == stage and before.get(n) != where for n, where in now.items())


def _looked_at(run: Run, client: Importer, aim: str) -> Kill:
    before = run.kills[-1].standing if run.kills else {}
    with reading(run.store) as store:
        now = standing(store)
        return Kill(
            aimed_at=aim,
            acknowledged=client.done,
            standing=now,
            came=frozenset(n for n, where in now.items() if before.get(n) != where),
            indexed=frozenset(indexed_parts(store)),
            tally_bytes=run.tally.stat().st_size if run.tally.exists() else 0,
        )


def _finish(run: Run, server: Server, client: Importer, total: int) -> None:
    """Wait until everything was acknowledged and has ended."""
    give_up = time.monotonic() + WAIT_SECONDS
    with reading(run.store) as store:
        while client.done < total or is_open(store):
            _still_goes_on(server, client, give_up)
            time.sleep(0.05)


def _still_goes_on(server: Server, client: Importer, give_up: float) -> None:
    if client.failure is not None:
        raise AssertionError(f"the client failed after {client.done}: {client.failure}")
    if Path(f"/proc/{server.pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] in "ZX":
        raise AssertionError(f"the server ended by itself:\n{server.log[-2000:]}")
    if time.monotonic() > give_up:
        raise AssertionError(f"nothing happens any more; {client.done} were acknowledged")


# The account


def violations(run: Run, clean: Run, bodies: Sequence[dict[str, Any]], options: Options) -> list[str]:
    """Everything that is not as it must be."""
    found = [*run.problems, *clean.problems]
    acknowledged = run.acknowledged.read_text("utf-8").split("\n")[:-1]
    with reading(run.store) as store:
        memories = memories_by_id(store)
    gone = [name for name in acknowledged if name not in memories]
    if gone:
        found.append(f"acknowledged and missing: {len(gone)}, among them {gone[:5]}")
    several = [name for name in acknowledged if name in memories and memories[name] != 1]
    if several:
        found.append(f"acknowledged and not exactly one memory: {len(several)}, among them {several[:5]}")
    if acknowledged != [body["operation_id"] for body in bodies]:
        found.append(f"{len(acknowledged)} acknowledged, {len(bodies)} to import")
    for name, each in (("killed", run), ("undisturbed", clean)):
        found += [f"check, {name}: {finding}" for finding in wiring.check(each.store).findings]
    if wiring.check(run.store).outcome_digest != wiring.check(clean.store).outcome_digest:
        found.append("the outcome differs from that of the undisturbed import")
    found += [f"embedded again after it was saved: {name}" for name in embedded_again(run)]
    if len(run.kills) < options.kills:
        found.append(f"{len(run.kills)} kills of {options.kills}")
    hits = run.hits()
    found += [f"{hits[stage]} kills in {stage}" for stage in STAGES if hits[stage] < KILLS_EACH_MIN]
    return found


def embedded_again(run: Run) -> list[str]:
    """Parts that were saved when the server was killed and stand in the tally after that."""
    lines = run.tally.read_bytes()
    return [
        name
        for kill in run.kills
        for name in (line.split()[1].decode() for line in lines[kill.tally_bytes :].splitlines())
        if name in kill.indexed
    ]


def report(run: Run, clean: Run, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The figures as text."""
    hits = run.hits()
    found = Counter({stage: sum(kill.found()[stage] for kill in run.kills) for stage in STAGES})
    with reading(run.store) as store:
        parts = len(indexed_parts(store))
        memories = sum(memories_by_id(store).values())
    embedded = len(run.tally.read_bytes().splitlines())
    lines = [STAGES_TEXT, "", f"{'stage':<12}{'kills in it':>12}{'operations':>14}"]
    lines += [f"{stage:<12}{hits[stage]:>12}{found[stage]:>14}" for stage in STAGES]
    during = sum(kill.acknowledged < len(bodies) for kill in run.kills)
    return [
        *lines,
        "",
        f"kills                        {len(run.kills)}, {during} of them while turns were still submitted",
        f"turns submitted              {len(bodies)}; answers {run.statuses}, 200 where the 202 was lost",
        f"memories                     {memories}",
        f"parts saved                  {parts}",
        f"parts embedded               {embedded}; {embedded - parts} again, as a kill came before the save",
        f"embedded again though saved  {len(embedded_again(run))}",
        f"outcome digest, killed       {wiring.check(run.store).outcome_digest}",
        f"outcome digest, undisturbed  {wiring.check(clean.store).outcome_digest}",
        f"seconds                      {run.seconds:.0f} killed, {clean.seconds:.0f} undisturbed",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.crash_import",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"directory of {FILE}")
    parser.add_argument("--conversations", type=int, default=5, metavar="N", help="import the first N")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="at least so many")
    parser.add_argument("--embedder", choices=("bundled", "synthetic"), default="bundled")
    parser.add_argument(
        "--mutant",
        choices=("answer-before-commit",),
        help="kill a server with this planted fault; the exit status must not be 0",
    )
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    mutant = None if chosen.mutant is None else chosen.mutant.replace("-", "_")
    options = Options(embedder=chosen.embedder, seed=seed, kills=chosen.kills, mutant=mutant)
    bodies = turns(chosen.data, chosen.conversations)
    before = load()
    print(f"{len(bodies)} turns of {chosen.conversations} conversations, {chosen.embedder}, --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="muniment-crash-import-") as directory:
        run = Run(name="killed", directory=Path(directory) / "killed")
        clean = Run(name="undisturbed", directory=Path(directory) / "undisturbed")
        imported(run, bodies, options, disturbed=True)
        imported(clean, bodies, options, disturbed=False)
        found = violations(run, clean, bodies, options)
        print("\n".join(["", *report(run, clean, bodies), load_line(before), ""]))
    for violation in found:
        print(f"VIOLATION  {violation}")
    print("failed" if found else "all as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
