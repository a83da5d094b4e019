"""R28: the shipped script certifies a server that keeps the seed's promises, and names a broken one.

The controls are faults planted in one server, switched on one at a time: each must turn exactly the fitting
line red, and the exit code with it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from muniment import wiring
from muniment.cli.certify_checks import ALWAYS
from muniment.cli.certify_long_memory import children, frozen
from muniment.cli.main import run
from muniment.client import certification as rules
from muniment.client import probe
from tests.support.live import ROOT, patched
from tests.support.server import SOURCE, Server

SCRIPT: Final = "certify-memory-operations.sh"
SECONDS: Final = 120.0
LINE: Final = re.compile(r"(ok|FAILED) +(\S.*?\S) +(\d+) ms  (\S.*)")
NAMES: Final = [check.name for check in rules.CHECKS]
WITHOUT_KILL: Final = NAMES[:-1]

# One server with all faults in it; the file names the one that is active.
PLANTED: Final = """
import msgspec
from pathlib import Path
from muniment.errors import Conflict, NotFound
from muniment.model import command
from muniment.model.operation import State
from muniment.runtime import service
from muniment.stages import ledger

file = Path({file!r})
Service, Submitted = service.Service, service.Submitted
submit, receipt, follow, recall, ready = (
    Service.submit, Service.receipt, Service.follow, Service.recall, Service.ready
)
record_exit = ledger._record_exit
touched = set()

def active(name):
    return file.read_text() == name

async def submitting(self, body):
    asked = msgspec.json.decode(body)
    try:
        done = await submit(self, body)
    except Conflict:
        if not active("forgets the conflict"):
            raise
        return Submitted(False, await receipt(self, asked["operation_id"]))
    if active("says 202 to all"):
        return Submitted(True, done.receipt)
    if active("keeps a repeated request as another") and not done.created:
        asked["operation_id"] += "-again"
        await submit(self, msgspec.json.encode(asked))
    if active("a replay touches what has ended") and not done.created:
        done = Submitted(False, shown(done.receipt))
        touched.add(asked["operation_id"])
    return done

def shown(found):
    if found.operation_id in touched and found.state is State.COMMITTED:
        return msgspec.structs.replace(found, updated_at="2031-01-01T00:00:00.000000Z")
    return found

async def receiving(self, operation_id):
    found = await receipt(self, operation_id)
    if active("a replay touches what has ended"):
        return shown(found)
    if active("forgets what it rejected") and found.state is State.REJECTED:
        raise NotFound(f"operation '{{operation_id}}' not found")
    if active("stays blocked") and found.dependencies and found.state is State.COMMITTED:
        return msgspec.structs.replace(found, blocked_by=found.dependencies)
    return found

async def following(self, operation_id, after):
    if active("drops an event on resume") and after:
        after += 1
    return await follow(self, operation_id, after)

async def recalling(self, request):
    answer = await recall(self, request)
    if active("shows a long memory twice") and "long" in (request.session_id or ""):
        answer["results"] += answer["results"]
    return answer

class Boasts:
    ingestion_ready = True
    def body(self):
        names = ("ledger", "storage", "coordinator", "tokenizer", "model_executor", "search_index")
        return {{
            "status": "ready", "capabilities": dict.fromkeys(names, False) | {{"search_index": True}},
            "ingestion_ready": True, "search_ready": True,
        }}

async def measuring(self):
    return Boasts() if active("says ready and is not") else await ready(self)

def recording(rows, asked):
    if asked.kind != "failure" and active("an exit rejects"):
        result = {{"outcome": "rejected", "reason": "exit"}}
        return ledger.handle(
            rows, command.Refuse(n=asked.n, error="the executor exited", result=result, now=asked.now)
        )
    if asked.kind != "failure" and active("an exit does not count"):
        return ledger._standing(asked.n, ledger._load(rows, asked.n)["state"])
    return record_exit(rows, asked)

