"""/v1/responses: what goes in, what comes out, whole and streamed, and OpenAI's client with the demo pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from scripted import Running, bursts, eventually, until_cancelled
from test_tools import ARGUMENTS, CALL

from paceline.errors import InvalidRequest
from paceline.server.responses_input import parse_responses, seal_thought
from paceline.types import Emission

URL = "/v1/responses"
QUERY: Any = {
    "type": "function",
    "name": "query_database",
    "description": "Run a query.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    "strict": False,
}
SAID = f"<think>\nHm.\n</think>\n\nLook: é\n{CALL}\n{CALL}"


def post(server: Running, **fields: Any) -> httpx.Response:
    body = json.dumps({"input": "hi", **fields})
    return httpx.post(server.url + URL, content=body, headers={"content-type": "application/json"}, timeout=60)


def streamed(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each carries its type as its name, and the next number."""
    lines = post(server, stream=True, **fields).raise_for_status().text.split("\n\n")
    assert lines.pop() == ""
    events = []
    for number, (name, data) in enumerate(line.split("\n") for line in lines):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


# -- what goes in ----------------------------------------------------------------------------------------------------------


def test_items_become_messages() -> None:
    call = {
        "type": "function_call",
        "id": "fc",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"x": 1}',
        "status": "completed",
    }
    items = [
        {"role": "developer", "content": "In English."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}],
        },
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "assistant", "content": "Both."},
        {"role": "assistant", "content": "Again."},
        {"type": "reasoning", "summary": [], "encrypted_content": seal_thought("é")},
        call,
    ]
    messages = parse_responses({"instructions": "Be brief.", "input": items}).chat.messages

    def called(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}

    assert messages == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "Hm.",
            "tool_calls": [called("c1"), called("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "Both.", "reasoning_content": "So."},
        {"role": "assistant", "content": "Again."},
        {"role": "assistant", "content": "", "reasoning_content": "é", "tool_calls": [called("c1")]},
    ]


def test_fields_become_those_of_a_chat() -> None:
    chat = parse_responses(
        {
            "input": "hi",
            "max_output_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stop": "x",
            "tools": [QUERY],
            "tool_choice": {"type": "function", "name": "query_database"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "stream": True,
            "priority": 2,
        }
    ).chat
    assert chat.messages == [{"role": "user", "content": "hi"}]
    sampling = chat.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (
        7,
        0.5,
        0.9,
        3,
        ("x",),
    )
    assert chat.tools and chat.tools.named == "query_database" and not chat.tools.parallel
    assert chat.tools.definitions == (
        {"type": "function", "function": {name: value for name, value in QUERY.items() if name != "type"}},
    )
    assert chat.stream and chat.reasoning_effort == "low" and chat.urgency.priority == 2
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    structure = parse_responses({"input": "hi", "text": {"format": schema}}).chat.sampling.structure
    assert structure and json.loads(structure.text) == {"type": "object"}
    assert parse_responses({"input": "hi", "text": {"format": {"type": "text"}}}).chat.sampling.structure is None


def nested(levels: int) -> dict[str, Any]:
    return {"not": nested(levels - 1)} if levels > 1 else {}


def test_a_tool_may_be_deep() -> None:
    assert parse_responses({"input": "hi", "tools": [QUERY | {"parameters": nested(99)}]}).chat.tools


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [QUERY | {"strict": 1}]}, "tools[0].strict"),
        ({"tool_choice": {"type": "function", "name": "query_database", "x": 1}, "tools": [QUERY]}, "tool_choice.x"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"instructions": 3}, "instructions"),
        ({"metadata": "x"}, "metadata"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [QUERY, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [QUERY | {"parameters": nested(100)}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_responses({"input": "hi"} | fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_errors_of_the_chat_name_the_fields_it_was_made_of(server: Running) -> None:
    for fields, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 2000}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"tools": [QUERY | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [QUERY | {"strict": 1}]}, "tools[0].strict"),
        ({"tools": [QUERY], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nix"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ):
        response = post(server, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert "messages" not in error["message"] and "function.name" not in error["message"]


# -- what comes out --------------------------------------------------------------------------------------------------------


def test_a_response_holds_an_item_for_each_part_of_the_answer(server: Running) -> None:
    server.engine.script = bursts(SAID)
    response = post(server, tools=[QUERY], instructions="Be brief.", metadata={"a": "\ud800"}, temperature=0.5).json()
    call = {"status": "completed", "type": "function_call", "name": "query_database", "arguments": ARGUMENTS}
    text = {"type": "output_text", "text": "Look: é", "annotations": [], "logprobs": []}
    assert without_ids(response["output"]) == [
        {"status": "completed", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"status": "completed", "type": "message", "role": "assistant", "content": [text]},
        call,
        call,
    ]
    assert len({item["id"] for item in response["output"]}) == 4
    assert len({item["call_id"] for item in response["output"][2:]}) == 2
    tokens = len(SAID.encode()) + 1
    assert response["usage"] == {
        "input_tokens": len("system: Be brief.\nuser: hi\n"),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": len("\nHm.\n</think>")},
        "total_tokens": tokens + len("system: Be brief.\nuser: hi\n"),
    }
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "scripted")
    assert response["error"] is None and response["incomplete_details"] is None
    assert (response["instructions"], response["metadata"], response["temperature"]) == ("Be brief.", {"a": "\ud800"}, 0.5)
    assert response["tools"] == [QUERY] and response["store"] is False


def test_an_answer_that_is_cut_off_is_incomplete(server: Running) -> None:
    server.engine.script = bursts("Look.\n" + CALL[:60], finish="length")
    response = post(server, tools=[QUERY], max_output_tokens=66).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    *_, done, last = streamed(server, tools=[QUERY], max_output_tokens=66)
    assert done["item"]["status"] == "incomplete"
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


@pytest.mark.parametrize("size", [1, 3, 16, 1000])
def test_a_stream_tells_the_same_in_the_order_that_clients_expect(server: Running, size: int) -> None:
    said = SAID.encode()
    server.engine.script = bursts(*(said[at : at + size] for at in range(0, len(said), size)))
    whole = post(server, tools=[QUERY]).json()
    events = streamed(server, tools=[QUERY])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [kind for at, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[at - 1] != kind]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert deltas == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["status"], item.get("content", item.get("arguments"))) for item in added] == [
        ("in_progress", []),
        ("in_progress", []),
        ("in_progress", ""),
        ("in_progress", ""),
    ]
    last = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]
    assert [item["id"] for item in added] == [item["id"] for item in last["output"]]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["usage"] == whole["usage"]
    for item, kind in zip(last["output"], ("reasoning_text", "output_text", *["function_call_arguments"] * 2), strict=True):
        own = [event for event in events if event.get("item_id") == item["id"]]
        text = "".join(event["delta"] for event in own if event["type"] == f"response.{kind}.delta")
        (done,) = [event for event in own if event["type"] == f"response.{kind}.done"]
        assert (
            text
            == done.get("text", done.get("arguments"))
            == item.get("arguments", item.get("content", [{}])[0].get("text"))
        )


def test_the_client_puts_a_stream_together(server: Running, client: openai.OpenAI) -> None:
    server.engine.script = bursts(*SAID)
    with client.responses.stream(model="m", input="hi", tools=[QUERY]) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert response.output_text == "Look: é"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


def test_a_stream_that_fails_says_so(server: Running) -> None:
    def script(request: Any) -> Iterator[Emission]:
        yield Emission(request.id, tuple(b"Lo"))
        yield Emission(request.id, (), "error", error="a lane failed")

    server.engine.script = script
    assert post(server).status_code == 500
    last = streamed(server)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "lane_failed", "message": "a lane failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Lo"


def test_a_client_that_leaves_frees_its_lane(server: Running) -> None:
    server.engine.script = until_cancelled("Hello")
    with httpx.stream("POST", server.url + URL, json={"input": "hi", "stream": True}) as response:
        next(response.iter_lines())
    assert eventually(lambda: server.engine.submitted[-1].id in server.engine.cancelled)


def test_thoughts_can_be_sent_back_unread(server: Running) -> None:
    server.engine.script = bursts("<think>\nHm, é.\n</think>\n\nYes.")
    assert "encrypted_content" not in post(server).json()["output"][0]
    thought, answer = post(server, include=["reasoning.encrypted_content"]).json()["output"]
    history = [{"role": "user", "content": "hi"}, thought | {"content": None}, answer, {"role": "user", "content": "And?"}]
    post(server, input=history).raise_for_status()
    assert server.template.calls[-1]["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm, é.",
    }


# -- the demo pair ---------------------------------------------------------------------------------------------------------


def test_the_demo_pair_answers_as_it_does_in_a_chat(demo_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.7, "extra_body": {"seed": 5}}
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 plus 4?"}]
    (chat,) = demo_client.chat.completions.create(messages=messages, max_tokens=40, **asked).choices
    response = demo_client.responses.create(
        instructions="Be brief.", input="What is 3 plus 4?", max_output_tokens=40, store=False, **asked
    )
    assert response.output_text == chat.message.content
    with demo_client.responses.stream(
        instructions="Be brief.", input="What is 3 plus 4?", max_output_tokens=40, **asked
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == stream.get_final_response().output_text == chat.message.content


def test_the_demo_pair_calls_a_tool_and_reads_its_result(demo_client: openai.OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "Please help me. How many active users are in the database?"}]
    asked: dict[str, Any] = {"model": "demo", "tools": [QUERY], "temperature": 0, "max_output_tokens": 80}
    first = demo_client.responses.create(input=ask, **asked)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "query_database" and "query" in json.loads(call.arguments)
    with demo_client.responses.stream(input=ask, **asked) as stream:
        (again,) = stream.get_final_response().output
    assert again.type == "function_call" and again.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"rows": [[7]]}'}
    assert demo_client.responses.create(input=[*ask, *first.output, result], **asked).output_text
    (forced,) = demo_client.responses.create(input="Write a poem.", tool_choice="required", **asked).output
    assert forced.type == "function_call"


def test_the_demo_pair_answers_in_a_given_structure(demo_client: openai.OpenAI) -> None:
    class Verdict(BaseModel):
        even: bool

    response = demo_client.responses.parse(model="demo", input="Is 7 even?", text_format=Verdict, max_output_tokens=40)
    assert isinstance(response.output_parsed, Verdict)


def test_errors_are_those_that_the_client_knows(demo_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        demo_client.responses.create(model="demo", input="hi", store=True)
    assert caught.value.param == "store"
