"""Drafters that no file holds: bad ones and scripted ones. Whatever they propose, the tokens must stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.batch import PackedBatch
from paceline.config import DrafterConfig
from paceline.engine.drafting import DFlashDrafter
from paceline.engine.plan import VerifySpan
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35
from paceline.state.pool import StatePool
from paceline.views import ContextView


def random_drafter(config: DrafterConfig, target: Qwen35, dtype: torch.dtype, max_positions: int) -> DFlashDrafter:
    """A drafter of this geometry with random weights, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    device = target.norm.weight.device
    model = DFlash(config, dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, generator=generator).to(device, parameter.dtype)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    model.finish(max_positions)
    return DFlashDrafter(model, target)


class ScriptedDrafter:
    """Knows each request's tokens (``truth``, by request id) and has the first ``turn`` drafts of a block right, where turn
    runs through 0 … B - 1; requests begin at different turns (id modulo B)."""

    taps: tuple[int, ...] = ()

    def __init__(self, truth: Mapping[str, Sequence[int]], block_size: int, vocab_size: int) -> None:
        self.block_size, self._truth, self._vocab_size = block_size, truth, vocab_size
        self._turns: Counter[str] = Counter()

    def project(self, features: Tensor, batch: PackedBatch, views: list[ContextView]) -> None:
        """Never asked: there are no taps."""

    def catch_up(self, spans: Sequence[VerifySpan], pool: StatePool) -> None:
        """Nor this: a pool without a drafter's geometry keeps no features."""

    def propose(self, spans: Sequence[VerifySpan], pool: StatePool) -> Tensor:
        return torch.tensor([self._block(span) for span in spans], device=pool.device)

    def _block(self, span: VerifySpan) -> list[int]:
        request, drafts = span.request, self.block_size - 1
        generated = span.start - len(request.prompt) + 1
        known = list(self._truth.get(request.id, ())[generated : generated + drafts])
        block = known + [0] * (drafts - len(known))
        right = (self._turns[request.id] + _number(request.id)) % self.block_size
        self._turns[request.id] += 1
        if right < drafts:
            block[right] = (block[right] + 1) % self._vocab_size
        return block


def _number(request_id: str) -> int:
    return int(request_id) if request_id.isdigit() else 0
