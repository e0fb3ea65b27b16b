"""``StatePool`` owns all state of all lanes, and changes it in one place: ``commit``.

A round opens a transaction, its forwards read committed state and leave what they add either at positions that are not yet
visible (K/V pages) or in the transaction (replay logs, new prefill states, raw convolution inputs, drafter context rows).
``commit`` moves everything together; after ``abort`` every committed byte is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.batch import PackedBatch, pack
from paceline.config import CHUNK_SIZE, PAGE_SIZE
from paceline.ops.conv import conv_history
from paceline.ops.gdn import gdn_replay
from paceline.ops.kv import PagedTensor, allocate_pages, write_rows
from paceline.state.pages import DUMMY_PAGE, PageAllocator
from paceline.state.shapes import StateShape, pages_for
from paceline.types import RowKind
from paceline.views import AttentionView, ContextView, GdnView, TargetViews


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Rows [start, start + length) of one lane; ``drafting`` lanes also get room for a drafter's block behind start."""

    lane: int
    start: int
    length: int
    kind: RowKind
    drafting: bool = False


@dataclass(slots=True)
class Half:
    """The spans of one kind in a transaction: their batch, and the views that a forward reads and fills."""

    spans: tuple[SpanRows, ...]
    batch: PackedBatch
    target: TargetViews
    context: list[ContextView]


@dataclass(slots=True)
class Txn:
    """One open round. ``decode`` and ``prefill`` are None when the round has no such rows."""

    spans: tuple[SpanRows, ...]
    decode: Half | None = None
    prefill: Half | None = None


@dataclass(frozen=True, slots=True)
class _Replay:
    """Rows for every Gated-DeltaNet layer: k [layers, N, Hk, Dk], d [layers, N, Hv, Dv], g [layers, N, Hv]."""

    k: Tensor
    d: Tensor
    g: Tensor


@dataclass(frozen=True, slots=True)
class _Advance:
    """What the lanes of a batch become with its first ``keep`` [S] rows: their convolution history [layers, S, w-1, C], and
    their recurrent state, either [layers, S, Hv, Dk, Dv] or by a log."""

    batch: PackedBatch
    keep: Tensor
    history: Tensor
    state: Tensor | _Replay


@dataclass(slots=True)
class _Lane:
    """``committed`` tokens are in state; ``pages`` cover them (and, inside a transaction, the round's rows);
    ``reserved`` pages may be owned at most."""

    committed: int = 0
    pages: list[int] = field(default_factory=list)
    reserved: int = 0


