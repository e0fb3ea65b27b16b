"""Rotary embedding against a rotation in the complex plane, and YaRN against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.config import RopeScaling
from paceline.ops.norm import rms_norm
from paceline.ops.rope import RopeTable, apply_rope, norm_and_rope

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rotary", "theta"), [(64, 1e6), (16, 1e7), (2, 1e4)])
def test_pairs_turn_by_their_angle(rotary: int, theta: float) -> None:
    x, positions = randn(6, 3, 64), torch.tensor([0, 1, 17, 1023, 1024, 3999])
    got = apply_rope(x, RopeTable(4000, rotary, theta, None, CPU).at(positions))
    half = rotary // 2
    frequency = theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    turn = torch.polar(torch.ones(6, half, dtype=torch.float64), positions.double()[:, None] * frequency)
    turned = torch.complex(x[..., :half].double(), x[..., half:rotary].double()) * turn[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    # cos and sin rounded to float32, two products and a sum
    torch.testing.assert_close(got[..., :rotary].double(), expected, rtol=0, atol=4 * 2.0**-24 * 5)
    assert torch.equal(got[..., rotary:], x[..., rotary:])
    assert torch.equal(got[0], x[0])


def test_scores_depend_on_the_distance_only() -> None:
    q, k = randn(1, 1, 64, seed=1), randn(1, 1, 64, seed=2)
    table = RopeTable(4000, 64, 1e6, None, CPU)

    def score(at: int, behind: int) -> float:
        turned = (apply_rope(x, table.at(torch.tensor([p]))) for x, p in ((q, at), (k, at - behind)))
        return float(torch.stack([x.double() for x in turned]).prod(0).sum())

    assert score(40, 33) == pytest.approx(score(3940, 33), abs=1e-5)
    assert abs(score(40, 33) - score(40, 34)) > 1e-2


def frequencies(scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Angles per position [64] and the factor on cos and sin, read off position 1 of a table for heads of 128."""
    cos, sin = (t[0, 0].double() for t in RopeTable(2, 128, 1e7, scaling, CPU).at(torch.tensor([1])))
    return torch.atan2(sin, cos), float(torch.hypot(cos, sin)[0])


def test_yarn() -> None:
    """Factor 32 of an original context of 8192. A pair turns 32 times within it at i = 128 ln(8192 / (2 pi 32)) /
    (2 ln 1e7) = 14.7 and once at 28.5, so pairs up to 14 stay, pairs from 29 are slowed 32 times, and in between the share
    of the slow frequency grows by 1/15 a pair."""
    plain, one = frequencies(None)
    scaled, factor = frequencies(RopeScaling(32.0, 8192))
    assert one == pytest.approx(1.0)
    assert factor == pytest.approx(1.3465736, abs=2e-7)
    ratio = scaled / plain
    assert ratio[:15].tolist() == pytest.approx([1.0] * 15, rel=1e-6)
    assert ratio[29:].tolist() == pytest.approx([1 / 32] * 35, rel=1e-5)
    assert float(ratio[20]) == pytest.approx(9 / 15 + 6 / 15 / 32, rel=1e-6)
    assert float(ratio[28]) == pytest.approx(1 / 15 + 14 / 15 / 32, rel=1e-5)


def test_a_given_attention_factor_wins() -> None:
    assert frequencies(RopeScaling(32.0, 8192, attention_factor=1.25))[1] == pytest.approx(1.25)
    assert frequencies(RopeScaling(4.0, 8192))[1] == pytest.approx(1.0 + 0.1 * math.log(4.0))


def test_norm_and_rope_is_one_after_the_other() -> None:
    layers = [x.unflatten(1, (2, 64)) for x in randn(5, 6 * 64).chunk(3, 1)]
    weights, positions = 1.0 + randn(3, 64, seed=1), torch.arange(4, 9)
    table = RopeTable(9, 64, 1e6, None, CPU)
    keys = norm_and_rope(layers, weights, 1e-6, table, positions)
    assert keys.shape == (3, 5, 2, 64)
    for got, x, weight in zip(keys, layers, weights, strict=True):
        assert torch.equal(got, apply_rope(rms_norm(x, weight, 1e-6), table.at(positions)))
