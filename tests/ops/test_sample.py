"""Draws over the whole vocabulary, and the cut that filters make, against the picks that look at a row's head only."""

from __future__ import annotations

import torch

from paceline.ops.sample import draw, last_kept
from paceline.ops.sample.ref import KEEP_ALL
from paceline.ops.topk.ref import order_keys
from paceline.sampling import SamplingRows, pick


def mixed_rows(count: int) -> SamplingRows:
    """Every kind of row and combination of filters."""
    return SamplingRows.from_lists(
        [(0.0, 1.0, 0.7, 1.3, 2.0)[i % 5] for i in range(count)],
        [(0, 20, 0, 100, 1, 0, 5000)[i % 7] for i in range(count)],
        [(1.0, 0.9, 0.3, 1.0)[i % 4] for i in range(count)],
        [(0.0, 0.02, 0.0)[i % 3] for i in range(count)],
        range(count),
        [0] * count,
        range(50, 50 + count),
    )


def test_a_draw_above_the_cut_equals_the_pick_from_the_head() -> None:
    rows = mixed_rows(120)
    logits = torch.randn(120, 701, generator=torch.Generator().manual_seed(0)) * 2
    logits[::3] = logits[::3].round()  # ties at the cut
    cut = last_kept(logits, rows.temperature, rows.top_k, rows.top_p, rows.limits)
    drawn = draw(logits, rows.temperature, rows.min_p, rows.seed, rows.choice, rows.position, cut)
    assert torch.equal(drawn, pick(logits, rows))


def test_the_cut_keeps_what_the_filters_keep() -> None:
    logits = torch.tensor([[0.6, 0.1, 0.2, 0.1]]).log().expand(7, 4)
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    top_k = torch.tensor([0, 3, 0, 0, 2, 9, 1])
    top_p = torch.tensor([1.0, 1.0, 0.61, 1e-9, 0.76, 1.0, 0.5])
    cut = last_kept(logits, temperature, top_k, top_p, tuple(top_k.tolist()))
    kept = order_keys(logits, torch.arange(4)) >= cut[:, None]
    # row 4: of the two best ones, renormalised, the first has a share of 0.75
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 2],
        [0],
        [0, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert cut[0] == cut[6] == KEEP_ALL
