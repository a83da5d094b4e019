"""The whole error tree. Each class carries its HTTP ``status`` and whether a ``retry`` may help.

::

    MunimentError
    +-- RequestError            400  never     the request is wrong and nothing was stored
    |   +-- Malformed                          the bytes are no JSON that has one canonical form
    |   +-- InvalidField                       a field of the envelope, payload or query; ``field`` names it
    |   +-- HashMismatch                       payload_hash is not the hash of the payload
    +-- NotFound                404  never     unknown, or not visible to the caller: the same words
    +-- MethodNotAllowed        405  never     ``allow`` lists the methods of that route
    +-- Conflict                409  never     the ID belongs to another payload hash
    +-- Unavailable             503  same ID   nothing is known to be wrong with the request
    |   +-- TooManyStreams                     as many event streams are open as may be
    |   +-- LedgerUnavailable                  the ledger cannot be read or written now
    |   +-- StorageFull                        a clean no: rolled back, nothing stored
    |   +-- OutcomeUnknown                     a COMMIT or fsync failed: the ledger tells, after restart
    |   +-- SearchUnavailable                  recall cannot search now; never answered by an empty list
    +-- RefusedStart            -    never     the server must not start on this directory or configuration
    |   +-- ConfigError                        a setting is wrong; names the setting
    |   +-- DirectoryOwned                     another process owns the data directory; ``url`` reaches it
    |   +-- StoreTooNew                        the store was written by a newer format
    |   +-- ModelMismatch                      the store was built with another model
    |   +-- Corrupt                            saved bytes differ from their identity; names where
    +-- ExecutorFault           -    evidence  never reaches a client: it becomes evidence of an operation
        +-- ExecutorExited
        +-- ExecutorStalled                    no progress within the stall budget, or silence
        +-- ExecutorProtocolBroken
        +-- ExecutorFailed                     the child answered that it could not do this request

    InvariantBroken(AssertionError)            a bug: log, exit non-zero, let recovery speak
"""

from typing import ClassVar, Literal

Retry = Literal["never", "same_id", "evidence"]


class MunimentError(Exception):
    """Base of everything that Muniment raises on purpose."""

    status: ClassVar[int | None] = None
    retry: ClassVar[Retry] = "never"


class RequestError(MunimentError):
    """The request is wrong; nothing was stored."""

    status = 400


class Malformed(RequestError):
    """The bytes are not JSON that has one canonical form (ADR 0003)."""


class InvalidField(RequestError):
    """One field is wrong. ``field`` is its path, such as ``payload.content``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class HashMismatch(RequestError):
    """The supplied ``payload_hash`` is not that of the payload (message form of the seed)."""

    def __init__(self, supplied: str, canonical: str) -> None:
        super().__init__(
            f"payload_hash mismatch: request supplied {supplied}, canonical payload is {canonical}"
        )


class NotFound(MunimentError):
    """Unknown, or hidden from the caller: both have the same text."""

    status = 404


class MethodNotAllowed(MunimentError):
    """The route exists, this method does not."""

    status = 405

    def __init__(self, method: str, allow: tuple[str, ...]) -> None:
        super().__init__(f"method {method} is not allowed here; allowed: {', '.join(allow)}")
        self.allow = allow


class Conflict(MunimentError):
    """The operation ID already belongs to another payload hash (message form of the seed)."""

    status = 409

    def __init__(self, operation_id: str, stored_hash: str) -> None:
        super().__init__(f"operation_id '{operation_id}' already exists with payload_hash {stored_hash}")


class Unavailable(MunimentError):
    """Not now. Repeating the same request with the same ID is always safe."""

    status = 503
    retry = "same_id"


class TooManyStreams(Unavailable):
    """As many event streams are open as may be. The connection that asked is closed: others need it."""


class LedgerUnavailable(Unavailable):
    """The ledger cannot be read or written now; nothing of this request was stored."""

    def __init__(self, reason: str = "operation ledger unavailable") -> None:
        super().__init__(reason)


class StorageFull(Unavailable):
    """No room: rolled back, nothing stored; accepted again once there is room, without a restart."""

    def __init__(self) -> None:
        super().__init__("operation ledger unavailable: storage is full")


class OutcomeUnknown(Unavailable):
    """COMMIT or fsync failed. The process ends and recovery decides; GET by ID tells then (ruling 11)."""

    def __init__(self) -> None:
        super().__init__("operation ledger unavailable: the outcome of this write is unknown until restart")


class SearchUnavailable(Unavailable):
    """Recall cannot search now, and says why."""


class RefusedStart(MunimentError):
    """The server must not start like this."""


class ConfigError(RefusedStart):
    """A setting is wrong. ``setting`` names it."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting


class DirectoryOwned(RefusedStart):
    """Another live process owns the data directory; ``url`` is where it listens, if it said so."""

    def __init__(self, directory: str, url: str | None) -> None:
        where = f" and serves at {url}" if url else ""
        super().__init__(f"data directory {directory} is owned by another process{where}")
        self.url = url


class StoreTooNew(RefusedStart):
    """The store has a format that this version does not know."""


class ModelMismatch(RefusedStart):
    """The store's vectors were made by another model."""


class Corrupt(RefusedStart):
    """Saved bytes differ from their identity; the text names file, table and row."""


class ExecutorFault(MunimentError):
    """Something that happened to the executor. Evidence, never a verdict (ruling 8).

    ``generation`` is the child it happened to; 0 where no child was involved.
    """

    retry = "evidence"

    def __init__(self, text: str, generation: int = 0) -> None:
        super().__init__(text)
        self.generation = generation


class ExecutorExited(ExecutorFault):
    """The child ended; the text holds its exit status."""


class ExecutorStalled(ExecutorFault):
    """The child made no progress on its request within the stall budget, or went silent, and was ended."""


class ExecutorProtocolBroken(ExecutorFault):
    """The child wrote something that is no frame of the protocol, and was ended."""


class ExecutorFailed(ExecutorFault):
    """The child is alive and answered that it cannot do this request."""


class InvariantBroken(AssertionError):
    """A bug in Muniment. The process ends; recovery speaks."""
