"""An I/O error in place of the ledger's n-th write or fsync (R5), and an fsync before each 202.

The real server runs under strace, which answers EIO or ENOSPC instead of the kernel. An error in COMMIT or
fsync ends the process with status 1, and only the next one knows what became of the write. A full disk is a
clean no.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from muniment.adapters.sqlite.store import LEDGER_FILE, SqliteReader
from tests.crash import ledger_alone
from tests.support import submissions, truth
from tests.support.crashpoints import all_cases, seed
from tests.support.live import OPERATIONS, ROOT, patched
from tests.support.server import SOURCE, Server
from tests.support.strace import KILL, Call, Injection, calls_in, options, straced
from tests.support.truth import Accepted, Fact, Stood

CALLS: Final = ("fdatasync", "pwrite64")
SETTINGS: Final[dict[str, Any]] = {
    "probe_seconds": 0.01,  # Every POST is preceded by a probe's own commit: more calls to fail.
    "wal_pages_max": 60,  # A checkpoint every few commits, which has calls of its own.
}
CASES_MIN: Final = 135
KIND_CASES: Final = 45
SAMPLE: Final = 6
WRITE_STRIDE: Final = 16
EXIT_FAULT: Final = 1
SETTLE_SECONDS: Final = 60.0
FAULT_SECONDS: Final = 20.0
TERMINAL: Final = ("committed", "rejected")
NEVER_SENT: Final = "before"

# Each kind has 45 places, from the first call on. Every second full disk stays full until the process ends.
KINDS: Final[Mapping[str, tuple[Injection, ...]]] = {
    "fdatasync EIO": tuple(Injection("fdatasync", "EIO", n + 1) for n in range(KIND_CASES)),
    "pwrite64 EIO": tuple(Injection("pwrite64", "EIO", 1 + n * WRITE_STRIDE) for n in range(KIND_CASES)),
    "pwrite64 ENOSPC": tuple(
        Injection("pwrite64", "ENOSPC", 1 + n * WRITE_STRIDE, lasting=n % 2 == 1) for n in range(KIND_CASES)
    ),
}

SENTENCES: Final = " ".join(f"Shelf {number} holds box {number * 7}." for number in range(60))


def sent(number: int) -> dict[str, Any]:
    """What clients send, in this order: short memories, long ones, and a kind that needs no model."""
    operation_id = f"io-{number}"
    match number % 3:
        case 0:
            return submissions.memory(operation_id, f"Box {number} is on the shelf.", user_id="ann")
        case 1:
            return submissions.stream(operation_id, f"chores {number}")
        case _:
            return submissions.memory(operation_id, f"List {number}. {SENTENCES}")


SENT: Final = tuple(sent(number) for number in range(24))
BEFORE: Final = (
    submissions.memory("before-1", "This was there before."),
    submissions.memory("before-2", "So was this.", user_id="ann"),
    submissions.stream("before-3", "old chores"),
    {**submissions.memory("before-4", "Waits for what comes."), "dependencies": ["io-0"]},
)


class Ground(msgspec.Struct, frozen=True):
    """A store in use, left behind by a killed server, and what becomes of it without a fault."""

    directory: Path
    facts: tuple[Fact, ...]
    outcome_digest: str


class Told(msgspec.Struct, frozen=True):
    """One POST: when it began, and its answer; None where there was none."""

    operation: Mapping[str, Any]
    began: float
    answer: httpx.Response | None

    @property
    def accepted(self) -> bool:
        return self.answer is not None and self.answer.is_success

    @property
    def refused(self) -> bool:
        """The answer says that nothing was stored."""
        return (
            self.answer is not None and self.answer.status_code == 503 and "unknown" not in self.answer.text
        )

    def facts(self) -> Iterator[Fact]:
        if self.answer is not None and self.answer.is_success:
            receipt = self.answer.json()
            yield Accepted(receipt["operation_id"], receipt["payload_hash"])
            yield Stood(receipt["operation_id"], receipt["state"])


def post(client: httpx.Client, operation: Mapping[str, Any]) -> Told:
    began = time.time()
    try:
        answer = client.post(OPERATIONS, json=operation)
    except httpx.TransportError:
        return Told(operation, began, None)
    return Told(operation, began, answer)


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=30.0)


def receipts(client: httpx.Client) -> dict[str, dict[str, Any]]:
    page = client.get(OPERATIONS, params={"limit": 100}).json()
    assert page["next"] is None
    return {receipt["operation_id"]: receipt for receipt in page["operations"]}


def settled(client: httpx.Client, *, but: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Wait until every operation has ended, all ``but`` those that wait for something."""
    give_up = time.monotonic() + SETTLE_SECONDS
    while True:
        found = receipts(client)
        left = [
            name for name, receipt in found.items() if receipt["state"] not in TERMINAL and name not in but
        ]
        if not left:
            return found
        assert time.monotonic() < give_up, left
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    directory = tmp_path_factory.mktemp("ground")
    with Server(directory / "store", **SETTINGS) as server, client_of(server) as client:
        for operation in BEFORE:
            assert post(client, operation).accepted
        found = settled(client, but=("before-4",))
        server.kill()
    shutil.copytree(directory / "store", directory / "clean")
    with Server(directory / "clean", **SETTINGS) as server:
        told = finish(server, {})
        assert all(each.answer is not None and each.answer.status_code == 202 for each in told)
    facts = [Accepted(name, receipt["payload_hash"]) for name, receipt in found.items()]
    facts += [Stood(name, receipt["state"]) for name, receipt in found.items()]  # type: ignore[misc]
    return Ground(directory / "store", tuple(facts), truth.verify(directory / "clean", facts))


