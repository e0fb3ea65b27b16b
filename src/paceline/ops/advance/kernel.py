"""The same in Triton, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops.launch import await_turn, pdl

_BLOCK = tl.constexpr(128)


def advance(
    ends: Tensor,
    places: Tensor,
    anchors: Tensor,
    batch: PackedBatch,
    limits: Tensor | None = None,
    draws: Tensor | None = None,
) -> None:
    rows, spans = batch.num_rows, batch.num_spans
    _advance[triton.cdiv(max(rows, spans), _BLOCK.value),](
        ends,
        places,
        anchors,
        batch.positions,
        batch.row_span,
        batch.span_bases,
        batch.span_lengths,
        limits,
        draws,
        rows,
        spans,
        ends.stride(0),
        **pdl(anchors.device),
    )


def advance_counts(ends: Tensor, places: Tensor, counts: Tensor) -> None:
    spans = counts.shape[0]
    _advance_counts[triton.cdiv(spans, _BLOCK.value),](ends, places, counts, spans, ends.stride(0), **pdl(counts.device))


def input_tokens(anchors: Tensor, sources: Tensor, drafts: Tensor | None, out: Tensor) -> None:
    rows = out.shape[0]
    if drafts is not None:
        drafts = drafts.contiguous()
    _input_tokens[triton.cdiv(rows, _BLOCK.value),](
        anchors, sources, drafts, out, rows, anchors.shape[0], **pdl(anchors.device)
    )


@triton.jit(
    do_not_specialize=["rows", "spans", "ends_stride"],
    do_not_specialize_on_alignment=[
        "ends",
        "places",
        "anchors",
        "positions",
        "row_span",
        "bases",
        "lengths",
        "limits",
        "draws",
    ],
)
def _advance(
    ends, places, anchors, positions, row_span, bases, lengths, limits, draws, rows, spans, ends_stride, PDL: tl.constexpr
):
    """A program has a block of rows, and the spans of the same numbers."""
    await_turn(PDL)
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    span = tl.load(row_span + at, mask=at < rows, other=0)
    place = tl.load(places + span, mask=at < rows, other=-1)
    moving = place >= 0
    moved = tl.load(ends + place * ends_stride, mask=moving, other=0)
    tl.store(positions + at, tl.load(positions + at, mask=moving, other=0) + moved, mask=moving)
    if draws is not None:  # one less a span than rows
        drawing = moving & (at % (rows // spans) > 0)
        draw = draws + at - span - 1
        tl.store(draw, tl.load(draw, mask=drawing, other=0) + moved, mask=drawing)

    place = tl.load(places + at, mask=at < spans, other=-1)
    gone_on = place >= 0
    moved = tl.load(ends + place * ends_stride, mask=gone_on, other=0)
    tl.store(bases + at, tl.load(bases + at, mask=gone_on, other=0) + moved, mask=gone_on)
    tl.store(anchors + at, tl.load(ends + place * ends_stride + 1, mask=gone_on, other=0), mask=gone_on)
    if limits is not None:
        room = tl.load(limits + at, mask=gone_on, other=0) - moved
        length = tl.minimum(tl.load(lengths + at, mask=gone_on, other=0), room)
        tl.store(lengths + at, tl.maximum(length, 0), mask=gone_on)


@triton.jit(do_not_specialize=["spans", "ends_stride"], do_not_specialize_on_alignment=["ends", "places", "counts"])
def _advance_counts(ends, places, counts, spans, ends_stride, PDL: tl.constexpr):
    await_turn(PDL)
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    place = tl.load(places + at, mask=at < spans, other=-1)
    gone_on = place >= 0
    moved = tl.load(ends + place * ends_stride, mask=gone_on, other=0)
    tl.store(counts + at, tl.load(counts + at, mask=gone_on, other=0) + moved, mask=gone_on)


@triton.jit(do_not_specialize=["rows", "spans"], do_not_specialize_on_alignment=["anchors", "sources", "drafts", "out"])
def _input_tokens(anchors, sources, drafts, out, rows, spans, PDL: tl.constexpr):
    await_turn(PDL)
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    source = tl.load(sources + at, mask=at < rows, other=0)
    token = tl.load(anchors + source, mask=(at < rows) & (source < spans), other=0)
    if drafts is not None:
        drafted = (at < rows) & (source >= spans)
        token += tl.load(drafts + source - spans, mask=drafted, other=0)
    tl.store(out + at, token, mask=at < rows)
