"""Tool calls and thoughts over HTTP: a scripted engine says what it likes, the demo pair what it can."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from demo_server import at_once
from openai.types.chat import ChatCompletionChunk
from scripted import END, Running, bursts, eventually, joined

from paceline.server.service import Backend
from paceline.weights.template import ChatTemplate

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def tool(name: str, **types: str) -> Any:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": schema}}


QUERY = tool("query_database", query="string", limit="integer")
CALL = '<tool_call>\n{"name": "query_database", "arguments": {"query": "SELECT 1 -- </tool_call>"}}\n</tool_call>'
ARGUMENTS = '{"query": "SELECT 1 -- </tool_call>"}'


def post(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + CHAT, json={"messages": HELLO, **fields}, timeout=60)


def choice(server: Running, **fields: Any) -> dict[str, Any]:
    (only,) = post(server, **fields).raise_for_status().json()["choices"]
    return only


def error(server: Running, **fields: Any) -> tuple[str, str]:
    response = post(server, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def put_together(chunks: Iterable[ChatCompletionChunk]) -> tuple[dict[str, Any], str | None]:
    """The message of a stream, as a client makes it of the deltas, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = None
    for chunk in chunks:
        (part,) = chunk.choices
        message["content"] += part.delta.content or ""
        message["reasoning_content"] += getattr(part.delta, "reasoning_content", None) or ""
        for call in part.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(message["calls"]) and call.type == "function"
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments or ""
        reason = part.finish_reason or reason
    return message, reason


# -- a scripted engine -----------------------------------------------------------------------------------------------------


def test_calls_come_back_as_calls(server: Running) -> None:
    server.engine.script = bursts(f"One moment.\n{CALL}\n{CALL}\n")
    answer = choice(server, tools=[QUERY])
    assert answer["finish_reason"] == "tool_calls"
    calls = answer["message"].pop("tool_calls")
    assert answer["message"] == {"role": "assistant", "content": "One moment."}
    assert len({call["id"] for call in calls}) == 2
    assert [(call["type"], call["function"]) for call in calls] == [
        ("function", {"name": "query_database", "arguments": ARGUMENTS})
    ] * 2
    server.engine.script = bursts(CALL)
    assert choice(server, tools=[QUERY])["message"]["content"] is None
    assert choice(server)["message"] == {"role": "assistant", "content": CALL}, "without tools it is text"
    server.engine.script = bursts(CALL, finish="length")
    assert choice(server, tools=[QUERY])["finish_reason"] == "length"


def test_thoughts_come_back_apart(server: Running) -> None:
    server.engine.script = bursts("<think>\nWell.\n</think>\n\nYes.")
    reply = post(server).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."}
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nWell.\n</think>")}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_a_stream_says_the_same_in_bursts_of_any_size(server: Running, client: openai.OpenAI, size: int) -> None:
    said = f"<think>\nHm: <tool_call>?\n</think>\n\nLook: é\n{CALL}\n{CALL}".encode()
    server.engine.script = bursts(*(said[at : at + size] for at in range(0, len(said), size)))
    chunks = client.chat.completions.create(model="m", messages=HELLO, tools=[QUERY], stream=True)
    message, reason = put_together(chunks)
    assert message == {
        "content": "Look: é",
        "reasoning_content": "Hm: <tool_call>?",
        "calls": [["query_database", ARGUMENTS]] * 2,
    }
    assert reason == "tool_calls"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_without_parallel_calls_the_answer_ends_with_the_first(server: Running, size: int) -> None:
    said = f"{CALL}\n{CALL}".encode()
    server.engine.script = bursts(*(said[at : at + size] for at in range(0, len(said), size)), finish=None)
    reply = post(server, tools=[QUERY], parallel_tool_calls=False).json()
    (answer,) = reply["choices"]
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "tool_calls"
    assert reply["usage"]["completion_tokens"] == len(CALL)
    assert eventually(lambda: server.engine.submitted[-1].id in server.engine.cancelled)


def test_logprobs_go_with_the_tokens_also_of_calls(server: Running) -> None:
    from test_choices import says

    server.engine.script = says(CALL)
    scored = choice(server, tools=[QUERY], logprobs=True)["logprobs"]["content"]
    assert [entry["logprob"] for entry in scored] == [-float(token) for token in (*CALL.encode(), END)]


def test_what_the_template_or_the_vocabulary_cannot_serve_is_refused(server: Running) -> None:
    assert error(server, reasoning_effort="low")[0] == "reasoning_effort"
    param, message = error(server, thinking_budget=5)
    assert param == "thinking_budget" and "</think>" in message
    source, server.template.source = server.template.source, "{{ messages }} {{ tools }} {{ reasoning_effort }}"
    try:
        assert error(server, tools=[QUERY], tool_choice="required")[0] == "tool_choice"
        server.engine.script = bursts(CALL)
        assert choice(server, tools=[QUERY], reasoning_effort="low")["message"]["content"] == CALL
        assert server.template.calls[-1]["reasoning_effort"] == "low"
        server.template.source = "{{ messages }}"
        assert error(server, tools=[QUERY])[0] == "tools"
    finally:
        server.template.source = source


