"""Products that share their input."""

from __future__ import annotations

import pytest
import torch
from block_data import random_blocks

from paceline.ops.linear import Rows, linear, linears, merge, pack
from paceline.ops.linear.tiles import TiledWeight, tile


def test_merged_or_not_they_are_the_products_of_each() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weights = [pack(random_blocks("Q8_0", n, 96, seed=n)) for n in (7, 130, 1)]
    expected = [linear(x, weight, "decode") for weight in weights]
    for given in (weights, merge(weights)):
        got = linears(x, given, "decode")
        assert [y.shape for y in got] == [(5, 7), (5, 130), (5, 1)]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_like_weights_lie_below_each_other_in_whole_tiles() -> None:
    types = ["Q8_0", "Q6_K", "Q8_0", "Q8_0"]
    weights = [
        tile(random_blocks(qtype, n, 256, seed=n), torch.bfloat16, "cpu")
        for qtype, n in zip(types, (100, 10, 140, 6), strict=True)
    ]
    merged = merge(weights)
    assert [weight.shape for weight in merged.weights] == [(390, 256), (10, 256)]
    assert merged.parts == ((0, slice(0, 100)), (1, slice(0, 10)), (0, slice(128, 268)), (0, slice(384, 390)))
    for weight, (index, rows) in zip(weights, merged.parts, strict=True):
        whole, first = merged.weights[index], rows.start // 128
        assert isinstance(whole, TiledWeight)
        assert torch.equal(whole.data[first : first + weight.tiles], weight.data)


def test_weights_of_unlike_scale_stay_apart() -> None:
    weights = [tile(torch.randn(6, 256) * scale, torch.float16, "cpu") for scale in (1.0, 2.0**30, 1.0)]
    assert [index for index, _ in merge(weights).parts] == [0, 1, 0]


def test_rows_must_be_padded() -> None:
    factors = torch.ones(256)
    Rows(torch.zeros(256, 512), factors, 256, 500)
    for values, rows, columns in (((256, 500), 3, 500), ((100, 512), 3, 512), ((256, 512), 257, 512), ((256, 512), 3, 513)):
        with pytest.raises(ValueError, match=f"{rows} rows of {columns} columns"):
            Rows(torch.zeros(values), factors, rows, columns)
