"""Kernels that may begin before the last one has ended wait for it on every path, before they touch what it may write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.ops

LASTING = {"weight", "state", "head_map", "lanes", "row_span", "starts", "lengths", "bases"}
"""What no kernel of a forward writes, so that it may be read before: weights, committed states and the facts of a batch."""
TURNS = ("await_turn(PDL)", "await_turn_alone(PDL)")
LAUNCH = Path(paceline.ops.__path__[0]) / "launch.py"


def overlapping(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.FunctionDef)
            and "PDL" in (a.arg for a in node.args.args)
            and not node.name.startswith("await_turn")
        ):
            yield node


def fault(function: ast.FunctionDef) -> str | None:
    """What it does before its turn that it must not, None if it does nothing."""
    for statement in function.body:
        if ast.unparse(statement) in TURNS:
            return None
        nodes: list[ast.stmt] = [statement]
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "weight is not None":  # known to the compiler
            nodes = statement.body
        for node in (part for each in nodes for part in ast.walk(each)):
            if isinstance(node, ast.Return | ast.If | ast.For | ast.While):
                return f"a {type(node).__name__}"
            if not isinstance(node, ast.Call):
                continue
            function_name = ast.unparse(node.func)
            if function_name in LOADS:
                names = {part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)}
                if not names & LASTING:
                    return f"a load: {ast.unparse(node)}"
            elif function_name not in HARMLESS and not function_name.endswith(").to"):
                return f"a call of {function_name}"
    return "no waiting at all"


LOADS = {"tl.load", "_bands"}
"""From what their first argument points to."""
HARMLESS = {"tl.program_id", "tl.program_id(0).to", "tl.arange", "tl.minimum", "tl.where", "by_fours"}


@pytest.mark.parametrize("path", sorted(LAUNCH.parent.glob("*/kernel.py")), ids=lambda path: path.parent.name)
def test_kernels_wait_before_they_touch_anything(path: Path) -> None:
    functions = list(overlapping(path.read_text(encoding="utf-8")))
    assert functions
    assert {function.name: fault(function) for function in functions} == {function.name: None for function in functions}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if x == 0:\n        return\n    await_turn(PDL)", "a If"),
        ("y = tl.load(x)\n    await_turn(PDL)", "a load: tl.load(x)"),
        ("tl.store(x, 0)\n    await_turn(PDL)", "a call of tl.store"),
        ("y = 1", "no waiting at all"),
        ("y = tl.load(weight + tl.arange(0, 8))\n    await_turn(PDL)", None),
        ("y = _bands(state + tl.load(lanes).to(tl.int32))\n    await_turn_alone(PDL)", None),
        ("y = _bands(x)\n    await_turn(PDL)", "a load: _bands(x)"),
    ],
)
def test_the_rule_sees_faults(body: str, expected: str | None) -> None:
    (function,) = overlapping(f"def kernel(x, weight, PDL):\n    {body}\n")
    assert fault(function) == expected
