"""Answers of any API, whole or streamed, in one form that can be compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from paceline.bench.soak_cases import MESSAGES, RESPONSES

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """``parts`` in order: of chats and completions a choice each, else the items or blocks. ``end`` is how it ended,
    ``error`` the code of the error that ended a stream."""

    parts: list[Value] = field(default_factory=list)
    end: Value = field(default_factory=dict)
    error: str | None = None


def events_in(text: str) -> list[Value]:
    """The data of a stream's events."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def folded(path: str, values: Sequence[Value]) -> Answer:
    """From the events of a stream, or from the one object of a whole answer."""
    error = next((found for found in map(_error, values) if found), None)
    if path == RESPONSES:
        return _of_response(values, error)
    if path == MESSAGES:
        return _of_message(values, error)
    return _of_choices(values, error)


def is_part_of(heard: Answer, due: Answer) -> bool:
    """Whether what was heard is how that answer begins."""
    return len(heard.parts) <= len(due.parts) and all(
        _begins(one, other) for one, other in zip(heard.parts, due.parts, strict=False)
    )


def _begins(part: Any, whole: Any) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(value is None or (name in whole and _begins(value, whole[name])) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_begins, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return bool(part == whole)


def _error(value: Value) -> str | None:
    error = value.get("error") or (value.get("response") or {}).get("error")
    return (error.get("code") or error["type"]) if error else None


def _of_choices(values: Sequence[Value], error: str | None) -> Answer:
    choices: dict[int, Value] = {}
    for part in (part for value in values for part in value.get("choices", ())):
        one = choices.setdefault(part["index"], _nothing())
        said = part.get("delta") or part.get("message") or part
        one["text"] += said.get("content") or said.get("text") or ""
        one["thought"] += said.get("reasoning_content") or ""
        one["ids"] += part.get("token_ids") or []
        one["end"] = part.get("finish_reason") or one["end"]
        for position, call in enumerate(said.get("tool_calls") or ()):
            _add_call(one["calls"], call.get("index", position), call["function"])
        for name, scores in (part.get("logprobs") or {}).items():
            one["scores"].setdefault(name, []).extend(scores or ())
    return Answer([choices.get(index, _nothing()) for index in range(max(choices, default=-1) + 1)], {}, error)


def _nothing() -> Value:
    return {"text": "", "thought": "", "calls": [], "ids": [], "scores": {}, "end": None}


def _add_call(calls: list[Value], index: int, function: Value) -> None:
    if index == len(calls):
        calls.append({"name": "", "arguments": ""})
    for name in ("name", "arguments"):
        calls[index][name] += function.get(name) or ""


def _of_response(values: Sequence[Value], error: str | None) -> Answer:
    """A stream repeats the whole answer in its last event."""
    last = values[-1] if values else {}
    response = last.get("response", last if "output" in last else {})
    if response.get("status") not in ("completed", "incomplete"):
        return Answer(error=error)
    parts = [
        {"type": item["type"]} | {name: item.get(name) for name in ("status", "name", "arguments", "content", "summary")}
        for item in response["output"]
    ]
    return Answer(parts, {"status": response["status"], "usage": response["usage"]}, error)


def _of_message(values: Sequence[Value], error: str | None) -> Answer:
    if values and values[0].get("type") == "message":
        message = values[0]
        end = {"stop": (message["stop_reason"], message["stop_sequence"]), "tokens": message["usage"]["output_tokens"]}
        return Answer([_block(block) for block in message["content"]], end, error)
    blocks: list[Value] = []
    end = {}
    for value in values:
        if value.get("type") == "content_block_start":
            blocks.append(_block(value["content_block"]) | {"json": ""})
        elif value.get("type") == "content_block_delta":
            delta = value["delta"]
            blocks[-1]["text"] += delta.get("text", delta.get("thinking", ""))
            blocks[-1]["json"] += delta.get("partial_json", "")
        elif value.get("type") == "content_block_stop" and blocks[-1]["json"]:
            blocks[-1]["input"] = _input(blocks[-1]["json"])
        elif value.get("type") == "message_delta":
            delta = value["delta"]
            end = {"stop": (delta["stop_reason"], delta["stop_sequence"]), "tokens": value["usage"]["output_tokens"]}
    for block in blocks:
        del block["json"]
    return Answer(blocks, end, error)


def _block(block: Value) -> Value:
    text = block.get("text", block.get("thinking", ""))
    return {"type": block["type"], "text": text, "name": block.get("name"), "input": block.get("input")}


def _input(text: str) -> Any:
    """As Anthropic's clients read arguments that were cut off, and as the server does in a whole answer."""
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
