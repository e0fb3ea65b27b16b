"""The candidate selector's score against its definition."""

from __future__ import annotations

import torch

from paceline.ops.selector import candidate_scores


def test_score_of_every_candidate() -> None:
    generator = torch.Generator().manual_seed(0)
    lanes, k, rank, vocab = 4, 5, 32, 50
    logits, hidden = torch.randn(lanes, k, generator=generator), torch.randn(lanes, rank, generator=generator)
    predecessor, successor = (torch.randn(vocab, rank, generator=generator) for _ in range(2))
    candidates = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(lanes)])
    previous = torch.randint(vocab, (lanes,), generator=generator)
    got = candidate_scores(logits, candidates, hidden, previous, predecessor, successor)
    assert got.shape == (lanes, k)
    for lane in range(lanes):
        for slot in range(k):
            before, after = predecessor[previous[lane]].double(), successor[candidates[lane, slot]].double()
            expected = logits[lane, slot].double() + (before * hidden[lane].double() * after).sum()
            # 32 products of three factors, about one rounding of float32 each
            assert abs(got[lane, slot].double() - expected) < 1e-5
