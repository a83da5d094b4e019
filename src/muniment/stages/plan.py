"""Plan: the tokenizer cuts sources into parts; a plan is persisted before any inference (ruling 18).

A plan that is persisted is the plan: after a restart it is reused and the tokenizer is not asked again.
"""

from collections.abc import Sequence

import msgspec

from muniment.core.replay import salted
from muniment.errors import InvariantBroken
from muniment.model import command
from muniment.ports.executor import Executor, Planned
from muniment.ports.ledger import Ledger, Reads


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A source with its place in the ledger."""

    n: int
    object: int
    salt: bytes
    content: bytes
    plan: int | None
    exits: int
    """How many children ended while they worked for it."""


class TooManyParts(Exception):
    """The source has more parts than the configuration allows; the operation is rejected."""

    def __init__(self, parts: int, parts_max: int) -> None:
        super().__init__(f"the content has {parts} parts, the limit is {parts_max}")


async def load(ledger: Ledger, n: int) -> Source:
    """Read the source of an operation, and whether it has its plan."""

    def query(reads: Reads) -> Source:
        row = reads.operation(n)
        payload = None if row is None else reads.payload(row["object_n"])
        if row is None or payload is None:
            raise InvariantBroken(f"operation {n} has no source")
        plan = reads.active_plan(row["object_n"])
        return Source(
            n=n,
            object=row["object_n"],
            salt=payload["salt"],
            content=payload["bytes"],
            plan=None if plan is None else plan["n"],
            exits=row["executor_exit_count"],
        )

    return await ledger.read(query)


async def plan(sources: Sequence[Source], executor: Executor) -> tuple[Planned, ...]:
    """Plan sources that have no plan, in one request. Raises whatever the executor raises."""
    return await executor.plan(
        [source.content.decode() for source in sources], labels=[str(source.n) for source in sources]
    )


def saving(source: Source, planned: Planned, *, parts_max: int, now: int) -> command.SavePlan:
    """The command that persists a plan. Raises ``TooManyParts``."""
    if len(planned.parts) > parts_max:
        raise TooManyParts(len(planned.parts), parts_max)
    return command.SavePlan(
        n=source.n,
        generation=planned.generation,
        model=planned.model,
        profile=planned.profile,
        token_count=planned.token_count,
        parts=planned.parts,
        part_digests=tuple(
            salted(source.salt, source.content[part.byte_start : part.byte_end]) for part in planned.parts
        ),
        now=now,
    )
