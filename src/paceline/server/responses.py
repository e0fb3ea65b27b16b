"""OpenAI's Responses API: /v1/responses, as another shape of chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.parsing import Block, Blocks, Event, Step
from paceline.server.aligned import ScoredToken
from paceline.server.protocol import ChatRequest
from paceline.server.replies import Choice, Reply, ReplyReason, Tokens, Usage, printable, quotable
from paceline.server.respond import answer
from paceline.server.responses_input import RENAMED, ResponsesRequest, parse_responses, seal_thought
from paceline.server.service import Generation, Service
from paceline.server.translation import in_terms_of
from paceline.types import EngineInfo


def responses(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    def read(body: dict[str, Any]) -> tuple[ChatRequest, Reply]:
        asked = parse_responses(body)
        return asked.chat, ResponsesReply(service.info, asked)

    async def start(chat: ChatRequest, size: int, arrived: float) -> Generation:
        with in_terms_of(RENAMED):
            return await service.chat(chat, size, arrived, "responses")

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        return await answer(service, request, read, start)

    return router


class ResponsesReply(Reply):
    """A response object, or the events that make it. Every block of the answer is an item of its output."""

    ends_with_done = False

    def __init__(self, info: EngineInfo, asked: ResponsesRequest) -> None:
        self._key = uuid.uuid4().hex
        self._keeps_thoughts = asked.keeps_thoughts
        self._head = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": int(time.time()),
            "model": printable(info.model_name),
            "system_fingerprint": info.fingerprint,
        } | _settings(asked)
        self._blocks = Blocks()
        self._reason: ReplyReason | None = None
        self._sent = 0

    def final(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        self._reason = choice.finish_reason
        self._blocks.push(choice.events)
        self._blocks.finish()
        return self._response(self._status(), usage)

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def chunks(
        self, index: int, text: str, events: Sequence[Event], logprobs: Sequence[ScoredToken], tokens: Tokens
    ) -> list[dict[str, Any]]:
        return self._say(self._blocks.push(events))

    def end(self, index: int, finish_reason: ReplyReason, stop: str | None) -> list[dict[str, Any]]:
        self._reason = finish_reason
        return self._say(self._blocks.finish())

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        status = self._status()
        return [self._event(f"response.{status}", response=self._response(status, usage))]

    def failed(self, error: PacelineError) -> list[dict[str, Any]]:
        said = {"code": error.code or error.kind, "message": quotable(error.message)}
        return [self._event("response.failed", response=self._response("failed") | {"error": said})]

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block, block.text, self._status_of(block, status)) for block in self._blocks.all],
            "usage": usage and _usage(usage),
        }

    def _status_of(self, block: Block, status: str) -> str:
        """Only the last item can be one that was cut off."""
        last = block.index == len(self._blocks.all) - 1
        return "incomplete" if last and status in ("incomplete", "failed") else "completed"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1} | fields

    def _say(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for what, block, text in steps:
            if what == "begin":
                events += self._begin(block)
            elif what == "more":
                events.append(self._inside(block, f"{_STREAMED[block.kind]}.delta", delta=text, **_extra(block)))
            else:
                events += self._end(block)
        return events

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        item = self._item(block, "", "in_progress") | ({} if block.kind == "call" else {"content": []})
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._inside(block, "response.content_part.added", part=_part(block, ""))]

    def _end(self, block: Block) -> list[dict[str, Any]]:
        done, text = f"{_STREAMED[block.kind]}.done", block.text
        if block.kind == "call":
            events = [self._inside(block, done, name=block.name, arguments=text)]
        else:
            events = [
                self._inside(block, done, text=text, **_extra(block)),
                self._inside(block, "response.content_part.done", part=_part(block, text)),
            ]
        item = self._item(block, text, self._status_of(block, self._status()))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _inside(self, block: Block, kind: str, **fields: Any) -> dict[str, Any]:
        """An event inside an item; but for calls it says inside which part of its content: the only one."""
        place = {"item_id": self._id(block), "output_index": block.index}
        return self._event(kind, **place, **({} if block.kind == "call" else {"content_index": 0}), **fields)

    def _id(self, block: Block) -> str:
        prefix = {"content": "msg", "thought": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._key}_{block.index}"

    def _item(self, block: Block, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind == "content":
            return item | {"type": "message", "role": "assistant", "content": [_part(block, text)]}
        if block.kind == "call":
            call = {"call_id": f"call_{self._key}_{block.index}", "name": block.name, "arguments": text}
            return item | {"type": "function_call"} | call
        sealed = {"encrypted_content": seal_thought(text)} if self._keeps_thoughts else {}
        return item | {"type": "reasoning", "summary": [], "content": [_part(block, text)]} | sealed


_STREAMED = {
    "content": "response.output_text",
    "thought": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _extra(block: Block) -> dict[str, Any]:
    """What events of text have beside it: OpenAI's clients expect the key."""
    return {"logprobs": []} if block.kind == "content" else {}


def _settings(asked: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    body, sampling = asked.body, asked.chat.sampling
    given = {name: body.get(name) for name in ("instructions", "max_output_tokens")}
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    return given | {
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": 0,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.completion,
    }
