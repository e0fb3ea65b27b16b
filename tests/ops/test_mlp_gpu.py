"""An MLP's hidden numbers in one launch: against its parts, and a row's bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.ops.conv import dynamic_conv
from paceline.ops.linear import Merged, Rows, TiledWeight, hopper, merge, pack
from paceline.ops.mlp import longest_rows, mlp_hidden
from paceline.ops.mlp import ref as apart
from paceline.ops.norm import add_rms_norm
from paceline.ops.quant import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]

CUDA = torch.device("cuda")
LIMIT = 1e-3
"""Error over the norm of a row, of two ways that round their results to 11 bits after sums in another order."""
SHAPES = [(1536, 512), (256, 512), (17408, 5120)]
"""(features, columns); the steps of few tiles are shared out, of many are whole pairs and a rest."""


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def weights(form: str, features: int, columns: int) -> Merged:
    both = (random_blocks(form, features, columns, seed=seed) for seed in (1, 2))
    return merge([pack(one, torch.bfloat16, CUDA) for one in both])


def normed(rows: int, columns: int) -> Rows:
    x = torch.randn(rows, columns, device=CUDA) * 10.0 ** torch.randint(-6, 7, (rows, 1), device=CUDA)
    _, n = add_rms_norm(x, None, torch.rand(columns, device=CUDA) + 0.5, 1e-6, torch.float16)
    assert isinstance(n, Rows) and n.norms is not None
    return n


def at(n: Rows, rows: Tensor | slice) -> Rows:
    """Some rows of n, from the first on."""
    assert n.norms is not None
    values, factors, norms = torch.full_like(n.values, torch.nan), torch.ones_like(n.factors), torch.ones_like(n.factors)
    count = len(torch.arange(n.rows)[rows.cpu() if isinstance(rows, Tensor) else rows])
    values[:count], factors[:count], norms[:count] = (t[: n.rows][rows] for t in (n.values, n.factors, n.norms))
    return Rows(values, factors, count, n.columns, norms)


def read(rows: Tensor | Rows) -> Tensor:
    assert isinstance(rows, Rows)
    return rows.values[: rows.rows, : rows.columns].float() * rows.factors[: rows.rows, None]


def error(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)).max())


@pytest.mark.parametrize("form", hopper.FORMS)
@pytest.mark.parametrize(("features", "columns"), SHAPES)
def test_against_its_parts_and_among_other_rows(form: str, features: int, columns: int) -> None:
    gate_up, n = weights(form, features, columns), normed(70, columns)
    longest = longest_rows(gate_up)
    assert longest is not None
    torch.full((64 << 18,), torch.nan, device=CUDA)
    got = mlp_hidden(n, gate_up, longest, "decode", torch.float16)
    want = apart.mlp_hidden(n, gate_up, longest, "decode", torch.float16)
    assert isinstance(got, Rows) and (got.rows, got.columns) == (70, features)
    assert float(got.values[:70].abs().max()) < 2**15, "a bound of every row"
    assert error(read(got), read(want)) < LIMIT
    order = torch.randperm(70, device=CUDA)
    for rows in (slice(0, 1), slice(5, 6), slice(0, 8), slice(3, 20), slice(20, 61), slice(6, 70), order):
        some = mlp_hidden(at(n, rows), gate_up, longest, "decode", torch.float16)
        assert torch.equal(read(some), read(got)[rows]), rows


def test_the_norm_says_how_long_its_rows_are() -> None:
    n = normed(33, 5120)
    assert n.norms is not None
    torch.testing.assert_close(n.norms[:33], read(n).double().square().sum(1).float(), rtol=1e-3, atol=0.0)


def test_the_longest_rows_bound_the_weights() -> None:
    gate_up = weights("IQ4_XS", 1536, 512)
    gate, up = (dequantize(random_blocks("IQ4_XS", 1536, 512, seed=seed)).norm(dim=1).max() for seed in (1, 2))
    assert longest_rows(gate_up) == pytest.approx(float(gate * up), rel=1e-2)  # both were rounded to float16


def test_a_row_of_nan_stays_alone() -> None:
    gate_up, n = weights("IQ4_XS", 1536, 512), normed(9, 512)
    longest = longest_rows(gate_up)
    want = read(mlp_hidden(n, gate_up, longest, "decode", torch.float16))
    assert n.norms is not None
    for broken in (n.values, n.norms):
        broken[:9:2] = torch.nan
    got = read(mlp_hidden(n, gate_up, longest, "decode", torch.float16))
    assert torch.equal(got[1::2], want[1::2]) and bool(got[::2].isnan().all())


def test_a_row_of_zeros_yields_zeros() -> None:
    gate_up = weights("IQ4_XS", 1536, 512)
    _, n = add_rms_norm(torch.zeros(3, 512, device=CUDA), None, torch.ones(512, device=CUDA), 1e-6, torch.float16)
    assert not read(mlp_hidden(n, gate_up, longest_rows(gate_up), "decode", torch.float16)).any()


def test_many_launches_in_a_row_agree() -> None:
    """A race would show as another bit, sooner or later."""
    for features, columns in ((1536, 512), (17408, 5120)):
        gate_up, n = weights("IQ4_XS", features, columns), normed(48, columns)
        longest = longest_rows(gate_up)
        want = read(mlp_hidden(n, gate_up, longest, "decode", torch.float16))
        for _ in range(100):
            assert torch.equal(read(mlp_hidden(n, gate_up, longest, "decode", torch.float16)), want)


def test_what_it_is_not_for() -> None:
    assert longest_rows(weights("IQ4_XS", 1408, 512)) is None  # no whole blocks of the next product
    mixed = (pack(random_blocks(form, 512, 512), torch.bfloat16, CUDA) for form in ("IQ4_XS", "Q8_0"))
    assert longest_rows(merge(list(mixed))) is None
    dense = [pack(torch.randn(512, 512, device=CUDA), torch.bfloat16) for _ in range(2)]
    assert all(isinstance(one, TiledWeight) for one in dense) and longest_rows(merge(dense)) is None


def test_rows_of_a_convolution_say_how_long_they_are_too() -> None:
    x, base, dynamic = (
        torch.randn(3, 8, 512, device=CUDA),
        torch.randn(2, 512, device=CUDA),
        torch.randn(3, 8, 2, 16, device=CUDA),
    )
    n = dynamic_conv(x, base, dynamic, torch.float16)
    assert isinstance(n, Rows) and n.norms is not None
    torch.testing.assert_close(n.norms[:24], read(n).double().square().sum(1).float(), rtol=1e-3, atol=0.0)
