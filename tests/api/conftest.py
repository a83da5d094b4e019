"""One running server for the tests that leave it as they found it; others start their own."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.seed_contract import ContractClient
from tests.support.server import Server

LIMITS: Final[dict[str, Any]] = {
    "body_bytes_max": 200_000,
    "content_bytes_max": 100_000,
    "attributes_bytes_max": 10_000,
    "operation_id_bytes_max": 1024,
    "dependencies_max": 5,
    "query_bytes_max": 1000,
    "page_rows_max": 200,
}
"""Small enough to be passed in a test; ``page_rows_max`` and the ID limit are the defaults."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("api") / "memory", event_keepalive_seconds=0.2, **LIMITS) as started:
        yield started.wait_ready("search_ready")


@pytest.fixture
def client(server: Server) -> Iterator[ContractClient]:
    with ContractClient(server.url) as connected:
        yield connected
