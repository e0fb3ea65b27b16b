"""What the soak asks: answers that can be told in advance, and requests that must be refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.bench.artefact import load_workload

Body = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
VERBOSE = "verbose"
"""The kind of answers that fill the buffers between a server and a client that does not read."""
LONG = 330
"""Tokens of the longest answers: more than a lane has room reserved for, so that pages run out."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": _PARAMETERS}
_OTHER = {"name": "add", "description": "Adds numbers", "parameters": {"type": "object"}}
_OUTPUTS: list[Body] = [
    {"regex": "[A-F]{3}-[0-9]{4}( or [A-F]{3}-[0-9]{4}){2,5}"},
    {"choice": ["yes, of course", "no, never", "perhaps"]},
    {"json": _SCHEMA},
    {"grammar": 'root ::= "(" item ("," item)* ")"\nitem ::= [a-z]+ | [0-9]+'},
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose answer depends on nothing else. ``kinds`` name what is special about it."""

    path: str
    body: Body
    kinds: tuple[str, ...]


def catalogue(count: int, seed: int) -> list[Asked]:
    """``count`` requests, all different."""
    dice = random.Random(seed)
    texts = [message["content"] for entry in load_workload() for message in entry["messages"]]
    verbose = [_verbose(dice, texts, number) for number in range(count // 50)]
    return verbose + [
        _MAKERS[dice.choices([*_MAKERS], [5, 4, 2, 2])[0]](dice, texts, number) for number in range(len(verbose), count)
    ]


def _verbose(dice: random.Random, texts: list[str], number: int) -> Asked:
    body: Body = {"seed": number, "max_tokens": LONG, "ignore_eos": True, "return_token_ids": True}
    return Asked(
        CHAT, body | {"messages": _messages(dice, texts), "logprobs": True, "top_logprobs": 20}, (VERBOSE, "logprobs")
    )


def _chat(dice: random.Random, texts: list[str], number: int) -> Asked:
    body, kinds = _openai(dice, number)
    body["messages"] = _messages(dice, texts)
    if dice.random() < 0.2:
        choice = dice.choice(["auto", "required", {"type": "function", "function": {"name": "weather"}}])
        tools = [{"type": "function", "function": function} for function in (_FUNCTION, _OTHER)]
        body |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": dice.random() < 0.5}
        body.pop("ignore_eos", None)
        kinds.append("tools")
    elif dice.random() < 0.2:
        body["response_format"] = dice.choice(
            [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}]
        )
        body.pop("ignore_eos", None)
        kinds.append("structured")
    if dice.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": dice.choice([0, 2, 20])}
        kinds.append("logprobs")
    if dice.random() < 0.1:
        body["thinking_budget"] = dice.randrange(4)
        kinds.append("thinking budget")
    return Asked(CHAT, body, tuple(kinds))


def _completion(dice: random.Random, texts: list[str], number: int) -> Asked:
    body, kinds = _openai(dice, number)
    prompts = [_text(dice, texts) for _ in range(dice.choice([1, 1, 1, 2]))]
    body["prompt"] = (
        prompts if len(prompts) > 1 else dice.choice([prompts[0], [dice.randrange(1000, 16000) for _ in range(40)]])
    )
    if dice.random() < 0.25:
        body["logprobs"] = dice.choice([0, 1, 5])
        kinds.append("logprobs")
        if dice.random() < 0.5:
            body["echo"] = True
            kinds.append("echo")
    if dice.random() < 0.25:
        body["structured_outputs"] = dice.choice(_OUTPUTS)
        body.pop("ignore_eos", None)
        kinds.append("structured")
    return Asked(COMPLETIONS, body, tuple(kinds))


def _response(dice: random.Random, texts: list[str], number: int) -> Asked:
    body, kinds = _sampling(dice, number)
    body["max_output_tokens"] = body.pop("max_tokens")
    body |= {"input": _text(dice, texts), "instructions": dice.choice(["Be brief.", "Answer in verse."])}
    if dice.random() < 0.3:
        body |= {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": dice.choice(["auto", "required"])}
        body.pop("ignore_eos", None)
        kinds.append("tools")
    elif dice.random() < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}
        body.pop("ignore_eos", None)
        kinds.append("structured")
    return Asked(RESPONSES, body, tuple(kinds))


def _message(dice: random.Random, texts: list[str], number: int) -> Asked:
    body, kinds = _sampling(dice, number)
    body |= {"messages": _messages(dice, texts), "system": "You are brief."}
    if "stop" in body:
        body["stop_sequences"] = body.pop("stop")
    if dice.random() < 0.3:
        schema = {"name": "weather", "input_schema": _PARAMETERS}
        body |= {"tools": [schema], "tool_choice": {"type": dice.choice(["auto", "any"])}}
        body.pop("ignore_eos", None)
        kinds.append("tools")
    return Asked(MESSAGES, body, tuple(kinds))


_Maker = Callable[[random.Random, list[str], int], Asked]
_MAKERS: dict[str, _Maker] = {"chat": _chat, "completion": _completion, "response": _response, "message": _message}


def _openai(dice: random.Random, number: int) -> tuple[Body, list[str]]:
    body, kinds = _sampling(dice, number)
    body["return_token_ids"] = True
    if dice.random() < 0.15:
        body["n"] = dice.choice([2, 3, 5])
        body["max_tokens"] = min(body["max_tokens"], 40)
        kinds.append("n")
    return body, kinds


def _sampling(dice: random.Random, number: int) -> tuple[Body, list[str]]:
    long = dice.random() < 0.04
    body: Body = {"seed": number, "max_tokens": LONG if long else dice.choice([1, 4, 12, 24, 40])}
    kinds = ["long"] if long else []
    body["temperature"] = dice.choice([0, 0, 0.7, 1.0, 1.4])
    kinds.append("sampled" if body["temperature"] else "greedy")
    for chance, kind, field in (
        (0.15, "penalties", {"presence_penalty": 0.8, "frequency_penalty": -0.3}),
        (0.15, "penalties", {"repetition_penalty": dice.choice([0.8, 1.3])}),
        (0.10, "bias", {"logit_bias": {str(dice.randrange(16000)): dice.choice([-100, 2, 5]) for _ in range(3)}}),
        (0.10, "bias", {"banned_token_ids": [dice.randrange(16000) for _ in range(20)]}),
        (0.10, "bias", {"min_tokens": min(6, body["max_tokens"])}),
        (0.20, "stop", {"stop": dice.sample([" the", "\n", "e", "is a", ". "], 2)}),
        (0.20, "filters", {"top_p": 0.9, "top_k": dice.choice([5, 40]), "min_p": 0.02}),
        (0.30 if not long else 1.0, "long run", {"ignore_eos": True}),
    ):
        if dice.random() < chance:
            body |= field
            kinds.append(kind)
    return body, kinds


def _messages(dice: random.Random, texts: list[str]) -> list[Body]:
    said: list[Body] = [{"role": "user", "content": _text(dice, texts)}]
    if dice.random() < 0.3:
        said += [{"role": "assistant", "content": _text(dice, texts)[:200]}, {"role": "user", "content": "Go on."}]
    return said


def _text(dice: random.Random, texts: list[str]) -> str:
    """Of some characters, or of several prefill chunks."""
    text = dice.choice(texts)
    begin = dice.randrange(max(1, len(text) // 2))
    return text[begin : begin + dice.choice([8, 60, 200, 200, 900])] or "hello"


def refused(dice: random.Random) -> tuple[str, bytes, int]:
    """(path, body, status) of a request that is wrong."""
    path, body, status = dice.choice(_WRONG)
    return path, body if isinstance(body, bytes) else json.dumps(body).encode(), status


_HELLO = {"prompt": "hello"}
_HI = {"messages": [{"role": "user", "content": "hi"}]}
_WRONG: list[tuple[str, Mapping[str, Any] | bytes, int]] = [
    (CHAT, b"", 400),
    (CHAT, b"{", 400),
    (CHAT, b"[" * 100_000, 400),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    (COMPLETIONS, {}, 400),
    (COMPLETIONS, {"prompt": [10**9]}, 400),
    (COMPLETIONS, {"prompt": "a " * 5000}, 400),
    (COMPLETIONS, _HELLO | {"n": 1000}, 400),
    (COMPLETIONS, _HELLO | {"temprature": 1}, 400),
    (COMPLETIONS, _HELLO | {"best_of": 3}, 400),
    (COMPLETIONS, _HELLO | {"structured_outputs": {"regex": "(("}}, 400),
    (COMPLETIONS, _HELLO | {"structured_outputs": {"grammar": "root ::= nothing"}}, 400),
    (COMPLETIONS, _HELLO | {"structured_outputs": {"json": {"type": "nonsense"}}}, 400),
    (CHAT, _HI | {"tool_choice": "required"}, 400),
    (CHAT, _HI | {"logit_bias": {"99999999": 1}}, 400),
    (CHAT, _HI | {"top_logprobs": 3}, 400),
    (RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}, 400),
    (MESSAGES, _HI, 400),
    ("/v1/nothing", {}, 404),
    ("/health", {}, 405),
]