class StatePool:
    def __init__(self, shape: StateShape, head_map: Tensor, device: torch.device) -> None:
        """``head_map`` [Hv]: the key head of each Gated-DeltaNet value head."""
        self.shape, self.device, self.head_map = shape, device, head_map.to(device)
        target, drafter = shape.target, shape.drafter
        self.allocator = PageAllocator(shape.pages)
        self._lanes: dict[int, _Lane] = {}
        self._free_lanes = list(range(shape.lanes - 1, -1, -1))
        self._open: Txn | None = None

        self._attention = [i for i, kind in enumerate(target.layer_types) if kind == "attention"]
        self._gdn = [i for i, kind in enumerate(target.layer_types) if kind == "gdn"]
        kv = (shape.pages + 1, target.num_kv_heads, target.head_dim, device)
        self.k = [allocate_pages(shape.cache_type_k, *kv) for _ in self._attention]
        self.v = [allocate_pages(shape.cache_type_v, *kv) for _ in self._attention]
        heads, dk, dv = target.gdn_value_heads, target.gdn_key_dim, target.gdn_value_dim
        self.gdn = torch.zeros(len(self._gdn), shape.lanes, heads, dk, dv, device=device)
        self.history = torch.zeros(len(self._gdn), shape.lanes, target.conv_kernel - 1, target.conv_channels, device=device)
        self.draft_k: list[PagedTensor] = []
        self.draft_v: list[PagedTensor] = []
        for sliding in drafter.sliding if drafter else ():
            assert drafter is not None
            pages = 1 + (shape.lanes * shape.ring_pages if sliding else shape.pages)
            kv = (pages, drafter.num_kv_heads, drafter.head_dim, device)
            self.draft_k.append(allocate_pages(shape.draft_cache_type, *kv))
            self.draft_v.append(allocate_pages(shape.draft_cache_type, *kv))

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of ``tokens`` tokens could ever be admitted."""
        return self.shape.reserve(tokens) <= self.allocator.total

    def admit(self, tokens: int) -> int | None:
        """A zeroed lane with room for ``tokens`` tokens reserved, or None while there is no lane or no room."""
        pages = self.shape.reserve(tokens)
        reserved = sum(lane.reserved for lane in self._lanes.values())
        if not self._free_lanes or reserved + pages > self.allocator.total:
            return None
        lane = self._free_lanes.pop()
        self._lanes[lane] = _Lane(reserved=pages)
        self.gdn[:, lane] = 0.0
        self.history[:, lane] = 0.0
        return lane

    def release(self, lane: int) -> None:
        assert self._open is None, "release inside a transaction"
        self.allocator.give_back(self._lanes.pop(lane).pages)
        self._free_lanes.append(lane)

    def committed(self, lane: int) -> int:
        return self._lanes[lane].committed

    # -- the transaction -----------------------------------------------------------------------------------------------

    def begin(self, spans: Sequence[SpanRows]) -> Txn:
        """Reserve pages for every row of the round and hand out its views. Nothing committed changes."""
        assert self._open is None, "a transaction is open"
        self._open = txn = Txn(tuple(spans))
        try:
            for span in spans:
                self._reserve(span)
            txn.decode, txn.prefill = self._half("decode"), self._half("prefill")
        except Exception:
            self.abort(txn)
            raise
        return txn

    def _reserve(self, span: SpanRows) -> None:
        """Give the lane pages for the rows of its span."""
        lane = self._lanes[span.lane]
        assert span.start == lane.committed, f"span at {span.start}, lane committed {lane.committed}"
        assert span.kind == "decode" or span.start % CHUNK_SIZE == 0, f"prompt chunk at {span.start}"
        rows = max(span.length, self.shape.draft_rows if span.drafting else 0)
        missing = min(self.shape.reserve(span.start + span.length), pages_for(span.start + rows)) - len(lane.pages)
        assert len(lane.pages) + missing <= lane.reserved, "a lane outgrew its reservation"
        lane.pages += self.allocator.take(max(0, missing))

    def commit(self, txn: Txn, keep: Sequence[int]) -> None:
        """Make the first ``keep[i]`` rows of span i part of its lane's state, everything together."""
        assert txn is self._open, "not the open transaction"
        kept = dict(zip(txn.spans, keep, strict=True))
        assert all(1 <= kept[span] <= span.length for span in txn.spans), "keep outside 1 … length"
        if txn.prefill:
            assert all(kept[span] == span.length for span in txn.prefill.spans), "prompt rows are always kept"
        # First all that computes, and may therefore fail; what it overwrites, a retry of the round overwrites again. Then
        # the replay, which changes every lane or none, and after it nothing but copies into place.
        advanced = []
        for half in filter(None, (txn.decode, txn.prefill)):
            keeps = [kept[span] for span in half.spans]
            advanced.append(self._advanced(half, torch.tensor(keeps, device=self.device)))
            self._write_context(half, keeps)
        for advance in advanced:
            self._apply(advance)
        for span in txn.spans:
            self._lanes[span.lane].committed += kept[span]
        self._close()

    def abort(self, txn: Txn) -> None:
        """Forget the round."""
        assert txn is self._open, "not the open transaction"
        self._close()

    def _close(self) -> None:
        """Return surplus tail pages and end the transaction."""
        assert self._open is not None
        for span in self._open.spans:
            lane = self._lanes[span.lane]
            used = pages_for(lane.committed)
            self.allocator.give_back(lane.pages[used:])
            del lane.pages[used:]
        self._open = None

    def _advanced(self, half: Half, keep: Tensor) -> _Advance:
        views = [view for view in half.target.layers if isinstance(view, GdnView)]
        history = []
        for view in views:
            assert view.raw is not None, "the forward left no inputs"
            history.append(conv_history(view.raw, view.history, keep, half.batch))
        state = _new_states(views) if half.batch.kind == "prefill" else _logs(views)
        return _Advance(half.batch, keep, torch.stack(history), state)

    def _apply(self, to: _Advance) -> None:
        lanes = to.batch.lanes
        if isinstance(to.state, _Replay):
            gdn_replay(self.gdn, to.state.k, to.state.d, to.state.g, to.keep, self.head_map, to.batch)
        else:
            self.gdn[:, lanes] = to.state
        self.history[:, lanes] = to.history

    def _write_context(self, half: Half, keep: list[int]) -> None:
        """Store the kept drafter context rows; of a run longer than the ring only the last ring's worth."""
        drafter = self.shape.drafter
        if drafter is None:
            return
        ring = self.shape.ring_pages * PAGE_SIZE
        for layer, view in enumerate(half.context):
            assert view.k is not None and view.v is not None, "the forward left no drafter context"
            sliding = drafter.sliding[layer]
            rows: list[Tensor] = []
            for rows_kept, offset in zip(keep, half.batch.offsets, strict=True):
                first = max(0, rows_kept - ring) if sliding else 0
                rows.append(torch.arange(offset + first, offset + rows_kept))
            at = torch.cat(rows).to(self.device)
            table = self._page_table(half.spans, sliding)
            slots = _slots(table, half.batch.row_span[at], half.batch.positions[at])
            write_rows(self.draft_k[layer], slots, view.k[at])
            write_rows(self.draft_v[layer], slots, view.v[at])

    # -- views ---------------------------------------------------------------------------------------------------------

    def _half(self, kind: RowKind) -> Half | None:
        assert self._open is not None
        spans = tuple(span for span in self._open.spans if span.kind == kind)
        if not spans:
            return None
        batch = self._pack(kind, spans, [span.length for span in spans])
        table = self._page_table(spans, sliding=False)
        slots = _slots(table, batch.row_span, batch.positions)
        layers: list[AttentionView | GdnView] = []
        attention, gdn = iter(zip(self.k, self.v, strict=True)), iter(range(len(self._gdn)))
        for layer_type in self.shape.target.layer_types:
            if layer_type == "attention":
                k, v = next(attention)
                layers.append(AttentionView(k, v, table, slots))
            else:
                index = next(gdn)
                layers.append(GdnView(self.gdn[index], self.history[index]))
        return Half(spans, batch, TargetViews(layers), [ContextView() for _ in self.draft_k])

    def draft_block(self, txn: Txn) -> tuple[PackedBatch, list[AttentionView]]:
        """Batch and views of one drafter block behind the committed context of each drafting lane of the round."""
        assert txn is self._open and self.shape.drafter is not None
        spans = tuple(span for span in txn.spans if span.drafting)
        rows = self.shape.draft_rows
        batch = self._pack("decode", spans, [rows] * len(spans))
        tables = {sliding: self._page_table(spans, sliding) for sliding in set(self.shape.drafter.sliding)}
        slots = {sliding: _slots(table, batch.row_span, batch.positions) for sliding, table in tables.items()}
        views = [
            AttentionView(self.draft_k[layer], self.draft_v[layer], tables[sliding], slots[sliding])
            for layer, sliding in enumerate(self.shape.drafter.sliding)
        ]
        return batch, views

    def _pack(self, kind: RowKind, spans: Sequence[SpanRows], lengths: list[int]) -> PackedBatch:
        return pack(kind, lengths, [span.start for span in spans], self.device, [span.lane for span in spans])

    def _page_table(self, spans: Sequence[SpanRows], sliding: bool) -> Tensor:
        """[S, P]: the page of each PAGE_SIZE positions of each span's lane; rings repeat their pages."""
        width = max(pages_for(span.start + max(span.length, self.shape.draft_rows)) for span in spans)
        if sliding:
            ring = self.shape.ring_pages
            first = 1 + ring * torch.tensor([span.lane for span in spans])
            return (first.unsqueeze(1) + torch.arange(width) % ring).to(self.device)
        table = torch.full((len(spans), width), DUMMY_PAGE)
        for row, span in enumerate(spans):
            pages = self._lanes[span.lane].pages
            table[row, : len(pages)] = torch.tensor(pages)
        return table.to(self.device)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants between rounds, as assertions."""
        assert self._open is None, "a transaction is open"
        owned = [page for lane in self._lanes.values() for page in lane.pages]
        everything = owned + self.allocator.free_pages()
        assert len(everything) == self.allocator.total, "pages lost or made up"
        assert len(set(everything)) == len(everything), "a page has two owners"
        assert DUMMY_PAGE not in everything, "the dummy page is owned"
        for number, lane in self._lanes.items():
            assert len(lane.pages) == pages_for(lane.committed), f"lane {number}: pages do not cover its tokens"
            assert len(lane.pages) <= lane.reserved, f"lane {number} outgrew its reservation"
        assert sum(lane.reserved for lane in self._lanes.values()) <= self.allocator.total, "more reserved than there is"
        assert sorted([*self._lanes, *self._free_lanes]) == list(range(self.shape.lanes)), "a lane is lost"


def _new_states(views: list[GdnView]) -> Tensor:
    states = []
    for view in views:
        assert view.new_state is not None, "the forward left no state"
        states.append(view.new_state)
    return torch.stack(states)


def _logs(views: list[GdnView]) -> _Replay:
    logs = []
    for view in views:
        assert view.replay is not None, "the forward left no log"
        logs.append(view.replay)
    k, d, g = zip(*logs, strict=True)
    return _Replay(torch.stack(k), torch.stack(d), torch.stack(g))


def _slots(table: Tensor, row_span: Tensor, positions: Tensor) -> Tensor:
    """Slot (page * PAGE_SIZE + offset) of each row."""
    return table[row_span, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
