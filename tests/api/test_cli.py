"""The command line as its user meets it: the real program, a real server, its output and its exit codes."""

import contextlib
import json
import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from muniment import __version__, wiring
from muniment.cli.main import run
from muniment.client import Client
from muniment.config import field_names
from muniment.model.operation import Kind
from tests.support.server import SOURCE, Server

SECONDS: Final = 60.0
HEAVY: Final = ("numpy", "onnxruntime", "apsw", "tokenizers", "uvicorn", "sentencex")
NASTY: Final = "\x1b]0;owned\x07 \x1b[31mred\x1b[0m \x9b2J \u202etxt.exe \u200b [bold]x[/bold] :smile:"
RAW: Final = ("\x1b", "\x07", "\x9b", "\u202e", "\u200b")


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of ours, with the synthetic embedder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUNIMENT_")}
    return {**kept, "PYTHONPATH": str(SOURCE), "MUNIMENT_EMBEDDER": "synthetic", **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "muniment", *words]


def muniment(
    *words: str, given: bytes = b"", environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end. No run may print a traceback."""
    ended = subprocess.run(
        command(*words),
        input=given,
        capture_output=True,
        env=environ or environment(),
        timeout=SECONDS,
        check=False,
    )
    shown = subprocess.CompletedProcess(
        ended.args, ended.returncode, ended.stdout.decode("utf-8"), ended.stderr.decode("utf-8")
    )
    assert "Traceback" not in shown.stderr, shown.stderr
    return shown


@pytest.fixture(autouse=True)
def no_url_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUNIMENT_URL", raising=False)


class Called:
    """The same program inside this process: for the many ways to be wrong."""

    def __init__(self, capture: pytest.CaptureFixture[str], url: str) -> None:
        self._capture = capture
        self._url = url

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._capture.readouterr()
        code = run([*words, "--url", self._url])
        out, err = self._capture.readouterr()
        return code, out, err


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that only add to it."""
    with Server(tmp_path_factory.mktemp("cli") / "data", parts_max=40) as running:
        yield running.wait_ready("search_ready")


@pytest.fixture
def called(capfd: pytest.CaptureFixture[str], server: Server) -> Called:
    return Called(capfd, server.url)


@pytest.fixture
def data(server: Server) -> tuple[str, str]:
    """The options with which a command attaches to the owner of the data directory."""
    return ("--data-dir", str(server.data_dir))


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start the program; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **options: Any) -> "subprocess.Popen[bytes]":
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options}
        processes.append(subprocess.Popen(command(*words), **options))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    over = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < over, "it did not come true"
        time.sleep(0.02)


def listed(*where: str) -> list[dict[str, Any]]:
    shown = muniment("operation", "--list", "--json", *where)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


# Keeping and finding


def test_a_memory_is_added_shown_found_and_its_operation_told(data: tuple[str, str]) -> None:
    added = muniment("add", "The harbour bridge was painted green.", "--user", "ana", "--id", "bridge", *data)
    assert added.returncode == 0
    first, last = added.stdout.splitlines()
    assert first.split() == ["operation", "bridge"]
    state, key = last.split()
    assert state == "committed"
    # Not a terminal: one plain line a state. The walk is the seed's.
    walk = ["accepted", "validated", "planned", "processing", "indexed", "committed"]
    assert added.stderr.splitlines() == walk

    found = muniment("recall", "green harbour bridge", "--user", "ana", *data)
    assert found.returncode == 0
    assert found.stdout.startswith(f"1. {key}  score ")
    assert "   The harbour bridge was painted green.\n" in found.stdout
    assert "owner ana" in found.stdout

    shown = muniment("get", key, *data)
    assert shown.returncode == 0
    assert "operation_id    bridge\n" in shown.stdout
    assert shown.stdout.endswith("\n\nThe harbour bridge was painted green.\n")

    told = muniment("operation", "bridge", *data)
    assert told.returncode == 0
    assert "state                  committed\n" in told.stdout
    assert f'"id":"{key}"' in told.stdout

    watched = muniment("watch", "bridge", *data)
    assert watched.returncode == 0
    assert [line.split()[0] for line in watched.stdout.splitlines()] == [*"123456", "committed"]


