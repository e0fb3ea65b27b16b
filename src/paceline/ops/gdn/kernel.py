"""The gated delta rule in Triton; the mathematics is in ``ref.py``. (Generated rows on Hopper GPUs are ``hopper.py``'s.)

Verify and replay hold a tile [Dk, columns] of one head's state in registers and walk the rows of one span. What they do to
a state is two roundings that are spelt out; with contraction off elsewhere too, a state has the same bits however its rows
were cut into spans, and a row's outputs are those of a span of its own. Prefill is two kernels: the scores and inverted
triangular systems of all chunks, and a walk over the chunks of each span.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.batch import PackedBatch
from paceline.config import CHUNK_SIZE
from paceline.ops.conv.kernel import raw_input
from paceline.ops.gdn import hopper
from paceline.ops.gdn.ref import CHUNK_PLAN, GdnInputs, ReplayLog, chunk_facts
from paceline.ops.launch import await_turn, await_turn_alone, has_little_shared_memory, pdl
from paceline.ops.linear.rows import Rows
from paceline.ops.norm import gated_output
from paceline.transfer import to_device

_VERIFY_COLUMNS, _VERIFY_WARPS = 16, 2
"""Columns of each warp, which has all of Dk, so that no sum waits for another warp; those of a program share rows in L1. A
thread needs 94 registers, and up to 96 a multiprocessor has room for 20 warps: all those of six lanes run at once."""
_PAIRS = tl.constexpr(8)
"""Rows of a state are taken in bands of so many pairs, as many as there are threads of a warp along Dk."""
_REPLAY_COLUMNS, _REPLAY_WARPS = 32, 4
_PREPARE_WARPS = 4
_WALK_COLUMNS, _WALK_WARPS, _WALK_STAGES = 64, 4, 2
"""A warp group's product on Hopper has 64 rows. While a chunk is computed, the next one's tiles come."""
_CHUNK = tl.constexpr(CHUNK_SIZE)
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


def gdn_mixer(
    raw: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    history: Tensor,
    weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    state: Tensor,
    head_map: Tensor,
    norm: Tensor,
    eps: float,
    batch: PackedBatch,
    log: ReplayLog,
    operand: torch.dtype | None = None,
    norms: Tensor | None = None,
    bound: float | None = None,
) -> Tensor | Rows:
    """One launch on Hopper GPUs, for the numbers and weights that ``hopper.py`` is for; three elsewhere."""
    if norms is not None and bound is not None and hopper.fits(z, state, weight, operand):
        raw, z, b, a = (_for_descriptor(x) for x in (raw, _packed_heads(z), b, a))
        given = (history, weight, norm, state, decay, dt_bias, head_map)
        history, weight, norm, state, decay, dt_bias, head_map = early = tuple(_aligned(x) for x in given)
        copied = any(x.data_ptr() != y.data_ptr() for x, y in zip(early, given, strict=True))  # by a kernel in front
        assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in log), "a log must be contiguous and aligned"
        gates, of_conv = (b, a, decay, dt_bias), (history, weight)
        of_rows = (batch, log, _aligned(norms), bound)
        return hopper.mixer(raw, z, *gates, *of_conv, key_heads, state, head_map, norm, eps, *of_rows, not copied)
    inputs = gdn_inputs(raw, b, a, history, weight, decay, dt_bias, key_heads, state.shape[2], batch, log)
    o, _ = gdn_verify(*inputs, state, head_map, batch, log.d)
    return gated_output(o, z, norm, eps, operand)


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
    given, v, beta, g, state = state, _aligned(v), beta.contiguous(), g.contiguous(), _aligned(state)
    copied = state.data_ptr() != given.data_ptr()  # by a kernel in front, for which it would not wait before it reads
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    delta = torch.empty_like(out) if log is None else log[: len(v)]
    assert delta.is_contiguous() and delta.data_ptr() % 16 == 0, "a log must be contiguous and aligned"
    heads, dk, dv = state.shape[1:]
    q, k = _even(_packed_heads(q)), _even(_packed_heads(k))
    assert dk % 2 == 0, "q and k are read in pairs"
    _verify[triton.cdiv(dv, _VERIFY_WARPS * _VERIFY_COLUMNS), heads, batch.num_spans](
        q,
        k,
        v,
        beta,
        g,
        state,
        out,
        delta,
        head_map,
        batch.lanes,
        batch.starts,
        batch.span_lengths,
        q.stride(0),
        k.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        WARPS=_VERIFY_WARPS,
        COLUMNS=_VERIFY_COLUMNS,
        num_warps=_VERIFY_WARPS,
        enable_fp_fusion=False,
        **({"PDL": False} if copied else pdl(q.device)),
    )
    return out, delta


_ANY_ALIGNMENT = ["q", "k", "beta", "g", "head_map", *_FACTS]
"""Where these lie must not choose the code: another layout of the state's tile is another order of summation."""


