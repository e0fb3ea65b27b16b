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
