"""Inputs of forwards that are launched before a round's results are known. (Against those of the next round:
``tests/engine/test_ahead.py``.)"""

from __future__ import annotations

import torch

from paceline.batch import facts, unpack
from paceline.ops.advance import advance, advance_counts, input_tokens


def test_spans_move_and_count_what_there_is_room_for() -> None:
    packed = torch.from_numpy(facts([3, 2, 1], [10, 20, 30], [0, 1, 2], 8, 5, spare_lane=7))
    batch = unpack("decode", packed, [3] * 5, [0] * 5, 8, 5)
    anchors, places, limits = torch.arange(100, 105), torch.tensor([1, 2, 0, -1, -1]), torch.tensor([9, 6, 3, 0, 0])
    advance(torch.tensor([[8, 50], [2, 51], [5, 52]]), places, anchors, batch, limits)
    assert batch.positions.tolist() == [12, 13, 14, 25, 26, 38, 0, 0]
    assert batch.span_bases.tolist() == [12, 25, 38, 0, 0] and batch.span_lengths.tolist() == [3, 1, 0, 0, 0]
    assert anchors.tolist() == [51, 52, 50, 103, 104]


def test_counts_grow_by_what_was_kept() -> None:
    counts = torch.tensor([0, 4, 7])
    advance_counts(torch.tensor([[8, 50], [2, 51]]), torch.tensor([1, -1, 0]), counts)
    assert counts.tolist() == [2, 4, 15]


def test_tokens_come_from_anchors_and_drafts() -> None:
    anchors, drafts = torch.tensor([7, 8, 9]), torch.tensor([[21, 22], [31, 32]])
    out = torch.empty(5, dtype=torch.long)
    input_tokens(anchors, torch.tensor([0, 3, 4, 2, 6]), drafts, out)
    assert out.tolist() == [7, 21, 22, 9, 32]
    input_tokens(anchors, torch.tensor([1, 1, 2, 0, 0]), None, out)
    assert out.tolist() == [8, 8, 9, 7, 7]