def finish(server: Server, asked_before: Mapping[str, httpx.Response]) -> list[Told]:
    """Send everything, again where it was sent before; return when it has ended and the server has."""
    with client_of(server) as client:
        told = [post(client, operation) for operation in SENT]
        for each in told:
            assert each.accepted, each.answer and each.answer.text
            known = asked_before.get(each.operation["operation_id"])
            assert known is None or (each.answer.status_code == 200) == (known.status_code == 200)  # type: ignore[union-attr]
        ended = settled(client)
        assert {receipt["state"] for receipt in ended.values()} == {"committed"}
    assert server.terminate() == 0
    return told


# One case


def drive(client: httpx.Client, record: Path) -> list[Told]:
    """Send one operation after the other, and probe, until the fault has happened; then some more."""
    told: list[Told] = []
    more = 4
    for operation in SENT:
        told.append(post(client, operation))
        if told[-1].answer is None or (faults(record) and not (more := more - 1)):
            return told
    give_up = time.monotonic() + FAULT_SECONDS
    while not faults(record):
        assert time.monotonic() < give_up, "the fault does not happen"
        client.get("/ready")
        time.sleep(0.02)
    return told


def faults(record: Path) -> list[Call]:
    return [call for call in calls_in(record) if call.injected]


def look_around(client: httpx.Client, told: list[Told], *, lasting: bool) -> Iterator[Fact]:
    """What still works while the disk is full; and after, when it was full for a moment only."""
    assert client.get("/health").status_code == 200
    for name, receipt in receipts(client).items():
        yield Stood(name, receipt["state"])
    for each in told:
        if each.refused:
            assert client.get(f"{OPERATIONS}/{each.operation['operation_id']}").status_code == 404
    ready = client.get("/ready")
    assert ready.status_code == (503 if lasting else 200)
    assert ready.json()["capabilities"]["ledger"] is not lasting
    again = post(client, SENT[-1])
    told.append(again)
    assert again.accepted is not lasting


def run_case(
    directory: Path, ground: Ground, injection: Injection, environ: Mapping[str, str] | None = None
) -> str:
    """Run one injected fault; return the phase of the process in which it happened."""
    data, record = directory / "store", directory / "record"
    shutil.copytree(ground.directory, data)
    server = straced(data, record, CALLS, injection, environ=environ, **SETTINGS)
    told: list[Told] = []
    facts: list[Fact] = list(ground.facts)
    try:
        status = server.start_or_end()
        started = status is None
        if started:
            with client_of(server) as client:
                told = drive(client, record)
                if injection.error == "ENOSPC":
                    facts += look_around(client, told, lasting=injection.lasting)
                    server.kill()
                else:
                    status = server.wait(10.0)
    finally:
        server.close()
    happened = faults(record)
    assert happened, "the fault did not happen"
    if injection.error == "EIO":
        # A start that fails tells what it could not do; a server that has run tells that it met a fault.
        assert status == EXIT_FAULT if started else status not in {None, 0}, f"status {status}\n{server.log}"
        late = [each for each in told if each.accepted and each.began > happened[0].seconds]
        assert not late, f"acknowledged after a failed {injection.call}: {late}"
    facts += [fact for each in told for fact in each.facts()]
    after_restart(data, told)
    assert truth.verify(data, facts) == ground.outcome_digest
    return f"{'running' if started else 'starting'}, {kind_of(happened[0])}"


