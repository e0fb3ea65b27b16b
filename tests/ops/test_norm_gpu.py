"""Norm kernels against float64, and the same bits for a row wherever and however it lies."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.ops.conv import Convolved, dynamic_conv
from paceline.ops.linear import Rows
from paceline.ops.norm import add_rms_norm, add_rms_norm_twice, gated_output, gated_rms_norm, l2_norm, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [(70, 5120), (70, 100), (70, 24, 256), (70, 3, 96)]
NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rms": lambda x, gate, weight: rms_norm(x, weight, 1e-6),
    "l2": lambda x, gate, weight: l2_norm(x),
    "gated": lambda x, gate, weight: gated_rms_norm(x, gate, weight, 1e-6),
}


def exact(name: str, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    x, gate, weight = x.double(), gate.double(), weight.double()
    square = (x * x).sum(-1, keepdim=True)
    if name == "l2":
        return x / (square + 1e-6).sqrt()
    y = x / (square / x.shape[-1] + 1e-6).sqrt() * weight
    return y * gate * gate.sigmoid() if name == "gated" else y


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, gate = (torch.randn(*shape, generator=generator, device="cuda") for _ in range(2))
    magnitude = 10.0 ** torch.randint(-4, 5, (shape[0],), generator=generator, device="cuda")
    return x * magnitude.view(-1, *[1] * (len(shape) - 1)), 4.0 * gate, torch.rand(shape[-1], device="cuda") + 0.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_close_to_exact(name: str, shape: tuple[int, ...]) -> None:
    x, gate, weight = inputs(shape)
    # a sum of squares in float32 is good to 1e-6, the rest is a handful of roundings
    torch.testing.assert_close(NORMS[name](x, gate, weight).double(), exact(name, x, gate, weight), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_rows_do_not_depend_on_their_place(name: str, shape: tuple[int, ...]) -> None:
    x, gate, weight = inputs(shape)
    norm, whole = NORMS[name], NORMS[name](x, gate, weight)
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert torch.equal(norm(x[chosen], gate[chosen], weight), whole[chosen]), f"{rows} rows"
    wide = torch.full((71, *shape[1:-1], shape[-1] + 3), torch.nan, device="cuda")
    wide[1:, ..., 1 : shape[-1] + 1] = x
    assert torch.equal(norm(wide[1:, ..., 1 : shape[-1] + 1], gate, weight), whole), "not contiguous, not aligned"
    wide[1:, ..., 1 : shape[-1] + 1] = gate
    assert torch.equal(norm(x, wide[1:, ..., 1 : shape[-1] + 1], weight), whole), "gate not contiguous, not aligned"


OPERANDS = [None, torch.float32, torch.float16]


def values_of(x: Tensor | Rows) -> Tensor:
    """In float64, without padding, which must be zeros to the right."""
    if isinstance(x, Tensor):
        return x.double()
    assert not x.values[: x.rows, x.columns :].any()
    assert (x.factors[: x.rows].frexp().mantissa == 0.5).all()
    return x.values[: x.rows, : x.columns].double() * x.factors[: x.rows, None].double()


def bits_of(x: Tensor | Rows) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else (x.values[: x.rows], x.factors[: x.rows])


def close_rows(got: Tensor | Rows, expected: Tensor) -> None:
    """To the precision of the type; in float16 what is far below a row's largest may vanish."""
    if isinstance(got, Rows) and got.values.dtype == torch.float16:
        largest = expected.abs().amax(1, keepdim=True)
        assert ((values_of(got) - expected).abs() <= (2.0**-11 + 4e-6) * expected.abs() + 2.0**-19 * largest + 1e-38).all()
    else:
        torch.testing.assert_close(values_of(got), expected, rtol=4e-6, atol=1e-7)


@pytest.fixture(autouse=True)
def poison() -> None:
    """Memory that is handed out again holds NaN: what a kernel leaves unwritten is seen."""
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in (2**12, 2**16, 2**18, 2**20) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("size", [5120, 4096, 100, 640])
def test_add_rms_norm(size: int, operand: torch.dtype | None) -> None:
    x, delta, weight = inputs((70, size))
    x[3] = 0.0
    x[4] *= 1e6
    wide = torch.cat((x, delta), dim=1)
    total, normed = add_rms_norm(wide[:, :size], wide[:, size:], weight, 1e-6, operand)
    assert torch.equal(total, x + delta)
    close_rows(normed, exact("rms", x + delta, delta, weight))
    same, alone = add_rms_norm(total, None, weight, 1e-6, operand)
    assert torch.equal(same, total)
    close_rows(alone, exact("rms", total, delta, weight))
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        some, part = add_rms_norm(x[chosen], delta[chosen], weight, 1e-6, operand)
        assert torch.equal(some, total[chosen])
        for got, whole in zip(bits_of(part), bits_of(normed), strict=True):
            assert torch.equal(got, whole[chosen]), f"{rows} rows"


