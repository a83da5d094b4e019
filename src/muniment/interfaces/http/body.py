"""Reading a JSON body: its content type, and no byte more than the limit."""

from typing import Final

from muniment.errors import InvalidField
from muniment.interfaces.http.exchange import BodyTooLong, ClientGoneError, Exchange, Headers

_JSON: Final = "application/json"
_SHOWN_CHARS_MAX: Final = 100


def check_content_type(headers: Headers) -> None:
    """Refuse a content type that is not JSON in UTF-8. Without one, the body speaks for itself."""
    for name, value in headers:
        if name == b"content-type" and not _is_json(value.decode("latin-1")):
            shown = value.decode("ascii", "backslashreplace")[:_SHOWN_CHARS_MAX]
            raise InvalidField("Content-Type", f"must be {_JSON}, in UTF-8, not {shown}")


def _is_json(content_type: str) -> bool:
    if content_type == _JSON:
        return True
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return media_type == _JSON and all(
        parameter in ("", "charset=utf-8", 'charset="utf-8"') for parameter in parameters
    )


async def read_json_body(exchange: Exchange) -> bytes:
    """Return the whole body.

    Raises ``InvalidField`` for a wrong content type; ``BodyTooLong`` as soon as the body is known to pass
    ``body_bytes_max``, without reading the rest; ``ClientGoneError`` where the client left before its end.
    """
    check_content_type(exchange.headers)
    limit = exchange.service.config.body_bytes_max
    announced = next((value for name, value in exchange.headers if name == b"content-length"), b"0")
    if int(announced) > limit:
        raise BodyTooLong("body", f"is {int(announced)} bytes, the limit is {limit}")
    chunks: list[bytes] = []
    byte_count = 0
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        byte_count += len(chunk)
        if byte_count > limit:
            raise BodyTooLong("body", f"is longer than the limit of {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
