"""Whose request this is: without keys, only programs of this machine that meant this server (ADR 0018).

A page in a browser can send a POST that needs no preflight, and can reach a loopback port under a name of
its own (DNS rebinding). Both carry a header that says so: ``Origin`` names the page, ``Host`` the name.
"""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from muniment.errors import InvalidField
from muniment.interfaces.http.exchange import Headers

_SHOWN_CHARACTERS_MAX: Final = 100


def refuse_foreign(headers: Headers) -> None:
    """Raise ``InvalidField`` for a request that was made under a foreign name or by a foreign page."""
    for name, value in headers:
        if name == b"host" and value and not _is_local(f"//{value.decode('latin-1')}"):
            raise InvalidField("Host", f"must name this machine, not {_shown(value)}")
        if name == b"origin" and not _is_local(value.decode("latin-1")):
            raise InvalidField("Origin", f"must be a page of this machine, not {_shown(value)}")


def _shown(value: bytes) -> str:
    return value.decode("ascii", "backslashreplace")[:_SHOWN_CHARACTERS_MAX]


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    if host is None:
        return False
    host = host.rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
