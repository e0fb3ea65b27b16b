"""Writing K/V rows in Triton: one program per row and cache. Rounded as the reference does on a CPU: IEEE division, ties to
even."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import PAGE_SIZE
from paceline.ops.kv.ref import PagedTensor, StagedRows
from paceline.ops.launch import await_turn, await_turn_alone, pdl
from paceline.ops.topk.kernel import larger

_GROUP = tl.constexpr(32)
_PAGE = tl.constexpr(PAGE_SIZE)
_ROWS = tl.constexpr(128)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Adding it to a float32 below 2^22 leaves no room for a fraction, so the sum is rounded to an integer, ties to even."""


def row_slots(page_table: Tensor, batch: PackedBatch) -> Tensor:
    rows, out = batch.num_rows, torch.empty_like(batch.positions)
    if rows:
        _row_slots[triton.cdiv(rows, _ROWS.value),](
            page_table,
            page_table.stride(0),
            batch.lanes,
            batch.row_span,
            batch.positions,
            out,
            rows,
            **pdl(page_table.device),
        )
    return out


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lanes", "row_span", "positions"])
def _row_slots(table, table_stride, lanes, row_span, positions, out, rows, PDL: tl.constexpr):
    await_turn(PDL)
    at = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    span, position = tl.load(row_span + at, mask=at < rows, other=0), tl.load(positions + at, mask=at < rows, other=0)
    lane = tl.load(lanes + span, mask=at < rows, other=0)
    page = tl.load(table + lane * table_stride + position // _PAGE, mask=at < rows, other=0).to(tl.int64)
    tl.store(out + at, page * _PAGE + position % _PAGE, mask=at < rows)


def write_rows(cache: PagedTensor, slots: Tensor, values: Tensor) -> None:
    values = values.contiguous()
    rows, heads, dim = values.shape
    if rows:
        padded = _padded(heads * dim)
        _write[rows,](
            cache.data, cache.scale, slots, values, WIDTH=heads * dim, PADDED=padded, num_warps=4, **pdl(values.device)
        )


@triton.jit
def _write(data, scale, slots, values, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    await_turn_alone(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    value = tl.load(values + row * WIDTH + at, mask=at < WIDTH, other=0.0)
    store_groups(data, scale, tl.load(slots + row).to(tl.int64) * WIDTH, value, WIDTH, PADDED)


def write_kept(staged: Sequence[StagedRows], keep: Tensor, batch: PackedBatch) -> None:
    rows, heads, dim = staged[0].values.shape
    values = tuple(x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (part.values for part in staged))
    tables = tuple(part.page_table for part in staged)
    if rows:
        _write_kept[rows, len(staged)](
            tuple(part.cache.data for part in staged),
            tuple(part.cache.scale for part in staged),
            values,
            tuple(x.stride(0) for x in values),
            tables,
            tuple(table.stride(0) for table in tables),
            batch.lanes,
            batch.row_span,
            batch.positions,
            batch.span_bases,
            batch.span_lengths,
            keep,
            RINGS=tuple(part.ring or 0 for part in staged),
            PARTS=len(staged),
            WIDTH=heads * dim,
            PADDED=_padded(heads * dim),
            num_warps=4,
            **pdl(keep.device),
        )


def _padded(width: int) -> int:
    return max(_GROUP.value, triton.next_power_of_2(width))


@triton.jit(do_not_specialize_on_alignment=["lanes", "row_span", "positions", "bases", "lengths", "keep"])
def _write_kept(
    data,
    scales,
    values,
    strides,
    tables,
    table_strides,
    lanes,
    row_span,
    positions,
    bases,
    lengths,
    keep,
    RINGS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    span, position = tl.load(row_span + row), tl.load(positions + row)
    behind = position - tl.load(bases + span) - tl.minimum(tl.load(keep + span), tl.load(lengths + span))
    lane = tl.load(lanes + span)
    at = tl.arange(0, PADDED)
    for part in tl.static_range(PARTS):
        stored = (tl.program_id(1) == part) & (behind < 0)
        if RINGS[part] > 0:
            stored = stored & (behind >= -RINGS[part])
        if stored:
            page = tl.load(tables[part] + lane * table_strides[part] + position // _PAGE).to(tl.int64)
            value = tl.load(values[part] + row * strides[part] + at, mask=at < WIDTH, other=0.0)
            first = (page * _PAGE + position % _PAGE) * WIDTH
            store_groups(data[part], scales[part], first, value, WIDTH, PADDED)


@triton.jit
def store_groups(data, scale, first, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The first WIDTH of value [PADDED] as the elements of pages from ``first`` on, which is the start of a group."""
    at = tl.arange(0, PADDED)
    if scale is None:
        tl.store(data + first + at, value.to(data.dtype.element_ty), mask=at < WIDTH)
    else:
        value = tl.reshape(value, (PADDED // _GROUP, _GROUP))
        group = tl.arange(0, PADDED // _GROUP)
        step = tl.div_rn(tl.reduce(tl.abs(value), 1, larger), 127.0).to(tl.float16)
        divisor = step.to(tl.float32)[:, None] + tl.zeros_like(value)
        level = tl.where(divisor > 0.0, tl.div_rn(value, tl.where(divisor > 0.0, divisor, 1.0)), 0.0)
        level = tl.clamp((level + _ROUNDER) - _ROUNDER, -127.0, 127.0)
        at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        tl.store(data + first + at, level.to(tl.int8), mask=at < WIDTH)
        tl.store(scale + first // _GROUP + group, step, mask=group < WIDTH // _GROUP)
