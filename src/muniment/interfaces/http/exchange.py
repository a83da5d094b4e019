"""One request and what can be answered to it; handlers are functions from the one to the other."""

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import orjson

from muniment.errors import InvalidField, MethodNotAllowed, MunimentError, TooManyStreams
from muniment.interfaces.http.service import Service

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

RETRY_AFTER_SECONDS: Final = 1


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has found its route."""

    service: Service
    values: tuple[str, ...]
    """What stood in the placeholders of the route's path, decoded."""
    query_string: bytes
    headers: Headers
    receive: Receive


class Answer(msgspec.Struct, frozen=True):
    """A whole response with a JSON body."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Stream(msgspec.Struct, frozen=True):
    """A response of server-sent events, 200, made of whole frames and comment lines."""

    chunks: AsyncGenerator[bytes, None]


Handler: TypeAlias = Callable[[Exchange], Awaitable[Answer | Stream]]


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its request; there is nobody to answer."""


class BodyTooLong(InvalidField):
    """The rest of the body is not read, so the connection cannot be used again."""


def json_answer(status: int, value: Any) -> Answer:
    """Answer with ``value``: a Struct, or what JSON knows."""
    return Answer(status, orjson.dumps(msgspec.to_builtins(value)))


def error_answer(status: int, error: MunimentError) -> Answer:
    """Answer with the one key ``error``; advice goes into headers (ruling 4)."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, MethodNotAllowed):
        headers = ((b"allow", ", ".join(error.allow).encode()),)
    elif isinstance(error, BodyTooLong):
        headers = ((b"connection", b"close"),)
    elif status == 503:
        headers = ((b"retry-after", b"%d" % RETRY_AFTER_SECONDS),)
        if isinstance(error, TooManyStreams):
            headers += ((b"connection", b"close"),)
    return Answer(status, orjson.dumps({"error": str(error)}), headers)
