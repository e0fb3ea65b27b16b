"""A body of OpenAI's /v1/responses as a chat. Nothing is stored, so what refers to something stored is refused."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidRequest
from paceline.messages import check_arguments, json_type
from paceline.server.protocol import NEUTRAL, SUPPORTED, ChatRequest, FieldRule, Only, check_fields, expect, parse_chat
from paceline.server.translation import (
    SHARED_RULES,
    a_string,
    an_object,
    in_terms_of,
    objects,
    shared,
    system_first,
    text_of,
)

RESPONSES_FIELDS: dict[str, FieldRule] = SHARED_RULES | {
    "input": SUPPORTED,
    "instructions": SUPPORTED,
    "max_output_tokens": SUPPORTED,
    "tools": SUPPORTED,
    "tool_choice": SUPPORTED,
    "parallel_tool_calls": SUPPORTED,
    "reasoning": SUPPORTED,
    "text": SUPPORTED,
    "metadata": SUPPORTED,
    "include": SUPPORTED,
    "stop": SUPPORTED,
    "thinking_budget": SUPPORTED,
    "stream_options": SUPPORTED,
    "user": NEUTRAL,
    "service_tier": NEUTRAL,
    "safety_identifier": NEUTRAL,
    "prompt_cache_key": NEUTRAL,
    "prompt_cache_retention": NEUTRAL,
    "max_tool_calls": NEUTRAL,  # it counts calls of OpenAI's own tools, of which there are none
    "store": Only((False,)),
    "background": Only((False,)),
    "previous_response_id": Only(),
    "conversation": Only(),
    "prompt": Only(),
    "truncation": Only(("disabled",)),
    "top_logprobs": Only((0,)),
}
REASONING_FIELDS: dict[str, FieldRule] = {
    "effort": SUPPORTED,
    "summary": Only(("auto",)),
    "generate_summary": Only(("auto",)),
}
TEXT_FIELDS: dict[str, FieldRule] = {"format": SUPPORTED, "verbosity": Only(("medium",))}
STREAM_OPTIONS: dict[str, FieldRule] = {"include_obfuscation": NEUTRAL}
TOOL_FIELDS: dict[str, FieldRule] = {
    "type": SUPPORTED,
    "name": SUPPORTED,
    "description": SUPPORTED,
    "parameters": SUPPORTED,
    "strict": SUPPORTED,
    "defer_loading": Only((False,)),
}
CHOICE_FIELDS = dict.fromkeys(("type", "name"), SUPPORTED)
FORMAT_FIELDS = dict.fromkeys(("type", "name", "schema", "strict", "description"), SUPPORTED)
PART: dict[str, FieldRule] = {"type": SUPPORTED, "text": SUPPORTED}
PARTS = {"input_text": PART, "text": PART, "output_text": PART | {"annotations": Only(([],)), "logprobs": Only(([],))}}
_STATE: dict[str, FieldRule] = {"type": SUPPORTED, "id": NEUTRAL, "status": NEUTRAL}
ITEMS: dict[str, dict[str, FieldRule]] = {
    "message": _STATE | {"role": SUPPORTED, "content": SUPPORTED, "phase": NEUTRAL},
    "function_call": _STATE | {"call_id": SUPPORTED, "name": SUPPORTED, "arguments": SUPPORTED},
    "function_call_output": _STATE | {"call_id": SUPPORTED, "output": SUPPORTED, "name": NEUTRAL},
    "reasoning": _STATE | {"summary": SUPPORTED, "content": SUPPORTED, "encrypted_content": SUPPORTED},
}
MAX_DEPTH = 100
"""Levels of objects and lists in a tool. A response repeats it, and what could be read may be too deep to be written."""
ENCRYPTED = "reasoning.encrypted_content"
RENAMED = {
    r"max_completion_tokens": "max_output_tokens",
    r"messages": "input",
    r"(tools\[\d+\])\.function": r"\1",
    r"reasoning_effort": "reasoning.effort",
    r"response_format\.json_schema": "text.format",
    r"response_format": "text.format",
}
"""Fields of the chat that errors may name, and the fields that they are made of."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A checked body of /v1/responses, and the chat that answers it. ``keeps_thoughts``: items of thoughts are to hold all
    that is needed to send them back."""

    body: Mapping[str, Any]
    chat: ChatRequest
    keeps_thoughts: bool


def parse_responses(body: Mapping[str, Any]) -> ResponsesRequest:
    """Check a body; ``InvalidRequest`` names the field at fault."""
    check_fields(body, RESPONSES_FIELDS)
    _check_stream_options(body)
    _check_metadata(body)
    effort, form = _part(body, "reasoning", REASONING_FIELDS).get("effort"), _part(body, "text", TEXT_FIELDS).get("format")
    chat = shared(body) | {
        "messages": _messages(expect(str, body, "instructions"), body.get("input")),
        "max_completion_tokens": body.get("max_output_tokens"),
        "tools": [_tool(tool, where) for tool, where in objects(body.get("tools"), "tools")],
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "reasoning_effort": effort,
        "response_format": _format(form),
    }
    same = ("parallel_tool_calls", "stop", "thinking_budget")
    with in_terms_of(RENAMED):
        checked = parse_chat(chat | {name: body.get(name) for name in same})
    return ResponsesRequest(body, checked, _keeps_thoughts(body))


def _check_metadata(body: Mapping[str, Any]) -> None:
    for name, value in (expect(dict, body, "metadata") or {}).items():
        if not isinstance(value, str):
            raise InvalidRequest(f"metadata maps names to strings, {name!r} to {json_type(value)}", param="metadata")


def _check_stream_options(body: Mapping[str, Any]) -> None:
    options = expect(dict, body, "stream_options")
    if options is not None:
        check_fields(options, STREAM_OPTIONS, prefix="stream_options.")


def _part(body: Mapping[str, Any], name: str, rules: Mapping[str, FieldRule]) -> dict[str, Any]:
    part = expect(dict, body, name) or {}
    check_fields(part, rules, prefix=f"{name}.")
    return part


def _keeps_thoughts(body: Mapping[str, Any]) -> bool:
    wanted = expect(list, body, "include") or []
    for index, name in enumerate(wanted):
        if name != ENCRYPTED:
            where = f"include[{index}]"
            raise InvalidRequest(
                f"{where} is not supported: it may be {ENCRYPTED!r}, got {name!r}", param=where, code="unsupported_parameter"
            )
    return bool(wanted)


def _format(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    form = an_object(value, "text.format")
    check_fields(form, FORMAT_FIELDS, prefix="text.format.")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: part for name, part in form.items() if name != "type"}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f'{where}.type must be "function", got {tool.get("type")!r}', param=f"{where}.type")
    check_fields(tool, TOOL_FIELDS, prefix=f"{where}.")
    a_string(tool, "name", where)
    if _is_deeper(tool, MAX_DEPTH):
        raise InvalidRequest(f"{where} is nested deeper than {MAX_DEPTH} levels", param=where)
    shown = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in shown if tool.get(name) is not None}}


def _is_deeper(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
    return bool(level)


def _tool_choice(choice: object) -> object:
    if choice in (None, "none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        check_fields(choice, CHOICE_FIELDS, prefix="tool_choice.")
        return {"type": "function", "function": {"name": choice["name"]}}
    raise InvalidRequest(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "name": …}', param="tool_choice"
    )


# -- input ---------------------------------------------------------------------------------------------------------------


def _messages(instructions: str | None, value: object) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    items = objects(value, "input")
    if not items:
        raise InvalidRequest("input must be a string or a non-empty list of items", param="input")
    for item, where in items:
        message = _message(item, where)
        if messages and _continues(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
    return system_first(messages)


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """The message that an item is, or a part of an assistant's."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in ITEMS:
        raise InvalidRequest(f"{where}.type must be one of {', '.join(ITEMS)}, got {kind!r}", param=f"{where}.type")
    check_fields(item, ITEMS[kind], prefix=f"{where}.")
    if kind == "message":
        return {"role": _role(item, where), "content": text_of(item.get("content"), f"{where}.content", PARTS)}
    if kind == "reasoning":
        return {"role": "assistant", "content": "", "reasoning_content": _thought(item, where)}
    call_id = a_string(item, "call_id", where)
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"), f"{where}.output", PARTS)}
    arguments = check_arguments(item.get("arguments"), f"{where}.arguments")
    function = {"name": a_string(item, "name", where), "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _role(item: dict[str, Any], where: str) -> str:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise InvalidRequest(
            f"{where}.role must be user, assistant, system or developer, got {role!r}", param=f"{where}.role"
        )
    return "system" if role == "developer" else role


def _thought(item: dict[str, Any], where: str) -> str:
    """The thought itself if it is there, else its summary."""
    if item.get("content"):
        return text_of(item["content"], f"{where}.content", {"reasoning_text": PART})
    if item.get("encrypted_content") is not None:
        return open_thought(a_string(item, "encrypted_content", where), f"{where}.encrypted_content")
    return text_of(item.get("summary") or [], f"{where}.summary", {"summary_text": PART})


def _continues(message: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether a part of an assistant's message belongs to the one before: first the thought, then content, then calls."""
    if not message["role"] == part["role"] == "assistant" or "reasoning_content" in part:
        return False
    return "tool_calls" in part or not (message["content"] or "tool_calls" in message)


def _join(message: dict[str, Any], part: dict[str, Any]) -> None:
    message["content"] += part["content"]
    if "tool_calls" in part:
        message["tool_calls"] = [*message.get("tool_calls", []), *part["tool_calls"]]


def seal_thought(text: str) -> str:
    """A thought as clients send it back unread. No secret: the server keeps none."""
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def open_thought(sealed: str, where: str) -> str:
    """The thought in it; ``where`` names the field."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where} is none that this server has made", param=where) from None
