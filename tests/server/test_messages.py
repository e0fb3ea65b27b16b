"""/v1/messages: what goes in, what comes out, whole and streamed, and Anthropic's client with the demo pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from scripted import MAX_CTX, Running, bursts, eventually, running, until_cancelled
from test_tools import ARGUMENTS, CALL

from paceline.errors import InvalidRequest
from paceline.server.anthropic_input import parse_count, parse_messages
from paceline.types import Emission

URL = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
QUERY: Any = {
    "name": "query_database",
    "description": "Run a query.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
}
SAID = f"<think>\nHm.\n</think>\n\nLook: é\n{CALL}\n{CALL}"


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def post(server: Running, path: str = URL, **fields: Any) -> httpx.Response:
    body = json.dumps({"model": "m", "max_tokens": 500, "messages": HELLO, **fields})
    return httpx.post(server.url + path, content=body, headers={"content-type": "application/json"}, timeout=60)


def streamed(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each carries its type as its name."""
    lines = post(server, stream=True, **fields).raise_for_status().text.split("\n\n")
    assert lines.pop() == ""
    events = []
    for name, data in (line.split("\n") for line in lines):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": HELLO} | fields


# -- what goes in ----------------------------------------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "In English."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"} | cached]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "1"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."} | cached]
    assert parse_messages(asked(system=system, messages=messages)).messages == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "Go on."},
    ]


def test_fields_become_those_of_a_chat() -> None:
    chat = parse_messages(
        asked(
            system="Be brief.",
            temperature=0.5,
            top_k=3,
            seed=4,
            stop_sequences=["x", "y"],
            tools=[QUERY],
            tool_choice={"type": "tool", "name": "query_database", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 7},
            output_config={"effort": "low"},
            metadata={"user_id": "u"},
            stream=True,
        )
    )
    sampling = chat.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (5, 0.5, 3, 4)
    assert sampling.stop == ("x", "y") and chat.stream
    assert chat.tools and chat.tools.named == "query_database" and not chat.tools.parallel
    (definition,) = chat.tools.definitions
    function = {"name": "query_database", "description": "Run a query.", "parameters": QUERY["input_schema"]}
    assert definition == {"type": "function", "function": function}
    assert chat.thinking_budget == 7 and chat.reasoning_effort == "low"
    assert chat.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert parse_messages(asked(thinking={"type": "disabled"})).template_kwargs == {"enable_thinking": False}
    assert parse_messages(asked()).template_kwargs == {}
    must = parse_messages(asked(tools=[QUERY], tool_choice={"type": "any"})).tools
    assert must and must.required and must.parallel
    assert parse_messages(asked(tools=[QUERY], tool_choice={"type": "none"})).tools is None
    form = {"type": "json_schema", "schema": {"type": "object"}}
    structure = parse_messages(asked(output_config={"format": form})).sampling.structure
    assert structure and json.loads(structure.text) == {"type": "object"}


