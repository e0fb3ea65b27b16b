"""The forwards of the next round, launched before the host knows how this one ended, so that the device does not wait for
the host.

All that they depend on is on the device once a round has been committed: how many rows each lane keeps and which token it
goes on with. What they write lies behind the committed rows, where nobody looks, or is the drafter's context of these. Once
the next round is known, what was computed for it is used, to the bit what it would have computed, or else forgotten. Lanes
that have ended meanwhile stay in the forward as rows of nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.config import PAGE_SIZE
from paceline.engine.decode import Behind, DecodeInputs
from paceline.engine.graphs import CapturedVerify, Graphs
from paceline.engine.plan import Round, VerifySpan
from paceline.ops.accept import Verdict
from paceline.state.pages import DUMMY_PAGE
from paceline.state.pool import StatePool
from paceline.transfer import to_device

_Place = tuple[str, int, int]
"""Request, position and token of an anchor."""


def _place(span: VerifySpan) -> _Place:
    return span.request.id, span.start, span.anchor


def ends_of(round: Round, verdict: Verdict, first: Tensor) -> Tensor:
    """[G, 2], on the device: how the lanes of a round's ``going_on`` end, rows that each keeps behind its start (none where
    its prompt ends there) and the token that it goes on with."""
    ends = verdict.ends[: len(round.verify)]
    return torch.cat((ends, torch.stack((torch.zeros_like(first), first), dim=1))) if len(first) else ends


_End = tuple[int, int]
"""How one lane ends, as the host learns it."""


def _behind(span: VerifySpan, end: _End) -> VerifySpan:
    return replace(span, start=span.start + end[0], anchor=end[1])


@dataclass(slots=True)
class DraftsAhead:
    """``drafts`` [D, B - 1] behind ``spans``, in order; with each its place in the round's ``going_on``."""

    drafts: Tensor
    spans: tuple[tuple[int, VerifySpan], ...]
    _rows: dict[_Place, int] = field(default_factory=dict)

    def settle(self, ends: Sequence[_End]) -> None:
        """Learn how each of ``going_on`` has ended."""
        for row, (index, span) in enumerate(self.spans):
            self._rows[_place(_behind(span, ends[index]))] = row

    def of(self, spans: Sequence[VerifySpan]) -> Tensor | None:
        """Drafts of these drafting spans; None unless there are some for all of them."""
        rows = [self._rows.get(_place(span)) for span in spans]
        if None in rows:
            return None
        if rows == [*range(len(rows))]:
            return self.drafts[: len(rows)]
        return self.drafts[to_device(np.array(rows), self.drafts.device)]


@dataclass(frozen=True, slots=True)
class Laid:
    """Spans as they lie in a verify forward's rows, and which of them the round's own are, in order."""

    spans: tuple[VerifySpan, ...]
    own: tuple[int, ...]


@dataclass(slots=True)
class VerifyAhead:
    """A verify forward over the next rows of ``spans``, whose anchors and positions the device alone knew; with each its
    place in the round's ``going_on`` and the pages from its start there to the last row that may have been written, be it
    beyond what its request has room for."""

    captured: CapturedVerify
    tokens: Tensor
    logits: Tensor
    spans: tuple[tuple[int, VerifySpan], ...]
    pages: tuple[tuple[int, ...], ...]

    def settle(self, ends: Sequence[_End]) -> None:
        """Learn how each of ``going_on`` has ended."""
        behind = [(index, _behind(span, ends[index])) for index, span in self.spans]
        passed = [
            now.start // PAGE_SIZE - then.start // PAGE_SIZE for (_, now), (_, then) in zip(behind, self.spans, strict=True)
        ]
        self.pages = tuple(pages[count:] for pages, count in zip(self.pages, passed, strict=True))
        self.spans = tuple(behind)

    def lay(self, spans: Sequence[VerifySpan], pool: StatePool) -> Laid | None:
        """How these spans, of an open transaction, lie in the forward; None if it was not of them, or if one has another
        page since."""
        wanted = {_place(span): span for span in spans}
        laid: list[VerifySpan] = []
        own: list[int] = []
        for at, ((_, begun), pages) in enumerate(zip(self.spans, self.pages, strict=True)):
            span = wanted.pop(_place(begun), None)
            if span is None:
                if begun.request.recalls:
                    return None  # what it would draw depends on what nobody keeps any more
                laid.append(begun)
                continue
            now = _pages(span, span.start, span.length, pool)
            if span.known is not None or span.drafts > begun.drafts or now != pages[: len(now)]:
                return None
            own.append(at)
            laid.append(replace(span, drafts=begun.drafts))
        same_order = [_place(laid[at]) for at in own] == [_place(span) for span in spans]
        return Laid(tuple(laid), tuple(own)) if not wanted and same_order else None

    def inputs(self, laid: Laid, spans: Sequence[VerifySpan], block: int) -> DecodeInputs:
        """What is committed of the forward: of each of the round's ``spans`` its rows, of the others nothing."""
        counts = [0] * len(laid.spans)
        for at, span in zip(laid.own, spans, strict=True):
            counts[at] = span.length
        return self.captured.settled(laid.spans, block, counts)


