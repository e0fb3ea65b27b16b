"""The candidate selector of DFlash2: a bilinear score of (previous token, candidate) that depends on the hidden state."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.sample.ref import draw_candidates


def candidate_scores(
    logits: Tensor, candidates: Tensor, hidden: Tensor, previous: Tensor, predecessor: Tensor, successor: Tensor
) -> Tensor:
    """score(c) = logit(c) + <predecessor[previous] * hidden, successor[c]> for the candidates of one slot.

    logits, candidates [L, k]; hidden [L, R] the projected hidden state of the slot; previous [L] the token chosen for the
    slot before; predecessor, successor [V, R] codebooks. Returns [L, k].
    """
    query = predecessor[previous] * hidden
    return logits + (query.unsqueeze(1) * successor[candidates]).sum(-1)


def selector_walk(
    logits: Tensor,
    candidates: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> Tensor:
    """Choose a token for each of S slots in turn, scoring a slot's candidates given the token before it.

    logits [L, S, k] float32, candidates [L, S, k] int64, distinct in a slot; hidden [L, S, R]; anchors [L] int64, the
    tokens before the first slots; predecessor, successor as above. temperature, seed, choice, position [L * S], lane-major,
    for ``draw_candidates``. Returns [L, S] int64.
    """
    lanes, slots, _ = logits.shape
    draws = [t.view(lanes, slots) for t in (temperature, seed, choice, position)]
    previous, path = anchors, []
    for slot in range(slots):
        ids = candidates[:, slot]
        scores = candidate_scores(logits[:, slot], ids, hidden[:, slot], previous, predecessor, successor)
        chosen = draw_candidates(scores, ids, *(t[:, slot] for t in draws))
        previous = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
        path.append(previous)
    return torch.stack(path, dim=1)
