"""JSON schemas of the values that fields may have, and of objects made of tables of fields.

A table says which fields there are and of which class; here is what a supported field's value looks like. Every field
may also be null, which means that it is not given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.tools import MAX_NAME, MAX_TOOLS
from paceline.server import anthropic_input as anthropic
from paceline.server import responses_input as responses
from paceline.server.protocol import (
    EFFORTS,
    MAX_PROMPTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOKEN_IDS,
    STREAM_OPTIONS,
    FieldClass,
    FieldRule,
    Only,
)
from paceline.server.structured import MAX_CHOICES as MAX_TEXTS
from paceline.server.urgency import MAX_PRIORITY, MAX_TIMEOUT
from paceline.types import MAX_CHOICES, MAX_LOGPROBS, MAX_STRUCTURE

Schema = dict[str, Any]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def number(low: float, high: float, *, above: bool = False) -> Schema:
    """From ``low``, or above it, to ``high``."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer"} | {name: bound for name, bound in bounds.items() if bound is not None}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    sizes = ({"minItems": least} if least else {}) | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items} | sizes


def either(*options: Schema) -> Schema:
    return {"anyOf": [*options]}


def one_of(*values: Any) -> Schema:
    return {"enum": [*values]}


def made_of(table: Mapping[str, FieldRule], values: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """An object with exactly the fields of a table. ``values`` must know every supported one."""
    properties = {name: _value(name, rule, values, name in required) for name, rule in table.items()}
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": [*required]} if required else {})


def _value(name: str, rule: FieldRule, values: Mapping[str, Schema], required: bool) -> Schema:
    if isinstance(rule, Only):
        return one_of(None, *rule.values) | {"description": "Accepted at the value that changes nothing."}
    if rule is FieldClass.NEUTRAL:
        return {"description": "Accepted; it has no effect."}
    return values[name] if required else either(values[name], {"type": "null"})


def _own(required: Sequence[str] = (), **values: Schema) -> Schema:
    """An object whose fields are in no table."""
    return made_of(dict.fromkeys(values, FieldClass.SUPPORTED), values, required)


def _kinds(tables: Mapping[str, Mapping[str, FieldRule]], values: Mapping[str, Schema], **required: Sequence[str]) -> Schema:
    """Objects of several types; ``required`` names what each must have beside its ``type``."""
    return either(
        *(
            made_of(table, {**values, "type": one_of(kind)}, ("type", *required.get(kind, ())))
            for kind, table in tables.items()
        )
    )


# -- what several APIs share ---------------------------------------------------------------------------------------------

TOKENS = array(integer(0))
_NAME: Schema = {"type": "string", "pattern": rf"^[a-zA-Z0-9_.:/-]{{1,{MAX_NAME}}}$"}
_STRUCTURE: Schema = {"type": "string", "maxLength": MAX_STRUCTURE}
_STOPS = array({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, most=MAX_STOP_STRINGS)
_EFFORT = one_of(*EFFORTS)
_BUDGET = integer(0)

STRUCTURED_OUTPUTS = either(
    _own(("json",), json=either(OBJECT, _STRUCTURE)),
    _own(("json_object",), json_object=FLAG),
    _own(("regex",), regex=_STRUCTURE),
    _own(("choice",), choice=array({"type": "string", "minLength": 1}, 1, MAX_TEXTS)),
    _own(("grammar",), grammar=_STRUCTURE),
)
_JSON_SCHEMA = _own(("schema",), name=TEXT, description=TEXT, schema=OBJECT, strict=FLAG)
RESPONSE_FORMAT = either(
    _own(("type",), type=one_of("text")),
    _own(("type",), type=one_of("json_object"), schema=OBJECT),
    _own(("type", "json_schema"), type=one_of("json_schema"), json_schema=_JSON_SCHEMA),
)

SHARED: dict[str, Schema] = {
    "model": TEXT,
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "seed": integer(),
    "stop_token_ids": array(integer(0), most=MAX_STOP_TOKENS),
    "ignore_eos": FLAG,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 10, above=True),
    "repeat_penalty": number(0, 10, above=True),
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": number(-100, 100)},
        "additionalProperties": False,
        "maxProperties": MAX_TOKEN_IDS,
    },
    "min_tokens": integer(0),
    "allowed_token_ids": array(integer(0), most=MAX_TOKEN_IDS),
    "banned_token_ids": array(integer(0), most=MAX_TOKEN_IDS),
    "structured_outputs": STRUCTURED_OUTPUTS,
    "chat_template_kwargs": OBJECT,
    "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
    "timeout": number(0, MAX_TIMEOUT, above=True),
    "stream": FLAG,
}

