"""The candidate selector's score and walk against their definitions."""

from __future__ import annotations

import torch

from paceline.ops.sample import draw_candidates
from paceline.ops.selector import candidate_scores, selector_walk


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


def test_the_walk_draws_each_slot_given_the_one_before() -> None:
    generator = torch.Generator().manual_seed(1)
    lanes, slots, k, rank, vocab = 3, 5, 4, 8, 40
    logits, hidden = torch.randn(lanes, slots, k, generator=generator), torch.randn(lanes, slots, rank, generator=generator)
    predecessor, successor = (torch.randn(vocab, rank, generator=generator) for _ in range(2))
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(lanes * slots)]).view(lanes, slots, k)
    anchors = torch.randint(vocab, (lanes,), generator=generator)
    temperature = torch.tensor([0.0, 0.7, 1.3] * 5)
    seed, choice, position = torch.arange(15), torch.arange(15) % 2, torch.arange(100, 115)
    tokens = selector_walk(logits, ids, hidden, anchors, predecessor, successor, temperature, seed, choice, position)
    assert tokens.shape == (lanes, slots)
    for lane in range(lanes):
        previous = anchors[lane : lane + 1]
        for slot in range(slots):
            at, row = (slice(lane, lane + 1), slot), slice(lane * slots + slot, lane * slots + slot + 1)
            scores = candidate_scores(logits[at], ids[at], hidden[at], previous, predecessor, successor)
            index = draw_candidates(scores, ids[at], temperature[row], seed[row], choice[row], position[row])
            previous = ids[lane, slot, index]
            assert tokens[lane, slot] == previous
