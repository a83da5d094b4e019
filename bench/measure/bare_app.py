"""The HTTP app without a ledger: it parses, checks the envelope and the hash, and answers; nothing is stored.

``python -m bench.measure.bare_app`` prints its URL. For measurements only: its 202 promises nothing.
"""

from typing import Final, cast

import msgspec

from bench.measure.serving import serve
from muniment.config import Config
from muniment.interfaces.http.app import Application, create_app
from muniment.interfaces.http.service import Service
from muniment.model.operation import SCHEMA_VERSION, Receipt, State
from muniment.stages import accept

MOMENT: Final = "2026-01-01T00:00:00.000000Z"


class Submitted(msgspec.Struct, frozen=True):
    """The answer of the app's ``submit``."""

    created: bool
    receipt: Receipt


class BareService:
    """What POST /api/v2/operations needs of a service, without what makes it durable."""

    def __init__(self) -> None:
        self.config = Config()

    async def submit(self, body: bytes) -> Submitted:
        """Parse and hash, and show a receipt as if it had been stored."""
        request = accept.read(body)
        receipt = Receipt(
            operation_id=request.operation_id,
            schema_version=SCHEMA_VERSION,
            kind=request.kind,
            payload_hash=request.payload_hash,
            dependencies=request.dependencies,
            state=State.ACCEPTED,
            blocked_by=(),
            result=None,
            error=None,
            executor_generation=0,
            executor_progress_seq=0,
            executor_exit_count=0,
            executor_last_exit=None,
            executor_error=None,
            progress_seq=1,
            created_at=MOMENT,
            updated_at=MOMENT,
        )
        return Submitted(created=True, receipt=receipt)


async def made() -> Application:
    """The real app on the bare service; only the one route is ever asked."""
    return create_app(cast("Service", BareService()))


if __name__ == "__main__":
    serve(made)
