"""``StatePool`` owns all state of all lanes, and changes it in one place: ``commit``.

A round opens a transaction, its forwards read committed state and leave what they add either at positions that are not yet
visible (K/V pages, features) or in the transaction (replay logs, new prefill states, raw convolution inputs, the drafter's
context of prompts). ``commit`` moves everything together; after ``abort`` every committed byte is as it was.

Generated rows leave features. Their context is made of these (``write_context``) when the drafter is asked next, or when
enough of them wait (``backlog``): where nobody drafts that is once for many rounds. It is of committed rows and the same
whenever it is made, so it needs no transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch, pack
from paceline.config import CHUNK_SIZE, PAGE_SIZE
from paceline.ops.conv import advance_history
from paceline.ops.gdn import ReplayLog, gdn_replay
from paceline.ops.kv import PagedTensor, StagedRows, allocate_pages, copy_pages, write_kept
from paceline.state.pages import DUMMY_PAGE, PageAllocator
from paceline.state.shapes import StateShape, pages_for
from paceline.transfer import to_device
from paceline.types import RowKind
from paceline.views import AttentionView, ContextView, GdnRoom, GdnView, TargetViews


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Rows [start, start + length) of one lane. ``drafting`` lanes also get room for a drafter's block behind start. With
    ``ahead`` there is room, as far as it is reserved, for what may be run behind the rows that are kept: such a block, or a
    row. The lane keeps it until a round without."""

    lane: int
    start: int
    length: int
    kind: RowKind
    drafting: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class LaneFork:
    """A ``lane`` fresh from ``admit`` that takes over what ``source`` holds behind its prompt rows of this round."""

    source: int
    lane: int


@dataclass(slots=True)
class Half:
    """The spans of one kind in a transaction as a forward sees them: their batch, and the views that it reads and fills. For
    the drafter, a prefill forward stages ``context``, and a verify forward keeps its ``features`` [lanes, R, F]."""

    batch: PackedBatch
    target: TargetViews
    context: list[ContextView]
    features: Tensor | None

    def afresh(self) -> Half:
        """The same views for other contents of the batch's tensors."""
        return replace(self, batch=self.batch.without_plans())


@dataclass(slots=True)
class Txn:
    """One open round. ``decode`` and ``prefill`` are None when the round has no such rows."""

    spans: tuple[SpanRows, ...]
    forks: tuple[LaneFork, ...] = ()
    decode: Half | None = None
    prefill: Half | None = None

    def of_kind(self, kind: RowKind) -> tuple[SpanRows, ...]:
        return tuple(span for span in self.spans if span.kind == kind)


@dataclass(slots=True)
class _Lane:
    """``committed`` tokens are in state, ``projected`` of them in the drafter's context too; ``pages`` cover them (and,
    inside a transaction, the round's rows; behind it, what has been run ahead), of which those that are full may be shared
    with other lanes; ``reserved`` pages may be owned at most. A ``fresh`` lane's state is somebody else's until its first
    round zeroes it, or a fork is committed into it. ``reading``: where prompt rows end that a forward is over whose round
    has not come."""

    committed: int = 0
    projected: int = 0
    pages: list[int] = field(default_factory=list)
    reserved: int = 0
    fresh: bool = True
    reading: int = 0


