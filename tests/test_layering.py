"""A module imports from its own package and from layers below, never sideways or up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent

LAYERS = [
    ["errors"],
    ["types", "config", "logs"],
    ["transfer", "intersections"],
    ["batch"],
    ["ops"],
    ["views", "sampling", "penalties", "forcing", "structure", "logprobs", "text", "messages"],
    ["models", "weights", "state", "parsing"],
    ["engine"],
    ["bench", "selfcheck"],
    ["server"],
    ["cli"],
]
"""From the bottom up; the parts of a layer do not import each other."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
EDGE = {"__init__": "the package's own face, which shows what users import", "demo": "holds files, no code"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.stat().st_size)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of what is imported from this package; its face (``from paceline import LLM``) counts as the engine."""
    for line, name in imports(path):
        top, *rest = name.split(".")
        if top == "paceline" and rest:
            yield line, rest[0] if rest[0] in RANK else "engine"


def test_every_part_has_a_layer() -> None:
    parts = {
        path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - set(EDGE) == set(RANK)


def test_imports_go_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {part_of(path)} imports {part}"
        for path in modules()
        if part_of(path) not in EDGE
        for line, part in own_imports(path)
        if part != part_of(path) and RANK[part] >= RANK[part_of(path)]
    ]
    assert wrong == []


def test_only_config_reads_the_environment() -> None:
    readers = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "environb", "getenv", "getenvb"):
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers == {"config.py"}


def test_only_kernels_import_triton() -> None:
    users = {path for path in modules() for _, name in imports(path) if name.split(".")[0] == "triton"}
    assert {path.name for path in users} <= {"kernel.py", "launch.py"}
    assert {part_of(path) for path in users} <= {"ops"}
