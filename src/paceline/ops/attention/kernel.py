"""Paged attention in Triton: one walk over the keys for both kinds of rows, and a sum over pieces of the context.

A program computes one query tile (``QUERY_TILE`` rows of a span times some of the query heads that share a key head, padded
to a product of one shape) over some pieces of the keys, each by itself. Pieces (``pieces.py``) and key blocks begin at fixed
absolute positions, so that a row meets the same blocks in the same order whatever is beside it; a block that a row does not
see multiplies what it holds by one and adds zeros. Where no context of the batch has more than one piece, the result is
written at once; the sum over pieces of a row that has but one gives the same bits.

With a gate and a bound of the values, the sum over pieces leaves what the next product reads: an attended value is no larger
than the values are, so one power of two brings all rows into the range of float16. It is taken then for one piece, too.

For some heads and pages Hopper GPUs have a kernel of their own for the parts of pieces (``hopper.py``), not for the sum.

The host's ``lengths`` and ``bases`` decide the size of the grid and of the scratch memory only, and may be too large: what a
program does, it reads from the device. So one CUDA graph serves every context, and a span may have no rows.

Precision: queries, keys, weights and values enter the products in 16 bits (bfloat16 pages: bfloat16; float16 and q8_0 pages:
float16, a q8_0 value rounded once from scale times level), the sums and the softmax are float32. So a score is off by at
most 2^-10 of the sum of its |q k| (2^-8 for bfloat16), a weight and a value by 2^-11 (2^-8) of themselves. float32 pages are
multiplied in three bfloat16 parts each, which is as good as float32. What a piece of float16 values comes to is kept in
float16 itself, times a power of two that makes it no larger than the values: half of the traffic that pieces cause.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import PAGE_SIZE
from paceline.ops.activation.kernel import aligned, gated_heads, sigmoid_of
from paceline.ops.attention import hopper
from paceline.ops.attention import pieces as cuts
from paceline.ops.attention.pieces import pieces_of
from paceline.ops.attention.ref import QUERY_TILE
from paceline.ops.kv import PagedTensor
from paceline.ops.kv.kernel import store_groups
from paceline.ops.launch import await_turn, has_little_shared_memory, pdl
from paceline.ops.linear.rows import COLUMN_STEP, Rows, empty_rows
from paceline.types import RowKind


@dataclass(frozen=True, slots=True)
class Tiling:
    """``tile`` rows times heads of a program at most, ``block`` keys per product; ``cut``: whether there are pieces."""

    tile: int
    block: int
    cut: bool
    warps: int
    stages: int


TILING: dict[tuple[RowKind, int], Tiling] = {
    ("decode", 2): Tiling(tile=64, block=64, cut=True, warps=8, stages=2),
    ("decode", 4): Tiling(tile=64, block=16, cut=True, warps=8, stages=1),
    ("prefill", 2): Tiling(tile=128, block=64, cut=False, warps=8, stages=2),
    ("prefill", 4): Tiling(tile=64, block=16, cut=False, warps=8, stages=1),
}
"""By kind of rows and bytes of a factor in the products. Part of the arithmetic: a change changes bits."""
SMALL_TILING: dict[tuple[RowKind, int], Tiling] = TILING | {
    ("decode", 2): Tiling(tile=64, block=64, cut=True, warps=4, stages=1),
    ("prefill", 2): Tiling(tile=64, block=64, cut=False, warps=4, stages=1),
}
"""Where there is little shared memory."""

_OPERAND = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int8: tl.float16}
_MOST_WALKERS, _FEWEST_WALKERS, _ENOUGH_PROGRAMS = 66, 16, 1024
"""Programs that share the pieces of a tile. One lane of four key heads then has 264, two for each multiprocessor of an H200;
with more lanes fewer do, but enough for one long context among short ones. Who walks a piece does not touch the result."""
_FIRST_PIECES, _MORE_PIECES = tl.constexpr(16), tl.constexpr(32)
"""That are added up at once."""
_PEAKS = tl.constexpr(512)
"""Of pieces, that are looked at at once."""
_SUM_CHANNELS = 128
"""Of a head, for each program of the sum."""
_GROUP = tl.constexpr(32)
_PAGE = tl.constexpr(PAGE_SIZE)
_NEAR, _MIDDLE, _FAR = tl.constexpr(cuts.NEAR), tl.constexpr(cuts.MIDDLE), tl.constexpr(cuts.FAR)
_MIDDLE_BEGIN, _FAR_BEGIN = tl.constexpr(cuts.MIDDLE_BEGIN), tl.constexpr(cuts.FAR_BEGIN)
_MIDDLE_FIRST, _FAR_FIRST = tl.constexpr(cuts.MIDDLE_FIRST), tl.constexpr(cuts.FAR_FIRST)
_VARYING = ["tiles_per_span", "table_stride", "pieces", "window"]
"""Arguments that change from batch to batch: Triton would compile anew where one is 1 or a multiple of 16."""
_FACTS = ["lanes", "row_span", "starts", "lengths", "bases"]
"""Tensors that may be slices of one, so that each may lie anywhere."""
_GATE_STRIDES = ["gate_row", "gate_head"]
_STRIDES = ["q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "angle_row"]


def attention(
    q: Tensor,
    k_cache: PagedTensor,
    v_cache: PagedTensor,
    page_table: Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    _attend_and_add(q, k_cache, v_cache, page_table, batch, scale, causal, window, out, None)
    return out


def gated_attention(
    q: Tensor,
    gate: Tensor,
    k_cache: PagedTensor,
    v_cache: PagedTensor,
    page_table: Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    causal: bool,
    operand: torch.dtype | None = None,
    bound: float | None = None,
) -> Tensor | Rows:
    """The gate is a launch of its own where the values have no bound, for prompts, whose contexts are not cut, and where
    rows would be padded."""
    rows, heads, dim = q.shape
    if bound is None or operand != torch.float16 or batch.kind != "decode" or heads * dim % COLUMN_STEP:
        return gated_heads(attention(q, k_cache, v_cache, page_table, batch, scale=scale, causal=causal), gate, operand)
    made = empty_rows(rows, heads * dim, operand, q.device)
    to_rows = _ToRows(aligned(gate), made.factors, scale_of(bound))
    _attend_and_add(q, k_cache, v_cache, page_table, batch, scale, causal, None, made.values, to_rows)
    return made


def scale_of(bound: float) -> float:
    """The power of two that brings ``bound`` to 2^14 to 2^15."""
    return 2.0 ** (15 - math.frexp(bound)[1])


class _ToRows(NamedTuple):
    """What makes ``Rows`` of a result: its gate, where the rows' factors go, and what all rows are multiplied by."""

    gate: Tensor
    factors: Tensor
    scale: float


