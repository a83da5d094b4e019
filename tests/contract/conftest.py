"""The ledger suite runs on every backend; each store is checked at the end of its test (ruling 12)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import stores
from tests.support.stores import Driver


@pytest.fixture(params=["in_memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """A new store of each backend, with a driver that looks at journal and tables after every batch."""
    if request.param == "in_memory":
        store = stores.in_memory()
        yield Driver(store)
        store.read(stores.journal_is_whole)
        return
    directory = tmp_path / "data"
    opened = stores.sqlite(directory)
    try:
        yield Driver(opened)
    finally:
        opened.close()
    stores.checked(directory)
