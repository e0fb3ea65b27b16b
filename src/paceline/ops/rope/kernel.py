"""Rotary position embedding in Triton: one program per row and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.rope.ref import RopeTable


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


def norm_and_rope(layers: Sequence[Tensor], weights: Tensor, eps: float, table: RopeTable, positions: Tensor) -> Tensor:
    rows, heads, dim = layers[0].shape
    layers = [x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in layers]
    out = torch.empty(len(layers), rows, heads, dim, dtype=torch.float32, device=weights.device)
    block = triton.next_power_of_2(dim)
    if rows:
        _norm_and_rotate[rows, heads, len(layers)](
            tuple(layers),
            tuple(x.stride(0) for x in layers),
            dim,
            weights.contiguous(),
            table.cos,
            table.sin,
            positions,
            out,
            eps,
            LAYERS=len(layers),
            HEADS=heads,
            DIM=dim,
            HALF=table.cos.shape[1],
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
            **pdl(weights.device),
        )
    return out


@triton.jit(do_not_specialize=["head_stride"], do_not_specialize_on_alignment=["weight", "cos", "sin", "positions", "out"])
def _norm_and_rotate(
    layers,
    row_strides,
    head_stride,
    weight,
    cos,
    sin,
    positions,
    out,
    eps,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``rms_norm`` and ``apply_rope`` one after the other, up to the last place. What the stride of heads is the compiler
    does not know, so it loads channels one by one however they lie: another load width is another order of summation."""
    row, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at = tl.arange(0, BLOCK)
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    inside, turned = at < DIM, at < 2 * HALF
    weight += layer * DIM
    own_weight = tl.load(weight + at, mask=inside, other=0.0)
    other_weight = tl.load(weight + partner, mask=turned, other=0.0)
    await_turn(PDL)
    x, row_stride = layers[0], row_strides[0]
    for index in tl.static_range(1, LAYERS):
        x = tl.where(layer == index, layers[index], x)
        row_stride = tl.where(layer == index, row_strides[index], row_stride)
    x += row * row_stride + head * head_stride
    value = tl.load(x + at, mask=inside, other=0.0)
    other = tl.load(x + partner, mask=turned, other=0.0)  # read again, instead of moved between threads
    angle = tl.load(positions + row) * HALF + at % HALF
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / DIM + eps)
    value, other = value * scale * own_weight, other * scale * other_weight
    value = value * c + other * (s * tl.where(at < HALF, -1.0, 1.0))
    out += ((layer * tl.num_programs(0) + row) * HEADS + head) * DIM
    tl.store(out + at, value, mask=inside)
