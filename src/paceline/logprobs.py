"""Logarithms of the probabilities that the model gives to tokens.

They are of the model's own distribution, the softmax of its logits, before temperature, penalties, biases, bans and filters;
a token may therefore be drawn that is not likely here. With m a row's largest logit: ``l(t) - m - log(sum exp(l - m))``. The
sum is a tree that depends on the vocabulary's size only, so that a row's bits are the same in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.ops.sample.ref import scaled, tree_sum
from paceline.ops.topk import top_k
from paceline.types import MAX_LOGPROBS, TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""
ROWS_AT_ONCE = 16
"""Some tensors as wide as the vocabulary are made of so many rows at a time; a tile of the decode product has as many."""


def score(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """What ``read_scores`` reads of R rows: ``logits`` [R, V] float32, ``tokens`` [R] int64 -> [R, 1 + 2 top] int64, on the
    same device: the logprob of the row's token, the ids of the ``top`` likeliest, their logprobs."""
    blocks = zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([_score(*block, top) for block in blocks])


def _score(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    weighed = scaled(logits, logits.new_ones(logits.shape[0], 1))
    rest = tree_sum(weighed.exp()).contiguous().log()[:, None]
    # one width for all, of which a GPU compiles one kernel: the first do not depend on it
    ids = top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))[1][:, :top]
    logprobs = weighed.gather(1, torch.cat((tokens[:, None], ids), dim=1)) - rest
    bits = logprobs.view(torch.int32).long()
    return torch.cat((bits[:, :1], ids, bits[:, 1:]), dim=1)


def read_scores(numbers: np.ndarray, tops: Sequence[int]) -> list[TokenLogprob]:
    """Rows of ``score`` on the host; of row r the ``tops[r]`` likeliest are wanted."""
    width = numbers.shape[1] // 2
    logprobs = np.delete(numbers, np.s_[1 : 1 + width], axis=1).astype(np.int32).view(np.float32).tolist()
    ids = numbers[:, 1 : 1 + width].tolist()
    return [
        TokenLogprob(_finite(own), tuple(zip(of_row[:top], map(_finite, likeliest[:top]), strict=True)))
        for (own, *likeliest), of_row, top in zip(logprobs, ids, tops, strict=True)
    ]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
