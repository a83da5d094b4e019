"""What can go wrong between a client and a server, beside what the server itself answers."""

from muniment.errors import Conflict, MunimentError, Unavailable


class OutcomeOpen(Unavailable):
    """The operation may or may not have been accepted, or has not ended yet. Only asking by its ID can tell.

    ``operation_id`` is what to ask for. Submitting the same operation again is safe at any time.
    """

    def __init__(self, operation_id: str, reason: str) -> None:
        super().__init__(f"the outcome of operation '{operation_id}' is not known yet: {reason}")
        self.operation_id = operation_id
        self.reason = reason


class Unreachable(Unavailable):
    """No server could be connected to, so nothing of the request was ever sent."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"no server answers at {url}: {reason}")
        self.url = url


class ConflictAnswer(Conflict):
    """``Conflict`` as the server worded it."""

    def __init__(self, text: str) -> None:
        MunimentError.__init__(self, text)


class UnexpectedAnswer(MunimentError):
    """Whoever answered does not speak the published contract, so that nothing can be concluded from it."""
