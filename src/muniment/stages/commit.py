"""Commit: pass the gate; one memory and the terminal receipt become true in one step (ruling 7)."""

from muniment.model import command
from muniment.model.operation import State
from muniment.ports.clock import Clock
from muniment.ports.ledger import Ledger


async def commit(n: int, ledger: Ledger, clock: Clock) -> State:
    """Commit an operation whose parts are all indexed; return where it stands."""
    standing: command.Standing = await ledger.write(command.CommitMemory(n=n, now=clock.now_us()))
    return standing.state


async def refuse(n: int, ledger: Ledger, clock: Clock, *, error: str, reason: str) -> State:
    """End an operation as rejected, for what became known after it was accepted."""
    standing: command.Standing = await ledger.write(
        command.Refuse(n=n, error=error, result={"outcome": "rejected", "reason": reason}, now=clock.now_us())
    )
    return standing.state