def test_json_output_is_json(data: tuple[str, str], called: Called) -> None:
    added = muniment("add", "A kettle is in the cupboard.", "--json", "--id", "json/1", *data)
    receipt = json.loads(added.stdout)
    assert (receipt["operation_id"], receipt["state"]) == ("json/1", "committed")
    key = receipt["result"]["id"]
    assert json.loads(called("get", key, "--json")[1])["content"] == "A kettle is in the cupboard."
    answer = json.loads(called("recall", "kettle cupboard", "--json", "--limit", "1")[1])
    assert [result["id"] for result in answer["results"]] == [key]
    assert json.loads(called("operation", "json/1", "--json")[1]) == receipt
    events = [json.loads(line) for line in called("watch", "json/1", "--json")[1].splitlines()]
    assert [event["sequence"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert {line["kind"] for line in listed(*data)} == {"add_memory"}
    settings = json.loads(muniment("config", "show", "--json").stdout)
    assert [setting["name"] for setting in settings] == list(field_names())


def test_content_comes_byte_for_byte_from_a_file_and_from_stdin(tmp_path: Path, called: Called) -> None:
    raw = "first\r\nsecond \u00e9\U0001f600\twith a tab, no end of line".encode()
    (tmp_path / "text").write_bytes(raw)
    code, out, _ = called("add", "--file", str(tmp_path / "text"), "--session", "bytes")
    assert code == 0
    key = out.split()[-1]
    where = ("--url", called._url)
    got = subprocess.run(
        command("get", key, "--content", *where), capture_output=True, env=environment(), check=True
    )
    assert got.stdout == raw
    piped = muniment("add", "-", "--json", *where, given=raw)
    again = json.loads(piped.stdout)["result"]["id"]
    assert again != key
    assert json.loads(called("get", again, "--json")[1])["content"].encode() == raw


def test_every_field_of_add_reaches_the_memory(called: Called) -> None:
    code, out, _ = called(
        *("add", "It rained.", "--user", "u", "--agent", "a", "--session", "s", "--category", "x"),
        *("--category", "y", "--speaker", "Bo", "--role", "user"),
        *("--occurred-at", "2026-01-01T00:00:00+02:00", "--metadata", '{"n": [1, null]}'),
    )
    assert code == 0
    said = json.loads(called("get", out.split()[-1], "--json")[1])["provenance"]
    expected = {
        "owner": "u",
        "agent_id": "a",
        "session_id": "s",
        "speaker": "Bo",
        "role": "user",
        "categories": ["x", "y"],
        "occurred_at": "2026-01-01T00:00:00+02:00",
        "metadata": {"n": [1, None]},
    }
    assert {name: said[name] for name in expected} == expected


def test_filters_that_match_nothing_find_nothing(called: Called) -> None:
    called("add", "A lighthouse blinked.", "--user", "keeper", "--category", "sea")
    assert called("recall", "lighthouse", "--user", "keeper", "--category", "sea")[1].startswith("1. ")
    assert called("recall", "lighthouse", "--user", "stranger") == (0, "nothing found\n", "")
    assert json.loads(called("recall", "lighthouse", "--user", "stranger", "--json")[1])["results"] == []


def test_the_same_operation_again_changes_nothing_and_other_content_is_refused(called: Called) -> None:
    first = called("add", "Once.", "--id", "once")
    code, out, err = called("add", "Once.", "--id", "once")
    assert (code, out) == (0, first[1])
    assert "already there" in err
    code, out, err = called("add", "Twice.", "--id", "once")
    assert code == 1
    assert "operation_id 'once' already exists with payload_hash" in err
    assert "committed" not in out


def test_a_derived_id_is_new_each_time(called: Called) -> None:
    ids = {called("add", "The same.")[1].split()[1] for _ in range(3)}
    assert len(ids) == 3


def test_a_rejected_memory_is_a_failure_with_its_reason(called: Called) -> None:
    text = " ".join(f"Sentence number {number} has a few words in it." for number in range(2000))
    code, out, _ = called("add", text, "--id", "too-long")
    assert code == 1
    assert out.splitlines()[1].startswith("rejected   ")
    assert called("operation", "too-long")[0] == 1
    assert called("watch", "too-long")[0] == 1


def test_without_waiting_it_is_accepted(called: Called) -> None:
    code, out, _ = called("add", "Later.", "--no-wait", "--id", "later")
    assert code == 0
    assert out.splitlines()[1].split()[0] in ("accepted", "validated", "planned", "processing", "committed")
    assert called("watch", "later")[0] == 0


# Being wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add"], "content: give either"),
        (["add", "a", "--file", "b"], "content: give either"),
        (["add", "--file", "/nonexistent"], "cannot read"),
        (["add", " "], "payload.content: must not be blank"),
        (["add", "a", "--role", "king"], "payload.role: must be one of"),
        (["add", "a", "--occurred-at", "noon"], "payload.occurred_at"),
        (["add", "a", "--metadata", "{"], "--metadata: not JSON"),
        (["add", "a", "--metadata", "[]"], "payload.metadata: must be an object"),
        (["add", "a", "--id", ""], "operation_id"),
        (["add", "\udcff"], "lone surrogate"),
        (["add", "a", "--nope"], "No such option"),
        (["add", "a", "--timeout", "-1"], "--timeout"),
        (["recall"], "Missing argument"),
        (["recall", " "], "query: must not be blank"),
        (["recall", "a", "--limit", "0"], "limit: must be"),
        (["recall", "a", "--limit", "x"], "--limit"),
        (["operation"], "give either an operation ID or --list"),
        (["operation", "a", "--list"], "give either an operation ID or --list"),
        (["operation", "a", "--state", "committed"], "--list: is needed"),
        (["operation", "--list", "--state", "done"], "state: must be one of accepted"),
        (["operation", "--list", "--kind", "x"], "kind: must be one of add_memory"),
        (["operation", "--list", "--after", "no-such-operation"], "after: names no operation"),
        (["operation", ""], "operation_id: must not be empty"),
        (["watch"], "Missing argument"),
        (["watch", "a", "--after", "-1"], "--after"),
        (["import", "/nonexistent.jsonl"], "cannot read"),
        (["import", "/"], "cannot read"),
        (["import", "a", "--in-flight", "0"], "--in-flight"),
    ],
)
def test_what_is_wrong_is_named_and_ends_with_2(called: Called, words: list[str], says: str) -> None:
    code, _, err = called(*words)
    assert says in err
    assert code == 2


