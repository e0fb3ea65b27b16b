"""What a chat message may say, and how it reaches the template. The same rules hold for HTTP and for ``LLM``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
_CHECKED_FIELDS = ("role", "content", "tool_calls")
"""Fields with checks of their own in ``_message``."""


def check_messages(value: object) -> list[dict[str, Any]]:
    """Messages ready for the template: known roles, text content, tool calls with their arguments as objects.

    ``developer`` becomes ``system`` and text parts are joined. ``InvalidRequest`` names the place, such as
    ``messages[0].role``.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a non-empty list of messages", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, got {json_type(value)}", param=where)
    _check_fields(value, where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{where}.role")
    calls = _tool_calls(value.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls belongs to an assistant's message", param=f"{where}.tool_calls")
    if value.get("content") is None and not calls:
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(value.get("content"), f"{where}.content")}
    if calls:
        message["tool_calls"] = calls
    return message | {name: value[name] for name in _TEXT_FIELDS if value.get(name) is not None}


def _check_fields(message: Mapping[str, Any], where: str) -> None:
    for name, value in message.items():
        place = f"{where}.{name}"
        if value is None or name in _CHECKED_FIELDS:
            continue
        if name in _TEXT_FIELDS:
            if not isinstance(value, str):
                raise InvalidRequest(f"{place} must be a string, got {json_type(value)}", param=place)
        elif name != "annotations":
            raise InvalidRequest(f"unknown field {place!r}", param=place, code="unknown_parameter")
        elif value != []:  # clients send back an empty list with an assistant's message they got from us
            raise InvalidRequest(
                f"{place} is not supported: it may be [] or null, got {value!r}", param=place, code="unsupported_parameter"
            )


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {json_type(value)}", param=where)
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}[{index}] must be a text part; got one of type {kind!r}", param=f"{where}[{index}]"
            )
    return "".join(part["text"] for part in value)


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Earlier tool calls as templates want them: ``arguments`` is an object, not JSON in a string as on OpenAI's wire."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list, got {json_type(value)}", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be a function call with a name", param=where)
    arguments = check_arguments(function.get("arguments"), f"{where}.function.arguments")
    return call | {"function": function | {"arguments": arguments}}


def check_arguments(value: object, where: str) -> dict[str, Any]:
    """The arguments of an earlier call, which may be an object or its JSON text, and empty if there are none."""
    arguments = value or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{where} is not valid JSON", param=where) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where} must be a JSON object", param=where)
    return arguments


TYPE_NAMES = {type(None): "null", str: "a string", list: "a list", dict: "an object", bool: "true or false"}


def json_type(value: object) -> str:
    """The JSON name of a value's type, or Python's for one that JSON does not have."""
    return "a number" if type(value) in (int, float) else TYPE_NAMES.get(type(value), type(value).__name__)