def in_user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def in_assistant(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, *HELLO]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"stop": "x"}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"tools": [QUERY | {"strict": 1}]}, "tools[0].strict"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [QUERY | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        (in_user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (in_user({"type": "text"}), "messages[0].content[0].text"),
        (in_user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (in_assistant({"type": "redacted_thinking", "data": "x"}), "messages[0].content[0].type"),
        (in_assistant({"type": "tool_use", "id": "t", "name": "f", "input": "x"}), "messages[0].content[0].input"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(asked() | fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_errors_have_anthropics_shape_and_name_its_fields(server: Running) -> None:
    for fields, named in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"tools": [QUERY | {"strict": 1}]}, "tools[0].strict"),
        ({"tools": [QUERY, QUERY]}, "tools"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ):
        response = post(server, **fields)
        assert response.status_code == 400, response.text
        body = response.json()
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert named in body["error"]["message"] and ".function" not in body["error"]["message"]
        assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    for response, kind in (
        (httpx.get(server.url + URL), "invalid_request_error"),
        (httpx.post(server.url + URL + "/batches", json={}), "not_found_error"),
        (httpx.post(server.url + URL, headers={f"x-{number}": "" for number in range(200)}), "invalid_request_error"),
    ):
        assert response.json()["type"] == "error" and response.json()["error"]["type"] == kind
    assert httpx.post(server.url + "/v1/messages2").json()["error"]["param"] is None, "OpenAI's elsewhere"


def test_a_key_is_needed_as_anywhere() -> None:
    with running(api_keys=("secret",)) as server:
        server.engine.script = bursts("Hello")
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            message = client.messages.create(model="m", max_tokens=9, messages=HELLO)
            assert message.stop_reason == "end_turn" and message._request_id
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.count_tokens(model="m", messages=HELLO)
        assert caught.value.response.json()["error"]["type"] == "authentication_error"


# -- what comes out --------------------------------------------------------------------------------------------------------


def test_a_message_holds_a_block_for_each_part_of_the_answer(server: Running) -> None:
    server.engine.script = bursts(SAID)
    message = post(server, tools=[QUERY]).json()
    thought, text, first, second = message["content"]
    assert thought.pop("signature")
    assert thought == {"type": "thinking", "thinking": "Hm."}
    assert text == {"type": "text", "text": "Look: é"}
    assert len({first.pop("id"), second.pop("id")}) == 2
    assert first == second == {"type": "tool_use", "name": "query_database", "input": json.loads(ARGUMENTS)}
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "scripted")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": len("user: hi\n"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(SAID.encode()) + 1,
        "output_tokens_details": {"thinking_tokens": len("\nHm.\n</think>")},
    }


def test_why_a_message_ended(server: Running) -> None:
    for text, finish, stops, expected in (
        ("Hello", "stop", ["x"], ("end_turn", None, "Hello")),
        ("Hello", "length", ["x"], ("max_tokens", None, "Hello")),
        ("Hello", None, ["x", "lo", "l"], ("stop_sequence", "l", "He")),
        ("Hello", None, ["x", "lo"], ("stop_sequence", "lo", "Hel")),
    ):
        server.engine.script = bursts(text, finish=finish)
        message = post(server, stop_sequences=stops).json()
        assert (message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]) == expected
        delta = streamed(server, stop_sequences=stops)[-2]
        assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == expected[:2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": {"c": "x', {"a": 1, "b": {}}),
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}),
        ("{a: 1}", {"arguments": "{a: 1}"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}),
    ],
)
def test_arguments_that_are_cut_off_or_odd_are_still_an_object(
    server: Running, arguments: str, expected: dict[str, Any]
) -> None:
    server.engine.script = bursts(f'<tool_call>\n{{"name": "query_database", "arguments": {arguments}', finish="length")
    (call,) = post(server, tools=[QUERY]).json()["content"]
    assert call["input"] == expected


@pytest.mark.parametrize("size", [1, 3, 16, 1000])
def test_a_stream_tells_the_same_in_the_order_that_clients_expect(server: Running, size: int) -> None:
    said = SAID.encode()
    server.engine.script = bursts(*(said[at : at + size] for at in range(0, len(said), size)))
    events = streamed(server, tools=[QUERY])
    kinds = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    block = "content_block"
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind] == [
        ("message_start", None, None),
        ("ping", None, None),
        *((f"{block}_start", 0, None), (f"{block}_delta", 0, "thinking_delta")),
        *((f"{block}_delta", 0, "signature_delta"), (f"{block}_stop", 0, None)),
        *((f"{block}_start", 1, None), (f"{block}_delta", 1, "text_delta"), (f"{block}_stop", 1, None)),
        *((f"{block}_start", 2, None), (f"{block}_delta", 2, "input_json_delta"), (f"{block}_stop", 2, None)),
        *((f"{block}_start", 3, None), (f"{block}_delta", 3, "input_json_delta"), (f"{block}_stop", 3, None)),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] == len("user: hi\n")
    assert [event["content_block"] for event in events if event["type"] == f"{block}_start"][:2] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
    ]


def test_the_client_puts_a_stream_together(server: Running, client: anthropic.Anthropic) -> None:
    server.engine.script = bursts(*SAID)
    whole = post(server, tools=[QUERY]).json()
    with client.messages.stream(model="m", max_tokens=500, messages=HELLO, tools=[QUERY]) as stream:
        message = stream.get_final_message()
    content = [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]
    assert content == [{name: value for name, value in block.items() if name != "id"} for block in whole["content"]]
    assert message.stop_reason == "tool_use" and message.usage.output_tokens == whole["usage"]["output_tokens"]


def test_a_stream_that_fails_says_so(server: Running, client: anthropic.Anthropic) -> None:
    def script(request: Any) -> Iterator[Emission]:
        yield Emission(request.id, tuple(b"Lo"))
        yield Emission(request.id, (), "error", error="a lane failed")

    server.engine.script = script
    assert post(server).json()["error"]["type"] == "api_error"
    assert streamed(server)[-1] == {"type": "error", "error": {"type": "api_error", "message": "a lane failed"}}
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        stream.until_done()