@pytest.mark.parametrize("words", [["get", "memory:none"], ["operation", "none"], ["watch", "none"]])
def test_what_does_not_exist_ends_with_4(called: Called, words: list[str]) -> None:
    code, out, err = called(*words)
    assert (code, out) == (4, "")
    assert "not found" in err


def test_a_server_that_does_not_answer_ends_with_5_and_the_id_was_told() -> None:
    lost = muniment("add", "Nobody hears this.", "--id", "lost", "--url", "http://127.0.0.1:9")
    assert lost.returncode == 5
    assert lost.stdout == "operation  lost\n"
    assert "no server answers at http://127.0.0.1:9" in lost.stderr
    assert "muniment operation lost --url http://127.0.0.1:9" in lost.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://"])
def test_a_url_that_is_none_ends_with_2(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["recall", "a", "--url", url]) == 2
    assert "is not a URL" in capfd.readouterr().err


def test_the_environment_names_a_server_or_a_directory(
    server: Server, called: Called, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert called("add", "From the environment.", "--id", "environment")[0] == 0
    monkeypatch.setenv("MUNIMENT_DATA_DIR", str(server.data_dir))
    assert run(["operation", "environment"]) == 0
    monkeypatch.setenv("MUNIMENT_DATA_DIR", "/nonexistent/data")
    assert run(["operation", "environment"]) == 4
    monkeypatch.setenv("MUNIMENT_URL", server.url)
    assert run(["operation", "environment"]) == 0
    monkeypatch.setenv("MUNIMENT_URL", "http://127.0.0.1:9")
    assert run(["operation", "environment"]) == 5
    assert called("operation", "environment")[0] == 0, "the flag goes before the environment"


def test_somebody_elses_server_is_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}).start()
        code = run(["operation", "a", "--url", f"http://127.0.0.1:{other.server_address[1]}"])
        other.shutdown()
    assert code == 1
    assert "/ready was answered with status 501" in capfd.readouterr().err


