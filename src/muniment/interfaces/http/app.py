"""The ASGI app: route, handle, answer. Errors are ``{"error": "..."}`` with the status of the class."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import orjson
import structlog

from muniment.errors import Corrupt, InvariantBroken, LedgerUnavailable, MunimentError
from muniment.interfaces.http import handlers
from muniment.interfaces.http.document import openapi_bytes
from muniment.interfaces.http.event_stream import send_events
from muniment.interfaces.http.exchange import (
    Answer,
    ClientGoneError,
    Exchange,
    Message,
    Receive,
    Send,
    Stream,
    error_answer,
)
from muniment.interfaces.http.origin import refuse_foreign
from muniment.interfaces.http.routes import Route, Router
from muniment.interfaces.http.service import Service

Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

_INTERNAL_ERROR: Final = Answer(500, orjson.dumps({"error": "internal error: the server's log says which"}))
_log: Final = structlog.get_logger(__name__)


def routes() -> tuple[Route, ...]:
    """Every route, in the order of the OpenAPI document."""
    return (
        Route("/health", {"GET": handlers.health}),
        Route("/ready", {"GET": handlers.ready}),
        Route("/openapi.json", {"GET": handlers.openapi_handler(openapi_bytes())}),
        Route("/api/v2/status", {"GET": handlers.status}),
        Route("/api/v2/operations", {"POST": handlers.submit_operation, "GET": handlers.list_operations}),
        Route("/api/v2/operations/{operation_id}", {"GET": handlers.get_operation}),
        Route("/api/v2/operations/{operation_id}/events", {"GET": handlers.stream_events}),
        Route("/api/v2/operations/{operation_id}/evidence", {"GET": handlers.list_evidence}),
        Route("/api/v2/memories/{memory_id}", {"GET": handlers.get_memory}),
        Route("/api/v2/recall", {"POST": handlers.recall}),
        Route("/api/v2/task-streams/{name}", {"GET": handlers.get_task_streams}),
    )


def create_app(service: Service) -> Application:
    """Return the ASGI application that serves ``service``; HTTP only, no lifespan."""
    router = Router(routes())

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"no ASGI {scope['type']} here")
        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            answer = await _answer(router, service, scope, receive)
            if isinstance(answer, Stream):
                await send_events(answer.chunks, receive, sending)
            else:
                await _send_answer(answer, sending)
        except ClientGoneError:
            return
        except MunimentError as error:  # In the middle of a stream; the client reads on from its last event.
            _log.warning("stream cut", path=scope["path"], error=str(error))
        except Exception as error:  # noqa: BLE001 whatever it is, the client gets an answer and the log the error
            _log.error("request failed", method=scope["method"], path=scope["path"], exc_info=error)
            if isinstance(error, InvariantBroken):
                service.fatal(error)
            if not began:
                await _send_answer(_INTERNAL_ERROR, sending)

    return application


async def _answer(router: Router, service: Service, scope: Message, receive: Receive) -> Answer | Stream:
    try:
        refuse_foreign(scope["headers"])
        match = router.find(scope["method"], scope["raw_path"])
        return await match.handler(
            Exchange(
                service=service,
                values=match.values,
                query_string=scope["query_string"],
                headers=scope["headers"],
                receive=receive,
            )
        )
    except Corrupt as error:  # A refusal at start; damage that is met while serving is a read that failed.
        return error_answer(503, LedgerUnavailable(f"operation ledger unavailable: {error}"))
    except MunimentError as error:
        if error.status is None:
            raise InvariantBroken(f"no answer for {type(error).__name__}: {error}") from error
        return error_answer(error.status, error)


async def _send_answer(answer: Answer, send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(answer.body)),
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
