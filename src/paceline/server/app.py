"""The HTTP face: routes, keys, errors. OpenAI's API over a ``Service``."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import AuthenticationError, InvalidRequest, LaneFailed, PacelineError
from paceline.server.aligned import ScoredToken
from paceline.server.metrics import Metrics
from paceline.server.protocol import (
    BodyTooLarge,
    UnknownModel,
    UnsupportedMediaType,
    parse_chat,
    parse_completion,
    parse_json,
)
from paceline.server.replies import ChatReply, Choice, CompletionReply, Reply, dump, error_object, printable, usage
from paceline.server.service import Generation, Service
from paceline.server.sse import DONE, EventStream, event, unless, unless_disconnected

MAX_BODY_BYTES = 32 * 2**20
CLIENT_CLOSED_REQUEST = 499
"""The status that metrics show for a client that left before its reply; nobody receives it."""

logger = logging.getLogger("paceline.server")


def create_app(service: Service, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application. It may be served before ``service`` has a backend; until then it answers 503.

    With ``api_key``, everything under /v1 needs it as a bearer token.
    """
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_CountRequests, metrics=service.metrics)
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    app.include_router(_api(service, max_body_bytes), dependencies=[Depends(_key_check(api_key))])
    app.include_router(_operations(service))
    return app


def _api(service: Service, max_body_bytes: int) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        reply = ChatReply(service.info)
        body = await unless(service.closing(), _read_body(request, max_body_bytes))
        chat = await service.work(len(body), lambda: parse_chat(parse_json(body)))
        generation = await unless_disconnected(request.receive, service.chat(chat, len(body), arrived))
        return await _respond(service, request, generation, reply, chat.stream, chat.include_usage)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        reply = CompletionReply(service.info)
        body = await unless(service.closing(), _read_body(request, max_body_bytes))
        completion = await service.work(len(body), lambda: parse_completion(parse_json(body)))
        generation = await unless_disconnected(request.receive, service.complete(completion, len(body), arrived))
        return await _respond(service, request, generation, reply, completion.stream, completion.include_usage)

    def model_card() -> dict[str, Any]:
        info = service.info
        return {
            "id": printable(info.model_name),
            "object": "model",
            "created": started,
            "owned_by": "paceline",
            "max_model_len": info.max_ctx,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card = model_card()
        if name != card["id"]:
            raise UnknownModel(f"there is no model {name!r}; this server has {card['id']!r}", param="model")
        return _json(card)

    return router


def _operations(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        service.ready()
        return _json({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.scrape)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _respond(
    service: Service, request: Request, generation: Generation, reply: Reply, stream: bool, include_usage: bool
) -> Response:
    if stream:
        events = _events(generation, reply, include_usage)
        return EventStream(events, lambda: service.close(generation))
    try:
        return _json(await unless_disconnected(request.receive, _whole(generation, reply)))
    finally:
        service.close(generation)


async def _whole(generation: Generation, reply: Reply) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(generation.choices)]
    logprobs: list[list[ScoredToken]] = [[] for _ in range(generation.choices)]
    choices: dict[int, Choice] = {}
    async for delta in generation.deltas():
        texts[delta.index].append(delta.text)
        logprobs[delta.index].extend(delta.logprobs)
        if delta.finish_reason is not None:
            scores = logprobs[delta.index] if generation.scored else None
            choices[delta.index] = Choice("".join(texts[delta.index]), delta.finish_reason, scores)
    ordered = [choices[index] for index in range(generation.choices)]
    return reply.final(ordered, usage(generation.prompt_tokens, generation.completion_tokens))


async def _events(generation: Generation, reply: Reply, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The stream of a reply. An error after the first byte cannot change the status: it becomes the last event."""
    # OpenAI's clients expect the key in every chunk once they have asked for usage.
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        for chunk in reply.opening(generation.choices):
            yield event(chunk | no_usage)
        async for delta in generation.deltas():
            if delta.text or delta.logprobs:
                yield event(reply.chunk(delta.index, delta.text, None, delta.logprobs) | no_usage)
            if delta.finish_reason is not None:
                yield event(reply.chunk(delta.index, "", delta.finish_reason) | no_usage)
        if include_usage:
            yield event(reply.usage_chunk(usage(generation.prompt_tokens, generation.completion_tokens)))
        yield DONE
    except PacelineError as error:
        yield event(error_object(error))
    except Exception:
        logger.exception("a stream failed")
        yield event(error_object(LaneFailed("internal error")))


async def _read_body(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"the content type must be application/json, got {kind!r}")
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > 4 * limit:
            break
    # Up to a point a body that is too large is still read (not kept): closing the connection while the client writes
    # would take the answer away from it.
    if size > limit:
        declared = request.headers.get("content-length", f"at least {size}")
        raise BodyTooLarge(f"the body has {declared} bytes; at most {limit} are accepted")
    return bytes(body)


def _key_check(api_key: str | None) -> Any:
    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Header values arrive as Latin-1, whatever bytes the client sent.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode()):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")

    return check


class _CountRequests:
    """Counts answers by route and status. A route's template is the label, so that labels stay few."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                endpoint = getattr(route, "path", "other")
                self._metrics.http_requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


def _error(error: PacelineError, headers: dict[str, str] | None = None) -> Response:
    return _json(error_object(error), error.status, headers)


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return _error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What routing finds wrong: no such route (404), another method (405)."""
    assert isinstance(error, HTTPException)
    shaped = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}")
    return _json(error_object(shaped), error.status_code, dict(error.headers or {}))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours. The traceback goes to the log, not to the client."""
    return _error(PacelineError("internal error"))