def test_a_directory_without_a_memory_is_not_made_by_asking(tmp_path: Path) -> None:
    for words in (["recall", "a"], ["get", "memory:a"], ["operation", "--list"], ["watch", "a"], ["check"]):
        capture = run([*words, "--data-dir", str(tmp_path / "none")])
        assert capture == 4
    assert not (tmp_path / "none").exists()


# Serving


def test_serve_refuses_what_it_must_in_one_line(server: Server, tmp_path: Path) -> None:
    owned = muniment("serve", "--port", "0", "--data-dir", str(server.data_dir))
    assert owned.returncode == 3
    assert owned.stdout == ""
    assert owned.stderr.splitlines()[-1].startswith("muniment: data directory ")
    assert server.url in owned.stderr

    taken = muniment("serve", "--port", server.url.rpartition(":")[2], "--data-dir", str(tmp_path / "a"))
    assert taken.returncode == 2
    assert "port: cannot listen" in taken.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "host: 0.0.0.0 is not a loopback address"),
        (["--embedder", "psychic"], "embedder: Invalid enum value 'psychic'"),
        (["--set", "drain_seconds=-1"], "drain_seconds"),
        (["--set", "nothing=1"], "nothing: unknown setting"),
        (["--set", "port"], "is not name=value"),
        (["--config", "/nonexistent.toml"], "cannot read"),
        (["--port", "70000"], "port"),
    ],
)
def test_a_wrong_setting_is_named(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *words]) == 2
    assert says in capfd.readouterr().err


def test_serve_prints_its_url_first_and_ends_in_order(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    (tmp_path / "m.toml").write_text('embedder = "bundled"\ndrain_seconds = 3\n', "utf-8")
    options = ("--config", str(tmp_path / "m.toml"), "--embedder", "synthetic", "--set", "drain-seconds=1")
    process = started("serve", "--port", "0", "--data-dir", str(tmp_path / "d"), *options)
    assert process.stdout is not None
    url = process.stdout.readline().decode().strip()
    with Client(url) as client:
        assert client.ready()["ingestion_ready"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, b"")
    assert b"Traceback" not in err


# A server of one's own


def test_without_a_server_one_is_started_for_the_command(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "made" / "here"))
    added = muniment("add", "The attic holds a trunk.", "--id", "trunk", *where)
    assert added.returncode == 0, added.stderr
    assert added.stderr.startswith("no server runs on ")
    assert wiring.owner(tmp_path / "made" / "here") is None
    found = muniment("recall", "attic trunk", *where)
    assert found.returncode == 0, found.stderr
    assert "The attic holds a trunk." in found.stdout
    assert wiring.owner(tmp_path / "made" / "here") is None


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as empty:
        empty.wait_ready("search_ready")
        where = ("--data-dir", str(tmp_path / "data"))
        assert muniment("operation", "--list", *where).stdout == "no operations\n"
        assert muniment("recall", "anything", *where).stdout == "nothing found\n"


