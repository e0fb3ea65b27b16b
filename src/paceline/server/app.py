"""The HTTP face: routes, keys, errors. OpenAI's API over a ``Service``, and others beside it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.errors import InvalidRequest, PacelineError
from paceline.server.anthropic import messages
from paceline.server.http import EveryRequest, KeyCheck, error_response, json_response
from paceline.server.openapi import document
from paceline.server.protocol import ChatRequest, CompletionRequest, UnknownModel, parse_chat, parse_completion
from paceline.server.replies import ChatReply, CompletionReply, Reply, printable
from paceline.server.respond import answer
from paceline.server.responses import responses
from paceline.server.service import Service
from paceline.server.utilities import utilities

CLIENT_CLOSED_REQUEST = 499
"""The status that metrics show for a client that left before its reply; nobody receives it."""


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
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    keys = [Depends(KeyCheck(options.api_keys))]
    keyed, keyless = [_api(service), responses(service), messages(service), utilities(service)], _operations(service)
    described = document(route for router in (*keyed, keyless) for route in router.routes if isinstance(route, APIRoute))
    for router in (*keyed, _description(described)):
        app.include_router(router, dependencies=keys)
    app.include_router(keyless)
    return app


def _api(service: Service) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def read_chat(body: dict[str, Any]) -> tuple[ChatRequest, Reply]:
        chat = parse_chat(body)
        return chat, ChatReply(service.info, chat.include_usage, chat.return_token_ids)

    def read_completion(body: dict[str, Any]) -> tuple[CompletionRequest, Reply]:
        completion = parse_completion(body)
        return completion, CompletionReply(service.info, completion.include_usage, completion.return_token_ids)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(service, request, read_chat, service.chat)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(service, request, read_completion, service.complete)

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


def _description(described: dict[str, Any]) -> APIRouter:
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return json_response(described)

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


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What routing finds wrong: no such route (404), another method (405)."""
    assert isinstance(error, HTTPException)
    shaped = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}")
    shaped.status, shaped.headers = error.status_code, error.headers or {}
    return error_response(shaped, request.url.path)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
