"""The HTTP interface: the seed's contract and our own routes as one ASGI application."""

from muniment.interfaces.http.app import create_app

__all__ = ["create_app"]
