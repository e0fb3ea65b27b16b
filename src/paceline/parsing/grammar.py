"""The structure of an answer that calls tools: calls as the model's chat template writes them, with arguments that fit the
tools' schemas.

An answer that must call consists of calls. One that may call is free text up to the tag that opens a call; from there on
only a call goes, and behind it text is free again. The grammar is in llguidance's Lark, what is JSON in it are schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidRequest
from paceline.parsing.calls import END_FUNCTION, END_PARAMETER, END_TOOL_CALL, FUNCTION, MAX_TAG, PARAMETER, TOOL_CALL
from paceline.parsing.tools import CallFormat, Tools, allowed_types, allowed_values, opening_of
from paceline.types import Structure

_VALUE_END = f"\n{END_PARAMETER}\n"
_SPACE = r"[\s\x1c-\x1f]*"
"""What ``calls`` skips between tags."""
_MISREAD = (
    f"{END_PARAMETER}{_SPACE}({PARAMETER}|{END_FUNCTION})",
    f"{END_FUNCTION}{_SPACE}{END_TOOL_CALL}{_SPACE}{TOOL_CALL}",
)
"""Where ``calls`` would see the end of a value."""


def calls_of(tools: Tools, form: CallFormat, answer: Structure | None = None) -> Structure | None:
    """What is behind the opening (``opening_of``) of an answer with these tools; None where a grammar would change nothing.
    ``answer`` is JSON, which the answer is if it may be without a call and has none.

    What of a schema cannot be kept is an error where a tool is ``strict``, else it is passed over. ``InvalidRequest`` names
    the tool with parameters that this form cannot write.
    """
    if not (tools.must or tools.strict or answer):
        return None
    parts: list[Structure] = []
    calls = [
        (_hermes if form == "hermes" else _xml)(tool["function"], f"tools[{index}].function.parameters", parts)
        for index, tool in enumerate(tools.definitions)
        if tools.named in (None, tool["function"]["name"])
    ]
    if tools.must or answer is None:
        rules = _calls(tools, calls, opening_of(tools, form)) if tools.must else _among_text(tools, calls, form)
    else:
        parts.append(answer)
        rules = ["start: answer | calls", f"answer: @part{len(parts) - 1}", *_calls(tools, calls, "", "calls")]
    param = answer.param if answer else "tool_choice" if tools.must else "tools"
    return Structure("calls", "\n".join([*rules, *_RULES[form]]), param, tuple(parts))


@dataclass(frozen=True, slots=True)
class _Call:
    """``head`` and ``tail`` are text, ``body`` is a part of a rule."""

    head: str
    body: str
    tail: str

    def behind(self, opening: str) -> str:
        """What follows the beginning of the call, as a part of a rule."""
        head = self.head.removeprefix(opening)
        return f"{_quoted(head) if head else ''} {self.body} {_quoted(self.tail)}"


def _calls(tools: Tools, calls: Sequence[_Call], opening: str, name: str = "start") -> list[str]:
    """One call or several; of a function that is named there is one."""
    rules = [f"{name}: first", _either("first", calls, opening)]
    if tools.parallel and tools.named is None:
        return [f'{rules[0]} ("\\n" call)*', rules[1], _either("call", calls, "")]
    return rules


def _among_text(tools: Tools, calls: Sequence[_Call], form: CallFormat) -> list[str]:
    """In XML a call may come without the outer tags."""
    triggers = {"tagged": (TOOL_CALL, calls, TOOL_CALL)}
    if form == "xml":
        bare = [_Call(call.head, call.body, END_FUNCTION) for call in calls]
        triggers["bare"] = (FUNCTION, bare, f"{TOOL_CALL}\n{FUNCTION}")
    names = " | ".join(triggers)
    rules = [
        f"start: ({names})* TEXT" if tools.parallel else f"start: TEXT | {names}",
        f"TEXT: {_without(*(tag for tag, _, _ in triggers.values()))}",
    ]
    for name, (tag, options, opening) in triggers.items():
        rules += [
            f"{name}: {name}_begin {name}_call",
            f"{name}_begin[lazy]: TEXT {_quoted(tag)}",
            _either(f"{name}_call", options, opening),
        ]
    return rules


def _either(name: str, calls: Sequence[_Call], opening: str) -> str:
    return f"{name}: " + "\n  | ".join(call.behind(opening) for call in calls)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(*expressions: str) -> str:
    """Text in which none of these is."""
    return "/(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/".format("|".join(expressions).replace("/", r"\/"))


# -- the forms -----------------------------------------------------------------------------------------------------------

_RULES: dict[CallFormat, list[str]] = {
    "hermes": [],
    "xml": [
        "text_value[lazy]: TEXT_VALUE",
        f"TEXT_VALUE: VALUE {_quoted(_VALUE_END)}",
        f"VALUE: {_without(*_MISREAD)}",
        f'any_parameter: "{PARAMETER}" KEY ">\\n" text_value',
        r"KEY: /[^>\s]{1,64}/",
    ],
}


def _hermes(function: Mapping[str, Any], where: str, parts: list[Structure]) -> _Call:
    head = f'{TOOL_CALL}\n{{"name": {json.dumps(function["name"])}, "arguments": '
    return _Call(head, _part(_schema(function, where), function, where, parts), f"}}\n{END_TOOL_CALL}")


def _xml(function: Mapping[str, Any], where: str, parts: list[Structure]) -> _Call:
    """Parameters in the schema's order; where it lists none, any, as text."""
    schema = _schema(function, where)
    properties, required = schema.get("properties"), schema.get("required")
    needed = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    keys = dict.fromkeys([*(properties if isinstance(properties, Mapping) else ()), *needed])
    body = [f"({_parameter(key, function, where, parts)}){'' if key in needed else '?'}" for key in keys]
    if not isinstance(properties, Mapping):
        body.append("any_parameter*")
    return _Call(f"{TOOL_CALL}\n{FUNCTION}{function['name']}>\n", " ".join(body), f"{END_FUNCTION}\n{END_TOOL_CALL}")


def _parameter(key: str, function: Mapping[str, Any], where: str, parts: list[Structure]) -> str:
    """``calls`` reads a value as text where the schema allows a string, else as JSON."""
    if not key or key != key.strip() or len(key) > MAX_TAG or ">" in key or "\n" in key:
        raise InvalidRequest(f"{where}: the model's form of calls cannot name the parameter {key!r}", param=where)
    schema = _schema(function, where)
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    types, values = allowed_types(own, schema), allowed_values(own, schema)
    if values:
        texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values)
        value = "(" + " | ".join(_quoted(text + _VALUE_END) for text in texts) + ")"
    elif not types or "string" in types:
        value = "text_value"
    else:
        assert isinstance(own, Mapping), "types without a schema"
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        value = f"{_part({**definitions, **own}, function, where, parts)} {_quoted(_VALUE_END)}"
    head = f"{PARAMETER}{key}>\n"
    return f"{_quoted(head)} {value}"


def _schema(function: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Arguments are an object."""
    schema = function.get("parameters") or {}
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise InvalidRequest(f"{where} must be a JSON schema of type object, got {types!r}", param=where)
    return {**schema, "type": "object"}


def _part(schema: Mapping[str, Any], function: Mapping[str, Any], where: str, parts: list[Structure]) -> str:
    """A JSON value of a schema, as rules refer to it."""
    parts.append(Structure.json(schema, where, lenient=not function.get("strict")))
    return f"@part{len(parts) - 1}"
