"""The forwards of the next round, launched before the host knows how this one ended, so that the device does not wait for
the host.

All that they depend on is on the device once a round has been committed: how many rows each lane keeps and which token it
goes on with. What they write lies behind the committed rows, where nobody looks. Once the next round is known, what was
computed for it is used, to the bit what it would have computed, or else forgotten. Lanes that have ended meanwhile stay in
the forward as rows of nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from paceline.accept import Verdict
from paceline.config import PAGE_SIZE
from paceline.engine.decode import DecodeInputs
from paceline.engine.graphs import CapturedVerify, Graphs
from paceline.engine.plan import Round, VerifySpan
from paceline.state.pages import DUMMY_PAGE
from paceline.state.pool import StatePool
from paceline.transfer import to_device

_Place = tuple[str, int, int]
"""Request, position and token of an anchor."""


def _place(span: VerifySpan) -> _Place:
    return span.request.id, span.start, span.anchor


@dataclass(slots=True)
class DraftsAhead:
    """``drafts`` [D, B - 1] behind ``spans``, in order; with each its place in the round."""

    drafts: Tensor
    spans: tuple[tuple[int, VerifySpan], ...]
    _rows: dict[_Place, int] = field(default_factory=dict)

    def settle(self, kept: Sequence[tuple[int, ...]]) -> None:
        """Learn what each span of the round has yielded."""
        for row, (index, span) in enumerate(self.spans):
            self._rows[span.request.id, span.start + len(kept[index]), kept[index][-1]] = row

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
    place in the round and the pages that its rows may have been written to, from the first row on."""

    captured: CapturedVerify
    tokens: Tensor
    logits: Tensor
    spans: tuple[tuple[int, VerifySpan], ...]
    pages: tuple[tuple[int, ...], ...]

    def settle(self, kept: Sequence[tuple[int, ...]]) -> None:
        """Learn what each span of the round has yielded."""
        settled = []
        for (index, span), pages in zip(self.spans, self.pages, strict=True):
            start, first = span.start + len(kept[index]), (span.start + 1) // PAGE_SIZE
            pages = pages[start // PAGE_SIZE - first :]
            settled.append(((index, replace(span, start=start, anchor=kept[index][-1])), pages))
        self.spans, self.pages = tuple(span for span, _ in settled), tuple(pages for _, pages in settled)

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

    def settle(self, kept: Sequence[tuple[int, ...]]) -> None:
        for work in (self.drafts, self.forward):
            if work is not None:
                work.settle(kept)

    def writes_to(self, lanes: Collection[int], pool: StatePool) -> bool:
        """Whether it may write to K/V pages that are one of these lanes' by now. (The drafter's are written by nobody who
        runs beside it.)"""
        pages = {page for each in self.forward.pages for page in each} if self.forward else set()
        return any(not pages.isdisjoint(pool.pages(lane)) for lane in lanes)


def _pages(span: VerifySpan, first: int, rows: int, pool: StatePool) -> tuple[int, ...]:
    """Of positions ``first`` … of a span's lane."""
    pages = range(first // PAGE_SIZE, (first + rows - 1) // PAGE_SIZE + 1)
    return tuple(pool.page(span.lane, page * PAGE_SIZE) for page in pages)


def draft_ahead(round: Round, verdict: Verdict, graphs: Graphs) -> DraftsAhead | None:
    """Behind a round that has been committed on the device, for the lanes that draft in the next one; None if nobody does,
    or without a graph."""
    following = enumerate(zip(round.verify, round.following or (), strict=True))
    drafting = tuple((index, span) for index, (span, drafts) in following if drafts)
    if not drafting:
        return None
    keep, anchors = _ends([index for index, _ in drafting], verdict)
    drafts = graphs.draft_behind([span for _, span in drafting], keep, anchors)
    return None if drafts is None else DraftsAhead(drafts, drafting)


def verify_ahead(
    round: Round, verdict: Verdict, drafts: DraftsAhead | None, graphs: Graphs, pool: StatePool
) -> VerifyAhead | None:
    """Behind the same round, over the lanes that go on. None if that cannot be: where there is no graph, no page, or where
    the host has a say in what is drafted."""
    following = enumerate(zip(round.verify, round.following or (), strict=True))
    spans = tuple((index, replace(span, drafts=count)) for index, (span, count) in following if count is not None)
    if any(span.drafts and (drafts is None or span.request.recalls) for _, span in spans):
        return None
    kept_most = {index: round.verify[index].length for index, _ in spans}
    limits = [_room(span) for _, span in spans]
    pages = []
    for (index, span), limit in zip(spans, limits, strict=True):
        rows = min(kept_most[index] + span.length, limit) - 1
        pages.append(_pages(span, span.start + 1, rows, pool))
    if not spans or any(DUMMY_PAGE in each for each in pages):
        return None
    keep, anchors = _ends([index for index, _ in spans], verdict)
    captured = graphs.verify_behind(
        [span for _, span in spans], keep, anchors, to_device(np.array(limits), verdict.keep.device)
    )
    if captured is None:
        return None
    return VerifyAhead(captured, *captured.run(None if drafts is None else drafts.drafts), spans, tuple(pages))


def _room(span: VerifySpan) -> int:
    """Tokens that its request has room for, before this round."""
    request = span.request
    return request.max_tokens - (span.start - len(request.prompt) + 1)


def _ends(indices: Sequence[int], verdict: Verdict) -> tuple[Tensor, Tensor]:
    """What these of the round's spans keep, and the token that each ends in."""
    at = to_device(np.array(indices), verdict.keep.device)
    keep = verdict.keep[at]
    return keep, verdict.tokens[at, keep - 1]