def test_two_commands_at_once_share_what_the_first_one_started(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    where = ("--data-dir", str(tmp_path / "data"))
    running = [started("add", f"Text {number}.", "--id", f"text-{number}", *where) for number in range(2)]
    for process in running:
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert b"committed  memory:" in out
    assert wiring.owner(tmp_path / "data") is None
    states = {line["operation_id"]: line["state"] for line in listed(*where)}
    assert states == {"text-0": "committed", "text-1": "committed"}


def test_a_command_outlives_the_temporary_server_of_another(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    where = tmp_path / "data"
    first = started("import", "-", "--data-dir", str(where), stdin=subprocess.PIPE)
    until(lambda: wiring.owner(where) is not None)
    owner = wiring.owner(where)
    assert owner is not None
    blocked(owner.url, "waits", on="first")
    second = started("watch", "waits", "--json", "--data-dir", str(where))
    assert second.stdout is not None
    before = [json.loads(second.stdout.readline()) for _ in range(3)]
    _, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, err
    assert not Path(f"/proc/{owner.pid}").exists()
    added = muniment("add", "First.", "--id", "first", "--data-dir", str(where))
    assert added.returncode == 0, added.stderr
    out, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, err
    events = before + [json.loads(line) for line in out.splitlines()]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert wiring.owner(where) is None


def test_the_temporary_server_ends_with_its_command_even_by_sigkill(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    where = tmp_path / "data"
    process = started("import", "-", "--data-dir", str(where), stdin=subprocess.PIPE)
    until(lambda: wiring.owner(where) is not None)
    owner = wiring.owner(where)
    assert owner is not None
    process.kill()
    process.wait()
    try:
        until(lambda: wiring.owner(where) is None)
        until(lambda: not Path(f"/proc/{owner.pid}").exists())
    finally:  # Where this fails, nothing else would end it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGKILL)


def test_a_temporary_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", "utf-8")
    refused = muniment("add", "a", "--data-dir", str(tmp_path / "file" / "data"))
    assert refused.returncode == 2
    assert "Not a directory" in refused.stderr


# Waiting


def blocked(url: str, operation_id: str, on: str) -> None:
    with Client(url) as client:
        client.submit(Kind.ADD_MEMORY, {"content": f"Waits for {on}."}, operation_id, [on])


def test_watch_goes_on_over_a_restart_on_another_port(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    with Server(tmp_path / "data") as running:
        blocked(running.url, "waits", on="first")
        process = started("watch", "waits", "--json", "--data-dir", str(tmp_path / "data"))
        assert process.stdout is not None
        before = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert before[-1]["to_state"] == "blocked"
        old = running.url
        running.restart()
        assert running.url != old
        assert muniment("add", "First.", "--id", "first", "--url", running.url).returncode == 0
        out, err = process.communicate(timeout=SECONDS)
    events = before + [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0, err
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["to_state"] == "committed"


def test_what_has_not_ended_ends_with_5_or_130_and_can_be_asked_for(
    server: Server, called: Called, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    blocked(server.url, "never", on="nothing")
    code, out, _ = called("operation", "never")
    assert code == 5
    assert 'blocked_by             ["nothing"]' in out
    code, _, err = called("watch", "never", "--timeout", "0.2")
    assert code == 5
    assert "muniment operation never" in err

    process = started("watch", "never", "--url", server.url)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert f"muniment operation never --url {server.url}".encode() in told
    assert b"Traceback" not in told


# Importing


def lines(*messages: object) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def counted(shown: str) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in shown.splitlines())}


def test_an_import_reports_wrong_lines_and_keeps_the_others(tmp_path: Path, called: Called) -> None:
    file = tmp_path / "messages.jsonl"
    file.write_bytes(
        lines({"content": "Equal.", "user_id": "i"}, {"content": "Equal.", "user_id": "i"})
        + b"\n{nonsense\n[1]\n"
        + lines({"contents": "typo"}, {"content": "Named.", "operation_id": "named"}, {"operation_id": 3})
        + b'{"content": "twice", "content": "twice"}\n'
        + b'{"content": "no end of line"}'
    )
    code, out, err = called("import", str(file), "--prefix", "wrong-")
    expected = {"accepted": 4, "already_there": 0, "conflicting": 0, "invalid": 5, "committed": 4}
    assert counted(out) == {**expected, "rejected": 0, "open": 0}
    assert code == 2
    told = [line.split(":")[0] for line in err.splitlines()]
    assert sorted(told) == ["line 4", "line 5", "line 6", "line 8", "line 9"]
    assert "payload.contents: unknown field" in err

    code, out, _ = called("import", str(file), "--prefix", "wrong-")
    assert counted(out) == {**expected, "accepted": 0, "already_there": 4, "rejected": 0, "open": 0}
    # A control for the counts: another prefix means other operations.
    code, out, _ = called("import", str(file), "--prefix", "other-")
    assert counted(out)["accepted"] == 3
    assert counted(out)["already_there"] == 1


def test_an_import_that_fails_in_part_says_how(tmp_path: Path, called: Called) -> None:
    long = " ".join(f"Sentence number {number} has a few words in it." for number in range(2000))
    file = tmp_path / "messages.jsonl"
    file.write_bytes(lines({"content": long}, {"content": "Fits."}))
    code, out, err = called("import", str(file), "--json")
    assert code == 1
    assert json.loads(out)["rejected"] == 1
    assert "line 1: rejected" in err
    file.write_bytes(lines({"content": "Other.", "operation_id": "taken"}))
    assert called("add", "Taken.", "--id", "taken")[0] == 0
    code, out, err = called("import", str(file))
    assert (code, counted(out)["conflicting"]) == (1, 1)
    assert "line 1: operation_id 'taken' already exists" in err


def test_a_file_that_has_grown_or_was_reordered_adds_only_what_is_new(tmp_path: Path, called: Called) -> None:
    messages = [{"content": f"Day {number}.", "session_id": "diary"} for number in (1, 2, 2, 3)]
    file = tmp_path / "messages.jsonl"
    file.write_bytes(lines(*messages))
    assert counted(called("import", str(file))[1])["accepted"] == 4
    file.write_bytes(lines({"content": "Day 0.", "session_id": "diary"}, *reversed(messages)))
    counts = counted(called("import", str(file))[1])
    assert (counts["accepted"], counts["already_there"], counts["committed"]) == (1, 4, 5)


def test_messages_of_a_session_are_accepted_in_the_order_of_the_file(tmp_path: Path, called: Called) -> None:
    messages = [
        {
            "content": f"Turn {number}.",
            "session_id": f"talk-{number % 3}",
            "operation_id": f"turn-{number:03}",
        }
        for number in range(90)
    ]
    (tmp_path / "talk.jsonl").write_bytes(lines(*messages))
    assert called("import", str(tmp_path / "talk.jsonl"), "--no-wait")[0] == 0
    with Client(called._url) as client:
        ids = [operation["operation_id"] for operation in all_operations(client)]
    turns = [int(name.removeprefix("turn-")) for name in ids if name.startswith("turn-")]
    assert len(turns) == 90
    for talk in range(3):
        mine = [turn for turn in turns if turn % 3 == talk]
        assert mine == sorted(mine)


def all_operations(client: Client) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        page = client.operations(after=after, limit=50)
        yield from page["operations"]
        after = page["next"]
        if after is None:
            return


def test_an_import_killed_with_its_server_and_run_again_is_exactly_once(
    tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    file, count = tmp_path / "messages.jsonl", 300
    file.write_bytes(lines(*({"content": f"Message number {number % 200}."} for number in range(count))))
    where = ("--data-dir", str(tmp_path / "data"))
    kills = 0
    with Server(tmp_path / "data") as running:
        for wanted in (30, 120):
            process = started("import", str(file), *where)
            with Client(running.url) as client:
                while sum(1 for _ in all_operations(client)) < wanted:
                    assert process.poll() is None, "the import ended before it could be killed"
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            running.kill()
            kills += 1
            running.start()
        with Client(running.url) as client:
            kept = [operation["operation_id"] for operation in all_operations(client)]
        assert 120 <= len(kept) < count, "the kills came too late to show anything"
        again = muniment("import", str(file), *where, "--json")
        assert again.returncode == 0, again.stderr
        counts = json.loads(again.stdout)
        assert counts["already_there"] >= len(kept)
        assert counts["accepted"] + counts["already_there"] == counts["committed"] == count
        with Client(running.url) as client:
            everything = list(all_operations(client))
    assert len(everything) == len({line["operation_id"] for line in everything}) == count
    assert len({line["result"]["id"] for line in everything}) == count
    print(f"kills that happened: {kills}; kept before the last run: {len(kept)}")
    assert kills == 4


def test_an_import_that_is_interrupted_says_how_far_it_came(
    server: Server, called: Called, started: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    process = started("import", "-", "--url", server.url, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(lines({"content": "Interrupted.", "operation_id": "interrupted"}))
    process.stdin.flush()
    until(lambda: called("operation", "interrupted")[0] == 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert set(counted(out.decode())) >= {"accepted", "open"}
    assert err.decode() == "not finished: run the same command again, nothing is kept twice\n"
    again = muniment(
        "import",
        "-",
        "--url",
        server.url,
        given=lines({"content": "Interrupted.", "operation_id": "interrupted"}),
    )
    assert counted(again.stdout)["already_there"] == 1


def test_an_import_whose_server_goes_away_for_good_ends_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from muniment.cli import attach

    monkeypatch.setattr(attach, "PATIENCE_SECONDS", 0.5)
    read, write = os.pipe()
    with Server(tmp_path / "data") as running:

        def feed() -> None:
            os.write(write, lines({"content": "One.", "operation_id": "one"}))
            with Client(running.url) as client:
                until(lambda: bool(client.operations()["operations"]))
            running.kill()
            os.write(write, lines({"content": "Two.", "operation_id": "two"}))
            os.close(write)

        feeding = threading.Thread(target=feed)
        feeding.start()
        code = run(["import", f"/dev/fd/{read}", "--url", running.url, "--json"])
        feeding.join()
        os.close(read)
    out, err = capfd.readouterr()
    assert code == 5
    counts = json.loads(out)
    assert counts["accepted"] == 1
    assert counts["open"] >= 1
    assert "run the same command again" in err


# What stored text may do to a terminal


def test_stored_text_never_steers_the_terminal(called: Called) -> None:
    metadata = json.dumps({NASTY: NASTY}, ensure_ascii=False)
    code, out, _ = called(
        *("add", f"Escapes {NASTY}", "--id", NASTY, "--user", NASTY, "--session", NASTY, "--speaker", NASTY),
        *("--category", NASTY, "--metadata", metadata),
    )
    assert code == 0
    shown = [out]
    key = out.split()[-1]
    for words in (
        ["recall", "Escapes red", "--user", NASTY],
        ["get", key],
        ["operation", NASTY],
        ["operation", "--list"],
        ["watch", NASTY],
        ["add", "Other", "--id", NASTY],
        ["operation", f"unknown {NASTY}"],
    ):
        shown += [*called(*words)[1:]]
        if words[0] != "add":
            shown += [*called(*words, "--json")[1:]]
    everything = "".join(shown)
    assert [character for character in RAW if character in everything] == []
    assert "\\x1b]0;owned\\x07" in everything
    assert "\\u202e" in everything
    assert "[bold]x[/bold] :smile:" in everything
    # The control: the exact bytes are there, for who asks for them.
    assert json.loads(called("get", key, "--json")[1])["content"] == f"Escapes {NASTY}"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_can_be_shown_in_any_encoding(called: Called, encoding: str) -> None:
    key = called("add", "Gr\u00fc\u00dfe \U0001f600 \u6f22", "--user", "\u00e9")[1].split()[-1]
    environ = environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C")
    ended = subprocess.run(
        command("get", key, "--url", called._url),
        capture_output=True,
        env=environ,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode(encoding)
    assert ("\U0001f600" if encoding == "utf-8" else "\\U0001f600") in text


def test_on_a_terminal_the_states_are_live_and_the_text_still_safe(server: Server) -> None:
    shown, code = on_terminal("add", f"Live {NASTY}", "--id", f"tty {NASTY}", "--url", server.url)
    assert code == 0
    assert "\x1b[" in shown, "nothing was live: this test shows nothing"
    assert "\x1b]0;owned" not in shown
    assert "\x9b" not in shown
    assert "committed  memory:" in shown
    content, code = on_terminal("get", shown.split()[-1], "--content", "--url", server.url)
    assert code == 0
    assert "\\x1b]0;owned" in content
    assert "\x1b" not in content


def test_an_import_on_a_terminal_has_a_bar(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(lines(*({"content": f"Bar {number}."} for number in range(5))))
    shown, code = on_terminal("import", str(tmp_path / "f"), "--url", server.url)
    assert code == 0
    assert "\x1b[" in shown
    assert "sent" in shown


def on_terminal(*words: str) -> tuple[str, int]:
    """Run the program on a terminal of its own; return all that it wrote there, and its exit code."""
    ours, theirs = pty.openpty()
    environ = environment(TERM="xterm-256color", COLUMNS="100", LINES="30")
    process = subprocess.Popen(command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    written = b""
    over = time.monotonic() + SECONDS
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while time.monotonic() < over:
            if select.select([ours], [], [], 0.1)[0]:
                chunk = os.read(ours, 65536)
                written += chunk
                if not chunk:
                    break
    os.close(ours)
    code = process.wait(timeout=SECONDS)
    return written.decode("utf-8", "replace").replace("\r\n", "\n"), code


# The output itself


def test_a_reader_that_goes_away_is_no_error_of_ours(server: Server, called: Called) -> None:
    for number in range(3):
        called("add", f"Pipe {number}.")
    read, write = os.pipe()
    process = subprocess.Popen(
        command("operation", "--list", "--url", server.url),
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (141, b"")


def test_light_commands_import_nothing_heavy(server: Server) -> None:
    where = ["--data-dir", str(server.data_dir)]
    light = [
        ["version"],
        ["--help"],
        ["config", "show"],
        ["operation", "--list", *where],
        ["recall", "a", *where],
    ]
    program = f"""
import json, sys
from muniment.cli.main import run
def heavy():
    print("heavy", [name for name in {HEAVY!r} if name in sys.modules])
codes = [run(words) for words in json.loads(sys.argv[1])]
print("codes", codes)
heavy()
import apsw
heavy()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, json.dumps(light)], capture_output=True, env=environment(), check=True
    )
    told = ended.stdout.decode().splitlines()
    assert [line for line in told if line.startswith("codes ")] == ["codes [0, 0, 0, 0, 0]"]
    # The last line is the control.
    assert [line for line in told if line.startswith("heavy ")] == ["heavy []", "heavy ['apsw']"]


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert muniment("version").stdout == f"{__version__}\n"
    assert run(["--help"]) == 0
    commands = capfd.readouterr().out.partition("Commands:")[2]
    asking = ("recall", "get", "operation", "watch", "evidence")
    for name in ("serve", "add", "import", *asking, "check", "doctor", "certify", "config", "version"):
        assert f"  {name} " in commands
        assert run([name, "--help"]) == 0
        assert f"Usage: muniment {name}" in capfd.readouterr().out


def test_a_full_disk_is_told_in_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command("version"), stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == b"muniment: cannot write the output: No space left on device\n"


# Settings


def test_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('log_level = "debug"\nport = 1\nparts_max = 7\n', "utf-8")
    environ = environment(MUNIMENT_PORT="2", MUNIMENT_EMBEDDER_URL="http://u:secret@host/v1")
    shown = muniment(
        *("config", "show", "--json", "--config", str(tmp_path / "m.toml"), "--set", "parts_max=8"),
        environ=environ,
    )
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(shown.stdout)}
    assert rows["log_level"] == ("debug", "file")
    assert rows["port"] == (2, "environment")
    assert rows["parts_max"] == (8, "flag")
    assert rows["host"] == ("127.0.0.1", "default")
    assert rows["embedder_url"] == ("http://***@host/v1", "environment")
    assert all(row["description"].endswith(".") for row in json.loads(shown.stdout))
    plain = muniment("config", "show", environ=environ).stdout
    assert "port = 2  (environment)" in plain
    assert "secret" not in plain
    assert muniment("config", "show", "--set", "port=x").returncode == 2


# Checking


def test_check_says_ok_with_the_server_and_without(tmp_path: Path) -> None:
    where = tmp_path / "data"
    with Server(where) as running:
        assert muniment("add", "Checked.", "--url", running.url).returncode == 0
        with_server = muniment("check", str(where))
        assert running.terminate() == 0
    without = muniment("check", "--data-dir", str(where))
    for shown in (with_server, without):
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("ok: 1 operations, 1 memories, state_digest ")
    told = json.loads(muniment("check", str(where), "--json").stdout)
    assert told["findings"] == []


def test_check_names_what_is_wrong_and_ends_with_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "data"
    with Server(where) as running:
        assert run(["add", "The original words.", "--url", running.url]) == 0
        assert running.terminate() == 0
    assert run(["check", str(where)]) == 0
    with contextlib.closing(sqlite3.connect(where / "ledger.db")) as tampering:
        changed = tampering.execute("UPDATE payload SET bytes = CAST('Thf original words.' AS BLOB)").rowcount
        tampering.commit()
    assert changed == 1
    capfd.readouterr()
    assert run(["check", str(where)]) == 1
    out, _ = capfd.readouterr()
    assert "ok" not in out
    assert out.startswith("ledger.db: ")
    assert run(["check", "--data-dir", str(where), "--json"]) == 1
    assert len(json.loads(capfd.readouterr().out)["findings"]) == len(out.splitlines()) >= 1
    assert run(["check", str(where), "--data-dir", str(where)]) == 2
