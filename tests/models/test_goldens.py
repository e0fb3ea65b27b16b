"""The demo pair against its goldens: greedy tokens of ``transformers`` and drafts of ``dflash``, both in float32.

A foreign float32 implementation may choose otherwise where the two best logits are close, so tokens are compared at the
steps with a margin of at least 0.1.
"""

from __future__ import annotations

from typing import Any

import pytest
from demo_pair import goldens, pair
from golden_walk import LANES, Walk, walk_all

from paceline import LLM, SamplingParams

MARGIN = 0.1


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    return walk_all(pair(lanes=LANES))


def test_picks_equal_the_golden_tokens_wherever_the_margin_decides(walks: list[Walk]) -> None:
    """Scripted drafts in spans of eight, most of whose rows are fed more than once: rejected ones come again."""
    steps, decided = 0, 0
    for walk in walks:
        for step, (token, margin) in enumerate(zip(walk.path, walk.golden["margins"], strict=True)):
            steps += 1
            if margin >= MARGIN:
                decided += 1
                assert walk.picks[step] == {token}, f"step {step} after {walk.golden['text'][:40]!r}"
    assert (steps, decided) == (1947, 1897)


def test_a_step_gives_the_same_pick_each_time(walks: list[Walk]) -> None:
    """Also where the margin is small: between our own rounds there is no tolerance."""
    assert all(len(picks) == 1 for walk in walks for picks in walk.picks.values())


def test_drafts_and_keeps_equal_the_reference(walks: list[Walk]) -> None:
    for walk in walks:
        assert walk.drafts[:4] == walk.golden["drafts"]
        assert walk.keeps == walk.golden["keeps"]
    assert sum(len(walk.keeps) for walk in walks) == 486


@pytest.mark.parametrize("speculation", [True, False])
def test_free_running_up_to_the_first_close_step(speculation: bool) -> None:
    rows = sorted(goldens(), key=lambda golden: len(golden["prompt_tokens"]))[:12]
    prompts = [golden["prompt_tokens"] for golden in rows]
    margins = [golden["margins"] for golden in rows]
    certain = [next((step for step, margin in enumerate(each) if margin < MARGIN), len(each)) for each in margins]
    options: dict[str, Any] = {"dtype": "float32", "cache_type_k": "f32", "cache_type_v": "f32"}
    with LLM(**options, max_ctx=256, threads=1, speculation=speculation) as llm:
        results = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=max(sure, 1)) for sure in certain])
    compared = 0
    for golden, result, sure in zip(rows, results, certain, strict=True):
        assert list(result.tokens[:sure]) == golden["tokens"][:sure]
        compared += sure
    assert compared == 294
