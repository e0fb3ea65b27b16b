"""Acceptance of a made-up length, for benchmarks on random weights: how fast would a pair be whose drafts hold so often?

The tokens that come out follow the drafts and mean nothing. Never part of normal serving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.accept import PADDING, Verdict
from paceline.engine.plan import VerifySpan
from paceline.errors import ConfigError
from paceline.transfer import to_device


class SyntheticAcceptance:
    """Every draft holds with one constant probability, given that those before it did, such that a full block yields
    ``length`` tokens per round on average."""

    def __init__(self, length: float, block_size: int) -> None:
        if not 1.0 <= length <= block_size:
            raise ConfigError(
                f"spec_synth_len must lie in [1, {block_size}] (the drafter's block), got {length:g}", param="spec_synth_len"
            )
        self.rate = _rate(length, block_size)

    def accept(self, spans: Sequence[VerifySpan], drafts: Tensor, picks: Tensor) -> Verdict:
        """As ``paceline.accept.accept``: drafts [S, W - 1], picks [S, W], of which the first ``len(spans)`` are real."""
        held = [self._held(span) for span in spans] + [-1] * (picks.shape[0] - len(spans))
        accepted = to_device(np.array(held, np.int64), picks.device)
        rows = torch.arange(picks.shape[1], device=picks.device)
        tokens = torch.where(rows[:-1] < accepted[:, None], drafts, picks[:, :-1])
        tokens = torch.cat((tokens, picks[:, -1:]), dim=1)
        return Verdict(accepted + 1, torch.where(rows <= accepted[:, None], tokens, PADDING), accepted)

    def _held(self, span: VerifySpan) -> int:
        """How many drafts hold: a function of the prompt and the position, so that runs can be compared."""
        digest = hashlib.sha256(f"{hash(span.request.prompt)} {span.start}".encode()).digest()
        for draft in range(span.drafts):
            if int.from_bytes(digest[2 * draft : 2 * draft + 2], "little") >= self.rate * 65536:
                return draft
        return span.drafts


def _rate(length: float, block_size: int) -> float:
    """The p with 1 + p + … + p^(B - 1) = length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(block_size)) < length:
            low = middle
        else:
            high = middle
    return high
