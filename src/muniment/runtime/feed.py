"""The feed keeps the device at the journal: what is committed becomes searchable (rulings 12, 24).

At a start it loads every committed memory in pages; afterwards it follows the journal. Both read the same
delta. The device's position never passes what the journal holds, and recall waits for it or says that it is
behind. A device that has lost something, or does not find what it holds, is filled again from the ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import structlog

from muniment.errors import LedgerUnavailable, SearchUnavailable
from muniment.model import journal
from muniment.ports.device import Device, Eligible, Hit, MemoryDelta
from muniment.ports.ledger import Ledger, SealedUnit
from muniment.stages import index

PAGE_MEMORIES: Final = 256
RETRY_SECONDS: Final = 0.5

log = structlog.get_logger("feed")


class Feed:
    """One device behind one ledger. All applying happens on one thread, all searching on another."""

    def __init__(self, ledger: Ledger, device: Device) -> None:
        self._ledger = ledger
        self._device = device
        self._applier = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._searcher = ThreadPoolExecutor(1, thread_name_prefix="device-search")
        self._pending: list[int] = []
        self._reached = 0
        self._loaded = False
        self._held = 0
        """Memories that the device was given and took."""
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        ledger.subscribe(self._observe)

    @property
    def position(self) -> int:
        """The journal position up to which the device has everything."""
        return self._device.position

    @property
    def loaded(self) -> bool:
        """Whether what the store held at the start is on the device."""
        return self._loaded

    def count(self) -> tuple[int, int]:
        """Memories and parts on the device."""
        return self._device.count()

    def byte_count(self) -> int:
        """Bytes that the device takes."""
        return self._device.byte_count()

    def _observe(self, sealed: Sequence[SealedUnit]) -> None:
        for each in sealed:
            if isinstance(each.unit, journal.Commit) and each.unit.memory is not None:
                self._pending.append(each.unit.memory.object)
        self._reached = max(self._reached, sealed[-1].position)
        self._wake.set()

    async def run(self) -> None:
        """Load, then follow, until cancelled."""
        try:
            await self._persist(self._load)
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._persist(self._catch_up if self._loaded else self._load)
        finally:
            self._applier.shutdown(wait=True)
            self._searcher.shutdown(wait=True)

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except LedgerUnavailable as error:
                log.warning("the device waits for the ledger", reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _load(self) -> None:
        self._device.clear()
        self._held = 0
        position, _ = await self._ledger.read(lambda reads: reads.head())
        after = 0
        while True:
            deltas, last = await self._ledger.read(partial(index.page, after=after, limit=PAGE_MEMORIES))
            if not deltas:
                break
            await self._apply(deltas, 0)
            after = last
        await self._apply([], position)
        self._loaded = True
        self._wake.set()

    async def _catch_up(self) -> None:
        objects, reached = list(self._pending), self._reached
        for first in range(0, len(objects), PAGE_MEMORIES):
            chosen = objects[first : first + PAGE_MEMORIES]
            deltas = await self._ledger.read(partial(index.deltas, objects=chosen))
            await self._apply(deltas, 0)
        del self._pending[: len(objects)]
        await self._apply([], reached)

    async def _apply(self, deltas: list[MemoryDelta], position: int) -> None:
        before, _ = self._device.count()
        await asyncio.get_running_loop().run_in_executor(self._applier, self._device.apply, deltas, position)
        self._held += self._device.count()[0] - before
        self._moved.set()
        self._moved = asyncio.Event()

    async def probe(self) -> None:
        """Raise SearchUnavailable unless the device is loaded and finds what it holds."""
        if not self._loaded:
            raise SearchUnavailable("the search index is loading")
        self._check_whole()
        try:
            await asyncio.get_running_loop().run_in_executor(self._searcher, self._device.probe)
        except SearchUnavailable:
            self._fill_again()
            raise

    def _check_whole(self) -> None:
        """Raise SearchUnavailable if the device holds less than it was given: it would find less."""
        memories, _ = self._device.count()
        if memories < self._held:
            lost = self._held - memories
            self._fill_again()
            raise SearchUnavailable(
                f"search unavailable: the search index lost {lost} memories and is loading"
            )

    def _fill_again(self) -> None:
        log.warning("the search index is filled again")
        self._loaded = False
        self._wake.set()

    async def reach(self, position: int, seconds: float) -> None:
        """Wait until the device has everything up to ``position``; raises SearchUnavailable after a while."""
        try:
            async with asyncio.timeout(seconds):
                while not self._loaded or self.position < position:
                    await self._moved.wait()
        except TimeoutError:
            state = "loading" if not self._loaded else f"at position {self.position} of {position}"
            raise SearchUnavailable(f"search unavailable: the search index is {state}") from None

    async def search(self, query: bytes, eligible: Eligible, limit: int) -> tuple[Hit, ...]:
        """Search the current snapshot. Raises SearchUnavailable when that has lost something."""
        self._check_whole()
        return await asyncio.get_running_loop().run_in_executor(
            self._searcher, self._device.search, query, eligible, limit
        )
