"""The six capabilities and what follows from them (seed, executor-readiness-and-recovery; ruling 10)."""

from typing import Any

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Each is measured by using the real thing; field for field the seed's ``ReadinessCapabilities``."""

    ledger: bool = False
    storage: bool = False
    coordinator: bool = False
    tokenizer: bool = False
    model_executor: bool = False
    search_index: bool = False


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, with the reason of each capability that is false."""

    capabilities: Capabilities
    reasons: dict[str, str] = {}

    @property
    def ingestion_ready(self) -> bool:
        """Whether writes are accepted: ledger, storage and coordinator work."""
        return self.capabilities.ledger and self.capabilities.storage and self.capabilities.coordinator

    @property
    def search_ready(self) -> bool:
        """Whether recall can answer: all six."""
        return all(msgspec.structs.astuple(self.capabilities))

    def body(self) -> dict[str, Any]:
        """The seed's ``Readiness`` object."""
        return {
            "capabilities": msgspec.structs.asdict(self.capabilities),
            "ingestion_ready": self.ingestion_ready,
            "search_ready": self.search_ready,
            "status": "ready" if self.ingestion_ready else "not_ready",
        }
