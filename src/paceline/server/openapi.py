"""The OpenAPI document: every route, and every field of its body. It is made of the tables by which bodies are checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastapi.routing import APIRoute

from paceline.config import build_name
from paceline.server import schemas
from paceline.server.anthropic_input import COUNT_FIELDS, MESSAGES_FIELDS
from paceline.server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, DETOKENIZE_FIELDS, TOKENIZE_FIELDS, FieldRule
from paceline.server.responses_input import RESPONSES_FIELDS

KEYLESS = ("/health", "/metrics")
"""Whoever watches a server needs no key."""


class Body(NamedTuple):
    """The fields of a route's body, what their values are, and which must be there."""

    fields: Mapping[str, FieldRule]
    values: Mapping[str, schemas.Schema]
    required: tuple[str, ...]


BODIES = {
    "/v1/chat/completions": Body(CHAT_FIELDS, schemas.CHAT, ("messages",)),
    "/v1/completions": Body(COMPLETION_FIELDS, schemas.COMPLETION, ("prompt",)),
    "/v1/responses": Body(RESPONSES_FIELDS, schemas.RESPONSES, ("input",)),
    "/v1/messages": Body(MESSAGES_FIELDS, schemas.MESSAGES, ("messages", "max_tokens")),
    "/v1/messages/count_tokens": Body(COUNT_FIELDS, schemas.MESSAGES, ("messages",)),
    "/tokenize": Body(TOKENIZE_FIELDS, schemas.TOKENIZE, ()),
    "/detokenize": Body(DETOKENIZE_FIELDS, schemas.DETOKENIZE, ("tokens",)),
    "/apply-template": Body(CHAT_FIELDS, schemas.CHAT, ("messages",)),
}
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def document(routes: Iterable[APIRoute]) -> dict[str, Any]:
    """What these routes accept and answer."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in route.methods or ():
            paths.setdefault(path, {})[method.lower()] = _operation(path, method, route.name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": build_name().split()[1]},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, method: str, name: str) -> dict[str, Any]:
    shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"description": "An error", "content": _json({"$ref": f"#/components/schemas/{shape}"})}
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {"200": {"description": "The answer", "content": _answer(path)}, "4XX": error, "5XX": error},
        "security": [] if path in KEYLESS else [{"bearer": []}, {"key": []}, {}],
    }
    if method == "POST":
        body = BODIES[path]
        made = schemas.made_of(body.fields, body.values, body.required)
        operation["requestBody"] = {"required": True, "content": _json(made)}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schemas.TEXT}]
    return operation


def _answer(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": schemas.TEXT}}
    whole = _json(schemas.array(schemas.OBJECT) if path == "/slots" else schemas.OBJECT)
    return whole | ({"text/event-stream": {"schema": schemas.TEXT}} if path in _STREAMS else {})


def _json(schema: schemas.Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _an_object(**properties: schemas.Schema) -> schemas.Schema:
    return {"type": "object", "required": [*properties], "properties": properties}


_MAYBE_TEXT = {"type": ["string", "null"]}
_ERROR = _an_object(error=_an_object(message=schemas.TEXT, type=schemas.TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT))
_ANTHROPIC_ERROR = _an_object(
    type=schemas.one_of("error"), error=_an_object(type=schemas.TEXT, message=schemas.TEXT), request_id=schemas.TEXT
)
