"""Writing K/V rows in Triton: one program per row, rounded as the reference does on a CPU (IEEE division, ties to even)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.kv.ref import PagedTensor
from paceline.ops.launch import await_turn, pdl

_GROUP = tl.constexpr(32)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Adding it to a float32 below 2^22 leaves no room for a fraction, so the sum is rounded to an integer, ties to even."""


def write_rows(cache: PagedTensor, slots: Tensor, values: Tensor) -> None:
    values = values.contiguous()
    rows, heads, dim = values.shape
    if rows:
        padded = max(_GROUP.value, triton.next_power_of_2(heads * dim))
        _write[rows,](
            cache.data, cache.scale, slots, values, WIDTH=heads * dim, PADDED=padded, num_warps=4, **pdl(values.device)
        )


@triton.jit
def _write(data, scale, slots, values, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    value = tl.load(values + row * WIDTH + at, mask=at < WIDTH, other=0.0)
    store_groups(data, scale, tl.load(slots + row).to(tl.int64) * WIDTH, value, WIDTH, PADDED)


@triton.jit
def store_groups(data, scale, first, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The first WIDTH of value [PADDED] as the elements of pages from ``first`` on, which is the start of a group."""
    at = tl.arange(0, PADDED)
    if scale is None:
        tl.store(data + first + at, value.to(data.dtype.element_ty), mask=at < WIDTH)
    else:
        value = tl.reshape(value, (PADDED // _GROUP, _GROUP))
        group = tl.arange(0, PADDED // _GROUP)
        step = tl.div_rn(tl.reduce(tl.abs(value), 1, _larger), 127.0).to(tl.float16)
        divisor = step.to(tl.float32)[:, None] + tl.zeros_like(value)
        level = tl.where(divisor > 0.0, tl.div_rn(value, tl.where(divisor > 0.0, divisor, 1.0)), 0.0)
        level = tl.clamp((level + _ROUNDER) - _ROUNDER, -127.0, 127.0)
        at = tl.reshape(at, (PADDED // _GROUP, _GROUP))
        tl.store(data + first + at, level.to(tl.int8), mask=at < WIDTH)
        tl.store(scale + first // _GROUP + group, step, mask=group < WIDTH // _GROUP)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
