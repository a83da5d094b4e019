"""Routing on the raw path: split, then decode, so that every operation ID is one segment (ADR 0009)."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muniment.errors import MethodNotAllowed, NotFound
from muniment.interfaces.http.exchange import Handler
from muniment.interfaces.http.percent import decoded

_SHOWN_BYTES_MAX: Final = 200


class Route(msgspec.Struct, frozen=True):
    """A path as the OpenAPI document writes it, such as ``/api/v2/memories/{memory_id}``, and its methods."""

    path: str
    methods: Mapping[str, Handler]


class Match(msgspec.Struct, frozen=True):
    """The handler of a request and what stood in the placeholders."""

    handler: Handler
    values: tuple[str, ...]


class Router:
    """Finds the one route of a path. No two routes of the table may fit the same path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._by_length: dict[int, list[tuple[tuple[str | None, ...], Route]]] = {}
        for route in self.routes:
            pattern = tuple(None if part.startswith("{") else part for part in route.path.split("/"))
            self._by_length.setdefault(len(pattern), []).append((pattern, route))

    def find(self, method: str, raw_path: bytes) -> Match:
        """Return what serves the request.

        Raises ``InvalidField`` for a path that cannot be decoded, ``NotFound`` for one that is no route (also
        with an empty placeholder), ``MethodNotAllowed`` where the route has other methods.
        """
        segments = tuple(decoded(segment, "path") for segment in raw_path.split(b"/"))
        for pattern, route in self._by_length.get(len(segments), ()):
            values = _values(pattern, segments)
            if values is not None:
                handler = route.methods.get(method)
                if handler is None:
                    raise MethodNotAllowed(method, tuple(route.methods))
                return Match(handler, values)
        raise NotFound(f"no route {raw_path[:_SHOWN_BYTES_MAX].decode('ascii', 'backslashreplace')}")


def _values(pattern: tuple[str | None, ...], segments: tuple[str, ...]) -> tuple[str, ...] | None:
    values = []
    for expected, segment in zip(pattern, segments, strict=True):
        if expected is None:
            if not segment:
                return None
            values.append(segment)
        elif expected != segment:
            return None
    return tuple(values)
