"""A run: its plan, the order of its cells, the documents it leaves, and what they come to.

A run is a directory with ``matrix.json``, ``cells/*.json`` and the servers' logs. Figures are compared only within a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.bench.servers import Configuration, ServerKind
from paceline.bench.workloads import Workload
from paceline.errors import ConfigError

Fresh = Literal["cell", "configuration"]
COMPLETE, FAILED, DISTURBED, INTERRUPTED = "complete", "failed", "disturbed", "interrupted"
"""A cell's status: all answers succeeded; some did not; the machine was not quiet enough; it was begun and not ended."""
MATRIX = "matrix.json"
SUMMARISED = (
    "window_throughput",
    "goodput",
    "ttft_ms.p50",
    "ttft_ms.p90",
    "ttft_ms.max",
    "itl_ms.p50",
    "itl_ms.p99",
    "acceptance_length",
    "long_ttft_ms.p50",
    "peak_rss_bytes",
)
"""The figures of which a summary has the median and the spread over repeats."""
_RATIOS = ("window_throughput", "goodput")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: which server, run how, asked what, how many at a time, and which repeat."""

    server: str
    configuration: str
    workload: str
    concurrency: int
    repeat: int

    @property
    def name(self) -> str:
        """As a file's name."""
        workload = "".join(letter if letter.isalnum() else "-" for letter in self.workload)
        return f"{self.server}--{self.configuration}--{workload}--c{self.concurrency}--r{self.repeat}"

    def __str__(self) -> str:
        return f"{self.server} {self.configuration}, {self.workload}, C={self.concurrency}, repeat {self.repeat}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what a run measures. ``lanes``: of every server. ``warm_up``: requests before each cell, at
    its C; None for C. ``fresh``: a server of its own for each cell, or for each configuration and repeat. ``quiet``: cores
    that others may keep busy during a cell; None for any number."""

    target: str
    drafter: str
    servers: tuple[ServerKind, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...]
    repeats: int = 1
    lanes: int = 0
    warm_up: int | None = None
    fresh: Fresh = "cell"
    quiet: float | None = None

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ConfigError(
                f"concurrency must hold different numbers of at least 1, got {self.concurrency}", param="concurrency"
            )
        for name, least in (("repeats", 1), ("lanes", 0), ("warm_up", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}", param=name)
        for what, names in (
            ("server", [server.name for server in self.servers]),
            ("workload", [workload.name for workload in self.workloads]),
            *(("config", [made.name for made in server.configurations]) for server in self.servers),
        ):
            if not names or len(set(names)) != len(names):
                raise ConfigError(f"--{what} names must differ, got {', '.join(names) or 'none'}", param=what)

    def server(self, cell: Cell) -> ServerKind:
        return next(server for server in self.servers if server.name == cell.server)

    def configuration(self, cell: Cell) -> Configuration:
        return next(made for made in self.server(cell).configurations if made.name == cell.configuration)

    def workload(self, cell: Cell) -> Workload:
        return next(workload for workload in self.workloads if workload.name == cell.workload)

    def lanes_of_servers(self) -> int:
        """A long prompt that arrives beside the others has a lane of its own."""
        beside = any(workload.long_tokens for workload in self.workloads)
        return self.lanes or max(self.concurrency) + beside

    def groups(self) -> list[list[Cell]]:
        """Cells in order, those together that share a server's process. From repeat to repeat and from C to C another
        configuration comes first, so that none always has the cooler or the quieter machine."""
        ways = [(server.name, made.name) for server in self.servers for made in server.configurations]
        loads = [(workload.name, concurrency) for workload in self.workloads for concurrency in self.concurrency]
        groups = []
        for repeat in range(self.repeats):
            if self.fresh == "configuration":
                groups += [
                    [Cell(server, made, workload, concurrency, repeat) for workload, concurrency in loads]
                    for server, made in _rotated(ways, repeat)
                ]
                continue
            for turn, (workload, concurrency) in enumerate(loads):
                groups += [
                    [Cell(server, made, workload, concurrency, repeat)] for server, made in _rotated(ways, repeat + turn)
                ]
        return groups


def _rotated(items: Sequence[tuple[str, str]], by: int) -> list[tuple[str, str]]:
    start = by % len(items)
    return [*items[start:], *items[:start]]


# -- documents -------------------------------------------------------------------------------------------------------------


class Directory:
    """A run's directory. ``identity`` is what all its cells must have in common; ``ConfigError`` where the directory holds
    cells of another."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        before = read_matrix(path)["identity"] if (path / MATRIX).exists() else None
        now = json.loads(json.dumps(identity))
        for field, value in now.items():
            if before is not None and before.get(field) != value:
                raise ConfigError(
                    f"{path} holds a run with another {field}: {_short(before.get(field))}, now {_short(value)}; "
                    "give another directory with --out"
                )

    def file(self, cell: Cell) -> Path:
        return self.path / "cells" / f"{cell.name}.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        path = self.file(cell)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, cell: Cell, document: Mapping[str, Any]) -> None:
        write_whole(self.file(cell), document)


