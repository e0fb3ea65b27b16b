"""Structured output over HTTP: the demo pair and OpenAI's client."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from demo_server import at_once
from scripted import Running
from test_tools import QUERY

from paceline.server.service import Backend
from paceline.weights.template import ChatTemplate

ASK: list[Any] = [{"role": "user", "content": "Describe a person."}]
CHAT = "/v1/chat/completions"


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=2, le=4)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=30)
    code: str = pydantic.Field(pattern="^[A-Z]{3}-[0-9]{2}$")
    pets: list[Pet] = pydantic.Field(max_length=2)
    alive: bool | None


def content(demo: Running, **fields: Any) -> str:
    body = {"messages": ASK, "max_tokens": 120, "temperature": 0.8, "seed": 5, **fields}
    (choice,) = httpx.post(demo.url + CHAT, json=body, timeout=60).raise_for_status().json()["choices"]
    assert choice["finish_reason"] == "stop"
    said: str = choice["message"]["content"]
    return said


def refused(demo: Running, **fields: Any) -> tuple[str, str]:
    response = httpx.post(demo.url + CHAT, json={"messages": ASK, "max_tokens": 8, **fields}, timeout=60)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_client_parses_a_model(demo_client: openai.OpenAI, temperature: float) -> None:
    answer = demo_client.chat.completions.parse(
        model="demo", messages=ASK, response_format=Person, temperature=temperature, seed=2, max_tokens=150
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.message.content
    assert isinstance(choice.message.parsed, Person)
    assert list(json.loads(choice.message.content)) == ["name", "code", "pets", "alive"]


def test_a_stream_is_the_same_answer(demo_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": ASK, "temperature": 0.7, "seed": 2, "max_tokens": 150}

    def streamed() -> Any:
        with demo_client.chat.completions.stream(response_format=Person, **asked) as stream:
            return stream.get_final_completion()

    whole, final = at_once(partial(demo_client.chat.completions.parse, response_format=Person, **asked), streamed)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed is not None
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_every_form_is_followed(demo: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    asks: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"response_format": {"type": "json_object"}, "temperature": 0},
        {"structured_outputs": {"json_object": True}, "temperature": 0},
        {"structured_outputs": {"choice": ["red", "green"]}},
        {"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}},
        {"structured_outputs": {"grammar": 'root ::= "<" [a-z]{2,9} ">"'}},
        {"structured_outputs": {"choice": ["<think>x"]}},
        {"response_format": {"type": "text"}, "temperature": 0},
        {"structured_outputs": {"json_object": False}, "temperature": 0},
    ]
    answers = at_once(*(partial(content, demo, **fields) for fields in asks))
    *fitting, some, another, chosen, matched, derived, thought, free, also_free = answers
    assert all(json.loads(answer) in ({"a": 1}, {"a": 2}) for answer in fitting)
    assert isinstance(json.loads(some), dict) and isinstance(json.loads(another), dict)
    assert chosen in ("red", "green")
    assert re.fullmatch(r"\d{3}-[a-f]{2}", matched) and re.fullmatch("<[a-z]{2,9}>", derived)
    assert thought == "<think>x", "no thought, but the answer"
    assert free == also_free


def test_completions_too_with_their_logprobs(demo_client: openai.OpenAI) -> None:
    answer = demo_client.completions.create(
        model="demo",
        prompt="Is it? ",
        n=3,
        logprobs=2,
        temperature=1.0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    for choice in answer.choices:
        assert choice.text in ("yes", "no") and choice.finish_reason == "stop"
        assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.token_logprobs[0] is not None
        assert choice.logprobs.token_logprobs[0] < -1.0, "of the model's own distribution"


def test_what_cannot_be_followed_names_its_field(demo: Running) -> None:
    def of_schema(schema: object) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    where = "response_format.json_schema.schema"
    assert refused(demo, **of_schema({"type": "foo"})) == (
        where,
        f"{where}: the JSON schema cannot be used: Invalid type: foo",
    )
    bad_schemas: list[dict[str, Any]] = [{"not": {}}, {"$ref": "file:///etc/passwd"}, {"enum": []}, {"properties": 7}]
    for schema in bad_schemas:
        assert refused(demo, **of_schema(schema))[0] == where
    for kind, bad in (
        ("regex", "("),
        ("regex", r"[^\s\S]"),
        ("grammar", "root ::= ("),
        ("grammar", "root ::= root"),
        ("json", "{"),
    ):
        assert refused(demo, structured_outputs={kind: bad})[0] == f"structured_outputs.{kind}"
    assert refused(demo, tools=[QUERY], structured_outputs={"regex": "a"})[0] == "structured_outputs.regex"
    both = {"tools": [QUERY], "response_format": {"type": "json_object"}}
    assert content(demo, **both, tool_choice="none", temperature=0).startswith("{")
    assert refused(demo, response_format={"type": "json_object"}, ignore_eos=True)[0] == "ignore_eos"
    assert content(demo, structured_outputs={"choice": ["ok"]}) == "ok", "the next one does not notice"


def test_the_answer_behind_a_thought_fits(demo: Running) -> None:
    """Templates that open thoughts, as Qwen3.5's, that know them, as Qwen3's, and that end them at once."""
    backend = demo.service.backend
    assert backend is not None and isinstance(backend.template, ChatTemplate)
    (end,), (begin,) = backend.tokenizer.encode("</think>"), backend.tokenizer.encode("<think>")

    source = backend.template.source

    def ends_with(ending: str) -> None:
        template = ChatTemplate(source + "{%- if add_generation_prompt %}{{- '" + ending + "' }}{%- endif %}{# <think> #}")
        demo.service.attach(Backend(backend.handle, backend.tokenizer, template))

    def said(**fields: Any) -> dict[str, Any]:
        body = {"messages": ASK, "max_tokens": 150, "seed": 3, "structured_outputs": {"regex": "[ab]{4}"}, **fields}
        (choice,) = httpx.post(demo.url + CHAT, json=body, timeout=60).raise_for_status().json()["choices"]
        assert choice["finish_reason"] == "stop"
        message: dict[str, Any] = choice["message"]
        return message

    try:
        ends_with("<think>\\n")
        asks: list[dict[str, Any]]
        asks = [{"temperature": 0.8}, {"thinking_budget": 4}, {"thinking_budget": 0}, {"logit_bias": {str(end): 20}}]
        for fields, message in zip(asks, at_once(*(partial(said, **fields) for fields in asks)), strict=True):
            assert re.fullmatch("[ab]{4}", message["content"]), message
            assert bool(message.get("reasoning_content")) == (
                fields != {"thinking_budget": 0} and "logit_bias" not in fields
            )
        ends_with("")
        chosen = said(logit_bias={str(begin): 30}, thinking_budget=4)
        assert chosen["reasoning_content"] and re.fullmatch("[ab]{4}", chosen["content"])
        ends_with("<think>\\n\\n</think>\\n\\n")
        ended = said(logit_bias={str(begin): 30})
        assert re.fullmatch("[ab]{4}", ended["content"]) and not ended.get("reasoning_content")
    finally:
        demo.service.attach(backend)
