"""Made-up acceptance: its mean is what was asked for, and it does not depend on how many drafts are verified."""

from __future__ import annotations

import random

import pytest

from paceline.engine.plan import VerifySpan
from paceline.engine.synthetic import SyntheticAcceptance
from paceline.errors import ConfigError
from paceline.types import Request

BLOCK, PROMPT, TOKENS = 8, 107, 96


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple(random.Random(number).choices(range(1000), k=PROMPT)) for number in range(count)]


def rounds(
    synthetic: SyntheticAcceptance, prompt: tuple[int, ...], most: int, tokens: int = TOKENS
) -> list[tuple[int, int, int]]:
    """The rounds of one request, whose token 0 came with its prompt: (first token, drafts, drafts that held)."""
    request, done, all_rounds = Request("a", prompt, 0.0, 1.0, 0, 0.0, 0, tokens), 1, []
    while done < tokens:
        count = min(most, tokens - done - 1)
        held = synthetic.held(VerifySpan(request, 0, PROMPT + done - 1, 5, count))
        all_rounds.append((done, count, held))
        done += held + 1
    return all_rounds


@pytest.mark.parametrize("length", [1.0, 2.0, 4.0, 8.0])
def test_the_mean_over_twenty_short_requests_is_the_length(length: float) -> None:
    synthetic = SyntheticAcceptance(length, BLOCK)
    held = [held for prompt in prompts(20) for _, _, held in rounds(synthetic, prompt, BLOCK - 1)]
    # a request's end cuts its last round short
    assert 1.0 + sum(held) / len(held) == pytest.approx(length, rel=0.02)


def test_every_draft_holds_as_often() -> None:
    synthetic = SyntheticAcceptance(4.0, BLOCK)
    held = [held for _, drafts, held in rounds(synthetic, prompts(1)[0], BLOCK - 1, 4000) if drafts == BLOCK - 1]
    for draft in range(BLOCK - 1):
        tried = sum(count >= draft for count in held)
        assert sum(count > draft for count in held) / tried == pytest.approx(synthetic.rate, abs=0.05)


def test_which_tokens_are_missed_does_not_depend_on_how_many_are_verified() -> None:
    synthetic = SyntheticAcceptance(4.0, BLOCK)
    for prompt in prompts(5):
        every = [one for most in (1, 3, 7) for one in rounds(synthetic, prompt, most)]
        held = {first + draft for first, _, count in every for draft in range(count)}
        missed = {first + count for first, drafts, count in every if count < drafts}
        assert missed and not held & missed


def test_a_length_outside_the_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"\[1, 8\].*got 9"):
        SyntheticAcceptance(9.0, BLOCK)
