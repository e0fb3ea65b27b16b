"""The layout in which GPU products read a weight: every number is where the description says, and none has changed."""

from __future__ import annotations

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.ops.linear.tiles import TiledWeight, tile
from paceline.ops.quant import dequantize
from paceline.ops.quant.fields import IQ4_VALUES

FORMS = {
    "IQ4_XS": "IQ4_XS",
    "Q4_K": "Q4_K",
    "Q5_K": "Q5_K",
    "Q6_K": "Q6_K",
    "Q3_K": "Q6_K",
    "Q8_0": "Q8_0",
    "Q4_0": "Q8_0",
    "Q5_0": "Q8_0",
    "IQ4_NL": "Q8_0",
}
N, K = 150, 768


def values(weight: TiledWeight) -> Tensor:
    """The float32 values of a quantised weight, read element by element."""
    n, k = torch.meshgrid(torch.arange(weight.shape[0]), torch.arange(weight.shape[1]), indexing="ij")
    tile, w, r, g = n // 128, n // 16 % 8, n // 8 % 2, n % 8
    block, h, s, i, j, t, p = k // 256, k // 128 % 2, k // 32 % 4, k // 16 % 2, k // 8 % 2, k // 2 % 4, k % 2
    codes, high, scales, ds = weight.arrays
    word = codes[tile, block, h, r, w, g, t, s]
    scale = scales[tile, block, w, g, h, s, r]
    if weight.form == "Q8_0":
        word = torch.where(i == 0, word, high[tile, block, h, r, w, g, t, s])
        return scale.float() * (((word >> (8 * j + 16 * p)) & 255) - 128)
    d = ds[tile, block, w, g, r]
    if weight.form in ("IQ4_XS", "Q6_K"):
        d = d.float()
    if weight.form == "IQ4_XS":
        index = (word >> (16 * i + 8 * j + 4 * p)) & 15
        return d * (scale.int() - 32) * torch.tensor(IQ4_VALUES)[index].float()
    code = (word >> (8 * i + 4 * j + 16 * p)) & 15
    first, second = scale & 255, (scale >> 8) & 255
    if weight.form == "Q6_K":
        extra = high[tile, block, h, r, w, g, t, s // 2] >> (8 * (s % 2) + 4 * i + 2 * j + 16 * p)
        code = code + 16 * (extra & 3) - 32
        return d * (torch.where(i == 0, first, second) - 128) * code
    if weight.form == "Q5_K":
        extra = high[tile, block, h, r, w, g, t] >> (4 * s + 2 * i + j + 16 * p)
        code = code + 16 * (extra & 1)
    d, dmin = (half.float() for half in d[..., None].view(torch.float16).unbind(-1))
    return d * first * code - dmin * second


@pytest.mark.parametrize("qtype", FORMS)
def test_values_are_those_of_the_file(qtype: str) -> None:
    stored = random_blocks(qtype, N, K)
    weight = tile(stored, torch.bfloat16, "cpu")
    assert (weight.form, weight.shape, weight.tiles, weight.blocks) == (FORMS[qtype], (N, K), 2, 3)
    assert torch.equal(values(weight), dequantize(stored))


@pytest.mark.parametrize("qtype", ["IQ4_XS", "Q6_K"])
def test_no_block_has_a_factor_of_zero(qtype: str) -> None:
    stored = random_blocks(qtype, N, K)
    at = {"IQ4_XS": 0, "Q6_K": 208}[qtype]
    stored.data.view(N, 3, -1)[7, 1, at : at + 2] = 0
    weight = tile(stored, torch.bfloat16, "cpu")
    assert torch.equal(values(weight), dequantize(stored)) and not values(weight)[7, 256:512].any()
    assert weight.arrays[3].all()


def test_columns_are_padded_with_zeros() -> None:
    stored = random_blocks("Q8_0", 6, 96)
    weight = tile(stored, torch.bfloat16, "cpu")
    assert weight.columns == 256
    assert torch.equal(values(weight), dequantize(stored))
    scales = weight.arrays[2]  # [tile, block, w, g, h, s, r]
    assert not scales[0, 0, :, :, 0, 3:].any() and not scales[0, 0, :, :, 1].any()


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q4_1", "Q5_1", "Q2_K"])
def test_other_types_become_float16(qtype: str) -> None:
    stored = random_blocks(qtype, N, K)
    weight = tile(stored, torch.bfloat16, "cpu")
    assert (weight.form, weight.scale, weight.data.shape) == ("F16", 1.0, (256, K))
    assert torch.equal(weight.data[:N], dequantize(stored, torch.float16)) and not weight.data[N:].any()


@pytest.mark.parametrize("exponent", [-30, 30])
def test_a_power_of_two_keeps_float16_in_range(exponent: int) -> None:
    values = torch.randn(N, K).bfloat16() * 2.0**exponent
    weight = tile(values, torch.bfloat16, "cpu")
    assert torch.equal(weight.data[:N].float() * weight.scale, values.float())
    assert torch.frexp(torch.tensor(weight.scale))[0] == 0.5


def test_scales_beyond_float16_are_not_kept() -> None:
    stored = random_blocks("Q8_0", 6, 64)
    stored.data.view(6, 2, 34)[0, 0, :2] = torch.tensor([60000.0]).half().view(torch.uint8)
    weight = tile(stored, torch.bfloat16, "cpu")
    assert weight.form == "F16"
    error = weight.data[:6, :64].double() * weight.scale - dequantize(stored).double()
    assert error.abs().max() <= 2.0**-11 * dequantize(stored).abs().max()


def test_float32_products_read_dense_float32() -> None:
    stored = random_blocks("IQ4_XS", 6, 256)
    weight = tile(stored, torch.float32, "cpu")
    assert weight.form == "F32" and torch.equal(weight.data[:6], dequantize(stored))
