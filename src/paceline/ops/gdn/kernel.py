"""The gated delta rule in Triton; the mathematics is in ``ref.py``.

Verify and replay hold a tile [Dk, columns] of one head's state in registers and walk the rows of one span. What they do to
a state is two roundings that are spelt out; with contraction off elsewhere too, a state has the same bits however its rows
were cut into spans, and a row's outputs are those of a span of its own. Prefill is three kernels: the triangular systems and
scores of all chunks, their inverses, and a walk over the chunks of each span.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import CHUNK_SIZE
from paceline.ops.conv.kernel import raw_input
from paceline.ops.gdn.ref import CHUNK_PLAN, GdnInputs, ReplayLog, chunk_facts
from paceline.ops.launch import await_turn, pdl
from paceline.transfer import to_device

_VERIFY_COLUMNS, _VERIFY_WARPS = 16, 1
"""With one warp a sum over Dk never waits for another warp."""
_REPLAY_COLUMNS, _REPLAY_WARPS = 32, 4
_WALK_COLUMNS, _WALK_WARPS = 32, 4
_PRECISION = "tf32x3"
_CHUNK = tl.constexpr(CHUNK_SIZE)
_LEAF = tl.constexpr(16)
_FACTS = ["lanes", "row_span", "starts", "lengths"]
"""Where these lie depends on the number of rows, for which nothing should be compiled anew."""


# -- what both kinds of rows read ------------------------------------------------------------------------------------------

_TILE_CHANNELS = 1024


def gdn_inputs(
    raw: Tensor,
    b: Tensor,
    a: Tensor,
    history: Tensor,
    weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
    batch: PackedBatch,
    log: ReplayLog | None = None,
) -> GdnInputs:
    """One launch: a row's key heads, its other channels, and its gates, by some programs each."""
    raw, b, a = (x if x.stride(1) == 1 else x.contiguous() for x in (raw, b, a))
    (rows, channels), heads = raw.shape, b.shape[1]
    of_values = channels - 2 * key_heads * key_dim
    new = {"dtype": torch.float32, "device": raw.device}
    q, v = torch.empty(rows, key_heads, key_dim, **new), torch.empty(rows, heads, of_values // heads, **new)
    beta, k, g = torch.empty(rows, heads, **new), torch.empty_like(q), torch.empty(rows, heads, **new)
    if log is not None:
        assert log.raw.is_contiguous() and log.k.is_contiguous() and log.g.is_contiguous(), "a log must be contiguous"
        k, g = log.k[:rows], log.g[:rows]
    block = triton.next_power_of_2(key_dim)
    group = max(1, _TILE_CHANNELS // block)
    key_parts, value_parts = triton.cdiv(key_heads, group), triton.cdiv(of_values, group * block)
    if rows:
        _inputs[rows, 2 * key_parts + value_parts + 1](
            raw,
            b,
            a,
            history.contiguous(),
            weight,
            decay,
            dt_bias,
            q,
            k,
            v,
            beta,
            g,
            log.raw if log is not None else None,
            batch.lanes,
            batch.row_span,
            batch.starts,
            raw.stride(0),
            b.stride(0),
            a.stride(0),
            *weight.stride(),
            key_dim**-0.5,
            HEADS=heads,
            KEY_HEADS=key_heads,
            DK=key_dim,
            VALUES=of_values,
            TAPS=weight.shape[1],
            GROUP=group,
            BLOCK_DK=block,
            KEY_PARTS=key_parts,
            VALUE_PARTS=value_parts,
            BLOCK_HEADS=triton.next_power_of_2(heads),
            num_warps=4,
            enable_fp_fusion=False,
            **pdl(raw.device),
        )
    return GdnInputs(q, k, v, beta, g)


@triton.jit(
    do_not_specialize=["raw_stride", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["raw", "b", "a", "history", "weight", "q", "k", "v", "g", "log_raw", *_FACTS],
)
def _inputs(
    raw,
    b,
    a,
    history,
    weight,
    decay,
    dt_bias,
    q,
    k,
    v,
    beta,
    g,
    log_raw,
    lanes,
    row_span,
    starts,
    raw_stride,
    b_stride,
    a_stride,
    channel_stride,
    tap_stride,
    query_scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    VALUES: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 2 * KEY_PARTS + VALUE_PARTS:
        _gates(b + row * b_stride, a + row * a_stride, decay, dt_bias, beta, g, row, HEADS, BLOCK_HEADS)
        return
    keys: tl.constexpr = KEY_HEADS * DK
    channels: tl.constexpr = 2 * keys + VALUES
    span = tl.load(row_span + row)
    lane, before = tl.load(lanes + span), row - tl.load(starts + span)
    index = tl.arange(0, GROUP * BLOCK_DK)
    if part < 2 * KEY_PARTS:
        head, dim = part % KEY_PARTS * GROUP + index // BLOCK_DK, index % BLOCK_DK
        at, inside = head * DK + dim, (head < KEY_HEADS) & (dim < DK)
        channel = part // KEY_PARTS * keys + at
    else:
        at = (part - 2 * KEY_PARTS) * (GROUP * BLOCK_DK) + index
        inside = at < VALUES
        channel = 2 * keys + at
    mixed = tl.zeros((GROUP * BLOCK_DK,), tl.float32)
    for tap in tl.static_range(TAPS):
        value = raw_input(raw, raw_stride, history, lane, row, before, tap, channel, inside, channels, TAPS - 1)
        kernel = tl.load(weight + channel * channel_stride + tap * tap_stride, mask=inside, other=0.0)
        mixed = tl.fma(value, kernel, mixed)
    if log_raw is not None:
        tl.store(log_raw + row * channels + channel, value, mask=inside)
    mixed = mixed / (1.0 + tl.exp(-mixed))
    if part < 2 * KEY_PARTS:
        heads = tl.reshape(mixed, (GROUP, BLOCK_DK))
        heads = heads * (1.0 / tl.sqrt_rn(tl.sum(heads * heads, axis=1) + 1e-6))[:, None]
        normed = tl.reshape(heads, (GROUP * BLOCK_DK,))
        if part < KEY_PARTS:
            tl.store(q + row * keys + at, normed * query_scale, mask=inside)
        else:
            tl.store(k + row * keys + at, normed, mask=inside)
    else:
        tl.store(v + row * VALUES + at, mixed, mask=inside)


@triton.jit
def _gates(b, a, decay, dt_bias, beta, g, row, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    strength = tl.load(b + head, mask=inside, other=0.0)
    tl.store(beta + row * HEADS + head, 1.0 / (1.0 + tl.exp(-strength)), mask=inside)
    x = _softplus(tl.load(a + head, mask=inside, other=0.0) + tl.load(dt_bias + head, mask=inside, other=0.0))
    tl.store(g + row * HEADS + head, tl.load(decay + head, mask=inside, other=0.0) * x, mask=inside)


@triton.jit
def _softplus(x):
    grown = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + grown
    # log1p from a logarithm: the rounding of u cancels in the quotient (Kahan)
    return tl.where(x > 20.0, x, tl.where(u == 1.0, grown, tl.log(u) * (grown / (u - 1.0))))


# -- generated rows --------------------------------------------------------------------------------------------------------


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    head_map: Tensor,
    batch: PackedBatch,
    log: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, state = _packed_heads(q), _packed_heads(k), _packed_heads(v), _aligned(state)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    delta = torch.empty_like(out) if log is None else log[: len(v)]
    assert delta.is_contiguous(), "a log must be contiguous"
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
        QUARTER=max(1, triton.next_power_of_2(dk) // 4),
        COLUMNS=_VERIFY_COLUMNS,
        num_warps=_VERIFY_WARPS,
        enable_fp_fusion=False,
        **pdl(q.device),
    )
    return out, delta


_ANY_ALIGNMENT = ["q", "k", "v", "beta", "g", "out", "delta", "head_map", *_FACTS]
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
    QUARTER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    head, span = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(starts + span), tl.load(lengths + span)
    if length == 0:
        return
    at_k = tl.arange(0, QUARTER)
    at_v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_v = at_v < DV
    tile = state + (tl.load(lanes + span) * HEADS + head) * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    s0 = tl.load(tile, mask=(at_k < DK)[:, None] & in_v[None, :], other=0.0)
    s1 = tl.load(tile + QUARTER * DV, mask=(QUARTER + at_k < DK)[:, None] & in_v[None, :], other=0.0)
    s2 = tl.load(tile + 2 * QUARTER * DV, mask=(2 * QUARTER + at_k < DK)[:, None] & in_v[None, :], other=0.0)
    s3 = tl.load(tile + 3 * QUARTER * DV, mask=(3 * QUARTER + at_k < DK)[:, None] & in_v[None, :], other=0.0)
    key = tl.load(head_map + head) * DK
    of_value = head * DV + at_v
    q += start * q_stride + key
    k += start * k_stride + key
    v += start * v_stride + of_value
    beta += start * HEADS + head
    g += start * HEADS + head
    out += start * (HEADS * DV) + of_value
    delta += start * (HEADS * DV) + of_value
    q_row, k_row, v_row = _quarters(q, at_k, DK, QUARTER), _quarters(k, at_k, DK, QUARTER), tl.load(v, mask=in_v, other=0.0)
    strength, decay = tl.load(beta), _decay(tl.load(g))
    for step in tl.range(length, loop_unroll_factor=2):
        # the next row is fetched while this one is computed; the last fetches itself again
        more = (step + 1 < length).to(tl.int64)
        q += more * q_stride
        k += more * k_stride
        v += more * v_stride
        beta += more * HEADS
        g += more * HEADS
        q_ahead, k_ahead = _quarters(q, at_k, DK, QUARTER), _quarters(k, at_k, DK, QUARTER)
        v_ahead, strength_ahead, g_ahead = tl.load(v, mask=in_v, other=0.0), tl.load(beta), tl.load(g)

        s0, s1, s2, s3 = decay * s0, decay * s1, decay * s2, decay * s3
        d = strength * (v_row - _contract(k_row, s0, s1, s2, s3))
        o = _contract(q_row, s0, s1, s2, s3) + _overlap(k_row, q_row) * d
        tl.store(delta + step * (HEADS * DV), d, mask=in_v)
        tl.store(out + step * (HEADS * DV), o, mask=in_v)
        s0, s1 = _add_product(s0, k_row[0], d), _add_product(s1, k_row[1], d)
        s2, s3 = _add_product(s2, k_row[2], d), _add_product(s3, k_row[3], d)
        q_row, k_row, v_row, strength, decay = q_ahead, k_ahead, v_ahead, strength_ahead, _decay(g_ahead)


@triton.jit
def _quarters(x, at, DK: tl.constexpr, QUARTER: tl.constexpr):
    """A vector over Dk in four parts."""
    return (
        tl.load(x + at, mask=at < DK, other=0.0),
        tl.load(x + QUARTER + at, mask=QUARTER + at < DK, other=0.0),
        tl.load(x + 2 * QUARTER + at, mask=2 * QUARTER + at < DK, other=0.0),
        tl.load(x + 3 * QUARTER + at, mask=3 * QUARTER + at < DK, other=0.0),
    )


@triton.jit
def _contract(x, s0, s1, s2, s3):
    """Sᵀx: the quarters are added by fused operations that are asked for by name, so that no compiler may choose."""
    total = tl.fma(x[1][:, None], s1, x[0][:, None] * s0)
    total = tl.fma(x[2][:, None], s2, total)
    return tl.sum(tl.fma(x[3][:, None], s3, total), axis=0)


@triton.jit
def _overlap(x, y):
    total = tl.fma(x[2], y[2], tl.fma(x[1], y[1], x[0] * y[0]))
    return tl.sum(tl.fma(x[3], y[3], total), axis=0)


@triton.jit
def _decay(g):
    return tl.exp(g)


@triton.jit
def _add_product(s, k, d):
    """S + k dᵀ, fused. A step is e^g S, rounded, and then this."""
    return tl.fma(k[:, None], d[None, :], s)


def gdn_replay(state: Tensor, k: Tensor, d: Tensor, g: Tensor, keep: Tensor, head_map: Tensor, batch: PackedBatch) -> None:
    """One launch, which either starts or not."""
    layers, lanes, heads, dk, dv = state.shape
    assert state.is_contiguous(), "a state that is changed in place must be contiguous"
    columns = triton.cdiv(dv, _REPLAY_COLUMNS)
    log = [x if x[0].is_contiguous() else x.contiguous() for x in (k, d, g)]
    _replay[columns * heads, batch.num_spans, layers](
        state,
        *log,
        keep,
        head_map,
        batch.lanes,
        batch.starts,
        batch.span_lengths,
        *(x.stride(0) for x in log),
        lanes,
        HEADS=heads,
        KEY_HEADS=k.shape[2],
        DK=dk,
        DV=dv,
        BLOCK_DK=triton.next_power_of_2(dk),
        COLUMNS=_REPLAY_COLUMNS,
        num_warps=_REPLAY_WARPS,
        enable_fp_fusion=False,
        **pdl(state.device),
    )


@triton.jit(
    do_not_specialize=["k_stride", "d_stride", "g_stride", "lane_count"], do_not_specialize_on_alignment=["keep", *_FACTS]
)
def _replay(
    state,
    k,
    d,
    g,
    keep,
    head_map,
    lanes,
    starts,
    lengths,
    k_stride,
    d_stride,
    g_stride,
    lane_count,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    tiles: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    head, span, layer = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2).to(tl.int64)
    kept = tl.minimum(tl.load(keep + span), tl.load(lengths + span))
    if kept == 0:
        return
    at_k = tl.arange(0, BLOCK_DK)
    at_v = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = at_k < DK, at_v < DV
    in_tile = in_k[:, None] & in_v[None, :]
    lane = layer * lane_count + tl.load(lanes + span)
    tile = state + (lane * HEADS + head) * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    s = tl.load(tile, mask=in_tile, other=0.0)
    first = tl.load(starts + span)
    key_head = tl.load(head_map + head)
    k += layer * k_stride
    d += layer * d_stride
    g += layer * g_stride
    for row in range(first, first + kept):
        k_row = tl.load(k + (row * KEY_HEADS + key_head) * DK + at_k, mask=in_k, other=0.0)
        d_row = tl.load(d + (row * HEADS + head) * DV + at_v, mask=in_v, other=0.0)
        s = _add_product(_decay(tl.load(g + row * HEADS + head)) * s, k_row, d_row)
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
    if CHUNK_PLAN not in batch.plans:
        facts = to_device(chunk_facts(batch.lengths), device)
        chunks = (facts.shape[0] - len(batch.lengths)) // 2
        batch.plans[CHUNK_PLAN] = facts.split((chunks, chunks, len(batch.lengths)))
    return batch.plans[CHUNK_PLAN]


@triton.jit(do_not_specialize_on_alignment=["first_rows", "sizes"])
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


@triton.jit(do_not_specialize_on_alignment=_FACTS)
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
