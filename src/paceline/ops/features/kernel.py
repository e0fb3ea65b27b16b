"""The same in Triton, one launch each: a program has a block of a row's numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops.launch import await_turn, pdl

_BLOCK = tl.constexpr(2048)


def keep_features(ring: Tensor, features: Tensor, batch: PackedBatch) -> None:
    _launch(ring, features.contiguous(), batch, keeping=True)


def kept_features(ring: Tensor, batch: PackedBatch) -> Tensor:
    out = torch.empty(batch.num_rows, ring.shape[2], device=ring.device)
    _launch(ring, out, batch, keeping=False)
    return out


def _launch(ring: Tensor, rows: Tensor, batch: PackedBatch, keeping: bool) -> None:
    count, width = rows.shape
    if count:
        _copy_features[count, triton.cdiv(width, _BLOCK.value)](
            ring,
            rows,
            batch.lanes,
            batch.row_span,
            batch.positions,
            PLACES=ring.shape[1],
            WIDTH=width,
            KEEPING=keeping,
            **pdl(ring.device),
        )


@triton.jit(do_not_specialize_on_alignment=["lanes", "row_span", "positions"])
def _copy_features(
    ring,
    rows,
    lanes,
    row_span,
    positions,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPING: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    place = tl.load(lanes + tl.load(row_span + row)) * PLACES + tl.load(positions + row) % PLACES
    of_ring, of_row = ring + place * WIDTH + at, rows + row * WIDTH + at
    if KEEPING:
        tl.store(of_ring, tl.load(of_row, mask=at < WIDTH), mask=at < WIDTH)
    else:
        tl.store(of_row, tl.load(of_ring, mask=at < WIDTH), mask=at < WIDTH)
