"""Throughput over HTTP, closed loop: ``paceline bench serve``.

Each configuration is one ``paceline serve`` with flags of its own. At concurrency C there are C streams and a new request
begins as one ends, 3 C + 3 in all, after one that warms up. Tokens are counted by the ``usage`` of each stream, not
by its events. The output window runs from the first streamed token of a run to its last; goodput divides by the wall time,
prompts included. The inter-token latency is the time between two events of a stream: a round, whatever it yields.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from paceline.bench.artefact import machine, model_file, prompts, write
from paceline.config import EngineOptions
from paceline.engine.build import resolve_paths
from paceline.errors import ConfigError
from paceline.weights.load import open_target
from paceline.weights.tokenizer import Tokenizer

_PATIENCE_SECONDS = 600.0
"""For a server to load, and for an answer: kernels may be compiled on the way."""
_PEER_ACCEPTANCE = 0.5
"""A cell is compared with the peer's if their acceptance lengths differ by less."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """An engine to measure: a name and the flags that it adds to ``paceline serve``."""

    name: str
    flags: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """From NAME=FLAGS, the flags as in a shell."""
        name, equals, flags = text.partition("=")
        if not re.fullmatch(r"[\w.+-]+", name) or not equals:
            raise ConfigError(f"--config must be NAME=FLAGS, such as plain=--no-speculation, got {text!r}", param="config")
        return cls(name, tuple(shlex.split(flags)))

    @property
    def plain(self) -> bool:
        return "--no-speculation" in self.flags

    @property
    def synthetic(self) -> bool:
        """Whether acceptances are forced, so that the text means nothing."""
        return any(flag.split("=")[0] == "--spec-synth-len" for flag in self.flags)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of every configuration."""

    prompt_tokens: int = 107
    output_tokens: int = 96
    temperature: float = 0.0
    concurrency: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    warm_up: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "warm_up"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(f"concurrency must hold numbers of at least 1, got {self.concurrency}", param="concurrency")

    def requests(self, concurrency: int) -> int:
        """In a cell, without those that warm up."""
        return 3 * concurrency + 3


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are seconds on one clock; ``arrivals`` are those of the events that carry text."""

    prompt: int
    start: float
    arrivals: list[float] = field(default_factory=list)
    last: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def first(self) -> float:
        """The first event with text; an answer whose tokens all are invisible has its end only."""
        return self.arrivals[0] if self.arrivals else self.last


# -- the server ------------------------------------------------------------------------------------------------------------


class Server:
    """``paceline serve`` in a process of its own, on a free port, up and answering inside the ``with`` block."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        self.command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *flags]
        self.url, self.fingerprint, self.arithmetic = "", "", ""
        self._log = log

    def __enter__(self) -> Server:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            text = self._log.read_text(errors="replace")
            if found := re.search(r"Serving .* on (http://\S+)/v1 \(fingerprint (\S+)\)", text):
                self.url, self.fingerprint = found[1], found[2]
                arithmetic = re.search(rf"arithmetic {re.escape(self.fingerprint)}: (.*)", text)
                self.arithmetic = arithmetic[1] if arithmetic else ""
                return
            if self._process.poll() is not None:
                last = (text.strip().splitlines() or ["no output"])[-1]
                raise ConfigError(f"the server ended with status {self._process.returncode}: {last} (log: {self._log})")
            time.sleep(0.1)
        raise ConfigError(f"the server did not start in {_PATIENCE_SECONDS:.0f} s (log: {self._log})")


def counters(url: str) -> dict[str, float]:
    """The server's counters without labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in re.findall(r"^(paceline_\w+) (\S+)$", "\n".join(lines), re.MULTILINE)}


# -- the client ------------------------------------------------------------------------------------------------------------


async def ask(http: httpx.AsyncClient, number: int, prompt: list[int], workload: Workload) -> Answer:
    """One streamed answer. What goes wrong is in its ``error``."""
    body = {
        "prompt": prompt,
        "max_tokens": workload.output_tokens,
        "temperature": workload.temperature,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(number, time.perf_counter())
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"status {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(answer, json.loads(line[6:]), time.perf_counter())
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    for what, got, wanted in (
        ("prompt", answer.prompt_tokens, len(prompt)),
        ("output", answer.tokens, workload.output_tokens),
    ):
        if answer.error is None and got != wanted:
            answer.error = f"usage says {got} {what} tokens, asked for {wanted}"
    return answer


def _take(answer: Answer, event: Mapping[str, Any], now: float) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message"))
    for choice in event.get("choices", ()):
        if choice["text"]:
            answer.arrivals.append(now)
            answer.text += choice["text"]
        if choice["finish_reason"]:
            answer.last = now
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]


