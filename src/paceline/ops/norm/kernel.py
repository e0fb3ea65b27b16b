"""Normalisations in Triton: one program per row, the row in one block of a fixed length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.activation.kernel import aligned, by_fours, finished, gated, row_outputs, scaled, store_strips, strips
from paceline.ops.conv.kernel import mixed
from paceline.ops.conv.ref import Convolved
from paceline.ops.launch import await_turn, pdl
from paceline.ops.linear.rows import Rows

_STRIDES = ["inner", "x_outer", "x_inner", "gate_outer", "gate_inner"]
_POINTERS = ["x", "weight", "gate", "out"]
"""How a row lies in memory must not choose the code: another load width is another order of summation."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, None, eps, mean=True)


def add_rms_norm(
    x: Tensor, delta: Tensor | Convolved | None, weight: Tensor, eps: float, operand: torch.dtype | None = None
) -> tuple[Tensor, Tensor | Rows]:
    total, _, n = _add_norms(x, delta, weight, eps, operand, twice=False)
    return total, n


def add_rms_norm_twice(
    x: Tensor, delta: Tensor | Convolved | None, weight: Tensor, eps: float, operand: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | Rows]:
    total, plain, n = _add_norms(x, delta, weight, eps, operand, twice=True)
    assert plain is not None
    return total, plain, n


def _add_norms(
    x: Tensor, delta: Tensor | Convolved | None, weight: Tensor, eps: float, operand: torch.dtype | None, *, twice: bool
) -> tuple[Tensor, Tensor | None, Tensor | Rows]:
    delta, base, dynamic, convolution = _convolution(delta)
    x, delta, weight = aligned(x), None if delta is None else aligned(delta), aligned(weight)
    rows, size = x.shape
    total = x if delta is None else torch.empty(rows, size, dtype=torch.float32, device=x.device)
    plain = torch.empty(rows, size, dtype=torch.float32, device=x.device) if twice else None
    values, factors, width = row_outputs(rows, size, x.device, operand)
    norms = None if factors is None or twice else torch.empty_like(factors)
    length, first, rest, warps = strips(width)
    if rows:
        _add_norm[(rows,)](
            x,
            delta,
            base,
            dynamic,
            weight,
            total,
            plain,
            values,
            factors,
            norms,
            x.stride(0) // 4,
            0 if delta is None else delta.stride(0) // 4,
            eps,
            **convolution,
            SIZE=size,
            WIDTH=width,
            LENGTH=length,
            FIRST=first,
            REST=rest,
            num_warps=warps,
            **pdl(x.device),
        )
    return total, plain, finished(values, factors, rows, size, norms)


def _convolution(
    delta: Tensor | Convolved | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict[str, int]]:
    """What is added or convolved first, what by, and how that lies."""
    if not isinstance(delta, Convolved):
        return delta, None, None, dict.fromkeys(("LANE", "ROW", "TAP", "ROWS", "TAPS", "GROUP"), 0)
    x, base, dynamic = delta
    dynamic = dynamic if dynamic.stride(3) == 1 else dynamic.contiguous()
    _, rows, taps, groups = dynamic.shape
    lane, row, tap, _ = dynamic.stride()
    sizes = {"LANE": lane, "ROW": row, "TAP": tap, "ROWS": rows, "TAPS": taps, "GROUP": x.shape[1] // groups}
    return x, base.contiguous(), dynamic, sizes


def gated_output(o: Tensor, z: Tensor, weight: Tensor, eps: float, operand: torch.dtype | None = None) -> Tensor | Rows:
    return gated(o, z, (weight, eps), sigmoid=False, operand=operand)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return _launch(x, None, None, eps, mean=False)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, gate, eps, mean=True)


