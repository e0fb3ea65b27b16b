"""Goodput of the workload without HTTP, by lanes, speculation off and on: ``python -m paceline.bench.offline``.

Speculation follows ``--draft-policy``, which the result names.

All requests are submitted at once and run ``lanes`` at a time, greedy, natural end, a token cap. Goodput is generated tokens
over the wall time of the suite, prompts included; the output window runs from the first token of the run to its last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.artefact import load_workload, provenance, write
from paceline.bench.script import run
from paceline.config import DRAFT_POLICIES, EngineOptions
from paceline.engine.llm import LLM
from paceline.types import SamplingParams


@dataclass
class _Arrivals:
    """When each request's tokens came, from one thread per request."""

    first: dict[int, float] = field(default_factory=dict)
    last: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)


def run_cell(llm: LLM, messages: list[Any], max_tokens: int) -> dict[str, Any]:
    """All requests through ``llm``; the cell's figures."""
    arrivals = _Arrivals()
    before = llm.stats()
    started = time.perf_counter()

    def client(index: int) -> None:
        tokens: list[int] = []
        for delta in llm.stream(messages[index], SamplingParams(temperature=0, max_tokens=max_tokens)):
            if delta.tokens:
                arrivals.first.setdefault(index, time.perf_counter())
                arrivals.last = max(arrivals.last, time.perf_counter())
            tokens += delta.tokens
        arrivals.tokens[index] = tokens

    threads = [threading.Thread(target=client, args=(index,)) for index in range(len(messages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - started
    after = llm.stats()
    total = sum(map(len, arrivals.tokens.values()))
    spans = after.verify_spans - before.verify_spans
    answers = json.dumps([arrivals.tokens[index] for index in range(len(messages))])
    return {
        "requests": len(messages),
        "tokens": total,
        "wall_seconds": wall,
        "goodput": total / wall,
        "window_throughput": total / (arrivals.last - min(arrivals.first.values())),
        "median_ttft_seconds": statistics.median(first - started for first in arrivals.first.values()),
        "acceptance_length": (after.emitted_in_verify - before.emitted_in_verify) / spans,
        "mean_drafts": (sum(after.drafted) - sum(before.drafted)) / spans,
        "rounds": after.rounds - before.rounds,
        "tokens_sha256": hashlib.sha256(answers.encode()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3, 6, 8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--draft-policy", choices=DRAFT_POLICIES, default=EngineOptions().draft_policy)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/offline-cpu.json"))
    arguments = parser.parse_args()
    messages = [entry["messages"] for entry in load_workload()][: arguments.requests]
    cells = []
    info = None
    for lanes in arguments.lanes:
        for speculation in (False, True):
            options = {"speculation": speculation, "draft_policy": arguments.draft_policy, "threads": arguments.threads}
            with LLM(max_concurrency=lanes, **options) as llm:
                run_cell(llm, messages[:lanes], 8)
                cell = run_cell(llm, messages, arguments.max_tokens)
                info = llm.info
            cells.append({"lanes": lanes, "speculation": speculation, "draft_policy": arguments.draft_policy, **cell})
            print(
                f"lanes {lanes} speculation {'on ' if speculation else 'off'} goodput {cell['goodput']:7.1f} tok/s "
                f"window {cell['window_throughput']:7.1f} acceptance {cell['acceptance_length']:.2f}",
                flush=True,
            )
    assert info is not None
    identical = len({cell["tokens_sha256"] for cell in cells}) == 1
    write(arguments.out, {"benchmark": "offline", **provenance(info), "tokens_identical": identical, "cells": cells})
    if not identical:
        raise SystemExit("the cells' tokens differ: no figure of this run counts")


if __name__ == "__main__":
    run(main)
