"""Counting from above what would have to be met at the same time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.intersections import MAX_INTERSECTED, of_lark, of_schema
from paceline.structure import Compiler
from paceline.types import Structure

DATE = {"type": "string", "format": "date"}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


MANY = [text(f".*a{index}.*b{index}") for index in range(12)]
CHAIN = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}", **text(f".*a{index}")} for index in range(12)} | {"d12": {}}


@pytest.mark.parametrize(
    "schema, count",
    [
        ({"allOf": MANY}, 12),
        ({"allOf": [{"properties": {"a": one}} for one in MANY]}, 12),
        ({"$ref": "#/$defs/d0", "$defs": CHAIN}, 12),
        (
            {"$defs": {"all": {"properties": {str(i): one for i, one in enumerate(MANY)}}}}
            | {"allOf": [{"$ref": f"#/$defs/all/properties/{index}"} for index in range(12)]},
            12,
        ),
        ({"type": "object", "patternProperties": {f"^{i}": one for i, one in enumerate(MANY)}, "anyOf": [{}, {}]}, 12),
        ({"properties": {str(index): DATE for index in range(20)}}, 1),
        (
            {
                "properties": {str(i): {"$ref": "#/$defs/date", "title": ""} for i in range(20)},
                "$defs": {"date": DATE},
            },
            1,
        ),
        ({"allOf": [{"properties": {f"{part}{index}": DATE for index in range(20)}} for part in "ab"]}, 1),
        ({"allOf": [{"properties": {"a": DATE}}, {"properties": {"a": text("^2")}}]}, 2),
        ({"anyOf": MANY}, 1),
        ({"allOf": [{"properties": {"a": {"properties": {"id": DATE}}, "b": {"properties": {"id": DATE}}}}, {}]}, 1),
        ({"discriminator": {"propertyName": "id"}, "oneOf": MANY}, 1),
        ({"type": "integer"}, 0),
        (True, 0),
    ],
)
def test_of_schema(schema: Any, count: int) -> None:
    assert of_schema(schema) == count


@pytest.mark.parametrize(
    "grammar, count",
    [
        ('start: A\nA: /a/ & /b&/ & ~B  // & c\nB: "&" # &', 3),
        ('A: /x"/ & /"y"/ & /"z/', 3),
        ('start: "a" %json ' + json.dumps({"allOf": MANY}) + ' "b"', 12),
        ('start: %json {"allOf": ', 1),
    ],
)
def test_of_lark(grammar: str, count: int) -> None:
    assert of_lark(grammar) == count


@pytest.mark.parametrize(
    "structure",
    [
        Structure.json({"allOf": MANY}, "x"),
        Structure.grammar("start: A\nA: " + " & ".join(f"/.*a{index}.*/" for index in range(12)), "x"),
    ],
    ids=lambda structure: structure.kind,
)
def test_too_many_are_refused_before_they_cost_anything(compiler: Compiler, structure: Structure) -> None:
    with pytest.raises(InvalidRequest, match=rf"12 patterns and formats at a time; {MAX_INTERSECTED} can be met"):
        compiler.compile(structure)


def test_texts_may_hold_the_operator(compiler: Compiler) -> None:
    compiler.compile(Structure.choice([f"{index} & co" for index in range(20)]))
    compiler.compile(Structure.grammar('root ::= "&&&&&&" [&"]{2} "&&&&&&"'))
