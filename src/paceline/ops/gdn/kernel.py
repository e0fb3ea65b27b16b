"""The gated delta rule in Triton; the mathematics is in ``ref.py``.

Verify and replay hold a tile [Dk, columns] of one head's state in registers and walk the rows of one span. Both compile
``_advance``, whose two roundings are spelt out; with contraction off elsewhere too, a state has the same bits however its
rows were cut into spans, and a row's outputs are those of a span of its own. Prefill is three kernels: the triangular
systems and scores of all chunks, their inverses, and a walk over the chunks of each span.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import CHUNK_SIZE

_VERIFY_COLUMNS, _VERIFY_WARPS = 16, 1
"""With one warp a sum over Dk never waits for another warp."""
_REPLAY_COLUMNS, _REPLAY_WARPS = 32, 4
_WALK_COLUMNS, _WALK_WARPS = 32, 4
_PRECISION = "tf32x3"
_CHUNK = tl.constexpr(CHUNK_SIZE)
_LEAF = tl.constexpr(16)


# -- generated rows --------------------------------------------------------------------------------------------------------


def gdn_verify(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, head_map: Tensor, batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    q, k, v, state = _packed_heads(q), _packed_heads(k), _packed_heads(v), _aligned(state)
    out, delta = (torch.empty(v.shape, dtype=torch.float32, device=v.device) for _ in range(2))
    heads, dk, dv = state.shape[1:]
    _verify[triton.cdiv(dv, _VERIFY_COLUMNS), heads, batch.num_spans](
        q,
        k,
        v,
        beta.contiguous(),
        g.contiguous(),
        state,
        out,
        delta,
        head_map,
        batch.lanes,
        batch.starts,
        batch.span_lengths,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        BLOCK_DK=triton.next_power_of_2(dk),
        COLUMNS=_VERIFY_COLUMNS,
        num_warps=_VERIFY_WARPS,
        enable_fp_fusion=False,
    )
    return out, delta


_ANY_ALIGNMENT = ["q", "k", "v", "beta", "g", "out", "delta", "head_map", "lanes", "starts", "lengths"]
"""Where these lie must not choose the code: another layout of the state's tile is another order of summation."""


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _verify(
    q,
    k,
    v,
    beta,
    g,
    state,
    out,
    delta,
    head_map,
    lanes,
    starts,
    lengths,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head, span = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(starts + span), tl.load(lengths + span)
    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = at_k < DK, at_v < DV
    tile = state + (tl.load(lanes + span) * HEADS + head) * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    s = tl.load(tile, mask=in_k[:, None] & in_v[None, :], other=0.0)
    of_key = tl.load(head_map + head) * DK + at_k
    of_value = head * DV + at_v
    q_row = tl.load(q + start * q_stride + of_key, mask=in_k, other=0.0)
    k_row = tl.load(k + start * k_stride + of_key, mask=in_k, other=0.0)
    v_row = tl.load(v + start * v_stride + of_value, mask=in_v, other=0.0)
    strength, decay = tl.load(beta + start * HEADS + head), _decay(tl.load(g + start * HEADS + head))
    for step in range(length):
        # the next row is fetched while this one is computed; the last fetches itself again
        row = start + step
        ahead = start + tl.minimum(step + 1, length - 1)
        q_ahead = tl.load(q + ahead * q_stride + of_key, mask=in_k, other=0.0)
        k_ahead = tl.load(k + ahead * k_stride + of_key, mask=in_k, other=0.0)
        v_ahead = tl.load(v + ahead * v_stride + of_value, mask=in_v, other=0.0)
        strength_ahead, g_ahead = tl.load(beta + ahead * HEADS + head), tl.load(g + ahead * HEADS + head)

        read_k = tl.sum(k_row[:, None] * s, axis=0)
        read_q = tl.sum(q_row[:, None] * s, axis=0)
        d = strength * (v_row - decay * read_k)
        o = decay * read_q + tl.sum(k_row * q_row, axis=0) * d
        tl.store(delta + row * (HEADS * DV) + of_value, d, mask=in_v)
        tl.store(out + row * (HEADS * DV) + of_value, o, mask=in_v)
        s = _advance(s, k_row, d, decay)
        q_row, k_row, v_row, strength, decay = q_ahead, k_ahead, v_ahead, strength_ahead, _decay(g_ahead)


@triton.jit
def _decay(g):
    return tl.exp(g)


@triton.jit
def _advance(s, k, d, decay):
    """S <- e^g S, rounded, then one fused + k dᵀ: asked for by name, so that no compiler may choose."""
    return tl.fma(k[:, None], d[None, :], decay * s)


def gdn_replay(state: Tensor, k: Tensor, d: Tensor, g: Tensor, keep: Tensor, head_map: Tensor, batch: PackedBatch) -> None:
    """One launch, which either starts or not."""
    layers, lanes, heads, dk, dv = state.shape
    assert state.is_contiguous(), "a state that is changed in place must be contiguous"
    columns = triton.cdiv(dv, _REPLAY_COLUMNS)
    _replay[columns * heads, batch.num_spans, layers](
        state,
        k.contiguous(),
        d.contiguous(),
        g.contiguous(),
        keep,
        head_map,
        batch.lanes,
        batch.starts,
        k.shape[1],
        lanes,
        HEADS=heads,
        KEY_HEADS=k.shape[2],
        DK=dk,
        DV=dv,
        BLOCK_DK=triton.next_power_of_2(dk),
        COLUMNS=_REPLAY_COLUMNS,
        num_warps=_REPLAY_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows", "lane_count"])
def _replay(
    state,
    k,
    d,
    g,
    keep,
    head_map,
    lanes,
    starts,
    rows,
    lane_count,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    head, span, layer = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2).to(tl.int64)
    kept = tl.load(keep + span)
    if kept == 0:
        return
    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = at_k < DK, at_v < DV
    in_tile = in_k[:, None] & in_v[None, :]
    lane = layer * lane_count + tl.load(lanes + span)
    tile = state + (lane * HEADS + head) * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    s = tl.load(tile, mask=in_tile, other=0.0)
    first = layer * rows + tl.load(starts + span)
    key_head = tl.load(head_map + head)
    for row in range(first, first + kept):
        k_row = tl.load(k + (row * KEY_HEADS + key_head) * DK + at_k, mask=in_k, other=0.0)
        d_row = tl.load(d + (row * HEADS + head) * DV + at_v, mask=in_v, other=0.0)
        s = _advance(s, k_row, d_row, _decay(tl.load(g + row * HEADS + head)))
    tl.store(tile, s, mask=in_tile)


# -- prompt rows -----------------------------------------------------------------------------------------------------------


def gdn_prefill(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, head_map: Tensor, batch: PackedBatch
) -> tuple[Tensor, Tensor]:
    q, k, v, state = _packed_heads(q), _packed_heads(k), _packed_heads(v), state.contiguous()
    beta, g = beta.contiguous(), g.contiguous()
    first_rows, sizes, first_chunks = _plan(batch, q.device)
    heads, dk, dv = state.shape[1:]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    after = torch.empty(batch.num_spans, heads, dk, dv, dtype=torch.float32, device=v.device)
    inverse, scores = out.new_empty(2, len(sizes), heads, CHUNK_SIZE, CHUNK_SIZE)
    total = out.new_empty(len(sizes), heads, CHUNK_SIZE)
    part = max(16, triton.next_power_of_2(triton.cdiv(dk, 2)))
    strides = {"Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0)}
    # the interpreter knows no other
    precision = _PRECISION if q.is_cuda else "ieee"
    _prepare[len(sizes), heads](
        q,
        k,
        beta,
        g,
        inverse,
        scores,
        total,
        head_map,
        first_rows,
        sizes,
        HEADS=heads,
        DK=dk,
        BLOCK=min(32, part),
        PRECISION=precision,
        **strides,
        num_warps=4,
        num_stages=1,
    )
    _invert[len(sizes), heads](inverse, HEADS=heads, num_warps=1)
    _walk[triton.cdiv(dv, _WALK_COLUMNS), heads, batch.num_spans](
        q,
        k,
        v,
        beta,
        inverse,
        scores,
        total,
        state,
        out,
        after,
        head_map,
        batch.lanes,
        batch.starts,
        batch.span_lengths,
        first_chunks,
        V_STRIDE=v.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        PART=part,
        COLUMNS=_WALK_COLUMNS,
        PRECISION=precision,
        **strides,
        num_warps=_WALK_WARPS,
        num_stages=1,
    )
    return out, after


def _plan(batch: PackedBatch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First row and number of rows of each chunk, and each span's first chunk."""
    if "gdn kernel" not in batch.plans:
        first_rows, sizes, first_chunks = [], [], []
        for offset, length in zip(batch.offsets, batch.lengths, strict=True):
            first_chunks.append(len(sizes))
            for start in range(0, length, CHUNK_SIZE):
                first_rows.append(offset + start)
                sizes.append(min(CHUNK_SIZE, length - start))
        plan = tuple(torch.tensor(facts, device=device) for facts in (first_rows, sizes, first_chunks))
        batch.plans["gdn kernel"] = plan
    return batch.plans["gdn kernel"]


@triton.jit
def _prepare(
    q,
    k,
    beta,
    g,
    matrix,
    scores,
    total,
    head_map,
    first_rows,
    sizes,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and head: sums of g, the strictly lower triangle of beta KKᵀ e^(Gi - Gj), and QKᵀ e^(Gi - Gj)."""
    head, chunk = tl.program_id(1), tl.program_id(0).to(tl.int64)
    at = tl.arange(0, _CHUNK)
    live = at < tl.load(sizes + chunk)
    rows = tl.load(first_rows + chunk) + at
    sums = tl.cumsum(tl.load(g + rows * HEADS + head, mask=live, other=0.0), axis=0)
    strength = tl.load(beta + rows * HEADS + head, mask=live, other=0.0)
    key_head = tl.load(head_map + head)
    overlap_kk = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    overlap_qk = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    for first in range(0, DK, BLOCK):
        k_part = _part(k, rows, live, K_STRIDE, key_head, first, DK, BLOCK)
        q_part = _part(q, rows, live, Q_STRIDE, key_head, first, DK, BLOCK)
        overlap_kk = tl.dot(k_part, tl.trans(k_part), overlap_kk, input_precision=PRECISION)
        overlap_qk = tl.dot(q_part, tl.trans(k_part), overlap_qk, input_precision=PRECISION)
    difference = sums[:, None] - sums[None, :]
    ratio = tl.exp(tl.where(at[:, None] >= at[None, :], difference, float("-inf")))
    below = tl.where(at[:, None] > at[None, :], strength[:, None] * overlap_kk * ratio, 0.0)
    place = chunk * HEADS + head
    square = place * (_CHUNK * _CHUNK) + at[:, None] * _CHUNK + at[None, :]
    tl.store(matrix + square, below)
    tl.store(scores + square, overlap_qk * ratio)
    tl.store(total + place * _CHUNK + at, sums)


@triton.jit
def _invert(matrix, HEADS: tl.constexpr):
    """A <- (I + A)⁻¹ in place: the diagonal blocks of 16, then each block below them from those to its right and above."""
    a = matrix + (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * (_CHUNK * _CHUNK)
    t00, t11 = _leaf(a, 0), _leaf(a, 1)
    t10 = -_mm(t11, _mm(_load(a, 1, 0), t00))
    t22 = _leaf(a, 2)
    t21 = -_mm(t22, _mm(_load(a, 2, 1), t11))
    t20 = -_mm(t22, _mm(_load(a, 2, 0), t00) + _mm(_load(a, 2, 1), t10))
    t33 = _leaf(a, 3)
    a30, a31, a32 = _load(a, 3, 0), _load(a, 3, 1), _load(a, 3, 2)
    t32 = -_mm(t33, _mm(a32, t22))
    t31 = -_mm(t33, _mm(a31, t11) + _mm(a32, t21))
    t30 = -_mm(t33, _mm(a30, t00) + _mm(a31, t10) + _mm(a32, t20))
    _store(a, 0, 0, t00)
    _store(a, 1, 0, t10)
    _store(a, 1, 1, t11)
    _store(a, 2, 0, t20)
    _store(a, 2, 1, t21)
    _store(a, 2, 2, t22)
    _store(a, 3, 0, t30)
    _store(a, 3, 1, t31)
    _store(a, 3, 2, t32)
    _store(a, 3, 3, t33)


@triton.jit
def _leaf(a, index: tl.constexpr):
    """The inverse of a diagonal block, row by row."""
    at = tl.arange(0, _LEAF)
    across, down = at[None, :], at[:, None]
    first = index * _LEAF
    transposed = tl.load(a + (first + across) * _CHUNK + first + down)
    inverse = tl.where(across == down, 1.0, 0.0)
    for row in range(1, _LEAF):
        weights = tl.sum(tl.where(across == row, transposed, 0.0), axis=1)
        done = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where(down == row, inverse - done[None, :], inverse)
    return inverse


@triton.jit
def _block(a, row: tl.constexpr, column: tl.constexpr):
    at = tl.arange(0, _LEAF)
    return a + (row * _LEAF + at[:, None]) * _CHUNK + column * _LEAF + at[None, :]


@triton.jit
def _load(a, row: tl.constexpr, column: tl.constexpr):
    return tl.load(_block(a, row, column))


@triton.jit
def _store(a, row: tl.constexpr, column: tl.constexpr, value):
    tl.store(_block(a, row, column), value)


@triton.jit
def _mm(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _walk(
    q,
    k,
    v,
    beta,
    inverse,
    scores,
    total,
    state,
    out,
    after,
    head_map,
    lanes,
    starts,
    lengths,
    first_chunks,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of a head's state through the chunks of one span: with T the inverse and S the state before a chunk,
    value = T beta (V - e^G K S), o = e^G Q S + scores value, S <- e^Glast S + (e^(Glast - G) K)ᵀ value."""
    head, span = tl.program_id(1), tl.program_id(2)
    at, at_k = tl.arange(0, _CHUNK), tl.arange(0, PART)
    at_v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_v = at_v < DV
    tile = head * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    before = state + tl.load(lanes + span) * (HEADS * DK * DV) + tile
    s = tl.load(before, mask=(at_k < DK)[:, None] & in_v[None, :], other=0.0)
    if PART < DK:
        s_more = tl.load(before + PART * DV, mask=(PART + at_k < DK)[:, None] & in_v[None, :], other=0.0)
    key_head = tl.load(head_map + head)
    of_value = head * DV + at_v
    start, length, chunk = tl.load(starts + span), tl.load(lengths + span), tl.load(first_chunks + span)
    for first in range(0, length, _CHUNK):
        live = first + at < length
        rows = start + first + at
        in_values = live[:, None] & in_v[None, :]
        place = chunk * HEADS + head
        square = place * (_CHUNK * _CHUNK) + at[:, None] * _CHUNK + at[None, :]
        sums = tl.load(total + place * _CHUNK + at)
        last = tl.load(total + place * _CHUNK + _CHUNK - 1)
        growth = tl.exp(sums)

        read = tl.dot(_part(k, rows, live, K_STRIDE, key_head, 0, DK, PART), s, input_precision=PRECISION)
        if PART < DK:
            read = tl.dot(_part(k, rows, live, K_STRIDE, key_head, PART, DK, PART), s_more, read, input_precision=PRECISION)
        values = tl.load(v + rows[:, None] * V_STRIDE + of_value[None, :], mask=in_values, other=0.0)
        strength = tl.load(beta + rows * HEADS + head, mask=live, other=0.0)
        error = strength[:, None] * (values - growth[:, None] * read)
        value = tl.dot(tl.load(inverse + square), error, input_precision=PRECISION)

        o = tl.dot(_part(q, rows, live, Q_STRIDE, key_head, 0, DK, PART), s, input_precision=PRECISION)
        if PART < DK:
            o = tl.dot(_part(q, rows, live, Q_STRIDE, key_head, PART, DK, PART), s_more, o, input_precision=PRECISION)
        o = tl.dot(tl.load(scores + square), value, growth[:, None] * o, input_precision=PRECISION)
        tl.store(out + rows[:, None] * (HEADS * DV) + of_value[None, :], o, mask=in_values)

        faded, decay = tl.exp(last - sums)[:, None] * value, tl.exp(last)
        keys = tl.trans(_part(k, rows, live, K_STRIDE, key_head, 0, DK, PART))
        s = tl.dot(keys, faded, decay * s, input_precision=PRECISION)
        if PART < DK:
            keys = tl.trans(_part(k, rows, live, K_STRIDE, key_head, PART, DK, PART))
            s_more = tl.dot(keys, faded, decay * s_more, input_precision=PRECISION)
        chunk += 1
    behind = after + span.to(tl.int64) * (HEADS * DK * DV) + tile
    tl.store(behind, s, mask=(at_k < DK)[:, None] & in_v[None, :])
    if PART < DK:
        tl.store(behind + PART * DV, s_more, mask=(PART + at_k < DK)[:, None] & in_v[None, :])


@triton.jit
def _part(x, rows, live, STRIDE: tl.constexpr, head, first, DK: tl.constexpr, PART: tl.constexpr):
    """[rows, PART] of a head's q or k from channel ``first``."""
    at = first + tl.arange(0, PART)
    inside = live[:, None] & (at < DK)[None, :]
    return tl.load(x + rows[:, None] * STRIDE + head * DK + at[None, :], mask=inside, other=0.0)


# -- layouts ---------------------------------------------------------------------------------------------------------------


def _packed_heads(x: Tensor) -> Tensor:
    """[N, heads, D] with any stride between rows, as a slice of a wider tensor has."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _aligned(state: Tensor) -> Tensor:
    """Contiguous at a multiple of 16 bytes, as every layer of a pool is."""
    state = state.contiguous()
    return state if state.data_ptr() % 16 == 0 else state.clone()
