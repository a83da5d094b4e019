"""One operation with a thousand events a second, served by the real app, followers, store and ledger.

``python -m bench.measure.event_server DIRECTORY`` prints its URL. No real operation has more than a dozen
events, so what is not real is the handler of one command: it moves an operation from ``processing`` to
``processing``, which the lifecycle does not know. The rest is the server's own code: the unit is appended,
the commit flushed, the listeners told, the frames made and sent, and a follower that falls behind reads
the database. There is no executor, no coordinator and no device.

A POST with ``{"operation_id": ...}`` accepts an operation. One with ``rate``, ``seconds`` and ``each`` beside
lets it emit so many events a second, ``each`` to a unit as a task operation's, and then ends it.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from bench.measure import payload
from bench.measure.bare_app import Submitted
from bench.measure.serving import serve
from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
from muniment.adapters.sqlite.store import SqliteStore
from muniment.config import Config
from muniment.errors import InvariantBroken
from muniment.interfaces.http.app import Application, create_app
from muniment.interfaces.http.service import Service
from muniment.model import command, journal
from muniment.model.operation import State
from muniment.ports.ledger import Rows
from muniment.runtime.follow import Followers
from muniment.stages import ledger as stage

ACCOUNT: Final = 1
KEEPALIVE_SECONDS: Final = 3600.0
DETAIL: Final = {"parts": 12, "token_count": 480}


class Asked(msgspec.Struct, frozen=True):
    """The body of a POST."""

    operation_id: str
    rate: float | None = None
    """Events a second; without it, the operation is accepted and nothing else."""
    seconds: float = 0.0
    each: int = 1
    """Events in one unit."""


def handle_with(each: "dict[int, int]") -> Any:
    """The real handler, but ``Advance`` emits ``each[n]`` events."""

    def handle(rows: Rows, asked: command.Command) -> Any:
        if not isinstance(asked, command.Advance):
            return stage.handle(rows, asked)
        row = rows.operation(asked.n)
        if row is None:
            raise InvariantBroken(f"no operation {asked.n}")
        first, state = int(row["progress_seq"]), State(row["state"])
        events = tuple(
            journal.Moved(first + number, State.PROCESSING, State.PROCESSING, DETAIL)
            for number in range(1, each[asked.n] + 1)
        )
        rows.append(
            journal.Advance(
                at=asked.now,
                n=asked.n,
                was=journal.At(state, first),
                to=journal.At(State.PROCESSING, first + len(events)),
                events=events,
                executor=journal.Snapshot(1, 1, 0, None, None),
            ),
            {},
        )
        return command.Standing(n=asked.n, state=State.PROCESSING)

    return handle


class EventService:
    """What POST and the event stream need of a service."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.config = Config()
        self._each: dict[int, int] = {}
        self._numbers: dict[str, int] = {}
        store = SqliteStore.open(
            directory,
            handle_with(self._each),
            lambda rows: stage.begin(rows, lineage="00", now=0),
            incarnation="bench",
        )
        self._ledger = SqliteLedger(store, Batching(), _fatal)
        self._followers = Followers(self._ledger, followers_max=4096, keepalive_seconds=KEEPALIVE_SECONDS)
        self._template = next(payload.commands("events"))

    async def submit(self, body: bytes) -> Submitted:
        """Accept an operation, or let one emit its events and end; returns after the last commit."""
        asked = msgspec.json.decode(body, type=Asked)
        accepted = msgspec.structs.replace(self._template, operation_id=asked.operation_id)
        admitted: command.Admitted = await self._ledger.write(accepted)
        n = await self._number(asked.operation_id)
        if asked.rate is not None:
            self._each[n] = asked.each
            await self._emit(n, asked.rate / asked.each, round(asked.rate * asked.seconds / asked.each))
            await self._ledger.write(command.Refuse(n=n, error="the end", result=None, now=accepted.now))
        return Submitted(created=admitted.created, receipt=admitted.receipt)

    async def follow(self, operation_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """The real followers' stream."""
        return await self._followers.follow(ACCOUNT, operation_id, after)

    async def _number(self, operation_id: str) -> int:
        row = await self._ledger.read(lambda reads: reads.find_operation(ACCOUNT, operation_id))
        assert row is not None
        return int(row["n"])

    async def _emit(self, n: int, units_a_second: float, count: int) -> None:
        """Write units at the times at which they are due, whatever becomes of those before."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        writes: list[asyncio.Task[Any]] = []
        for number in itertools.count():
            due = min(count, 1 + int((loop.time() - began) * units_a_second))
            while len(writes) < due:
                writes.append(
                    loop.create_task(self._ledger.write(command.Advance(n=n, now=self._template.now)))
                )
            if due == count:
                break
            await asyncio.sleep(max(0.0, began + due / units_a_second - loop.time()))
            assert number < 1_000_000
        await asyncio.gather(*writes)


def _fatal(error: BaseException) -> None:
    raise error


async def made() -> Application:
    """The real app."""
    return create_app(cast("Service", EventService(Path(sys.argv[1]))))


if __name__ == "__main__":
    serve(made)
