"""Calls whose arguments have to fit: the demo pair, with OpenAI's and Anthropic's clients."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
from demo_server import at_once
from scripted import Running
from test_tools import ASK, CHAT, XML_TEMPLATE

from paceline.server.service import Backend
from paceline.weights.template import ChatTemplate

POEM: list[Any] = [{"role": "user", "content": "Write a poem about the sea."}]


class QueryDatabase(pydantic.BaseModel):
    query: str = pydantic.Field(max_length=16)
    limit: int = pydantic.Field(ge=1, le=100)
    order: Literal["newest", "oldest"]


class Turn(pydantic.BaseModel):
    """Such arguments are short, whatever the model would like to say."""

    side: Literal["left", "right"]
    slowly: bool | None


QUERY: Any = openai.pydantic_function_tool(QueryDatabase, name="query_database")
TURN: Any = openai.pydantic_function_tool(Turn, name="turn")
MODELS: dict[str, type[pydantic.BaseModel]] = {"query_database": QueryDatabase, "turn": Turn}


def flat(tool: Any) -> Any:
    """As /v1/responses has it."""
    return {"type": "function", **tool["function"]}


def loose(tool: Any) -> Any:
    return {"type": "function", "function": {**tool["function"], "strict": False}}


def ask(demo: Running, **fields: Any) -> dict[str, Any]:
    body = {"messages": POEM, "max_tokens": 80, "temperature": 0.7, "seed": 1, "parallel_tool_calls": False, **fields}
    response = httpx.post(demo.url + CHAT, json=body, timeout=60)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def encoded(demo: Running, text: str) -> list[int]:
    assert demo.service.backend is not None
    return demo.service.backend.tokenizer.encode(text)


def checked(choice: dict[str, Any]) -> list[str]:
    """The functions called, whose arguments fit."""
    assert choice["finish_reason"] == "tool_calls", choice
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    for function in functions:
        MODELS[function["name"]].model_validate_json(function["arguments"])
    return [function["name"] for function in functions]


def test_the_client_parses_calls(demo_client: openai.OpenAI) -> None:
    """The model calls by itself; what it would say otherwise is the same without the tool's strictness."""
    asked: dict[str, Any] = {"model": "demo", "messages": ASK, "temperature": 0, "max_tokens": 120}
    (choice,) = demo_client.chat.completions.parse(tools=[QUERY], **asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, QueryDatabase)
    with demo_client.chat.completions.stream(tools=[QUERY], **asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_text_is_as_free_as_without_the_schema(demo: Running) -> None:
    trigger = {str(token): -100 for token in encoded(demo, "<tool_call>")}
    asks = (partial(ask, demo, tools=[tool], logit_bias=trigger, max_tokens=30) for tool in (TURN, loose(TURN)))
    texts = [choice["message"] for choice in at_once(*asks)]
    assert texts[0] == texts[1] and texts[0]["content"]


def test_a_choice_is_kept_with_its_schema(demo: Running) -> None:
    named = {"type": "function", "function": {"name": "turn"}}
    strict = partial(ask, demo, tools=[QUERY, TURN])
    others = partial(ask, demo, tools=[loose(QUERY), loose(TURN)])
    required = [partial(asked, tool_choice="required") for asked in (strict, others)]
    told = [partial(asked, tool_choice=named, temperature=1.3) for asked in (strict, others)]
    calls = [*map(checked, at_once(*required, *told))]
    assert [len(each) for each in calls[:2]] == [1, 1] and calls[2:] == [["turn"], ["turn"]]


def test_calls_behind_a_thought_and_in_the_other_form(demo: Running) -> None:
    backend = demo.service.backend
    assert backend is not None and isinstance(backend.template, ChatTemplate)
    thought = "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"
    trigger = {str(encoded(demo, "<tool_call>")[0]): 60}
    try:
        for source in (backend.template.source + thought, XML_TEMPLATE):
            demo.service.attach(Backend(backend.handle, backend.tokenizer, ChatTemplate(source)))
            thinks = source.endswith(thought)
            asked = {"tools": [TURN]} | ({"thinking_budget": 9} if thinks else {})
            ways: tuple[dict[str, Any], ...] = ({"tool_choice": "required"}, {"logit_bias": trigger})
            for answer in at_once(*(partial(ask, demo, **asked, **more) for more in ways)):
                assert checked(answer) == ["turn"] and bool(answer["message"].get("reasoning_content")) == thinks
    finally:
        demo.service.attach(backend)


def test_an_answer_of_a_format_or_a_call(demo: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"ok": True}, {"ok": False}]}}}
    trigger = {str(encoded(demo, "<tool_call>")[0]): -100}
    asked = partial(ask, demo, tools=[TURN], response_format=form)
    said, called, required = at_once(
        partial(asked, logit_bias=trigger),
        partial(asked, logit_bias=dict.fromkeys(trigger, 60)),
        partial(asked, tool_choice="required"),
    )
    assert said["finish_reason"] == "stop" and json.loads(said["message"]["content"])["ok"] in (True, False)
    assert checked(called) and checked(required)


