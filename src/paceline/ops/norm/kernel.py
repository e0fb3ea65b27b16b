"""Normalisations in Triton: one program per row, the row in one block of a fixed length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRIDES = ["inner", "x_outer", "x_inner", "gate_outer", "gate_inner"]
_POINTERS = ["x", "weight", "gate", "out"]
"""How a row lies in memory must not choose the code: another load width is another order of summation."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, None, eps, mean=True)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return _launch(x, None, None, eps, mean=False)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, gate, eps, mean=True)


def _launch(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, *, mean: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, size = out.view(-1, x.shape[-1]).shape
    if rows:
        x, inner, x_outer, x_inner = _rows(x)
        gate_outer = gate_inner = 0
        if gate is not None:
            gate, inner, gate_outer, gate_inner = _rows(gate)
        block = triton.next_power_of_2(size)
        _norm[rows,](
            x,
            weight,
            gate,
            out,
            inner,
            x_outer,
            x_inner,
            gate_outer,
            gate_inner,
            eps,
            SIZE=size,
            BLOCK=block,
            MEAN=mean,
            num_warps=min(8, max(1, block // 256)),
        )
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, rows per outer index, stride of the outer index, stride of the inner one), copied only if it must be."""
    if x.stride(-1) != 1 or x.ndim > 3:
        x = x.contiguous()
    if x.ndim == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, x.shape[-1] if x.ndim != 2 else x.stride(0), 0


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_POINTERS)
def _norm(
    x,
    weight,
    gate,
    out,
    inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outer, within = row // inner, row % inner
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    value = tl.load(x + outer * x_outer + within * x_inner + at, mask=inside, other=0.0)
    square = tl.sum(value * value, 0)
    if MEAN:
        square = square / SIZE
    value = value * (1.0 / tl.sqrt_rn(square + eps))
    if weight is not None:
        value = value * tl.load(weight + at, mask=inside, other=0.0)
    if gate is not None:
        z = tl.load(gate + outer * gate_outer + within * gate_inner + at, mask=inside, other=0.0)
        value = value * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * SIZE + at, value, mask=inside)
