"""Paged attention over packed ragged spans, row-invariant.

The query rows of a span are cut into tiles of a fixed number of rows (padded); the keys are walked in blocks of 128 that
start at multiples of 128 of the absolute position. Every (tile, block) pair is a product of one shape. A row's maximum is
exact in any order; the sums of its weights and of its weighted values are formed per block and added in the order of the
blocks, so neither neighbours nor chunking can change them. A block that is wholly masked adds exact zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import PAGE_SIZE
from paceline.ops.activation import gated_heads
from paceline.ops.kv import PagedTensor, read_pages, write_rows
from paceline.ops.linear.rows import Rows
from paceline.ops.norm import rms_norm
from paceline.ops.rope import apply_rope
from paceline.types import RowKind

KEY_BLOCK = 128
QUERY_TILE: dict[RowKind, int] = {"decode": 8, "prefill": 64}
_PAGES_PER_BLOCK = KEY_BLOCK // PAGE_SIZE
_GROUP_PAIRS = 256
"""Pairs whose keys or values are in float32 at one time; bounds the scratch memory, does not touch the result."""


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
    """softmax(scale * q kᵀ + mask) v over the keys stored in the pages of each row's span.

    q [N, Hq, D] float32; caches [pages, PAGE_SIZE, Hkv, D] in their stored type; page_table [L, P] the page of each
    PAGE_SIZE positions of every lane's sequence, of which ``batch.lanes`` are read. The keys of the batch's own rows must
    have been written before. Query head h reads key head h // (Hq / Hkv). A row at position p sees position s if s <= p
    (causal) or if s is not behind the span's last row (block-bidirectional), with a window also only if |p - s| < window.
    Returns [N, Hq, D].
    """
    plan = _plan(batch, page_table, causal, window)
    heads = k_cache.data.shape[2]
    tiles = plan.gather_queries(q * scale, heads)
    scores = torch.cat([_scores(tiles, k_cache, plan, group) for group in plan.groups])
    peaks = torch.full((tiles.shape[0], *scores.shape[1:-1]), float("-inf"), device=q.device)
    for turn in plan.turns:
        peaks[turn.tiles] = torch.maximum(peaks[turn.tiles], scores[turn.pairs].amax(-1))
    peaks = peaks.masked_fill(peaks == float("-inf"), 0.0)  # rows of padding see nothing
    weights = torch.exp(scores - peaks[plan.pair_tile].unsqueeze(-1))
    sums = weights.sum(-1)
    total = torch.zeros_like(peaks)
    out = torch.zeros(*peaks.shape, q.shape[-1], device=q.device)
    for group in plan.groups:
        pairs = slice(group[0].pairs.start, group[-1].pairs.stop)
        block = _block(v_cache, plan.pair_pages[pairs]).masked_fill(~plan.known[pairs, None, :, None], 0.0)
        values = torch.bmm(weights[pairs].flatten(2, 3).flatten(0, 1), block.flatten(0, 1)).view(*sums[pairs].shape, -1)
        for turn in group:
            total[turn.tiles] += sums[turn.pairs]
            out[turn.tiles] += values[turn.pairs.start - pairs.start : turn.pairs.stop - pairs.start]
    return plan.scatter(out / total.unsqueeze(-1))


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
    """``gated_heads`` of what ``attention`` gives and of the gate [N, Hq, D], as rows [N, Hq * D]. Only a kernel needs to
    know that no value in the pages is larger than ``bound`` (see ``value_bound``)."""
    o = attention(q, k_cache, v_cache, page_table, batch, scale=scale, causal=causal)
    return gated_heads(o, gate, operand)


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
    """Norm and rotation of every head of q [N, Hq, D] and k [N, Hkv, D]; k and v [N, Hkv, D] are then written at ``slots``
    [N]. ``angles`` from ``RopeTable.at``. Returns q."""
    write_rows(k_cache, slots, apply_rope(rms_norm(k, k_weight, eps), angles))
    write_rows(v_cache, slots, v)
    return apply_rope(rms_norm(q, q_weight, eps), angles)


def _scores(tiles: Tensor, cache: PagedTensor, plan: _Plan, group: list[_Turn]) -> Tensor:
    """Masked scores [pairs, Hkv, Hq / Hkv, R, KEY_BLOCK] of a group of pairs."""
    pairs = slice(group[0].pairs.start, group[-1].pairs.stop)
    keys = _block(cache, plan.pair_pages[pairs])
    scores = torch.bmm(tiles[plan.pair_tile[pairs]].flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
    scores = scores.view(keys.shape[0], keys.shape[1], -1, plan.rows, KEY_BLOCK)
    return scores.masked_fill(~plan.visible[pairs, None, None], float("-inf"))


def _block(cache: PagedTensor, pages: Tensor) -> Tensor:
    """Keys or values of pairs: pages [P, KEY_BLOCK / PAGE_SIZE] -> float32 [P, Hkv, KEY_BLOCK, D]. Positions beyond the last
    written row may hold anything: the caller masks scores, and zeroes values because 0 * NaN is not 0."""
    return read_pages(cache, pages).flatten(1, 2).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _Turn:
    """The pairs that are the n-th of their tile, a contiguous run, and those tiles (each at most once)."""

    pairs: slice
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """Index tensors of one (batch, causal, window): T query tiles of R rows, P (tile, key block) pairs.

    ``tile_rows`` [T, R] packed row of each tile row, N in the padding; ``pair_tile`` [P]; ``pair_pages``
    [P, KEY_BLOCK / PAGE_SIZE]; ``visible`` [P, R, KEY_BLOCK]; ``known`` [P, KEY_BLOCK] positions that some row of the span
    may see. Pairs are ordered by turn.
    """

    rows: int
    num_rows: int
    tile_rows: Tensor
    pair_tile: Tensor
    pair_pages: Tensor
    visible: Tensor
    known: Tensor
    turns: list[_Turn]

    @property
    def groups(self) -> list[list[_Turn]]:
        """Consecutive turns whose pairs together stay within ``_GROUP_PAIRS`` (or one turn alone)."""
        groups: list[list[_Turn]] = []
        for turn in self.turns:
            if groups and turn.pairs.stop - groups[-1][0].pairs.start <= _GROUP_PAIRS:
                groups[-1].append(turn)
            else:
                groups.append([turn])
        return groups

    def gather_queries(self, q: Tensor, kv_heads: int) -> Tensor:
        """[N, Hq, D] -> [T, Hkv, (Hq / Hkv) * R, D]."""
        padded = torch.cat((q, q.new_zeros(1, *q.shape[1:])))[self.tile_rows]
        return padded.transpose(1, 2).unflatten(1, (kv_heads, -1)).flatten(2, 3)

    def scatter(self, out: Tensor) -> Tensor:
        """[T, Hkv, Hq / Hkv, R, D] -> [N, Hq, D]."""
        rows = out.flatten(1, 2).transpose(1, 2)
        result = rows.new_empty(self.num_rows + 1, *rows.shape[2:])
        result[self.tile_rows.flatten()] = rows.flatten(0, 1)
        return result[: self.num_rows]


def _plan(batch: PackedBatch, page_table: Tensor, causal: bool, window: int | None) -> _Plan:
    key = ("attention", causal, window, id(page_table))
    if key not in batch.plans:
        # the table is kept beside the plan, so that its id cannot be taken over by another while the batch lives
        batch.plans[key] = (_make_plan(batch, page_table, causal, window), page_table)
    return batch.plans[key][0]


def _make_plan(batch: PackedBatch, page_table: Tensor, causal: bool, window: int | None) -> _Plan:
    rows = QUERY_TILE[batch.kind]
    tiles = [
        (span, start, min(rows, length - start))
        for span, length in enumerate(batch.lengths)
        for start in range(0, length, rows)
    ]
    span, start, size = (np.array(column) for column in zip(*tiles, strict=True))
    base, length = np.array(batch.bases)[span], np.array(batch.lengths)[span]
    first_row = base + start
    last_key = first_row + size - 1 if causal else base + length - 1
    first_key = np.zeros_like(first_row) if window is None else np.maximum(first_row - window + 1, 0)
    first_block = first_key // KEY_BLOCK
    counts = last_key // KEY_BLOCK - first_block + 1
    pair_tile = np.repeat(np.arange(len(tiles)), counts)
    turn = np.arange(len(pair_tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_turn = np.argsort(turn, kind="stable")
    pair_tile, turn = pair_tile[by_turn], turn[by_turn]
    block = first_block[pair_tile] + turn

    device = page_table.device
    offset = np.arange(rows)
    inside = offset < size[:, None]
    tile_rows = np.where(inside, (np.array(batch.offsets)[span] + start)[:, None] + offset, batch.num_rows)
    to = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    key_pos = to(block[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK))
    query_pos = to(np.where(inside, first_row[:, None] + offset, -1))[to(pair_tile)]
    known = key_pos <= to(last_key[pair_tile])[:, None]
    visible = known.unsqueeze(1) & (query_pos >= 0).unsqueeze(-1)
    distance = query_pos.unsqueeze(-1) - key_pos.unsqueeze(1)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    pages = block[:, None] * _PAGES_PER_BLOCK + np.arange(_PAGES_PER_BLOCK)
    pair_pages = page_table[batch.lanes[to(span[pair_tile])][:, None], to(np.minimum(pages, page_table.shape[1] - 1))]
    edges = np.searchsorted(turn, np.arange(int(counts.max()) + 1))
    turns = [_Turn(slice(int(a), int(b)), to(pair_tile[a:b])) for a, b in itertools.pairwise(edges)]
    return _Plan(rows, batch.num_rows, to(tile_rows), to(pair_tile), pair_pages, visible, known, turns)
