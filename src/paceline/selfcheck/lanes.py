"""Cases whose items are lanes: ops over packed spans, and the state they hand on.

A lane's rows are fixed. A batch may take them whole or cut them wherever the engine may; behind generated rows it may
compute rows of junk, as for rejected drafts, and drop them. Neither may show. On a GPU a batch may also be padded as a
captured one is, with upper bounds on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.config import CACHE_TYPES, CHUNK_SIZE, PAGE_SIZE, CacheType
from paceline.ops.activation import sigmoid, softplus
from paceline.ops.attention import attention, gated_attention
from paceline.ops.conv import advance_history, causal_conv, conv_history
from paceline.ops.dispatch import uses_kernels
from paceline.ops.gdn import (
    CHUNK_PLAN,
    ReplayLog,
    chunk_facts,
    gdn_inputs,
    gdn_mixer,
    gdn_prefill,
    gdn_replay,
    gdn_verify,
)
from paceline.ops.kv import PagedTensor, StagedRows, allocate_pages, write_kept, write_rows
from paceline.ops.linear import Rows
from paceline.ops.norm import l2_norm
from paceline.selfcheck.case import Case, Outputs, Rng, laid_out, randn
from paceline.transfer import to_device
from paceline.types import RowKind

_VERIFY_ROWS = (1, 2, 8, 3, 11, 5, 8, 1)
_PROMPT_ROWS = (1, 63, 64, 65, 100, 130, 40, 200)
_DECODE_BASES = (0, 1, 15, 127, 128, 130, 200, 90)
_PROMPT_BASES = (0, 0, 0, 64, 128, 0, 64, 0)
_MOST_REJECTED = 3
_MOST_PADDING = 9
"""Rows, spans, and of prompts chunks, by which a batch is padded."""
_VALUE_BOUND = 200.0
"""Of the values that are attended to; they are a few at most."""
_LONGEST_BOUND = 3000
"""Tokens by which the contexts of a padded batch are overestimated at most."""


def lane_cases(device: torch.device) -> list[Case]:
    rng = Rng(2, device)
    kinds: tuple[RowKind, ...] = ("decode", "prefill")
    cases = [_conv(rng, kind) for kind in kinds] + [_gdn_inputs(rng, kind) for kind in kinds]
    cases += [_gdn_verify(rng), _gdn_mixer(rng), _gdn_prefill(rng), _kept_rows(rng)]
    for cache in CACHE_TYPES:
        # on a GPU everything is compiled first, and windows are the drafter's, whose keys are float16 there
        for window in (None,) if uses_kernels(device) and cache != "f16" else (None, 70):
            cases.append(_attention(rng, "decode", cache, window=window))
            if not uses_kernels(device) or cache == "f16":
                cases.append(_attention(rng, "decode", cache, window=window, causal=False))
            cases.append(_attention(rng, "prefill", cache, window=window))
    cases.append(_attention(rng, "decode", "q8_0", dim=256, stretch=4))
    cases.append(_attention(rng, "decode", "q8_0", dim=256, stretch=4, gated=True))
    cases.append(_attention(rng, "prefill", "f32", stretch=8))
    return cases


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [start, stop) of a lane, and ``rejected`` rows of junk behind them."""

    lane: int
    start: int
    stop: int
    rejected: int

    @property
    def rows(self) -> int:
        return self.stop - self.start + self.rejected


