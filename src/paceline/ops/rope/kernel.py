"""Rotary position embedding in Triton: one program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = (table.contiguous() for table in angles)
    rows, heads, dim = x.shape
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if rows:
        _rotate[rows, heads](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            HEADS=heads,
            DIM=dim,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(dim - 2 * half),
            num_warps=1,
            **pdl(x.device),
        )
    return out


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += row * row_stride + head * head_stride
    out += (row * HEADS + head) * DIM
    at = tl.arange(0, HALF_BLOCK)
    inside = at < HALF
    c = tl.load(cos + row * HALF + at, mask=inside)
    s = tl.load(sin + row * HALF + at, mask=inside)
    first = tl.load(x + at, mask=inside)
    second = tl.load(x + HALF + at, mask=inside)
    tl.store(out + at, first * c - second * s, mask=inside)
    tl.store(out + HALF + at, second * c + first * s, mask=inside)
    if DIM > 2 * HALF:
        at = 2 * HALF + tl.arange(0, REST_BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < DIM), mask=at < DIM)
