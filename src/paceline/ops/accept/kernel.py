"""Acceptance in Triton: one program per span, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.accept.ref import PADDING, Verdict
from paceline.ops.launch import await_turn, pdl
from paceline.ops.topk.kernel import larger

_USUAL_WIDTH = 16
"""Spans are seldom wider, and for none that is narrower anything is compiled anew."""

_PADDING = tl.constexpr(PADDING)


def accept(
    tokens: Tensor,
    picks: Tensor,
    peaks: Tensor,
    starts: Tensor,
    lengths: Tensor,
    width: int,
    held: Tensor | None = None,
) -> Verdict:
    spans = starts.shape[0]
    keep = torch.empty(spans, dtype=torch.int64, device=picks.device)
    report = torch.empty(spans, 3 + width, dtype=torch.int64, device=picks.device)
    _accept[spans,](
        tokens,
        picks,
        peaks,
        starts,
        lengths,
        held,
        keep,
        report,
        width,
        peaks.shape[1],
        ROWS=max(_USUAL_WIDTH, triton.next_power_of_2(width)),
        PARTS=triton.next_power_of_2(peaks.shape[1]),
        num_warps=4,
        **pdl(picks.device),
    )
    return Verdict(keep, report)


@triton.jit(
    do_not_specialize=["width", "parts"],
    do_not_specialize_on_alignment=["tokens", "picks", "peaks", "starts", "lengths", "held", "keep", "report"],
)
def _accept(
    tokens,
    picks,
    peaks,
    starts,
    lengths,
    held,
    keep,
    report,
    width,
    parts,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    span = tl.program_id(0)
    first, length = tl.load(starts + span), tl.load(lengths + span)
    row = tl.arange(0, ROWS)
    picked = tl.load(picks + first + row, mask=row < length, other=_PADDING)
    draft = tl.load(tokens + first + row + 1, mask=row < length - 1, other=_PADDING)
    matches = (row < length - 1) & (draft == picked)
    accepted = tl.min(tl.where(matches, ROWS, row), 0).to(tl.int64)
    if held is not None:
        given = tl.load(held + span)
        accepted = tl.where(given >= 0, tl.minimum(given, length - 1), accepted)
    kept = tl.minimum(accepted + 1, length)
    emitted = tl.where(row < kept, tl.where(row < accepted, draft, picked), _PADDING)
    anchor = tl.max(tl.where(row == tl.maximum(kept - 1, 0), emitted, _PADDING), 0)

    part = tl.arange(0, PARTS)
    at = (first + row)[:, None] * parts + part[None, :]
    peak = tl.load(peaks + at, mask=(row < kept)[:, None] & (part < parts)[None, :], other=0.0)
    largest = tl.reduce(tl.where((part < parts)[None, :], peak, float("-inf")), 1, larger)
    broken = tl.max(((row < kept) & ~(tl.abs(largest) < float("inf"))).to(tl.int64), 0)

    to = report + span * (3 + width)
    tl.store(keep + span, kept)
    tl.store(to, kept)
    tl.store(to + 1, anchor)
    tl.store(to + 2, broken)
    tl.store(to + 3 + row, emitted, mask=row < width)