# -- chats and completions -----------------------------------------------------------------------------------------------

_OPENAI = SHARED | {
    "max_tokens": integer(1),
    "stop": either({"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, _STOPS),
    "stream_options": made_of(STREAM_OPTIONS, {"include_usage": FLAG}),
    "n": integer(1, MAX_CHOICES),
    "response_format": RESPONSE_FORMAT,
    "return_token_ids": FLAG,
}
_ARGUMENTS = either(OBJECT, {"type": "string", "format": "json"})
_TEXT_PART = _own(("type", "text"), type=one_of("text"), text=TEXT)
_CALL = _own(
    ("function",),
    id=TEXT,
    type=one_of("function"),
    function=_own(("name",), name=TEXT, arguments=_ARGUMENTS),
)
_SAID = {"content": either(TEXT, array(_TEXT_PART)), "name": TEXT, "tool_call_id": TEXT, "reasoning_content": TEXT}
_SAID["annotations"] = one_of([])
MESSAGE = either(
    _own(("role", "content"), role=one_of("system", "developer", "user", "assistant", "tool"), **_SAID),
    _own(("role", "tool_calls"), role=one_of("assistant"), tool_calls=array(_CALL, 1), **_SAID),
)
TOOL = _own(
    ("type", "function"),
    type=one_of("function"),
    function=_own(("name",), name=_NAME, description=TEXT, parameters=OBJECT, strict=FLAG),
)
TOOL_CHOICE = either(
    one_of("none", "auto", "required"),
    _own(("type", "function"), type=one_of("function"), function=_own(("name",), name=TEXT)),
)
CHAT = _OPENAI | {
    "messages": array(MESSAGE, 1),
    "max_completion_tokens": integer(1),
    "tools": array(TOOL, most=MAX_TOOLS),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning_effort": _EFFORT,
    "thinking_budget": _BUDGET,
    "thinking_token_budget": _BUDGET,
    "logprobs": FLAG,
    "top_logprobs": integer(0, MAX_LOGPROBS),
}
_PROMPT = either({"type": "string", "minLength": 1}, array(integer(0), 1))
COMPLETION = _OPENAI | {
    "prompt": either(_PROMPT, array(_PROMPT, 1, MAX_PROMPTS)),
    "logprobs": integer(0, MAX_LOGPROBS),
    "echo": FLAG,
}
TOKENIZE = {"model": TEXT, "content": TEXT, "prompt": TEXT, "add_special": FLAG, "with_pieces": FLAG}
DETOKENIZE = {"model": TEXT, "tokens": TOKENS}

# -- OpenAI's responses --------------------------------------------------------------------------------------------------

_PARTS = either(
    TEXT, array(_kinds(responses.PARTS, {"text": TEXT}, input_text=("text",), text=("text",), output_text=("text",)))
)
_THOUGHT_PART = _own(("type", "text"), type=one_of("reasoning_text"), text=TEXT)
_SUMMARY_PART = _own(("type", "text"), type=one_of("summary_text"), text=TEXT)
_ITEM = either(
    _kinds(
        {kind: table for kind, table in responses.ITEMS.items() if kind != "reasoning"},
        {
            "role": one_of("user", "assistant", "system", "developer"),
            "content": _PARTS,
            "call_id": TEXT,
            "name": TEXT,
            "arguments": _ARGUMENTS,
            "output": _PARTS,
        },
        message=("role", "content"),
        function_call=("call_id", "name"),
        function_call_output=("call_id", "output"),
    ),
    made_of(
        responses.ITEMS["reasoning"],
        {
            "type": one_of("reasoning"),
            "summary": array(_SUMMARY_PART),
            "content": array(_THOUGHT_PART),
            "encrypted_content": {"type": "string", "format": "byte"},
        },
        ("type",),
    ),
)
RESPONSES = SHARED | {
    "input": either(TEXT, array(_ITEM, 1)),
    "instructions": TEXT,
    "max_output_tokens": integer(1),
    "tools": array(
        made_of(
            responses.TOOL_FIELDS,
            {"type": one_of("function"), "name": _NAME, "description": TEXT, "parameters": OBJECT, "strict": FLAG},
            ("type", "name"),
        ),
        most=MAX_TOOLS,
    ),
    "tool_choice": either(
        one_of("none", "auto", "required"),
        made_of(responses.CHOICE_FIELDS, {"type": one_of("function"), "name": TEXT}, ("type", "name")),
    ),
    "parallel_tool_calls": FLAG,
    "reasoning": made_of(responses.REASONING_FIELDS, {"effort": _EFFORT}),
    "text": made_of(
        responses.TEXT_FIELDS,
        {
            "format": made_of(
                responses.FORMAT_FIELDS,
                {
                    "type": one_of("text", "json_object", "json_schema"),
                    "name": TEXT,
                    "schema": OBJECT,
                    "strict": FLAG,
                    "description": TEXT,
                },
                ("type",),
            )
        },
    ),
    "metadata": {"type": "object", "additionalProperties": TEXT},
    "include": array(one_of(responses.ENCRYPTED)),
    "stop": _OPENAI["stop"],
    "thinking_budget": _BUDGET,
    "stream_options": made_of(responses.STREAM_OPTIONS, {}),
}

# -- Anthropic's messages ------------------------------------------------------------------------------------------------

_TEXTS = either(TEXT, array(_kinds(anthropic.TEXT_BLOCKS, {"text": TEXT}, text=("text",))))
_USERS_BLOCK = _kinds(
    anthropic.USER_BLOCKS,
    {"text": TEXT, "tool_use_id": TEXT, "content": _TEXTS, "is_error": FLAG},
    text=("text",),
    tool_result=("tool_use_id",),
)
_ASSISTANTS_BLOCK = _kinds(
    anthropic.ASSISTANT_BLOCKS,
    {"text": TEXT, "thinking": TEXT, "id": TEXT, "name": TEXT, "input": OBJECT},
    text=("text",),
    thinking=("thinking",),
    tool_use=("id", "name", "input"),
)
_BOTH = ("role", "content")
MESSAGES = SHARED | {
    "messages": array(
        either(
            _own(_BOTH, role=one_of("user"), content=either(TEXT, array(_USERS_BLOCK, 1))),
            _own(_BOTH, role=one_of("assistant"), content=either(TEXT, array(_ASSISTANTS_BLOCK, 1))),
            _own(_BOTH, role=one_of("system"), content=_TEXTS),
        ),
        1,
    ),
    "system": _TEXTS,
    "max_tokens": integer(1),
    "stop_sequences": _STOPS,
    "tools": array(
        made_of(
            anthropic.TOOL_FIELDS,
            {
                "type": one_of("custom"),
                "name": _NAME,
                "description": TEXT,
                "input_schema": OBJECT,
                "strict": FLAG,
            },
            ("name", "input_schema"),
        ),
        most=MAX_TOOLS,
    ),
    "tool_choice": made_of(
        anthropic.CHOICE_FIELDS,
        {"type": one_of("auto", "any", "tool", "none"), "name": TEXT, "disable_parallel_tool_use": FLAG},
        ("type",),
    ),
    "thinking": made_of(
        anthropic.THINKING_FIELDS,
        {"type": one_of("enabled", "adaptive", "disabled"), "budget_tokens": _BUDGET},
        ("type",),
    ),
    "output_config": made_of(
        anthropic.OUTPUT_FIELDS,
        {
            "effort": _EFFORT,
            "format": made_of(
                anthropic.FORMAT_FIELDS, {"type": one_of("json_schema"), "schema": OBJECT}, ("type", "schema")
            ),
        },
    ),
}