@triton.jit(do_not_specialize=["q_stride", "k_stride"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
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
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WARPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, span = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(starts + span), tl.load(lengths + span).to(tl.int32)
    place = tl.arange(0, WARPS * _PAIRS)
    pair, first_column = place % _PAIRS, (tl.program_id(0) * WARPS + place // _PAIRS) * COLUMNS
    at_v = first_column[:, None] + tl.arange(0, COLUMNS)[None, :]
    # committed state changes between forwards only: it is on its way while the kernels before this one still run
    s = _bands(state + (tl.load(lanes + span) * HEADS + head) * (DK * DV), pair, at_v, tl.minimum(length, 1) * DV, DK, DV)
    key, of_value = tl.load(head_map + head) * DK, head * DV + at_v
    in_v, first_in_v = at_v < DV, (at_v < DV) & (pair == 0)[:, None]
    await_turn(PDL)
    if length == 0:
        return
    q += start * q_stride + key
    k += start * k_stride + key
    v += start * (HEADS * DV)
    out += start * (HEADS * DV)
    delta += start * (HEADS * DV)
    beta += start * HEADS + head
    g += start * HEADS + head
    _bring(q, q_stride, k, k_stride, length, key, DK)
    g_row = tl.load(g)
    for step in tl.range(length):
        # what all of the state waits for is fetched a row ahead; the last row fetches its own again
        decay, g_row = _decay(g_row), tl.load(g + tl.minimum(step + 1, length - 1) * HEADS)
        v_row, strength = tl.load(v + of_value, mask=in_v, other=0.0), tl.load(beta)
        s, read = _faded(s, decay, k, pair, DK)
        d = strength * (v_row - _over_pairs(read))
        tl.store(delta + of_value, d, mask=first_in_v)
        s, read = _advanced(s, k, d, q, pair, DK)
        tl.store(out + of_value, _over_pairs(read), mask=first_in_v)
        q += q_stride
        k += k_stride
        v += HEADS * DV
        out += HEADS * DV
        delta += HEADS * DV
        beta += HEADS


@triton.jit
def _bring(q, q_stride, k, k_stride, length, key, DK: tl.constexpr):
    """The first rows of q and k to L1, all at once, rather than each when its turn comes: one number of every 32 bytes is
    loaded. What keeps the compiler from leaving that out is a store that never happens, as ``key`` is not negative."""
    row, at = tl.arange(0, 8)[:, None], 8 * tl.arange(0, 16)[None, :]
    inside = (row < length) & (at < DK)
    q, k = q + row * q_stride + at, k + row * k_stride + at
    tl.store(q, tl.load(q, mask=inside, other=0.0) + tl.load(k, mask=inside, other=0.0), mask=row + at < -key)


@triton.jit
def _bands(tile, pair, at_v, end, DK: tl.constexpr, DV: tl.constexpr):
    """Some columns of a state before ``end``, as tensors [warps * _PAIRS, columns]. Of every 2 * _PAIRS rows the even ones
    are a band and the odd ones the next, as ``_pair`` reads a vector over Dk."""
    s = ()
    for band in tl.static_range(2 * ((DK + 2 * _PAIRS - 1) // (2 * _PAIRS))):
        row = (2 * pair + band // 2 * (2 * _PAIRS) + band % 2)[:, None]
        # past L1, which is for the rows
        s += (tl.load(tile + row * DV + at_v, mask=(row < DK) & (at_v < end), other=0.0, cache_modifier=".cg"),)
    return s


@triton.jit
def _faded(s, decay, k, pair, DK: tl.constexpr):
    """decay S, and each pair's part of Sᵀk then: the bands are added by fused operations that are asked for by name, so
    that no compiler may choose."""
    faded, read = (), tl.zeros(s[0].shape, tl.float32)
    for first in tl.static_range(0, len(s), 2):
        of_k = _pair(k, pair, first, DK)
        for odd in tl.static_range(2):
            band = decay * s[first + odd]
            read = tl.fma(of_k[odd], band, read)
            faded += (band,)
    return faded, read


@triton.jit
def _advanced(s, k, d, q, pair, DK: tl.constexpr):
    """S + k dᵀ, and each pair's part of Sᵀq then. k is read once more, from L1, rather than held in registers that decide
    how many warps there is room for."""
    advanced, read = (), tl.zeros(s[0].shape, tl.float32)
    for first in tl.static_range(0, len(s), 2):
        of_k, of_q = _pair(k, pair, first, DK), _pair(q, pair, first, DK)
        for odd in tl.static_range(2):
            band = _add_product(s[first + odd], of_k[odd], d)
            read = tl.fma(of_q[odd], band, read)
            advanced += (band,)
    return advanced, read


@triton.jit
def _pair(x, pair, first: tl.constexpr, DK: tl.constexpr):
    """What a vector over Dk has for two bands of a state, [warps * _PAIRS, 1] each. So few numbers at a time each thread
    reads by itself, without a detour through shared memory, and two of them by one load."""
    at = pair + first // 2 * _PAIRS
    both = tl.load(x.to(tl.pointer_type(tl.int64)) + at, mask=at < DK // 2, other=0)
    even, odd = both.to(tl.int32), (both >> 32).to(tl.int32)
    return even.to(tl.float32, bitcast=True)[:, None], odd.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _over_pairs(parts):
    """The sum of a warp's pairs, for each of them."""
    of_warps = tl.reshape(parts, (parts.shape[0] // _PAIRS, _PAIRS, parts.shape[1]))
    sums = tl.sum(of_warps, axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(sums, of_warps.shape), parts.shape)


@triton.jit
def _decay(g):
    return tl.exp(g)


@triton.jit
def _add_product(s, k, d):
    """S + k dᵀ, fused. A step is e^g S, rounded, and then this."""
    return tl.fma(k, d, s)


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
    await_turn_alone(PDL)
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
        s = _add_product(_decay(tl.load(g + row * HEADS + head)) * s, k_row[:, None], d_row[None, :])
    tl.store(tile, s, mask=in_tile)


# -- prompt rows -----------------------------------------------------------------------------------------------------------

# Products are of numbers in two float16 halves, high and low. Together these have the 22 bits of tf32x3, but tensor cores
# multiply them twice as fast, take a left side from the registers where the product before has left it, and a right side as
# it lies in memory, transposed or not. What is at most about one by construction (q and k are unit vectors or shorter; the
# inverse, as I - beta k kᵀ lengthens nothing) has one scale; whatever else, one per row.


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    head_map: Tensor,
    batch: PackedBatch,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, state = _packed_heads(q), _packed_heads(k), _for_descriptor(_packed_heads(v)), state.contiguous()
    beta, g = beta.contiguous(), g.contiguous()
    first_rows, sizes, first_chunks = _plan(batch, q.device)
    heads, dk, dv = state.shape[1:]
    chunks, key_heads = len(sizes), k.shape[1]
    width = max(16, triton.next_power_of_2(dk))
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if room is None:
        room = torch.empty(batch.num_spans, heads, dk, dv, dtype=torch.float32, device=v.device)
    after = room[: batch.num_spans]
    assert after.is_contiguous(), "room for states must be contiguous"
    tiles = torch.empty(4 * chunks * key_heads * CHUNK_SIZE, width, dtype=torch.float16, device=v.device)
    squares = torch.empty(4 * chunks * heads * CHUNK_SIZE, CHUNK_SIZE, dtype=torch.float16, device=v.device)
    total = out.new_empty(chunks, heads, CHUNK_SIZE)
    _prepare[chunks, heads](
        q,
        k,
        beta,
        g,
        tiles,
        squares,
        total,
        head_map,
        first_rows,
        sizes,
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        DK=dk,
        WIDTH=width,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        num_warps=_PREPARE_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _walk[triton.cdiv(dv, _WALK_COLUMNS), heads, batch.num_spans](
        TensorDescriptor.from_tensor(tiles, [CHUNK_SIZE, width]),
        TensorDescriptor.from_tensor(squares, [CHUNK_SIZE, CHUNK_SIZE]),
        TensorDescriptor(v, [len(v), heads * dv], [v.stride(0), 1], [CHUNK_SIZE, _WALK_COLUMNS]),
        total,
        state,
        out,
        after,
        head_map,
        batch.lanes,
        batch.starts,
        batch.span_lengths,
        first_chunks,
        HEADS=heads,
        KEY_HEADS=key_heads,
        DK=dk,
        DV=dv,
        WIDTH=width,
        COLUMNS=_WALK_COLUMNS,
        num_warps=_WALK_WARPS,
        num_stages=1 if has_little_shared_memory(q.device) else _WALK_STAGES,
        enable_fp_fusion=False,
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
    tiles,
    squares,
    total,
    head_map,
    first_rows,
    sizes,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Of one chunk and head: sums of g, the scores QKᵀ e^(Gi - Gj), and (I + A)⁻¹ with A the strictly lower triangle of
    beta KKᵀ e^(Gi - Gj); and the halves of q and k, which the first of the heads that read them stores."""
    head, chunk = tl.program_id(1), tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + chunk)
    if size == 0:
        return
    at = tl.arange(0, _CHUNK)
    live = at < size
    rows = tl.load(first_rows + chunk) + at
    key_head = tl.load(head_map + head)
    others = tl.arange(0, BLOCK_HEADS)
    key_heads = tl.load(head_map + others, mask=others < HEADS, other=-1)
    first = head == tl.min(tl.where(key_heads == key_head, others, HEADS), axis=0)
    tile = tiles + (chunk * KEY_HEADS + key_head) * (4 * _CHUNK * WIDTH)
    k_up, k_down = _halves(_rows_of_head(k, rows, live, K_STRIDE, key_head, DK, WIDTH))
    if first:
        _store_halves(tile, k_up, k_down)
    overlap_kk = _product(k_up, k_down, tl.trans(k_up), tl.trans(k_down)) * _UNDONE
    q_up, q_down = _halves(_rows_of_head(q, rows, live, Q_STRIDE, key_head, DK, WIDTH))
    if first:
        _store_halves(tile + 2 * _CHUNK * WIDTH, q_up, q_down)
    overlap_qk = _product(q_up, q_down, tl.trans(k_up), tl.trans(k_down)) * _UNDONE

    sums = tl.cumsum(tl.load(g + rows * HEADS + head, mask=live, other=0.0), axis=0)
    strength = tl.load(beta + rows * HEADS + head, mask=live, other=0.0)
    difference = sums[:, None] - sums[None, :]
    ratio = tl.exp(tl.where(at[:, None] >= at[None, :], difference, float("-inf")))
    place = chunk * HEADS + head
    square = squares + place * (4 * _CHUNK * _CHUNK)
    tl.store(total + place * _CHUNK + at, sums)
    up, down = _halves(overlap_qk * ratio)
    _store_halves(square + 2 * _CHUNK * _CHUNK, up, down)
    inverse = _inverse(tl.where(at[:, None] > at[None, :], strength[:, None] * overlap_kk * ratio, 0.0))
    up, down = _halves(inverse * strength[None, :])
    _store_halves(square, up, down)


@triton.jit
def _inverse(a):
    """(I + a)⁻¹ of strictly lower triangular a. From that of the diagonal blocks of 2, 4, ... 32, D, and what lies between
    them in the blocks of twice the size, L: D - D L D."""
    at = tl.arange(0, _CHUNK)
    down, across = at[:, None], at[None, :]
    inverse = tl.where(down == across, 1.0, tl.where((down >> 1) == (across >> 1), -a, 0.0))
    for level in range(1, 6):
        between = ((down >> level) != (across >> level)) & ((down >> (level + 1)) == (across >> (level + 1)))
        up, low = _halves(inverse)
        a_up, a_low = _halves(tl.where(between, a, 0.0))
        left_up, left_low = _halves(_product(up, low, a_up, a_low) * _UNDONE)
        inverse -= _product(left_up, left_low, up, low) * _UNDONE
    return inverse


@triton.jit(do_not_specialize_on_alignment=_FACTS)
def _walk(
    tiles,
    squares,
    v,
    total,
    state,
    out,
    after,
    head_map,
    lanes,
    starts,
    lengths,
    first_chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of a head's state through the chunks of one span: with T the inverse and S the state before a chunk,
    value = T beta (V - e^G K S), o = e^G Q S + scores value, S <- e^Glast S + (e^(Glast - G) K)ᵀ value. All of it lies
    transposed, [column, ...]: so a product's left side comes from registers, and its right side from memory as it is."""
    head, span = tl.program_id(1), tl.program_id(2)
    at, at_k = tl.arange(0, _CHUNK), tl.arange(0, WIDTH)
    at_v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_v = at_v < DV
    of_state = head * (DK * DV) + at_k[None, :] * DV + at_v[:, None]
    in_state = (at_k < DK)[None, :] & in_v[:, None]
    s = tl.load(state + tl.load(lanes + span) * (HEADS * DK * DV) + of_state, mask=in_state, other=0.0)
    key_head = tl.load(head_map + head).to(tl.int32)
    of_value = head * DV + at_v
    start, length, chunk = tl.load(starts + span), tl.load(lengths + span), tl.load(first_chunks + span).to(tl.int32)
    for first in range(0, length, _CHUNK):
        live = first + at < length
        rows = start + first + at
        in_values = live[:, None] & in_v[None, :]
        place = chunk * HEADS + head
        tile = (chunk * KEY_HEADS + key_head) * (4 * _CHUNK)
        keys_up, keys_low = tiles.load([tile, 0]), tiles.load([tile + _CHUNK, 0])
        queries_up, queries_low = tiles.load([tile + 2 * _CHUNK, 0]), tiles.load([tile + 3 * _CHUNK, 0])
        square = place * (4 * _CHUNK)
        t_up, t_low = squares.load([square, 0]), squares.load([square + _CHUNK, 0])
        p_up, p_low = squares.load([square + 2 * _CHUNK, 0]), squares.load([square + 3 * _CHUNK, 0])
        values = tl.where(in_values, v.load([(start + first).to(tl.int32), head * DV + tl.program_id(0) * COLUMNS]), 0.0)
        sums = tl.load(total + place * _CHUNK + at)
        last = tl.load(total + place * _CHUNK + _CHUNK - 1)
        growth = tl.exp(sums)[None, :]

        up, low, undone = _scaled_halves(s)
        read = _product(up, low, tl.trans(keys_up), tl.trans(keys_low)) * undone
        o = _product(up, low, tl.trans(queries_up), tl.trans(queries_low)) * undone
        up, low, undone = _scaled_halves(tl.trans(values) - growth * read)
        value = _product(up, low, tl.trans(t_up), tl.trans(t_low)) * undone
        up, low, undone = _scaled_halves(value)
        o = growth * o + _product(up, low, tl.trans(p_up), tl.trans(p_low)) * undone
        tl.store(out + rows[:, None] * (HEADS * DV) + of_value[None, :], tl.trans(o), mask=in_values)
        up, low, undone = _scaled_halves(tl.exp(last - sums)[None, :] * value)
        s = tl.exp(last) * s + _product(up, low, keys_up, keys_low) * undone
        chunk += 1
    of_state = head * (DK * DV) + at_k[:, None] * DV + at_v[None, :]
    in_state = (at_k < DK)[:, None] & in_v[None, :]
    tl.store(after + span.to(tl.int64) * (HEADS * DK * DV) + of_state, tl.trans(s), mask=in_state)


@triton.jit
def _rows_of_head(x, rows, live, STRIDE: tl.constexpr, head, DK: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] of a head's q or k."""
    at = tl.arange(0, WIDTH)
    inside = live[:, None] & (at < DK)[None, :]
    return tl.load(x + rows[:, None] * STRIDE + head * DK + at[None, :], mask=inside, other=0.0)


_FIXED = tl.constexpr(2.0**10)
"""Numbers of order one become so large that even the low half of a small one is a normal float16."""
_UNDONE = tl.constexpr(2.0**-20)
"""Of a product of two such."""


@triton.jit
def _halves(x):
    return _cut(x * _FIXED)


@triton.jit
def _scaled_halves(x):
    """Halves of x with the largest magnitude of each row brought to 2^14, and [n, 1] what undoes this and the scale of the
    other side."""
    largest = tl.max(tl.abs(x), axis=1)
    shift = 14 - tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -96)
    scale = ((127 + shift) << 23).to(tl.float32, bitcast=True)
    undone = ((127 - shift - 10) << 23).to(tl.float32, bitcast=True)
    high, low = _cut(x * scale[:, None])
    return high, low, undone[:, None]


@triton.jit
def _cut(x):
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _store_halves(tile, high, low):
    """One tile behind the other."""
    height: tl.constexpr = high.shape[0]
    width: tl.constexpr = high.shape[1]
    at = tl.arange(0, height)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(tile + at, high)
    tl.store(tile + height * width + at, low)


@triton.jit
def _product(x_high, x_low, y_high, y_low):
    """All but the product of both low halves, the smaller ones first."""
    total = tl.dot(x_high, y_low, tl.dot(x_low, y_high))
    return tl.dot(x_high, y_high, total)


# -- layouts ---------------------------------------------------------------------------------------------------------------


def _packed_heads(x: Tensor) -> Tensor:
    """[N, heads, D] with any stride between rows, as a slice of a wider tensor has."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _even(x: Tensor) -> Tensor:
    """With rows that begin at multiples of 8 bytes, as those of an even Dk do unless somebody cut them off otherwise."""
    return x if x.data_ptr() % 8 == 0 and x.stride(0) % 2 == 0 else x.clone(memory_format=torch.contiguous_format)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous at a multiple of 16 bytes, as every layer of a pool is."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _for_descriptor(x: Tensor) -> Tensor:
    """Rows that lie side by side inside and begin at multiples of 16 bytes."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
