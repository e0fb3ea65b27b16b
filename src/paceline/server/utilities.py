"""What llama-server offers beside OpenAI's API: tokens and prompts without generating, what is served, who is running."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.config import build_name
from paceline.server.http import json_response, read_body
from paceline.server.protocol import parse_chat, parse_detokenize, parse_json, parse_tokenize
from paceline.server.replies import printable
from paceline.server.service import Backend, Service, chat_text, check_ids
from paceline.server.sse import unless
from paceline.types import SamplingParams


def utilities(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        backend, body = service.ready(), await unless(service.closing(), read_body(request, service.options))
        return json_response(await service.work(len(body), _tokenize, backend, body))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        backend, body = service.ready(), await unless(service.closing(), read_body(request, service.options))
        return json_response(await service.work(len(body), _detokenize, backend, body))

    @router.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        backend, body = service.ready(), await unless(service.closing(), read_body(request, service.options))
        return json_response(await service.work(len(body), _apply_template, backend, body))

    @router.get("/props")
    async def props() -> Response:
        return json_response(_props(service.ready()))

    @router.get("/slots")
    async def slots() -> Response:
        lanes = service.ready().handle.stats().running
        return json_response([asdict(lane) | {"acceptance_length": lane.acceptance_length} for lane in lanes])

    return router


def _tokenize(backend: Backend, body: bytes) -> dict[str, Any]:
    asked = parse_tokenize(parse_json(body))
    ids = backend.tokenizer.encode(asked.text, add_special=asked.add_special)
    tokens = [{"id": token, "piece": _piece(backend, token)} for token in ids] if asked.with_pieces else ids
    return {"tokens": tokens, "count": len(ids), "max_model_len": backend.handle.info.max_ctx}


def _piece(backend: Backend, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are no text by themselves."""
    piece = backend.tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _detokenize(backend: Backend, body: bytes) -> dict[str, Any]:
    tokens = parse_detokenize(parse_json(body))
    check_ids(backend, tokens, "tokens")
    return {"content": b"".join(map(backend.tokenizer.token_bytes, tokens)).decode(errors="replace")}


def _apply_template(backend: Backend, body: bytes) -> dict[str, Any]:
    """Of a body of /v1/chat/completions, the text that the model would read."""
    return {"prompt": printable(chat_text(backend, parse_chat(parse_json(body))))}


def _props(backend: Backend) -> dict[str, Any]:
    info = backend.handle.info
    defaults = asdict(SamplingParams())
    return {
        "default_generation_settings": {"n_ctx": info.max_ctx, "params": defaults},
        "total_slots": info.max_concurrency,
        "model_alias": printable(info.model_name),
        "model_path": printable(info.target_path),
        "drafter_path": info.drafter_path and printable(info.drafter_path),
        "speculation": info.speculation,
        "draft_block_size": info.block_size,
        "kv_pool_tokens": info.kv_pool_tokens,
        "vocab_size": info.vocab_size,
        "eos_token_ids": list(info.eos_ids),
        "chat_template": backend.template and backend.template.source,
        "modalities": {"vision": False, "audio": False},
        "arithmetic": info.arithmetic,
        "system_fingerprint": info.fingerprint,
        "build_info": build_name(),
    }
