"""The README is tried as a newcomer would: its commands on a real server, its quickstart, its proofs."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from muniment.config import SEED_HOST, SEED_PORT
from tests.support.server import SOURCE, START_SECONDS, Server, group

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
DEFAULT_URL: Final = f"http://{SEED_HOST}:{SEED_PORT}"
BLOCK: Final = re.compile(r"^<!-- tested: (\w+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROOF: Final = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
LIMIT_SECONDS: Final = 240


def blocks(text: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(text) if kind == language]


def missing_proofs(text: str) -> list[str]:
    """Return the tests that the text names and that are not there, or hold no test."""
    found = []
    for name, test in PROOF.findall(text):
        path = ROOT / name
        source = path.read_text("utf-8") if path.is_file() else ""
        if not re.search(rf"^(?:async )?def {test or 'test_'}", source, re.MULTILINE):
            found.append(f"{name}::{test}" if test else name)
    return found


def install_commands(folder: Path) -> Path:
    """Make ``folder/.venv/bin`` with the two commands of scripts/install, run by this interpreter."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, command in (("python", python), ("muniment", f"{python} -P -m muniment")):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="ascii")
        (programs / name).chmod(0o755)
    return folder


def run(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user whose home and temporary directory are in ``folder``."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "TMPDIR": str(folder),
            **environ,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Its group is all that it starts.
    )
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert group(process.pid) == {}, "processes are left behind"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    """A folder with the installed commands, and a server with the bundled model on its data directory."""
    folder = install_commands(tmp_path_factory.mktemp("readme"))
    with Server(folder / "data", embedder="bundled") as server:
        server.wait_ready("search_ready")
        yield folder, server


def tried(place: tuple[Path, Server], command: list[str]) -> subprocess.CompletedProcess[str]:
    folder, server = place
    here = [word.replace(DEFAULT_URL, server.url) for word in command]
    return run(here, folder, MUNIMENT_DATA_DIR=str(server.data_dir))


def test_the_shell_commands_do_what_they_say(place: tuple[Path, Server]) -> None:
    first, second = blocks(README.read_text("utf-8"), "shell")
    assert DEFAULT_URL in first

    over_http = tried(place, ["bash", "-euo", "pipefail", "-c", first])
    assert over_http.returncode == 0, over_http.stderr
    assert '"state":"accepted"' in over_http.stdout, "the receipt of the 202"
    assert '"to_state":"committed"' in over_http.stdout, "the last event"
    assert '"state":"committed"' in over_http.stdout, "the receipt afterwards"
    assert '"text":"I moved the spare key to the blue tin."' in over_http.stdout
    assert '"error":"' not in over_http.stdout

    by_command = tried(place, ["bash", "-euo", "pipefail", "-c", second])
    assert by_command.returncode == 0, by_command.stderr
    assert "My sister lands in Lisbon on Thursday evening." in by_command.stdout
    assert re.search(r"^state +committed$", by_command.stdout, re.MULTILINE)
    assert re.search(r"^ok: \d+ operations", by_command.stdout, re.MULTILINE)


def test_the_python_lines_do_what_they_say(place: tuple[Path, Server]) -> None:
    (code,) = blocks(README.read_text("utf-8"), "python")
    assert DEFAULT_URL in code

    done = tried(place, [sys.executable, "-c", code])

    assert done.returncode == 0, done.stderr
    key, text = done.stdout.splitlines()
    assert key.startswith("memory:")
    assert text == "The library closes at six."


def test_a_stopped_directory_can_be_copied_verified_and_continued(tmp_path: Path) -> None:
    folder = install_commands(tmp_path)
    muniment = str(folder / ".venv/bin/muniment")
    with Server(folder / "data") as server:
        added = run([muniment, "add", "It stays.", "--id", "one", "--url", server.url], folder)
        assert added.returncode == 0, added.stderr
        assert server.terminate() == 0
    (folder / "data").rename(folder / "moved")

    checked = run([muniment, "check", "moved"], folder)
    assert checked.stdout.startswith("ok: 1 operations, 1 memories"), checked.stdout + checked.stderr
    with Server(folder / "moved") as server:
        again = run([muniment, "add", "It stays.", "--id", "one", "--url", server.url], folder)
        shown = run([muniment, "operation", "one", "--url", server.url], folder)
    assert "already there" in again.stderr
    assert shown.returncode == 0


