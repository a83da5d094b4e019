"""Bodies for POST, with the hash that the seed asks for."""

import hashlib
import json
from typing import Any


def payload_hash(payload: object) -> str:
    """The seed's hash, computed apart from the server's code; for payloads without floats."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def envelope(operation_id: str, kind: str, payload: object, **changes: Any) -> dict[str, Any]:
    """A submission as an object; ``changes`` replace or add envelope fields."""
    return {
        "operation_id": operation_id,
        "schema_version": 2,
        "kind": kind,
        "payload_hash": payload_hash(payload),
        "payload": payload,
        **changes,
    }


def memory(operation_id: str, content: str = "The kettle is on the stove.", **payload: Any) -> dict[str, Any]:
    """A submission of add_memory."""
    return envelope(operation_id, "add_memory", {"content": content, **payload})


def stream(operation_id: str, name: str = "chores", **payload: Any) -> dict[str, Any]:
    """A submission of create_task_stream, which needs no model."""
    return envelope(operation_id, "create_task_stream", {"name": name, **payload})
