"""Recall: filter, score exactly, best part a memory, with text, byte span and provenance.

It answers or says why it cannot: never an empty list while it cannot search.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from muniment.core.scoring import shown
from muniment.core.tables import Row
from muniment.errors import ExecutorFailed, InvariantBroken
from muniment.model.plan import ModelIdentity
from muniment.model.recall import RecallRequest
from muniment.model.times import rfc3339
from muniment.ports.device import Eligible, Hit
from muniment.ports.executor import QueryEmbedder
from muniment.ports.ledger import Reads

QUERY_BYTES_DIRECT: Final = 400
"""A text this short is first tried whole: it has at most about this many tokens."""
QUERY_WINDOWS_MAX: Final = 16
"""A longer query is read up to here, so that one query costs a bounded time."""


def eligible(request: RecallRequest, as_of_us: int) -> Eligible:
    """The filters of a request, at one moment for the whole query."""
    return Eligible(
        owner=request.user_id,
        agent=request.agent_id,
        session=request.session_id,
        categories=request.categories or None,
        as_of_us=as_of_us,
    )


class EmbeddedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query as one vector, float32 little-endian, with the model that made it."""

    vector: bytes
    model: ModelIdentity


async def embed(query: str, executor: QueryEmbedder) -> EmbeddedQuery:
    """Embed a query. One that the model cannot read in one piece is planned, and its windows are averaged."""
    data = query.encode()
    if len(data) <= QUERY_BYTES_DIRECT:
        try:
            embedded = await executor.embed_query(query)
        except ExecutorFailed:  # Longer than the window of a small model: read it in pieces.
            pass
        else:
            return EmbeddedQuery(vector=embedded.vectors[0], model=embedded.model)
    (planned,) = await executor.plan([query], labels=["query"])
    rows = [
        (await executor.embed_query(data[part.byte_start : part.byte_end].decode())).vectors[0]
        for part in planned.parts[:QUERY_WINDOWS_MAX]
    ]
    return EmbeddedQuery(vector=mean_direction(rows), model=planned.model)


def mean_direction(vectors: Sequence[bytes]) -> bytes:
    """The unit vector of the sum of unit vectors; the first one where they cancel each other out."""
    rows = [struct.unpack(f"<{len(vector) // 4}f", vector) for vector in vectors]
    total = [math.fsum(values) for values in zip(*rows, strict=True)]
    length = math.sqrt(math.fsum(value * value for value in total))
    if length == 0.0:
        return vectors[0]
    return struct.pack(f"<{len(total)}f", *(value / length for value in total))


def provenance(reads: Reads, memory: Row) -> dict[str, Any]:
    """Who submitted, owns, speaks: three different people, never filled in from one another (ruling 19)."""
    operation, attribute = reads.operation(memory["operation_n"]), reads.attribute(memory["object_n"])
    if operation is None or attribute is None:
        raise InvariantBroken(f"{memory['key']} has no operation or attributes")
    said = msgspec.json.decode(attribute["bytes"])
    return {
        "operation_id": operation["id"],
        "submitter": memory["submitter_n"],
        "owner": memory["owner"],
        "agent_id": memory["agent"],
        "session_id": memory["session"],
        "speaker": memory["speaker"],
        "role": memory["role"],
        "space": memory["space_n"],
        "visibility": memory["visibility"],
        "categories": said.get("categories") or [],
        "mentions": said.get("mentions") or [],
        "quotes": said.get("quotes") or [],
        "metadata": said.get("metadata"),
        "session_seq": memory["session_seq"],
        "occurred_at": said.get("occurred_at"),
        "expires_at": said.get("expires_at"),
        "recorded_at": rfc3339(memory["recorded_us"]),
    }


def _held(reads: Reads, memory: Row) -> tuple[bytes, Row]:
    payload, plan = reads.payload(memory["object_n"]), reads.active_plan(memory["object_n"])
    if payload is None or plan is None:
        raise InvariantBroken(f"{memory['key']} has no source or plan")
    return payload["bytes"], plan


def rendered(reads: Reads, hits: tuple[Hit, ...]) -> list[dict[str, Any]]:
    """The rows of an answer: each hit with the text of its best part."""
    return [_row(reads, hit) for hit in hits]


