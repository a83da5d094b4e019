"""``muniment doctor``: each degraded thing, and the command or the step that cures it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from muniment.cli import exits, options, outcome
from muniment.cli.output import safe_line, say, say_json
from muniment.cli.settings import configured, flags
from muniment.config import Config
from muniment.errors import MunimentError

BLOCKED_SHOWN_MAX: Final = 20


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be."""

    thing: str
    problem: str
    cure: str


CURES: Final[Mapping[str, str]] = {
    "ledger": "stop the server, put the files of the data directory back, start it; then `muniment check`",
    "storage": "free space on its disk, or move the stopped directory to a larger one; it goes on by itself",
    "coordinator": "look at the load of the machine; if the server hangs, restart it: nothing is lost",
    "tokenizer": "put the tokenizer file back; `muniment config show` tells where it is looked for",
    "model_executor": "wait while it loads; if it stays so, read `exited` and `stalled` in the log",
    "search_index": "wait: it is filled again from the ledger; if it stays so, restart the server",
}


def of_status(status: Mapping[str, Any]) -> list[Finding]:
    """What the status of a running server says is wrong. Pure."""
    down = [name for name, up in status["readiness"]["capabilities"].items() if not up]
    found = [Finding(name, status["reasons"].get(name, "it does not work"), CURES[name]) for name in down]
    for each in status["stuck"]:
        told = each["executor_error"] or each["executor_last_exit"] or "nothing is known of it"
        found.append(
            Finding(
                f"operation {each['operation_id']}",
                f"stuck in {each['state']} after {each['executor_exit_count']} ends of a child: {told}",
                f"`muniment evidence {each['operation_id']}` tells more; it is tried again by itself, and at "
                "once after a restart with a model that can read it",
            )
        )
    hidden = status["operations"]["stuck"] - len(status["stuck"])
    if hidden > 0:
        found.append(
            Finding(
                "operations", f"{hidden} more are stuck", "`muniment operation --list --state processing`"
            )
        )
    return found


def of_blocked(page: Iterable[Mapping[str, Any]], exists: Callable[[str], bool]) -> list[Finding]:
    """Operations that wait for an ID which nobody has submitted."""
    found = []
    for receipt in page:
        missing = [name for name in receipt["blocked_by"] if not exists(name)]
        if missing:
            found.append(
                Finding(
                    f"operation {receipt['operation_id']}",
                    f"waits for {', '.join(missing)}, never submitted",
                    "submit it, or leave it: what waits is kept",
                )
            )
    return found


def doctor(
    data_dir: options.DataDir = None,
    url: options.Url = None,
    as_json: options.AsJson = False,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Look at data directory, model and server; name each thing that is wrong, and its cure.

    Exit code 0: nothing is. 1: something is. Nothing is changed, and no server is started.
    """
    settings = configured(flags(assigned=assigned, data_dir=data_dir), config)
    found = _of_server(url) if url is not None else _of_machine(settings)
    if as_json:
        say_json({"healthy": not found, "findings": found})
    for each in () if as_json else found:
        say(safe_line(f"{each.thing}: {each.problem}"))
        say(safe_line(f"  cure: {each.cure}"))
    if found:
        outcome.finish(exits.FAILED)
    if not as_json:
        say("ok: nothing is wrong")


def _of_machine(settings: Config) -> list[Finding]:
    from muniment import wiring

    path = settings.data_path
    found = []
    problem = wiring.storage_problem(settings)
    if problem is not None:
        found.append(Finding("storage", problem, CURES["storage"]))
    owner = wiring.owner(path) if path.is_dir() else None
    if owner is not None:
        return found + _of_server(owner.url)
    found.append(_no_server(path))
    problem = wiring.model_problem(settings)
    if problem is not None:
        found.append(Finding("model", problem, "correct the setting or put the file back"))
    return found


def _no_server(path: Path) -> Finding:
    if not path.is_dir() or not any(path.iterdir()):
        return Finding(
            "data directory", f"there is no memory in {path}", f"`muniment serve --data-dir {path}`"
        )
    return Finding("server", f"none runs on {path}", f"`muniment serve --data-dir {path}`")


def _of_server(url: str) -> list[Finding]:
    from muniment.client import Client, Unreachable

    with Client(url, patience_seconds=0.0) as client:
        try:
            status = client.status()
        except Unreachable as error:
            return [Finding("server", str(error), "start it, or correct the URL")]
        except MunimentError as error:
            return [Finding("ledger", str(error), CURES["ledger"])]
        found = of_status(status)
        if status["readiness"]["capabilities"]["ledger"]:
            page = client.operations(state="blocked", limit=BLOCKED_SHOWN_MAX)["operations"]
            found += of_blocked(page, lambda name: _exists(client, name))
        return found


def _exists(client: Any, operation_id: str) -> bool:
    from muniment.errors import NotFound

    try:
        client.receipt(operation_id)
    except NotFound:
        return False
    return True
