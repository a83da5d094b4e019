"""``muniment doctor`` and the status route: each degraded thing is named, with its cure."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from muniment.adapters.embedders.weights import bundled_directory
from muniment.cli.doctor import CURES, of_blocked, of_status
from muniment.model.readiness import Capabilities
from tests.support import submissions
from tests.support.live import OPERATIONS, ROOT, patched
from tests.support.seed_contract import ContractClient
from tests.support.server import SOURCE, Server

POISON = """
import os, sys
if sys.orig_argv[-1:] == ["ingest"]:
    from muniment.adapters.embedders import synthetic
    embed = synthetic.SyntheticEmbedder.embed
    def planted(self, texts, advance=lambda: None):
        if any("poison" in text for text in texts):
            os._exit(9)
        return embed(self, texts, advance)
    synthetic.SyntheticEmbedder.embed = planted
"""


def doctor(*arguments: str, code: int) -> str:
    """Run the command; its exit code must be this one."""
    done = subprocess.run(
        [sys.executable, "-m", "muniment", "doctor", *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "MUNIMENT_EMBEDDER": "synthetic", "COLUMNS": "200"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def findings(*arguments: str, code: int = 1) -> dict[str, dict[str, str]]:
    told = json.loads(doctor(*arguments, "--json", code=code))
    assert told["healthy"] == (code == 0)
    return {each["thing"]: each for each in told["findings"]}


def test_nothing_is_wrong_with_a_healthy_server(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        server.wait_ready("search_ready")
        assert doctor("--data-dir", str(tmp_path / "store"), code=0) == "ok: nothing is wrong\n"
        assert findings("--url", server.url, code=0) == {}


def test_no_server_and_no_memory(tmp_path: Path) -> None:
    store = tmp_path / "store"
    told = findings("--data-dir", str(store))
    assert told["data directory"]["cure"] == f"`muniment serve --data-dir {store}`"
    assert not store.exists(), "looking makes nothing"
    with Server(store) as server:
        url = server.url
        server.terminate()
    assert "none runs" in findings("--data-dir", str(store))["server"]["problem"]
    assert "no server answers" in findings("--url", url)["server"]["problem"]


def test_a_model_that_could_not_be_loaded(tmp_path: Path) -> None:
    told = findings(
        "--data-dir", str(tmp_path), "--set", "embedder=onnx", "--set", f"embedder_dir={tmp_path / 'absent'}"
    )
    assert "model.onnx" in told["model"]["problem"]


def test_a_disk_with_too_little_room(tmp_path: Path) -> None:
    told = findings("--data-dir", str(tmp_path), "--set", f"storage_reserve_bytes={1 << 60}")
    assert "are kept in reserve" in told["storage"]["problem"]


def until(told: Callable[[dict[str, Any]], bool], url: str) -> dict[str, dict[str, str]]:
    """Ask the status until something shows in it, then the command."""
    give_up = time.monotonic() + 30
    while not told(status := httpx.get(f"{url}/api/v2/status", timeout=20).json()):
        assert time.monotonic() < give_up, status
        time.sleep(0.1)
    return findings("--url", url)


def test_a_stuck_memory_and_one_that_waits_for_nothing_known(tmp_path: Path) -> None:
    environ = patched(tmp_path / "patch", "")
    (tmp_path / "patch" / "sitecustomize.py").write_text(POISON, "utf-8")
    server = Server(
        tmp_path / "store", environ=environ, embedder="synthetic", executor_backoff_seconds_max=0.1
    )
    with server, httpx.Client(base_url=server.url, timeout=20) as client:
        server.wait_ready("search_ready")
        for body in (
            submissions.memory("bad", "It is poison."),
            submissions.envelope("waits", "add_memory", {"content": "x"}, dependencies=["never-sent"]),
        ):
            assert client.post(OPERATIONS, json=body).status_code == 202
        found = until(lambda status: bool(status["stuck"]), server.url)
        bad = found["operation bad"]
        assert "stuck in processing" in bad["problem"]
        assert "exit status 9" in bad["problem"]
        assert "`muniment evidence bad`" in bad["cure"]
        assert "never-sent, never submitted" in found["operation waits"]["problem"]
        text = doctor("--url", server.url, code=1)
        assert "operation bad: stuck" in text
        assert "  cure: " in text


def test_a_tokenizer_that_is_gone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "onnx").mkdir(parents=True)
    for name in ("model.onnx", "model.onnx_data"):
        (model / "onnx" / name).symlink_to(bundled_directory() / "onnx" / name)
    (model / "tokenizer.json").write_bytes((bundled_directory() / "tokenizer.json").read_bytes())
    server = Server(tmp_path / "store", embedder="onnx", embedder_dir=model)
    with server:
        server.wait_ready("search_ready")
        (model / "tokenizer.json").unlink()
        found = until(lambda status: "tokenizer" in status["reasons"], server.url)
        assert found.keys() == {"tokenizer"}
        assert "No such file" in found["tokenizer"]["problem"]
        assert "put the tokenizer file back" in found["tokenizer"]["cure"]


def test_the_status_route_keeps_the_contract_also_without_a_ledger(tmp_path: Path) -> None:
    with Server(tmp_path / "store", probe_seconds=0.1) as server, ContractClient(server.url) as client:
        server.wait_ready("search_ready")
        whole = client.get("/api/v2/status").json()
        assert whole["reasons"] == {}
        assert [child["role"] for child in whole["children"]] == ["ingest", "query"]
        assert whole["positions"]["device"] <= whole["positions"]["durable"]
        assert client.get("/api/v2/status?x=1").status_code == 400
        assert client.post("/api/v2/status").status_code == 405
        store = tmp_path / "store" / "ledger.db"
        store.rename(store.with_name("elsewhere"))
        time.sleep(0.3)
        broken = client.get("/api/v2/status").json()
        assert not broken["readiness"]["capabilities"]["ledger"]
        assert "ledger.db" in broken["reasons"]["ledger"]
        found = findings("--url", server.url)
        assert "put the files" in found["ledger"]["cure"]
        store.with_name("elsewhere").rename(store)


def test_every_capability_has_a_cure() -> None:
    assert CURES.keys() == set(Capabilities.__struct_fields__)


@pytest.mark.parametrize("name", Capabilities.__struct_fields__)
def test_each_false_capability_is_a_finding(name: str) -> None:
    capabilities = dict.fromkeys(Capabilities.__struct_fields__, True) | {name: False}
    status = {
        "readiness": {"capabilities": capabilities},
        "reasons": {name: "because"},
        "stuck": [],
        "operations": {"stuck": 0},
    }
    assert [(each.thing, each.problem) for each in of_status(status)] == [(name, "because")]


def test_more_stuck_than_are_shown_are_counted() -> None:
    status: dict[str, Any] = {
        "readiness": {"capabilities": {}},
        "reasons": {},
        "stuck": [],
        "operations": {"stuck": 3},
    }
    assert [each.problem for each in of_status(status)] == ["3 more are stuck"]


def test_what_waits_for_something_known_is_no_finding() -> None:
    page = [{"operation_id": "a", "blocked_by": ["b", "c"]}]
    assert of_blocked(page, lambda name: True) == []
    assert [each.problem for each in of_blocked(page, lambda name: name == "b")] == [
        "waits for c, never submitted"
    ]