Service.submit, Service.receipt, Service.follow = submitting, receiving, following
Service.recall, Service.ready = recalling, measuring
ledger._record_exit = recording
"""
FAULTS: Final = {
    "says 202 to all": "exact replay",
    "forgets the conflict": "hash conflict",
    "keeps a repeated request as another": "response-loss reconciliation",
    "a replay touches what has ended": "terminal receipt retrieval",
    "drops an event on resume": "SSE resume",
    "stays blocked": "dependency block and release",
    "forgets what it rejected": "rejected receipt",
}
FAULTS_OF_A_KILL: Final = {
    "an exit rejects": "it was rejected: the executor exited",
    "an exit does not count": "executor_exit_count of",
    "shows a long memory twice": "expected exactly",
}


class Certificate(NamedTuple):
    """What a run said: exit code, its lines by name, and the notes on stderr."""

    code: int
    failed: dict[str, str]
    passed: list[str]
    notes: str


def read(code: int, out: str, err: str) -> Certificate:
    """Every line but the last is one of the contract's; the last one counts them."""
    *lines, last = out.splitlines()
    found = []
    for line in lines:
        match = LINE.fullmatch(line)
        assert match is not None, line
        found.append(match)
    failed = {match[2]: match[4] for match in found if match[1] == "FAILED"}
    assert all(". To do: " in text for text in failed.values()), failed
    assert last == (
        f"not certified: {len(failed)} of {len(found)} failed"
        if failed
        else f"certified: {len(found)} checks"
    )
    assert code == (1 if failed else 0)
    return Certificate(code, failed, [match[2] for match in found if match[1] == "ok"], err)


class Certifier:
    """The command inside this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> Certificate:
        self._capture.readouterr()
        code = run(["certify", *words])
        return read(code, *self._capture.readouterr())


@pytest.fixture
def certify(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certifier:
    monkeypatch.setenv("MUNIMENT_DATA_DIR", str(tmp_path / "nobody-serves-this"))
    return Certifier(capfd)


class Planted(NamedTuple):
    """A server with faults in it, and how to switch one on."""

    server: Server
    switch: Callable[[str], object]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    folder = tmp_path_factory.mktemp("planted")
    file = folder / "active"
    file.write_text("", "utf-8")
    environ = patched(folder / "patch", PLANTED.format(file=str(file)))
    with Server(folder / "memory", environ=environ, embed_batch_tokens_max=64) as server:
        server.wait_ready("search_ready")
        yield Planted(server, lambda name: file.write_text(name, "utf-8"))


@pytest.fixture
def fault(planted: Planted) -> Iterator[Callable[[str], object]]:
    """Switch a fault on for the time of a test."""
    yield planted.switch
    planted.switch("")


def installed(folder: Path) -> Path:
    """The script as a user has it: in a tree with the command beside it."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    command = programs / "muniment"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m muniment "$@"\n', encoding="ascii")
    command.chmod(0o755)
    (folder / "scripts").mkdir()
    return Path(shutil.copy(ROOT / "scripts" / SCRIPT, folder / "scripts"))


