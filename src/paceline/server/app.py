"""The HTTP face: routes, keys, errors. OpenAI's API over a ``Service``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.errors import InvalidRequest, LaneFailed, PacelineError
from paceline.parsing import Event
from paceline.server.aligned import ScoredToken
from paceline.server.http import EveryRequest, KeyCheck, error_response, json_response, read_body
from paceline.server.protocol import (
    UnknownModel,
    parse_chat,
    parse_completion,
    parse_json,
)
from paceline.server.replies import ChatReply, Choice, CompletionReply, Reply, error_object, printable, usage
from paceline.server.service import Generation, Service
from paceline.server.sse import DONE, EventStream, event, unless, unless_disconnected
from paceline.server.utilities import utilities

CLIENT_CLOSED_REQUEST = 499
"""The status that metrics show for a client that left before its reply; nobody receives it."""

logger = logging.getLogger("paceline.server")


def create_app(service: Service) -> FastAPI:
    """The application. It may be served before ``service`` has a backend; until then it answers 503.

    Where the service's options have API keys, everything but /health and /metrics needs one.
    """
    options = service.options
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(EveryRequest, metrics=service.metrics)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    keys = [Depends(KeyCheck(options.api_keys))]
    app.include_router(_api(service), dependencies=keys)
    app.include_router(utilities(service), dependencies=keys)
    app.include_router(_operations(service))
    return app


def _api(service: Service) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        reply = ChatReply(service.info)
        body = await unless(service.closing(), read_body(request, service.options))
        chat = await service.work(len(body), lambda: parse_chat(parse_json(body)))
        generation = await unless_disconnected(request.receive, service.chat(chat, len(body), arrived))
        return await _respond(service, request, generation, reply, chat.stream, chat.include_usage)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        reply = CompletionReply(service.info)
        body = await unless(service.closing(), read_body(request, service.options))
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
        return json_response({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        card = model_card()
        if name != card["id"]:
            raise UnknownModel(f"there is no model {name!r}; this server has {card['id']!r}", param="model")
        return json_response(card)

    return router


def _operations(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        service.ready()
        return json_response({"status": "ok"})

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
        return json_response(await unless_disconnected(request.receive, _whole(generation, reply)))
    finally:
        service.close(generation)


async def _whole(generation: Generation, reply: Reply) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(generation.choices)]
    logprobs: list[list[ScoredToken]] = [[] for _ in range(generation.choices)]
    events: list[list[Event]] = [[] for _ in range(generation.choices)]
    choices: dict[int, Choice] = {}
    async for delta in generation.deltas():
        texts[delta.index].append(delta.text)
        events[delta.index].extend(delta.events)
        logprobs[delta.index].extend(delta.logprobs)
        if delta.finish_reason is not None:
            scores = logprobs[delta.index] if generation.scored else None
            text = "".join(texts[delta.index])
            choices[delta.index] = Choice(text, delta.finish_reason, scores, events[delta.index])
    ordered = [choices[index] for index in range(generation.choices)]
    return reply.final(ordered, _usage(generation))


def _usage(generation: Generation) -> dict[str, Any]:
    return usage(generation.prompt_tokens, generation.completion_tokens, generation.thought_tokens)


async def _events(generation: Generation, reply: Reply, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The stream of a reply. An error after the first byte cannot change the status: it becomes the last event."""
    # OpenAI's clients expect the key in every chunk once they have asked for usage.
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        for chunk in reply.opening(generation.choices):
            yield event(chunk | no_usage)
        async for delta in generation.deltas():
            for chunk in reply.chunks(delta.index, delta.text, delta.events, delta.logprobs):
                yield event(chunk | no_usage)
            if delta.finish_reason is not None:
                yield event(reply.end(delta.index, delta.finish_reason) | no_usage)
        if include_usage:
            yield event(reply.usage_chunk(_usage(generation)))
        yield DONE
    except PacelineError as error:
        yield event(error_object(error))
    except Exception:
        logger.exception("a stream failed")
        yield event(error_object(LaneFailed("internal error")))


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What routing finds wrong: no such route (404), another method (405)."""
    assert isinstance(error, HTTPException)
    shaped = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}")
    return json_response(error_object(shaped), error.status_code, dict(error.headers or {}))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
