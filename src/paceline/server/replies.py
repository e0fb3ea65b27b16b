"""What the server says: OpenAI's reply, chunk and error objects."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.server.aligned import ScoredToken
from paceline.types import EngineInfo, FinishReason

MAX_ERROR_LENGTH = 1000
"""Characters of an error message that are sent: a message may quote a value, and a value may be megabytes long."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice; ``logprobs`` is None where nobody asked for them."""

    text: str
    finish_reason: FinishReason
    logprobs: Sequence[ScoredToken] | None = None


class Reply:
    """Objects of one reply: they share id, time, model and fingerprint. Subclasses say what a choice looks like."""

    id_prefix: str
    whole: str
    part: str

    def __init__(self, info: EngineInfo) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": printable(info.model_name),
            "system_fingerprint": info.fingerprint,
        }

    def final(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The one object of a reply that is not streamed."""
        return self._head | {
            "object": self.whole,
            "choices": [
                self._choice(index, choice) | {"logprobs": self._logprobs(choice.logprobs)}
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }

    def chunk(
        self, index: int, text: str, finish_reason: FinishReason | None, logprobs: Sequence[ScoredToken] = ()
    ) -> dict[str, Any]:
        """One chunk of a stream: more text of a choice with the logprobs of its tokens, or its end."""
        return self._chunk([self._delta(index, text, finish_reason) | {"logprobs": self._logprobs(logprobs or None)}])

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage: no choices."""
        return self._chunk([]) | {"usage": usage}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """What a stream says before the first token."""
        return []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.part, "choices": choices}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def opening(self, choices: int) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            for index in range(choices)
        ]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        return {"index": index, "message": message, "finish_reason": choice.finish_reason}

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            _token(token.token, token.logprob) | {"top_logprobs": [_token(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    id_prefix = "cmpl"
    whole = part = "text_completion"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return self._delta(index, choice.text, choice.finish_reason)

    def _delta(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [_name(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


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


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_object(error: PacelineError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {
            "message": _quotable(error.message),
            "type": error.kind,
            "param": None if error.param is None else _quotable(error.param),
            "code": error.code,
        }
    }


def dump(value: dict[str, Any] | list[Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _quotable(text: str) -> str:
    return printable(text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "…")


def printable(text: str) -> str:
    """The text with surrogates escaped, which UTF-8 cannot carry: a client may send them, a file's name may hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