def _attend_and_add(
    q: Tensor,
    k_cache: PagedTensor,
    v_cache: PagedTensor,
    page_table: Tensor,
    batch: PackedBatch,
    scale: float,
    causal: bool,
    window: int | None,
    out: Tensor,
    to_rows: _ToRows | None,
) -> None:
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, dim = q.shape
    kv_heads = k_cache.data.shape[2]
    wide = torch.float32 in (k_cache.data.dtype, v_cache.data.dtype)
    tiling = (SMALL_TILING if has_little_shared_memory(q.device) else TILING)[batch.kind, 4 if wide else 2]
    tile_rows = QUERY_TILE[batch.kind]
    tile_heads = _heads_per_tile(heads // kv_heads, tiling.tile // tile_rows)
    longest, widest = _bounds(batch)
    run = None if window is None else window + widest - 1
    pieces = pieces_of(longest, run) if tiling.cut else 1
    tiles_per_span = triton.cdiv(widest, tile_rows)
    tiles = (batch.num_spans * tiles_per_span, heads // tile_heads)

    special = hopper.fits(q, k_cache, v_cache, batch, causal, window)
    whole = pieces == 1 and to_rows is None and not special
    room = functools.partial(torch.empty, device=q.device)
    operand = _OPERAND[v_cache.data.dtype]
    kept = torch.float16 if operand == tl.float16 and tiling.cut else torch.float32
    parts = out if whole else room(rows, heads, pieces, dim, dtype=kept)
    peaks, totals = (out if whole else room(rows, heads, pieces) for _ in range(2))
    spans = (batch.starts, batch.span_lengths, batch.span_bases)
    facts = (pieces, window or 0)
    padded = max(16, triton.next_power_of_2(dim))
    ptx = torch.version.cuda is not None and q.is_cuda
    geometry = {"TILE_ROWS": tile_rows, "CAUSAL": causal, "WINDOWED": window is not None}
    walkers = _walkers(pieces, math.prod(tiles))
    if special:
        hopper.attend(aligned(q), k_cache, v_cache, page_table, batch, scale, tiles_per_span, walkers, parts, peaks, totals)
    else:
        _attend[*tiles, walkers](
            q,
            k_cache.data,
            k_cache.scale,
            v_cache.data,
            v_cache.scale,
            page_table,
            batch.lanes,
            *spans,
            parts,
            peaks,
            totals,
            tiles_per_span,
            page_table.stride(0),
            q.stride(0),
            q.stride(1),
            scale * math.log2(math.e),
            *facts,
            HEADS=heads,
            KV_HEADS=kv_heads,
            TILE_HEADS=tile_heads,
            TILE=max(16, triton.next_power_of_2(tile_rows * tile_heads)),
            DIM=dim,
            PADDED=padded,
            K_OPERAND=_OPERAND[k_cache.data.dtype],
            V_OPERAND=operand,
            HALVES=kept == torch.float16,
            PRECISION="bf16x6" if q.is_cuda else "ieee",  # the interpreter knows no other
            PTX=ptx,
            BLOCK=tiling.block,
            WHOLE=whole,
            **geometry,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **pdl(q.device),
        )
    if not whole:
        gate, factors, factor = to_rows or (None, None, 1.0)
        channels = min(padded, _SUM_CHANNELS)
        _add_pieces[rows, heads, padded // channels](
            parts,
            peaks,
            totals,
            out,
            gate,
            factors,
            batch.row_span,
            *spans,
            *facts,
            *((0, 0) if gate is None else (stride // 4 for stride in gate.stride()[:2])),
            factor,
            1.0 / factor,
            HEADS=heads,
            DIM=dim,
            CHANNELS=channels,
            PTX=ptx,
            num_warps=1,
            **geometry,
            **pdl(q.device),
        )


def attention_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    k_cache: PagedTensor,
    v_cache: PagedTensor,
    slots: Tensor,
) -> Tensor:
    q, k, v, q_weight, k_weight = (aligned(x) for x in (q, k, v, q_weight, k_weight))
    cos, sin = (aligned(table) for table in angles)
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    padded = max(_GROUP.value, triton.next_power_of_2(dim))
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
    if rows:
        _prepare[rows, heads + 2 * kv_heads](
            q,
            k,
            v,
            q_weight,
            k_weight,
            cos,
            sin,
            slots,
            out,
            k_cache.data,
            k_cache.scale,
            v_cache.data,
            v_cache.scale,
            *(stride // 4 for x in (q, k, v) for stride in x.stride()[:2]),
            cos.stride(0) // 4,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            PADDED=padded,
            HALF=cos.shape[-1],
            num_warps=max(1, padded // 256),
            **pdl(q.device),
        )
    return out


def _heads_per_tile(group: int, limit: int) -> int:
    """The largest divisor of the query heads per key head that a tile has room for."""
    return next(heads for heads in range(min(group, limit), 0, -1) if group % heads == 0)


def _bounds(batch: PackedBatch) -> tuple[int, int]:
    """(longest context, most rows) of a span of the batch at most."""
    key = "attention bounds"
    if key not in batch.plans:
        longest = max(base + length for base, length in zip(batch.bases, batch.lengths, strict=True))
        batch.plans[key] = (longest, max(batch.lengths))
    bounds: tuple[int, int] = batch.plans[key]
    return bounds


def _walkers(pieces: int, tiles: int) -> int:
    """Programs that share the pieces of each of ``tiles`` tiles."""
    return min(pieces, max(_FEWEST_WALKERS, min(_MOST_WALKERS, _ENOUGH_PROGRAMS // tiles)))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_FACTS)
def _attend(
    q,
    k_data,
    k_scale,
    v_data,
    v_scale,
    page_table,
    lanes,
    starts,
    lengths,
    bases,
    parts,
    peaks,
    totals,
    tiles_per_span,
    table_stride,
    q_row_stride,
    q_head_stride,
    scale,
    pieces,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    K_OPERAND: tl.constexpr,
    V_OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt have the most keys: they begin first
    span = tile // tiles_per_span
    first_row = tile % tiles_per_span * TILE_ROWS
    length = tl.load(lengths + span).to(tl.int32)
    base = tl.load(bases + span).to(tl.int32)
    start, lane = tl.load(starts + span), tl.load(lanes + span)  # with the others, not behind them
    first_key, last_key = _keys_of_tile(base, first_row, length, window, TILE_ROWS, CAUSAL, WINDOWED)
    first_piece, last_piece = 0, 0
    if not WHOLE:
        first_piece, last_piece = _piece_of(first_key), _piece_of(last_key)
    if (first_row >= length) | (first_piece + tl.program_id(2) > last_piece):
        return

    in_tile = tl.arange(0, TILE)
    row = first_row + in_tile % TILE_ROWS
    head = tl.program_id(1) * TILE_HEADS + in_tile // TILE_ROWS
    real = (in_tile < TILE_ROWS * TILE_HEADS) & (row < length)
    packed = start + row
    channel = tl.arange(0, PADDED)
    stored = real[:, None] & (channel < DIM)[None, :]
    address = q + (packed * q_row_stride + head * q_head_stride)[:, None] + channel[None, :]
    queries = (tl.load(address, mask=stored, other=0.0) * scale).to(K_OPERAND)
    position = tl.where(real, base + row, -1)
    place = packed * HEADS + head

    kv_head = tl.program_id(1) * TILE_HEADS // (HEADS // KV_HEADS)
    pages = page_table + lane * table_stride
    for piece in range(first_piece + tl.program_id(2), last_piece + 1, tl.num_programs(2)):
        begin = first_key // BLOCK * BLOCK
        end = last_key + 1
        if not WHOLE:
            begin = tl.maximum(begin, _begin_of(piece))
            end = tl.minimum(end, _begin_of(piece + 1))
        peak = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        values = tl.zeros([TILE, PADDED], tl.float32)
        for block in range(begin, end, BLOCK):
            key = block + tl.arange(0, BLOCK)
            known = (key >= first_key) & (key <= last_key)  # what lies elsewhere may be NaN, and 0 * NaN is not 0
            page = tl.load(pages + key // _PAGE, mask=known, other=0).to(tl.int64)
            stripe = (page * _PAGE + key % _PAGE) * KV_HEADS + kv_head
            k = _stored_rows(k_data, k_scale, stripe, known, BLOCK, DIM, PADDED, K_OPERAND, PTX)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
            distance = position[:, None] - key[None, :]
            visible = known[None, :] & real[:, None]
            if CAUSAL:
                visible = visible & (distance >= 0)
            if WINDOWED:
                visible = visible & (tl.abs(distance) < window)
            scores = tl.where(visible, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - finite[:, None])
            shrink = tl.exp2(peak - finite)
            peak = new_peak
            total = tl.fma(total, shrink, tl.sum(weights, 1))  # left to the compiler it could fall differently per variant
            v = _stored_rows(v_data, v_scale, stripe, known, BLOCK, DIM, PADDED, V_OPERAND, PTX)
            values = tl.dot(weights.to(V_OPERAND), v, values * shrink[:, None], input_precision=PRECISION)

        if HALVES:
            values = (values * _shrinking(total)[:, None]).to(tl.float16)
        if WHOLE:
            if HALVES:
                values = values.to(tl.float32) * _growing(total)[:, None]
            values += 0.0  # as a sum over pieces has it: no zero below zero
            tl.store(parts + place[:, None] * DIM + channel[None, :], values / total[:, None], mask=stored)
        else:
            part = place * pieces + (piece - first_piece)
            tl.store(parts + part[:, None] * DIM + channel[None, :], values, mask=stored)
            tl.store(peaks + part, peak, mask=real)
            tl.store(totals + part, total, mask=real)


@triton.jit(do_not_specialize=_VARYING + _GATE_STRIDES, do_not_specialize_on_alignment=_FACTS)
def _add_pieces(
    parts,
    peaks,
    totals,
    out,
    gate,
    factors,
    row_span,
    starts,
    lengths,
    bases,
    pieces,
    window,
    gate_row,
    gate_head,
    scale,
    undone,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    PTX: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one row and head. Their pieces are added up in blocks that begin at fixed ones, against the largest
    score of all; one thread has all pieces of its channels, or two have, so that hardly anything waits for anything but its
    loads. With a gate the result is multiplied by its sigmoid and by ``scale``, which ``undone`` undoes. Strides of the gate
    are those of groups of four elements, which tells the compiler that there are such groups."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.load(row_span + row)
    base = tl.load(bases + span).to(tl.int32)
    length = tl.load(lengths + span).to(tl.int32)
    within = (row - tl.load(starts + span)).to(tl.int32)
    await_turn(PDL)
    if within >= length:
        return
    first_row = within // TILE_ROWS * TILE_ROWS
    tile_key, last_key = _keys_of_tile(base, first_row, length, window, TILE_ROWS, CAUSAL, WINDOWED)
    position = base + within
    first_key = tile_key
    if WINDOWED:
        first_key = tl.maximum(position - window + 1, 0)
        last_key = tl.minimum(last_key, position + window - 1)
    if CAUSAL:
        last_key = tl.minimum(last_key, position)
    first, last = _piece_of(first_key), _piece_of(last_key)
    head = tl.program_id(1)
    place = (row * HEADS + head) * pieces - _piece_of(tile_key)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    if gate is not None:
        z = tl.load(gate + row * (gate_row * 4) + head * (gate_head * 4) + channel, mask=channel < DIM, other=0.0)

    begin = first // _FIRST_PIECES * _FIRST_PIECES
    rest = begin + _FIRST_PIECES
    piece = begin + tl.arange(0, _FIRST_PIECES)
    mine = (piece >= first) & (piece <= last)
    part = _part_of(parts, place + piece, mine, channel, DIM)  # asked for before the peaks have come
    part_peak = tl.load(peaks + place + piece, mask=mine, other=float("-inf"))
    part_total = tl.load(totals + place + piece, mask=mine, other=0.0)
    peak = tl.max(part_peak, 0)
    for block in range(rest, last + 1, _PEAKS):
        other = block + tl.arange(0, _PEAKS)
        peak = tl.maximum(peak, tl.max(tl.load(peaks + place + other, mask=other <= last, other=float("-inf")), 0))
    values, total = _weighted(part, part_peak, part_total, peak)
    for block in range(rest, last + 1, _MORE_PIECES):
        others = block + tl.arange(0, _MORE_PIECES)
        known = others <= last
        more = _part_of(parts, place + others, known, channel, DIM)
        more_peak = tl.load(peaks + place + others, mask=known, other=float("-inf"))
        more_total = tl.load(totals + place + others, mask=known, other=0.0)
        more_values, weight = _weighted(more, more_peak, more_total, peak)
        values += more_values
        total += weight
    values = values / total
    if gate is not None:
        values = values * sigmoid_of(z, PTX) * scale
        tl.store(factors + row, undone, mask=head == 0)
    tl.store(out + (row * HEADS + head) * DIM + channel, values.to(out.dtype.element_ty), mask=channel < DIM)


@triton.jit
def _part_of(parts, place, known, channel, DIM: tl.constexpr):
    """[pieces, channels], zeros where not known."""
    address = parts + place[:, None] * DIM + channel[None, :]
    return tl.load(address, mask=known[:, None] & (channel < DIM)[None, :], other=0.0)


@triton.jit
def _weighted(part, part_peak, part_total, peak):
    """(values [channels], total) of pieces [pieces, channels] and [pieces], against the largest score ``peak``."""
    weight = tl.exp2(part_peak - peak)
    total = tl.sum(weight * part_total, 0)
    if part.dtype == tl.float16:
        weight = weight * _growing(part_total)
    return tl.sum(weight[:, None] * part.to(tl.float32), 0), total


@triton.jit
def _shrinking(total):
    """A power of two with which a sum of values whose weights add up to ``total`` is no larger than they are: half of what
    would do if weights were not rounded, and their total with them."""
    return (252 - (total.to(tl.uint32, bitcast=True) >> 23) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _growing(total):
    """What undoes it."""
    return ((total.to(tl.uint32, bitcast=True) >> 23) + 2 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _piece_of(key):
    middle = _MIDDLE_FIRST + (key - _MIDDLE_BEGIN) // _MIDDLE
    far = _FAR_FIRST + (key - _FAR_BEGIN) // _FAR
    return tl.where(key < _MIDDLE_BEGIN, key // _NEAR, tl.where(key < _FAR_BEGIN, middle, far))


@triton.jit
def _begin_of(piece):
    """The position of a piece's first key."""
    middle = _MIDDLE_BEGIN + (piece - _MIDDLE_FIRST) * _MIDDLE
    far = _FAR_BEGIN + (piece - _FAR_FIRST) * _FAR
    return tl.where(piece < _MIDDLE_FIRST, piece * _NEAR, tl.where(piece < _FAR_FIRST, middle, far))


@triton.jit
def _keys_of_tile(base, first_row, length, window, TILE_ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """(first, last) position that some row of the tile sees."""
    first_key = base * 0
    last_key = base + length - 1
    if CAUSAL:
        last_key = tl.minimum(last_key, base + first_row + TILE_ROWS - 1)
    if WINDOWED:
        first_key = tl.maximum(base + first_row - window + 1, 0)
    return first_key, last_key


@triton.jit
def _stored_rows(
    data,
    scale,
    stripe,
    known,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    OPERAND: tl.constexpr,
    PTX: tl.constexpr,
):
    """Keys or values [BLOCK, PADDED] of stripes [BLOCK] (slot times heads plus head), zeros where not known."""
    if scale is None:
        channel = tl.arange(0, PADDED)
        address = data + stripe[:, None] * DIM + channel[None, :]
        rows = tl.load(address, mask=known[:, None] & (channel < DIM)[None, :], other=0.0).to(OPERAND)
    else:
        channel, group = tl.arange(0, PADDED), tl.arange(0, PADDED // _GROUP)
        address = data + stripe[:, None] * DIM + channel[None, :]
        levels = tl.load(address, mask=known[:, None] & (channel < DIM)[None, :], other=0)
        address = scale + stripe[:, None] * (DIM // _GROUP) + group[None, :]
        steps = tl.load(address, mask=known[:, None] & (group < DIM // _GROUP)[None, :], other=0.0)
        groups = tl.reshape(_as_float16(levels, PTX), (BLOCK, PADDED // _GROUP, _GROUP))
        rows = tl.reshape(groups * steps[:, :, None], (BLOCK, PADDED))
    return rows


@triton.jit
def _as_float16(levels, PTX: tl.constexpr):
    """int8 to float16. The conversion instruction would bound the kernel. Instead level + 128 becomes the low byte of
    1024.0, four at a time, and 1152 is taken off, which is exact."""
    if not PTX:
        return levels.to(tl.float16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 biased, offset;
        xor.b32 biased, $2, 0x80808080;
        mov.b32 offset, 0x64806480;
        prmt.b32 $0, biased, 0x64646464, 0x4140;
        prmt.b32 $1, biased, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, offset;
        sub.f16x2 $1, $1, offset;
        }""",
        "=&r,=&r,r",
        [levels],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=["slots"])
def _prepare(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    out,
    k_data,
    k_scale,
    v_data,
    v_scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    angle_row,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: those of q come first, then those of k, then those of v. Strides are those of groups of four
    elements, which tells the compiler that there are such groups."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    inside, turned = at < DIM, at < 2 * HALF
    weight = tl.where(head < HEADS, q_weight, k_weight)
    own_weight, other_weight = (
        tl.load(weight + at, mask=inside, other=0.0),
        tl.load(weight + partner, mask=turned, other=0.0),
    )
    await_turn(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    if head < HEADS + KV_HEADS:
        x = k + row * (k_row * 4) + (head - HEADS) * (k_head * 4)
        if head < HEADS:
            x = q + row * (q_row * 4) + head * (q_head * 4)
        angle = row * (angle_row * 4) + at % HALF
        value = tl.load(x + at, mask=inside, other=0.0)
        other = tl.load(x + partner, mask=turned, other=0.0)  # read again, instead of moved between threads
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / DIM + eps)
        other = other * scale * other_weight
        value = value * scale * own_weight * c + tl.where(at < HALF, -other, other) * s
        if head < HEADS:
            tl.store(out + (row * HEADS + head) * DIM + at, value, mask=inside)
        else:
            store_groups(k_data, k_scale, slot * (KV_HEADS * DIM) + (head - HEADS) * DIM, value, DIM, PADDED)
    else:
        head = head - HEADS - KV_HEADS
        value = tl.load(v + row * (v_row * 4) + head * (v_head * 4) + at, mask=inside, other=0.0)
        store_groups(v_data, v_scale, slot * (KV_HEADS * DIM) + head * DIM, value, DIM, PADDED)
