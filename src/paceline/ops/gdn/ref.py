"""The gated delta rule (Yang et al., Gated Delta Networks, 2024), float32.

Per value head, with its key head's q (scaled) and k, state S [Dk, Dv], decay e^g and write strength beta:

    S <- e^g S;   d = beta (v - Sᵀk);   S <- S + k dᵀ;   o = Sᵀq

``gdn_verify`` walks the rows of generated tokens one by one and leaves the committed state untouched; it returns d, which
with k and g is the replay log. ``gdn_replay`` applies the first rows of logs to the state with the very operations of
the walk, so that committing is bit-identical to having stepped. ``gdn_prefill`` computes prompt rows by chunks of 64
(the WY form), which is another arithmetic and therefore used for prompt rows only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import CHUNK_SIZE
from paceline.ops.activation import sigmoid, softplus
from paceline.ops.conv import causal_conv
from paceline.ops.linear.rows import Rows
from paceline.ops.norm import gated_output, l2_norm


class ReplayLog(NamedTuple):
    """Room for what the rows of a verify forward leave behind for the commit, R >= N rows: the raw inputs of the convolution
    [R, C], k [R, Hk, Dk], d [R, Hv, Dv] and g [R, Hv]."""

    raw: Tensor
    k: Tensor
    d: Tensor
    g: Tensor


class GdnInputs(NamedTuple):
    """What the recurrence reads of N rows: q (scaled) and k [N, Hk, Dk], v [N, Hv, Dv], beta and g [N, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


CHUNK_PLAN = "gdn chunks"
"""Under this key ``PackedBatch.plans`` may hold ``chunk_facts`` on the device, as (first rows, rows, first chunks)."""


def chunk_facts(lengths: Sequence[int], chunks: int | None = None, spans: int | None = None) -> np.ndarray:
    """The chunks of a prefill batch, int64 [2 C + S]: first row and number of rows of each, then the first chunk of each
    span. Padded with chunks of no rows to ``chunks``, with spans of no chunks to ``spans``."""
    rows = np.asarray(lengths, np.int64)
    counts = -(-rows // CHUNK_SIZE)
    real = int(counts.sum())
    total = chunks or real
    out = np.zeros(2 * total + (spans or len(rows)), np.int64)
    begin = np.cumsum(counts) - counts
    done = (np.arange(real) - np.repeat(begin, counts)) * CHUNK_SIZE
    out[:real] = np.repeat(np.cumsum(rows) - rows, counts) + done
    out[total : total + real] = np.minimum(CHUNK_SIZE, np.repeat(rows, counts) - done)
    out[2 * total : 2 * total + len(rows)] = begin
    return out


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
    """From the projections of N rows to the recurrence: the convolution over ``raw`` [N, C] (channels q, k, v; history and
    weight as in ``causal_conv``), l2 norms and scale of q and k, beta = sigmoid(b), g = decay * softplus(a + dt_bias); b and
    a [N, Hv], decay (the checkpoint's A) and dt_bias [Hv]. With a ``log`` raw, k and g are left in its first N rows."""
    keys = key_heads * key_dim
    mixed = causal_conv(raw, history, weight, batch)
    q, k, v = mixed.split((keys, keys, raw.shape[1] - 2 * keys), dim=-1)
    q = l2_norm(q.unflatten(-1, (key_heads, key_dim))) * key_dim**-0.5
    k = l2_norm(k.unflatten(-1, (key_heads, key_dim)))
    inputs = GdnInputs(q, k, v.unflatten(-1, (b.shape[1], -1)), sigmoid(b), decay * softplus(a + dt_bias))
    if log is not None:
        for place, values in ((log.raw, raw), (log.k, inputs.k), (log.g, inputs.g)):
            place[: len(values)] = values
    return inputs


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
    """q, k [N, Hk, Dk]; v [N, Hv, Dv]; beta, g [N, Hv]; state [L, Hv, Dk, Dv] of every lane, of which ``batch.lanes`` are
    read; head_map [Hv] the key head of each value head. Returns (o, d), both [N, Hv, Dv]; d lies in the first N rows of
    ``log`` [>= N, Hv, Dv] where one is given."""
    steps = _steps(batch, q.device)
    state = state[batch.lanes[steps.order]]
    key_query = steps.gather(torch.stack((k, q), dim=2)[:, head_map])
    v, beta, decay = steps.gather(v), steps.gather(beta.unsqueeze(-1)), steps.gather(torch.exp(g).unsqueeze(-1))
    overlap = (key_query[:, :, :, 0] * key_query[:, :, :, 1]).sum(-1, keepdim=True)
    out, delta = torch.empty_like(v), torch.empty_like(v)
    for step, (active, going_on) in enumerate(itertools.pairwise((*steps.active, 0))):
        at = (step, slice(active))
        read = _contract(key_query[at], state[:active])
        torch.mul(beta[at], v[at] - decay[at] * read[:, :, 0], out=delta[at])
        torch.add(decay[at] * read[:, :, 1], overlap[at] * delta[at], out=out[at])
        if going_on:
            go = (step, slice(going_on))
            _advance(state[:going_on], key_query[go][:, :, 0], delta[go], decay[go])
    d = steps.scatter(delta)
    if log is not None:
        log[: len(d)] = d
        d = log[: len(d)]
    return steps.scatter(out), d


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
    """All that generated rows go through between a layer's two products: ``gdn_inputs``, ``gdn_verify`` and, with the gate z
    [N, Hv, Dv] and the weight ``norm`` [Dv], ``gated_output``, [N, Hv * Dv]. What a commit needs is left in ``log``. Only a
    kernel needs to know that no number of a row is larger than ``bound`` (see ``output_bound``) times the root of what
    ``norms`` has for it: the squared norms of the rows from which raw, z, b and a were made, as ``Rows`` has them."""
    inputs = gdn_inputs(raw, b, a, history, weight, decay, dt_bias, key_heads, state.shape[2], batch, log)
    o, _ = gdn_verify(*inputs, state, head_map, batch, log.d)
    return gated_output(o, z, norm, eps, operand)


def _contract(key_query: Tensor, state: Tensor) -> Tensor:
    """[n, Hv, 2, Dk] times [n, Hv, Dk, Dv]: both reads of the state in one pass."""
    return torch.bmm(key_query.flatten(0, 1), state.flatten(0, 1)).unflatten(0, state.shape[:2])


def _advance(state: Tensor, k: Tensor, d: Tensor, decay: Tensor) -> None:
    """S <- e^g S + k dᵀ in place; the product is rounded before it is added, on every path."""
    state.mul_(decay.unsqueeze(-1)).add_(k.unsqueeze(-1) * d.unsqueeze(-2))


def gdn_replay(state: Tensor, k: Tensor, d: Tensor, g: Tensor, keep: Tensor, head_map: Tensor, batch: PackedBatch) -> None:
    """Apply the first ``keep`` [S] rows of each span's log to its lane's state, in order and in place, in every layer.

    state [layers, L, Hv, Dk, Dv]; the log k [layers, N, Hk, Dk], d [layers, N, Hv, Dv], g [layers, N, Hv]. A span that keeps
    no row leaves its lane alone. Either every lane is advanced or, when this raises, none.
    """
    after = state[:, batch.lanes]
    k, decay = k[:, :, head_map], torch.exp(g).unsqueeze(-1)
    for span, (start, rows) in enumerate(zip(batch.offsets, keep.tolist(), strict=True)):
        for row in range(start, start + rows):
            _advance(after[:, span], k[:, row], d[:, row], decay[:, row])
    state[:, batch.lanes] = after


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
    """Shapes as in ``gdn_verify``; every span starts at a multiple of 64 of its sequence. Returns (o [N, Hv, Dv], the new
    states [S, Hv, Dk, Dv] of the spans), which are the first S of ``room`` [>= S, Hv, Dk, Dv] where one is given. A partial
    last chunk is padded with rows of zeros, which are exact no-ops."""
    chunks = _plan(batch, q.device)
    q, k, v, beta, g = (chunks.gather(t) for t in (q, k, v, beta, g))
    overlap_qk, overlap_kk = _mm(q, k.transpose(-1, -2))[:, head_map], _mm(k, k.transpose(-1, -2))[:, head_map]
    q, k = q[:, head_map], k[:, head_map]
    total = _prefix_sum(g)
    lower = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=q.device).tril()
    ratio = torch.exp((total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")))
    growth = torch.exp(total).unsqueeze(-1)
    inverse = _unit_lower_inverse((beta.unsqueeze(-1) * overlap_kk * ratio).tril(-1).flatten(0, 1)).unflatten(
        0, beta.shape[:2]
    )
    u, y = _mm(inverse, beta.unsqueeze(-1) * v), _mm(inverse, beta.unsqueeze(-1) * growth * k)
    scores, q_decayed = overlap_qk * ratio, growth * q
    last = total[..., -1:]
    k_decayed = (torch.exp(last - total).unsqueeze(-1) * k).transpose(-1, -2)
    state, out = state[batch.lanes[chunks.order]], torch.empty_like(v)
    for at in chunks.turns:
        before = state[: at.stop - at.start]
        value = u[at] - _mm(y[at], before)
        out[at] = _mm(q_decayed[at], before) + _mm(scores[at], value)
        before.mul_(torch.exp(last[at]).unsqueeze(-1)).add_(_mm(k_decayed[at], value))
    after = torch.empty_like(state) if room is None else room[: len(state)]
    return chunks.scatter(out), after.index_copy_(0, chunks.order, state)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product over [chunks, heads]; a fixed shape per item, so the batch size does not matter."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


_LEAF = 16


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹ of strictly lower triangular a [n, 64, 64]: forward substitution in diagonal blocks of 16, which are then
    merged in pairs, inv([[A, 0], [C, B]]) = [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]."""
    size = a.shape[-1]
    leaves = a.unflatten(1, (-1, _LEAF)).unflatten(3, (-1, _LEAF)).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    inverse = torch.eye(_LEAF, device=a.device).expand(leaves.shape).contiguous()
    for row in range(1, _LEAF):
        inverse[:, :, row, :row] = -(leaves[:, :, row, :row, None] * inverse[:, :, :row, :row]).sum(-2)
    width = _LEAF
    while width < size:
        below = a.unflatten(1, (-1, 2, width)).unflatten(4, (-1, 2, width))[:, :, 1, :, :, 0]
        below = below.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = -_mm(second, _mm(below, first))
        top = torch.cat((first, torch.zeros_like(first)), dim=-1)
        inverse = torch.cat((top, torch.cat((corner, second), dim=-1)), dim=-2)
        width *= 2
    return inverse.squeeze(1)


def _prefix_sum(x: Tensor) -> Tensor:
    """Inclusive sums over the last dimension in log2 steps: the order of additions is fixed by the position alone."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] + x[..., :-step]), dim=-1)
        step *= 2
    return x


def _steps(batch: PackedBatch, device: torch.device) -> _Steps:
    if "gdn steps" not in batch.plans:
        batch.plans["gdn steps"] = _Steps(batch, device)
    return batch.plans["gdn steps"]


class _Steps:
    """Rows of a packed batch arranged as [steps, spans, ...] with the longest span in front, so that the spans that have a
    row at a step are the first ``active[step]`` of ``order``. Cells behind them repeat some row and are not used."""

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        lengths, offsets = torch.tensor(batch.lengths), torch.tensor(batch.offsets)
        order = torch.argsort(lengths, descending=True, stable=True)
        step = torch.arange(max(batch.lengths)).unsqueeze(1)
        there = step < lengths[order]
        rows = torch.where(there, offsets[order] + step, 0)
        cells = torch.empty(batch.num_rows, dtype=torch.int64)
        cells[rows[there]] = torch.arange(there.numel()).view(there.shape)[there]
        self.active: list[int] = there.sum(1).tolist()
        self.order, self._rows, self._cells = order.to(device), rows.flatten().to(device), cells.to(device)
        self._shape = there.shape

    def gather(self, x: Tensor) -> Tensor:
        """[N, ...] -> [steps, spans, ...]."""
        return x[self._rows].unflatten(0, self._shape)

    def scatter(self, x: Tensor) -> Tensor:
        """[steps, spans, ...] -> [N, ...]."""
        return x.flatten(0, 1)[self._cells]


def _plan(batch: PackedBatch, device: torch.device) -> _Chunks:
    if "gdn" not in batch.plans:
        batch.plans["gdn"] = _Chunks(batch, device)
    return batch.plans["gdn"]


class _Chunks:
    """Rows of a packed batch arranged as [chunks, heads, 64, ...]: first the first chunks of all spans, then the second
    ones, and so on, with the longest span in front. So each of ``turns`` is a run of chunks that belong, one each, to the
    first spans of ``order``."""

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        self.rows = batch.num_rows
        order = sorted(range(batch.num_spans), key=lambda span: -batch.lengths[span])
        index: list[Tensor] = []
        self.turns: list[slice] = []
        for start in range(0, batch.lengths[order[0]], CHUNK_SIZE):
            first = len(index)
            for span in order:
                size = min(CHUNK_SIZE, batch.lengths[span] - start)
                if size > 0:
                    rows = torch.full((CHUNK_SIZE,), self.rows)
                    rows[:size] = torch.arange(size) + batch.offsets[span] + start
                    index.append(rows)
            self.turns.append(slice(first, len(index)))
        self.index = torch.stack(index).to(device)
        self.order = torch.tensor(order, device=device)

    def gather(self, x: Tensor) -> Tensor:
        """[N, heads, ...] -> [chunks, heads, 64, ...], zeros in the padding."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded[self.index].transpose(1, 2).contiguous()

    def scatter(self, x: Tensor) -> Tensor:
        """[chunks, Hv, 64, Dv] -> [N, Hv, Dv]."""
        out = x.new_empty(self.rows + 1, x.shape[1], x.shape[3])
        out[self.index.flatten()] = x.transpose(1, 2).flatten(0, 1)
        return out[: self.rows]
