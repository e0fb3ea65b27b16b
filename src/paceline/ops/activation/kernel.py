"""Products with a gate, a whole row per program, because a row of ``Rows`` is scaled by its largest magnitude.

A row is two pieces whose lengths are powers of two: 17408 = 16384 + 1024 elements are all there is to compute. A program is
few warps with many elements each, loaded by 16 bytes: a multiprocessor has one row, and its instructions are the time. The
other activations stay with torch on a GPU too: they are applied to small tensors, and there every element goes through the
same code, so the reference is row-invariant as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.linear.kernel import scale_of_row
from paceline.ops.linear.rows import Rows, empty_rows

_LONGEST = 1024
"""Elements that lie side by side in a tile."""
_MOST_WARPS = 16
_LANES = 4
"""Elements of a load of 16 bytes."""


def swiglu(gate: Tensor, up: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    size = gate.shape[1]
    length = size if size % _LANES else min(size & -size, _LONGEST)
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
    o, gate, weight = aligned(o), aligned(gate), None if weight is None else aligned(weight)
    values, factors, width = row_outputs(rows, heads * dim, o.device, operand)
    block = triton.next_power_of_2(dim)
    length, first, rest, warps = strips(-(-width // dim) * block, block)
    if rows:
        _rows_of_heads[(rows,)](
            o,
            gate,
            weight,
            values,
            factors,
            *(stride // _LANES for x in (o, gate) for stride in x.stride()[:2]),
            eps,
            HEADS=heads,
            DIM=dim,
            WIDTH=width,
            LENGTH=length,
            FIRST=first,
            REST=rest,
            BLOCK=block,
            SIGMOID=sigmoid,
            PTX=torch.version.cuda is not None and o.is_cuda,
            num_warps=warps,
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
    made = empty_rows(rows, size, operand, device)
    return made.values, made.factors, made.values.shape[1]


def finished(values: Tensor, factors: Tensor | None, rows: int, size: int, norms: Tensor | None = None) -> Tensor | Rows:
    return values if factors is None else Rows(values, factors, rows, size, norms)


def pieces(count: int, covered: int) -> tuple[int, int]:
    """The largest power of two up to ``count``, and one that reaches from there to ``covered``."""
    first = 1 << (count.bit_length() - 1)
    return first, triton.next_power_of_2(max(1, covered - first))


def warps_for(elements: int) -> int:
    """As many threads as leave each of them some elements to fetch at once."""
    return min(32, max(1, elements // 256))


def aligned(x: Tensor) -> Tensor:
    """x of float32, copied unless each row of its last dimension begins at a multiple of 16 bytes. How it lies in memory
    must not choose the code: another load width is another order of summation."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(stride % _LANES for stride in x.stride()[:-1]):
        return x
    size = x.shape[-1]
    return x.new_empty(*x.shape[:-1], size + -size % _LANES)[..., :size].copy_(x)


def strips(elements: int, block: int = 1) -> tuple[int, int, int, int]:
    """How a program holds a row: (length of a strip, a multiple of ``block``; strips of the first piece; of the rest;
    warps). A strip is whole loads of 16 bytes of every thread, so that what goes from strip to strip stays in the thread."""
    warps = min(_MOST_WARPS, max(1, triton.next_power_of_2(elements) // 512))
    length = max(block, 32 * _LANES * warps)
    count = triton.cdiv(elements, length)
    first = 1 << max(0, (count - 1).bit_length() - 1)
    return length, first, triton.next_power_of_2(max(1, count - first)), warps


@triton.jit
def by_fours(row, column):
    """Their sum, a place in a row. Said to be contiguous by fours only, lest 16-bit elements are stored from a layout of
    their own, into which everything would be converted. (A hint is lost on what a function is given.)"""
    return tl.max_contiguous(row + column, [1, 4])


@triton.jit
def scaled(factor, largest, first, rest):
    """Both pieces of a row whose largest magnitude this is, as a row of ``Rows``, whose factor is stored."""
    scale, undone = scale_of_row(largest)
    tl.store(factor, undone)
    return first * scale, rest * scale


@triton.jit
def store_strips(values, first, at, within, rest, more, inside):
    tl.store(values + at, first.to(values.dtype.element_ty), mask=within)
    tl.store(values + more, rest.to(values.dtype.element_ty), mask=inside)


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
def _gated(
    o,
    gate,
    weight,
    o_head,
    gate_head,
    eps,
    head,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PTX: tl.constexpr,
):
    """Some strips of one row, zeros in what is no element; ``weight`` [1, length of a strip]."""
    inside = (head < HEADS) & (dim < DIM)
    value = tl.load(o + head * o_head + dim, mask=inside, other=0.0)
    z = tl.load(gate + head * gate_head + dim, mask=inside, other=0.0)
    if weight is not None:
        heads = tl.reshape(value, (value.shape[0], value.shape[1] // BLOCK, BLOCK))
        square = tl.sum(heads * heads, axis=2) / DIM
        heads = heads * (1.0 / tl.sqrt_rn(square + eps))[:, :, None]
        value = tl.reshape(heads, (value.shape[0], value.shape[1])) * weight
    return value * sigmoid_of(z, PTX) if SIGMOID else value * (z * sigmoid_of(z, PTX))


@triton.jit
def sigmoid_of(z, PTX: tl.constexpr):
    """The two approximations that ``exp`` and a division are made of, without what they do about denormal numbers: one plus
    such a number is one, and the reciprocal of one whose own would be denormal, below 2^-126, becomes zero."""
    if not PTX:
        return 1.0 / (1.0 + tl.exp(-z))
    return tl.inline_asm_elementwise(
        """{
        mul.f32 $0, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 $0, $0;
        add.f32 $0, $0, 0f3F800000;
        rcp.approx.ftz.f32 $0, $0;
        }""",
        "=&f,f",
        [z],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["o_row", "o_head", "gate_row", "gate_head"])
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
    LENGTH: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Strides are those of groups of ``_LANES`` elements, which tells the compiler that there are such groups."""
    within = tl.arange(0, LENGTH)[None, :]
    at, more = tl.arange(0, FIRST)[:, None] * LENGTH + within, (FIRST + tl.arange(0, REST))[:, None] * LENGTH + within
    head, more_heads = at // BLOCK, more // BLOCK
    dim, more_dims = at % BLOCK, more % BLOCK
    if weight is not None:
        channel = tl.arange(0, LENGTH) % BLOCK
        weight = tl.load(weight + channel, mask=channel < DIM, other=0.0)[None, :]
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    o += row * (o_row * 4)
    gate += row * (gate_row * 4)
    o_head, gate_head = o_head * 4, gate_head * 4
    first = _gated(o, gate, weight, o_head, gate_head, eps, head, dim, HEADS, DIM, BLOCK, SIGMOID, PTX)
    rest = _gated(o, gate, weight, o_head, gate_head, eps, more_heads, more_dims, HEADS, DIM, BLOCK, SIGMOID, PTX)
    at, more = by_fours(head * DIM, dim), by_fours(more_heads * DIM, more_dims)
    within, inside = (dim < DIM) & (at < WIDTH), (more_dims < DIM) & (more < WIDTH)
    if factors is not None:
        strip = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(rest), 0))
        first, rest = scaled(factors + row, tl.max(strip, 0), first, rest)
    store_strips(values + row * WIDTH, first, at, within, rest, more, inside)
