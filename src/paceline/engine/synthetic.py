"""Acceptance of a made-up length, for benchmarks on random weights: how fast would a pair be whose drafts hold so often?

The tokens that come out follow the drafts and mean nothing. Never part of normal serving.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.engine.plan import VerifySpan
from paceline.errors import ConfigError

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class SyntheticAcceptance:
    """Every draft holds with one constant probability, given that those before it did, such that a full block yields
    ``length`` tokens per round on average.

    Which tokens a draft misses is a function of the prompt, so that runs can be compared, whatever number of drafts they
    verify. The tokens between two misses follow the geometric distribution, drawn from a sequence that covers (0, 1) evenly
    (multiples of the golden ratio, from an offset that the prompt gives): independent draws would leave a cell of a hundred
    rounds up to a tenth away from the length it is named after.
    """

    def __init__(self, length: float, block_size: int) -> None:
        if not 1.0 <= length <= block_size:
            raise ConfigError(
                f"spec_synth_len must lie in [1, {block_size}] (the drafter's block), got {length:g}", param="spec_synth_len"
            )
        self.rate = _rate(length, block_size)

    def held(self, span: VerifySpan) -> int:
        """How many drafts hold: those before the first token that is missed behind the anchor."""
        anchor = span.start - len(span.request.prompt)
        missed = self._missed(hash(span.request.prompt), anchor + span.drafts + 1)
        first = missed[np.searchsorted(missed, anchor, side="right")]
        return int(min(first - anchor - 1, span.drafts))

    def _missed(self, seed: int, tokens: int) -> np.ndarray:
        """Ascending numbers of generated tokens, the first being 0, that drafts miss: all below ``tokens``, and more."""
        if not 0.0 < self.rate < 1.0:
            return np.arange(1, tokens + 2) if self.rate == 0.0 else np.array([2 * tokens + 2])
        even = np.modf((seed % 2**32) / 2**32 + _GOLDEN * np.arange(tokens + 1))[0]
        return np.cumsum(1 + np.floor(np.log1p(-even) / math.log(self.rate)).astype(np.int64))


def _rate(length: float, block_size: int) -> float:
    """The p with 1 + p + … + p^(B - 1) = length."""
    if length == block_size:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(block_size)) < length:
            low = middle
        else:
            high = middle
    return low