def shipped(script: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUNIMENT_")}
    return subprocess.run(
        [script, *words],
        cwd=script.parents[1],
        env={**kept, "PYTHONPATH": str(SOURCE), "HOME": str(script.parents[1])},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_shipped_script_certifies_a_server_and_kills_its_executor(tmp_path: Path) -> None:
    script = installed(tmp_path)
    with Server(tmp_path / "memory", embed_batch_tokens_max=64) as server:  # Not ready yet: it waits.
        done = shipped(script, "--data-dir", str(server.data_dir), "--long-memory")
        certificate = read(done.returncode, done.stdout, done.stderr)
        lost = server.log.count('"exited"')
        server.terminate()
    print(done.stdout, done.stderr, f"children lost: {lost}")

    assert certificate.failed == {}
    assert certificate.passed == NAMES
    assert "killed process" in certificate.notes
    assert lost >= 1
    assert re.search(r"1 exit, 1 memory, [123]\d\d parts, [1-9]\d* of them kept$", done.stdout, re.MULTILINE)
    assert wiring.check(server.data_dir).findings == ()


def test_the_shipped_script_fails_where_nobody_answers(tmp_path: Path) -> None:
    done = shipped(installed(tmp_path), "--url", "http://127.0.0.1:9")

    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("muniment: no server answers at http://127.0.0.1:9: ")
    assert len((ROOT / "scripts" / SCRIPT).read_text("utf-8").splitlines()) <= 20


def test_json_is_one_document_and_runs_do_not_meet(
    planted: Planted, certify: Certifier, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the control of the controls: with no fault switched on the planted server passes."""
    documents: list[dict[str, Any]] = []
    for _ in range(2):
        capfd.readouterr()
        assert run(["certify", "--json", "--url", planted.server.url]) == 0
        documents.append(json.loads(capfd.readouterr().out))

    first, second = documents
    assert first["run"] != second["run"]
    assert first["run"].startswith("certify-")
    for document in documents:
        assert (document["url"], document["certified"]) == (planted.server.url, True)
        assert [check["name"] for check in document["checks"]] == WITHOUT_KILL
        assert all(check["ok"] and check["todo"] is None and check["seen"] for check in document["checks"])


@pytest.mark.parametrize(("name", "line"), FAULTS.items())
def test_control_a_fault_turns_its_line_red(
    planted: Planted, fault: Callable[[str], object], certify: Certifier, name: str, line: str
) -> None:
    fault(name)
    certificate = certify("--url", planted.server.url)
    print(certificate.failed)

    assert certificate.failed.keys() == {line}
    assert certificate.passed == [each for each in WITHOUT_KILL if each != line]


@pytest.mark.parametrize(("name", "says"), FAULTS_OF_A_KILL.items())
def test_control_a_fault_of_a_kill_turns_its_line_red(
    planted: Planted, fault: Callable[[str], object], certify: Certifier, name: str, says: str
) -> None:
    planted.server.wait_ready("search_ready")  # It may have lost its executor in the test before.
    fault(name)
    certificate = certify("--data-dir", str(planted.server.data_dir), "--long-memory")
    print(certificate.failed)

    assert certificate.failed.keys() == {NAMES[-1]}
    assert says in certificate.failed[NAMES[-1]]
    assert "killed process" in certificate.notes
    assert certificate.passed == WITHOUT_KILL


def test_control_a_server_that_says_ready_and_is_not_is_not_certified(
    planted: Planted, fault: Callable[[str], object], certify: Certifier
) -> None:
    fault("says ready and is not")
    certificate = certify("--url", planted.server.url)

    assert certificate.passed == ["health"]
    assert certificate.failed["readiness"].startswith("ledger, storage and coordinator say False")
    rest = [text for name, text in certificate.failed.items() if name != "readiness"]
    assert all(text.startswith("not run: the server is not ready") for text in rest)
    assert len(rest) == len(WITHOUT_KILL) - 2


def test_without_the_directory_of_the_server_the_kill_fails_loudly(
    planted: Planted, server: Server, certify: Certifier
) -> None:
    """Never skipped: from another machine, and with the directory of another server."""
    away = certify("--url", planted.server.url, "--long-memory")
    other = certify("--url", planted.server.url, "--data-dir", str(server.data_dir), "--long-memory")

    for certificate in (away, other):
        assert certificate.passed == WITHOUT_KILL
        assert certificate.failed.keys() == {NAMES[-1]}
        assert "with --data-dir naming the directory of that server" in certificate.failed[NAMES[-1]]
        assert "killed process" not in certificate.notes
    assert away.failed[NAMES[-1]].startswith("not run: no server of this machine owns ")
    assert other.failed[NAMES[-1]].startswith(
        f"not run: the owner of {server.data_dir}, at {server.url}, is not"
    )


def test_what_is_wrong_ends_with_2(certify: Certifier, capfd: pytest.CaptureFixture[str]) -> None:
    for words, says in ((["--url", "nonsense"], "is not a URL"), (["--timeout", "-1"], "--timeout")):
        assert run(["certify", *words]) == 2
        assert says in capfd.readouterr().err


def test_a_process_that_was_frozen_goes_on_whatever_happens() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        try:
            with pytest.raises(ZeroDivisionError), frozen(sleeping.pid):
                fail_once_stopped(sleeping.pid)
            until(lambda: state_of(sleeping.pid) == "S")
            assert list(children(os.getpid())[sleeping.pid]) == ["sleep", "60"]
        finally:
            sleeping.kill()
        assert sleeping.wait() == -signal.SIGKILL
        assert sleeping.pid not in children(os.getpid())
        with pytest.raises(rules.RuleBroken, match="could not be sent SIGSTOP"), frozen(sleeping.pid):
            pass


def fail_once_stopped(pid: int) -> None:
    until(lambda: state_of(pid) == "T")
    raise ZeroDivisionError


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    over = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < over, "it did not come true"
        time.sleep(0.01)


def test_the_guide_says_what_each_line_proves() -> None:
    page = (ROOT / "docs" / "guides" / "certify.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|`]+?) \| ", page, re.MULTILINE)

    assert [row for row in rows if row in NAMES] == NAMES
    assert [check.name for check, _ in ALWAYS] == WITHOUT_KILL
    assert [cut.value for cut in probe.Cut if cut.value not in page] == []
