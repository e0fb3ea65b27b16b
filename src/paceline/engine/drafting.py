"""Where drafts come from. The runner knows only this interface; what a drafter proposes can change speed, never tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.engine.plan import VerifySpan
from paceline.engine.rows import pack_draws
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35
from paceline.ops.advance import advance, advance_counts
from paceline.ops.features import kept_features
from paceline.sampling import Kind, SamplingRows, packed_size
from paceline.state.pool import StatePool
from paceline.transfer import to_device
from paceline.views import AttentionView, ContextView


class Drafter(Protocol):
    """``taps`` are the target layers whose outputs ``project`` wants; ``block_size`` is B, of which B - 1 are drafts."""

    block_size: int
    taps: tuple[int, ...]

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        """Turn the features of a forward's rows into context rows, staged in the views."""

    def catch_up(self, spans: Sequence[VerifySpan], pool: StatePool) -> None:
        """Make context of all that the lanes of these spans have committed, in one forward."""

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool) -> Tensor:
        """Drafts [D, B - 1] for the drafting spans of a round, all lanes in one forward, once they have caught up."""


@dataclass(frozen=True, slots=True)
class ContextInputs:
    """Of each of D lanes B rows, from the first on that has features but no context; the first ``counts`` [D] of them are
    committed. ``places`` as in ``DraftInputs``."""

    batch: PackedBatch
    counts: Tensor
    places: Tensor

    def advance(self, ends: Tensor) -> None:
        """In place, to the rows that the round before has kept too: its ``ends`` [G, 2]."""
        advance_counts(ends, self.places, self.counts)


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """One block of B rows behind the committed context of each of D lanes; ``rows`` has D * (B - 1) entries. ``places`` [D]
    are of no meaning where the forward does not follow a round whose results are not known."""

    batch: PackedBatch
    anchors: Tensor
    places: Tensor
    rows: SamplingRows

    def advance(self, ends: Tensor) -> None:
        """In place, to behind the rows that the round before has kept: its ``ends`` [G, 2]."""
        advance(ends, self.places, self.anchors, self.batch, draws=self.rows.position)


class DFlashDrafter:
    """A DFlash or DFlash2 model, with the target's embedding and head where the drafter has none of its own."""

    def __init__(self, model: DFlash, target: Qwen35) -> None:
        self.model, self.target = model, target
        self.block_size = model.config.block_size
        self.taps = model.config.target_layer_ids

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        self.model.project(features, batch, views)

    def catch_up(self, spans: Sequence[VerifySpan], pool: StatePool) -> None:
        waiting = [(pool.backlog(span.lane), span) for span in spans if pool.backlog(span.lane)]
        if not waiting:
            return
        lanes = [span.lane for _, span in waiting]
        batch = pack(
            "decode", [rows for rows, _ in waiting], [span.start - rows for rows, span in waiting], pool.device, lanes
        )
        self.make_context(batch, batch.span_lengths, pool)
        pool.caught_up(lanes)

    def make_context(self, batch: PackedBatch, counts: Tensor, pool: StatePool) -> None:
        """Of the first ``counts`` [S] rows of each span, whose features the pool has kept."""
        assert pool.features is not None, "a pool without features"
        views = pool.context_views()
        self.model.project(kept_features(pool.features, batch), batch, views)
        pool.write_context(views, counts, batch)

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool) -> Tensor:
        self.catch_up(spans, pool)
        packed, kinds, limits = self.pack(spans, len(spans), pool.spare_lane)
        bases = [span.start for span in spans]
        return self.forward(self.unpack(to_device(packed, pool.device), bases, kinds, limits), pool.draft_views())

    def forward(self, inputs: DraftInputs, views: list[AttentionView]) -> Tensor:
        """Drafts [D, B - 1]."""
        embed, head = self.target.embed_tokens, self.target.lm_head
        return self.model.propose(inputs.anchors, embed, head, inputs.batch, views, inputs.rows)

    def pack_context(
        self, spans: Sequence[VerifySpan], lanes: int, pool: StatePool, places: Sequence[int] = ()
    ) -> np.ndarray:
        """All numbers of ``ContextInputs``, for one transfer; missing lanes and ``places`` as in ``pack``."""
        missing = lanes - len(spans)
        counts = [pool.backlog(span.lane) for span in spans] + [0] * missing
        ends, owners = [span.start for span in spans] + [0] * missing, [span.lane for span in spans]
        bases = [end - count for end, count in zip(ends, counts, strict=True)]
        of_batch = facts([self.block_size] * lanes, bases, owners + [pool.spare_lane] * missing)
        return np.concatenate((of_batch, counts, _padded(places, lanes)), dtype=np.int64)

    def context_size(self, lanes: int) -> int:
        """Length of the array that ``pack_context`` makes."""
        return 2 * lanes * self.block_size + 6 * lanes

    def unpack_context(self, packed: Tensor, bases: Sequence[int]) -> ContextInputs:
        """Views of ``pack_context``'s array on a device."""
        lanes, block = len(bases), self.block_size
        of_batch, counts, places = packed.split((2 * lanes * block + 4 * lanes, lanes, lanes))
        return ContextInputs(unpack("decode", of_batch, [block] * lanes, bases, lanes * block, lanes), counts, places)

    def pack(
        self, spans: Sequence[VerifySpan], lanes: int, spare_lane: int, places: Sequence[int] = ()
    ) -> tuple[np.ndarray, tuple[Kind, ...], tuple[int, ...]]:
        """All numbers of a draft forward, for one transfer, and what ``SamplingRows`` wants to know on the host. Missing
        lanes are made up: blocks of ``spare_lane`` at position 0. ``places``: where among the ends of the round before each
        span goes on from, for ``DraftInputs.advance``."""
        block, missing = self.block_size, lanes - len(spans)
        bases, owners = [span.start for span in spans] + [0] * missing, [span.lane for span in spans]
        of_batch = facts([block] * lanes, bases, owners + [spare_lane] * missing)
        anchors = np.array([span.anchor for span in spans] + [0] * missing, np.int64)
        # draft i sits at position start + i, where the target's own draw for that position will use the same noise
        draws = [(span.request, span.start + slot) for span in spans for slot in range(1, block)]
        rows, kinds, limits = pack_draws(draws + draws[-1:] * (missing * (block - 1)))
        return np.concatenate((of_batch, anchors, _padded(places, lanes), rows)), kinds, limits

    def packed_size(self, lanes: int) -> int:
        """Length of the array that ``pack`` makes."""
        return 2 * lanes * self.block_size + 6 * lanes + packed_size(lanes * (self.block_size - 1))

    def unpack(self, packed: Tensor, bases: Sequence[int], kinds: tuple[Kind, ...], limits: tuple[int, ...]) -> DraftInputs:
        """Views of ``pack``'s array on a device."""
        lanes, block = len(bases), self.block_size
        facts_size = 2 * lanes * block + 4 * lanes
        of_batch, anchors, places, rows = packed.split((facts_size, lanes, lanes, packed.shape[0] - facts_size - 2 * lanes))
        batch = unpack("decode", of_batch, [block] * lanes, bases, lanes * block, lanes)
        return DraftInputs(batch, anchors, places, SamplingRows.unpack(rows, kinds, limits))


def _padded(places: Sequence[int], lanes: int) -> np.ndarray:
    return np.array([*places, *[-1] * (lanes - len(places))], np.int64)