@dataclass(slots=True)
class Ahead:
    """What was run of a round before it."""

    drafts: DraftsAhead | None
    forward: VerifyAhead | None

    def settle(self, ends: Sequence[_End]) -> None:
        for work in (self.drafts, self.forward):
            if work is not None:
                work.settle(ends)

    def writes_to(self, lanes: Collection[int], pool: StatePool) -> bool:
        """Whether it may write to K/V pages that are one of these lanes' by now. (The drafter's are written by nobody who
        runs beside it.)"""
        pages = {page for each in self.forward.pages for page in each} if self.forward else set()
        return any(not pages.isdisjoint(pool.pages(lane)) for lane in lanes)


def _pages(span: VerifySpan, first: int, rows: int, pool: StatePool) -> tuple[int, ...]:
    """Of positions ``first`` … of a span's lane."""
    pages = range(first // PAGE_SIZE, (first + rows - 1) // PAGE_SIZE + 1)
    return tuple(pool.page(span.lane, page * PAGE_SIZE) for page in pages)


def draft_ahead(round: Round, ends: Tensor, graphs: Graphs) -> DraftsAhead | None:
    """Behind a round that has been committed on the device, with these ``ends``, for the lanes that draft in the next one;
    None if nobody does, or without a graph."""
    spans, following = round.going_on, round.following or ()
    drafting = tuple((each.place, spans[each.place]) for each in following if each.drafts)
    if not drafting:
        return None
    places, its_spans = zip(*drafting, strict=True)
    drafts = graphs.draft_behind(its_spans, places, ends)
    return None if drafts is None else DraftsAhead(drafts, drafting)


def verify_ahead(
    round: Round, ends: Tensor, drafts: DraftsAhead | None, graphs: Graphs, pool: StatePool
) -> VerifyAhead | None:
    """Behind the same round, over the lanes that go on. None if that cannot be: where there is no graph, no page, or where
    the host has a say in what is drafted."""
    going_on, following = round.going_on, round.following or ()
    spans = tuple((each.place, replace(going_on[each.place], drafts=each.drafts)) for each in following)
    if any(span.drafts and (drafts is None or span.request.recalls) for _, span in spans):
        return None
    limits = [_room(span) for _, span in spans]
    pages = []
    for (index, span), limit in zip(spans, limits, strict=True):
        rows = span.length + (going_on[index].length if index < len(round.verify) else 0)
        pages.append(_pages(span, span.start, rows, pool))
        if DUMMY_PAGE in _pages(span, span.start, min(rows, limit), pool):
            return None
    if not spans:
        return None
    behind = [Behind(index, limit) for (index, _), limit in zip(spans, limits, strict=True)]
    captured = graphs.verify_behind([span for _, span in spans], behind, ends)
    if captured is None:
        return None
    return VerifyAhead(captured, *captured.run(None if drafts is None else drafts.drafts), spans, tuple(pages))


def _room(span: VerifySpan) -> int:
    """Tokens that its request has room for behind the anchor."""
    request = span.request
    return request.max_tokens - (span.start - len(request.prompt) + 1)