def _row(reads: Reads, hit: Hit) -> dict[str, Any]:
    memory = reads.memory(hit.object)
    if memory is None:
        raise InvariantBroken(f"{hit.key} is on the device and not in the ledger")
    content, plan = _held(reads, memory)
    part = reads.part(plan["n"], hit.part_index)
    if part is None:
        raise InvariantBroken(f"{hit.key} has no part {hit.part_index}")
    start, end = part["byte_start"], part["byte_end"]
    return {
        "id": memory["key"],
        "score": shown(hit.score),
        "text": content[start:end].decode(),
        "part_index": hit.part_index,
        "span": {"start": start, "end": end},
        "provenance": provenance(reads, memory),
    }


def whole(reads: Reads, memory: Row) -> dict[str, Any]:
    """One memory with its exact content, provenance and parts."""
    content, plan = _held(reads, memory)
    model = reads.model(plan["model_n"])
    if model is None:
        raise InvariantBroken(f"{memory['key']} has no model")
    said = provenance(reads, memory)
    return {
        "id": memory["key"],
        "operation_id": said["operation_id"],
        "content": content.decode(),
        "content_sha256": hashlib.sha256(content).hexdigest(),
        "byte_count": len(content),
        "provenance": said,
        "model": {"name": msgspec.json.decode(model["identity"])["name"], "digest": model["digest"]},
        "profile": plan["profile"],
        "token_count": plan["token_count"],
        "parts": [_part(content, part) for part in reads.parts(plan["n"])],
    }


def _part(content: bytes, part: Row) -> dict[str, Any]:
    window = content[part["byte_start"] : part["byte_end"]]
    return {
        "index": part["part_index"],
        "token_start": part["token_start"],
        "token_end": part["token_end"],
        "token_count": part["token_end"] - part["token_start"],
        "byte_start": part["byte_start"],
        "byte_end": part["byte_end"],
        "content_sha256": hashlib.sha256(window).hexdigest(),
        "content": window.decode(),
        "embedding_state": part["embedding_state"],
        "updated_at": rfc3339(part["updated_us"]),
    }


def task_streams(
    reads: Reads, account: int, name: str, *, user_id: str | None, agent_id: str | None
) -> list[dict[str, Any]]:
    """All streams of a name that match the given owner and agent, each with its steps in order."""
    return [
        _stream(reads, stream)
        for stream in reads.streams(account, name)
        if (user_id is None or stream["owner"] == user_id)
        and (agent_id is None or stream["agent"] == agent_id)
    ]


def _said(reads: Reads, object_n: int) -> dict[str, Any]:
    attribute = reads.attribute(object_n)
    if attribute is None:
        raise InvariantBroken(f"object {object_n} has no attributes")
    said: dict[str, Any] = msgspec.json.decode(attribute["bytes"])
    return said


def _operation_id(reads: Reads, n: int) -> str:
    operation = reads.operation(n)
    if operation is None:
        raise InvariantBroken(f"operation {n} does not exist")
    return str(operation["id"])


def _stream(reads: Reads, stream: Row) -> dict[str, Any]:
    return {
        "id": stream["key"],
        "name": stream["name"],
        "description": _said(reads, stream["object_n"]).get("description"),
        "user_id": stream["owner"],
        "agent_id": stream["agent"],
        "status": stream["status"],
        "operation_id": _operation_id(reads, stream["operation_n"]),
        "created_at": rfc3339(stream["created_us"]),
        "steps": [_step(reads, step) for step in reads.steps(stream["object_n"])],
    }


def _step(reads: Reads, step: Row) -> dict[str, Any]:
    by = step["completed_by"]
    return {
        "id": step["key"],
        "ordinal": step["ordinal"],
        "name": step["name"],
        "description": _said(reads, step["object_n"]).get("description"),
        "idempotency_key": step["idempotency_key"],
        "status": step["status"],
        "result": None if by is None else _said(reads, by).get("result"),
        "operation_id": _operation_id(reads, step["operation_n"]),
        "created_at": rfc3339(step["created_us"]),
        "completed_at": None if step["completed_us"] is None else rfc3339(step["completed_us"]),
    }
