"""Selection against a brute-force sort, ties, and row invariance."""

import pytest
import torch

from paceline.ops.topk import argmax, top_k
from paceline.ops.topk.ref import order_keys


def brute_force(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def check(logits: torch.Tensor, k: int) -> None:
    values, ids = top_k(logits, k)
    assert values.shape == ids.shape == (len(logits), k)
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    assert ids.tolist() == [brute_force(row, k) for row in logits.tolist()]
    assert torch.equal(values, logits.gather(1, ids))
    assert torch.equal(argmax(logits), ids[:, 0])


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 127, 1000, 4097])
def test_equals_brute_force(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    distinct = torch.randn(6, vocab, generator=generator)
    many_ties = torch.randint(-2, 3, (6, vocab), generator=generator).float()
    mostly_masked = torch.where(torch.rand(6, vocab, generator=generator) < 0.02, distinct, -torch.inf)
    for logits in (distinct, many_ties, mostly_masked, torch.zeros(2, vocab), torch.full((2, vocab), -torch.inf)):
        for k in {1, 2, 7, 20, 256, vocab}:
            if k <= vocab:
                check(logits, k)


def test_a_tie_goes_to_the_lower_id_across_blocks() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 300, 301, 2]] = 1.0
    assert top_k(logits, 6)[1].tolist() == [[2, 300, 301, 4999, 0, 1]]
    assert argmax(logits).tolist() == [2]


def test_nan_never_wins() -> None:
    logits = torch.full((2, 1000), -torch.inf)
    logits[0, 5] = torch.nan
    logits[0, 700] = -1e30
    logits[1, 0] = torch.nan
    values, ids = top_k(logits, 3)
    assert argmax(logits).tolist() == [700, 0]
    assert ids.tolist() == [[700, 0, 1], [0, 1, 2]]
    assert not values.isnan().any()


def test_infinities_keep_their_order() -> None:
    logits = torch.tensor([[0.0, torch.inf, torch.finfo(torch.float32).max, -torch.inf]])
    assert argmax(logits).tolist() == [1]
    assert top_k(logits, 4)[1].tolist() == [[1, 2, 0, 3]]


def test_order_keys_sort_as_the_selection_does() -> None:
    row = torch.tensor([[1.5, -0.0, 0.0, -torch.inf, torch.nan, 1.5, torch.inf, -2.0, 1e-45, -1e-45, -3e38]])
    keys = order_keys(row, torch.arange(row.shape[1]))
    assert keys.argsort(dim=1, descending=True).tolist() == top_k(row, row.shape[1])[1].tolist()
    assert len(set(keys[0].tolist())) == row.shape[1]


@pytest.mark.parametrize("k", [0, -1, 11])
def test_an_impossible_k_names_both_numbers(k: int) -> None:
    with pytest.raises(ValueError, match=rf"1 \.\.\. 10 .*got {k}"):
        top_k(torch.zeros(2, 10), k)


def test_a_row_does_not_depend_on_its_batch() -> None:
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 3001, generator=generator).mul(4).round().div(4)  # with ties
    wide = torch.randn(70, 2 * 3001, generator=generator)
    wide[:, ::2] = logits
    values, ids = top_k(logits, 20)
    first = argmax(logits)
    try:
        for count in range(1, 71):
            torch.set_num_threads(1 + count % 4)
            order = torch.randperm(70, generator=generator)[:count]
            head = torch.arange(count)
            for rows, batch in (
                (order, logits[order]),
                (head, wide[:count, ::2]),
                (head + 70 - count, logits[70 - count :]),
            ):
                got_values, got_ids = top_k(batch, 20)
                assert torch.equal(got_values, values[rows]) and torch.equal(got_ids, ids[rows])
                assert torch.equal(argmax(batch), first[rows])
    finally:
        torch.set_num_threads(threads)
