"""Rows of an embedding table in one Triton launch; types that no published table has are decoded by the reference.

Where in a block each number is: ``fields``. A product of scale, sub-scale and code fits float32's 24 bits, so the values are
the reference's to the bit. The ids of rows that are computed but nobody's may be anything; they read the table's last row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.quant import fields, ref
from paceline.ops.quant.ref import QuantTensor

_STEP = tl.constexpr(256)
"""Elements of a row per program: a block, or eight of Q8_0."""
_BYTES = {"Q8_0": 8 * 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}
"""Bytes of so many elements."""


def _table(values: tuple[int, ...]) -> int:
    """Eight values + 128 as the bytes of an int64."""
    return int.from_bytes(bytes(v + 128 for v in values), "little", signed=True)


_CODEBOOK_LOW = tl.constexpr(_table(fields.IQ4_VALUES[:8]))
_CODEBOOK_HIGH = tl.constexpr(_table(fields.IQ4_VALUES[8:]))


def dequantize_rows(q: QuantTensor, row_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if q.qtype not in _BYTES or len(q.shape) != 2:
        return ref.dequantize_rows(q, row_ids, dtype)
    rows, columns = q.shape
    data, ids = q.data.contiguous(), row_ids.flatten().contiguous()
    out = torch.empty(len(ids), columns, dtype=dtype, device=data.device)
    if len(ids):
        _dequantize_rows[len(ids), triton.cdiv(columns, _STEP.value)](
            data,
            ids,
            out,
            rows,
            columns,
            data.shape[1],
            TYPE=q.qtype,
            BYTES=_BYTES[q.qtype],
            num_warps=2,
            **pdl(data.device),
        )
    return out.view(*row_ids.shape, columns)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _dequantize_rows(data, ids, out, rows, columns, row_bytes, TYPE: tl.constexpr, BYTES: tl.constexpr, PDL: tl.constexpr):
    await_turn(PDL)
    at, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(ids + at).to(tl.int64)
    row = tl.where((row >= 0) & (row < rows), row, rows - 1)
    b = data + row * row_bytes + step * BYTES
    e = tl.arange(0, _STEP)
    inside = step * _STEP + e < columns
    if TYPE == "Q8_0":
        value = _q8_0(b, e, inside)
    elif TYPE == "Q6_K":
        value = _q6_k(b, e)
    elif TYPE == "IQ4_XS":
        value = _iq4_xs(b, e)
    else:
        value = _q4_or_q5_k(b, e, TYPE == "Q5_K")
    tl.store(out + at * columns + step * _STEP + e, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _byte(pointer):
    return tl.load(pointer).to(tl.int32)


@triton.jit
def _signed(byte):
    return (byte ^ 128) - 128


@triton.jit
def _half(low, high):
    """The float16 of two bytes, as float32."""
    return (low | (high << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _q8_0(b, e, inside):
    """The only one whose blocks may end inside the step."""
    b += e // 32 * 34
    low = tl.load(b, mask=inside, other=0).to(tl.int32)
    high = tl.load(b + 1, mask=inside, other=0).to(tl.int32)
    code = _signed(tl.load(b + 2 + e % 32, mask=inside, other=0).to(tl.int32))
    return _half(low, high) * code.to(tl.float32)


@triton.jit
def _q6_k(b, e):
    part, within = e // 128, e % 128
    low = (_byte(b + part * 64 + within % 64) >> (within // 64 * 4)) & 15
    high = (_byte(b + 128 + part * 32 + within % 32) >> (within // 32 * 2)) & 3
    scale = _signed(_byte(b + 192 + e // 16))
    return _half(_byte(b + 208), _byte(b + 209)) * scale.to(tl.float32) * ((low | (high << 4)) - 32).to(tl.float32)


@triton.jit
def _q4_or_q5_k(b, e, FIFTH: tl.constexpr):
    sub = e // 32
    first, second, third = _byte(b + 4 + sub % 4), _byte(b + 8 + sub % 4), _byte(b + 12 + sub % 4)
    scale = tl.where(sub < 4, first & 63, (third & 15) | ((first >> 6) << 4))
    minimum = tl.where(sub < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
    codes: tl.constexpr = 48 if FIFTH else 16
    code = (_byte(b + codes + e // 64 * 32 + e % 32) >> (sub % 2 * 4)) & 15
    if FIFTH:
        code |= ((_byte(b + 16 + e % 32) >> sub) & 1) << 4
    d, dmin = _half(_byte(b), _byte(b + 1)), _half(_byte(b + 2), _byte(b + 3))
    return d * scale.to(tl.float32) * code.to(tl.float32) - dmin * minimum.to(tl.float32)


@triton.jit
def _iq4_xs(b, e):
    sub = e // 32
    low = (_byte(b + 4 + sub // 2) >> (sub % 2 * 4)) & 15
    high = (_byte(b + 2 + sub // 4) >> (sub % 4 * 2)) & 3
    index = (_byte(b + 8 + sub * 16 + e % 16) >> (e % 32 // 16 * 4)) & 15
    table = tl.where(index < 8, _CODEBOOK_LOW, _CODEBOOK_HIGH)
    value = ((table >> ((index & 7) * 8).to(tl.int64)).to(tl.int32) & 255) - 128
    return _half(_byte(b), _byte(b + 1)) * ((low | (high << 4)) - 32).to(tl.float32) * value.to(tl.float32)
