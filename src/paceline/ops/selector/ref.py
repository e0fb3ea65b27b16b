"""The candidate selector of DFlash2: a bilinear score of (previous token, candidate) that depends on the hidden state."""

from __future__ import annotations

from torch import Tensor


def candidate_scores(
    logits: Tensor, candidates: Tensor, hidden: Tensor, previous: Tensor, predecessor: Tensor, successor: Tensor
) -> Tensor:
    """score(c) = logit(c) + <predecessor[previous] * hidden, successor[c]> for the candidates of one slot.

    logits, candidates [L, k]; hidden [L, R] the projected hidden state of the slot; previous [L] the token chosen for the
    slot before; predecessor, successor [V, R] codebooks. Returns [L, k].
    """
    query = predecessor[previous] * hidden
    return logits + (query.unsqueeze(1) * successor[candidates]).sum(-1)
