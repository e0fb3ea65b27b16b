"""Drafts of the next round, made before the host knows how this one ended, so that the device does not wait for the host.

All that a draft depends on is on the device once a round has been committed. What was drafted for lanes that then end, or
draft no more, is forgotten; for the others they are the drafts that the next round would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.accept import Verdict
from paceline.engine.graphs import Graphs
from paceline.engine.plan import Round, VerifySpan
from paceline.transfer import to_device

_Place = tuple[str, int, int]
"""Request, position and token of an anchor."""


@dataclass(slots=True)
class DraftsAhead:
    """``drafts`` [D, B - 1] behind ``spans``, in order."""

    drafts: Tensor
    spans: tuple[tuple[int, VerifySpan], ...]
    _rows: dict[_Place, int] = field(default_factory=dict)

    def settle(self, kept: Sequence[tuple[int, ...]]) -> None:
        """Learn what each span of the round has yielded."""
        for row, (index, span) in enumerate(self.spans):
            self._rows[span.request.id, span.start + len(kept[index]), kept[index][-1]] = row

    def of(self, spans: Sequence[VerifySpan]) -> Tensor | None:
        """Drafts of these drafting spans; None unless there are some for all of them."""
        rows = [self._rows.get((span.request.id, span.start, span.anchor)) for span in spans]
        if None in rows:
            return None
        if rows == [*range(len(rows))]:
            return self.drafts[: len(rows)]
        return self.drafts[to_device(np.array(rows), self.drafts.device)]


def draft_ahead(round: Round, verdict: Verdict, graphs: Graphs) -> DraftsAhead | None:
    """Draft behind a round that has been committed on the device; None if nobody drafts in it, or too many for a graph."""
    drafting = tuple((index, span) for index, span in enumerate(round.verify) if span.drafting)
    if not drafting:
        return None
    at = to_device(np.array([index for index, _ in drafting]), verdict.keep.device)
    keep = verdict.keep[at]
    drafts = graphs.draft_behind([span for _, span in drafting], keep, verdict.tokens[at, keep - 1])
    return None if drafts is None else DraftsAhead(drafts, drafting)
