"""Products on a GPU: against float64, and a row's bits whatever the other rows are."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.models.layers import Embedding, Linear
from paceline.ops.dispatch import force
from paceline.ops.linear import PackedWeight, TiledWeight, decode_arithmetic, expanded, linear, linears, merge, pack
from paceline.ops.quant import BLOCKS, dequantize
from paceline.types import RowKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CUDA = torch.device("cuda")
KINDS: tuple[RowKind, ...] = get_args(RowKind)
PRODUCTS = ("decode", "portable decode", "prefill")
"""The decode product of this GPU, the one that runs on every GPU, and the product of prompt rows."""
SHAPES = [(6, 512), (37, 768), (512, 1536), (1280, 512), (300, 5120)]
"""(N, K); more blocks than programs in the last, tiles that several programs share in all."""
LIMIT = 1e-3
"""Error over the norm of a row. Both factors are rounded to 11 bits, at random: 3e-4, and up to twice that where a weight is
the difference of two rounded numbers (Q4_K, Q5_K)."""


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def product(name: str) -> Callable[[Tensor, PackedWeight | TiledWeight], Tensor]:
    """``linear`` as one of ``PRODUCTS``."""
    kind: RowKind = "prefill" if name == "prefill" else "decode"

    def multiply(x: Tensor, weight: PackedWeight | TiledWeight) -> Tensor:
        with force("portable") if name == "portable decode" else contextlib.nullcontext():
            return linear(x, weight, kind)

    return multiply


def poison(megabytes: int = 64) -> None:
    """Leave NaN in the memory that the next ``torch.empty`` is likely to get."""
    torch.full((megabytes << 18,), torch.nan, device=CUDA)


def rows(count: int, columns: int) -> Tensor:
    """Rows of very different magnitudes, some with outliers."""
    x = torch.randn(count, columns, device=CUDA)
    x *= 10.0 ** torch.randint(-2, 3, (count, 1), device=CUDA)
    x[::7] *= 1e7
    x[3::7] *= 1e-12
    x[5::7, ::97] *= 300
    return x


def error(got: Tensor, x: Tensor, weight: Tensor) -> float:
    """Beside the size that a row of outputs has on average: roundings are relative to the terms, and a handful of outputs
    may cancel."""
    expected = x.double() @ weight.double().T
    size = x.double().norm(dim=1) * weight.double().norm() / weight.shape[1] ** 0.5
    return float(((got.double() - expected).norm(dim=1) / size).max())


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("qtype", BLOCKS)
def test_equals_float64(qtype: str, name: str) -> None:
    multiply = product(name)
    for n, k in SHAPES:
        stored = random_blocks(qtype, n, k)
        weight, dense = pack(stored, torch.bfloat16, CUDA), dequantize(stored).to(CUDA)
        for count in (1, 17, 70):
            x = rows(count, k)
            poison()
            assert error(multiply(x, weight), x, dense) < LIMIT, (n, k, count)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("k", [32, 96, 544])
def test_columns_that_are_no_whole_block(k: int, name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        stored = random_blocks("Q8_0", 45, k)
        x = rows(5, k)
        assert error(product(name)(x, pack(stored, dtype, CUDA)), x, dequantize(stored).to(CUDA)) < LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_float32_products_are_ieee(kind: RowKind) -> None:
    weight = torch.randn(300, 1536, device=CUDA)
    x = rows(70, 1536)
    assert error(linear(x, pack(weight), kind), x, weight) < 1e-6


@pytest.mark.parametrize("exponent", [-30, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_weights_of_any_magnitude(kind: RowKind, exponent: int) -> None:
    weight = torch.randn(300, 512, device=CUDA).bfloat16() * 2.0**exponent
    x = rows(7, 512)
    assert error(linear(x, pack(weight), kind), x, weight) < LIMIT


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("form", ["IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "F32"])
def test_a_row_knows_nothing_of_its_neighbours(form: str, name: str) -> None:
    multiply = product(name)
    for n, k in ((6, 512), (600, 2048), (15000, 1024)):  # in the last a CTA may have a tile alone
        weight = pack(random_blocks(form, n, k), torch.float32 if form == "F32" else torch.bfloat16, CUDA)
        x = rows(70, k)
        everything = multiply(x, weight)
        assert not everything.isnan().any()
        for count in range(1, 71):
            assert torch.equal(multiply(x[:count], weight), everything[:count]), (n, k, count)
        for place in (0, 15, 16, 31, 33, 69):
            assert torch.equal(multiply(x[place : place + 1], weight), everything[place : place + 1]), (n, k, place)
        order = torch.randperm(70, device=CUDA)
        assert torch.equal(multiply(x[order], weight), everything[order])
        assert torch.equal(multiply(x.T.contiguous().T, weight), everything)
        x[::2] = torch.nan
        assert torch.equal(multiply(x, weight)[1::2], everything[1::2])


@pytest.mark.parametrize("shape", [(5120, 6144), (4864, 896), (1280, 5120), (45, 544)])
def test_prompt_rows_whatever_the_height_of_their_panels(shape: tuple[int, int]) -> None:
    weight = pack(random_blocks("Q8_0", *shape), torch.bfloat16, CUDA)
    x = rows(1200, shape[1])
    everything = linear(x, weight, "prefill")
    assert error(everything, x, dequantize(random_blocks("Q8_0", *shape)).to(CUDA)) < LIMIT
    for count in (1, 107, 128, 129, 161, 193, 225, 257, 289, 321, 384, 449, 512, 545, 642, 673, 737, 768, 769, 900, 1100):
        poison()
        assert torch.equal(linear(x[:count], weight, "prefill"), everything[:count])
        assert torch.equal(linear(x[-count:], weight, "prefill"), everything[-count:])


@pytest.mark.parametrize("shape", [(5120, 6144), (34816, 1024), (256, 5120)])
def test_parts_that_share_a_tile(shape: tuple[int, int]) -> None:
    """A pair of tiles in many parts, in two, and a weight that is one pair."""
    weight = pack(random_blocks("IQ4_XS", *shape), torch.bfloat16, CUDA)
    x = rows(64, shape[1])
    everything = linear(x, weight, "decode")
    assert error(everything, x, dequantize(random_blocks("IQ4_XS", *shape)).to(CUDA)) < LIMIT
    for count in (1, 8, 9, 24, 40, 63):
        assert torch.equal(linear(x[:count], weight, "decode"), everything[:count])


def test_forcing_the_portable_kernels_shows_in_the_arithmetic() -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert decode_arithmetic(CUDA).startswith("hopper-" if hopper else "portable-")
    with force("portable"):
        assert decode_arithmetic(CUDA).startswith("portable-")
    with force("ref"):
        assert decode_arithmetic(CUDA).startswith("reference-")


@pytest.mark.parametrize("kind", KINDS)
def test_products_that_share_their_input(kind: RowKind) -> None:
    sizes, x = (300, 50, 7), rows(9, 512)
    stored = [random_blocks("Q8_0", n, 512, seed=n) for n in sizes]
    weights = [pack(each, torch.bfloat16, CUDA) for each in stored]
    merged = merge(weights)
    assert len(merged.weights) == 1
    apart, together = linears(x, weights, kind), linears(x, merged, kind)
    for n, y, z, each in zip(sizes, apart, together, stored, strict=True):
        assert y.shape == z.shape == (9, n)
        assert error(y, x, dequantize(each).to(CUDA)) < LIMIT
        assert error(z, x, dequantize(each).to(CUDA)) < LIMIT
    prepared = importlib.import_module("paceline.ops.linear.kernel").prepare(x, torch.float16)
    for weight, y in zip(weights, apart, strict=True):
        assert torch.equal(linear(prepared, weight, kind), y)


def test_products_in_a_graph() -> None:
    weight, x = pack(random_blocks("IQ4_XS", 600, 2048), torch.bfloat16, CUDA), rows(9, 2048)
    expected = linear(x, weight, "decode")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [linear(x, weight, "decode") for _ in range(5)]
    for _ in range(3):
        for y in outputs:
            y.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(y, expected) for y in outputs)


def test_prompt_rows_in_several_panels() -> None:
    weight = pack(random_blocks("IQ4_XS", 512, 1024), torch.bfloat16, CUDA)
    x = rows(700, 1024)
    everything = linear(x, weight, "prefill")
    assert torch.equal(linear(x[300:500], weight, "prefill"), everything[300:500])


def test_modules_keep_the_stored_weight() -> None:
    stored = random_blocks("Q6_K", 600, 512)
    embedding, head = Embedding(600, 512), Linear(512, 600, torch.bfloat16, dense_dtype=torch.float32)
    embedding.keep(stored, CUDA)
    embedding.share(head)
    head.pack()
    ids = torch.tensor([5, 599, 0, 5], device=CUDA)
    assert torch.equal(embedding(ids), dequantize(stored).to(CUDA)[ids])
    assert isinstance(head.packed, TiledWeight) and head.packed.form == "Q6_K"
    x = rows(3, 512)
    assert error(head(x, "decode"), x, dequantize(stored).to(CUDA)) < LIMIT
    assert not list(embedding.parameters()) and not list(head.parameters())


def test_a_kept_expansion_is_what_a_prefill_product_makes() -> None:
    weight = pack(random_blocks("IQ4_XS", 300, 512), torch.float16, CUDA)
    x = rows(70, 512)
    kept, size = expanded(weight, 2 * 384 * 512)
    assert size == 2 * 384 * 512
    assert torch.equal(linear(x, kept, "prefill"), linear(x, weight, "prefill"))
    assert expanded(weight, size - 1) == (weight, 0) and expanded(kept, size) == (kept, 0)
