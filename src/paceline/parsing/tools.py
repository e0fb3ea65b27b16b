"""The tools of a request: definitions, which of them the model is to call, the types of their arguments, and the format in
which a model of a given chat template calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import InvalidRequest
from paceline.messages import json_type

MAX_TOOLS = 128
"""Definitions in one request, as in OpenAI's API."""
MAX_NAME = 128
"""Characters in a tool's name, as in Anthropic's API; OpenAI's has half as many."""
_NAME = re.compile(rf"[a-zA-Z0-9_.:/-]{{1,{MAX_NAME}}}")
_MAX_DEPTH = 16
"""Of references and alternatives that are followed in a schema."""
_MAX_STEPS = 4096
"""In all: a schema of a few alternatives that lead back to themselves has more ways than anybody could go."""

CallFormat = Literal["hermes", "xml"]
"""``hermes``: a JSON object between <tool_call> tags; ``xml``: <function=name> and <parameter=key> tags between them."""


@dataclass(frozen=True, slots=True)
class Tools:
    """``definitions`` as the template shows them. The model is free to call, or it must call one or more (``required``), or
    once the one that is ``named``. Unless ``parallel``, its answer ends with the first call."""

    definitions: tuple[Mapping[str, Any], ...]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def must(self) -> bool:
        """Whether there has to be a call."""
        return self.required or self.named is not None

    @property
    def strict(self) -> bool:
        """Whether a function's arguments have to fit its schema."""
        return any(definition["function"].get("strict") for definition in self.definitions)

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """The JSON types that an argument's schema allows; empty if it does not say or is not there."""
        for definition in self.definitions:
            function = definition["function"]
            if function["name"] == tool:
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, Mapping) else None
                return allowed_types(properties.get(argument), schema) if isinstance(properties, Mapping) else frozenset()
        return frozenset()


def allowed_types(schema: object, root: object) -> frozenset[str]:
    """The JSON types that a schema inside ``root`` allows; empty if it does not say."""
    return _types(schema, root, 0, iter(range(_MAX_STEPS)))


def _types(schema: object, root: object, depth: int, steps: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or next(steps, None) is None:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema["$ref"], root), root, depth + 1, steps)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*(_types(option, root, depth + 1, steps) for option in schema[word]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(map(_type_of, values))


def allowed_values(schema: object, root: object) -> list[Any]:
    """The only values that a schema inside ``root`` allows; empty if it does not list them."""
    return _values(schema, root, 0, iter(range(_MAX_STEPS)))


def _values(schema: object, root: object, depth: int, steps: Iterator[int]) -> list[Any]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or next(steps, None) is None:
        return []
    if isinstance(schema.get("enum"), list) or "const" in schema:
        return [schema["const"]] if "const" in schema else schema["enum"]
    if isinstance(schema.get("$ref"), str):
        return _values(_referenced(schema["$ref"], root), root, depth + 1, steps)
    if schema.get("type") == "null":
        return [None]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            options = [_values(option, root, depth + 1, steps) for option in schema[word]]
            return [value for values in options for value in values] if all(options) else []
    return []


def _referenced(reference: str, root: object) -> object:
    place = root
    for name in reference.removeprefix("#/").split("/"):
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _type_of(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def typed(text: str, types: frozenset[str]) -> str:
    """An argument written as plain text, as JSON text: of one of the types if it can be read as such, else a string."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    kind = _type_of(value)
    if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
        return json.dumps(value) if isinstance(value, bool) or value is None else text.strip()
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


# -- requests ------------------------------------------------------------------------------------------------------------


def check_tools(tools: object, choice: object, parallel: object) -> Tools | None:
    """The tools of a request from the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where the model is
    shown none, as with the choice "none". ``InvalidRequest`` names the field at fault."""
    definitions = _definitions(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest(
            f"parallel_tool_calls must be true or false, got {json_type(parallel)}", param="parallel_tool_calls"
        )
    named = _named(choice, [definition["function"]["name"] for definition in definitions])
    if choice in ("required", "any") and not definitions:
        raise InvalidRequest(f"tool_choice {choice!r} needs tools", param="tool_choice")
    if not definitions or choice == "none":
        return None
    return Tools(definitions, choice in ("required", "any"), named, parallel is not False)


def _definitions(tools: object) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools must be a list, got {json_type(tools)}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    for index, tool in enumerate(tools):
        _check_definition(tool, f"tools[{index}]")
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools has {twice!r} twice", param="tools")
    return tuple(tools)


def _check_definition(tool: object, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f'{where} must be of type "function" and hold a function with a name', param=where)
    if not _NAME.fullmatch(function["name"]):
        raise InvalidRequest(
            f"{where}.function.name must have 1 to {MAX_NAME} letters, digits or any of _ . : / -, got {function['name']!r}",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(
            f"{where}.function.parameters must be a JSON schema, got {json_type(function['parameters'])}",
            param=f"{where}.function.parameters",
        )
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(
            f"{where}.function.strict must be true or false, got {json_type(function['strict'])}",
            param=f"{where}.function.strict",
        )


def _named(choice: object, names: Sequence[str]) -> str | None:
    if choice in (None, "none", "auto", "required", "any"):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}; tools has {', '.join(names) or 'none'}", param="tool_choice")
    return name


# -- formats -------------------------------------------------------------------------------------------------------------


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template shows to the model; None if it is none that can be read."""
    if "<function=" in template and "<parameter=" in template:
        return "xml"
    return "hermes" if "<tool_call>" in template else None


def opening_of(tools: Tools, form: CallFormat) -> str:
    """The text that the answer must begin with, empty where the model is free. It ends where tokens end, however the model
    goes on."""
    if tools.named is not None:
        whole = f'<tool_call>\n{{"name": {json.dumps(tools.named)}, "arguments":'
        return whole if form == "hermes" else f"<tool_call>\n<function={tools.named}>\n"
    if not tools.required:
        return ""
    return '<tool_call>\n{"name":' if form == "hermes" else "<tool_call>\n<function"
