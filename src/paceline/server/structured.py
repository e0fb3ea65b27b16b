"""The fields that ask for an answer of a given structure: OpenAI's ``response_format``, vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.messages import TYPE_NAMES, json_type
from paceline.types import Structure

MAX_CHOICES = 1024
"""Texts in ``structured_outputs.choice``."""
_FORM = "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def check_structure(body: Mapping[str, Any]) -> Structure | None:
    """What the fields of a body ask for; None for free text. ``InvalidRequest`` names the field at fault. Whether a schema
    or a grammar is sound is seen when it is compiled."""
    wanted, given = _of_format(body.get("response_format")), _of_outputs(body.get(_FORM))
    if wanted is not None and given is not None:
        raise InvalidRequest(f"response_format and {_FORM} cannot both be given", param=_FORM)
    return wanted or given


def _of_format(form: object) -> Structure | None:
    where = "response_format"
    if form is None:
        return None
    form = _object(form, where)
    kind = form.get("type")
    if kind == "text":
        _fields(form, where, "type")
        return None
    if kind == "json_object":  # llama-server takes a schema here
        _fields(form, where, "type", "schema")
        schema = form.get("schema")
        return Structure.json_object(where) if schema is None else _json(schema, f"{where}.schema")
    if kind == "json_schema":
        _fields(form, where, "type", "json_schema")
        return _of_json_schema(form.get("json_schema"), f"{where}.json_schema")
    raise InvalidRequest(f"{where}.type must be text, json_object or json_schema, got {kind!r}", param=f"{where}.type")


def _of_json_schema(form: object, where: str) -> Structure:
    """``strict`` or not, the answer fits the schema."""
    form = _object(form, where)
    _fields(form, where, "name", "description", "schema", "strict")
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        _typed(form.get(name), kind, f"{where}.{name}")
    if form.get("schema") is None:
        raise InvalidRequest(f"{where}.schema is missing", param=f"{where}.schema")
    return _json(form["schema"], f"{where}.schema")


def _of_outputs(form: object) -> Structure | None:
    if form is None:
        return None
    form = _object(form, _FORM)
    _fields(form, _FORM, *_KINDS)
    given = [(kind, form[kind]) for kind in _KINDS if form.get(kind) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{_FORM} must hold one of {', '.join(_KINDS)}, it has {len(given)}", param=_FORM)
    (kind, value), where = given[0], f"{_FORM}.{given[0][0]}"
    if kind == "json":
        return Structure.json(value, where) if isinstance(value, str) else _json(value, where)
    if kind == "json_object":
        _typed(value, bool, where)
        return Structure.json_object(where) if value else None
    if kind == "choice":
        _typed(value, list, where)
        if len(value) > MAX_CHOICES:
            raise InvalidRequest(f"{where} may hold {MAX_CHOICES} texts, got {len(value)}", param=where)
        return Structure.choice(value, where)
    _typed(value, str, where)
    return Structure.regex(value, where) if kind == "regex" else Structure.grammar(value, where)


def _json(schema: object, where: str) -> Structure:
    return Structure.json(_object(schema, where), where)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be {TYPE_NAMES[dict]}, got {json_type(value)}", param=where)
    return value


def _typed(value: object, kind: type, where: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{where} must be {TYPE_NAMES[kind]}, got {json_type(value)}", param=where)


def _fields(form: Mapping[str, Any], where: str, *names: str) -> None:
    unknown = next((name for name, value in form.items() if name not in names and value is not None), None)
    if unknown is not None:
        raise InvalidRequest(f"unknown field {where}.{unknown}", param=f"{where}.{unknown}", code="unknown_parameter")
