"""Normalisations against float64. Their sums have positive terms, so the relative error stays within a few roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.conv import Convolved, dynamic_conv
from paceline.ops.norm import add_rms_norm, add_rms_norm_twice, gated_output, gated_rms_norm, l2_norm, rms_norm

RELATIVE = 1e-6
"""About eight roundings of float32: the sum's tree, the division, the root, and the products around them."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=RELATIVE, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_rms_norm(scale: float, eps: float) -> None:
    x, weight = scale * randn(5, 3, 512), randn(512, seed=1)
    wide = x.double()
    close(rms_norm(x, weight, eps), wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double())


@pytest.mark.parametrize("norm", [1e-4, 1e-3, 1.0, 1e3])
def test_l2_norm_has_its_eps_inside_the_root_of_the_sum(norm: float) -> None:
    x = randn(7, 128)
    x = norm * x / x.norm(dim=-1, keepdim=True)
    wide = x.double()
    close(l2_norm(x), wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(2, 16)
    assert torch.equal(l2_norm(zeros), zeros)
    assert torch.equal(rms_norm(zeros, torch.ones(16), 1e-6), zeros)


def test_the_gate_comes_after_norm_and_weight() -> None:
    x, gate, weight = randn(4, 6, 128), 3.0 * randn(4, 6, 128, seed=1), randn(128, seed=2)
    wide, g = x.double(), gate.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    close(gated_rms_norm(x, gate, weight, 1e-6), normed * torch.nn.functional.silu(g))


@pytest.mark.parametrize("operand", [None, torch.float32])
def test_fused_forms_are_what_they_fuse(operand: torch.dtype | None) -> None:
    x, delta, weight, z = randn(5, 3, 64), randn(5, 3, 64, seed=1), randn(64, seed=2), 4.0 * randn(5, 3, 64, seed=3)
    total, normed = add_rms_norm(x[:, 0], delta[:, 0], weight, 1e-6, operand)
    assert torch.equal(total, x[:, 0] + delta[:, 0])
    assert isinstance(normed, Tensor) and torch.equal(normed, rms_norm(total, weight, 1e-6))
    again, n, rows = add_rms_norm_twice(x[:, 0], delta[:, 0], weight, 1e-6, operand or torch.float16)
    assert torch.equal(again, total) and torch.equal(n, normed) and isinstance(rows, Tensor) and torch.equal(rows, normed)
    same, normed = add_rms_norm(total, None, weight, 1e-6, operand)
    assert same is total and isinstance(normed, Tensor) and torch.equal(normed, rms_norm(total, weight, 1e-6))
    out = gated_output(x, z, weight, 1e-6, operand)
    assert isinstance(out, Tensor) and torch.equal(out, gated_rms_norm(x, z, weight, 1e-6).view(5, 192))


def test_a_convolution_may_be_left_to_the_norm_behind_it() -> None:
    x, delta, weight = randn(10, 64), randn(10, 64, seed=1), randn(64, seed=2)
    base, dynamic = randn(2, 64, seed=3), randn(2, 5, 2, 4, seed=4)
    mixed = dynamic_conv(delta.unflatten(0, (2, 5)), base, dynamic)
    assert isinstance(mixed, Tensor)
    expected = add_rms_norm(x, mixed.flatten(0, 1), weight, 1e-6)
    left = Convolved(delta, base, dynamic)
    for got in (add_rms_norm(x, left, weight, 1e-6), add_rms_norm_twice(x, left, weight, 1e-6, torch.float16)[:2]):
        for part, wanted in zip(got, expected, strict=True):
            assert isinstance(part, Tensor) and isinstance(wanted, Tensor) and torch.equal(part, wanted)
