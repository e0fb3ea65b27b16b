"""What a request may say: the table of fields, and the reading of a JSON body into checked dataclasses.

Every field is of one class. *Supported* fields do what OpenAI's reference says or, for the extras, vLLM's and
llama-server's. *Neutral* fields are accepted and have no effect on the tokens. Everything else is *refused* with a 400 that
names it, except at the value that means "not used": null, or the documented default given in the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any

from paceline.errors import InvalidRequest, PacelineError
from paceline.messages import TYPE_NAMES, check_messages, json_type
from paceline.parsing import Tools, check_tools
from paceline.server.structured import check_structure
from paceline.server.urgency import Urgency
from paceline.types import MAX_CHOICES, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
"""Characters in one stop string. Together the two limits bound what a request can cost the event loop per character."""
MAX_STOP_TOKENS = 1024
"""Token ids in ``stop_token_ids``."""
MAX_TOKEN_IDS = 1024
"""Token ids in ``logit_bias``, ``banned_token_ids`` and ``allowed_token_ids``."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_PROMPTS = 128
"""Prompts in one /v1/completions request."""


class BodyTooLarge(InvalidRequest):
    """A body over the server's limit."""

    status = 413


class HeadersTooLarge(InvalidRequest):
    """More or longer headers than the server reads."""

    status = 431


class UnknownModel(InvalidRequest):
    """A question about a model that this server does not have. (A generation's ``model`` field may say anything.)"""

    status = 404
    code = "model_not_found"


class UnsupportedMediaType(InvalidRequest):
    """A body that does not claim to be JSON."""

    status = 415


class NotReady(PacelineError):
    """The engine is still loading."""

    status = 503
    code = "loading"


class FieldClass(Enum):
    SUPPORTED = "supported"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class Only:
    """Refused, except null and these values, which change nothing."""

    values: tuple[Any, ...] = ()


SUPPORTED, NEUTRAL = FieldClass.SUPPORTED, FieldClass.NEUTRAL
FieldRule = FieldClass | Only

_SHARED: dict[str, FieldRule] = {
    "model": SUPPORTED,
    "max_tokens": SUPPORTED,
    "temperature": SUPPORTED,
    "top_p": SUPPORTED,
    "top_k": SUPPORTED,
    "min_p": SUPPORTED,
    "seed": SUPPORTED,
    "stop": SUPPORTED,
    "stop_token_ids": SUPPORTED,
    "ignore_eos": SUPPORTED,
    "stream": SUPPORTED,
    "stream_options": SUPPORTED,
    "user": NEUTRAL,
    "metadata": NEUTRAL,
    "store": NEUTRAL,
    "service_tier": NEUTRAL,
    "safety_identifier": NEUTRAL,
    "prompt_cache_key": NEUTRAL,
    "cache_prompt": NEUTRAL,
    "n": SUPPORTED,
    "presence_penalty": SUPPORTED,
    "frequency_penalty": SUPPORTED,
    "repetition_penalty": SUPPORTED,
    "repeat_penalty": SUPPORTED,
    "logit_bias": SUPPORTED,
    "min_tokens": SUPPORTED,
    "allowed_token_ids": SUPPORTED,
    "banned_token_ids": SUPPORTED,
    "response_format": SUPPORTED,
    "structured_outputs": SUPPORTED,
    "use_beam_search": Only((False,)),
    "length_penalty": Only((1,)),
    "include_stop_str_in_output": Only((False,)),
    "skip_special_tokens": Only((True,)),
    "spaces_between_special_tokens": Only((True,)),
    "return_token_ids": SUPPORTED,
    "return_tokens_as_token_ids": Only((False,)),
    "priority": SUPPORTED,
    "timeout": SUPPORTED,
}
CHAT_FIELDS: dict[str, FieldRule] = _SHARED | {
    "messages": SUPPORTED,
    "max_completion_tokens": SUPPORTED,
    "tools": SUPPORTED,
    "tool_choice": SUPPORTED,
    "chat_template_kwargs": SUPPORTED,
    "parallel_tool_calls": SUPPORTED,
    "reasoning_effort": SUPPORTED,
    "thinking_budget": SUPPORTED,
    "thinking_token_budget": SUPPORTED,
    "functions": Only(([],)),
    "function_call": Only(("none", "auto")),
    "logprobs": SUPPORTED,
    "top_logprobs": SUPPORTED,
    "modalities": Only((["text"],)),
    "add_generation_prompt": Only((True,)),
    "continue_final_message": Only((False,)),
    "echo": Only((False,)),
}
COMPLETION_FIELDS: dict[str, FieldRule] = _SHARED | {
    "prompt": SUPPORTED,
    "logprobs": SUPPORTED,
    "best_of": Only((1,)),
    "echo": SUPPORTED,
    "suffix": Only(("",)),
    "add_special_tokens": Only((True,)),
}
TOKENIZE_FIELDS: dict[str, FieldRule] = {
    "model": SUPPORTED,
    "content": SUPPORTED,
    "prompt": SUPPORTED,
    "add_special": SUPPORTED,
    "with_pieces": SUPPORTED,
    "parse_special": Only((True,)),
}
DETOKENIZE_FIELDS: dict[str, FieldRule] = {"model": SUPPORTED, "tokens": SUPPORTED}