def _launch(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, *, mean: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, size = out.view(-1, x.shape[-1]).shape
    if rows:
        x, inner, x_outer, x_inner = _rows(x)
        gate_outer = gate_inner = 0
        if gate is not None:
            gate, inner, gate_outer, gate_inner = _rows(gate)
        block = triton.next_power_of_2(size)
        _norm[rows,](
            x,
            weight,
            gate,
            out,
            inner,
            x_outer,
            x_inner,
            gate_outer,
            gate_inner,
            eps,
            SIZE=size,
            BLOCK=block,
            MEAN=mean,
            num_warps=min(8, max(1, block // 256)),
            **pdl(x.device),
        )
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, rows per outer index, stride of the outer index, stride of the inner one), copied only if it must be."""
    if x.stride(-1) != 1 or x.ndim > 3:
        x = x.contiguous()
    if x.ndim == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, x.shape[-1] if x.ndim != 2 else x.stride(0), 0


@triton.jit
def _added(
    x,
    delta,
    delta_stride,
    base,
    dynamic,
    row,
    at,
    inside,
    BEGIN: tl.constexpr,
    SIZE: tl.constexpr,
    TAP: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Some strips of the sum, the first of which begins at ``BEGIN``."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if base is not None:
        # as one line, which a thread has the same channels of; in strips the groups would ask for a layout of their own
        line = BEGIN + tl.arange(0, at.shape[0] * at.shape[1])
        value += tl.reshape(mixed(delta, delta_stride, base, dynamic, row, line, TAP, SIZE, TAPS, GROUP), at.shape)
    elif delta is not None:
        value += tl.load(delta + at, mask=inside, other=0.0)
    return value


@triton.jit
def _sums_and_largest(sum_a, other_a, largest_a, sum_b, other_b, largest_b):
    return sum_a + sum_b, other_a + other_b, tl.maximum(largest_a, largest_b)


@triton.jit(do_not_specialize=["x_stride", "delta_stride"])
def _add_norm(
    x,
    delta,
    base,
    dynamic,
    weight,
    total,
    plain,
    values,
    factors,
    norms,
    x_stride,
    delta_stride,
    eps,
    LANE: tl.constexpr,
    ROW: tl.constexpr,
    TAP: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Strides are those of groups of four elements, which tells the compiler that there are such groups. With a base, delta
    is convolved before it is added: ``LANE``, ``ROW`` and ``TAP`` are strides of ``dynamic``, whose blocks have ``ROWS``."""
    column = tl.arange(0, LENGTH)[None, :]
    at = by_fours(tl.arange(0, FIRST)[:, None] * LENGTH, column)
    more = by_fours((FIRST + tl.arange(0, REST))[:, None] * LENGTH, column)
    within, inside = at < SIZE, more < SIZE
    factor, more_factors = tl.load(weight + at, mask=within, other=0.0), tl.load(weight + more, mask=inside, other=0.0)
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    x += row * (x_stride * 4)
    if delta is not None:
        delta += row * (delta_stride * 4)
    in_block = 0
    if base is not None:
        in_block = row % ROWS
        dynamic += row // ROWS * LANE + in_block * ROW
    first = _added(x, delta, delta_stride * 4, base, dynamic, in_block, at, within, 0, SIZE, TAP, TAPS, GROUP)
    rest = _added(x, delta, delta_stride * 4, base, dynamic, in_block, more, inside, FIRST * LENGTH, SIZE, TAP, TAPS, GROUP)
    if delta is not None:
        tl.store(total + row * SIZE + at, first, mask=within)
        tl.store(total + row * SIZE + more, rest, mask=inside)
    square = tl.sum(first * first, 0) + tl.sum(rest * rest, 0)
    # The largest magnitude behind the norm, and how long the row is then, are known before it, but for a rounding: one walk
    # through the warps finds all.
    weighted, more_weighted = first * factor, rest * more_factors
    largest = tl.maximum(tl.max(tl.abs(weighted), 0), tl.max(tl.abs(more_weighted), 0))
    norm = tl.sum(weighted * weighted, 0) + tl.sum(more_weighted * more_weighted, 0)
    square, norm, largest = tl.reduce((square, norm, largest), 0, _sums_and_largest)
    scale = 1.0 / tl.sqrt_rn(square / SIZE + eps)
    first = first * scale * factor
    rest = rest * scale * more_factors
    if plain is not None:
        # here the largest is that of the stored row, as where the row is read again
        store_strips(plain + row * SIZE, first, at, within, rest, more, inside)
        largest = tl.max(tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(rest), 0)), 0)
        first, rest = scaled(factors + row, largest, first, rest)
    elif factors is not None:
        first, rest = scaled(factors + row, largest * scale, first, rest)
        tl.store(norms + row, norm * scale * scale)
    store_strips(values + row * WIDTH, first, at, at < WIDTH, rest, more, more < WIDTH)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_POINTERS)
def _norm(
    x,
    weight,
    gate,
    out,
    inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    outer, within = row // inner, row % inner
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + outer * x_outer + within * x_inner + at, mask=inside, other=0.0)
    square = tl.sum(value * value, 0)
    if MEAN:
        square = square / SIZE
    value = value * (1.0 / tl.sqrt_rn(square + eps))
    if weight is not None:
        value = value * tl.load(weight + at, mask=inside, other=0.0)
    if gate is not None:
        z = tl.load(gate + outer * gate_outer + within * gate_inner + at, mask=inside, other=0.0)
        value = value * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * SIZE + at, value, mask=inside)
