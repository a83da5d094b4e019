"""The Python client of a Muniment server."""

from muniment.client.failures import ConflictAnswer, OutcomeOpen, UnexpectedAnswer, Unreachable
from muniment.client.http import Admission, Client

__all__ = ["Admission", "Client", "ConflictAnswer", "OutcomeOpen", "UnexpectedAnswer", "Unreachable"]
