"""Products against float64, within the error bound of a float32 sum."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.linear import linear, pack
from paceline.ops.quant import dequantize
from paceline.ops.quant import pack as quant_pack
from paceline.types import RowKind

KINDS: tuple[RowKind, ...] = ("decode", "prefill")
PRECISION = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 6, 512), (17, 37, 96), (130, 64, 1536)])
def test_equals_float64(kind: RowKind, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight = randn(rows, k, seed=1), randn(n, k, seed=2).to(dtype)
    got = linear(x, pack(weight), kind)
    assert got.dtype == torch.float32 and got.shape == (rows, n)
    # K products and sums, each off by at most 2^-24, and one rounding of the result to the weight's type. Products of
    # float32 factors are rounded too, which the factor of two covers.
    a, b = x.to(dtype).double(), weight.double()
    expected = a @ b.T
    bound = 2 * k * 2.0**-24 * (a.abs() @ b.abs().T) + expected.abs() * 2.0 ** -PRECISION[dtype]
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
def test_packing_keeps_the_weight(kind: RowKind, dtype: torch.dtype) -> None:
    weight = randn(37, 100).to(dtype)
    assert torch.equal(linear(torch.eye(100), pack(weight), kind), weight.float().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stored_weight_is_rounded_like_the_input(dtype: torch.dtype) -> None:
    stored, x = quant_pack(randn(12, 64)), randn(5, 64, seed=3).to(dtype)
    assert torch.equal(linear(x, stored, "decode"), linear(x, pack(dequantize(stored).to(dtype)), "decode"))