class StatePool:
    def __init__(self, shape: StateShape, head_map: Tensor, device: torch.device, verify_rows: int | None = None) -> None:
        """``head_map`` [Hv]: the key head of each Gated-DeltaNet value head. ``verify_rows``: the widest verify span, by
        default the drafter's block."""
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
        lanes, layers = shape.lanes + 1, len(self._gdn)  # the last lane is nobody's: the padding of a batch is of it
        heads, dk, dv = target.gdn_value_heads, target.gdn_key_dim, target.gdn_value_dim
        self.gdn = torch.zeros(layers, lanes, heads, dk, dv, device=device)
        self.history = torch.zeros(layers, lanes, target.conv_kernel - 1, target.conv_channels, device=device)
        rows = shape.lanes * (verify_rows or max(1, shape.draft_rows)) + 1
        self.log = ReplayLog(
            torch.zeros(layers, rows, target.conv_channels, device=device),
            torch.zeros(layers, rows, target.gdn_key_heads, dk, device=device),
            torch.zeros(layers, rows, heads, dv, device=device),
            torch.zeros(layers, rows, heads, device=device),
        )
        self.draft_k: list[PagedTensor] = []
        self.draft_v: list[PagedTensor] = []
        for sliding in drafter.sliding if drafter else ():
            assert drafter is not None
            pages = 1 + (shape.lanes * shape.ring_pages if sliding else shape.pages)
            kv = (pages, drafter.num_kv_heads, drafter.head_dim, device)
            self.draft_k.append(allocate_pages(shape.draft_cache_type, *kv))
            self.draft_v.append(allocate_pages(shape.draft_cache_type, *kv))
        self.features = torch.zeros(lanes, shape.feature_rows, shape.features, device=device) if drafter else None
        # pages of every PAGE_SIZE positions of every lane: the allocator's, kept on both sides, and the rings'. Prompts have
        # a table of their own: a forward over decode rows may have been begun for a lane that is gone, and must not find
        # there the pages of who has the lane now
        width = pages_for(shape.max_ctx + shape.draft_rows)
        self._table = np.full((lanes, width), DUMMY_PAGE, np.int32)
        self.table, self.prompt_table = to_device(self._table.copy(), device), to_device(self._table.copy(), device)
        self._unsent = self._unsent_prompts = False
        self.ring_table = to_device(_rings(shape, width), device)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Lanes, free or not."""
        return self.shape.lanes

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits with nobody beside it."""
        return self.shape.longest

    def fits(self, tokens: Iterable[int]) -> bool:
        """Whether sequences of so many tokens each fit together."""
        return sum(map(self.shape.reserve, tokens)) <= self.allocator.total

    def admit(self, tokens: int) -> int | None:
        """A lane with room for ``tokens`` tokens reserved, or None while there is no lane or no room."""
        pages = self.shape.reserve(tokens)
        if not self._free_lanes or self._reserved + pages > self.allocator.total:
            return None
        lane = self._free_lanes.pop()
        self._lanes[lane] = _Lane(reserved=pages)
        return lane

    def grow(self, lane: int, tokens: int) -> bool:
        """Reserve room for ``tokens`` tokens of a lane in all; False, with nothing changed, while there is none."""
        more = self.shape.reserve(tokens) - self._lanes[lane].reserved
        if more > 0 and self._reserved + more > self.allocator.total:
            return False
        self._lanes[lane].reserved += max(0, more)
        return True

    @property
    def _reserved(self) -> int:
        return sum(lane.reserved for lane in self._lanes.values())

    def release(self, lane: int) -> None:
        assert self._open is None, "release inside a transaction"
        self.allocator.give_back(self._lanes.pop(lane).pages)
        self._table[lane] = DUMMY_PAGE
        self._table_changed()
        self._free_lanes.append(lane)

    def page(self, lane: int, position: int) -> int:
        """The page for a position; ``DUMMY_PAGE`` where the lane has none."""
        return int(self._table[lane, position // PAGE_SIZE])

    def pages(self, lane: int) -> tuple[int, ...]:
        return tuple(self._lanes[lane].pages)

    def committed(self, lane: int) -> int:
        return self._lanes[lane].committed

    def backlog(self, lane: int) -> int:
        """The last tokens of a lane of which there are features, but no context: at most a drafter's block."""
        return self._lanes[lane].committed - self._lanes[lane].projected

    def caught_up(self, lanes: Iterable[int]) -> None:
        """The context of all that these lanes have committed has been made, with ``write_context``."""
        for lane in lanes:
            self._lanes[lane].projected = self._lanes[lane].committed

    # -- the transaction -----------------------------------------------------------------------------------------------

    def begin(
        self,
        spans: Sequence[SpanRows],
        forks: Sequence[LaneFork] = (),
        reading: Sequence[SpanRows] = (),
        *,
        packed: bool = True,
    ) -> Txn:
        """Reserve pages for every row of the round and hand out its views. Nothing committed changes. ``reading``: prompt
        rows that are read from now on but are of a later transaction. Unless ``packed`` the caller sends the tables and
        puts in the halves."""
        assert self._open is None, "a transaction is open"
        self._open = txn = Txn(tuple(spans), tuple(forks))
        try:
            for span in spans:
                self._reserve(span)
            for span in reading:
                self._reserve(span)
                lane = self._lanes[span.lane]
                # a forward that was forgotten may have had more
                lane.reading = max(lane.reading, span.start + span.length)
            for fork in forks:
                self._reserve_fork(fork, next(span for span in spans if span.lane == fork.source))
            self._zero_fresh(span.lane for span in (*spans, *reading))
            if packed:
                self.send_prompt_table()
                self.send_table()
                txn.decode, txn.prefill = self._half("decode"), self._half("prefill")
        except Exception:
            self.abort(txn)
            raise
        return txn

    def _table_changed(self) -> None:
        self._unsent = self._unsent_prompts = True

    def send_prompt_table(self) -> None:
        """What has changed, for prompt rows that are read from now on, and while none are read."""
        if self._unsent_prompts:
            to_device(self._table, self.device, self.prompt_table)
            self._unsent_prompts = False

    def send_table(self) -> None:
        """The same for decode rows and the commit: behind what was begun before, in its order."""
        if self._unsent:
            to_device(self._table, self.device, self.table)
            self._unsent = False

    def _zero_fresh(self, numbers: Iterable[int]) -> None:
        """Before their first rows, and in the place of a round where all that is sent to the device is in order with it."""
        fresh = [number for number in numbers if self._lanes[number].fresh]
        for number in fresh:
            self.gdn[:, number] = 0.0
            self.history[:, number] = 0.0
            self._lanes[number].fresh = False

    def _reserve(self, span: SpanRows) -> None:
        """Give the lane pages for the rows of its span."""
        lane = self._lanes[span.lane]
        assert span.start == lane.committed, f"span at {span.start}, lane committed {lane.committed}"
        assert span.kind == "decode" or span.start % CHUNK_SIZE == 0, f"prompt chunk at {span.start}"
        block = self.shape.draft_rows if span.drafting else 0
        rows = span.length + self._room_ahead if span.ahead else max(span.length, block)
        assert pages_for(span.start + span.length) <= lane.reserved, "a lane outgrew its reservation"
        missing = min(lane.reserved, pages_for(span.start + rows)) - len(lane.pages)
        if missing > 0:
            lane.pages += self.allocator.take(missing)
            self._table[span.lane, : len(lane.pages)] = lane.pages
            self._table_changed()

    @property
    def _room_ahead(self) -> int:
        """Rows of a lane that may be run ahead."""
        return max(self.shape.draft_rows, 1)

    def _reserve_fork(self, fork: LaneFork, span: SpanRows) -> None:
        """Give the lane its source's full pages, and one of its own for the partly filled one."""
        lane, end = self._lanes[fork.lane], span.start + span.length
        assert span.kind == "prefill" and not lane.pages, "a fork is made behind prompt rows, into a fresh lane"
        assert pages_for(end) <= lane.reserved, "a lane outgrew its reservation"
        own = self.allocator.take(pages_for(end) - end // PAGE_SIZE)
        lane.pages = self.allocator.share(self._lanes[fork.source].pages[: end // PAGE_SIZE]) + own
        self._table[fork.lane, : len(lane.pages)] = lane.pages
        self._table_changed()

    def commit(self, txn: Txn, keep: Sequence[int]) -> None:
        """Make the first ``keep[i]`` rows of span i part of its lane's state, everything together."""
        assert txn is self._open, "not the open transaction"
        _check_keep(txn, keep)
        of_decode = [rows for span, rows in zip(txn.spans, keep, strict=True) if span.kind == "decode"]
        self.apply(txn, torch.tensor(of_decode, dtype=torch.long, device=self.device))
        self.settle(txn, keep)

    def apply(self, txn: Txn, keep: Tensor) -> None:
        """The part of ``commit`` that runs on the device: ``keep`` [S] of the decode spans. ``settle`` must follow."""
        assert txn is self._open, "not the open transaction"
        # First all that computes, and may therefore fail; what it overwrites, a retry of the round overwrites again. Then
        # the replay, which changes every lane or none, and after it nothing but copies into place.
        if txn.prefill and txn.prefill.context:
            self.write_context(txn.prefill.context, txn.prefill.batch.span_lengths, txn.prefill.batch)
        prompts = txn.of_kind("prefill")
        advanced = self._advanced(txn.prefill, [span.lane for span in prompts]) if txn.prefill else None
        if txn.decode:
            batch = txn.decode.batch
            gdn_replay(self.gdn, self.log.k, self.log.d, self.log.g, keep, self.head_map, batch)
            advance_history(self.history, self.log.raw, keep, batch)
        if advanced:
            torch._foreach_copy_(*advanced)
        for fork in txn.forks:
            self._copy(fork)

    def _copy(self, fork: LaneFork) -> None:
        """What a fork does not share: the last page, the recurrent state, the drafter's rings."""
        for state in (self.gdn, self.history):
            state[:, fork.lane] = state[:, fork.source]
        source, lane = self._lanes[fork.source].pages, self._lanes[fork.lane].pages
        last, rings = len(lane) - 1, self.shape.ring_pages
        sliding = self.shape.drafter.sliding if self.shape.drafter else ()
        drafter = list(zip((*sliding, *sliding), (*self.draft_k, *self.draft_v), strict=True))
        if source[last] != lane[last]:
            for cache in (*self.k, *self.v, *(cache for ring, cache in drafter if not ring)):
                copy_pages(cache, source[last], lane[last])
        for cache in (cache for ring, cache in drafter if ring):
            copy_pages(cache, 1 + rings * fork.source, 1 + rings * fork.lane, rings)

    def settle(self, txn: Txn, keep: Sequence[int]) -> None:
        """The part of ``commit`` that is bookkeeping: what ``apply`` was told, on the host, for every span."""
        assert txn is self._open, "not the open transaction"
        _check_keep(txn, keep)
        for span, rows in zip(txn.spans, keep, strict=True):
            lane = self._lanes[span.lane]
            lane.committed += rows
            if span.kind == "prefill" or self.features is None:
                lane.projected = lane.committed
            assert self.backlog(span.lane) <= self.shape.draft_rows, "features of committed rows are lost"
        for fork in txn.forks:
            lane, source = self._lanes[fork.lane], self._lanes[fork.source]
            lane.committed, lane.projected, lane.fresh = source.committed, source.projected, False
        self._close()

    def abort(self, txn: Txn) -> None:
        """Forget the round."""
        assert txn is self._open, "not the open transaction"
        self._close()

    def _close(self) -> None:
        """Return surplus tail pages and what the forwards left, and end the transaction."""
        assert self._open is not None
        self._open.decode = self._open.prefill = None
        ends = [(span.lane, self._room_ahead if span.ahead else 0) for span in self._open.spans]
        for number, ahead in [*ends, *((fork.lane, 0) for fork in self._open.forks)]:
            lane = self._lanes[number]
            lane.reading = 0
            used = pages_for(lane.committed + ahead)
            if used < len(lane.pages):
                self.allocator.give_back(lane.pages[used:])
                del lane.pages[used:]
                self._table[number, used:] = DUMMY_PAGE
                self._table_changed()
        self._open = None

    def write_context(self, views: Sequence[ContextView], keep: Tensor, batch: PackedBatch) -> None:
        """Store the context rows in ``views``, one for each drafter layer, among the first ``keep`` [S] of each span."""
        drafter, staged = self.shape.drafter, []
        assert drafter is not None, "context without a drafter"
        for layer, view in enumerate(views):
            assert view.k is not None and view.v is not None, "the forward left no drafter context"
            ring = self.shape.ring_pages * PAGE_SIZE if drafter.sliding[layer] else None
            table = self.table if ring is None else self.ring_table
            staged.append(StagedRows(self.draft_k[layer], view.k, table, ring))
            staged.append(StagedRows(self.draft_v[layer], view.v, table, ring))
        write_kept(staged, keep, batch)

    def _advanced(self, half: Half, lanes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """What to overwrite in the lanes of a prefill forward's first spans, layer by layer, and with what."""
        places: list[Tensor] = []
        values: list[Tensor] = []
        for lane in lanes:
            places += [*self.gdn[:, lane].unbind(), *self.history[:, lane].unbind()]
        views = [view for view in half.target.layers if isinstance(view, GdnView)]
        states = [_rows(view.new_state) for view in views]
        histories = [_rows(view.new_history) for view in views]
        for index in range(len(lanes)):
            values += [rows[index] for rows in (*states, *histories)]
        return places, values

    # -- views ---------------------------------------------------------------------------------------------------------

    def _half(self, kind: RowKind) -> Half | None:
        assert self._open is not None
        spans = self._open.of_kind(kind)
        if not spans:
            return None
        lengths, starts, lanes = zip(*((span.length, span.start, span.lane) for span in spans), strict=True)
        return self.half(pack(kind, lengths, starts, self.device, lanes))

    def half(self, batch: PackedBatch, room: GdnRoom | None = None) -> Half:
        """Views for a forward over ``batch``. Those of a decode batch stay valid as long as the pool lives. ``room`` is what
        ``prompt_room`` gave, for a prefill batch."""
        layers: list[AttentionView | GdnView] = []
        attention, gdn = iter(zip(self.k, self.v, strict=True)), iter(range(len(self._gdn)))
        table = self.prompt_table if batch.kind == "prefill" else self.table
        for layer_type in self.shape.target.layer_types:
            if layer_type == "attention":
                layers.append(AttentionView(*next(attention), table))
            else:
                index = next(gdn)
                log = ReplayLog(*(part[index] for part in self.log)) if batch.kind == "decode" else None
                own = GdnRoom(*(part[index] for part in room)) if room else None
                layers.append(GdnView(self.gdn[index], self.history[index], log, own))
        if batch.kind == "prefill":
            return Half(batch, TargetViews(layers), self.context_views(), None)
        return Half(batch, TargetViews(layers), [], self.features)

    def context_views(self) -> list[ContextView]:
        """Empty ones, for each drafter layer."""
        return [ContextView() for _ in self.draft_k]

    def prompt_room(self, spans: int) -> GdnRoom:
        """Room, in all layers, for what a prefill forward of up to so many spans leaves for the commit."""
        places = ((len(state), spans, *state.shape[2:]) for state in (self.gdn, self.history))
        return GdnRoom(*(torch.zeros(place, device=self.device) for place in places))

    @property
    def spare_lane(self) -> int:
        """The lane of padding: its state is nobody's and its only page is the dummy."""
        return self.shape.lanes

    def draft_views(self) -> list[AttentionView]:
        """The drafter's K/V, per layer; valid as long as the pool lives."""
        assert self.shape.drafter is not None
        tables = (self.ring_table if sliding else self.table for sliding in self.shape.drafter.sliding)
        return [AttentionView(*parts) for parts in zip(self.draft_k, self.draft_v, tables, strict=True)]

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants between rounds, as assertions."""
        assert self._open is None, "a transaction is open"
        owners = Counter(page for lane in self._lanes.values() for page in lane.pages)
        everything = [*owners, *self.allocator.free_pages()]
        assert len(everything) == self.allocator.total, "pages lost or made up"
        assert len(set(everything)) == len(everything), "a free page has an owner"
        assert DUMMY_PAGE not in everything, "the dummy page is owned"
        assert all(self.allocator.owners(page) == owners[page] for page in everything), "a page's owners are miscounted"
        for number, lane in self._lanes.items():
            full = lane.committed // PAGE_SIZE
            assert all(owners[page] == 1 for page in lane.pages[full:]), f"lane {number} would write to a shared page"
            pages, ahead = pages_for(lane.committed), pages_for(max(lane.committed + self._room_ahead, lane.reading))
            assert pages <= len(lane.pages) <= ahead, f"lane {number}: pages do not cover its tokens, or too many"
            assert 0 <= self.backlog(number) <= self.shape.draft_rows, f"lane {number}: context is missing"
            assert len(lane.pages) <= lane.reserved, f"lane {number} outgrew its reservation"
        assert self._reserved <= self.allocator.total, "more reserved than there is"
        assert sorted([*self._lanes, *self._free_lanes]) == list(range(self.shape.lanes)), "a lane is lost"


def _check_keep(txn: Txn, keep: Sequence[int]) -> None:
    for span, rows in zip(txn.spans, keep, strict=True):
        assert 1 <= rows <= span.length, "keep outside 1 … length"
        assert span.kind == "decode" or rows == span.length, "prompt rows are always kept"


def _rows(x: Tensor | None) -> tuple[Tensor, ...]:
    assert x is not None, "the forward left no state"
    return x.unbind()


def _rings(shape: StateShape, width: int) -> np.ndarray:
    """[lanes + 1, width]: the page of each PAGE_SIZE positions where a lane's pages are a ring."""
    table = np.full((shape.lanes + 1, width), DUMMY_PAGE, np.int32)
    if shape.ring_pages:
        first = 1 + shape.ring_pages * np.arange(shape.lanes)[:, None]
        table[: shape.lanes] = first + np.arange(width) % shape.ring_pages
    return table
