"""The OpenAPI document says what the routes accept: every field of the tables, with the bounds that are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from scripted import running

from paceline.errors import InvalidRequest
from paceline.server.anthropic_input import parse_count, parse_messages
from paceline.server.openapi import BODIES
from paceline.server.protocol import NEUTRAL, Only, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from paceline.server.responses_input import parse_responses

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
LEAST: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (parse_chat, CHAT),
    "/v1/completions": (parse_completion, {"prompt": "hello"}),
    "/v1/responses": (parse_responses, {"input": "hello"}),
    "/v1/messages": (parse_messages, CHAT | {"max_tokens": 9}),
    "/v1/messages/count_tokens": (parse_count, CHAT),
    "/tokenize": (parse_tokenize, {"content": "hello"}),
    "/detokenize": (parse_detokenize, {"tokens": [1]}),
    "/apply-template": (parse_chat, CHAT),
}
"""How a body is read, and the least that it may be."""
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 10, "max_output_tokens": 10},
}
"""What some fields need beside them."""


@pytest.fixture(scope="module")
def document() -> Any:
    with running() as server:
        return httpx.get(f"{server.url}/openapi.json").json()


def schema_of(document: Any, path: str) -> Any:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_every_route_is_there_with_every_field(document: Any) -> None:
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posts == set(BODIES) == set(LEAST)
    gets = {path for path, methods in document["paths"].items() if "get" in methods}
    assert gets == {"/v1/models", "/v1/models/{name}", "/props", "/slots", "/health", "/metrics"}
    for path, body in BODIES.items():
        assert set(schema_of(document, path)["properties"]) == set(body.fields)
        assert schema_of(document, path)["additionalProperties"] is False


def test_it_needs_a_key_where_others_do() -> None:
    with running(api_keys=("secret",)) as server:
        url = f"{server.url}/openapi.json"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"x-api-key": "secret"}).status_code == 200


def refused(path: str, field: str, value: Any) -> bool:
    parse, least = LEAST[path]
    beside = {name: given for name, given in BESIDE.get(field, {}).items() if name in BODIES[path].fields}
    try:
        parse(least | beside | {field: value})
    except InvalidRequest:
        return True
    return False


def options(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from schema.get("anyOf", [schema])


def bounds(document: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """(path, field, a value at a bound or none, a value beyond it)."""
    for path in BODIES:
        for field, schema in schema_of(document, path)["properties"].items():
            for option in options(schema):
                step = 1 if option.get("type") == "integer" else 0.001
                if "minimum" in option:
                    yield path, field, option["minimum"], option["minimum"] - step
                if "exclusiveMinimum" in option:
                    yield path, field, option["exclusiveMinimum"] + step, option["exclusiveMinimum"]
                if "maximum" in option:
                    yield path, field, option["maximum"], option["maximum"] + step
                if "maxItems" in option and option["items"].get("type") == "integer":
                    yield path, field, [1] * option["maxItems"], [1] * (option["maxItems"] + 1)
                if "minItems" in option:
                    yield path, field, None, []


def test_bounds_are_those_that_are_checked(document: Any) -> None:
    cases = list(bounds(document))
    assert len(cases) > 100
    for path, field, at, beyond in cases:
        if at is not None:
            assert not refused(path, field, at), f"{path}: {field} = {at}"
        assert refused(path, field, beyond), f"{path}: {field} = {beyond}"


def test_types_are_those_that_are_checked(document: Any) -> None:
    """A value of a type that the document does not name is refused; null never is, nor what changes nothing."""
    samples = {"string": "text", "boolean": True, "integer": 3, "array": [{}], "object": {"a": 1}}
    for path, body in BODIES.items():
        for field, schema in schema_of(document, path)["properties"].items():
            rule = body.fields[field]
            if field not in body.required:
                assert not refused(path, field, None) or field == "content", f"{path}: {field} = null"
            if isinstance(rule, Only):
                assert not any(refused(path, field, value) for value in rule.values), f"{path}: {field}"
                assert refused(path, field, "something else"), f"{path}: {field}"
                continue
            if rule is NEUTRAL:
                assert not refused(path, field, samples["object"]), f"{path}: {field}"
                continue
            kinds = {_kind(option) for option in options(schema)}
            for kind, sample in samples.items():
                if kind not in kinds and not (kind == "integer" and "number" in kinds):
                    assert refused(path, field, sample), f"{path}: {field} = {sample!r}"


def _kind(option: Mapping[str, Any]) -> str:
    """Of nested alternatives that of the first: all are of one type, but for enumerations of names."""
    if "anyOf" in option:
        return _kind(option["anyOf"][0])
    return option.get("type", "string")


def test_fields_that_must_be_there(document: Any) -> None:
    for path, body in BODIES.items():
        for field in body.required:
            parse, least = LEAST[path]
            with pytest.raises(InvalidRequest) as missing:
                parse({name: value for name, value in least.items() if name != field})
            assert field in missing.value.message