@pytest.mark.parametrize("operand", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 48, 107])
@pytest.mark.parametrize("size", [5120, 100, 640])
def test_add_rms_norm_twice_is_a_norm_and_rows_of_it(size: int, rows: int, operand: torch.dtype) -> None:
    x, delta, weight = inputs((rows, size))
    prepare = importlib.import_module("paceline.ops.linear.kernel").prepare
    for added in (delta, None):
        total, normed = add_rms_norm(x, added, weight, 1e-6)
        same, plain, packed = add_rms_norm_twice(x, added, weight, 1e-6, operand)
        assert isinstance(normed, Tensor) and isinstance(packed, Rows)
        assert torch.equal(same, total) and torch.equal(plain, normed)
        expected = prepare(normed, operand)
        assert (packed.rows, packed.columns) == (expected.rows, expected.columns)
        for got, wanted in zip(bits_of(packed), bits_of(expected), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("shape", [(70, 48, 128), (70, 3, 96), (70, 5, 16)], ids=str)
def test_gated_output(shape: tuple[int, int, int], operand: torch.dtype | None) -> None:
    x, gate, weight = inputs(shape)
    gate[5] *= 1e4
    wide = torch.full((70, 7 + gate[0].numel()), torch.nan, device="cuda")
    wide[:, 7:] = gate.flatten(1)
    gate = wide[:, 7:].unflatten(1, shape[1:])
    whole = gated_output(x, gate, weight, 1e-6, operand)
    close_rows(whole, exact("gated", x, gate, weight).flatten(1))
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        part = gated_output(x[chosen], gate[chosen], weight, 1e-6, operand)
        for got, expected in zip(bits_of(part), bits_of(whole), strict=True):
            assert torch.equal(got, expected[chosen]), f"{rows} rows"


@pytest.mark.parametrize(("lanes", "rows", "taps"), [(1, 1, 2), (1, 8, 2), (6, 8, 2), (3, 5, 4), (1, 2, 4)])
@pytest.mark.parametrize(("size", "group"), [(5120, 32), (100, 4), (1100, 11)])
def test_a_convolution_may_be_left_to_the_norm_behind_it(size: int, group: int, lanes: int, rows: int, taps: int) -> None:
    x, delta, weight = inputs((lanes * rows, size))
    base = torch.randn(taps, size, device="cuda")
    dynamic = torch.randn(lanes, rows, 2, taps, size // group, device="cuda")[:, :, 1]
    mixed = dynamic_conv(delta.unflatten(0, (lanes, rows)), base, dynamic)
    assert isinstance(mixed, Tensor)
    left = Convolved(delta, base, dynamic)
    for operand in OPERANDS:
        total, normed = add_rms_norm(x, mixed.flatten(0, 1), weight, 1e-6, operand)
        same, got = add_rms_norm(x, left, weight, 1e-6, operand)
        assert torch.equal(same, total)
        for part, wanted in zip(bits_of(got), bits_of(normed), strict=True):
            assert torch.equal(part, wanted)
    total, plain, packed = add_rms_norm_twice(x, mixed.flatten(0, 1), weight, 1e-6, torch.float16)
    same, again, got = add_rms_norm_twice(x, left, weight, 1e-6, torch.float16)
    assert torch.equal(same, total) and torch.equal(again, plain)
    for part, wanted in zip(bits_of(got), bits_of(packed), strict=True):
        assert torch.equal(part, wanted)


def test_a_row_of_nan_is_nobody_else_s() -> None:
    x, delta, weight = inputs((6, 5120))
    expected = add_rms_norm(x, delta, weight, 1e-6, torch.float16)[1]
    x[4] = torch.nan
    got = add_rms_norm(x, delta, weight, 1e-6, torch.float16)[1]
    assert isinstance(got, Rows) and isinstance(expected, Rows)
    others = [0, 1, 2, 3, 5]
    assert torch.equal(got.values[others], expected.values[others]) and got.values[4].isnan().all()
