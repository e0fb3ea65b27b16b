"""What a forward is fed when it is launched before the host knows where the round before has ended."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.batch import PackedBatch


def advance(
    ends: Tensor,
    places: Tensor,
    anchors: Tensor,
    batch: PackedBatch,
    limits: Tensor | None = None,
    draws: Tensor | None = None,
) -> None:
    """Move spans behind rows that the round before has committed, in place.

    ``ends`` [G, 2] int64: how many rows each of that round's lanes has kept, and the token that it goes on with. Span s goes
    on from ``ends[places[s]]``, unless ``places[s]`` ([S] int64) is negative: its positions, base and entry of ``anchors``
    [S] change. It counts no more rows than ``limits[s]`` less those kept. Where all spans have B rows, ``draws``
    [S * (B - 1)] int64, positions that tokens are drawn for, move with them.
    """
    gone_on = places >= 0
    kept, went_on_with = ends[places.clamp(min=0)].unbind(1)
    moved = torch.where(gone_on, kept, 0)
    batch.positions.add_(moved[batch.row_span])
    batch.span_bases.add_(moved)
    anchors.copy_(torch.where(gone_on, went_on_with, anchors))
    if limits is not None:
        fewer = batch.span_lengths.minimum(limits - moved).clamp(min=0)
        batch.span_lengths.copy_(torch.where(gone_on, fewer, batch.span_lengths))
    if draws is not None:
        draws.view(len(places), -1).add_(moved[:, None])


def advance_counts(ends: Tensor, places: Tensor, counts: Tensor) -> None:
    """Add to ``counts`` [S] int64 what the lanes of the round before have kept, in place: ``ends`` and ``places`` are those
    of ``advance``."""
    counts.add_(torch.where(places >= 0, ends[places.clamp(min=0), 0], 0))


def input_tokens(anchors: Tensor, sources: Tensor, drafts: Tensor | None, out: Tensor) -> None:
    """``out`` [N]: row r's token is entry ``sources[r]`` ([N] int64) of anchors [S] and, behind them, drafts [D, B - 1]."""
    choices = anchors if drafts is None else torch.cat((anchors, drafts.flatten()))
    torch.index_select(choices, 0, sources, out=out)