def kind_of(call: Call) -> str:
    return "log" if call.concerns("ledger.db-wal") else "database"


def after_restart(data: Path, told: list[Told]) -> None:
    """The ledger decides: what was accepted is there, what was refused is not; then all goes through."""
    with Server(data, **SETTINGS) as server:
        with client_of(server) as client:
            answers = {
                operation["operation_id"]: client.get(f"{OPERATIONS}/{operation['operation_id']}")
                for operation in SENT
            }
        accepted = {each.operation["operation_id"] for each in told if each.accepted}
        for each in told:
            name = each.operation["operation_id"]
            if name in accepted:
                assert answers[name].status_code == 200, f"accepted and gone: {name}"
                assert answers[name].json()["payload_hash"] == each.operation["payload_hash"]
            elif each.refused and not unknown(told, name):
                assert answers[name].status_code == 404, f"refused and there: {name}"
        finish(server, answers)


def unknown(told: list[Told], name: str) -> bool:
    """Whether any answer about this operation left it open."""
    return any(
        each.operation["operation_id"] == name and not each.accepted and not each.refused for each in told
    )


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_an_io_error_loses_nothing_that_was_acknowledged(tmp_path: Path, ground: Ground, kind: str) -> None:
    chosen_by = seed()
    chosen = KINDS[kind] if all_cases() else random.Random(chosen_by).sample(KINDS[kind], SAMPLE)
    phases: Counter[str] = Counter()

    for injection in chosen:
        directory = tmp_path / f"{injection.when}"
        directory.mkdir()
        try:
            phases[run_case(directory, ground, injection)] += 1
        except AssertionError as error:
            error.add_note(f"{injection.option()}; again: scripts/crash --seed {chosen_by}")
            raise
        shutil.rmtree(directory)

    print(f"{kind}: {phases.total()} faults injected ({dict(phases)}), seed {chosen_by}")
    assert phases.total() == len(chosen) >= SAMPLE


def test_there_are_as_many_cases_as_are_claimed() -> None:
    assert sum(len(set(cases)) for cases in KINDS.values()) == CASES_MIN


# Controls: servers that break the rule

TAKES_UNKNOWN_FOR_NO: Final = """
from muniment.adapters.sqlite import store
store.committing = store.translated
"""

KEEPS_WHAT_IT_REFUSED: Final = """
from muniment.adapters.sqlite import ledger
from muniment.errors import StorageFull
from muniment.model.command import Accept
write = ledger.SqliteLedger.write
accepted = []
async def forgetful(self, asked):
    value = await write(self, asked)
    if isinstance(asked, Accept):
        accepted.append(asked)
        if len(accepted) == 2:
            raise StorageFull
    return value
ledger.SqliteLedger.write = forgetful
"""


@pytest.mark.parametrize(
    ("code", "fault", "places", "complaint"),
    [
        (TAKES_UNKNOWN_FOR_NO, ("fdatasync", "EIO"), (12, 15, 18, 21, 24), "the server did not end"),
        (KEEPS_WHAT_IT_REFUSED, ("pwrite64", "ENOSPC"), (100, 140, 180), "assert 200 == 404"),
    ],
    ids=["takes unknown for no", "keeps what it refused"],
)
def test_control_a_server_that_breaks_the_rule_is_noticed(
    tmp_path: Path, ground: Ground, code: str, fault: tuple[str, str], places: Sequence[int], complaint: str
) -> None:
    # What the n-th call of a live server is for depends on how its writes meet in batches: an error that hits
    # a checkpoint says nothing about COMMIT. The proof goes over many places, so its control goes over a few.
    said: list[str] = []
    for place in places:
        directory = tmp_path / str(place)
        directory.mkdir()
        try:
            run_case(directory, ground, Injection(*fault, place), patched(directory / "patch", code))
        except AssertionError as noticed:
            said.append(str(noticed))
            if complaint in said[-1]:
                return
    pytest.fail(f"noticed at none of {places}: {said}")


# The store alone, where the n-th call is the same one in every run: what is said of each error

ALONE_CALLS: Final = ("fdatasync", "pwrite64", "ftruncate")
FULL_ERRORS: Final = ("ENOSPC", "EDQUOT", "EFBIG")
ALONE_SAMPLE: Final = 8
ALONE_KILLS: Final = 8
# What the store may say, by error and step. A start that fails on a new file need not know more than that.
SAID: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    **{("EIO", step): frozenset({"unknown"}) for step in ("commit", "checkpoint", "close")},
    ("EIO", "open"): frozenset({"unknown", "unavailable"}),
    **{("full", step): frozenset({"full"}) for step in ("open", "commit", "checkpoint")},
    ("full", "close"): frozenset({"done"}),  # The log stays beside the database.
}


