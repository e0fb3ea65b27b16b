"""``paceline bench serve``: servers measured over HTTP, cell by cell. What a run is, is in ``paceline.bench.matrix``."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from paceline.bench.artefact import gpu_memory_mib, machine, model_file
from paceline.bench.client import Load
from paceline.bench.figures import DEFINITIONS, figures, outcome
from paceline.bench.matrix import (
    COMPLETE,
    DISTURBED,
    FAILED,
    INTERRUPTED,
    MATRIX,
    Cell,
    Directory,
    Plan,
    matrix_document,
    named,
    verdict,
    write_whole,
)
from paceline.bench.report import table
from paceline.bench.servers import Server, machine_cpu_seconds, version
from paceline.bench.workloads import Fixed, manifest_hashes
from paceline.config import EngineOptions, environment_switches
from paceline.engine.build import resolve_paths
from paceline.weights.load import open_target
from paceline.weights.tokenizer import Tokenizer

_LONG_PROMPTS = 8
"""Different long prompts; then they come again."""
_DYING_SECONDS = 5.0
"""A process that no longer answers may still be about to end."""
_DRAWN_FROM = ("paceline_rounds_total", "paceline_verify_spans_total", "paceline_emitted_in_verify_total")


class Progress(Protocol):
    """What watches a run. Every method may be called from the thread that measures."""

    def cell(self, cell: Cell, number: int, of: int, requests: int) -> None:
        """A cell begins: ``number`` counts from 1."""

    def answer(self) -> None:
        """One request of it has ended."""

    def say(self, line: str) -> None:
        """Something to be read."""


def run(plan: Plan, out: Path, progress: Progress, peer: Mapping[str, Any] | None = None) -> int:
    """Measure what is not there yet and write the documents, which are kept up to date from cell to cell. 1 if a cell failed
    or is missing, or tokens differ where they must not."""
    measured = _Run(plan, out, progress, peer)
    groups = [[cell for cell in group if not measured.has(cell)] for group in plan.groups()]
    measured.write()
    try:
        for group in filter(None, groups):
            measured.group(group)
    finally:
        matrix = measured.write()
    progress.say(table(matrix))
    for line in (wrong := verdict(matrix))[:20]:
        progress.say(line)
    return 1 if wrong else 0


class _Run:
    def __init__(self, plan: Plan, out: Path, progress: Progress, peer: Mapping[str, Any] | None) -> None:
        self._plan, self._progress = plan, progress
        paths = resolve_paths(EngineOptions(target=plan.target, drafter=plan.drafter))
        # a drafter of "demo" is none with another target, which only the server can say
        self._models = {"model": str(paths[0]), "draft": str(paths[1] or plan.drafter)}
        self._tokenizer: Tokenizer | None = None
        if any(isinstance(workload, Fixed) for workload in plan.workloads):
            self._tokenizer = open_target(paths[0]).tokenizer()
        here = machine()
        identity = {
            "plan": asdict(plan),
            **{name: here[name] for name in ("commit", "dirty", "hardware", "versions")},
            "target": model_file(paths[0]),
            "drafter": model_file(paths[1]) if paths[1] else None,
            "manifest": manifest_hashes(),
            "environment": environment_switches(),
        }
        self._directory = Directory(out, identity)
        self._head = {
            **{name: here[name] for name in ("command", "time")},
            "identity": identity,
            "server_versions": {server.name: version(server) for server in plan.servers},
            **({"peer": peer} if peer else {}),
        }

    def has(self, cell: Cell) -> bool:
        """Whether it was measured before. What was interrupted, disturbed or failed is measured again."""
        document = self._directory.read(cell)
        return document is not None and document["status"] == COMPLETE

    def write(self) -> dict[str, Any]:
        matrix = matrix_document(self._head, self._directory, self._plan, DEFINITIONS)
        write_whole(self._directory.path / MATRIX, matrix)
        return matrix

    def group(self, cells: Sequence[Cell]) -> None:
        """Cells of one server process."""
        first = cells[0]
        for cell in cells:
            self._directory.write(cell, self._facts(cell) | {"status": INTERRUPTED})
        kind, configuration = self._plan.server(first), self._plan.configuration(first)
        logs = self._directory.path / "logs"
        values = self._models | {"lanes": str(self._plan.lanes_of_servers())}
        trace = (logs / f"{first.name}.trace").absolute()
        with Server(kind, configuration.flags, values, logs / f"{first.name}.log", trace) as server:
            for cell in cells:
                document = self._measure(cell, server)
                self._directory.write(cell, document)
                self.write()
                self._progress.say(f"{cell}: {_brief(document)}")
        trace.unlink(missing_ok=True)

    def _facts(self, cell: Cell) -> dict[str, Any]:
        """What is known of a cell before it is measured."""
        kind, configuration = self._plan.server(cell), self._plan.configuration(cell)
        return {
            "benchmark": "serve cell",
            **asdict(cell),
            "speculation": configuration.speculation,
            "synthetic": configuration.synthetic,
            "exact": kind.exact,
            "asked": asdict(self._plan.workload(cell)),
            "fresh": self._plan.fresh if kind.command else "no: it ran before",
            "lanes": self._plan.lanes_of_servers(),
        }

    def _measure(self, cell: Cell, server: Server) -> dict[str, Any]:
        workload = self._plan.workload(cell)
        asks = workload.asks(cell.concurrency, self._tokenizer)
        long: list[Any] = []
        pause = 0.0
        if isinstance(workload, Fixed) and workload.long_tokens:
            long, pause = [workload.long(number, self._tokenizer) for number in range(_LONG_PROMPTS)], workload.long_seconds
        self._begin(cell, len(asks))
        warm_up = cell.concurrency if self._plan.warm_up is None else self._plan.warm_up
        warming, _ = asyncio.run(
            self._load(server, lambda: None).closed_loop(workload.warming(warm_up, self._tokenizer), cell.concurrency)
        )
        before, began, cpu_before = server.counters(), time.time(), _others_cpu(server)
        requests, beside = asyncio.run(
            self._load(server, self._progress.answer).closed_loop(asks, cell.concurrency, long, pause)
        )
        ended, cpu_after, after = time.time(), _others_cpu(server), server.counters()
        document = self._facts(cell) | {
            "command": server.recorded_command,
            "url": server.url,
            "began": began,
            "ended": ended,
            "warm_up": outcome(warming),
            "server_exit_status": server.exit_status(_DYING_SECONDS if _lost(requests) else 0.0),
            "fingerprint": next((request["fingerprint"] for request in requests if request["fingerprint"]), None),
            "others_cpu": None if cpu_after is None or cpu_before is None else (cpu_after - cpu_before) / (ended - began),
            "counters": _differences(before, after),
            "trace": _trace(server.trace, began, ended),
            "requests": requests,
            "long": beside,
        }
        return document | self._judged(document, server)

    def _judged(self, document: dict[str, Any], server: Server) -> dict[str, Any]:
        counted, beside = (
            outcome(document["requests"]),
            document["warm_up"]["failures"] or outcome(document["long"])["failures"],
        )
        wrong = counted["failures"] or beside or document["server_exit_status"] is not None
        verdict = {
            "status": FAILED if wrong else COMPLETE,
            "requests_sent": counted["requests"],
            "successes": counted["successes"],
            "failures": counted["failures"],
            "failures_beside": beside,
            "arithmetic": server.arithmetic(document["fingerprint"]),
        }
        if verdict["status"] == FAILED:
            return verdict
        others = document["others_cpu"]
        if self._plan.quiet is not None and others is not None and others > self._plan.quiet:
            return verdict | {"status": DISTURBED}
        memory = {"peak_rss_bytes": server.peak_rss_bytes(), "gpu_memory_mib": gpu_memory_mib()}
        return verdict | {"figures": figures(document) | memory}

    def _load(self, server: Server, tell: Callable[[], None]) -> Load:
        return Load(server.url, server.kind.body or {}, server.kind.timeout, time.perf_counter(), tell)

    def _begin(self, cell: Cell, requests: int) -> None:
        cells = [cell for group in self._plan.groups() for cell in group]
        self._progress.cell(cell, cells.index(cell) + 1, len(cells), requests)


def _others_cpu(server: Server) -> float | None:
    """Seconds for which processors were busy with anything but this process and the server."""
    busy = machine_cpu_seconds()
    return None if busy is None else busy - time.process_time() - server.cpu_seconds()


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much counters grew, those of the engine's rounds."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name in _DRAWN_FROM or name.startswith(("paceline_drafted_tokens_total", "paceline_accepted_tokens_total"))
    }


def _trace(path: Path, began: float, ended: float) -> dict[str, Any] | None:
    """What the rounds of the cell come to: their number, the time of each stage, and rows kept by decoding lanes. None if
    the server keeps no trace."""
    if not path.exists():
        return None
    rounds = [
        line
        for line in (json.loads(text) for text in path.read_text().splitlines() if text.endswith("}"))
        if "round" in line and began <= line["time"] <= ended
    ]
    spent = Counter[str]()
    lanes: dict[int, dict[str, int]] = {}
    for line in rounds:
        spent.update(line["us"])
        keeps = [lane["keep"] for lane in line["lanes"] if lane["kind"] == "verify"]
        if keeps:
            sums = lanes.setdefault(len(keeps), {"rounds": 0, "kept": 0})
            sums["rounds"] += 1
            sums["kept"] += sum(keeps)
    return {"rounds": len(rounds), "us": dict(spent), "by_lanes": {str(n): lanes[n] for n in sorted(lanes)}}


def _lost(requests: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last answer ended as if there were no server any more."""
    return bool(requests) and requests[-1].get("failure") in ("connection refused", "stream cut short")


def _brief(document: Mapping[str, Any]) -> str:
    if document["status"] == COMPLETE:
        made = document["figures"]
        window = made["window_throughput"]
        return f"{window or 0.0:.1f} tok/s, goodput {made['goodput']:.1f}, {document['successes']} answers"
    if document["status"] == DISTURBED:
        return f"disturbed: others kept {document['others_cpu']:.2f} cores busy"
    exit_status = document["server_exit_status"]
    died = f"; the server ended with status {exit_status}" if exit_status is not None else ""
    return f"FAILED, {document['successes']} of {document['requests_sent']} answers: {named(document)}{died}"
