"""The ledger port on SQLite: one writer, group commit, replies after the commit only (ruling 16)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from muniment.adapters.sqlite.ledger import Batching, SqliteLedger
from muniment.adapters.sqlite.store import SqliteReader, SqliteStore
from muniment.errors import (
    Conflict,
    InvariantBroken,
    LedgerUnavailable,
    OutcomeUnknown,
    StorageFull,
)
from muniment.model import command, journal
from muniment.model.command import Command
from muniment.model.operation import State
from muniment.ports.ledger import Reply, Rows, SealedUnit, attempt
from muniment.stages import ledger as stage
from tests.support import operations as ops
from tests.support import stores
from tests.support.operations import ACCOUNT, NOW

SECONDS = 20.0
WAIT_SECONDS = 1.0


class Gate:
    """A handler that keeps the writer waiting for as long as a test wants, and counts the transactions."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.open.set()

    def handle(self, rows: Rows, asked: Command) -> Any:
        self.reached.set()
        assert self.open.wait(SECONDS)
        return stage.handle(rows, asked)

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()


class Running:
    """A ledger under test and what it said."""

    def __init__(self, directory: Path, batching: Batching, handle: Callable[[Rows, Command], Any]) -> None:
        self.directory = directory
        self.batches: list[list[Command]] = []
        self.fatal: list[BaseException] = []
        self.closed = False
        self.sealed: list[list[SealedUnit]] = []
        self.store = stores.sqlite(directory, handle)
        transact = self.store.transact

        def noting(commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]:
            self.batches.append(list(commands))
            return transact(commands)

        self.store.transact = noting  # type: ignore[method-assign]
        self.ledger = SqliteLedger(self.store, batching, self.fatal.append)
        self.ledger.subscribe(lambda sealed: self.sealed.append(list(sealed)))

    async def ended(self) -> None:
        """Wait until the ledger has said that the process must end; it says so after its answers."""
        while not self.fatal:
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the ledger, if the test has not."""
        if not self.closed:
            self.closed = True
            await self.ledger.close()

    async def hold(self, gate: Gate) -> "asyncio.Task[Any]":
        """Shut the gate with the writer behind it, inside a transaction of one command."""
        gate.shut()
        task = asyncio.create_task(self.ledger.write(command.Probe(now=NOW)))
        assert await asyncio.to_thread(gate.reached.wait, SECONDS)
        return task


@asynccontextmanager
async def running(
    tmp_path: Path, handle: Callable[[Rows, Command], Any] = stage.handle, **batching: int
) -> AsyncIterator[Running]:
    found = Running(tmp_path / "data", Batching(**batching), handle)
    try:
        async with asyncio.timeout(SECONDS):
            yield found
    finally:
        await found.close()
    stores.checked(found.directory)


def is_there(reader: SqliteReader, operation_id: str) -> bool:
    return reader.read(lambda reads: reads.find_operation(ACCOUNT, operation_id)) is not None


async def seen_at_reply(found: Running, count: int) -> list[bool]:
    """Whether another connection sees each operation at the moment at which its caller has the reply."""
    reader = SqliteReader(found.directory / "ledger.db")
    seen = []

    async def submit(name: str) -> None:
        await found.ledger.write(ops.memory(name))
        seen.append(is_there(reader, name))

    try:
        await asyncio.gather(*(submit(f"m{each}") for each in range(count)))
    finally:
        reader.close()
    return seen


def test_a_reply_comes_after_the_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as found:
            assert await seen_at_reply(found, 60) == [True] * 60

    asyncio.run(scenario())


class AnswersEarly(SqliteStore):
    """The planted mutant: it answers from a transaction that it commits only when nobody looks any more."""

    owed: list[Sequence[Command]]

    def transact(self, commands: Sequence[Command]) -> tuple[list[Reply], list[SealedUnit]]:
        replies: list[Reply] = []
        try:
            with self._transaction():
                replies.extend(attempt(self._handle, self._rows, each, self._appended) for each in commands)
                raise LedgerUnavailable
        except LedgerUnavailable:
            self.owed.append(commands)
        return replies, []


def test_control_an_answer_before_the_commit_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = AnswersEarly.open(tmp_path, stage.handle, stores.begin, incarnation="test")
        assert isinstance(store, AnswersEarly)
        store.owed = []
        ledger = SqliteLedger(store, Batching(), lambda error: None)
        found = Running.__new__(Running)
        found.directory, found.ledger = tmp_path, ledger
        assert await seen_at_reply(found, 5) == [False] * 5
        await ledger.close()

    asyncio.run(scenario())
    stores.checked(tmp_path)


def test_a_burst_shares_transactions_within_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=16) as found:
            first = await found.hold(gate)
            tasks = [asyncio.create_task(found.ledger.write(ops.memory(f"m{each}"))) for each in range(100)]
            await asyncio.sleep(0)
            assert found.ledger.queued() == 100
            gate.open.set()
            await asyncio.gather(first, *tasks)
            assert [len(batch) for batch in found.batches] == [1, 16, 16, 16, 16, 16, 16, 4]
            assert found.ledger.queued() == 0
            written = [asked.operation_id for batch in found.batches[1:] for asked in batch]  # type: ignore[union-attr]
            assert written == [f"m{each}" for each in range(100)]

    asyncio.run(scenario())


def test_a_batch_ends_at_its_bytes_and_a_larger_command_goes_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, bytes_max=4096) as found:
            first = await found.hold(gate)
            sizes = [1500, 1500, 1500, 9000, 10, 10]
            tasks = [
                asyncio.create_task(found.ledger.write(ops.memory(f"m{each}", "x" * size)))
                for each, size in enumerate(sizes)
            ]
            await asyncio.sleep(0)
            gate.open.set()
            await asyncio.gather(first, *tasks)
            assert [len(batch) for batch in found.batches] == [1, 2, 1, 1, 2]

    asyncio.run(scenario())


def test_accepts_go_first_and_leave_room_for_the_work_on_what_was_accepted(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=8) as found:
            for each in range(4):
                await found.ledger.write(ops.memory(f"old{each}"))
            first = await found.hold(gate)
            work = [
                asyncio.create_task(found.ledger.write(command.Advance(n=n, now=NOW))) for n in range(1, 5)
            ]
            accepts = [asyncio.create_task(found.ledger.write(ops.memory(f"new{each}"))) for each in range(9)]
            await asyncio.sleep(0)
            gate.open.set()
            await asyncio.gather(first, *work, *accepts)
            kinds = [[type(asked).__name__ for asked in batch] for batch in found.batches[-2:]]
            assert kinds == [["Accept"] * 6 + ["Advance"] * 2, ["Accept"] * 3 + ["Advance"] * 2]

    asyncio.run(scenario())


def mix(batches: Sequence[Sequence[Command]]) -> list[tuple[int, int]]:
    """How many accepts and how many other commands each batch has."""
    return [
        (accepts, len(batch) - accepts)
        for batch in batches
        for accepts in [sum(isinstance(asked, command.Accept) for asked in batch)]
    ]


async def under_load(found: Running, gate: Gate, *, size: int = 10) -> list[tuple[int, int]]:
    """Let 24 accepts and 6 other commands wait, and say what the batches were made of."""
    first = await found.hold(gate)
    asked: list[Command] = [ops.memory(f"m{each}", "x" * size) for each in range(24)]
    asked += [command.ReserveGeneration(now=NOW) for _ in range(6)]
    tasks = [asyncio.create_task(found.ledger.write(each)) for each in asked]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(first, *tasks)
    batches = mix(found.batches[1:])
    assert (sum(a for a, _ in batches), sum(o for _, o in batches)) == (24, 6)
    return batches


@pytest.mark.parametrize(
    ("limits", "size", "expected"),
    [
        ({"commands_max": 1}, 10, [(0, 1), (1, 0)] * 6 + [(1, 0)] * 18),
        ({"commands_max": 2}, 10, [(1, 1)] * 6 + [(2, 0)] * 9),
        ({"commands_max": 3}, 10, [(2, 1)] * 6 + [(3, 0)] * 4),
        ({"commands_max": 4}, 10, [(3, 1)] * 6 + [(4, 0), (2, 0)]),
        ({"bytes_max": 1024}, 900, [(1, 1)] * 6 + [(1, 0)] * 18),
        ({"commands_max": 8, "bytes_max": 4096}, 900, [(3, 2)] * 3 + [(3, 0)] * 5),
    ],
)
def test_accepts_never_keep_other_work_from_the_ledger(
    tmp_path: Path, limits: dict[str, int], size: int, expected: list[tuple[int, int]]
) -> None:
    """Whatever the limits are: into every batch goes one other command, or, with room for one, in turn."""

    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, **limits) as found:
            assert await under_load(found, gate, size=size) == expected

    asyncio.run(scenario())


def test_control_a_quarter_of_a_small_batch_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: SqliteLedger) -> list[Any]:
        others = min(len(self._others), self._batching.commands_max // 4)
        batch: list[Any] = []
        for lane, most in ((self._accepts, -others), (self._others, 0)):
            while lane and len(batch) < self._batching.commands_max + most:
                batch.append(lane.popleft())
        return batch

    monkeypatch.setattr(SqliteLedger, "_take", take)

    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=3) as found:
            batches = await under_load(found, gate)
            assert batches[:8] == [(3, 0)] * 8

    asyncio.run(scenario())


def test_an_own_error_reaches_its_caller_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle) as found:
            first = await found.hold(gate)
            tasks = [
                asyncio.create_task(found.ledger.write(asked))
                for asked in (ops.memory("a", "one"), ops.memory("a", "two"), ops.memory("b"))
            ]
            await asyncio.sleep(0)
            gate.open.set()
            replies = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [len(batch) for batch in found.batches] == [1, 3]
            assert [type(reply) for reply in replies[1:]] == [command.Admitted, Conflict, command.Admitted]

    asyncio.run(scenario())


def test_listeners_hear_every_unit_once_in_order_and_before_the_caller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, commands_max=5) as found:
            heard: list[int] = []
            found.ledger.subscribe(lambda sealed: heard.extend(each.position for each in sealed))

            async def submit(name: str) -> None:
                admitted = await found.ledger.write(ops.memory(name))
                ids = [getattr(each.unit, "id", None) for batch in found.sealed for each in batch]
                assert admitted.created
                assert ids.count(name) == 1, "the caller had its reply before the listeners had the unit"

            await asyncio.gather(*(submit(f"m{each}") for each in range(40)))
            await found.ledger.write(ops.memory("m7"))
            with pytest.raises(Conflict):
                await found.ledger.write(ops.memory("m7", "other"))
            await found.ledger.write(command.Probe(now=NOW))
            assert heard == list(range(3, 43))
            held = found.sealed[0][0].held
            assert held["payload", (1,)]["bytes"] == b"One sentence. Another one."

    asyncio.run(scenario())


def test_a_read_sees_every_write_that_was_answered_before_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as found:

            async def submit(name: str) -> bool:
                await found.ledger.write(ops.memory(name))
                row = await found.ledger.read(lambda reads: reads.find_operation(ACCOUNT, name))
                return row is not None

            assert all(await asyncio.gather(*(submit(f"m{each}") for each in range(60))))

    asyncio.run(scenario())


def test_a_read_that_fails_tells_its_caller_and_harms_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as found:
            for _ in range(8):
                with pytest.raises(ZeroDivisionError):
                    await found.ledger.read(lambda _: 1 // 0)
            assert await found.ledger.read(lambda reads: reads.head()[0]) == 2

    asyncio.run(scenario())


def test_a_caller_that_goes_away_does_not_take_its_write_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle) as found:
            first = await found.hold(gate)
            gone = asyncio.create_task(found.ledger.write(ops.memory("gone")))
            refused = asyncio.create_task(found.ledger.write(ops.memory("gone", "other")))
            stays = asyncio.create_task(found.ledger.write(ops.memory("stays")))
            await asyncio.sleep(0)
            gone.cancel()
            refused.cancel()
            gate.open.set()
            await asyncio.gather(first, stays)
            assert gone.cancelled()
            again = await found.ledger.write(ops.memory("gone"))
            assert (again.created, again.receipt.state) == (False, State.ACCEPTED)

    asyncio.run(scenario())


def test_closing_finishes_what_waits_and_refuses_what_comes_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=3) as found:
            first = await found.hold(gate)
            tasks = [asyncio.create_task(found.ledger.write(ops.memory(f"m{each}"))) for each in range(20)]
            await asyncio.sleep(0)
            closing = asyncio.create_task(found.close())
            await asyncio.sleep(0)
            with pytest.raises(LedgerUnavailable, match="stopping"):
                await found.ledger.write(ops.memory("late"))
            with pytest.raises(LedgerUnavailable, match="stopping"):
                await found.ledger.read(lambda reads: reads.head())
            gate.open.set()
            await asyncio.gather(first, *tasks, closing)
            assert all(task.result().created for task in tasks)

    asyncio.run(scenario())
    assert stores.checked(tmp_path / "data").operations == 20


def test_too_many_waiting_accepts_are_refused_and_other_work_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, queue_max=3) as found:
            first = await found.hold(gate)
            tasks = [asyncio.create_task(found.ledger.write(ops.memory(f"m{each}"))) for each in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(LedgerUnavailable, match="too many writes are waiting"):
                await found.ledger.write(ops.memory("m3"))
            tasks.append(asyncio.create_task(found.ledger.write(command.ReserveGeneration(now=NOW))))
            await asyncio.sleep(0)
            gate.open.set()
            await asyncio.gather(first, *tasks)
            assert tasks[-1].result() == 1
            assert (await found.ledger.write(ops.memory("m3"))).created

    asyncio.run(scenario())


def test_a_bug_ends_the_ledger_and_everybody_who_waits_hears_that_the_outcome_is_unknown(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=2) as found:
            await found.ledger.write(ops.memory("kept"))
            first = await found.hold(gate)
            work = asyncio.create_task(found.ledger.write(command.CommitMemory(n=99, now=NOW)))
            accepts = [asyncio.create_task(found.ledger.write(ops.memory(f"m{each}"))) for each in range(9)]
            await asyncio.sleep(0)
            gate.open.set()
            replies = await asyncio.gather(first, work, *accepts, return_exceptions=True)
            with pytest.raises(OutcomeUnknown):
                await found.ledger.write(ops.memory("late"))

            assert replies[0] is None
            assert isinstance(replies[1], OutcomeUnknown)
            assert isinstance(replies[1].__cause__, InvariantBroken)
            await found.ended()
            assert [type(error) for error in found.fatal] == [InvariantBroken]
            told = {f"m{each}": reply for each, reply in enumerate(replies[2:])}
            stored = {row["id"] for row in await found.ledger.read(lambda r: list(r.rows("operation")))}
            # Nothing after the bug was stored, and nobody was told otherwise.
            assert {name for name, reply in told.items() if isinstance(reply, command.Admitted)} == stored - {
                "kept"
            }
            assert {type(reply) for reply in told.values()} <= {command.Admitted, OutcomeUnknown}
            assert any(isinstance(reply, OutcomeUnknown) for reply in told.values())

    asyncio.run(scenario())


def test_any_other_bug_in_a_handler_ends_the_ledger_too(tmp_path: Path) -> None:
    def handle(rows: Rows, asked: Command) -> Any:
        if isinstance(asked, command.Advance):
            raise KeyError("a bug")
        return stage.handle(rows, asked)

    async def scenario() -> None:
        async with running(tmp_path, handle) as found:
            await found.ledger.write(ops.memory("m"))
            with pytest.raises(OutcomeUnknown):
                await found.ledger.write(command.Advance(n=1, now=NOW))
            await found.ended()
            assert [type(error) for error in found.fatal] == [KeyError]

    asyncio.run(scenario())


async def with_a_broken_listener(found: Running, gate: Gate) -> tuple[list[Any], list[int]]:
    """What callers hear of a batch whose second listener fails and of what waits behind it; what it heard."""
    heard: list[int] = []
    bug = KeyError("a bug in a listener")

    def broken(sealed: Sequence[SealedUnit]) -> None:
        heard.append(len(sealed))
        raise bug

    found.ledger.subscribe(broken)
    first = await found.hold(gate)
    asked = [ops.memory("a"), ops.memory("a", "other"), ops.memory("b"), ops.memory("c"), ops.memory("d")]
    tasks = [asyncio.create_task(found.ledger.write(each)) for each in asked]
    await asyncio.sleep(0)
    gate.open.set()
    assert await first is None
    _, waiting = await asyncio.wait(tasks, timeout=WAIT_SECONDS)
    replies = [None if task in waiting else task.exception() or task.result() for task in tasks]
    for task in waiting:
        task.cancel()
    return replies, heard


def test_a_listener_that_fails_ends_the_ledger_and_every_caller_hears_the_truth(tmp_path: Path) -> None:
    """The commit did happen: its callers are answered, the process ends, and nothing is written any more."""

    async def scenario() -> None:
        gate = Gate()
        async with running(tmp_path, gate.handle, commands_max=3) as found:
            replies, heard = await with_a_broken_listener(found, gate)
            assert heard == [2], "a listener that has failed is told nothing more"
            assert [type(reply) for reply in replies[:3]] == [command.Admitted, Conflict, command.Admitted]
            await found.ended()
            assert [type(error) for error in found.fatal] == [KeyError]
            with pytest.raises(OutcomeUnknown):
                await found.ledger.write(ops.memory("late"))
            stored = {row["id"] for row in await found.ledger.read(lambda r: list(r.rows("operation")))}
            told = dict(zip("cd", replies[3:], strict=True))
            assert {type(reply) for reply in told.values()} <= {command.Admitted, OutcomeUnknown}
            assert {"a", "b"} | {
                name for name, reply in told.items() if isinstance(reply, command.Admitted)
            } <= stored

    asyncio.run(scenario())


def test_what_was_committed_before_a_bug_is_told_to_the_listeners(tmp_path: Path) -> None:
    """Also where the loop comes to it only after the writer has met the bug."""

    def handle(rows: Rows, asked: Command) -> Any:
        if isinstance(asked, command.Accept) and asked.operation_id == "bug":
            raise KeyError("a bug")
        return stage.handle(rows, asked)

    async def scenario() -> None:
        async with running(tmp_path, handle, commands_max=1) as found:
            replies = [asyncio.create_task(found.ledger.write(ops.memory(each))) for each in ("m", "bug")]
            await asyncio.sleep(0)
            found.ledger._thread.join(SECONDS)
            assert found.sealed == []
            await found.ended()
            admitted, unknown = await asyncio.gather(*replies, return_exceptions=True)
            assert isinstance(admitted, command.Admitted)
            assert isinstance(unknown, OutcomeUnknown)
            assert [[type(each.unit) for each in sealed] for sealed in found.sealed] == [[journal.Accept]]

    asyncio.run(scenario())


async def written_and_closed_while_the_writer_looks(found: Running) -> Any:
    """What a write hears that comes after the writer has found nothing to do, right before the close."""
    tasks: list[asyncio.Task[Any]] = []
    take, seen = SqliteLedger._take, threading.Event()

    def looking(self: SqliteLedger) -> Any:
        batch = take(self)
        if not batch and not tasks:
            found.ledger._loop.call_soon_threadsafe(act)
            assert seen.wait(SECONDS)
        return batch

    def act() -> None:
        tasks.append(asyncio.create_task(found.ledger.write(ops.memory("m"))))
        tasks.append(asyncio.create_task(found.close()))
        asyncio.get_running_loop().call_soon(seen.set)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteLedger, "_take", looking)
        await found.ledger.write(command.Probe(now=NOW))
        while not tasks:
            await asyncio.sleep(0)
        written, _ = await asyncio.gather(*tasks, return_exceptions=True)
    return written


def test_a_write_right_before_the_close_is_carried_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as found:
            assert isinstance(await written_and_closed_while_the_writer_looks(found), command.Admitted)
            assert found.fatal == []

    asyncio.run(scenario())


def test_control_a_fault_of_a_listener_that_reaches_the_loop_leaves_callers_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(self: SqliteLedger, sealed: list[SealedUnit]) -> None:
        for listener in self._listeners:
            listener(sealed)

    monkeypatch.setattr(SqliteLedger, "_tell", tell)

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        gate = Gate()
        async with running(tmp_path, gate.handle) as found:
            assert await with_a_broken_listener(found, gate) == ([None] * 5, [4])
            assert found.fatal == []

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [StorageFull, LedgerUnavailable])
def test_a_batch_that_storage_cannot_take_is_refused_whole_and_the_next_one_is_taken(
    tmp_path: Path, fault: type[StorageFull | LedgerUnavailable]
) -> None:
    full = threading.Event()
    gate = Gate()

    def handle(rows: Rows, asked: Command) -> Any:
        reply = gate.handle(rows, asked)
        if full.is_set() and isinstance(asked, command.Accept):
            raise fault
        return reply

    async def scenario() -> None:
        async with running(tmp_path, handle) as found:
            first = await found.hold(gate)
            full.set()
            tasks = [asyncio.create_task(found.ledger.write(ops.memory(f"m{each}"))) for each in range(4)]
            tasks.append(asyncio.create_task(found.ledger.write(command.ReserveGeneration(now=NOW))))
            await asyncio.sleep(0)
            gate.open.set()
            replies = await asyncio.gather(first, *tasks, return_exceptions=True)
            assert [type(reply) for reply in replies[1:]] == [fault] * 5
            assert found.sealed == []
            full.clear()
            assert (await found.ledger.write(ops.memory("m1"))).created
            assert found.fatal == []

    asyncio.run(scenario())


def test_a_replaced_file_is_not_written_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as found:
            file = found.directory / "ledger.db"
            await found.ledger.write(ops.memory("m"))
            file.rename(file.with_name("elsewhere.db"))
            with pytest.raises(LedgerUnavailable, match="removed"):
                await found.ledger.write(ops.memory("lost"))
            with pytest.raises(LedgerUnavailable):
                await found.ledger.read(lambda reads: reads.head())
            with pytest.raises(LedgerUnavailable):
                await found.ledger.check_identity()
            file.write_bytes(b"another file")
            with pytest.raises(LedgerUnavailable, match="replaced"):
                await found.ledger.write(ops.memory("lost"))
            file.with_name("elsewhere.db").rename(file)
            await found.ledger.check_identity()
            assert (await found.ledger.write(ops.memory("found"))).created

    asyncio.run(scenario())
