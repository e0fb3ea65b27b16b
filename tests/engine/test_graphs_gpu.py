"""Captured forwards against the same functions run as they are: equal tokens, equal acceptance, equal to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import build
from paceline.engine.graphs import CapturedPrefill
from paceline.engine.plan import Following, PrefillSpan, Round, RoundResult, VerifySpan
from paceline.engine.runner import Runner
from paceline.models.qwen35 import Hidden
from paceline.ops.kv import read_pages
from paceline.types import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPTS = [
    "The river",
    "def add(a, b):",
    "Once upon a time there was",
    "1 2 3 4 5 6",
    "import torch",
    "A list of colours: red,",
]
SAMPLING = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=7 + index, max_tokens=40, ignore_eos=True)
    for index, (temperature, top_p, top_k) in enumerate(
        [(0.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.9, 0), (0.0, 1.0, 0), (0.8, 0.95, 20), (0.0, 1.0, 0)]
    )
]


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("lanes", [1, 3, 6])
def test_graphs_change_nothing(lanes: int, policy: str) -> None:
    results = []
    for graphs in (True, False):
        with LLM(device="cuda", max_concurrency=lanes, max_ctx=1024, cuda_graphs=graphs, draft_policy=policy) as llm:
            results.append(llm.generate(PROMPTS, SAMPLING))
    for captured, eager in zip(*results, strict=True):
        assert captured.tokens == eager.tokens
        if policy == "fixed":
            assert captured.stats.keeps == eager.stats.keeps


@pytest.mark.parametrize("lanes", [2, 6])
def test_prompts_take_over_lanes_that_something_was_begun_for(lanes: int) -> None:
    """Lanes end when a forward has been begun for them, and longer prompts are read in their place beside it. Logprobs show
    what tokens may not."""
    prompts = ["and so on " * (1 + 37 * number % 90) for number in range(48)]
    sampling = [
        SamplingParams(
            temperature=0.0 if number % 3 else 0.9, seed=number, max_tokens=2 + 7 * number % 31, ignore_eos=True, logprobs=1
        )
        for number in range(len(prompts))
    ]
    results = []
    for early in (True, True, False):
        options = {"run_ahead": early, "prompts_beside": early, "draft_policy": "fixed"}
        with LLM(device="cuda", max_concurrency=lanes, max_ctx=1024, **options) as llm:  # type: ignore[arg-type]
            results.append(llm.generate(prompts, sampling))
    for first, second, plain in zip(*results, strict=True):
        assert first.tokens == second.tokens == plain.tokens
        assert first.logprobs == second.logprobs == plain.logprobs


@pytest.mark.parametrize("beside", [False, True])
def test_prompts_that_arrive_together(beside: bool) -> None:
    """Eight at a time, lanes of which end with their first token or soon: rounds of prompts follow each other closely, and
    each is committed before the next one overwrites what it has left."""
    prompts = [[(7 + 31 * number * at + at * at) % 5000 for at in range(107 - number % 3)] for number in range(64)]
    sampling = [
        SamplingParams(
            temperature=0.0 if number % 2 else 0.9, seed=number, max_tokens=1 + number // 8 % 3, ignore_eos=True, logprobs=1
        )
        for number in range(len(prompts))
    ]
    results = []
    for graphs in (True, False):
        options = {"cuda_graphs": graphs, "prompts_beside": beside and graphs, "draft_policy": "fixed"}
        with LLM(device="cuda", max_concurrency=8, max_ctx=1024, **options) as llm:  # type: ignore[arg-type]
            results.append(llm.generate(prompts, sampling))
    for captured, eager in zip(*results, strict=True):
        assert captured.tokens == eager.tokens and captured.logprobs == eager.logprobs


@pytest.fixture(scope="module")
def runner() -> Runner:
    options = EngineOptions(device="cuda", max_concurrency=9, max_ctx=2048)
    return build(options).runner


Left = tuple[RoundResult, list[Tensor]]


def read(runner: Runner, lengths: Sequence[int]) -> Left:
    """A round of whole prompts: its results, and what is in state behind it."""
    pool, prompts = runner.pool, []
    drafter = [cache.data for cache in (*pool.draft_k, *pool.draft_v)]
    for rows in drafter:
        rows.zero_()
    for number, length in enumerate(lengths):
        lane = pool.admit(length + 32)
        assert lane is not None
        tokens = tuple((7 + 31 * number * at + at * at) % 5000 for at in range(length))
        request = Request(f"{number}", tokens, 0.7, 1.0, 0, 0.0, number, 32, logprobs=1, prompt_logprobs=1)
        prompts.append(PrefillSpan(request, lane, 0, tokens, final=True))
    result = runner.run(Round((), tuple(prompts)))
    lanes = [span.lane for span in prompts]
    left = [pool.gdn[:, lanes], pool.history[:, lanes], *(rows[1:].clone() for rows in drafter)]
    for lane in reversed(lanes):  # so that the next prompts get the same
        pool.release(lane)
    return result, left


@pytest.mark.parametrize("beside", [False, True])
def test_rounds_of_prompts(beside: bool, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every size, one after another: with graphs where there is one, and with what they leave in one place."""
    captured = Runner(runner.target, runner.drafter, runner.pool, graphs=runner.graphs, prompts_beside=beside)
    plain = Runner(runner.target, runner.drafter, runner.pool)
    rows: list[int | None] = []
    run = CapturedPrefill.run

    def noted(self: CapturedPrefill) -> Hidden:
        rows[-1] = self.shape.rows
        return run(self)

    monkeypatch.setattr(CapturedPrefill, "run", noted)
    rounds = {
        (107,): 128,
        (107,) * 8: 896,
        (20,) * 4: 128,
        (107,) * 6: 672,
        (9,) * 8: 256,
        (1, 300, 64): 384,
        (513,): 544,
        (1000, 24): 1024,
        (1025,): None,
        (20,) * 9: None,
        (512,): 512,
    }
    for lengths, expected in rounds.items():
        rows.append(None)
        ours, left = read(captured, lengths)
        assert rows[-1] == expected, lengths
        theirs, known = read(plain, lengths)
        for name in ("prefill", "logprobs", "prompt_logprobs", "broken"):
            assert getattr(ours, name) == getattr(theirs, name), f"{name} of {lengths}"
        for got, want in zip(left, known, strict=True):
            assert torch.equal(got, want), lengths


