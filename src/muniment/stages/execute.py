"""Execute: hand missing parts to the executor, and save them with their vectors under its generation.

A part that is marked indexed with a vector is never embedded again, whatever was restarted in between (seed,
executor-readiness-and-recovery).
"""

from collections.abc import Mapping, Sequence

from muniment.core.ingestion import EmbedRequest, Piece
from muniment.core.planning import model_digest
from muniment.model import command
from muniment.ports.executor import Embedded, Executor
from muniment.ports.ledger import Ledger


async def missing(ledger: Ledger, plan: int, *, after: int, limit: int) -> tuple[Piece, ...]:
    """The next parts of a plan that have no vector yet, in order; fewer than ``limit`` are the last."""
    rows = await ledger.read(lambda reads: reads.missing_parts(plan, after, limit))
    return tuple(
        Piece(row["part_index"], row["token_end"] - row["token_start"], row["byte_start"], row["byte_end"])
        for row in rows
    )


async def embed(request: EmbedRequest, contents: Mapping[int, bytes], executor: Executor) -> Embedded:
    """Embed parts of one or several sources; ``contents`` are their bytes by operation."""
    return await executor.embed(
        [contents[n][piece.byte_start : piece.byte_end].decode() for n, piece in request.pieces],
        labels=[f"{n}:{piece.index}" for n, piece in request.pieces],
    )


def saving(
    request: EmbedRequest, embedded: Embedded, plans: Mapping[int, int], *, now: int
) -> Sequence[command.SaveParts]:
    """The commands that save the vectors of a request, one an operation; ``plans`` by operation."""
    vectors: dict[int, list[tuple[int, bytes]]] = {}
    for (n, piece), vector in zip(request.pieces, embedded.vectors, strict=True):
        vectors.setdefault(n, []).append((piece.index, vector))
    return [
        command.SaveParts(
            n=n,
            plan=plans[n],
            generation=embedded.generation,
            model_digest=model_digest(embedded.model),
            vectors=tuple(vectors[n]),
            now=now,
        )
        for n in request.operations
    ]
