"""Every route and status of the seed is answered by a real server; 503 because something is really broken."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.seed_contract import SEED, ContractClient, operation_path
from tests.support.server import Server
from tests.support.submissions import memory, stream

POST: Final = "/api/v2/operations"
NOTICED_SECONDS: Final = 20.0
LEDGER_FILES: Final = ("ledger.db", "ledger.db-wal")


def replaced(data_dir: Path) -> int:
    """Put another file in the place of the ledger, as a careless restore does; return how many."""
    other = data_dir / "other"
    other.write_bytes((data_dir / "ledger.db").read_bytes())
    other.rename(data_dir / "ledger.db")
    return 1


def removed(data_dir: Path) -> int:
    """Take the ledger away."""
    (data_dir / "ledger.db").unlink()
    return 1


def emptied(data_dir: Path) -> int:
    """Lose what the ledger's files hold, under the open file descriptors."""
    for name in LEDGER_FILES:
        os.truncate(data_dir / name, 0)
    return len(LEDGER_FILES)


def noticed(client: ContractClient) -> None:
    """Wait until the server says by itself that it cannot accept writes."""
    give_up = time.monotonic() + NOTICED_SECONDS
    while client.get("/ready").status_code == 200:
        assert time.monotonic() < give_up, "the fault was not noticed"
        time.sleep(0.05)


def healthy(client: ContractClient) -> None:
    submission = memory("kept")
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 200
    assert client.post(POST, json=submission).status_code == 202
    with client.following(operation_path("kept", "/events")) as followed:
        followed.read()
    assert client.post(POST, json=submission).status_code == 200
    assert client.post(POST, json=memory("kept", "something else")).status_code == 409
    assert client.post(POST, json=submission | {"payload": {}}).status_code == 400
    assert client.get(operation_path("kept")).status_code == 200
    assert client.get(operation_path("missing-operation")).status_code == 404
    assert client.get(operation_path("missing-operation", "/events")).status_code == 404


def refusing_writes(client: ContractClient) -> None:
    noticed(client)
    shown = client.get("/ready").json()
    assert (shown["status"], shown["ingestion_ready"], shown["search_ready"]) == ("not_ready", False, False)
    assert shown["capabilities"]["ledger"] is False
    for submission in (memory("kept"), stream("new")):  # A replay too: nothing is known any more.
        refused = client.post(POST, json=submission)
        assert refused.status_code == 503
        assert refused.json()["error"].startswith("operation ledger unavailable")
        assert refused.headers["retry-after"] == "1"
    assert client.post(POST, content=b"{").status_code == 400
    assert client.get("/health").status_code == 200


def refusing_reads(client: ContractClient) -> None:
    for rest in ("", "/events"):
        refused = client.get(operation_path("kept", rest))
        assert refused.status_code == 503
        assert refused.json()["error"].startswith("operation ledger unavailable")
    for path in (POST, "/api/v2/memories/memory:x", "/api/v2/task-streams/x"):
        assert client.get(path).status_code == 503


@pytest.mark.parametrize("fault", [replaced, removed, emptied])
def test_a_ledger_that_is_gone_is_said_to_be_unavailable(
    tmp_path: Path, fault: Callable[[Path], int]
) -> None:
    with (
        Server(tmp_path / "memory", probe_seconds=0.05) as server,
        ContractClient(server.wait_ready().url) as client,
    ):
        healthy(client)
        assert fault(server.data_dir) >= 1
        refusing_writes(client)


def test_every_route_and_status_of_the_seed_is_seen(tmp_path: Path) -> None:
    """All fourteen in one life of a server, each checked by the unaltered seed."""
    with (
        Server(tmp_path / "memory", probe_seconds=0.05) as server,
        ContractClient(server.wait_ready().url) as client,
    ):
        healthy(client)
        lacking = SEED.pairs() - client.seen
        print(f"faults: {emptied(server.data_dir)} files of the ledger emptied")
        refusing_writes(client)
        refusing_reads(client)

        assert len(SEED.pairs()) == 14
        # The control: without the fault, exactly what must come from a fault is missed.
        assert {(pair.method, pair.path) for pair in lacking} == {
            ("GET", "/ready"),
            ("POST", POST),
            ("GET", POST + "/{operation_id}"),
            ("GET", POST + "/{operation_id}/events"),
        }
        assert {pair.status for pair in lacking} == {503}
        assert SEED.pairs() - client.seen == set()
