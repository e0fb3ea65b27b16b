"""A body of Anthropic's /v1/messages as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
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

_PROMPT_FIELDS: dict[str, FieldRule] = {
    "model": SUPPORTED,
    "messages": SUPPORTED,
    "system": SUPPORTED,
    "tools": SUPPORTED,
    "tool_choice": SUPPORTED,
    "thinking": SUPPORTED,
    "output_config": SUPPORTED,
    "chat_template_kwargs": SUPPORTED,
    "cache_control": NEUTRAL,
    "speed": Only(("standard",)),
    # either says that the server clears nothing
    "context_management": Only(({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})),
    "mcp_servers": Only(([],)),
}
MESSAGES_FIELDS: dict[str, FieldRule] = (
    SHARED_RULES
    | _PROMPT_FIELDS
    | {
        "max_tokens": SUPPORTED,
        "stop_sequences": SUPPORTED,
        "metadata": NEUTRAL,
        "service_tier": NEUTRAL,
        "container": Only(),
        "inference_geo": Only(),
    }
)
COUNT_FIELDS = _PROMPT_FIELDS
"""Of /v1/messages/count_tokens."""
THINKING_FIELDS: dict[str, FieldRule] = {"type": SUPPORTED, "budget_tokens": SUPPORTED, "display": Only(("summarized",))}
OUTPUT_FIELDS: dict[str, FieldRule] = {"effort": SUPPORTED, "format": SUPPORTED}
FORMAT_FIELDS: dict[str, FieldRule] = {"type": SUPPORTED, "schema": SUPPORTED}
TOOL_FIELDS: dict[str, FieldRule] = {
    "type": SUPPORTED,
    "name": SUPPORTED,
    "description": SUPPORTED,
    "input_schema": SUPPORTED,
    "strict": SUPPORTED,
    "cache_control": NEUTRAL,
    "eager_input_streaming": NEUTRAL,  # arguments are always streamed as they are written
    "defer_loading": Only((False,)),
    "allowed_callers": Only((["direct"],)),
}
CHOICE_FIELDS = dict.fromkeys(("type", "name", "disable_parallel_tool_use"), SUPPORTED)
_BLOCK: dict[str, FieldRule] = {"type": SUPPORTED, "cache_control": NEUTRAL}
TEXT_BLOCKS = {"text": _BLOCK | {"text": SUPPORTED, "citations": Only(([],))}}
USER_BLOCKS: dict[str, dict[str, FieldRule]] = TEXT_BLOCKS | {
    "tool_result": _BLOCK | dict.fromkeys(("tool_use_id", "content", "is_error"), SUPPORTED)
}
ASSISTANT_BLOCKS: dict[str, dict[str, FieldRule]] = TEXT_BLOCKS | {
    "thinking": _BLOCK | {"thinking": SUPPORTED, "signature": NEUTRAL},
    "tool_use": _BLOCK | {"id": SUPPORTED, "name": SUPPORTED, "input": SUPPORTED, "caller": Only(({"type": "direct"},))},
}
RENAMED = {
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
    r"stop\b": "stop_sequences",
    r"thinking_budget": "thinking.budget_tokens",
    r"reasoning_effort": "output_config.effort",
    r"response_format\.json_schema": "output_config.format",
    r"response_format": "output_config.format",
}
"""Fields of the chat that errors may name, and the fields that they are made of."""


def parse_messages(body: Mapping[str, Any]) -> ChatRequest:
    """Check a body of /v1/messages; ``InvalidRequest`` names the field at fault."""
    check_fields(body, MESSAGES_FIELDS)
    if body.get("max_tokens") is None:
        raise InvalidRequest("max_tokens is missing", param="max_tokens")
    chat = _chat(body)
    if chat["messages"][-1]["role"] == "assistant":
        raise InvalidRequest("messages must not end with the assistant's: it cannot be continued", param="messages")
    stop = expect(list, body, "stop_sequences")
    with in_terms_of(RENAMED):
        return parse_chat(chat | {"max_tokens": body["max_tokens"], "stop": stop})


def parse_count(body: Mapping[str, Any]) -> ChatRequest:
    """The same of /v1/messages/count_tokens."""
    check_fields(body, COUNT_FIELDS)
    chat = _chat(body)
    with in_terms_of(RENAMED):
        return parse_chat(chat)


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    choice, parallel = _tool_choice(expect(dict, body, "tool_choice"))
    return (
        shared(body)
        | _thinking(body)
        | _output(body)
        | {
            "messages": _messages(body),
            "tools": [_tool(tool, where) for tool, where in objects(body.get("tools"), "tools")],
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
        }
    )


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Whether to think is up to the template, which is told; without a word about it the template's default holds."""
    thinking = expect(dict, body, "thinking")
    if thinking is None:
        return {}
    check_fields(thinking, THINKING_FIELDS, prefix="thinking.")
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        where = "thinking.type"
        raise InvalidRequest(f"{where} must be enabled, adaptive or disabled, got {kind!r}", param=where)
    if (kind == "enabled") != (budget is not None):
        where = "thinking.budget_tokens"
        raise InvalidRequest(f"{where} belongs to thinking that is enabled; type is {kind!r}", param=where)
    variables = {"enable_thinking": kind != "disabled"} | (expect(dict, body, "chat_template_kwargs") or {})
    return {"chat_template_kwargs": variables, "thinking_budget": budget}


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    output = expect(dict, body, "output_config") or {}
    check_fields(output, OUTPUT_FIELDS, prefix="output_config.")
    chat = {"reasoning_effort": output.get("effort")}
    if output.get("format") is None:
        return chat
    where = "output_config.format"
    form = an_object(output["format"], where)
    check_fields(form, FORMAT_FIELDS, prefix=f"{where}.")
    if form.get("type") != "json_schema":
        raise InvalidRequest(f'{where}.type must be "json_schema", got {form.get("type")!r}', param=f"{where}.type")
    return chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f'{where}.type must be "custom" or null, got {tool["type"]!r}', param=f"{where}.type")
    check_fields(tool, TOOL_FIELDS, prefix=f"{where}.")
    function = {
        "name": a_string(tool, "name", where),
        "parameters": an_object(tool.get("input_schema"), f"{where}.input_schema"),
    }
    given = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | given}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[object, bool]:
    """The choice as a chat has it, and whether there may be several calls."""
    if choice is None:
        return None, True
    check_fields(choice, CHOICE_FIELDS, prefix="tool_choice.")
    parallel = not expect(bool, choice, "disable_parallel_tool_use", prefix="tool_choice.")
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": a_string(choice, "name", "tool_choice")}}, parallel
    if kind not in ("auto", "any", "none"):
        raise InvalidRequest(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice.type")
    return kind, parallel


# -- messages ------------------------------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system", TEXT_BLOCKS)})
    given = objects(body.get("messages"), "messages")
    if not given:
        raise InvalidRequest("messages must be a non-empty list of messages", param="messages")
    for message, where in given:
        check_fields(message, {"role": SUPPORTED, "content": SUPPORTED}, prefix=f"{where}.")
        messages += _message(message.get("role"), message.get("content"), where)
    return system_first(messages)


def _message(role: object, content: object, where: str) -> list[dict[str, Any]]:
    """A message may become several: results of tools are messages of their own in a chat."""
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user, assistant or system, got {role!r}", param=f"{where}.role")
    place = f"{where}.content"
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": text_of(content, place, TEXT_BLOCKS)}]
    blocks = objects(content, place)
    if not blocks:
        raise InvalidRequest(f"{place} must be a string or a non-empty list of blocks", param=place)
    return _of_user(blocks) if role == "user" else [_of_assistant(blocks)]


def _kind(block: dict[str, Any], where: str, kinds: Mapping[str, Mapping[str, FieldRule]]) -> str:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(f"{where}.type must be {' or '.join(kinds)}, got {kind!r}", param=f"{where}.type")
    check_fields(block, kinds[kind], prefix=f"{where}.")
    return kind


def _of_user(blocks: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block, where in blocks:
        if _kind(block, where, USER_BLOCKS) == "tool_result":
            messages.append(_result(block, where))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += a_string(block, "text", where)
        else:
            messages.append({"role": "user", "content": a_string(block, "text", where)})
    return messages


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    text = text_of(block.get("content") or "", f"{where}.content", TEXT_BLOCKS)
    failed = expect(bool, block, "is_error", prefix=f"{where}.")
    content = f"Error: {text}" if failed else text
    return {"role": "tool", "tool_call_id": a_string(block, "tool_use_id", where), "content": content}


def _of_assistant(blocks: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    said: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = _kind(block, where, ASSISTANT_BLOCKS)
        if kind != "tool_use":
            said[kind].append(a_string(block, kind, where))
            continue
        function = {"name": a_string(block, "name", where), "arguments": an_object(block.get("input"), f"{where}.input")}
        calls.append({"id": a_string(block, "id", where), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said["text"])}
    if said["thinking"]:
        message["reasoning_content"] = "".join(said["thinking"])
    return message | ({"tool_calls": calls} if calls else {})
