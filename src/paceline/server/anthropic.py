"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens, as another shape of chats."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.parsing import Block, Blocks, Event, Step
from paceline.server.aligned import ScoredToken
from paceline.server.anthropic_input import RENAMED, parse_count, parse_messages
from paceline.server.http import json_response, read_body
from paceline.server.protocol import ChatRequest, parse_json
from paceline.server.replies import Choice, Reply, ReplyReason, Tokens, Usage, anthropic_error_object, printable
from paceline.server.respond import answer
from paceline.server.service import Generation, Service
from paceline.server.sse import unless
from paceline.server.translation import in_terms_of
from paceline.types import EngineInfo


def messages(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    def read(body: dict[str, Any]) -> tuple[ChatRequest, Reply]:
        return parse_messages(body), MessagesReply(service.info)

    async def start(chat: ChatRequest, size: int, arrived: float) -> Generation:
        with in_terms_of(RENAMED):
            return await service.chat(chat, size, arrived, "messages")

    @router.post("/v1/messages")
    async def create(request: Request) -> Response:
        return await answer(service, request, read, start)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        service.ready()
        body = await unless(service.closing(), read_body(request, service.options))
        chat = await service.work(len(body), lambda: parse_count(parse_json(body)))
        with in_terms_of(RENAMED):
            return json_response({"input_tokens": await service.count(chat, len(body))})

    return router


class MessagesReply(Reply):
    """A message object, or the events that make it. Its content are the blocks of the answer."""

    ends_with_done = False

    def __init__(self, info: EngineInfo) -> None:
        self._key = uuid.uuid4().hex
        self._head = {
            "id": f"msg_{self._key}",
            "type": "message",
            "role": "assistant",
            "model": printable(info.model_name),
        }
        self._blocks = Blocks()
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def final(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        self._blocks.push(choice.events)
        content = [self._whole(block) for block in self._blocks.all]
        return self._head | {"content": content} | _end(choice.finish_reason, choice.stop) | {"usage": _usage(usage)}

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        message = self._head | {"content": []} | self._ending | {"usage": _usage(usage)}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def chunks(
        self, index: int, text: str, events: Sequence[Event], logprobs: Sequence[ScoredToken], tokens: Tokens
    ) -> list[dict[str, Any]]:
        return self._say(self._blocks.push(events))

    def end(self, index: int, finish_reason: ReplyReason, stop: str | None) -> list[dict[str, Any]]:
        self._ending = _end(finish_reason, stop)
        return self._say(self._blocks.finish())

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}, {"type": "message_stop"}]

    def failed(self, error: PacelineError) -> list[dict[str, Any]]:
        return [anthropic_error_object(error)]

    def _say(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for what, block, text in steps:
            place = {"index": block.index}
            if what == "begin":
                events.append({"type": "content_block_start"} | place | {"content_block": self._begin(block)})
            elif what == "more":
                events.append({"type": "content_block_delta"} | place | {"delta": _delta(block, text)})
            else:
                if block.kind == "thought":
                    signed = {"type": "signature_delta", "signature": _signature(block)}
                    events.append({"type": "content_block_delta"} | place | {"delta": signed})
                events.append({"type": "content_block_stop"} | place)
        return events

    def _begin(self, block: Block) -> dict[str, Any]:
        """The block while it is empty."""
        if block.kind == "content":
            return {"type": "text", "text": ""}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": f"toolu_{self._key}_{block.index}", "name": block.name, "input": {}}

    def _whole(self, block: Block) -> dict[str, Any]:
        if block.kind == "content":
            return self._begin(block) | {"text": block.text}
        if block.kind == "thought":
            return self._begin(block) | {"thinking": block.text, "signature": _signature(block)}
        return self._begin(block) | {"input": _input(block.text)}


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "text_delta", "text": text}
    if block.kind == "thought":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _signature(block: Block) -> str:
    """Some clients send back only thoughts that are signed. What comes back is not checked: thoughts are no secret here."""
    return hashlib.sha256(block.text.encode("utf-8", "replace")).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are: of arguments that were cut off what is complete, as the clients read a stream;
    what cannot be read at all is one argument."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _end(reason: ReplyReason, stop: str | None) -> dict[str, Any]:
    reasons = {"stop": "stop_sequence" if stop is not None else "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    name = reasons[reason]
    return {"stop_reason": name, "stop_sequence": stop if name == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, Any]:
    counts = {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.completion,
    }
    return counts | ({"output_tokens_details": {"thinking_tokens": usage.thought}} if usage.thought else {})
