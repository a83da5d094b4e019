"""Accept: from the bytes of a POST to a command for the ledger, in the ruled order of checks (ruling 2).

Parse, envelope, hash; then, inside the accepting transaction: look-up, kind payload and dependencies,
store. A replay therefore never fails on a rule that was added later, and a false body never gets a 200.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from muniment.core import canonical, payloads
from muniment.errors import HashMismatch, InvalidField, Malformed
from muniment.model import command
from muniment.model.operation import SCHEMA_VERSION, Kind, OperationRequest
from muniment.ports.clock import Clock, Entropy

FIELDS: Final = ("operation_id", "schema_version", "kind", "dependencies", "payload_hash", "payload")
REQUIRED: Final = ("operation_id", "schema_version", "kind", "payload_hash", "payload")
KINDS: Final = frozenset(each.value for each in Kind)
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that a submission must keep to."""

    operation_id_bytes_max: int
    dependencies_max: int
    payload: payloads.Limits


def read(body: bytes) -> OperationRequest:
    """Parse a body, check its envelope, compare the hash; raises ``RequestError`` that names the fault."""
    envelope = canonical.parse(body)
    if not isinstance(envelope, dict):
        raise Malformed("the body must be a JSON object")
    for name in envelope:
        if name not in FIELDS:
            raise InvalidField(name, "unknown field")
    for name in REQUIRED:
        if name not in envelope:
            raise InvalidField(name, "is required")
    kind = _kind(envelope)
    payload = envelope["payload"]
    if not isinstance(payload, dict):
        raise InvalidField("payload", "must be an object")
    computed = canonical.payload_hash(payload)
    if envelope["payload_hash"] != computed:
        raise HashMismatch(envelope["payload_hash"], computed)
    return OperationRequest(
        operation_id=envelope["operation_id"],
        kind=kind,
        payload_hash=computed,
        payload=payload,
        dependencies=tuple(envelope.get("dependencies") or ()),
    )


def _kind(envelope: Mapping[str, Any]) -> Kind:
    """Check every envelope field but the payload, in order, and return the kind."""
    operation_id = envelope["operation_id"]
    if not isinstance(operation_id, str) or not operation_id:
        raise InvalidField("operation_id", "must be a non-empty string")
    version = envelope["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):  # 2.0 is 2 to JSON Schema, and so to the seed.
        raise InvalidField("schema_version", f"must be {SCHEMA_VERSION}")
    kind = envelope["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidField("kind", f"must be one of {', '.join(Kind)}")
    dependencies = envelope.get("dependencies", [])
    if not isinstance(dependencies, list) or not all(isinstance(each, str) for each in dependencies):
        raise InvalidField("dependencies", "must be an array of strings")
    supplied = envelope["payload_hash"]
    if not isinstance(supplied, str) or not _HASH.fullmatch(supplied):
        raise InvalidField("payload_hash", "must be 64 lower-case hexadecimal digits")
    return Kind(kind)


def problem(request: OperationRequest, limits: Limits) -> tuple[str, str] | None:
    """The first thing that is statically wrong with a submission whose hash agrees, as field and text."""
    try:
        _check_envelope_limits(request, limits)
        payloads.validate(request.kind, request.payload, limits.payload)
    except InvalidField as error:
        return (error.field, error.problem)
    return None


def _check_envelope_limits(request: OperationRequest, limits: Limits) -> None:
    size = len(request.operation_id.encode())
    if size > limits.operation_id_bytes_max:
        raise InvalidField("operation_id", f"is {size} bytes, the limit is {limits.operation_id_bytes_max}")
    if len(request.dependencies) > limits.dependencies_max:
        raise InvalidField(
            "dependencies", f"are {len(request.dependencies)}, the limit is {limits.dependencies_max}"
        )
    for index, dependency in enumerate(request.dependencies):
        if not dependency:
            raise InvalidField(f"dependencies[{index}]", "must not be empty")
        if dependency == request.operation_id:
            raise InvalidField(f"dependencies[{index}]", "must not name the operation itself")
        if len(dependency.encode()) > limits.operation_id_bytes_max:
            raise InvalidField(
                f"dependencies[{index}]", f"is longer than {limits.operation_id_bytes_max} bytes"
            )


def admission(
    request: OperationRequest, limits: Limits, *, account: int, clock: Clock, entropy: Entropy
) -> command.Accept:
    """The command that admits a submission, everything in it encoded and frozen."""
    divided = payloads.divide(request.payload)
    return command.Accept(
        account=account,
        operation_id=request.operation_id,
        kind=request.kind,
        payload_hash=request.payload_hash,
        dependencies=request.dependencies,
        invalid=problem(request, limits),
        content=divided.content,
        attributes=divided.attributes,
        content_salt=entropy.salt(),
        attributes_salt=entropy.salt(),
        now=clock.now_us(),
    )