STREAM_OPTIONS: dict[str, FieldRule] = {
    "include_usage": SUPPORTED,
    "include_obfuscation": NEUTRAL,
    "continuous_usage_stats": Only((False,)),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked body of /v1/chat/completions. ``messages`` are ready for the template: text content, known roles. A thought
    may have ``thinking_budget`` tokens, None for any number. ``reasoning_effort`` is also among ``template_kwargs``."""

    messages: list[dict[str, Any]]
    tools: Tools | None
    template_kwargs: dict[str, Any]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    thinking_budget: int | None = None
    reasoning_effort: str | None = None
    urgency: Urgency = Urgency()
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked body of /v1/completions. A prompt is text or token ids; the reply has ``n`` choices for each, which begin
    with it if ``echo`` is set."""

    prompts: list[str | tuple[int, ...]]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool = False
    urgency: Urgency = Urgency()
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A checked body of /tokenize. ``add_special`` asks for what the file puts in front of texts, ``with_pieces`` for the
    text of each token."""

    text: str
    add_special: bool
    with_pieces: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Strict: NaN and infinities are not JSON."""
    if not body.strip():
        raise InvalidRequest("the request has no body; a JSON object is needed")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {json_type(value)}")
    return value


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Check a body of /v1/chat/completions; ``InvalidRequest`` names the field at fault."""
    check_fields(body, CHAT_FIELDS)
    stream, include_usage = _streaming(body)
    return ChatRequest(
        messages=check_messages(body.get("messages")),
        tools=check_tools(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")),
        template_kwargs=_template_kwargs(body),
        sampling=replace(_sampling(body), logprobs=_chat_logprobs(body)),
        stream=stream,
        include_usage=include_usage,
        thinking_budget=_thinking_budget(body),
        reasoning_effort=_reasoning_effort(body),
        urgency=Urgency.of(body),
        return_token_ids=_flag(body, "return_token_ids"),
    )


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check a body of /v1/completions; ``InvalidRequest`` names the field at fault."""
    check_fields(body, COMPLETION_FIELDS)
    stream, include_usage = _streaming(body)
    prompts, echo = _prompts(body.get("prompt")), _flag(body, "echo")
    sampling = replace(_sampling(body), logprobs=body.get("logprobs"))
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts and n = {sampling.n} make {len(prompts) * sampling.n} choices; "
            f"a request may have {MAX_CHOICES}",
            param="n",
        )
    if echo:
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    ids = _flag(body, "return_token_ids")
    return CompletionRequest(prompts, sampling, stream, include_usage, echo, Urgency.of(body), ids)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check a body of /tokenize. llama-server calls the text ``content``, vLLM ``prompt``."""
    check_fields(body, TOKENIZE_FIELDS)
    expect(str, body, "model")
    given = [expect(str, body, name) for name in ("content", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("one text is needed, as content or as prompt", param="content")
    return TokenizeRequest(given[0], _flag(body, "add_special"), _flag(body, "with_pieces"))


def parse_detokenize(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Check a body of /detokenize: its token ids."""
    check_fields(body, DETOKENIZE_FIELDS)
    expect(str, body, "model")
    tokens = expect(list, body, "tokens")
    if tokens is None or not _is_token_ids(tokens):
        raise InvalidRequest("tokens must be a list of token ids", param="tokens")
    return tuple(tokens)


