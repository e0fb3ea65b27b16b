"""The short convolutions in Triton, taps added oldest first: one program per row and block of channels, or, where a row of
``Rows`` may be asked for, per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops.activation.kernel import pieces, row_outputs, store_row, warps_for
from paceline.ops.launch import await_turn, await_turn_alone, pdl
from paceline.ops.linear.rows import Rows

_BLOCK = tl.constexpr(1024)
_FACTS = ["lanes", "row_span", "starts", "lengths", "keep"]
"""Where these lie depends on the number of rows, for which nothing should be compiled anew."""


def causal_conv(x: Tensor, history: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
    x, history, weight = _unit_stride(x), history.contiguous(), weight.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, channels = x.shape
    facts = (batch.lanes, batch.row_span, batch.starts)
    _causal_conv[rows, triton.cdiv(channels, _BLOCK.value)](
        x, history, weight, out, *facts, x.stride(0), CHANNELS=channels, TAPS=weight.shape[1], num_warps=4
    )
    return out


@triton.jit(do_not_specialize_on_alignment=_FACTS)
def _causal_conv(x, history, weight, out, lanes, row_span, starts, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < CHANNELS
    span = tl.load(row_span + row)
    before, lane = row - tl.load(starts + span), tl.load(lanes + span)
    total = tl.zeros((_BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        value = raw_input(x, stride, history, lane, row, before, tap, at, inside, CHANNELS, TAPS - 1)
        total = tl.fma(value, tl.load(weight + at * TAPS + tap, mask=inside, other=0.0), total)
    tl.store(out + row * CHANNELS + at, total / (1.0 + tl.exp(-total)), mask=inside)


def conv_history(x: Tensor, history: Tensor, keep: Tensor, batch: PackedBatch, room: Tensor | None = None) -> Tensor:
    x, history = _unit_stride(x), history.contiguous()
    width, channels = history.shape[1:]
    if room is None:
        room = torch.empty(batch.num_spans, width, channels, dtype=torch.float32, device=x.device)
    out = room[: batch.num_spans]
    assert out.is_contiguous(), "room for histories must be contiguous"
    facts = (batch.lanes, batch.starts, keep)
    _conv_history[batch.num_spans * width, triton.cdiv(channels, _BLOCK.value)](
        x, history, out, *facts, x.stride(0), CHANNELS=channels, WIDTH=width, num_warps=4
    )
    return out


@triton.jit(do_not_specialize_on_alignment=_FACTS)
def _conv_history(x, history, out, lanes, starts, keep, stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    span, index = place // WIDTH, place % WIDTH
    at = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < CHANNELS
    kept = tl.load(keep + span)
    row = tl.load(starts + span) + kept
    value = raw_input(x, stride, history, tl.load(lanes + span), row, kept, index, at, inside, CHANNELS, WIDTH)
    tl.store(out + place * CHANNELS + at, value, mask=inside)


def advance_history(history: Tensor, raw: Tensor, keep: Tensor, batch: PackedBatch) -> None:
    layers, lanes, width, channels = history.shape
    assert history.is_contiguous(), "a history that is changed in place must be contiguous"
    assert raw.stride(2) == 1, "channels must lie side by side"
    facts = (batch.lanes, batch.starts, batch.span_lengths, keep)
    _advance_history[batch.num_spans, layers, triton.cdiv(channels, _BLOCK.value)](
        history, raw, *facts, lanes, *raw.stride()[:2], CHANNELS=channels, WIDTH=width, num_warps=4, **pdl(raw.device)
    )


@triton.jit(do_not_specialize_on_alignment=_FACTS)
def _advance_history(
    history,
    raw,
    lanes,
    starts,
    lengths,
    keep,
    lane_count,
    layer_stride,
    row_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program owns its channels of one lane in one layer; what it reads of a history lies behind what it has written."""
    await_turn_alone(PDL)
    span, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kept = tl.minimum(tl.load(keep + span), tl.load(lengths + span))
    if kept == 0:
        return
    at = tl.program_id(2) * _BLOCK + tl.arange(0, _BLOCK)
    inside = at < CHANNELS
    lane, row = layer * lane_count + tl.load(lanes + span), tl.load(starts + span) + kept
    raw += layer * layer_stride
    for index in tl.static_range(WIDTH):
        value = raw_input(raw, row_stride, history, lane, row, kept, index, at, inside, CHANNELS, WIDTH)
        tl.store(history + (lane * WIDTH + index) * CHANNELS + at, value, mask=inside)


@triton.jit
def raw_input(x, stride, history, lane, row, before, index, at, inside, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Raw input ``index`` of the WIDTH + 1 that end with ``row`` of x, which has ``before`` rows of its span before it."""
    if before + index < WIDTH:
        source = history + (lane * WIDTH + before + index) * CHANNELS
    else:
        source = x + (row - WIDTH + index) * stride
    return tl.load(source + at, mask=inside, other=0.0)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def dynamic_conv(x: Tensor, base: Tensor, dynamic: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    x, base = x.contiguous(), base.contiguous()
    dynamic = dynamic if dynamic.stride(3) == 1 else dynamic.contiguous()
    lanes, rows, channels = x.shape
    values, factors, width = row_outputs(lanes * rows, channels, x.device, operand)
    norms = None if factors is None else torch.empty_like(factors)
    first, rest = pieces(channels, width)
    lane_stride, row_stride, tap_stride, _ = dynamic.stride()
    _dynamic_conv[lanes, rows](
        x,
        base,
        dynamic,
        values,
        factors,
        norms,
        LANE_STRIDE=lane_stride,
        ROW_STRIDE=row_stride,
        TAP_STRIDE=tap_stride,
        ROWS=rows,
        CHANNELS=channels,
        TAPS=base.shape[0],
        GROUP=channels // dynamic.shape[-1],
        WIDTH=width,
        FIRST=first,
        REST=rest,
        num_warps=warps_for(first),
        **pdl(x.device),
    )
    return values.view(x.shape) if factors is None else Rows(values, factors, lanes * rows, channels, norms)


@triton.jit
def _dynamic_conv(
    x,
    base,
    dynamic,
    values,
    factors,
    norms,
    LANE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    lane, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = lane * ROWS + row
    x += place * CHANNELS
    dynamic += lane * LANE_STRIDE + row * ROW_STRIDE
    at, more = tl.arange(0, FIRST), FIRST + tl.arange(0, REST)
    first = mixed(x, CHANNELS, base, dynamic, row, at, TAP_STRIDE, CHANNELS, TAPS, GROUP)
    rest = mixed(x, CHANNELS, base, dynamic, row, more, TAP_STRIDE, CHANNELS, TAPS, GROUP)
    if norms is not None:
        tl.store(norms + place, tl.sum(first * first) + tl.sum(rest * rest))
    store_row(values, factors, place, first, at, at < CHANNELS, rest, more, more < WIDTH, WIDTH)


@triton.jit
def mixed(
    x,
    x_stride,
    base,
    dynamic,
    row,
    at,
    TAP_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Some channels of the row of a block that x points to."""
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        reached = (at < CHANNELS) & (row + 0 * at >= tap)  # as vectors: the interpreter does not mix masks with scalars
        fixed = tl.load(base + tap * CHANNELS + at, mask=reached, other=0.0)
        kernel = fixed + tl.load(dynamic + tap * TAP_STRIDE + at // GROUP, mask=reached, other=0.0)
        total = tl.fma(kernel, tl.load(x - tap * x_stride + at, mask=reached, other=0.0), total)
    return total
