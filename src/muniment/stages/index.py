"""Index: a committed memory as the device takes it, just committed or at a start (ruling 12)."""

from collections.abc import Iterable

import msgspec

from muniment.core.tables import Row
from muniment.errors import InvariantBroken
from muniment.ports.device import MemoryDelta
from muniment.ports.ledger import Reads


def delta(reads: Reads, memory: Row) -> MemoryDelta:
    """Read what the device needs of one memory row: its catalogue columns and its vectors in part order."""
    plan = reads.active_plan(memory["object_n"])
    attribute = reads.attribute(memory["object_n"])
    model = None if plan is None else reads.model(plan["model_n"])
    if plan is None or attribute is None or model is None:
        raise InvariantBroken(f"{memory['key']} has no plan, attributes or model")
    vectors = reads.vectors(plan["n"])
    if len(vectors) != plan["part_count"]:
        raise InvariantBroken(f"{memory['key']} has {len(vectors)} vectors for {plan['part_count']} parts")
    attributes = msgspec.json.decode(attribute["bytes"])
    return MemoryDelta(
        object=memory["object_n"],
        key=memory["key"],
        owner=memory["owner"],
        agent=memory["agent"],
        session=memory["session"],
        categories=tuple(attributes.get("categories") or ()),
        expires_us=memory["expires_us"],
        dimensions=msgspec.json.decode(model["identity"])["dimensions"],
        vectors=b"".join(vector["bytes"] for vector in vectors),
    )


def deltas(reads: Reads, objects: Iterable[int]) -> list[MemoryDelta]:
    """The deltas of committed memories by object number."""
    rows = [reads.memory(object_n) for object_n in objects]
    return [delta(reads, row) for row in rows if row is not None]


def page(reads: Reads, after: int, limit: int) -> tuple[list[MemoryDelta], int]:
    """The deltas of the next committed memories in object order, and the last object number seen."""
    rows = reads.memories(after, limit)
    return [delta(reads, row) for row in rows], (rows[-1]["object_n"] if rows else after)
