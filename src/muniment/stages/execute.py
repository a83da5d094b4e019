"""Execute: hand the missing parts to the executor and save each batch with its vectors under its generation.

A part that is marked indexed with a vector is never embedded again, whatever was restarted in between (seed,
executor-readiness-and-recovery).
"""

from muniment.core.planning import batches, model_digest
from muniment.core.tables import Row
from muniment.model import command
from muniment.ports.clock import Clock
from muniment.ports.executor import Executor
from muniment.ports.ledger import Ledger
from muniment.stages.plan import Source


async def missing(ledger: Ledger, plan: int) -> list[Row]:
    """The parts of a plan that have no vector yet, in order."""
    parts = await ledger.read(lambda reads: reads.parts(plan))
    return [part for part in parts if part["embedding_state"] != "indexed"]


async def execute(
    source: Source, plan: int, ledger: Ledger, executor: Executor, clock: Clock, *, tokens_max: int
) -> None:
    """Embed whatever is missing, one durable batch after the other. Raises whatever the executor raises."""
    parts = await missing(ledger, plan)
    counts = [part["token_end"] - part["token_start"] for part in parts]
    for batch in batches(counts, tokens_max):
        chosen = [parts[position] for position in batch]
        texts = [source.content[part["byte_start"] : part["byte_end"]].decode() for part in chosen]
        labels = [f"{source.n}:{part['part_index']}" for part in chosen]
        embedded = await executor.embed(texts, labels=labels)
        await ledger.write(
            command.SaveParts(
                n=source.n,
                plan=plan,
                generation=embedded.generation,
                model_digest=model_digest(embedded.model),
                vectors=tuple(
                    (part["part_index"], vector)
                    for part, vector in zip(chosen, embedded.vectors, strict=True)
                ),
                now=clock.now_us(),
            )
        )
