"""The decode half of a round: what its forwards are fed, and the two forwards, which run as they are or captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.batch import PackedBatch, facts, unpack
from paceline.engine.drafting import Drafter
from paceline.engine.plan import VerifySpan
from paceline.models.qwen35 import Qwen35
from paceline.ops.advance import advance, input_tokens
from paceline.ops.features import keep_features
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
        return 3 * self.rows + 7 * self.spans


class Behind(NamedTuple):
    """Where a span goes on from, in a forward that is launched before that is known: from entry ``place`` of the ends of the
    round before (``ops.advance``); its request has room for ``room`` tokens behind the anchor there was before."""

    place: int
    room: int


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A verify forward before its tokens are known: row r's token is entry ``sources[r]`` of (anchors ‖ drafts). ``behind``
    [2, S] are places and rooms, of no meaning where the forward does not follow another round's."""

    half: Half
    anchors: Tensor
    behind: Tensor
    sources: Tensor

    def advance(self, ends: Tensor) -> None:
        """In place, to behind the rows that the round before has kept: its ``ends`` [G, 2]."""
        places, rooms = self.behind
        advance(ends, places, self.anchors, self.half.batch, limits=rooms)

    def tokens(self, drafts: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[N] of drafts [D, B - 1]."""
        out = torch.empty_like(self.sources) if out is None else out
        input_tokens(self.anchors, self.sources, drafts, out)
        return out


def pack_decode(
    spans: Sequence[VerifySpan],
    block: int,
    shape: DecodeShape,
    spare_lane: int,
    counts: Sequence[int] | None = None,
    behind: Sequence[Behind] | None = None,
) -> np.ndarray:
    """All numbers of a verify forward over [anchor, drafts …] of every span, for one transfer. ``counts``: how many rows of
    each span count, where that may be fewer than were laid out; a span without any is nobody's. ``behind``: where each goes
    on from, for ``DecodeInputs.advance``."""
    packed = np.zeros(shape.size, np.int64)
    lengths = [span.length for span in spans]
    padding = (shape.rows, shape.spans, spare_lane) if shape.padded else ()
    of_batch = facts(lengths, [span.start for span in spans], [span.lane for span in spans], *padding)
    if counts is not None:
        _, real, _, lanes = of_batch[2 * shape.rows :].reshape(4, -1)[:, : len(counts)]
        real[:], lanes[np.asarray(counts) == 0] = counts, spare_lane
    packed[: of_batch.size] = of_batch
    of_spans, sources = np.split(packed[of_batch.size :], [3 * shape.spans])
    anchors, places, rooms = of_spans.reshape(3, -1)
    anchors[: len(spans)], places[:] = [span.anchor for span in spans], -1
    if behind is not None:
        places[: len(spans)], rooms[: len(spans)] = zip(*behind, strict=True)
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
) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
    """(batch, anchors [S], behind [2, S], sources [N]) as views of ``pack_decode``'s array on a device."""
    rows, spans = shape.rows, shape.spans
    of_batch, anchors, behind, sources = packed.split((2 * rows + 4 * spans, spans, 2 * spans, rows))
    return unpack("decode", of_batch, lengths, bases, rows, spans), anchors, behind.view(2, spans), sources


def decode_inputs(spans: Sequence[VerifySpan], block: int, pool: StatePool) -> DecodeInputs:
    """Inputs of exactly these spans, for a forward that is not captured."""
    lengths = [span.length for span in spans]
    shape = DecodeShape(sum(lengths), len(spans))
    packed = to_device(pack_decode(spans, block, shape, pool.spare_lane), pool.device)
    batch, *others = unpack_decode(packed, shape, lengths, [span.start for span in spans])
    return DecodeInputs(pool.half(batch), *others)


def verify_forward(target: Qwen35, drafter: Drafter | None, tokens: Tensor, half: Half) -> Tensor:
    """Logits [N, V] of every row; what the rows add to the state is left in the views, and their features where the drafter
    will look for them."""
    taps = drafter.taps if drafter else ()
    hidden, features = target(tokens, half.batch, half.target, taps)
    if features is not None:
        assert half.features is not None, "features, and no place to keep them"
        keep_features(half.features, features, half.batch)
    return target.logits(hidden)