DRAFTS = (7, *[0] * 11, 7, 0, 0, 3, 7, *[0] * 8, 1, *[0] * 7, 7)
"""Of the first of three lanes. The second drafts two rounds later, the third one later, and half as much."""


@pytest.mark.parametrize("ahead", [False, True])
def test_context_of_generated_rows(ahead: bool, runner: Runner) -> None:
    """Lanes that draft now and then, and catch up before: tokens, and what the drafter sees in the end."""
    captured = Runner(runner.target, runner.drafter, runner.pool, graphs=runner.graphs, run_ahead=ahead)
    plain = Runner(runner.target, runner.drafter, runner.pool)
    (ours, left), (theirs, known) = (decode(each) for each in (captured, plain))
    assert ours == theirs
    for got, want in zip(left, known, strict=True):
        assert torch.equal(got, want)


@torch.inference_mode()
def decode(runner: Runner) -> tuple[list[list[int]], list[Tensor]]:
    pool, drafter = runner.pool, runner.drafter
    assert drafter is not None and pool.shape.drafter is not None
    prompts = [tuple((7 + 31 * number * at + at * at) % 5000 for at in range(20 + 13 * number)) for number in range(3)]
    requests = [Request(f"{at}", prompt, 0.7, 1.0, 0, 0.0, at, 400) for at, prompt in enumerate(prompts)]
    lanes = [pool.admit(512) for _ in requests]
    read = [PrefillSpan(r, lane or 0, 0, r.prompt, final=True) for r, lane in zip(requests, lanes, strict=True)]
    tokens = [[token or 0] for token in runner.run(Round((), tuple(read))).prefill]
    later = DRAFTS[-2:] + DRAFTS[:-2], tuple(count // 2 for count in DRAFTS[-3:] + DRAFTS[:-3])
    script = [*zip(DRAFTS, *later, strict=True)]
    for drafts, coming in zip(script, [*script[1:], script[0]], strict=True):
        spans = tuple(
            VerifySpan(span.request, span.lane, pool.committed(span.lane), own[-1], count)
            for span, own, count in zip(read, tokens, drafts, strict=True)
        )
        following = tuple(Following(place, count) for place, count in enumerate(coming))
        for own, emitted in zip(tokens, runner.run(Round(spans, (), following=following)).verify, strict=True):
            own += emitted
        pool.check()
    runner.forget()
    spans = tuple(VerifySpan(span.request, span.lane, pool.committed(span.lane), 0, 0) for span in read)
    drafter.catch_up(spans, pool)
    window, left = pool.shape.drafter.sliding_window or pool.shape.max_ctx, []
    for view in pool.draft_views():
        for cache in (view.k, view.v):
            rows = [read_pages(cache, view.page_table[span.lane].long()).flatten(0, 1) for span in spans]
            left += [row[max(0, span.start - window + 1) : span.start] for row, span in zip(rows, spans, strict=True)]
    for span in reversed(spans):
        pool.release(span.lane)
    return tokens, left
