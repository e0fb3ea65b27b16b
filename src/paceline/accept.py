"""Acceptance: how many drafts of each lane hold, and what the lane emits.

The words, once for the whole engine:

- The **anchor** is the last emitted token of a lane. It is not yet in the lane's state.
- A **draft** is a token that the drafter proposes to follow. A lane verifies K of them in a round, K >= 0.
- The **verify span** of a lane is ``[anchor, d1 ... dK]``: W = K + 1 rows of the target's forward. The target's *pick*
  at row i is the token it chooses to follow row i, by the request's own sampling rule and noise.
- Draft ``d(i+1)`` is **accepted** when it equals the pick at row i and all drafts before it are accepted. With a
  accepted drafts, rows 0 ... a have seen the tokens that plain decoding would have fed, so their picks are its picks.
- **keep** = a + 1 rows are committed to state (the anchor and the a drafts), and a + 1 tokens are emitted: the picks
  at rows 0 ... a, which are the a drafts and the target's own next pick. That last one is the new anchor.

Plain decoding is K = 0: one row, keep 1, one token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PADDING = -1
"""Fills ``Verdict.tokens`` behind the emitted ones; no token has this id."""


class Verdict(NamedTuple):
    """What a verify round decided, for L lanes of up to K drafts. All int64, on the device of the picks."""

    keep: torch.Tensor
    """[L] rows to commit, 1 ... K + 1; also the number of tokens emitted."""
    tokens: torch.Tensor
    """[L, K + 1] emitted tokens, padded with ``PADDING``."""
    accepted: torch.Tensor
    """[L] accepted drafts, keep - 1."""


def accept(drafts: torch.Tensor, counts: torch.Tensor, picks: torch.Tensor) -> Verdict:
    """Compare drafts with the target's picks.

    ``drafts`` [L, K] int64; lane l really verifies the first ``counts[l]`` of them (``counts`` [L] int64, 0 ... K), and
    what lies behind changes nothing. ``picks`` [L, K + 1] int64: the target's pick at each row of the span, meaningful
    up to row ``counts[l]``. Nothing here waits for the device.
    """
    lanes, width = picks.shape
    assert drafts.shape == (lanes, width - 1) and counts.shape == (lanes,), (drafts.shape, counts.shape, picks.shape)
    rows = torch.arange(width, device=picks.device)
    # The row behind the last draft has nothing to compare, so every lane has a first row without a match.
    matches = torch.zeros_like(picks, dtype=torch.bool)
    matches[:, :-1] = (drafts == picks[:, :-1]) & (rows[:-1] < counts[:, None])
    accepted = torch.where(matches, width, rows).amin(dim=1)
    tokens = torch.where(rows <= accepted[:, None], picks, PADDING)
    return Verdict(keep=accepted + 1, tokens=tokens, accepted=accepted)
