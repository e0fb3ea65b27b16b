"""Bodies of other APIs, with anything anywhere: whatever is wrong is a 400 that names a field."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.server.anthropic_input import COUNT_FIELDS, MESSAGES_FIELDS, parse_count, parse_messages
from paceline.server.responses_input import RESPONSES_FIELDS, parse_responses, seal_thought
from paceline.server.translation import in_terms_of

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "x"}],
            "encrypted_content": seal_thought("x"),
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
    ],
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "stream_options": {},
}
COUNT: dict[str, Any] = {
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "z"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "1"}], "is_error": True}
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "chat_template_kwargs": {},
}
MESSAGES = COUNT | {"max_tokens": 3, "stop_sequences": ["x"]}
ANYTHING: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], [None], ["x"], [[]], {}, {"type": []}, {"name": 3}, 10**30]


def places(value: object, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*above, name)
        yield from places(part, (*above, name))


def put(body: dict[str, Any], place: tuple[Any, ...], value: object) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return body


@pytest.mark.parametrize(
    ("parse", "body", "fields"),
    [
        (parse_responses, RESPONSES, RESPONSES_FIELDS),
        (parse_messages, MESSAGES, MESSAGES_FIELDS),
        (parse_count, COUNT, COUNT_FIELDS),
    ],
)
def test_anything_anywhere_is_refused_by_name_or_taken(
    parse: Callable[[dict[str, Any]], object], body: dict[str, Any], fields: dict[str, Any]
) -> None:
    parse(body)
    refused = 0
    for place in [*places(body), *((name,) for name in fields)]:
        for value in ANYTHING:
            try:
                parse(put(body, place, value))
            except InvalidRequest as error:
                assert error.param, (place, value)
                refused += 1
    assert refused > 100


def test_errors_are_renamed_by_the_beginning_of_their_field() -> None:
    names = {r"messages": "input", r"(tools\[\d+\])\.function": r"\1"}
    for param, own in (("messages", "input"), ("messages[0].x", "input[0].x"), ("tools[3].function.name", "tools[3].name")):
        with pytest.raises(InvalidRequest) as caught, in_terms_of(names):
            raise InvalidRequest(f"{param} is wrong", param=param, code="c")
        assert (caught.value.message, caught.value.param, caught.value.code) == (f"{own} is wrong", own, "c")
    for kept in ("seed", "my.messages", None):
        with pytest.raises(InvalidRequest) as caught, in_terms_of(names):
            raise InvalidRequest("wrong messages", param=kept)
        assert (caught.value.message, caught.value.param) == ("wrong messages", kept)
