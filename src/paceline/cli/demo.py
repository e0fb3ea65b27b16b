"""``paceline demo``: the main job on the built-in pair, watched live. Six clients share one engine, first without and then
with speculation; the tokens must be the same."""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from paceline.cli.options import Level, LogLevel, Threads
from paceline.config import EngineOptions
from paceline.errors import LaneFailed
from paceline.logs import start_logging
from paceline.types import Emission, EngineHandle, Request, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from paceline.weights.tokenizer import Tokenizer

LANES = 6
PER_SUITE = 3
MAX_TOKENS = 96
_CONTEXT = 2048
_REFRESH_SECONDS = 0.1
_SPECULATION = {False: "without speculation", True: "with speculation"}


@dataclass(slots=True)
class Job:
    """One prompt and what has become of it. Times are seconds on this process's clock.

    The first of ``bursts`` is the one token that comes from the prompt's own forward; each other is a verify round's.
    """

    suite: str
    title: str
    request: Request
    submitted: float = 0.0
    first: float = 0.0
    tokens: list[int] = field(default_factory=list)
    bursts: int = 0
    finish_reason: str | None = None

    def take(self, emission: Emission, now: float) -> None:
        if emission.tokens:
            self.first = self.first or now
            self.tokens += emission.tokens
            self.bursts += 1
        self.finish_reason = emission.finish_reason


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts: the tokens of each, and the figures of the final table."""

    tokens: list[list[int]]
    goodput: float
    output_window: float
    median_ttft: float
    acceptance_length: float
    fingerprint: str


def demo(threads: Threads = None, log_level: Level = LogLevel.WARNING) -> int:
    """Run a dozen prompts at six lanes, and compare.

    The built-in pair answers them twice, first without and then with speculation. The exit status is 0 if both runs gave
    the same tokens, else 1.
    """
    start_logging(log_level.number)
    from rich.console import Console

    console = Console(highlight=False)
    console.print("Paceline: one target, one drafter, one batch for six clients. The demo pair runs on the CPU.\n")
    plain, drafted = (_run(console, speculation, threads) for speculation in (False, True))
    console.print(_table(plain, drafted))
    differing = sum(a != b for a, b in zip(plain.tokens, drafted.tokens, strict=True))
    total = sum(map(len, plain.tokens))
    if differing:
        console.print(f"Tokens identical: NO, {differing} of {len(plain.tokens)} requests differ.")
        return 1
    console.print(f"Tokens identical: yes, all {total} of {len(plain.tokens)} requests, half greedy and half sampled.")
    console.print(
        "The demo's drafter is a third of its target's size, that of a 27B pair a fourteenth: do not judge the gain by it."
    )
    return 0


# -- one run -----------------------------------------------------------------------------------------------------------


def _run(console: Console, speculation: bool, threads: int | None) -> Run:
    from paceline.engine.build import resolve_paths
    from paceline.engine.process import EngineProcess
    from paceline.weights.load import open_target

    options = EngineOptions(max_concurrency=LANES, max_ctx=_CONTEXT, speculation=speculation, threads=threads)
    target = open_target(resolve_paths(options)[0])
    tokenizer, template = target.tokenizer(), target.chat_template()
    assert template is not None, "the demo target has a chat template"
    console.print(f"Loading, {_SPECULATION[speculation]} …")
    handle = EngineProcess(options, log_level=LogLevel.WARNING.number)
    try:
        jobs = [_job(handle, entry, index, tokenizer, template) for index, entry in enumerate(_prompts())]
        _warm_up(handle, jobs[0].request)
        with _display(console, jobs, handle, tokenizer, speculation) as show:
            return _finish(handle, jobs, _serve(handle, jobs, show))
    finally:
        handle.close()


def _prompts() -> list[dict[str, Any]]:
    """The first prompts of each suite of the workload, suites taking turns."""
    lines = (files("paceline.bench") / "workload.jsonl").read_text(encoding="utf-8").splitlines()
    by_suite: dict[str, list[dict[str, Any]]] = {}
    for entry in map(json.loads, lines):
        by_suite.setdefault(entry["suite"], []).append(entry)
    return [entries[index] for index in range(PER_SUITE) for entries in by_suite.values()]


def _job(handle: EngineHandle, entry: dict[str, Any], index: int, tokenizer: Tokenizer, template: Any) -> Job:
    prompt = tokenizer.encode(template.render(entry["messages"], tools=entry.get("tools")))
    sampling = SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=MAX_TOKENS)
    request = Request.create(prompt, sampling, handle.info)
    return Job(entry["suite"], " ".join(entry["messages"][-1]["content"].split()), request)


def _warm_up(handle: EngineHandle, request: Request) -> None:
    """The first rounds of an engine fetch memory and prepare products; the figures leave them out."""
    ended = threading.Event()

    def sink(emission: Emission) -> None:
        if emission.finish_reason is not None:
            ended.set()

    handle.submit(replace(request, id="warm-up", max_tokens=8), sink)
    ended.wait()


def _serve(handle: EngineHandle, jobs: Sequence[Job], show: Any) -> tuple[float, float, float]:
    """Six clients, each of which asks its next prompt when its last one is answered. Returns when the run began, when its
    first token came and when its last."""
    arrivals: queue.SimpleQueue[tuple[Job, Emission, float]] = queue.SimpleQueue()
    waiting = iter(jobs)
    started = time.perf_counter()

    def ask() -> None:
        job = next(waiting, None)
        if job is not None:
            job.submitted = time.perf_counter()
            handle.submit(job.request, lambda emission: arrivals.put((job, emission, time.perf_counter())))

    for _ in range(LANES):
        ask()
    now = started
    while any(job.finish_reason is None for job in jobs):
        try:
            job, emission, now = arrivals.get(timeout=_REFRESH_SECONDS)
        except queue.Empty:
            show(None)
            continue
        job.take(emission, now)
        if emission.finish_reason == "error":
            raise LaneFailed(emission.error or "the engine failed")
        if emission.finish_reason is not None:
            ask()
            show(job)
    return started, min(job.first for job in jobs), now


def _acceptance_length(jobs: Sequence[Job]) -> float:
    """Tokens per verify round over all jobs."""
    started = [job for job in jobs if job.bursts > 1]
    return sum(len(job.tokens) - 1 for job in started) / max(1, sum(job.bursts - 1 for job in started))


def _finish(handle: EngineHandle, jobs: Sequence[Job], times: tuple[float, float, float]) -> Run:
    started, first, last = times
    total = sum(len(job.tokens) for job in jobs)
    return Run(
        tokens=[job.tokens for job in jobs],
        goodput=total / (last - started),
        output_window=total / (last - first),
        median_ttft=statistics.median(job.first - job.submitted for job in jobs),
        acceptance_length=_acceptance_length(jobs),
        fingerprint=handle.info.fingerprint,
    )


# -- what is shown -----------------------------------------------------------------------------------------------------


@contextmanager
def _display(
    console: Console, jobs: Sequence[Job], handle: EngineHandle, tokenizer: Tokenizer, speculation: bool
) -> Iterator[Any]:
    """A function to call at every tick (with None) and whenever a job has ended. On a terminal a table is kept up to date,
    elsewhere a line is printed for each job."""
    if not console.is_terminal:
        yield lambda job: _line(console, job) if job else None
        return
    from rich.live import Live

    def picture() -> RenderableType:
        return _lanes(jobs, handle.stats().lanes, tokenizer, speculation)

    # Live calls picture at every refresh; nothing is drawn between.
    with Live(get_renderable=picture, console=console, refresh_per_second=8):
        yield lambda job: None


def _line(console: Console, job: Job) -> None:
    ttft = 1000 * (job.first - job.submitted)
    console.print(
        f"  {job.suite:<6}{len(job.tokens):>4} tokens, first after {ttft:.0f} ms, "
        f"acceptance length {_acceptance_length([job]):.2f}, finish {job.finish_reason}"
    )


def _lanes(jobs: Sequence[Job], lanes: int, tokenizer: Tokenizer, speculation: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    title = (
        f"{_SPECULATION[speculation]}: {lanes} of {LANES} lanes, {sum(len(job.tokens) for job in jobs)} tokens, "
        f"acceptance length {_acceptance_length(jobs):.2f}"
    )
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("suite", width=6)
    table.add_column("prompt", ratio=2, no_wrap=True)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("accept", justify="right", width=6)
    table.add_column("answer", ratio=3, no_wrap=True)
    for job in jobs:
        style = "dim" if not job.tokens else "green" if job.finish_reason else "bold"
        tail = " ".join(tokenizer.decode(job.tokens[-24:]).decode("utf-8", "replace").split())
        accept = f"{_acceptance_length([job]):.2f}" if job.bursts > 1 else ""
        cells = (job.suite, job.title, str(len(job.tokens) or ""), accept, tail)
        table.add_row(*(Text(cell, overflow="ellipsis") for cell in cells), style=style)
    return table


def _table(plain: Run, drafted: Run) -> RenderableType:
    from rich.table import Table

    table = Table(title=f"12 prompts at {LANES} lanes, arithmetic {plain.fingerprint}", title_justify="left")
    table.add_column("")
    for speculation in (False, True):
        table.add_column(_SPECULATION[speculation], justify="right")
    rows = (
        ("goodput", "{:.1f} tok/s", lambda run: run.goodput),
        ("output-window throughput", "{:.1f} tok/s", lambda run: run.output_window),
        ("median TTFT", "{:.0f} ms", lambda run: 1000 * run.median_ttft),
        ("acceptance length", "{:.2f}", lambda run: run.acceptance_length),
    )
    for name, form, value in rows:
        table.add_row(name, form.format(value(plain)), form.format(value(drafted)))
    return table
