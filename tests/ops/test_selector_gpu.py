"""The selector's kernels against the reference, and lane by lane."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.selector import candidate_scores, ref, selector_walk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def inputs(lanes: int, slots: int, k: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The arguments of ``selector_walk``, on the CPU."""
    vocab, rows, generator = 1000, lanes * slots, torch.Generator().manual_seed(rank)
    codebooks = [torch.randn(vocab, rank, generator=generator).to(dtype) for _ in range(2)]
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)])
    return [
        torch.randn(lanes, slots, k, generator=generator) * 3,
        ids.view(lanes, slots, k),
        torch.randn(lanes, slots, rank, generator=generator) * 0.2,
        torch.randint(vocab, (lanes,), generator=generator),
        *codebooks,
        torch.tensor([(0.0, 0.7, 1.3)[i % 3] for i in range(rows)]),
        torch.arange(rows) * 7919,
        torch.arange(rows) % 2,
        torch.arange(rows) + 100,
    ]


@pytest.mark.parametrize(
    ("lanes", "slots", "k", "rank", "dtype"),
    [
        (6, 7, 16, 256, torch.float32),
        (8, 7, 16, 256, torch.bfloat16),
        (3, 4, 5, 33, torch.float16),
        (1, 15, 64, 64, torch.float32),
    ],
)
def test_scores_and_walk(lanes: int, slots: int, k: int, rank: int, dtype: torch.dtype) -> None:
    arguments = inputs(lanes, slots, k, rank, dtype)
    on_gpu = [t.cuda() for t in arguments]
    slot = [t[:, 0] for t in arguments[:3]] + arguments[3:6]
    exact = ref.candidate_scores(*(t.double() if t.is_floating_point() else t for t in slot))
    scores = candidate_scores(*([t[:, 0] for t in on_gpu[:3]] + on_gpu[3:6]))
    # float32 sums of up to 256 products of size 0.2
    torch.testing.assert_close(scores.cpu().double(), exact, rtol=1e-5, atol=2e-5)
    assert torch.equal(selector_walk(*on_gpu).cpu(), ref.selector_walk(*arguments))


def test_a_lane_does_not_depend_on_its_batch() -> None:
    lanes, slots = 10, 7
    arguments = [t.cuda() for t in inputs(lanes, slots, 16, 256, torch.float32)]
    tokens = selector_walk(*arguments)
    for count in range(1, lanes + 1):
        order = torch.randperm(lanes, device="cuda")[:count]
        rows = (order[:, None] * slots + torch.arange(slots, device="cuda")).flatten()
        some = [t[order] for t in arguments[:4]] + arguments[4:6] + [t[rows] for t in arguments[6:]]
        assert torch.equal(selector_walk(*some), tokens[order])


def test_lanes_of_nobody() -> None:
    """They may hold any numbers and any anchor."""
    arguments = [t.cuda() for t in inputs(6, 7, 16, 256, torch.float32)]
    tokens = selector_walk(*arguments)
    logits, _, hidden, anchors = arguments[:4]
    logits[4:], hidden[4:] = torch.nan, torch.inf
    anchors[4], anchors[5] = -(2**60), 2**60
    arguments[6][28:] = torch.nan
    assert torch.equal(selector_walk(*arguments)[:4], tokens[:4])
