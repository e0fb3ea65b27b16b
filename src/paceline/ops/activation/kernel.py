"""Products with a gate, a whole row per program, because a row of ``Rows`` is scaled by its largest magnitude.

A row is two pieces whose lengths are powers of two: 17408 = 16384 + 1024 elements are all there is to compute. The other
activations stay with torch on a GPU too: they are applied to small tensors, and there every element goes through the same
code, so the reference is row-invariant as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.linear.kernel import scale_of_row
from paceline.ops.linear.rows import COLUMN_STEP, ROW_STEP, Rows, padded

_LONGEST = 1024
"""Elements that lie side by side in a tile."""


def swiglu(gate: Tensor, up: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    size = gate.shape[1]
    length = min(size & -size, _LONGEST)
    return gated(up.unflatten(1, (-1, length)), gate.unflatten(1, (-1, length)), None, sigmoid=False, operand=operand)


def gated_heads(o: Tensor, gate: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    return gated(o, gate, None, sigmoid=True, operand=operand)


def gated(
    o: Tensor, gate: Tensor, norm: tuple[Tensor, float] | None, *, sigmoid: bool, operand: torch.dtype | None
) -> Tensor | Rows:
    """o times the sigmoid (or silu) of a gate, [N, heads, D] each, as rows [N, heads * D]; with a norm, (weight [D], eps),
    each head of o goes through it first."""
    rows, heads, dim = o.shape
    weight, eps = norm or (None, 0.0)
    o, gate = (x if x.stride(2) == 1 else x.contiguous() for x in (o, gate))
    values, factors, width = row_outputs(rows, heads * dim, o.device, operand)
    first, rest = pieces(heads, -(-width // dim))
    block = triton.next_power_of_2(dim)
    kernel = _rows_with_gates if weight is None else _rows_with_norms
    if rows:
        kernel[(rows,)](
            o,
            gate,
            weight,
            values,
            factors,
            *o.stride()[:2],
            *gate.stride()[:2],
            eps,
            HEADS=heads,
            DIM=dim,
            WIDTH=width,
            FIRST=first,
            REST=rest,
            BLOCK=block,
            SIGMOID=sigmoid,
            num_warps=warps_for(first * block),
            **pdl(o.device),
        )
    return finished(values, factors, rows, heads * dim)


# ---- rows, for the kernels of other ops too


def row_outputs(
    rows: int, size: int, device: torch.device, operand: torch.dtype | None
) -> tuple[Tensor, Tensor | None, int]:
    """Where a kernel leaves its rows: values, factors (None for a plain float32 tensor), and the columns that it writes."""
    if operand is None:
        return torch.empty(rows, size, dtype=torch.float32, device=device), None, size
    width, held = padded(size, COLUMN_STEP), padded(rows, ROW_STEP)
    values = torch.empty(held, width, dtype=operand, device=device)
    return values, torch.empty(held, dtype=torch.float32, device=device), width


def finished(values: Tensor, factors: Tensor | None, rows: int, size: int) -> Tensor | Rows:
    return values if factors is None else Rows(values, factors, rows, size)


def pieces(count: int, covered: int) -> tuple[int, int]:
    """The largest power of two up to ``count``, and one that reaches from there to ``covered``."""
    first = 1 << (count.bit_length() - 1)
    return first, triton.next_power_of_2(max(1, covered - first))


def warps_for(elements: int) -> int:
    """As many threads as leave each of them some elements to fetch at once."""
    return min(32, max(1, elements // 256))


@triton.jit
def store_row(values, factors, row, first, at_first, in_first, rest, at_rest, in_rest, WIDTH: tl.constexpr):
    """Both pieces of a row, scaled if rows have factors."""
    if factors is not None:
        scale, undone = scale_of_row(tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(rest))))
        tl.store(factors + row, undone)
        first *= scale
        rest *= scale
    values += row * WIDTH
    tl.store(values + at_first, first.to(values.dtype.element_ty), mask=in_first)
    tl.store(values + at_rest, rest.to(values.dtype.element_ty), mask=in_rest)


# ---- gates


@triton.jit
def _piece(
    o,
    gate,
    weight,
    o_stride,
    gate_stride,
    eps,
    heads,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Some heads [n, 1] of one row, zeros in what is no element."""
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (heads < HEADS) & (dim < DIM)
    value = tl.load(o + heads * o_stride + dim, mask=inside, other=0.0)
    z = tl.load(gate + heads * gate_stride + dim, mask=inside, other=0.0)
    if weight is not None:
        square = tl.sum(value * value, axis=1) / DIM
        value = value * (1.0 / tl.sqrt_rn(square + eps))[:, None]
        value = value * tl.load(weight + dim, mask=dim < DIM, other=0.0)
    below = 1.0 + tl.exp(-z)
    return value / below if SIGMOID else value * (z / below)


def _rows_of_heads(
    o,
    gate,
    weight,
    values,
    factors,
    o_row,
    o_head,
    gate_row,
    gate_head,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    o += row * o_row
    gate += row * gate_row
    heads, more = tl.arange(0, FIRST)[:, None], FIRST + tl.arange(0, REST)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    first = _piece(o, gate, weight, o_head, gate_head, eps, heads, HEADS, DIM, BLOCK, SIGMOID)
    rest = _piece(o, gate, weight, o_head, gate_head, eps, more, HEADS, DIM, BLOCK, SIGMOID)
    at, at_more = heads * DIM + dim, more * DIM + dim
    within = (dim < DIM) & (at < WIDTH)
    store_row(values, factors, row, first, at, within, rest, at_more, (dim < DIM) & (at_more < WIDTH), WIDTH)


_rows_with_gates = triton.jit(_rows_of_heads)
_rows_with_norms = triton.jit(
    _rows_of_heads,
    do_not_specialize=["o_row", "o_head", "gate_row", "gate_head"],
    do_not_specialize_on_alignment=["o", "gate", "weight", "values"],
)
"""How a row lies in memory must not choose code with sums: another load width is another order of summation."""
