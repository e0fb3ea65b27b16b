"""Attention of generated rows on Hopper GPUs (compute capability 9.0), over q8_0 pages: ``attend.cu``, compiled at run time,
and its launches. It makes what ``kernel.py`` adds up, the parts of all pieces of a context.

A query's bits depend on its own context only: pieces begin at fixed positions, keys that it does not see weigh nothing, and
it is a column of its own in every product. The sums are taken in another order than in ``kernel.py``:
``ops.attention.attention_arithmetic`` tells.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import PAGE_SIZE
from paceline.ops import nvrtc
from paceline.ops.attention import pieces as cuts
from paceline.ops.kv import PagedTensor

VERSION = 3
"""Of the arithmetic: raise it when the bits of a part change."""
HEAD_DIM, TILE_ROWS, _MOST_GROUP = 256, 8, 6
"""Numbers of a head; rows of a tile; the most query heads to a key head."""
_KEYS, _WARPS, _RESIDENT = 128, 8, 2
"""Keys at a time; warps of a CTA; CTAs of a multiprocessor."""
_SOURCE = Path(__file__).with_name("attend.cu")
_POINTERS = (
    *("q", "k", "k_scales", "v", "v_scales", "table", "lanes", "starts", "lengths", "bases"),
    *("parts", "peaks", "totals"),
)
_CUTS = ("NEAR", "MIDDLE", "FAR", "MIDDLE_BEGIN", "FAR_BEGIN", "MIDDLE_FIRST", "FAR_FIRST")


class _Arguments(ctypes.Structure):
    """As in ``attend.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("table_stride", "q_row", "q_head")),
        *((name, ctypes.c_int) for name in ("tiles_per_span", "pieces", "kv_heads", "few")),
        ("scale", ctypes.c_float),
    ]


def fits(
    q: Tensor, k_cache: PagedTensor, v_cache: PagedTensor, batch: PackedBatch, causal: bool, window: int | None
) -> bool:
    """Whether ``attend`` is for such heads, pages and rows."""
    heads, dim = q.shape[1:]
    stored = k_cache.scale is not None and v_cache.scale is not None
    sizes = dim == HEAD_DIM and heads // k_cache.data.shape[2] <= _MOST_GROUP
    return stored and sizes and batch.kind == "decode" and causal and window is None and nvrtc.available(q.device)


def attend(
    q: Tensor,
    k_cache: PagedTensor,
    v_cache: PagedTensor,
    page_table: Tensor,
    batch: PackedBatch,
    scale: float,
    tiles_per_span: int,
    walkers: int,
    parts: Tensor,
    peaks: Tensor,
    totals: Tensor,
) -> None:
    """Into ``parts`` [N, heads, pieces, 256], ``peaks`` and ``totals`` [N, heads, pieces]: of the pieces that each row sees,
    values weighted by 2^(score - peak), the largest score and the sum of the weights. Rows of q begin at multiples of 16
    bytes. ``walkers`` share the pieces of a tile."""
    _, heads, pieces = peaks.shape
    page_table = page_table.int()  # it is, in the engine
    kv_heads = k_cache.data.shape[2]
    facts = (batch.lanes, batch.starts, batch.span_lengths, batch.span_bases)
    caches = (k_cache.data, k_cache.scale, v_cache.data, v_cache.scale)
    tensors = (q, *caches, page_table, *facts, parts, peaks, totals)
    pointers = (tensor.data_ptr() for tensor in tensors if tensor is not None)
    strides = (page_table.stride(0), *q.stride()[:2])
    few = _RESIDENT * nvrtc.processors(q.device.index)
    arguments = _Arguments(*pointers, *strides, tiles_per_span, pieces, kv_heads, few, scale * math.log2(math.e))
    grid = (2 * batch.num_spans * tiles_per_span, kv_heads, walkers)
    with torch.cuda.device(q.device):
        nvrtc.launch(
            _kernel(q.device.index, heads // kv_heads), grid, 32 * _WARPS, [arguments], shared_bytes(heads // kv_heads)
        )


def shared_bytes(group: int) -> int:
    """What ``Shared`` of ``attend.cu`` takes."""
    queries, groups = 2 * TILE_ROWS * -(-group // 2), HEAD_DIM // 32
    stored, pages = 2 * _KEYS * (HEAD_DIM + 2 * groups), 2 * 4 * (_KEYS // PAGE_SIZE)
    return stored + pages + queries * (2 * HEAD_DIM + 2 * _KEYS + 32 + 4 * (_WARPS + 5))


def source(group: int) -> str:
    numbers = {"GROUP": group, "PAGE": PAGE_SIZE, **{name: getattr(cuts, name) for name in _CUTS}}
    return nvrtc.with_constants(numbers, _SOURCE)


@functools.cache
def _kernel(device: int, group: int) -> ctypes.c_void_p:
    """attend(), loaded on the current device."""
    return nvrtc.load(source(group), "attend", shared_bytes(group))
