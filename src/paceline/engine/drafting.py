"""Where drafts come from. The runner knows only this interface; what a drafter proposes can change speed, never tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.engine.plan import VerifySpan
from paceline.engine.rows import sampling_rows
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35
from paceline.state.pool import StatePool, Txn
from paceline.views import ContextView


class Drafter(Protocol):
    """``taps`` are the target layers whose outputs ``project`` wants; ``block_size`` is B, of which B - 1 are drafts."""

    block_size: int
    taps: tuple[int, ...]

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        """Turn the features of a forward's rows into context rows, staged for the commit."""

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool, txn: Txn) -> Tensor:
        """Drafts [L, B - 1] for the drafting spans of a round, all lanes in one forward."""


class DFlashDrafter:
    """A DFlash or DFlash2 model, with the target's embedding and head where the drafter has none of its own."""

    def __init__(self, model: DFlash, target: Qwen35) -> None:
        self.model, self.target = model, target
        self.block_size = model.config.block_size
        self.taps = model.config.target_layer_ids

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        self.model.project(features, batch, views)

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool, txn: Txn) -> Tensor:
        batch, views = pool.draft_block(txn)
        device = batch.positions.device
        anchors = torch.tensor([span.anchor for span in spans], device=device)
        # draft i sits at position start + i, where the target's own draw for that position will use the same noise
        rows = sampling_rows(
            [(span.request, span.start + slot) for span in spans for slot in range(1, self.block_size)], device
        )
        return self.model.propose(anchors, self.target.embed_tokens, self.target.lm_head, batch, views, rows)
