"""How many regular expressions one text would have to fit at the same time.

llguidance bounds the steps that it takes to read an intersection of expressions, but the cost of one step doubles with every
second expression: 12 take a second, 30 the rest of the day and all of the memory. Nothing ends it, so that whoever compiles
what clients send has to count before.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

MAX_INTERSECTED = 10
"""Which take some 50 ms."""

_COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}
_SAYING_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"} | {
    "discriminator",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "x-guidance",
}
_BY_NAME = ("$defs", "definitions", "patternProperties")
_WHERE_THEY_ARE = re.compile(r"#(/(\$defs|definitions)/[^/]*)?")
"""References under which the grouping by name holds."""
_LARK = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?P<and>&)|(?P<json>%json)', re.DOTALL)


def of_schema(schema: object) -> int:
    """Of a JSON schema, from above: of the different ``pattern`` and ``format`` in it those that may be meant for one
    string. Only schemas that combine others bring several to one string, and only such as are under properties of one name,
    or in definitions or under patterns of names, which may be meant for any."""
    named: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    combined, known = False, True
    for node, name in _schemas(schema):
        named[name] |= {(keyword, value) for keyword in ("pattern", "format") if isinstance(value := node.get(keyword), str)}
        combined = combined or _combines(node)
        ref = node.get("$ref", "#")
        known = known and isinstance(ref, str) and _WHERE_THEY_ARE.fullmatch(ref) is not None and "$dynamicRef" not in node
    if not combined:
        return int(any(named.values()))
    anywhere = named[""]
    return max(len(anywhere | one) for one in named.values()) if known else len(anywhere.union(*named.values()))


def of_lark(text: str) -> int:
    """Of a grammar in Lark, from above: its operators ``&`` and one more; or what a schema in it asks for."""
    operators, most = 0, 0
    for match in _LARK.finditer(text):
        operators += match.lastgroup == "and"
        if match.lastgroup == "json":
            try:
                schema, _ = json.JSONDecoder().raw_decode(text[match.end() :].lstrip())
            except (ValueError, RecursionError):
                continue  # a fault that is found when it is compiled
            most = max(most, of_schema(schema))
    return max(most, operators + 1)


def _schemas(schema: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Every schema inside, with the name of the nearest property around it; "" where it may be meant for any."""
    rest = [(schema, "")]
    while rest:
        node, name = rest.pop()
        if isinstance(node, list):
            rest += [(one, name) for one in node]
        if not isinstance(node, dict):
            continue
        yield node, name
        for keyword, value in node.items():
            if keyword == "properties" and isinstance(value, dict):
                rest += [(one, of) for of, one in value.items()]
            elif keyword in _BY_NAME and isinstance(value, dict):
                rest += [(one, "") for one in value.values()]
            else:
                rest.append((value, "" if keyword == "additionalProperties" else name))


def _combines(node: dict[str, Any]) -> bool:
    """Whether several schemas hold for one value here."""
    combining = _COMBINING & node.keys()
    parts = node.get("allOf")
    several = isinstance(parts, list) and len(parts) > 1
    return several or len(combining) > 1 or bool(combining and node.keys() - _COMBINING - _SAYING_NOTHING)