def test_responses_and_messages(demo: Running, demo_client: openai.OpenAI) -> None:
    answer = demo_client.responses.create(
        model="demo", input=ASK, tools=[flat(QUERY)], temperature=0, max_output_tokens=120, tool_choice="required"
    )
    for item in answer.output:
        assert item.type == "function_call"
        QueryDatabase.model_validate_json(item.arguments)
    parsed = demo_client.responses.parse(model="demo", input=ASK, tools=[QUERY], temperature=0, max_output_tokens=120)
    assert [type(getattr(item, "parsed_arguments", None)) for item in parsed.output] == [QueryDatabase]
    tool: Any = {"name": "turn", "input_schema": TURN["function"]["parameters"], "strict": True}
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as other:
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 120, "messages": POEM, "tools": [tool]}
        message = other.messages.create(tool_choice={"type": "any"}, extra_body={"temperature": 0.7, "seed": 3}, **asked)
        assert message.stop_reason == "tool_use"
        for block in message.content:
            assert block.type == "tool_use"
            Turn.model_validate(block.input)
        with other.messages.stream(tool_choice={"type": "tool", "name": "turn"}, **asked) as stream:
            (block,) = stream.get_final_message().content
        assert block.type == "tool_use" and Turn.model_validate(block.input)


def test_what_cannot_be_kept_names_its_field(demo: Running) -> None:
    def refused(path: str = CHAT, **fields: Any) -> str:
        body = {"messages": POEM, "max_tokens": 8, **fields}
        response = httpx.post(demo.url + path, json=body, timeout=60)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return str(error["message"] if path != CHAT else error["param"])

    def tool(schema: Any, **more: Any) -> Any:
        return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}

    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert refused(tools=[TURN, tool(unique, strict=True)]) == "tools[1].function.parameters"
    assert (
        refused(tools=[tool({"properties": {"a": {"type": "foo"}}})], tool_choice="required")
        == "tools[0].function.parameters"
    )
    assert refused(tools=[tool({}, strict=1)]) == "tools[0].function.strict"
    assert refused(tools=[TURN], ignore_eos=True) == "ignore_eos"
    assert "tools[0].input_schema" in refused(
        "/v1/messages", tools=[{"name": "f", "input_schema": {**unique, "not": {}}, "strict": True}]
    )
    backend = demo.service.backend
    assert backend is not None
    demo.service.attach(Backend(backend.handle, backend.tokenizer, ChatTemplate("{{ messages }} {{ tools }}")))
    try:
        assert refused(tools=[loose(QUERY), TURN]) == "tools[1].function.strict"
        assert refused(tools=[TURN], tool_choice="required") == "tool_choice"
        assert refused(tools=[loose(QUERY)], response_format={"type": "json_object"}) == "response_format"
    finally:
        demo.service.attach(backend)
