"""Draws from a softmax by the Gumbel-max trick: ``argmax(logits / T + gumbel)``, with noise keyed by the token id.

The rules (the order of filters, ties, what T = 0 means) are stated in ``paceline.sampling``. In all functions R rows draw
one token each; ``temperature``, ``top_p`` and ``min_p`` are [R] float32, ``top_k``, ``seed``, ``choice`` and ``position``
[R] int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ops.topk.ref import argmax, order_keys, top_k

KEEP_ALL = -(2**63)
"""The cut, as an order key, below which nothing lies."""

_WORD = 0xFFFFFFFF
_SUM_BLOCK = 1024


# ---- noise


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four 32-bit words.

    All tensors are int64 holding unsigned 32-bit words, and broadcast. A product of two words fits 64 bits; int64
    wraps, which leaves the bits right, and the sign that the shift drags in is masked before the next product.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) ^ (c1 ^ k0)) & _WORD, p1, ((p0 >> 32) ^ (c3 ^ k1)) & _WORD, p0
        k0 = (k0 + 0x9E3779B9) & _WORD
        k1 = (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise: ``seed``, ``choice``, ``position`` [R] int64, ``token_ids`` [R, C] or [C] int64 -> [R, C]
    float32, all finite.

    The bits are word ``token_id % 4`` of Philox4x32-10 with key (low, high word of the seed) and counter
    ``(token_id // 4, position, choice, 0)``: one call serves four neighbouring ids. ``gumbel_from_bits`` does the rest.
    """
    words = torch.stack(torch.broadcast_tensors(*_words(seed, choice, position, token_ids // 4)), dim=-1)
    which = (token_ids % 4).expand(words.shape[:-1])
    return gumbel_from_bits(words.gather(-1, which[..., None])[..., 0])


def gumbel_of_vocabulary(seed: Tensor, choice: Tensor, position: Tensor, size: int) -> Tensor:
    """``gumbel`` for the ids 0 ... size - 1, four ids a call: [R, size] float32, the same bits."""
    words = _words(seed, choice, position, torch.arange(-(-size // 4), device=seed.device))
    return gumbel_from_bits(torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :size])


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """``-log(-log1p(-v))`` with ``v = (r + 0.5) * 2**-32`` in float32, at most 1 - 2**-24; r is a 32-bit word (int64).

    The rounding of v to 24 bits falls on the side of v = 1, where noise is lowest; the usual ``-log(-log(u))`` rounds u
    to 1 now and then and returns +inf, which would let any token win.
    """
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _words(seed: Tensor, choice: Tensor, position: Tensor, group: Tensor) -> tuple[Tensor, ...]:
    key = (seed[:, None] & _WORD, (seed[:, None] >> 32) & _WORD)
    return philox((group, position[:, None], choice[:, None], torch.zeros_like(group)), key)


# ---- draws


def draw(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    cut: Tensor | None = None,
) -> Tensor:
    """The token each row draws from the whole vocabulary: ``logits`` [R, V] float32 -> [R] int64.

    Rows with T = 0 take the argmax. The others draw among the ids that are at least ``min_p`` times as likely as the best
    one and whose order key is at least ``cut`` ([R] int64, as ``last_kept`` gives it).
    """
    greedy = temperature == 0
    weighed = scaled(logits, torch.where(greedy, 1.0, temperature)[:, None])
    kept = weighed.exp() >= min_p[:, None]  # the best one's weight is exactly 1
    if cut is not None:
        kept &= order_keys(logits, torch.arange(logits.shape[1], device=logits.device)) >= cut[:, None]
    noise = gumbel_of_vocabulary(seed, choice, position, logits.shape[1])
    return argmax(torch.where(greedy[:, None], logits, torch.where(kept, weighed + noise, -torch.inf)))


def draw_candidates(
    scores: Tensor, ids: Tensor, temperature: Tensor, seed: Tensor, choice: Tensor, position: Tensor
) -> Tensor:
    """The draw among some ids: ``scores`` [R, k] float32, ``ids`` [R, k] int64, distinct in a row -> index into the row,
    [R] int64."""
    sampled = temperature[:, None] > 0
    weighed = scaled(scores, torch.where(sampled, temperature[:, None], 1.0))
    if sampled.any():
        weighed = torch.where(sampled, weighed + gumbel(seed, choice, position, ids), weighed)
    return best(weighed, ids)


def last_kept(logits: Tensor, temperature: Tensor, top_k_limit: Tensor, top_p: Tensor, limits: Sequence[int]) -> Tensor:
    """An order key that exactly the ids which top-k and top-p keep reach: ``logits`` [R, V] float32 -> [R] int64.

    ``top_k_limit`` is 0 where top-k is off, ``top_p`` 1 where top-p is off; with both off, and in rows with T = 0, the key
    is ``KEEP_ALL``. ``limits`` tells the host, which does not see the tensors, which limits the rows with a filter have.
    """
    filtered = (temperature > 0) & ((top_k_limit > 0) | (top_p < 1))
    values, ids = top_k(logits, logits.shape[1])
    weights = scaled(values, torch.where(filtered, temperature, 1.0)[:, None]).exp()
    count = count_kept(weights, tree_sum(weights), top_k_limit, top_p)
    return torch.where(filtered, order_keys(values, ids).gather(1, count - 1)[:, 0], KEEP_ALL)


# ---- parts


def count_kept(weights: Tensor, whole: Tensor | None, top_k_limit: Tensor, top_p: Tensor) -> Tensor:
    """How many of each row's best ids top-k and top-p keep: ``weights`` [R, C] of the C best, in order -> [R, 1] int64.

    ``whole`` [R] is the weight of all ids, which rows without top-k need. In such a row C may mean C or more.
    """
    width = weights.shape[1]
    limit = top_k_limit[:, None]
    sums = prefix_sums(weights)
    total = sums.gather(1, limit.clamp(1, width) - 1)
    if whole is not None:
        total = torch.where(limit > 0, total, whole[:, None])
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    outside = (before >= top_p[:, None] * total) & (top_p[:, None] < 1)
    rank = torch.arange(width, device=weights.device)
    cut = torch.where(outside, rank, width).amin(dim=1, keepdim=True).clamp(min=1)
    return torch.where(limit > 0, torch.minimum(cut, limit), cut)


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - row maximum) / T: at most 0, the maximum exactly 0 and never NaN. [R, C], T [R, 1] > 0."""
    largest = torch.finfo(torch.float32).max
    finite = torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    return (finite - finite.amax(dim=1, keepdim=True).clamp(min=-largest)) / temperature


def best(scores: Tensor, ids: Tensor) -> Tensor:
    """Index of the largest score of each row; ties go to the lower id. Scores hold no NaN."""
    tied = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(tied, ids, torch.iinfo(torch.int64).max).min(dim=1).indices


def prefix_sums(x: Tensor) -> Tensor:
    """Inclusive prefix sums over the columns of [R, C] in log2(C) steps. Column i is a fixed tree over columns 0 ... i,
    whatever C is."""
    step = 1
    while step < x.shape[1]:
        x = torch.cat((x[:, :step], x[:, step:] + x[:, :-step]), dim=1)
        step *= 2
    return x


def tree_sum(x: Tensor) -> Tensor:
    """Sum of each row of [R, V]: within blocks of ``_SUM_BLOCK`` columns, then over the blocks, each by halving."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % _SUM_BLOCK)).unflatten(1, (-1, _SUM_BLOCK))
    blocks = _halve(x)
    padded = 1 << (blocks.shape[1] - 1).bit_length()
    return _halve(torch.nn.functional.pad(blocks, (0, padded - blocks.shape[1])))


def _halve(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