def write_whole(path: Path, document: Mapping[str, Any]) -> None:
    """All of the document or nothing: whoever ends in between leaves what was there. A line for each field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    fields = (f"{json.dumps(name)}: {_lines(value)}" for name, value in document.items())
    part.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    os.replace(part, path)


def _lines(value: Any) -> str:
    """JSON, a list of objects with one of them a line."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def read_matrix(directory: Path) -> dict[str, Any]:
    """``ConfigError`` where there is no run."""
    path = directory / MATRIX
    try:
        matrix = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a run of 'paceline bench': {error}") from None
    if not isinstance(matrix, dict) or matrix.get("benchmark") != "serve":
        raise ConfigError(f"{path}: not a run of 'paceline bench'")
    return matrix


def read_cells(directory: Path, matrix: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells' documents; ``ConfigError`` if one is not what the matrix was made from."""
    documents = []
    for entry in matrix["cells"]:
        content = (directory / entry["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ConfigError(f"{directory / entry['file']}: its hash is not the one in {MATRIX}: it was changed afterwards")
        documents.append(json.loads(content))
    return documents


def matrix_document(
    head: Mapping[str, Any], directory: Directory, plan: Plan, definitions: Mapping[str, str]
) -> dict[str, Any]:
    """The document of the whole run, from the cells that are there."""
    cells = [(cell, document) for group in plan.groups() for cell in group if (document := directory.read(cell)) is not None]
    documents = [document for _, document in cells]
    entries = [
        {
            **asdict(cell),
            "status": document["status"],
            **{
                name: document[name]
                for name in ("requests_sent", "successes", "failures", "failures_beside")
                if name in document
            },
            "file": str(directory.file(cell).relative_to(directory.path)),
            "sha256": hashlib.sha256(directory.file(cell).read_bytes()).hexdigest(),
        }
        for cell, document in cells
    ]
    return {
        "benchmark": "serve",
        **head,
        "cells_planned": sum(map(len, plan.groups())),
        "summary": summary(documents),
        "exactness": exactness(documents),
        "cells": entries,
        "definitions": dict(definitions),
    }


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"


# -- what cells come to ----------------------------------------------------------------------------------------------------

Key = tuple[str, str, str, int]


def _key(cell: Mapping[str, Any]) -> Key:
    return cell["server"], cell["configuration"], cell["workload"], cell["concurrency"]


def figure(cell: Mapping[str, Any], name: str) -> float | None:
    """A figure by its name, in which a dot leads into a part; None where the cell has none."""
    value: Any = cell["figures"]
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def complete(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if cell["status"] == COMPLETE]


def summary(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per server, workload, C and configuration, in this order, over the repeats that are complete."""
    rows: defaultdict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for cell in complete(cells):
        rows[_key(cell)].append(cell)
    seen = {name: place for place, name in enumerate(dict.fromkeys(part for cell in cells for part in _key(cell)[:3]))}
    order = sorted(rows, key=lambda key: (seen[key[0]], seen[key[2]], key[3], seen[key[1]]))
    plain = {(*_load(cell), cell["repeat"]): cell for cell in complete(cells) if not cell["speculation"]}
    return [
        {
            **dict(zip(("server", "configuration", "workload", "concurrency"), key, strict=True)),
            "repeats": len(rows[key]),
            "speculation": rows[key][0]["speculation"],
            **{name: spread for name in SUMMARISED if (spread := _spread(figure(cell, name) for cell in rows[key]))},
            "speed_up": {
                name: spread
                for name in _RATIOS
                if (spread := _spread(_ratio(cell, plain.get((*_load(cell), cell["repeat"])), name) for cell in rows[key]))
            },
        }
        for key in order
    ]


def _load(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["server"], cell["workload"], cell["concurrency"]


def _ratio(cell: Mapping[str, Any], other: Mapping[str, Any] | None, name: str) -> float | None:
    mine, theirs = figure(cell, name), figure(other, name) if other is not None else None
    return mine / theirs if mine and theirs else None


def _spread(values: Iterator[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def exactness(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every complete cell whose text means something: how many of its answers are those of its reference (see
    ``identical`` in the definitions), and which are not."""
    references: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    rows = []
    for cell in sorted(complete(cells), key=lambda cell: cell["concurrency"]):
        if cell["synthetic"]:
            continue
        own = (cell["server"], cell["workload"])
        if not cell["exact"] and cell["concurrency"] == 1:
            references.setdefault((*own, cell["configuration"]), cell)
        elif cell["exact"]:
            references.setdefault((*own, cell["fingerprint"]), cell)
        reference = references.get((*own, cell["fingerprint"] if cell["exact"] else cell["configuration"]))
        rows.append({**_identity(cell), "exact": cell["exact"], **_compared(cell, reference)})
    return rows


def _identity(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell[name] for name in ("server", "configuration", "workload", "concurrency", "repeat")}


def _compared(cell: Mapping[str, Any], reference: Mapping[str, Any] | None) -> dict[str, Any]:
    if reference is None:
        return {"identical": None, "compared": 0, "different": []}
    expected = {request["number"]: request["hash"] for request in reference["requests"]}
    common = {request["number"]: request["hash"] for request in cell["requests"] if request["number"] in expected}
    different = sorted(number for number, value in common.items() if value != expected[number])
    return {
        "reference": _identity(reference),
        "hash_of": cell["requests"][0]["hash_of"],
        "identical": len(common) - len(different),
        "compared": len(common),
        "different": different,
    }


def named(cell: Mapping[str, Any]) -> str:
    """The failures of a cell in words."""
    own = [f"{count} x {kind}" for kind, count in cell.get("failures", {}).items()]
    beside = [f"{count} x {kind} beside it" for kind, count in cell.get("failures_beside", {}).items()]
    return ", ".join(own + beside)


def verdict(matrix: Mapping[str, Any]) -> list[str]:
    """What speaks against the run: cells that are missing or failed, and tokens that differ where they must not."""
    wrong = []
    for cell in matrix["cells"]:
        if cell["status"] != COMPLETE:
            found = named(cell)
            wrong.append(f"{Cell(**_identity(cell))}: {cell['status']}{': ' if found else ''}{found}")
    if missing := matrix["cells_planned"] - len(matrix["cells"]):
        wrong.append(f"{missing} cells not begun")
    for row in matrix["exactness"]:
        if row["exact"] and row["different"]:
            wrong.append(f"{Cell(**_identity(row))}: TOKENS DIFFER in requests {', '.join(map(str, row['different']))}")
    return wrong