async def closed_loop(
    url: str, asked: Sequence[tuple[int, list[int]]], concurrency: int, workload: Workload
) -> list[Answer]:
    """Answers to numbered prompts, ``concurrency`` at a time, in the order in which they ended."""
    answers: list[Answer] = []
    left: Iterator[tuple[int, list[int]]] = iter(asked)

    async def stream(http: httpx.AsyncClient) -> None:
        for number, prompt in left:
            answers.append(await ask(http, number, prompt, workload))

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_SECONDS, limits=limits) as http:
        await asyncio.gather(*(stream(http) for _ in range(concurrency)))
    return answers


# -- figures ---------------------------------------------------------------------------------------------------------------


def figures(answers: Sequence[Answer], before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What one cell comes to, from its answers and the server's counters around them. A failed answer is an error only."""
    good = [answer for answer in answers if answer.error is None]
    errors = [f"prompt {answer.prompt}: {answer.error}" for answer in answers if answer.error is not None]
    result: dict[str, Any] = {"requests": len(answers), "errors": errors}
    if not good:
        return result
    tokens = sum(answer.tokens for answer in good)
    window = max(answer.last for answer in good) - min(answer.first for answer in good)
    wall = max(answer.last for answer in good) - min(answer.start for answer in good)
    ttft = [1e3 * (answer.first - answer.start) for answer in good]
    gaps = [1e3 * (b - a) for answer in good for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
    spans, emitted, rounds = (
        after[name] - before[name]
        for name in ("paceline_verify_spans_total", "paceline_emitted_in_verify_total", "paceline_rounds_total")
    )
    return result | {
        "tokens": tokens,
        "window_seconds": window,
        "wall_seconds": wall,
        "window_throughput": tokens / window if window else 0.0,
        "goodput": tokens / wall if wall else 0.0,
        "ttft_ms": {"p50": percentile(ttft, 50), "p95": percentile(ttft, 95)},
        "itl_ms": {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99)},
        "acceptance_length": emitted / spans if spans else 0.0,
        "rounds": int(rounds),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` of them do not exceed; 0 of none."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)] if values else 0.0


def text_differences(texts: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Prompts whose text is not that of the first configuration, by configuration name and prompt number."""
    (first, expected), *others = texts.items()
    found = []
    for name, answers in others:
        for number in sorted(expected.keys() | answers.keys()):
            a, b = expected.get(number), answers.get(number)
            if a is None or b is None:
                found.append(f"prompt {number}: no answer from {first if a is None else name}")
            elif a != b:
                at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
                found.append(
                    f"prompt {number}: {name} differs from {first} at character {at}: {b[at:][:20]!r}, {a[at:][:20]!r}"
                )
    return found


def table(cells: Sequence[Mapping[str, Any]], peer: Mapping[str, Any] | None = None) -> str:
    """Cells as lines of text, each beside the plain configuration and beside the peer."""
    beside = f"x {peer['name']}" if peer else ""
    head = f"{'configuration':<16}{'C':>3}{'window tok/s':>14}{'x plain':>9}{beside:>13}{'goodput':>9}"
    lines = [f"{head}{'TTFT p50':>10}{'p95 ms':>8}{'ITL p50':>9}{'p99 ms':>8}{'acceptance':>12}{'errors':>8}"]
    plain = {cell["concurrency"]: cell for cell in reversed(cells) if cell["plain"]}
    for cell in cells:
        name, concurrency = cell["configuration"], cell["concurrency"]
        if "window_throughput" not in cell:
            lines.append(f"{name:<16}{concurrency:>3}  no answer: {cell['errors'][0] if cell['errors'] else ''}")
            continue
        rate = cell["window_throughput"]
        ratios = (_ratio(rate, plain.get(concurrency)), _ratio(rate, _peer_cell(peer, cell)))
        lines.append(
            f"{name:<16}{concurrency:>3}{rate:>14.1f}{ratios[0]:>9}{ratios[1]:>13}{cell['goodput']:>9.1f}"
            f"{cell['ttft_ms']['p50']:>10.1f}{cell['ttft_ms']['p95']:>8.1f}{cell['itl_ms']['p50']:>9.2f}"
            f"{cell['itl_ms']['p99']:>8.2f}{cell['acceptance_length']:>12.2f}{len(cell['errors']):>8}"
        )
    return "\n".join(lines)


def _ratio(rate: float, other: Mapping[str, Any] | None) -> str:
    return f"{rate / other['window_throughput']:.2f}" if other and other.get("window_throughput") else ""


def _peer_cell(peer: Mapping[str, Any] | None, cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The peer's cell of the same concurrency and kind."""
    for other in peer["cells"] if peer else ():
        alike = abs(other["acceptance_length"] - cell["acceptance_length"]) < _PEER_ACCEPTANCE
        if other["concurrency"] == cell["concurrency"] and other["speculation"] != cell["plain"] and alike:
            return dict(other)
    return None


# -- the whole -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run needs. ``flags`` go to every server; ``peer`` is a table of another engine's figures."""

    target: str
    drafter: str
    configurations: tuple[Configuration, ...]
    workload: Workload
    out: Path
    flags: tuple[str, ...] = ()
    check_equal: bool = False
    peer: Path | None = None

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in self.configurations]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"--config names must differ, got {', '.join(names) or 'none'}", param="config")
        real = [configuration for configuration in self.configurations if not configuration.synthetic]
        if self.check_equal and len(real) < 2:
            raise ConfigError(
                f"--check-equal compares texts and needs two configurations without --spec-synth-len, got {len(real)}",
                param="check_equal",
            )

    def server_flags(self, configuration: Configuration) -> list[str]:
        lanes = ("--max-concurrency", str(max(self.workload.concurrency)))
        return ["--model", self.target, "--draft", self.drafter, *lanes, *self.flags, *configuration.flags]


def run(plan: Plan) -> int:
    """Measure, print the table and write the record, which is kept up to date from cell to cell. 1 if a request failed or
    texts differ."""
    peer = json.loads(plan.peer.read_text()) if plan.peer else None
    paths = resolve_paths(EngineOptions(target=plan.target, drafter=plan.drafter))
    tokenizer = open_target(paths[0]).tokenizer()
    record: dict[str, Any] = {
        "benchmark": "serve",
        **machine(),
        "workload": asdict(plan.workload),
        "target": model_file(paths[0]),
        "drafter": model_file(paths[1]) if paths[1] else None,
        "configurations": [],
        "cells": [],
    }
    texts: dict[str, dict[int, str]] = {}
    for configuration in plan.configurations:
        texts[configuration.name] = _measure(plan, configuration, tokenizer, record)
    if plan.check_equal:
        real = {c.name: texts[c.name] for c in plan.configurations if not c.synthetic}
        record["text_differences"] = text_differences(real)
    write(plan.out, record)
    print(table(record["cells"], peer))
    return _verdict(record, plan.check_equal)


def _measure(plan: Plan, configuration: Configuration, tokenizer: Tokenizer, record: dict[str, Any]) -> dict[int, str]:
    """All cells of one configuration, added to ``record``. The texts by prompt number: the same prompt has the same number
    in every configuration."""
    workload = plan.workload
    counts = [workload.warm_up + workload.requests(concurrency) for concurrency in workload.concurrency]
    asked = list(enumerate(prompts(tokenizer, sum(counts), workload.prompt_tokens)))
    log = plan.out.with_name(f"{plan.out.stem}-{configuration.name}.log")
    texts: dict[int, str] = {}
    with Server(plan.server_flags(configuration), log) as server:
        facts = {"fingerprint": server.fingerprint, "arithmetic": server.arithmetic}
        record["configurations"].append({**asdict(configuration), "command": server.command[1:], **facts})
        for concurrency, count in zip(workload.concurrency, counts, strict=True):
            warming, measured, asked = asked[: workload.warm_up], asked[workload.warm_up : count], asked[count:]
            asyncio.run(closed_loop(server.url, warming, concurrency, workload))
            before = counters(server.url)
            answers = asyncio.run(closed_loop(server.url, measured, concurrency, workload))
            after = counters(server.url)
            texts |= {answer.prompt: answer.text for answer in answers if answer.error is None}
            cell = {"configuration": configuration.name, "plain": configuration.plain, "concurrency": concurrency}
            cell |= figures(answers, before, after)
            record["cells"].append(cell | {"answers": [_raw(answer, answers) for answer in answers]})
            write(plan.out, record)
            print(f"{configuration.name} C={concurrency}: {cell.get('window_throughput', 0.0):.1f} tok/s", flush=True)
    return texts


def _raw(answer: Answer, answers: Sequence[Answer]) -> dict[str, Any]:
    """Milliseconds since the start of the run."""
    zero = min(other.start for other in answers)
    times = {name: round(1e3 * (getattr(answer, name) - zero), 3) for name in ("start", "first", "last")}
    return {
        "prompt": answer.prompt,
        **{f"{name}_ms": value for name, value in times.items()},
        "events": len(answer.arrivals),
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "error": answer.error,
    }


def _verdict(record: Mapping[str, Any], checked: bool) -> int:
    failed = [f"{cell['configuration']} C={cell['concurrency']}: {e}" for cell in record["cells"] for e in cell["errors"]]
    different = record.get("text_differences", [])
    for line in (*failed, *different)[:20]:
        print(line)
    if checked:
        print(f"texts: {len(different)} DIFFERENCES" if different else "texts: equal in every configuration")
    return 1 if failed or different else 0
