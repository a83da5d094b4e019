"""``muniment recall``: what fits a query best."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from muniment.cli import options
from muniment.cli.attach import attached, wait_for_search
from muniment.cli.output import safe, safe_line, say, say_json

SEARCH_WAIT_SECONDS: Final = 300.0
"""As long as a model may take to load (``executor_startup_seconds``)."""

_SHOWN: Final = ("owner", "agent_id", "session_id", "speaker", "role", "occurred_at", "recorded_at")


def recall(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")],
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Most results. [default: the server's, 10]")
    ] = None,
    user: options.User = None,
    agent: options.Agent = None,
    session: options.Session = None,
    category: options.Category = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0,
            help="How long to wait until search is ready: a model loads.",
        ),
    ] = SEARCH_WAIT_SECONDS,
    as_json: options.AsJson = False,
    url: options.Url = None,
    data_dir: options.DataDir = None,
    config: options.ConfigFile = None,
    assigned: options.Assigned = None,
) -> None:
    """Find memories. Every filter that is given must match; nothing found is an answer, with exit code 0."""
    with attached(options.target(url, data_dir, config, assigned)) as client:
        wait_for_search(client, timeout)
        answer = client.recall(
            query, limit=limit, user_id=user, agent_id=agent, session_id=session, categories=category
        )
    if as_json:
        say_json(answer)
    elif not answer["results"]:
        say("nothing found")
    else:
        for number, result in enumerate(answer["results"], 1):
            say("\n".join(lines_of(number, result)))


def lines_of(number: int, result: Mapping[str, Any]) -> Iterator[str]:
    """One result: its key and score, its text indented, and where it comes from."""
    yield f"{number}. {safe_line(str(result['id']))}  score {result['score']:.4f}"
    yield from (f"   {line}" for line in safe(result["text"]).splitlines())
    provenance = result["provenance"]
    said = [f"{name} {provenance[name]}" for name in _SHOWN if provenance.get(name) is not None]
    said += [f"category {name}" for name in provenance.get("categories") or ()]
    yield f"   ({safe_line(', '.join(said))})"
