"""A page in a browser on this machine can neither write to the server nor read from it under another name."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.server import Server
from tests.support.submissions import memory

LOCAL = ("127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "agent.localhost")
FOREIGN = (
    "evil.example",
    "127.0.0.1.evil.example:{port}",
    "10.0.0.1",
    "localhost.evil.example",
    "[fe80::1]",
    "a b",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("foreign")) as running:
        yield running


def _port(server: Server) -> int:
    return httpx.URL(server.url).port or 80


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_are_served(server: Server, host: str) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"Host": host.format(port=_port(server))})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_rebound_name_reads_nothing(server: Server, host: str) -> None:
    answer = httpx.get(f"{server.url}/api/v2/operations", headers={"Host": host.format(port=_port(server))})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Host: must name this machine")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "file://", "http://192.168.0.1:23001"])
def test_a_foreign_page_writes_nothing(server: Server, origin: str) -> None:
    body = memory(f"from-{origin}", "planted by a page")
    answer = httpx.post(f"{server.url}/api/v2/operations", json=body, headers={"Origin": origin})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Origin: must be a page of this machine")
    listed = httpx.get(f"{server.url}/api/v2/operations").json()["operations"]
    assert [each["operation_id"] for each in listed if each["operation_id"].startswith("from-")] == []


def test_a_page_of_this_machine_may_write(server: Server) -> None:
    body = memory("local-page", "written by a local page")
    answer = httpx.post(
        f"{server.url}/api/v2/operations", json=body, headers={"Origin": "http://localhost:3000"}
    )
    assert answer.status_code == 202