def test_recall_says_why_it_cannot_search(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    query = {"query": "stays"}
    with Server(tmp_path / "data", embedder="onnx", embedder_dir=tmp_path / "empty") as server:
        server.wait_ready("ingestion_ready")
        added = run(
            [sys.executable, "-P", "-m", "muniment", "add", "It stays.", "--no-wait", "--url", server.url],
            tmp_path,
        )
        give_up = time.monotonic() + START_SECONDS
        while "neither" not in (refused := httpx.post(f"{server.url}/api/v2/recall", json=query)).text:
            assert time.monotonic() < give_up, refused.text
            assert refused.status_code == 503
            time.sleep(0.1)
        assert not httpx.get(f"{server.url}/ready").json()["search_ready"]
    assert added.returncode == 0, added.stderr
    assert refused.status_code == 503
    assert refused.json()["error"].startswith("search unavailable: ")

    with Server(tmp_path / "data") as server:
        server.wait_ready("search_ready")
        give_up = time.monotonic() + START_SECONDS
        while not (found := httpx.post(f"{server.url}/api/v2/recall", json=query).json()["results"]):
            assert time.monotonic() < give_up, "what was accepted meanwhile is not found"
            time.sleep(0.1)
    assert found[0]["text"] == "It stays."


@pytest.mark.timeout(LIMIT_SECONDS)
def test_the_quickstart_works_and_leaves_nothing(tmp_path: Path) -> None:
    folder = install_commands(tmp_path)
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "quickstart").write_bytes((ROOT / "scripts" / "quickstart").read_bytes())
    (scripts / "install").write_text(
        "#!/bin/sh\n", encoding="ascii"
    )  # Installed above, by whoever runs this.
    for name in ("quickstart", "install"):
        (scripts / name).chmod(0o755)

    done = run(["scripts/quickstart"], folder)

    assert done.returncode == 0, done.stdout + done.stderr
    killed, after = re.findall(r"^ok: (\d+) operations, (\d+) memories", done.stdout, re.MULTILINE)
    assert int(killed[1]) < int(killed[0]), "it was not killed at work"
    assert after == ("204", "204")
    assert "blue tin above the stove" in done.stdout.rpartition("== where is the spare key?")[2]
    # Not in the home directory either, as a library would that keeps a device ID to send reports under.
    assert sorted(path.name for path in folder.iterdir()) == [".venv", "home", "scripts"]
    assert list((folder / "home").iterdir()) == []


def test_every_proof_that_is_named_is_there() -> None:
    text = README.read_text("utf-8")

    assert len(PROOF.findall(text)) >= 5
    assert missing_proofs(text) == []


def test_the_two_commands_of_a_fresh_machine_are_there() -> None:
    text = README.read_text("utf-8")

    for command in ("scripts/quickstart", "scripts/test"):
        assert re.search(rf"^{command} +# \w", text, re.MULTILINE)
        assert os.access(ROOT / command, os.X_OK)


def test_control_a_proof_that_is_gone_is_noticed() -> None:
    named = "`tests/api/gone.py` `tests/map/test_readme.py::test_gone` `tests/map/test_readme.py`"

    assert missing_proofs(named) == ["tests/api/gone.py", "tests/map/test_readme.py::test_gone"]


def test_control_a_command_that_fails_is_noticed(place: tuple[Path, Server]) -> None:
    first, _ = blocks(README.read_text("utf-8"), "shell")
    wrong = first.replace("sha256sum", "sha512sum").replace("ada-1", "ada-wrong")

    done = tried(place, ["bash", "-euo", "pipefail", "-c", wrong])

    assert '"error":"payload_hash' in done.stdout
    assert '"state":"accepted"' not in done.stdout