@dataclass(frozen=True, slots=True)
class _Turn:
    """One batch: the next piece of every lane that has one, and padding behind them."""

    pieces: list[_Piece]
    batch: PackedBatch
    rng: Rng

    @property
    def rows(self) -> int:
        """How many there are without padding."""
        return sum(piece.rows for piece in self.pieces)

    def gather(self, values: Sequence[Tensor]) -> Tensor:
        """The packed rows [N, ...] of ``values``, which holds each lane's [rows, ...]. Padding is NaN."""
        parts = []
        for piece in self.pieces:
            rows = values[piece.lane]
            parts += [rows[piece.start : piece.stop], randn(self.rng, piece.rejected, *rows.shape[1:])]
        parts.append(parts[0].new_full((self.batch.num_rows - self.rows, *parts[0].shape[1:]), torch.nan))
        return laid_out(torch.cat(parts), self.rng)

    def stacked(self, values: dict[int, Tensor]) -> Tensor:
        """[S, ...] of each lane's ``values``. Padding is NaN."""
        parts = [values[piece.lane] for piece in self.pieces]
        missing = self.batch.num_spans - len(parts)
        return torch.stack(parts + [torch.full_like(parts[0], torch.nan)] * missing)

    def keep(self) -> Tensor:
        """[S]: without the rejected rows; padding would keep one."""
        kept = [piece.stop - piece.start for piece in self.pieces]
        return self.rng.tensor(np.array(kept + [1] * (self.batch.num_spans - len(kept))))

    def kept(self) -> Iterator[tuple[int, slice]]:
        """Each lane with its rows in the batch, without the rejected ones."""
        offset = 0
        for piece in self.pieces:
            yield piece.lane, slice(offset, offset + piece.stop - piece.start)
            offset += piece.rows


@dataclass(frozen=True, slots=True)
class _Lanes:
    """How many rows each lane has, where they start in its sequence, and how they may be cut: at multiples of ``grid``,
    or not at all (0)."""

    kind: RowKind
    rows: Sequence[int]
    bases: Sequence[int]
    grid: int
    rejected: int = 0

    def turns(self, chosen: Sequence[int], rng: Rng) -> Iterator[_Turn]:
        density = rng.choice([0.0, 0.3, 1.0])  # whole, some cuts, every possible cut
        cuts = {lane: self._cut(self.rows[lane], density, rng) for lane in chosen}
        for turn in range(max(map(len, cuts.values()))):
            pieces = [
                _Piece(lane, *cuts[lane][turn], int(rng.integers(self.rejected + 1)))
                for lane in chosen
                if turn < len(cuts[lane])
            ]
            starts = [self.bases[piece.lane] + piece.start for piece in pieces]
            yield _Turn(pieces, _batch(self.kind, [piece.rows for piece in pieces], starts, rng), rng)

    def _cut(self, rows: int, density: float, rng: Rng) -> list[tuple[int, int]]:
        inner = [at for at in range(self.grid, rows, self.grid) if rng.random() < density] if self.grid else []
        return list(pairwise([0, *inner, rows]))


