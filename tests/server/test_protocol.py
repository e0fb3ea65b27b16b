from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.parsing import Tools
from paceline.server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_PROMPTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    FieldClass,
    Only,
    parse_chat,
    parse_completion,
    parse_json,
)
from paceline.types import MAX_CHOICES, MAX_LOGPROBS

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


@pytest.mark.parametrize("name", [name for name, rule in CHAT_FIELDS.items() if rule is FieldClass.NEUTRAL])
def test_neutral_fields_change_nothing(name: str) -> None:
    assert parse_chat(chat(**{name: "anything"})) == parse_chat(chat())


@pytest.mark.parametrize("table", [CHAT_FIELDS, COMPLETION_FIELDS], ids=["chat", "completions"])
def test_refused_fields_are_neutral_at_their_defaults_and_named_otherwise(table: dict[str, Any]) -> None:
    base: dict[str, Any] = chat() if table is CHAT_FIELDS else {"prompt": "hello"}
    parse: Any = parse_chat if table is CHAT_FIELDS else parse_completion
    refused = {name: rule for name, rule in table.items() if isinstance(rule, Only)}
    assert refused
    for name, rule in refused.items():
        for value in (None, *rule.values):
            assert parse(base | {name: value}) == parse(base)
        with pytest.raises(InvalidRequest, match=name) as caught:
            parse(base | {name: 17})
        assert caught.value.param == name


def test_an_unknown_field_is_refused_unless_null() -> None:
    assert parse_chat(chat(frobnicate=None)) == parse_chat(chat())
    with pytest.raises(InvalidRequest, match="frobnicate") as caught:
        parse_chat(chat(frobnicate=False))
    assert caught.value.param == "frobnicate"


def test_true_is_not_one() -> None:
    with pytest.raises(InvalidRequest, match="length_penalty is not supported"):
        parse_chat(chat(length_penalty=True))


def test_sampling_fields_arrive() -> None:
    sampling = parse_chat(
        chat(
            temperature=0,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=0,
            max_tokens=7,
            stop="END",
            stop_token_ids=[3],
            ignore_eos=True,
        )
    ).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.9, 40, 0.05)
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (0, 7, ("END",))
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3,), True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": "a" * (MAX_STOP_LENGTH + 1)}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        pytest.param({"stop_token_ids": [5] * (MAX_STOP_TOKENS + 1)}, "stop_token_ids", id="too many stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": "2"}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_budget": 1, "thinking_token_budget": 2}, "thinking_token_budget"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 32_769}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repeat_penalty": 0}, "repetition_penalty"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"banned_token_ids": 3}, "banned_token_ids"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(**fields))
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[0] in caught.value.message


def test_both_names_of_max_tokens_may_agree() -> None:
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=5)).sampling.max_tokens == 5
    assert parse_chat(chat(max_completion_tokens=5)).sampling.max_tokens == 5


def test_messages_are_made_ready_for_the_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    parsed_call = CALL | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert parse_chat({"messages": messages}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [parsed_call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "mood": "blue"}, "messages[0].mood"),
    ],
    ids=str,
)
def test_bad_messages_are_refused_with_their_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat({"messages": [message]})
    assert caught.value.param == param


@pytest.mark.parametrize("messages", [None, [], "hello", {}], ids=str)
def test_messages_must_be_a_non_empty_list(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        parse_chat({"messages": messages})


def test_tool_choice_none_shows_no_tools() -> None:
    assert parse_chat(chat(tools=[TOOL])).tools == Tools((TOOL,))
    assert parse_chat(chat(tools=[TOOL], tool_choice="auto")).tools == Tools((TOOL,))
    assert parse_chat(chat(tools=[TOOL], tool_choice="none")).tools is None


def test_thinking_is_the_templates_and_the_budgets_matter() -> None:
    asked = parse_chat(chat(reasoning_effort="none", thinking_budget=0))
    assert asked.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    assert asked.thinking_budget == 0
    asked = parse_chat(chat(reasoning_effort="low", thinking_token_budget=9, chat_template_kwargs={"reasoning_effort": "x"}))
    assert (asked.template_kwargs, asked.thinking_budget) == ({"reasoning_effort": "x"}, 9)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [2]], ["a", (2,)]),
    ],
    ids=str,
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert parse_completion({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [1, "a"], [True], [["a"]], ["a"] * (MAX_PROMPTS + 1)], ids=str)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion({"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"{", b"[]", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"]
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(body)


def test_a_json_object_is_read() -> None:
    assert parse_json(json.dumps({"a": [1, "ü"]}).encode()) == {"a": [1, "ü"]}


def test_penalties_biases_and_bans() -> None:
    sampling = parse_chat(
        chat(
            presence_penalty=0.5,
            frequency_penalty=-1,
            repeat_penalty=1.1,
            logit_bias={"7": -100, "12": 2.5},
            min_tokens=3,
            max_tokens=9,
            banned_token_ids=[1, 2],
            allowed_token_ids=[3, 4],
        )
    ).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1, 1.1)
    assert sampling.logit_bias == {7: -100, 12: 2.5} and (sampling.min_tokens, sampling.max_tokens) == (3, 9)
    assert sampling.banned_token_ids == (1, 2) and sampling.allowed_token_ids == (3, 4)


def test_logprobs_of_chat_and_completions() -> None:
    assert [parse_chat(chat(**fields)).sampling.logprobs for fields in ({}, {"logprobs": False, "top_logprobs": 0})] == [
        None
    ] * 2
    assert parse_chat(chat(logprobs=True)).sampling.logprobs == 0
    assert parse_chat(chat(logprobs=True, top_logprobs=5)).sampling.logprobs == 5
    assert parse_completion({"prompt": "a", "logprobs": 0}).sampling.logprobs == 0
    assert parse_completion({"prompt": "a", "logprobs": 2}).sampling.prompt_logprobs is None
    echoed = parse_completion({"prompt": "a", "logprobs": 2, "echo": True})
    assert echoed.echo and echoed.sampling.prompt_logprobs == 2
    for value in (True, MAX_LOGPROBS + 1, -1):
        with pytest.raises(InvalidRequest) as error:
            parse_completion({"prompt": "a", "logprobs": value})
        assert error.value.param == "logprobs"


def test_the_choices_of_all_prompts_are_counted_together() -> None:
    assert parse_completion({"prompt": ["a", "b"], "n": MAX_CHOICES // 2}).sampling.n == MAX_CHOICES // 2
    with pytest.raises(InvalidRequest, match="2 prompts and n = 65 make 130 choices; a request may have 128"):
        parse_completion({"prompt": ["a", "b"], "n": 65})
    with pytest.raises(InvalidRequest, match="best_of is not supported"):
        parse_completion({"prompt": "a", "n": 2, "best_of": 3})
