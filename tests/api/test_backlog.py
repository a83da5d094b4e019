"""10,000 operations are accepted while the executor stands still: no POST is slower for it, all commit."""

from pathlib import Path
from typing import Final

from bench import backlog
from muniment import wiring
from tests.support.live import patched
from tests.support.server import Server

OPERATIONS: Final = 10_000
WINDOW: Final = 1000
RATIO_MAX: Final = 3.0
"""Median POST with the backlog over median POST without it; a walk over the backlog would be far above."""
GROWTH_BYTES_MAX: Final = 20_000
"""Resident memory that one operation may cost, until and after its commit; its vector alone is 1,536."""


def test_ten_thousand_wait_for_a_stopped_executor(tmp_path: Path) -> None:
    with Server(tmp_path / "store", operations_in_flight_max=64) as server:
        server.wait_ready("search_ready")
        report = backlog.measure(server, operations=OPERATIONS, connections=16, window=WINDOW)
        server.terminate()
    print("\n".join(report.lines()))
    assert report.waiting == OPERATIONS
    assert report.committed == OPERATIONS
    assert report.ratio <= RATIO_MAX
    grown = max(report.rss_waiting, report.rss_drained) - report.rss_idle
    assert grown <= GROWTH_BYTES_MAX * OPERATIONS
    checked = wiring.check(tmp_path / "store")
    assert checked.findings == ()
    assert (checked.operations, checked.memories) == (OPERATIONS, OPERATIONS)


WALKS_THE_BACKLOG: Final = """
from muniment.core import receipts
from muniment.runtime import service
submit = service.Service.submit

async def walking(self, body):
    for _ in range(12):
        await self._ledger.read(lambda reads: [receipts.receipt(row, ()) for row in reads.unfinished()])
    return await submit(self, body)

service.Service.submit = walking
"""


def test_control_a_post_that_walks_the_backlog_is_noticed(tmp_path: Path) -> None:
    environ = patched(tmp_path / "patch", WALKS_THE_BACKLOG)
    with Server(tmp_path / "store", environ=environ) as server:
        server.wait_ready("search_ready")
        report = backlog.measure(server, operations=600, connections=1, window=20)
        server.terminate()
    print("\n".join(report.lines()))
    assert report.ratio > RATIO_MAX
