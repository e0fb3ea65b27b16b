"""The decode half of a round: what its forwards are fed, and the two forwards, which run as they are or captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch, facts, unpack
from paceline.engine.drafting import Drafter
from paceline.engine.plan import VerifySpan
from paceline.models.qwen35 import Qwen35
from paceline.state.pool import Half, StatePool
from paceline.transfer import to_device


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """``rows`` N and ``spans`` S of a verify forward; with ``padded`` there may be fewer real ones."""

    rows: int
    spans: int
    padded: bool = False

    @property
    def size(self) -> int:
        """Length of what ``pack_decode`` makes."""
        return 3 * self.rows + 5 * self.spans


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A verify forward before its tokens are known: row r's token is entry ``sources[r]`` of (anchors ‖ drafts)."""

    half: Half
    anchors: Tensor
    sources: Tensor

    def advance(self, keep: Tensor, anchors: Tensor, limits: Tensor) -> None:
        """In place, for the first of the spans: to behind ``keep`` [D] more committed rows, with other ``anchors`` [D]. Of a
        span count no more rows than its request has room for: ``limits`` [D], of which those kept have taken theirs."""
        batch, spans = self.half.batch, keep.shape[0]
        moved = torch.zeros_like(batch.span_bases)
        moved[:spans] = keep
        batch.positions.add_(moved[batch.row_span])
        batch.span_bases.add_(moved)
        lengths = batch.span_lengths[:spans]
        lengths.copy_(lengths.minimum(limits - keep).clamp_(min=0))
        self.anchors[:spans] = anchors

    def tokens(self, drafts: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[N] of drafts [D, B - 1]."""
        choices = self.anchors if drafts is None else torch.cat((self.anchors, drafts.flatten()))
        return torch.index_select(choices, 0, self.sources, out=out)


def pack_decode(
    spans: Sequence[VerifySpan],
    block: int,
    shape: DecodeShape,
    spare_lane: int,
    counts: Sequence[int] | None = None,
) -> np.ndarray:
    """All numbers of a verify forward over [anchor, drafts …] of every span, for one transfer. ``counts``: how many rows of
    each span count, where that may be fewer than were laid out; a span without any is nobody's."""
    packed = np.zeros(shape.size, np.int64)
    lengths = [span.length for span in spans]
    padding = (shape.rows, shape.spans, spare_lane) if shape.padded else ()
    of_batch = facts(lengths, [span.start for span in spans], [span.lane for span in spans], *padding)
    if counts is not None:
        _, real, _, lanes = of_batch[2 * shape.rows :].reshape(4, -1)[:, : len(counts)]
        real[:], lanes[np.asarray(counts) == 0] = counts, spare_lane
    packed[: of_batch.size] = of_batch
    anchors, sources = packed[of_batch.size :][: shape.spans], packed[of_batch.size + shape.spans :]
    anchors[: len(spans)] = [span.anchor for span in spans]
    row, drafting = 0, 0
    for index, span in enumerate(spans):
        sources[row] = index
        if span.drafts:
            sources[row + 1 : row + span.length] = shape.spans + drafting * (block - 1) + np.arange(span.drafts)
            drafting += 1
        row += span.length
    return packed


def unpack_decode(
    packed: Tensor, shape: DecodeShape, lengths: Sequence[int], bases: Sequence[int]
) -> tuple[PackedBatch, Tensor, Tensor]:
    """(batch, anchors [S], sources [N]) as views of ``pack_decode``'s array on a device."""
    of_batch, anchors, sources = packed.split((2 * shape.rows + 4 * shape.spans, shape.spans, shape.rows))
    return unpack("decode", of_batch, lengths, bases, shape.rows, shape.spans), anchors, sources


def decode_inputs(spans: Sequence[VerifySpan], block: int, pool: StatePool) -> DecodeInputs:
    """Inputs of exactly these spans, for a forward that is not captured."""
    lengths = [span.length for span in spans]
    shape = DecodeShape(sum(lengths), len(spans))
    packed = to_device(pack_decode(spans, block, shape, pool.spare_lane), pool.device)
    batch, anchors, sources = unpack_decode(packed, shape, lengths, [span.start for span in spans])
    return DecodeInputs(pool.half(batch), anchors, sources)


def verify_forward(target: Qwen35, drafter: Drafter | None, tokens: Tensor, half: Half) -> Tensor:
    """Logits [N, V] of every row; what the rows add to the state is left in the views."""
    taps = drafter.taps if drafter else ()
    hidden, features = target(tokens, half.batch, half.target, taps)
    if drafter is not None and features is not None:
        drafter.project(features, half.batch, half.context)
    return target.logits(hidden)