XML_TEMPLATE = """
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- message.role + ':' + message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
"""
"""As Qwen3-Coder's and Qwen3.5's write calls."""


def test_the_other_format_reads_what_it_writes(server: Running) -> None:
    """Calls of the history are rendered as the model would write them; what it writes then comes back as the same calls."""
    arguments = {"query": "SELECT '</parameter>'\n", "limit": 3}
    call = {"id": "c", "type": "function", "function": {"name": "query_database", "arguments": json.dumps(arguments)}}
    history = [*HELLO, {"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": "[]"}]
    template = ChatTemplate(XML_TEMPLATE)
    backend = server.service.backend
    assert backend is not None
    server.service.attach(Backend(backend.handle, backend.tokenizer, template))
    try:
        post(server, messages=history, tools=[QUERY])
        prompt = joined(server.engine.submitted[-1].prompt)
        assert prompt.startswith(json.dumps(QUERY)) and prompt.endswith("tool:[]\n")
        written = prompt[prompt.index("assistant:") :].removeprefix("assistant:").removesuffix("\ntool:[]\n")
        server.engine.script = bursts(*written)
        calls = choice(server, tools=[QUERY])["message"]["tool_calls"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [arguments, arguments]
        for tool_choice, opening in (
            ("auto", None),
            ("required", "<tool_call>\n<function"),
            ({"type": "function", "function": {"name": "query_database"}}, "<tool_call>\n<function=query_database>\n"),
        ):
            post(server, tools=[QUERY], tool_choice=tool_choice)
            forcing = server.engine.submitted[-1].forcing
            assert (forcing and joined(forcing.opening)) == opening
    finally:
        server.service.attach(backend)


# -- the demo pair ---------------------------------------------------------------------------------------------------------

ASK: list[Any] = [{"role": "user", "content": "Please help me. How many active users are in the database?"}]
OTHER = tool("get_weather", city="string")


def test_the_demo_pair_calls_a_tool_and_reads_its_result(demo_client: openai.OpenAI) -> None:
    client = demo_client
    asked: dict[str, Any] = {"model": "demo", "tools": [QUERY], "temperature": 0, "max_tokens": 80}
    (first,) = client.chat.completions.create(messages=ASK, **asked).choices
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    (call,) = first.message.tool_calls
    assert call.type == "function" and call.function.name == "query_database"
    assert "query" in json.loads(call.function.arguments)
    streamed, reason = put_together(client.chat.completions.create(messages=ASK, stream=True, **asked))
    assert streamed["calls"] == [[call.function.name, call.function.arguments]]
    assert reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"rows": [[7]]}'}
    history = [*ASK, first.message.model_dump(exclude_unset=True), result]
    (second,) = client.chat.completions.create(messages=history, **asked).choices
    assert second.message.content


def test_tool_choice_is_what_happens(demo_client: openai.OpenAI) -> None:
    """Where the demo pair would not call, or would call the other."""
    client = demo_client
    hello: list[Any] = [{"role": "user", "content": "Write a poem about the sea."}]
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.7, "seed": 1, "max_tokens": 60}
    tools = [QUERY, OTHER]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for messages in (ASK, hello):
        create = partial(client.chat.completions.create, messages=messages, tools=tools, **asked)
        answers = at_once(*(partial(create, tool_choice=choice) for choice in ("none", named, "required")))
        free, told, must = (answer.choices[0].message for answer in answers)
        assert free.tool_calls is None
        assert told.tool_calls and told.tool_calls[0].type == "function"
        assert told.tool_calls[0].function.name == "get_weather"
        assert must.tool_calls


def test_a_thought_ends_with_its_budget(demo: Running, demo_client: openai.OpenAI) -> None:
    """A template that opens a thought, as Qwen3.5's does; the demo pair would think on."""
    client, server = demo_client, demo
    backend = server.service.backend
    assert backend is not None and isinstance(backend.template, ChatTemplate)
    opened = ChatTemplate(backend.template.source + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}")
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 60}
    server.service.attach(Backend(backend.handle, backend.tokenizer, opened))
    try:
        (unbound,) = client.chat.completions.create(messages=ASK, **asked).choices
        thought = getattr(unbound.message, "reasoning_content", "")
        assert unbound.message.content == "" and thought, "the whole answer is a thought"
        create = partial(client.chat.completions.create, messages=ASK, **asked)
        budgets = (0, 1, 6)
        bound = at_once(*(partial(create, extra_body={"thinking_budget": budget}) for budget in budgets))
        for budget, (answer,) in zip(budgets, (each.choices for each in bound), strict=True):
            thought_then = getattr(answer.message, "reasoning_content", "")
            assert thought.startswith(thought_then)
            assert len(backend.tokenizer.encode(thought_then)) <= budget
            assert answer.message.content
        required = client.chat.completions.create(
            messages=ASK, tools=[QUERY], tool_choice="required", extra_body={"thinking_budget": 6}, **asked
        )
        (answer,) = required.choices
        assert answer.message.tool_calls and getattr(answer.message, "reasoning_content", "")
    finally:
        server.service.attach(backend)