def check_fields(body: Mapping[str, Any], rules: Mapping[str, FieldRule], prefix: str = "") -> None:
    """Refuse what the rules do not allow; ``prefix`` is where the object stands, with a dot."""
    for name, value in body.items():
        rule = rules.get(name)
        if value is None or isinstance(rule, FieldClass):
            continue
        where = prefix + name
        if rule is None:
            near = "".join(f"; did you mean {prefix + one!r}?" for one in get_close_matches(name, rules, 1))
            raise InvalidRequest(f"unknown field {where!r}{near}", param=where, code="unknown_parameter")
        if not any(_same(value, allowed) for allowed in rule.values):
            allowed = " or ".join(json.dumps(v) for v in (*rule.values, None))
            raise InvalidRequest(
                f"{where} is not supported: it may be {allowed}, got {json.dumps(value)}",
                param=where,
                code="unsupported_parameter",
            )


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty")
    given = {name: body[name] for name in names if body.get(name) is not None}
    sampling = SamplingParams(
        **given,
        stop=_stop(body.get("stop")),
        stop_token_ids=_token_ids(body, "stop_token_ids", MAX_STOP_TOKENS),
        banned_token_ids=_token_ids(body, "banned_token_ids", MAX_TOKEN_IDS),
        allowed_token_ids=_token_ids(body, "allowed_token_ids", MAX_TOKEN_IDS),
        ignore_eos=_flag(body, "ignore_eos"),
        logit_bias=_logit_bias(body),
        structure=check_structure(body),
        **_repetition(body),
    )
    limited = _limit(sampling, body)
    return limited if body.get("min_tokens") is None else replace(limited, min_tokens=body["min_tokens"])


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are wanted beside each; None for no logprobs."""
    wanted, top = _flag(body, "logprobs"), body.get("top_logprobs")
    try:
        top = SamplingParams(logprobs=top).logprobs or 0
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("logprobs", "top_logprobs", 1), param="top_logprobs") from None
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if wanted else None


def _repetition(body: Mapping[str, Any]) -> dict[str, Any]:
    """llama-server calls it ``repeat_penalty``."""
    given = [(name, body[name]) for name in ("repetition_penalty", "repeat_penalty") if body.get(name) is not None]
    if len(given) == 2 and given[0][1] != given[1][1]:
        raise InvalidRequest(
            f"repetition_penalty is {given[0][1]!r} and repeat_penalty is {given[1][1]!r}; they mean the same",
            param="repeat_penalty",
        )
    return {"repetition_penalty": given[0][1]} if given else {}


def _logit_bias(body: Mapping[str, Any]) -> dict[int, Any]:
    """JSON's keys are strings; ``SamplingParams`` checks the numbers."""
    given = expect(dict, body, "logit_bias") or {}
    if len(given) > MAX_TOKEN_IDS:
        raise InvalidRequest(f"logit_bias may hold {MAX_TOKEN_IDS} tokens, got {len(given)}", param="logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias maps token ids to numbers, {key!r} is no token id", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _limit(sampling: SamplingParams, body: Mapping[str, Any]) -> SamplingParams:
    """Add ``max_tokens``, which chat clients also call ``max_completion_tokens``."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        try:
            limited = replace(sampling, max_tokens=value)
        except InvalidRequest as error:
            message = error.message.replace("max_tokens", name, 1)
            raise InvalidRequest(message, param=name) from None
        if sampling.max_tokens not in (None, value):
            raise InvalidRequest(
                f"max_tokens is {sampling.max_tokens} and max_completion_tokens is {value}; they mean the same",
                param="max_completion_tokens",
            )
        sampling = limited
    return sampling


def _stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop may hold {MAX_STOP_STRINGS} strings, got {len(stops)}", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_LENGTH:
        raise InvalidRequest(
            f"a stop string may have {MAX_STOP_LENGTH} characters, one of these has {longest}", param="stop"
        )
    return tuple(stops)


def _token_ids(body: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    """The list as a tuple; ``SamplingParams`` checks the ids."""
    ids = expect(list, body, name) or []
    if len(ids) > most:
        raise InvalidRequest(f"{name} may hold {most} token ids, got {len(ids)}", param=name)
    return tuple(ids)


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    expect(str, body, "model")
    stream = _flag(body, "stream")
    options = expect(dict, body, "stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    check_fields(options, STREAM_OPTIONS, prefix="stream_options.")
    return stream, _flag(options, "include_usage", prefix="stream_options.")


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables; ``reasoning_effort`` is one, and "none" also switches thinking off."""
    kwargs = dict(expect(dict, body, "chat_template_kwargs") or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            where = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{where} is set by the server", param=where)
    effort = _reasoning_effort(body)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if effort == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _reasoning_effort(body: Mapping[str, Any]) -> str | None:
    effort = expect(str, body, "reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}", param="reasoning_effort"
        )
    return effort


def _thinking_budget(body: Mapping[str, Any]) -> int | None:
    """vLLM calls it ``thinking_token_budget``."""
    given = [(name, body[name]) for name in ("thinking_budget", "thinking_token_budget") if body.get(name) is not None]
    for name, budget in given:
        if type(budget) is not int or budget < 0:
            raise InvalidRequest(f"{name} must be a number of tokens from 0, got {budget!r}", param=name)
    if len(given) == 2 and given[0][1] != given[1][1]:
        raise InvalidRequest(
            f"thinking_budget is {given[0][1]} and thinking_token_budget is {given[1][1]}; they mean the same",
            param="thinking_token_budget",
        )
    return given[0][1] if given else None


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    """One prompt (text or token ids) or a list of them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be a string, a list of token ids, or a non-empty list of these", param="prompt")
    if _is_token_ids(value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt may hold {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    prompts: list[str | tuple[int, ...]] = []
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _is_token_ids(prompt)):
            raise InvalidRequest(
                f"prompt[{index}] must be a string or a list of token ids, got {json_type(prompt)}", param="prompt"
            )
        prompts.append(prompt if isinstance(prompt, str) else tuple(prompt))
    return prompts


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(token) is int for token in value)


def expect(kind: type, body: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    """The value of a field, or None; of another JSON type it is refused."""
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        where = prefix + name
        raise InvalidRequest(f"{where} must be {TYPE_NAMES[kind]}, got {json_type(value)}", param=where)
    return value


def _flag(body: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    return bool(expect(bool, body, name, prefix))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
