"""One function a route and method; ``docs/reference/http-api.md`` says what each promises."""

from typing import Final

from muniment.core.canonical import JSON
from muniment.interfaces.http.body import read_json_body
from muniment.interfaces.http.exchange import Answer, Exchange, Handler, Headers, Stream, json_answer
from muniment.interfaces.http.query import (
    choice_parameter,
    limit_parameter,
    parameters,
    uint64,
    uint64_parameter,
)
from muniment.interfaces.http.recall_body import recall_request
from muniment.model.operation import Kind, State

PAGE_ROWS_DEFAULT: Final = 50
SEED_SERVICE: Final = "surreal-memory-server"
SEED_VERSION: Final = "1.8.0"
_HEALTH: Final[JSON] = {"service": SEED_SERVICE, "status": "ok", "version": SEED_VERSION}


async def health(exchange: Exchange) -> Answer:
    """The process answers; nothing else is asked, the ledger least of all."""
    parameters(exchange.query_string, ())
    return json_answer(200, _HEALTH)


async def ready(exchange: Exchange) -> Answer:
    """200 if and only if writes are accepted (ruling 10)."""
    parameters(exchange.query_string, ())
    readiness = await exchange.service.ready()
    return json_answer(200 if readiness.ingestion_ready else 503, readiness.body())


async def status(exchange: Exchange) -> Answer:
    """What a person who looks after the server wants to know; always 200 while it can be read."""
    parameters(exchange.query_string, ())
    return json_answer(200, await exchange.service.status())


async def submit_operation(exchange: Exchange) -> Answer:
    """The only 202 in the code: ``submit`` returns after the ledger's commit, fsync included (ruling 1)."""
    parameters(exchange.query_string, ())
    submitted = await exchange.service.submit(await read_json_body(exchange))
    return json_answer(202 if submitted.created else 200, submitted.receipt)


async def list_operations(exchange: Exchange) -> Answer:
    """A page of receipts in acceptance order."""
    given = parameters(exchange.query_string, ("state", "kind", "after", "limit"))
    page = await exchange.service.operations(
        state=choice_parameter(given, "state", tuple(State)),
        kind=choice_parameter(given, "kind", tuple(Kind)),
        after=given.get("after"),
        limit=limit_parameter(given, PAGE_ROWS_DEFAULT, exchange.service.config.page_rows_max),
    )
    return json_answer(200, {"operations": page.operations, "next": page.next})


async def get_operation(exchange: Exchange) -> Answer:
    """The current receipt."""
    parameters(exchange.query_string, ())
    return json_answer(200, await exchange.service.receipt(exchange.values[0]))


async def stream_events(exchange: Exchange) -> Stream:
    """Replay and follow, from the later of ``after`` and ``Last-Event-ID`` (ruling 9)."""
    given = parameters(exchange.query_string, ("after",))
    after = max(uint64_parameter(given, "after", 0), last_event_id(exchange.headers))
    return Stream(await exchange.service.follow(exchange.values[0], after))


def last_event_id(headers: Headers) -> int:
    """Return the header's number, 0 where it is absent or none of ours.

    A browser sends back whatever it was last given, also by another server at this address, and offers no way
    to correct it: refusing it would end its stream for good.
    """
    sent = [value for name, value in headers if name == b"last-event-id"]
    return (uint64(sent[-1].decode("latin-1").strip()) or 0) if sent else 0


async def list_evidence(exchange: Exchange) -> Answer:
    """A page of what the executor did for an operation (ruling 8)."""
    given = parameters(exchange.query_string, ("after", "limit"))
    page = await exchange.service.evidence(
        exchange.values[0],
        after=uint64_parameter(given, "after", 0),
        limit=limit_parameter(given, PAGE_ROWS_DEFAULT, exchange.service.config.page_rows_max),
    )
    return json_answer(200, page)


async def get_memory(exchange: Exchange) -> Answer:
    """A committed memory with its provenance and parts."""
    parameters(exchange.query_string, ())
    return json_answer(200, await exchange.service.memory(exchange.values[0]))


async def recall(exchange: Exchange) -> Answer:
    """The best parts for a query."""
    parameters(exchange.query_string, ())
    asked = recall_request(await read_json_body(exchange), exchange.service.config)
    return json_answer(200, await exchange.service.recall(asked))


async def get_task_streams(exchange: Exchange) -> Answer:
    """The task streams of one name, with their steps."""
    given = parameters(exchange.query_string, ("user_id", "agent_id"))
    return json_answer(
        200,
        await exchange.service.task_streams(
            exchange.values[0], user_id=given.get("user_id"), agent_id=given.get("agent_id")
        ),
    )


def openapi_handler(document: bytes) -> Handler:
    """Make the handler that serves ``document``."""

    async def openapi(exchange: Exchange) -> Answer:
        parameters(exchange.query_string, ())
        return Answer(200, document)

    return openapi
