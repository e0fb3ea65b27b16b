"""Acceptance: how many drafts of each lane hold, and what the lane emits.

The words, once for the whole engine:

- The **anchor** is the last emitted token of a lane. It is not yet in the lane's state.
- A **draft** is a token that the drafter proposes to follow. A lane verifies K of them in a round, K >= 0.
- The **verify span** of a lane is ``[anchor, d1 ... dK]``: W = K + 1 rows of the target's forward. The target's *pick*
  at row i is the token it chooses to follow row i, by the request's own sampling rule and noise.
- Draft ``d(i+1)`` is **accepted** when it equals the pick at row i and all drafts before it are accepted. With a
  accepted drafts, rows 0 ... a have seen the tokens that plain decoding would have fed, so their picks are its picks.
- **keep** = a + 1 rows are committed to state (the anchor and the a drafts), and a + 1 tokens are emitted: the a drafts
  and the target's own next pick. That last one is the new anchor.

Plain decoding is K = 0: one row, keep 1, one token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1
"""Fills a verdict's tokens behind the emitted ones; no token has this id."""


class Verdict(NamedTuple):
    """What a verify round decided, for S spans of up to W rows. All int64, on the device of the picks."""

    keep: Tensor
    """[S] rows to commit, 1 ... W, and none of an empty span; also the number of tokens emitted."""
    report: Tensor
    """[S, 3 + W]: keep, the new anchor, whether the logits of a kept row are not numbers, the tokens emitted."""

    @property
    def ends(self) -> Tensor:
        """[S, 2]: keep and the new anchor."""
        return self.report[:, :2]


def accept(
    tokens: Tensor,
    picks: Tensor,
    peaks: Tensor,
    starts: Tensor,
    lengths: Tensor,
    width: int,
    held: Tensor | None = None,
) -> Verdict:
    """Compare the drafts of packed verify spans with the target's picks.

    Span s has the ``lengths[s]`` rows from ``starts[s]`` on ([S] int64), at most ``width`` (W). ``tokens`` [N] int64 are
    what the rows were fed; ``picks`` [R] int64 and ``peaks`` [R, T] float32 (maxima over any T parts of a row's logits,
    which a NaN is larger than) are of the first R rows, in which all spans lie. Where ``held`` [S] int64 is not negative it
    says how many drafts hold, of those that the span has, and nothing is compared. Nothing here waits for the device.
    """
    rows = torch.arange(width, device=picks.device)
    at = (starts[:, None] + rows).clamp(max=picks.shape[0] - 1)
    drafts, picked = tokens[(at + 1).clamp(max=tokens.shape[0] - 1)], picks[at]
    # the row behind the last draft has nothing to compare, so every span has a first row without a match
    matches = (drafts == picked) & (rows < lengths[:, None] - 1)
    accepted = torch.where(matches, width, rows).amin(1)
    if held is not None:
        accepted = torch.where(held >= 0, held.minimum(lengths - 1), accepted)
    keep = (accepted + 1).minimum(lengths)
    kept = rows < keep[:, None]
    emitted = torch.where(kept, torch.where(rows < accepted[:, None], drafts, picked), PADDING)
    anchors = emitted.gather(1, (keep[:, None] - 1).clamp(min=0))
    broken = (~peaks.amax(1).isfinite()[at] & kept).any(1, keepdim=True)
    return Verdict(keep, torch.cat((keep[:, None], anchors, broken, emitted), dim=1))
