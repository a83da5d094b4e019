"""The operation that is submitted: a memory of 1 KiB, its hash computed beforehand."""

import json
import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from bench.long_text import sentences
from muniment.adapters.clock import SystemClock, SystemEntropy
from muniment.config import Config
from muniment.core import payloads
from muniment.model import command
from muniment.stages import accept
from tests.support import submissions

PAYLOAD_BYTES: Final = 1024
ID_DIGITS: Final = 9


def operation_id(prefix: str, number: int) -> str:
    """Of equal length for all numbers."""
    return f"{prefix}-{number:0{ID_DIGITS}d}"


def submission(name: str, seed: int = 1) -> dict[str, Any]:
    """A submission whose payload is 1 KiB of canonical JSON."""
    text = "".join(each for each, _ in zip(sentences(seed), range(40), strict=False)).replace("\n", " ")
    payload = {"content": text[: PAYLOAD_BYTES - len('{"content":"","user_id":"ann"}')], "user_id": "ann"}
    assert len(json.dumps(payload, separators=(",", ":"))) == PAYLOAD_BYTES
    return submissions.envelope(name, "add_memory", payload)


class Requests:
    """POSTs that differ in their operation ID alone: what is sent is joined from three pieces of bytes."""

    def __init__(self, prefix: str) -> None:
        name = operation_id(prefix, 0)
        body = json.dumps(submission(name), separators=(",", ":")).encode()
        head = (
            "POST /api/v2/operations HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        before, _, self._after = body.partition(name.encode())
        self._before = head.encode() + before + prefix.encode() + b"-"

    def encoded(self, number: int) -> bytes:
        """The request that submits operation ``number``."""
        return b"%s%09d%s" % (self._before, number, self._after)


def commands(prefix: str) -> Iterator[command.Accept]:
    """The same operations as the ledger gets them from the accept stage, without end; each with its salts."""
    config = Config()
    limits = accept.Limits(
        operation_id_bytes_max=config.operation_id_bytes_max,
        dependencies_max=config.dependencies_max,
        payload=payloads.Limits(
            content_bytes_max=config.content_bytes_max, attributes_bytes_max=config.attributes_bytes_max
        ),
    )
    request = accept.read(json.dumps(submission(operation_id(prefix, 0))).encode())
    first = accept.admission(request, limits, account=1, clock=SystemClock(), entropy=SystemEntropy())
    assert first.invalid is None, first.invalid
    dice = random.Random(prefix)
    number = 0
    while True:
        yield msgspec.structs.replace(
            first,
            operation_id=operation_id(prefix, number),
            content_salt=dice.randbytes(16),
            attributes_salt=dice.randbytes(16),
        )
        number += 1
