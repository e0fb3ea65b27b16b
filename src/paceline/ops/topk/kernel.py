"""Triton kernels of ``ref.py``: maxima of blocks of columns, then a row's k best blocks, then the k best of their values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.topk import ref

_WIDTH = 128
"""Columns per block: over 248,320 columns the maxima, and the values of 16 blocks, are about 2,000 each."""

_TILE = 2048
"""Columns per program that makes maxima."""

_MOST = 64
"""The largest k that one program per row selects."""

_NONE = tl.constexpr(-(2**63))
"""Below the order key of every value."""


def argmax(logits: Tensor) -> Tensor:
    return top_k(logits, 1)[1][:, 0]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    if not 1 <= k <= min(vocab, _MOST):
        return ref.top_k(logits, k)
    logits = unit_stride(logits)
    maxima = block_maxima(logits, _WIDTH)
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    blocks, slots = maxima.shape[1], triton.next_power_of_2(k)
    _select[(rows,)](
        logits,
        maxima,
        values,
        ids,
        vocab,
        logits.stride(0),
        blocks,
        K=k,
        SLOTS=slots,
        BLOCKS=triton.next_power_of_2(blocks),
        WIDTH=_WIDTH,
        num_warps=8 if slots <= 16 else 16,
        **pdl(logits.device),
    )
    return values, ids


def block_maxima(logits: Tensor, width: int, *, nans: bool = False) -> Tensor:
    """Largest value of every ``width`` columns (a power of two, at most ``_TILE``): [R, V] -> [R, ceil(V / width)]. A NaN
    counts as minus infinity or, with ``nans``, is larger than everything."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, width)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _block_maxima[(triton.cdiv(vocab, _TILE), rows)](
        logits,
        maxima,
        vocab,
        logits.stride(0),
        blocks,
        WIDTH=width,
        BLOCKS=_TILE // width,
        NANS=nans,
        num_warps=4,
        **pdl(logits.device),
    )
    return maxima


def peaks(logits: Tensor) -> Tensor:
    return block_maxima(unit_stride(logits), _TILE, nans=True)


def unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _block_maxima(
    logits,
    maxima,
    vocab,
    stride,
    num_blocks,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    NANS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    largest = tl.reduce(x, 1, larger) if NANS else tl.max(numbers(x), axis=1)
    tl.store(maxima + row * num_blocks + blocks, largest, mask=blocks < num_blocks)


@triton.jit
def larger(a, b):
    """For ``tl.reduce``: a NaN is larger than everything."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _select(
    logits,
    maxima,
    values,
    ids,
    vocab,
    stride,
    num_blocks,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    best = tl.load(maxima + row * num_blocks + at, mask=at < num_blocks, other=float("-inf"))
    keys = tl.where(at < num_blocks, order_key(best, at), _NONE)
    slots = tl.arange(0, SLOTS)
    blocks = tl.full([SLOTS], 0, tl.int32) + num_blocks
    for slot in range(tl.minimum(K, num_blocks)):
        top = tl.max(keys, axis=0)
        keys = tl.where(keys == top, _NONE, keys)
        blocks = tl.where(slots == slot, key_id(top), blocks)

    columns = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (blocks[:, None] < num_blocks) & (columns < vocab)
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
    rest = tl.reshape(tl.where(inside, order_key(numbers(x), columns), _NONE), [SLOTS * WIDTH])
    for slot in range(K):
        top = tl.max(rest, axis=0)
        rest = tl.where(rest == top, _NONE, rest)
        tl.store(values + row * K + slot, key_value(top))
        tl.store(ids + row * K + slot, key_id(top).to(tl.int64))


@triton.jit
def numbers(x):
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_key(x, ids):
    """``ref.order_keys`` of numbers with int32 ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_value(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def key_id(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
