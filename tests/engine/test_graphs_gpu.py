"""Captured decode forwards against the same functions run as they are: equal tokens, equal acceptance, equal to the bit."""

from __future__ import annotations

import pytest
import torch

from paceline import LLM, SamplingParams

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
