"""What the other APIs share on their way to a chat: each turns its body into one of /v1/chat/completions, which is checked
and answered as ever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.errors import InvalidRequest
from paceline.messages import json_type
from paceline.server.protocol import SUPPORTED, FieldRule, check_fields

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "logit_bias",
    "min_tokens",
    "allowed_token_ids",
    "banned_token_ids",
    "structured_outputs",
    "chat_template_kwargs",
    "priority",
    "timeout",
    "stream",
    "model",
)
"""Fields that mean in every API what they mean in a chat, most of them extensions of it."""
SHARED_RULES: dict[str, FieldRule] = dict.fromkeys(SHARED, SUPPORTED)


def shared(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a chat has as well."""
    return {name: body[name] for name in SHARED if body.get(name) is not None}


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the chat name the field that it was made of. Keys are regular expressions that match the
    beginning of a field's name; the first that does counts."""
    try:
        yield
    except InvalidRequest as error:
        for pattern, own in names.items():
            if error.param is not None and re.match(pattern, error.param):
                message, param = (re.sub(pattern, own, text, count=1) for text in (error.message, error.param))
                raise InvalidRequest(message, param=param, code=error.code) from None
        raise


def an_object(value: object, where: str) -> dict[str, Any]:
    """The value, which must be a JSON object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, got {json_type(value)}", param=where)
    return value


def objects(value: object, where: str) -> list[tuple[dict[str, Any], str]]:
    """The objects of a list, each with its place; none if it is missing."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list, got {json_type(value)}", param=where)
    return [(an_object(item, f"{where}[{index}]"), f"{where}[{index}]") for index, item in enumerate(value)]


def a_string(value: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an object at ``where``, which must be there and be a string."""
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{name} must be a string, got {json_type(text)}", param=f"{where}.{name}")
    return text


def text_of(value: object, where: str, kinds: Mapping[str, Mapping[str, FieldRule]]) -> str:
    """A text, or a list of parts that hold one, joined. ``kinds`` are the types that a part may have, with its fields."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts, got {json_type(value)}", param=where)
    texts = []
    for part, place in objects(value, where):
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise InvalidRequest(f"{place}.type must be {' or '.join(kinds)}, got {kind!r}", param=f"{place}.type")
        check_fields(part, kinds[kind], prefix=f"{place}.")
        texts.append(a_string(part, "text", place))
    return "".join(texts)


def system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the system messages at the beginning in one: templates know one, and only there."""
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]