def _batch(
    kind: RowKind,
    lengths: Sequence[int],
    bases: Sequence[int],
    rng: Rng,
    lanes: Sequence[int] | None = None,
    spare: int | None = None,
) -> PackedBatch:
    """Exactly these spans, or on a GPU with padding of lane ``spare``, by default one behind the lanes."""
    if not uses_kernels(rng.device) or rng.integers(2):
        return pack(kind, lengths, bases, rng.device, lanes)
    rows, spans = (size + 1 + int(rng.integers(_MOST_PADDING)) for size in (sum(lengths), len(lengths)))
    lanes, spare = lanes or range(len(lengths)), len(lengths) if spare is None else spare
    packed = to_device(facts(lengths, bases, lanes, rows, spans, spare), rng.device)
    bound = max(bases) + int(rng.integers(_LONGEST_BOUND))
    batch = unpack(kind, packed, [max(lengths)] * spans, [bound] * spans, rows, spans)
    if kind == "prefill":
        chunks = sum(-(-length // CHUNK_SIZE) for length in lengths) + int(rng.integers(_MOST_PADDING))
        plan = to_device(chunk_facts(lengths, chunks, spans), rng.device)
        batch.plans[CHUNK_PLAN] = plan.split((chunks, chunks, spans))
    return batch


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _conv(rng: Rng, kind: RowKind) -> Case:
    """The convolution and the history it hands on."""
    verify = kind == "decode"
    rows = _VERIFY_ROWS if verify else _PROMPT_ROWS
    lanes = _Lanes(kind, rows, [0] * len(rows), 1 if verify else CHUNK_SIZE, _MOST_REJECTED if verify else 0)
    weight = randn(rng, 37, 4)
    x, first = [randn(rng, n, 37) for n in rows], randn(rng, len(rows), 3, 37)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        history = {lane: first[lane] for lane in chosen}
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            raw, before = turn.gather(x), turn.stacked(history)
            y = causal_conv(raw, laid_out(before, rng), weight, turn.batch)
            after = conv_history(raw, before, turn.keep(), turn.batch)
            for index, (lane, at) in enumerate(turn.kept()):
                out[lane].append((y[at],))
                history[lane] = after[index]
        return [(*_joined(out[lane]), history[lane]) for lane in chosen]

    return Case(f"causal_conv of {kind} rows", ("causal_conv", "conv_history"), len(rows), compute, rng.device)


_KEY_HEADS, _VALUE_HEADS, _GDN_DIM = 2, 6, 128


def _head_map(device: torch.device) -> Tensor:
    return torch.arange(_VALUE_HEADS, device=device) % _KEY_HEADS


def _gdn_inputs(rng: Rng, kind: RowKind) -> Case:
    """What a verify forward leaves in its log is what it returns, and every layer's history advances by it."""
    verify = kind == "decode"
    rows = _VERIFY_ROWS if verify else _PROMPT_ROWS
    lanes = _Lanes(kind, rows, [0] * len(rows), 1 if verify else CHUNK_SIZE, _MOST_REJECTED if verify else 0)
    dim, channels = 16, 16 * (2 * _KEY_HEADS + _VALUE_HEADS)
    weight, decay, dt_bias = randn(rng, channels, 4), -randn(rng, _VALUE_HEADS).exp(), randn(rng, _VALUE_HEADS)
    raw, b, a = ([randn(rng, n, size) for n in rows] for size in (channels, _VALUE_HEADS, _VALUE_HEADS))
    first = randn(rng, len(rows), 3, channels)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        history, layer = {lane: first[lane] for lane in chosen}, int(rng.integers(2))
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            before = randn(rng, 2, turn.batch.num_spans, 3, channels)
            before[layer] = turn.stacked(history)
            log, logs = _log_for(turn.batch.num_rows + 2, channels, dim, layer, rng.device)
            x = turn.gather(raw)
            given = log if verify else None
            if not verify:
                logs[layer, : len(x)] = x
            got = gdn_inputs(
                *(x, turn.gather(b), turn.gather(a), laid_out(before[layer], rng), weight, decay, dt_bias),
                *(_KEY_HEADS, dim, turn.batch, given),
            )
            advance_history(before, logs, turn.keep(), turn.batch)
            for index, (lane, at) in enumerate(turn.kept()):
                logged = (log.k[: len(x)][at], log.g[: len(x)][at]) if verify else (got.k[at], got.g[at])
                out[lane].append((*(value[at] for value in got), *logged))
                history[lane] = before[layer, index]
        return [(*_joined(out[lane]), history[lane]) for lane in chosen]

    return Case(f"gdn_inputs of {kind} rows", ("gdn_inputs", "advance_history"), len(rows), compute, rng.device)


def _log_for(rows: int, channels: int, dim: int, layer: int, device: torch.device) -> tuple[ReplayLog, Tensor]:
    """A log whose raw inputs are those of one layer of two, and those of both."""
    raw = torch.zeros(2, rows, channels, device=device)
    sizes = (_KEY_HEADS, dim), (_VALUE_HEADS, dim), (_VALUE_HEADS,)
    return ReplayLog(raw[layer], *(torch.full((rows, *size), torch.nan, device=device) for size in sizes)), raw


def _gdn_rows(rng: Rng, rows: Sequence[int]) -> tuple[list[list[Tensor]], Tensor]:
    """(q, k, v, beta, g), each a list of one tensor per lane, and the states before."""
    per_lane = [
        (
            l2_norm(randn(rng, n, _KEY_HEADS, _GDN_DIM)) * _GDN_DIM**-0.5,
            l2_norm(randn(rng, n, _KEY_HEADS, _GDN_DIM)),
            randn(rng, n, _VALUE_HEADS, _GDN_DIM),
            sigmoid(randn(rng, n, _VALUE_HEADS)),
            -0.2 * softplus(randn(rng, n, _VALUE_HEADS)),
        )
        for n in rows
    ]
    state = 0.1 * randn(rng, len(rows), _VALUE_HEADS, _GDN_DIM, _GDN_DIM)
    return [list(column) for column in zip(*per_lane, strict=True)], state


def _gdn_verify(rng: Rng) -> Case:
    """Spans of any width, any of whose rows may have been rejected, with the log replayed behind each: as stepping."""
    lanes = _Lanes("decode", _VERIFY_ROWS, _DECODE_BASES, 1, _MOST_REJECTED)
    (inputs, first), head_map = _gdn_rows(rng, _VERIFY_ROWS), _head_map(rng.device)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        state = {lane: first[lane] for lane in chosen}
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            before = turn.stacked(state)  # not last: a state is read before the kernel in front has ended
            q, k, v, beta, g = map(turn.gather, inputs)
            o, d = gdn_verify(q, k, v, beta, g, before, head_map, turn.batch)
            for lane, at in turn.kept():
                out[lane].append((o[at], d[at]))
                state[lane] = _replayed(state[lane], k[at], d[at], g[at], head_map, rng)
        return [(*_joined(out[lane]), state[lane]) for lane in chosen]

    return Case("gdn_verify and gdn_replay", ("gdn_verify", "gdn_replay"), len(_VERIFY_ROWS), compute, rng.device)


def _gdn_mixer(rng: Rng) -> Case:
    """The same from raw inputs to rows for the next product, with what the log says of k, d and g, and histories too."""
    lanes = _Lanes("decode", _VERIFY_ROWS, _DECODE_BASES, 1, _MOST_REJECTED)
    dim, heads = _GDN_DIM, 4 * _KEY_HEADS
    channels, head_map = dim * (2 * _KEY_HEADS + heads), torch.arange(heads, device=rng.device) % _KEY_HEADS
    weight, decay, dt_bias, norm = randn(rng, channels, 4), -randn(rng, heads).exp(), randn(rng, heads), randn(rng, dim)
    sizes = ((channels,), (heads, dim), (heads,), (heads,))
    given = [[randn(rng, n, *size) for n in _VERIFY_ROWS] for size in sizes]
    squares = [1.0 + randn(rng, n).square() for n in _VERIFY_ROWS]
    bound = float(8.0 * dim**0.5 * norm.abs().max())
    states, lines = 0.1 * randn(rng, len(_VERIFY_ROWS), heads, dim, dim), randn(rng, len(_VERIFY_ROWS), 3, channels)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        state, line = {lane: states[lane] for lane in chosen}, {lane: lines[lane] for lane in chosen}
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            before, state_before = turn.stacked(line), turn.stacked(state)  # not last, as above
            raw, z, b, a = map(turn.gather, given)
            norms = F.pad(turn.gather(squares), (0, -turn.batch.num_rows % 256))
            sizes = ((channels,), (_KEY_HEADS, dim), (heads, dim), (heads,))
            log = ReplayLog(*(torch.full((len(raw) + 2, *size), torch.nan, device=rng.device) for size in sizes))
            got = gdn_mixer(
                *(raw, z, b, a, laid_out(before, rng), weight, decay, dt_bias, _KEY_HEADS, state_before, head_map),
                *(norm, 1e-6, turn.batch, log, torch.float16, norms, bound),
            )
            rows = got.values[: got.rows].float() * got.factors[: got.rows, None] if isinstance(got, Rows) else got
            after = conv_history(log.raw[: len(raw)], before, turn.keep(), turn.batch)
            for index, (lane, at) in enumerate(turn.kept()):
                out[lane].append((rows[at], log.k[at], log.d[at], log.g[at]))
                state[lane] = _replayed(state[lane], log.k[at], log.d[at], log.g[at], head_map, rng)
                line[lane] = after[index]
        return [(*_joined(out[lane]), state[lane], line[lane]) for lane in chosen]

    return Case("gdn_mixer and its commit", ("gdn_mixer", "gdn_replay"), len(_VERIFY_ROWS), compute, rng.device)


def _replayed(state: Tensor, k: Tensor, d: Tensor, g: Tensor, head_map: Tensor, rng: Rng) -> Tensor:
    """The state after the log's rows; other layers and another lane are replayed beside these."""
    layers, more = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    layer, lane = int(rng.integers(layers)), int(rng.integers(2))
    states = randn(rng, layers, 2, *state.shape)
    states[layer, lane] = state
    log = []
    for own in (k, d, g):
        rows = randn(rng, layers, len(own) + more, *own.shape[1:])
        rows[layer, : len(own)] = own
        log.append(rows)
    kept = [len(k), int(rng.integers(more + 1))]
    batch = _batch("decode", [len(k), more], [0, 0], rng, [lane, 1 - lane], spare=lane)
    keep = rng.tensor(np.array(kept + [1] * (batch.num_spans - 2)))
    k, d, g = log
    gdn_replay(states, k, d, g, keep, head_map, batch)
    return states[layer, lane]


def _gdn_prefill(rng: Rng) -> Case:
    lanes = _Lanes("prefill", _PROMPT_ROWS, _PROMPT_BASES, CHUNK_SIZE)
    (inputs, first), head_map = _gdn_rows(rng, _PROMPT_ROWS), _head_map(rng.device)

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        state = {lane: first[lane] for lane in chosen}
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            before = turn.stacked(state)
            q, k, v, beta, g = map(turn.gather, inputs)
            o, after = gdn_prefill(q, k, v, beta, g, before, head_map, turn.batch)
            for index, (lane, at) in enumerate(turn.kept()):
                out[lane].append((o[at],))
                state[lane] = after[index]
        return [(*_joined(out[lane]), state[lane]) for lane in chosen]

    return Case("gdn_prefill", ("gdn_prefill",), len(_PROMPT_ROWS), compute, rng.device)


class _Cache:
    """Pages of some lanes in random places. All memory that holds no key or value holds NaN (q8_0: NaN times junk), and
    the page table names pages of others wherever a lane owns none."""

    def __init__(self, kind: CacheType, heads: int, dim: int, lengths: dict[int, int], rng: Rng) -> None:
        counts = {lane: -(-length // PAGE_SIZE) for lane, length in lengths.items()}
        total, width = sum(counts.values()) + 3, max(counts.values()) + int(rng.integers(5))
        order = rng.tensor(rng.permutation(total))
        self.tables: dict[int, Tensor] = {}
        for lane, count in counts.items():
            self.tables[lane] = rng.tensor(rng.integers(0, total, width))
            self.tables[lane][:count], order = order[:count], order[count:]
        self.k, self.v = (_filled_with_nan(allocate_pages(kind, total, heads, dim, rng.device), rng) for _ in range(2))

    def slots(self, lane: int, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, device=self.k.data.device)
        return self.tables[lane][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def table(self, places: Tensor, lanes: Sequence[int], rng: Rng) -> Tensor:
        """The page table in which ``lanes`` have the first of these places; the others name any pages."""
        tables = torch.stack([self.tables[lane] for lane in lanes])
        table = rng.tensor(rng.integers(0, len(self.k.data), (int(places.max()) + 1, tables.shape[1])))
        table[places[: len(lanes)]] = tables
        return table

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write_rows(self.k, slots, k)
        write_rows(self.v, slots, v)


def _filled_with_nan(pages: PagedTensor, rng: Rng) -> PagedTensor:
    if pages.scale is None:
        pages.data.fill_(torch.nan)
    else:
        pages.data.copy_(rng.tensor(rng.integers(-127, 128, pages.data.shape)))
        pages.scale.fill_(torch.nan)
    return pages


def _kept_rows(rng: Rng) -> Case:
    """What a commit stores of spans whose last rows may have been rejected."""
    lanes = _Lanes("decode", _VERIFY_ROWS, _DECODE_BASES, 1, _MOST_REJECTED)
    k, v = ([randn(rng, n, 2, 64) for n in _VERIFY_ROWS] for _ in range(2))

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        ends = {lane: _DECODE_BASES[lane] + _VERIFY_ROWS[lane] for lane in chosen}
        pages = _Cache("q8_0", 2, 64, {lane: end + _MOST_REJECTED for lane, end in ends.items()}, rng)
        for turn in lanes.turns(chosen, rng):
            places = rng.tensor(rng.permutation(turn.batch.num_spans + 2)[: turn.batch.num_spans])
            table = pages.table(places, [piece.lane for piece in turn.pieces], rng)
            staged = [StagedRows(cache, turn.gather(x), table) for cache, x in ((pages.k, k), (pages.v, v))]
            keep = turn.keep()
            write_kept(staged, keep, replace(turn.batch, lanes=places))
        slots = [pages.slots(lane, _DECODE_BASES[lane], ends[lane]) for lane in chosen]
        parts = [part for cache in (pages.k, pages.v) for part in (cache.data, cache.scale) if part is not None]
        return [tuple(part.flatten(0, 1)[at] for part in parts) for at in slots]

    return Case("write_kept", ("write_kept",), len(_VERIFY_ROWS), compute, rng.device)


def _attention(
    rng: Rng,
    kind: RowKind,
    cache: CacheType,
    *,
    causal: bool = True,
    window: int | None = None,
    dim: int = 64,
    stretch: int = 1,
    gated: bool = False,
) -> Case:
    """Causal rows may be cut; a block that sees itself in both directions may not. ``stretch`` multiplies the contexts of
    decode rows and the lengths of prompts, so that the work no longer fits one group of key blocks. Rows that are ``gated``
    leave as the next product reads them."""
    verify = kind == "decode"
    rows, bases = list(_VERIFY_ROWS if verify else _PROMPT_ROWS), list(_DECODE_BASES if verify else _PROMPT_BASES)
    if verify:
        bases = [stretch * base for base in bases]
    else:
        rows = [stretch * n for n in rows]
    grid = (1 if verify else CHUNK_SIZE) if causal else 0
    rejected = _MOST_REJECTED if verify and causal else 0
    lanes = _Lanes(kind, rows, bases, grid, rejected)
    q = [randn(rng, n, 4, dim) for n in rows]
    old = [(randn(rng, base, 2, dim), randn(rng, base, 2, dim)) for base in bases]
    k, v = ([randn(rng, n, 2, dim) for n in rows] for _ in range(2))
    gate = [8.0 * randn(rng, n, 4, dim) for n in rows]
    options: dict[str, Any] = {"scale": dim**-0.5, "causal": causal}
    half = torch.float16

    def compute(chosen: Sequence[int], rng: Rng) -> Outputs:
        pages = _Cache(cache, 2, dim, {lane: bases[lane] + rows[lane] + rejected for lane in chosen}, rng)
        for lane in chosen:
            pages.write(pages.slots(lane, 0, bases[lane]), *old[lane])
        out: dict[int, list[tuple[Tensor, ...]]] = {lane: [] for lane in chosen}
        for turn in lanes.turns(chosen, rng):
            places = rng.tensor(rng.permutation(turn.batch.num_spans + 2)[: turn.batch.num_spans])
            batch = replace(turn.batch, lanes=places)
            table = pages.table(places, [piece.lane for piece in turn.pieces], rng)
            starts = [(piece, bases[piece.lane] + piece.start) for piece in turn.pieces]
            slots = torch.cat([pages.slots(piece.lane, start, start + piece.rows) for piece, start in starts])
            pages.write(slots, turn.gather(k)[: turn.rows], turn.gather(v)[: turn.rows])
            sources: tuple[Any, ...] = (pages.k, pages.v, table, batch)
            if gated:
                o = gated_attention(turn.gather(q), turn.gather(gate), *sources, **options, operand=half, bound=_VALUE_BOUND)
            else:
                o = attention(turn.gather(q), *sources, **options, window=window)
            parts = (o.values, o.factors) if isinstance(o, Rows) else (o,)
            for lane, at in turn.kept():
                out[lane].append(tuple(part[at] for part in parts))
        return [_joined(out[lane]) for lane in chosen]

    sight = "causal" if causal else "block-bidirectional"
    op = "gated_attention" if gated else "attention"
    name = f"{op} {kind} {sight} over {cache}" + (f", window {window}" if window else "")
    return Case(name + (", long" if stretch > 1 else ""), (op,), len(rows), compute, rng.device)
