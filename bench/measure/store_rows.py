"""What a measurement reads from the database of a running server, through a connection that cannot write."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import apsw

from muniment.adapters.sqlite.store import LEDGER_FILE

POLL_SECONDS: Final = 0.02
WAIT_SECONDS: Final = 300.0
PARTS: Final = """
SELECT payload.bytes, part.byte_start, part.byte_end
FROM part JOIN plan ON plan.n = part.plan_n JOIN payload ON payload.object_n = plan.object_n
WHERE plan.n > ? ORDER BY part.plan_n, part.part_index
"""


@contextmanager
def reading(data_dir: Path) -> Iterator[apsw.Connection]:
    """A connection for reading."""
    connection = apsw.Connection(str(data_dir / LEDGER_FILE), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield connection
    finally:
        connection.close()


def number(connection: apsw.Connection, sql: str) -> int:
    """The one number of a statement."""
    ((value,),) = connection.execute(sql).fetchall()
    assert isinstance(value, int)
    return value


def wait_for_memories(connection: apsw.Connection, count: int) -> float:
    """Return the time (``perf_counter``) at which there are so many; raises AssertionError after minutes."""
    give_up = time.monotonic() + WAIT_SECONDS
    while (found := number(connection, "SELECT count(*) FROM memory")) < count:
        assert time.monotonic() < give_up, f"{found} of {count} memories after {WAIT_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)
    return time.perf_counter()


def part_texts(connection: apsw.Connection, after_plan: int) -> list[str]:
    """The texts of all parts of later plans, in order."""
    return [
        bytes(content)[start:end].decode() for content, start, end in connection.execute(PARTS, (after_plan,))
    ]


def states(connection: apsw.Connection) -> dict[str, str]:
    """The state of every operation by ID; ``committed`` only where there is a memory too."""
    sql = """
    SELECT operation.id, CASE
      WHEN operation.state = 'committed' AND memory.object_n IS NULL THEN 'committed without a memory'
      ELSE operation.state END
    FROM operation LEFT JOIN memory ON memory.operation_n = operation.n
    """
    return {str(name): str(state) for name, state in connection.execute(sql)}