def test_a_client_that_leaves_frees_its_lane(server: Running) -> None:
    server.engine.script = until_cancelled("Hello")
    with httpx.stream("POST", server.url + URL, json=asked(stream=True)) as response:
        next(response.iter_lines())
    assert eventually(lambda: server.engine.submitted[-1].id in server.engine.cancelled)


def test_tokens_are_counted_without_a_lane(server: Running) -> None:
    before = len(server.engine.submitted)
    text = "x" * 2 * MAX_CTX
    count = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": text}]}
    reply = httpx.post(f"{server.url}{URL}/count_tokens", json=count)
    assert reply.json() == {"input_tokens": len(f"system: Be brief.\nuser: {text}\n")}, "also what does not fit"
    assert len(server.engine.submitted) == before
    with pytest.raises(InvalidRequest) as caught:
        parse_count(count | {"max_tokens": 5})
    assert caught.value.param == "max_tokens"
    assert (
        post(server, f"{URL}/count_tokens", max_tokens=None, messages=[{"role": "user", "content": "\ud800"}]).status_code
        == 400
    )


# -- the demo pair ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_client(demo: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as client:
        yield client


def test_the_demo_pair_answers_as_it_does_in_a_chat(demo: Running, demo_client: anthropic.Anthropic) -> None:
    client, server = demo_client, demo
    fields = {"max_tokens": 40, "temperature": 0.7, "seed": 5}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 plus 4?"}]
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": chat} | fields, timeout=60).json()
    expected = reply["choices"][0]["message"]["content"]
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 40, "system": "Be brief.", "messages": [chat[1]]}
    extra = {"temperature": 0.7, "seed": 5}
    message = client.messages.create(**ask, extra_body=extra)
    assert message.content[0].type == "text" and message.content[0].text == expected
    with client.messages.stream(**ask, extra_body=extra) as stream:
        assert "".join(stream.text_stream) == expected == stream.get_final_text()
    del ask["max_tokens"]
    assert client.messages.count_tokens(**ask).input_tokens == message.usage.input_tokens


def test_the_demo_pair_uses_a_tool_and_reads_its_result(demo_client: anthropic.Anthropic) -> None:
    client = demo_client
    ask: list[Any] = [{"role": "user", "content": "Please help me. How many active users are in the database?"}]
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 80, "tools": [QUERY], "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=ask, **fields)
    (use,) = first.content
    assert first.stop_reason == "tool_use" and use.type == "tool_use" and "query" in use.input
    with client.messages.stream(messages=ask, **fields) as stream:
        (again,) = stream.get_final_message().content
    assert again.type == "tool_use" and again.input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"rows": [[7]]}'}
    history = [*ask, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, **fields).content
    poem: list[Any] = [{"role": "user", "content": "Write a poem."}]
    told = client.messages.create(messages=poem, tool_choice={"type": "tool", "name": "query_database"}, **fields)
    assert told.content[0].type == "tool_use"


def test_thinking_ends_with_its_budget(demo: Running, demo_client: anthropic.Anthropic) -> None:
    """What the demo pair opens is a thought if the template does; here the budget is what is tested to arrive."""
    client, server = demo_client, demo
    backend = server.service.backend
    assert backend is not None
    opened = OpenedThought(backend.template)
    server.service.attach(type(backend)(backend.handle, backend.tokenizer, opened))
    try:
        message = client.messages.create(
            model="demo",
            max_tokens=60,
            messages=[{"role": "user", "content": "How many active users are there?"}],
            thinking={"type": "enabled", "budget_tokens": 6},
            extra_body={"temperature": 0},
        )
    finally:
        server.service.attach(backend)
    thought, *rest = message.content
    assert thought.type == "thinking" and rest
    assert len(backend.tokenizer.encode(thought.thinking)) <= 6
    assert opened.thinking is True


class OpenedThought:
    """The demo pair's template, but that it opens a thought."""

    def __init__(self, template: Any) -> None:
        self._template, self.source, self.thinking = template, template.source, None

    def render(self, messages: list[dict[str, Any]], /, *, enable_thinking: Any = None, **kwargs: Any) -> str:
        self.thinking = enable_thinking
        return self._template.render(messages, **kwargs) + "<think>\n"
