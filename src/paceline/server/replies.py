"""What the server says: replies of any API, OpenAI's chats and completions, error objects."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.errors import PacelineError
from paceline.parsing import ArgumentsText, CallBegin, ContentText, Event, Message, ThoughtText
from paceline.server.aligned import ScoredToken
from paceline.types import EngineInfo, FinishReason

ReplyReason = FinishReason | Literal["tool_calls"]
"""Why a choice ended; with a tool call, ``tool_calls`` takes the place of ``stop``."""

Tokens = Sequence[int]
"""Token ids."""

MAX_ERROR_LENGTH = 1000
"""Characters of an error message that are sent: a message may quote a value, and a value may be megabytes long."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice; ``logprobs`` is None where nobody asked for them. ``events``: what a chat's text says; ``stop``:
    the stop string that ended it."""

    text: str
    finish_reason: ReplyReason
    logprobs: Sequence[ScoredToken] | None = None
    events: Sequence[Event] = ()
    stop: str | None = None
    prompt: Tokens = ()
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a reply so far; ``thought`` ones are among the ``completion``'s."""

    prompt: int
    completion: int
    thought: int


class Reply(Protocol):
    """One reply in the words of an API: whole as one object, streamed as events."""

    ends_with_done: bool
    """Whether a last event ``[DONE]`` ends the stream."""

    def final(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The one object of a reply that is not streamed."""

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        """What a stream says before the first token. ``prompts``: of each choice."""

    def chunks(
        self, index: int, text: str, events: Sequence[Event], logprobs: Sequence[ScoredToken], tokens: Tokens
    ) -> list[dict[str, Any]]:
        """More of a choice: its text or, of a chat, what that says, and the tokens generated."""

    def end(self, index: int, finish_reason: ReplyReason, stop: str | None) -> list[dict[str, Any]]:
        """The end of a choice, and the stop string if one ended it."""

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """What a stream says when all choices have ended."""

    def failed(self, error: PacelineError) -> list[dict[str, Any]]:
        """How a stream ends that cannot go on."""


class _Choices(Reply):
    """Objects of one reply of chats or completions: they share id, time, model and fingerprint. Subclasses say what a choice
    looks like."""

    ends_with_done = True
    id_prefix: str
    whole: str
    part: str

    def __init__(self, info: EngineInfo, include_usage: bool = False, return_token_ids: bool = False) -> None:
        self._include_usage, self._return_token_ids = include_usage, return_token_ids
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": printable(info.model_name),
            "system_fingerprint": info.fingerprint,
        }

    def final(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return self._head | {
            "object": self.whole,
            "choices": [
                self._choice(index, choice)
                | {"logprobs": self._logprobs(choice.logprobs)}
                | self._ids("token_ids", choice.tokens)
                for index, choice in enumerate(choices)
            ],
            "usage": _usage(usage),
        }

    def chunks(
        self, index: int, text: str, events: Sequence[Event], logprobs: Sequence[ScoredToken], tokens: Tokens
    ) -> list[dict[str, Any]]:
        """As chunks of which the first carries the logprobs and the token ids."""
        ids = self._ids("token_ids", tokens) if tokens else {}
        deltas = self._deltas(text, events) or ([self._delta_of_text("")] if logprobs or ids else [])
        parts = [self._part(index, delta, None, logprobs if number == 0 else ()) for number, delta in enumerate(deltas)]
        for part in parts[:1]:
            part["choices"][0] |= ids
        return parts

    def end(self, index: int, finish_reason: ReplyReason, stop: str | None) -> list[dict[str, Any]]:
        return [self._part(index, self._delta_of_text(""), finish_reason)]

    def _part(
        self, index: int, delta: dict[str, Any], finish_reason: ReplyReason | None, logprobs: Sequence[ScoredToken] = ()
    ) -> dict[str, Any]:
        rest = {"logprobs": self._logprobs(logprobs or None), "finish_reason": finish_reason}
        return self._chunk([{"index": index} | delta | rest])

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """Usage, if it is asked for, in a chunk without choices."""
        return [self._chunk([]) | {"usage": _usage(usage)}] if self._include_usage else []

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        return []

    def _ids(self, name: str, tokens: Tokens) -> dict[str, Any]:
        """Token ids where and as vLLM has them; nothing if they are not asked for."""
        return {name: list(tokens)} if self._return_token_ids else {}

    def failed(self, error: PacelineError) -> list[dict[str, Any]]:
        return [error_object(error)]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"object": self.part, "choices": choices}
        # OpenAI's clients expect the key in every chunk once they have asked for usage.
        return chunk | {"usage": None} if self._include_usage else chunk

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, text: str, events: Sequence[Event]) -> list[dict[str, Any]]:
        return [self._delta_of_text(text)] if text else []

    def _delta_of_text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatReply(_Choices):
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            | (self._ids("prompt_token_ids", prompt) if index == 0 else {})
            for index, prompt in enumerate(prompts)
        ]

    def final(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return super().final(choices, usage) | self._ids("prompt_token_ids", choices[0].prompt)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        said = Message.of(choice.events)
        message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.calls else "")}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["tool_calls"] = [_call(name, arguments) for name, arguments in said.calls]
        return {"index": index, "message": message, "finish_reason": choice.finish_reason}

    def _deltas(self, text: str, events: Sequence[Event]) -> list[dict[str, Any]]:
        return [{"delta": _delta_of(event)} for event in events]

    def _delta_of_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            _token(token.token, token.logprob) | {"top_logprobs": [_token(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionReply(_Choices):
    id_prefix = "cmpl"
    whole = part = "text_completion"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        said = {"index": index, "text": choice.text, "finish_reason": choice.finish_reason}
        return said | self._ids("prompt_token_ids", choice.prompt)

    def opening(self, prompts: Sequence[Tokens], usage: Usage) -> list[dict[str, Any]]:
        self._untold = dict(enumerate(prompts))
        return []

    def chunks(
        self, index: int, text: str, events: Sequence[Event], logprobs: Sequence[ScoredToken], tokens: Tokens
    ) -> list[dict[str, Any]]:
        """The first chunk of a choice carries the ids of its prompt."""
        parts = super().chunks(index, text, events, logprobs, tokens)
        if parts and index in self._untold:
            parts[0]["choices"][0] |= self._ids("prompt_token_ids", self._untold.pop(index))
        return parts

    def _delta_of_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [_name(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _delta_of(event: Event) -> dict[str, Any]:
    match event:
        case ContentText(text):
            return {"content": text}
        case ThoughtText(text):
            return {"reasoning_content": text}
        case CallBegin(index, name):
            return {"tool_calls": [{"index": index} | _call(name, "")]}
        case ArgumentsText(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call with an id of its own."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


def _name(token: bytes) -> str:
    """A token's text; of one that ends inside a character its bytes, as OpenAI writes them, which keeps names apart."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _likeliest(token: ScoredToken) -> dict[str, float] | None:
    """The likeliest tokens and, as in OpenAI's API, always the one that is there."""
    if token.logprob is None:
        return None
    return {_name(other): logprob for other, logprob in (*token.top, (token.token, token.logprob))}


def _usage(usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    return counts | ({"completion_tokens_details": {"reasoning_tokens": usage.thought}} if usage.thought else {})


def error_object(error: PacelineError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": quotable(error.message),
            "type": error.kind,
            "param": None if error.param is None else quotable(error.param),
            "code": error.code,
        }
    }


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_object(error: PacelineError) -> dict[str, Any]:
    """Anthropic's error object. It has no place for the field at fault, which the message names."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": quotable(error.message)}}


def dump(value: dict[str, Any] | list[Any]) -> bytes:
    """The value as JSON. Surrogates are escaped: a client's own text may hold them, and UTF-8 cannot carry them."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def quotable(text: str) -> str:
    """A message as it may be sent: of bounded length, and printable."""
    return printable(text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "…")


def printable(text: str) -> str:
    """The text with surrogates escaped, which UTF-8 cannot carry: a client may send them, a file's name may hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
