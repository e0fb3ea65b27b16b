"""Adjusted logits against a plain computation row by row, and their bits in company; the engine with and without drafts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.errors import InvalidRequest
from paceline.penalties import adjusted
from paceline.types import Adjustments, Request, Row

VOCAB, EOS = 50, 7
CASES: list[dict[str, Any]] = [
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "logit_bias": {3: 5.0, 9: -100.0}},
    {"banned_token_ids": (1, 2, 3)},
    {"allowed_token_ids": (4, 5, 6, EOS), "min_tokens": 5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 4, "logit_bias": {EOS: 9}},
]


def request(prompt: list[int], case: dict[str, Any]) -> Request:
    adjust = Adjustments.of(prompt, SamplingParams(**case), VOCAB)
    return Request("r", tuple(prompt), 0.0, 1.0, 0, 0.0, 0, 20, frozenset({EOS}), True, adjust)


def expected(logits: Tensor, asked: Request, past: list[int]) -> Tensor:
    adjust, count = asked.adjust, Counter(past)
    assert adjust is not None
    out = logits.clone()
    for token in range(VOCAB):
        value = logits[token]
        if count[token] or token in asked.prompt:
            value = value / adjust.repetition_penalty if value > 0 else value * adjust.repetition_penalty
        value = value - torch.tensor(adjust.frequency_penalty) * count[token]
        value = value - torch.tensor(adjust.presence_penalty) * (count[token] > 0)
        value = value + dict(adjust.bias).get(token, 0.0)
        ends = token == EOS and len(past) < adjust.min_tokens
        banned = token in adjust.banned or ends or (bool(adjust.allowed) and token not in adjust.allowed)
        out[token] = -math.inf if banned else value
    return out


def test_rows_are_adjusted_one_by_one() -> None:
    """Spans of one to four rows, each with the drafts before it; between them rows that nobody adjusts."""
    random = torch.Generator().manual_seed(0)
    rows, pasts, tokens = [], [], torch.randint(VOCAB, (40,), generator=random)
    first = 0
    for number, case in enumerate(CASES):
        asked, width = request([1, 5, 5, 30 + number], case), 1 + number % 4
        known = torch.randint(VOCAB, (3,), generator=random).tolist()
        for index in range(first, first + width):
            rows.append(Row(index, asked, known, (first + 1, index + 1)))
            pasts.append(known + tokens[first + 1 : index + 1].tolist())
        first += width + 1
    logits = torch.randn(first, VOCAB, generator=random)
    before = logits.clone()
    got = adjusted(logits, rows, tokens)
    assert torch.equal(logits, before), "the logits of the forward are left alone"
    for row, past in zip(rows, pasts, strict=True):
        assert torch.allclose(got[row.index], expected(logits[row.index], row.request, past), rtol=1e-6, atol=1e-6)
        assert torch.equal(got[row.index], adjusted(logits, [row], tokens)[row.index]), "alone and in company"
    others = sorted(set(range(first)) - {row.index for row in rows})
    assert torch.equal(got[others], logits[others]) and adjusted(logits, []) is logits


def test_neutral_values_adjust_nothing() -> None:
    assert Adjustments.of([1], SamplingParams(logit_bias={3: 0.0}), VOCAB) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("banned_token_ids", (-1,)),
        ("allowed_token_ids", "12"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 49, got 50"):
        Adjustments.of([1], SamplingParams(allowed_token_ids=(3, 50)), VOCAB)


def test_the_engine_adjusts_whatever_is_drafted() -> None:
    prompts = ["The river", "1 2 3 4", "def f(x):"]
    greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    with LLM(max_concurrency=1, max_ctx=256, speculation=False) as llm:
        plain = llm.generate(prompts, greedy)
        first, last = plain[2].tokens[0], plain[2].tokens[-1]
        sampling = [
            replace(greedy, repetition_penalty=1.3),
            SamplingParams(seed=3, frequency_penalty=0.6, presence_penalty=0.4, max_tokens=14, min_tokens=14),
            replace(greedy, logit_bias={last: -100.0}, banned_token_ids=(first,)),
        ]
        alone = llm.generate(prompts, sampling)
    with LLM(max_concurrency=3, max_ctx=256, draft_policy="fixed") as llm:
        drafted = llm.generate(prompts, sampling)
    assert [r.tokens for r in drafted] == [r.tokens for r in alone]
    assert all(a.tokens != b.tokens for a, b in zip(drafted, plain, strict=True))
    assert len(drafted[1].tokens) == 14 and not {first, last} & set(drafted[2].tokens)
    assert any(keep > 1 for result in drafted for keep in result.stats.keeps), "drafts were accepted"
