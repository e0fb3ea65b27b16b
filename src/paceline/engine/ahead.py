"""The first forward of the next round, launched before the host knows how this one ended, so that the device does not wait
for the host.

All that it depends on is on the device once a round has been committed: of lanes that draft the drafts of the next round, of
lanes that do not the forward over their next token. What it writes lies behind the committed rows, where nobody looks. Once
the next round is known, what was computed for it is used, to the bit what it would have computed, or else forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from paceline.accept import Verdict
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

    @property
    def requests(self) -> set[str]:
        return {span.request.id for _, span in self.spans}

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


@dataclass(slots=True)
class VerifyAhead:
    """A verify forward over one row of each of ``spans``, whose anchors the device alone knew, and the ``pages`` that they
    were written to."""

    captured: CapturedVerify
    tokens: Tensor
    logits: Tensor
    spans: tuple[VerifySpan, ...]
    pages: tuple[int, ...]

    @property
    def requests(self) -> set[str]:
        return {span.request.id for span in self.spans}

    def settle(self, kept: Sequence[tuple[int, ...]]) -> None:
        self.spans = tuple(replace(span, anchor=tokens[-1]) for span, tokens in zip(self.spans, kept, strict=True))

    def serves(self, spans: Sequence[VerifySpan], pool: StatePool) -> bool:
        """Whether it was the forward of these spans, in an open transaction."""
        same = [*map(_place, spans)] == [*map(_place, self.spans)] and not any(span.drafts for span in spans)
        return same and self.pages == _pages(spans, pool)


def _pages(spans: Sequence[VerifySpan], pool: StatePool) -> tuple[int, ...]:
    return tuple(pool.page(span.lane, span.start) for span in spans)


def run_ahead(round: Round, verdict: Verdict, graphs: Graphs, pool: StatePool) -> DraftsAhead | VerifyAhead | None:
    """Behind a round that has been committed on the device. None if that cannot be: where there is no graph, no page, or
    where lanes do other things."""
    if any(span.drafting for span in round.verify):
        return _draft(round, verdict, graphs)
    if any(span.known is not None for span in round.verify):
        return None
    return _verify(round, verdict, graphs, pool)


def _draft(round: Round, verdict: Verdict, graphs: Graphs) -> DraftsAhead | None:
    drafting = tuple((index, span) for index, span in enumerate(round.verify) if span.drafting)
    at = to_device(np.array([index for index, _ in drafting]), verdict.keep.device)
    keep = verdict.keep[at]
    drafts = graphs.draft_behind([span for _, span in drafting], keep, verdict.tokens[at, keep - 1])
    return None if drafts is None else DraftsAhead(drafts, drafting)


def _verify(round: Round, verdict: Verdict, graphs: Graphs, pool: StatePool) -> VerifyAhead | None:
    spans = tuple(replace(span, start=span.start + 1) for span in round.verify)
    pages = _pages(spans, pool)
    captured = graphs.verify(spans) if spans and DUMMY_PAGE not in pages else None
    if captured is None:
        return None
    captured.inputs.anchors[: len(spans)] = verdict.tokens[: len(spans), 0]
    return VerifyAhead(captured, *captured.run(None), spans, pages)
