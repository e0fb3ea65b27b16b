from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.logprobs import LOWEST, read_scores, score
from paceline.types import TokenLogprob


def scores(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprob]:
    packed = score(logits, torch.tensor(tokens), max(tops))
    return read_scores(np.array(packed.tolist(), np.int64), tops)


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = 3 * torch.randn(7, 5000, generator=torch.Generator().manual_seed(1))
    expected = logits.double().log_softmax(1)
    best = expected.argsort(1, descending=True)
    for row, entry in enumerate(scores(logits, list(range(100, 107)), [3] * 7)):
        assert entry.logprob == pytest.approx(float(expected[row, 100 + row]), abs=2e-5)
        assert [token for token, _ in entry.top] == best[row, :3].tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(expected[row][best[row, :3]].tolist(), abs=2e-5)


def test_each_row_reports_what_it_is_asked_for() -> None:
    """Beside a row that wants more, and the same bits as alone."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    together = scores(logits, [1, 2, 3], [0, 20, 2])
    assert [len(entry.top) for entry in together] == [0, 20, 2]
    for row, top in enumerate([0, 20, 2]):
        assert scores(logits[row : row + 1], [row + 1], [top]) == [together[row]]


def test_ties_go_to_the_lower_id() -> None:
    (entry,) = scores(torch.zeros(1, 64), [9], [4])
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]
    assert [entry.logprob, *(logprob for _, logprob in entry.top)] == [pytest.approx(-math.log(64), abs=1e-6)] * 5


def test_what_json_cannot_say_is_a_number() -> None:
    logits = torch.tensor([[0.0, -torch.inf, torch.nan], [-torch.inf] * 3])
    possible, impossible = scores(logits, [1, 0], [3, 0])
    assert possible == TokenLogprob(LOWEST, ((0, 0.0), (1, LOWEST), (2, LOWEST)))
    assert impossible == TokenLogprob(LOWEST)
