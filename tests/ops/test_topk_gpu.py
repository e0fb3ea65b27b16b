"""The kernels of top_k and argmax: exactly the reference, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.topk import argmax, ref, top_k

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("vocab", [1, 129, 4097, 248_320])
def test_equals_the_reference(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    distinct = torch.randn(5, vocab, generator=generator)
    ties = torch.randint(-2, 3, (5, vocab), generator=generator).float()
    masked = torch.where(torch.rand(5, vocab, generator=generator) < 0.02, distinct, -torch.inf)
    broken = torch.where(torch.rand(5, vocab, generator=generator) < 0.3, torch.nan, ties * torch.inf)
    for logits in (distinct, ties, masked, broken, torch.full((2, vocab), -torch.inf), -torch.zeros(2, vocab)):
        for k in {1, 7, 16, 64, 100} & set(range(1, vocab + 1)):
            for got, expected in zip(top_k(logits.cuda(), k), ref.top_k(logits, k), strict=True):
                assert torch.equal(got.cpu(), expected)
        assert torch.equal(argmax(logits.cuda()).cpu(), ref.argmax(logits))


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(70, 3001, device="cuda").mul(4).round().div(4)
    wide = torch.empty(70, 4000, device="cuda")
    wide[:, 7:3008] = logits
    values, ids = top_k(logits, 16)
    for count in range(1, 71):
        order = torch.randperm(70, device="cuda")[:count]
        for index, batch in ((order, logits[order]), (order, wide[order][:, 7:3008]), (order, logits.T[:, order].T)):
            assert torch.equal(top_k(batch, 16)[0], values[index]) and torch.equal(top_k(batch, 16)[1], ids[index])
            assert torch.equal(argmax(batch), ids[index, 0])