def alone(
    directory: Path, injection: Injection | None, mutant: Mapping[str, str] | None = None
) -> tuple[int, list[tuple[str, str]], list[Call]]:
    """Run the store; return exit status, steps with what was said of each, and the calls on its files."""
    data, record = directory / "store", directory / "record"
    data.mkdir()
    done = subprocess.run(
        [
            *options(record, ALONE_CALLS, data, injection),
            sys.executable,
            "-m",
            "tests.crash.ledger_alone",
            str(data),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(mutant or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    steps = [(step, said) for step, _, said in (line.partition(" ") for line in done.stdout.splitlines())]
    return done.returncode, steps, calls_in(record)


def judge_alone(directory: Path, injection: Injection, mutant: Mapping[str, str] | None = None) -> str:
    """Inject one error; return the step that met it."""
    status, steps, calls = alone(directory, injection, mutant)
    happened = next(call for call in calls if call.injected)
    # strace sees calls and not steps: the one that was met is the first without success, or the last.
    met, said = next(((step, said) for step, said in steps if said != "done"), steps[-1])
    step = met.partition(":")[0]
    error = "full" if injection.call == "pwrite64" and injection.error in FULL_ERRORS else "EIO"
    assert said in SAID[error, step], f"{step} {said} after {injection.option()} in the {kind_of(happened)}"
    if said == "unknown":
        assert status == ledger_alone.EXIT_FAULT
        touched = [call for call in calls if call.began > happened.returned]
        assert not touched, f"touched after an unknown outcome: {touched}"
    with_fault = dict(steps)
    facts = [
        fact_of(number)
        for number in range(ledger_alone.COMMITS)
        if with_fault.get(f"commit:{number}") == "done"
    ]
    absent = [
        ledger_alone.name(n) for n in range(ledger_alone.COMMITS) if with_fault.get(f"commit:{n}") == "full"
    ]
    ledger_alone.opened(directory / "store").close()
    truth.verify(directory / "store", facts)
    with contextlib.closing(SqliteReader(directory / "store" / LEDGER_FILE)) as reader:
        stored = reader.read(lambda reads: [row["id"] for row in reads.rows("operation")])
    assert not set(absent) & set(stored), f"refused and there: {absent}"
    return step


def kill_alone(directory: Path, injection: Injection) -> str:
    """Kill the store at one call; return the last step that it had told of."""
    status, steps, _ = alone(directory, injection)
    assert status == -signal.SIGKILL, f"not killed: status {status}"
    facts = [
        fact_of(number) for number in range(ledger_alone.COMMITS) if (f"commit:{number}", "done") in steps
    ]
    ledger_alone.opened(directory / "store").close()
    truth.verify(directory / "store", facts)
    return steps[-1][0].partition(":")[0] if steps else "nothing"


@pytest.mark.timeout(3000)
def test_a_kill_at_any_call_of_the_store_alone_loses_nothing(tmp_path: Path) -> None:
    """Also in the middle of a COMMIT and of a checkpoint, where no statement of SQL begins or ends."""
    chosen_by = seed()
    chooser = random.Random(chosen_by)
    clean = tmp_path / "clean"
    clean.mkdir()
    count = Counter(call.name for call in alone(clean, None)[2])
    cases = []
    for call in ALONE_CALLS:
        places = range(1, count[call] + 1)
        chosen = places if all_cases() else chooser.sample(places, min(ALONE_KILLS, len(places)))
        cases += [Injection(call, KILL, n) for n in chosen]

    after: Counter[str] = Counter()
    for number, injection in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            after[kill_alone(directory, injection)] += 1
        except AssertionError as error:
            error.add_note(f"{injection.option()}; again: scripts/crash --seed {chosen_by}")
            raise
        shutil.rmtree(directory)

    print(f"store alone: {after.total()} kills (after {dict(after)}), seed {chosen_by}")
    assert after.total() == len(cases) >= 2 * ALONE_KILLS


def fact_of(number: int) -> Fact:
    return Accepted(ledger_alone.name(number), ledger_alone.accept(number).payload_hash)


def alone_cases(calls: list[Call], chooser: random.Random) -> list[Injection]:
    """Each fsync once as EIO; a sample of fsyncs as a full disk and of writes as either."""
    count = Counter(call.name for call in calls)
    syncs = range(1, count["fdatasync"] + 1)
    writes = range(1, count["pwrite64"] + 1)
    few = len(writes) if all_cases() else ALONE_SAMPLE
    return [
        *(Injection("fdatasync", "EIO", n) for n in syncs),
        *(Injection("fdatasync", "ENOSPC", n) for n in chooser.sample(syncs, 4)),
        *(Injection("pwrite64", "EIO", n) for n in chooser.sample(writes, few)),
        *(Injection("pwrite64", FULL_ERRORS[n % 3], n) for n in chooser.sample(writes, few)),
    ]


@pytest.mark.timeout(3000)
def test_every_error_of_the_store_alone_is_called_what_it_is(tmp_path: Path) -> None:
    chosen_by = seed()
    clean = tmp_path / "clean"
    clean.mkdir()
    status, steps, calls = alone(clean, None)
    assert status == 0
    assert {said for _, said in steps} == {"done"}
    cases = alone_cases(calls, random.Random(chosen_by))

    met: Counter[str] = Counter()
    for number, injection in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            met[f"{injection.call} {injection.error}: {judge_alone(directory, injection)}"] += 1
        except AssertionError as error:
            error.add_note(f"{injection.option()}; again: scripts/crash --seed {chosen_by}")
            raise
        shutil.rmtree(directory)

    print(f"store alone: {met.total()} faults injected ({dict(met)}), seed {chosen_by}")
    assert met.total() == len(cases) >= 40
    assert {step for step in ("open", "commit", "checkpoint", "close") if met[f"fdatasync EIO: {step}"]} == {
        "open",
        "commit",
        "checkpoint",
        "close",
    }


LEAVES_A_LOG: Final = """
import os, sys
from pathlib import Path
from tests.crash import ledger_alone
store = ledger_alone.opened(Path(sys.argv[1]))
store.checkpoint(0)
store.transact([ledger_alone.accept(100)])
os._exit(0)
"""
SMALL_FILE_BYTES: Final = 40_000
"""Room for the index of the log, which is made anew at each start, and no room in the log or the database."""


def test_a_store_without_room_is_opened_and_read(tmp_path: Path) -> None:
    """As after a crash on a full disk: nothing can be written, and what is there can be read."""
    data = tmp_path / "store"
    data.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", LEAVES_A_LOG, str(data)], cwd=ROOT, env=environ, check=True)
    assert min((data / name).stat().st_size for name in (LEDGER_FILE, "ledger.db-wal")) > SMALL_FILE_BYTES

    done = subprocess.run(
        [
            "prlimit",
            f"--fsize={SMALL_FILE_BYTES}",
            "--",
            sys.executable,
            "-m",
            "tests.crash.ledger_alone",
            str(data),
        ],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )

    said = dict(line.split() for line in done.stdout.splitlines())
    assert said.pop("open") == said.pop("read") == said.pop("close") == "done"
    assert {said[f"commit:{number}"] for number in range(ledger_alone.COMMITS)} == {"full"}
    ledger_alone.opened(data).close()
    truth.verify(data, [fact_of(100)])


CLOSES_WITH_A_CHECKPOINT: Final = """
import apsw
config = apsw.Connection.config
from muniment.adapters.sqlite import store
opened = store.open_writer
def open_writer(path):
    connection = opened(path)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    return connection
store.open_writer = open_writer
"""

SWALLOWS_CHECKPOINTS: Final = """
from muniment.adapters.sqlite import store
from muniment.errors import OutcomeUnknown
copy_back = store.SqliteStore._copy_back
def quiet(self):
    try:
        copy_back(self)
    except OutcomeUnknown:
        pass
store.SqliteStore._copy_back = quiet
"""

QUOTA_IS_UNKNOWN: Final = """
from muniment.adapters.sqlite import connection
connection.FULL_ERRNOS = frozenset()
"""


@pytest.mark.parametrize(
    ("code", "injection", "complaint"),
    [
        (CLOSES_WITH_A_CHECKPOINT, Injection("fdatasync", "EIO", 5), "touched after an unknown outcome"),
        (SWALLOWS_CHECKPOINTS, Injection("fdatasync", "EIO", 6), "close done after"),
        (QUOTA_IS_UNKNOWN, Injection("pwrite64", "EFBIG", 85), "commit unknown after"),
    ],
    ids=["closes with a checkpoint", "swallows checkpoints", "quota is unknown"],
)
def test_control_a_store_that_misjudges_is_noticed(
    tmp_path: Path, code: str, injection: Injection, complaint: str
) -> None:
    directory = tmp_path / "case"
    directory.mkdir()
    # The guard of ``patched`` is for servers; this program is none.
    environ = patched(tmp_path / "patch", code)
    (tmp_path / "patch" / "sitecustomize.py").write_text(code, "utf-8")

    with pytest.raises(AssertionError, match=complaint):
        judge_alone(directory, injection, environ)


# An fsync before each 202

RECORDED: Final = (
    "fdatasync",
    "fsync",
    "pwrite64",
    "read",
    "recvfrom",
    "write",
    "writev",
    "sendto",
    "sendmsg",
)
RECORDED_POSTS: Final = 12


def acknowledgements(record: Path, names: list[str]) -> tuple[int, list[str]]:
    """Count the 202s in a record; complain of each whose bytes were not synced between request and answer."""
    calls = calls_in(record)
    count, complaints = 0, []
    for name in names:
        request = next(
            call for call in calls if call.name in {"read", "recvfrom"} and f'{name}\\"' in call.arguments
        )
        connection = request.arguments.partition("<")[0]
        answer = next(
            call
            for call in calls
            if call.began > request.returned
            and call.arguments.startswith(f"{connection}<")
            and "HTTP/1.1 202" in call.arguments
        )
        count += 1
        written = [
            call
            for call in calls
            if call.name == "pwrite64"
            and call.concerns("ledger.db-wal")
            and f"{name}\\" in call.arguments
            and request.returned < call.began < answer.began
        ]
        synced = [
            call
            for call in calls
            if call.name == "fdatasync"
            and call.concerns("ledger.db-wal")
            and call.result == 0
            and written
            and written[0].returned < call.began
            and call.returned < answer.began
        ]
        if not synced:
            complaints.append(f"{name}: {len(written)} writes and no fdatasync of the log before its 202")
    return count, complaints


def recorded(directory: Path, environ: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Record a server that accepts operations one after the other."""
    record = directory / "record"
    server = straced(directory / "store", record, RECORDED, ledger_only=False, environ=environ)
    names = [f"durable-{number}-before-acknowledged" for number in range(RECORDED_POSTS)]
    with server, client_of(server) as client:
        for number, name in enumerate(names):
            submission = (
                submissions.memory(name) if number % 2 else submissions.stream(name, f"chores {number}")
            )
            assert post(client, submission).accepted
        settled(client)
        assert server.terminate() == 0
    truth.verify(directory / "store")
    return acknowledgements(record, names)


def test_an_fsync_of_the_log_lies_before_each_202(tmp_path: Path) -> None:
    count, complaints = recorded(tmp_path)

    print(f"acknowledgements in the record: {count}")
    assert count == RECORDED_POSTS
    assert complaints == []


NORMAL: Final = """
from muniment.adapters.sqlite import store
opened = store.open_writer
def careless(path):
    connection = opened(path)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection
store.open_writer = careless
"""

ANSWERS_BEFORE_COMMIT: Final = """
import time
from muniment.adapters.sqlite import ledger, store
from muniment.model.command import Accept
attempt, committed, answer = store.attempt, ledger.SqliteLedger._committed, ledger.SqliteLedger._answer
current = []
def remember(self, batch):
    current[:] = [self, batch]
    return committed(self, batch)
def early(handle, rows, asked, appended):
    reply = attempt(handle, rows, asked, appended)
    if current and isinstance(asked, Accept):
        writer, batch = current
        waiting = [each for each in batch if each.command is asked]
        writer._loop.call_soon_threadsafe(answer, writer, waiting, [reply] * len(waiting), [])
        time.sleep(0.02)
    return reply
def others(self, batch, replies, sealed):
    left = [pair for pair in zip(batch, replies) if not pair[0].future.done()]
    answer(self, [waiting for waiting, _ in left], [reply for _, reply in left], sealed)
store.attempt = early
ledger.SqliteLedger._committed = remember
ledger.SqliteLedger._answer = others
"""


@pytest.mark.parametrize("code", [NORMAL, ANSWERS_BEFORE_COMMIT], ids=["NORMAL", "answers before COMMIT"])
def test_control_a_202_without_its_fsync_is_noticed(tmp_path: Path, code: str) -> None:
    count, complaints = recorded(tmp_path, patched(tmp_path / "patch", code))

    assert count == RECORDED_POSTS
    assert complaints
