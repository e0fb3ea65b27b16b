"""Sampling as a pure function: a token depends on its logits, the request's parameters, and (seed, choice, position).

A token is ``argmax(logits / T + gumbel)`` over the ids that the filters keep, which is an exact draw from the filtered
softmax (the Gumbel-max trick). The noise is counter-based and keyed by the token *id*, so that it does not matter in
which round, batch or order a token is drawn, or whether it was drafted first. ``T == 0`` is ``argmax`` of the logits.

The order is: divide by T; keep the ``top_k`` best; of these, renormalised, keep each whose better ones sum to less than
``top_p``; keep what is at least ``min_p`` times as likely as the best; pick. At least one token stays. Ties everywhere
(cut, order, pick): higher value, then lower id. The best logit is subtracted before dividing by T, so that no
temperature overflows. A NaN counts as -inf; a row that is -inf throughout gives id 0.

Every row's bits are the same in every batch. Sums over the vocabulary are trees whose shape depends on the vocabulary's
size only, and a prefix sum depends on the entries before it only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.ops.topk import argmax, top_k

Kind = Literal["greedy", "unfiltered", "filtered"]
"""What a row needs: argmax; noise over the whole vocabulary (with or without min-p); a sorted head (top-k or top-p)."""

_WORD = 0xFFFFFFFF
_SUM_BLOCK = 1024
_FIRST_WIDTH = 64
_WIDENING = 16


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of R rows, one drawn token each. Tensors are [R], on the device of the logits.

    ``seed`` holds the 64 bits of the seed, ``choice`` the index among a request's n answers, ``position`` the absolute
    index (in the request's sequence, prompt included) of the token being drawn. ``kinds`` and ``limits`` (``top_k``, 0
    for off) repeat on the host what decides which work is done, so that deciding it does not wait for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor
    kinds: tuple[Kind, ...]
    limits: tuple[int, ...]

    @classmethod
    def from_lists(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seed: Sequence[int],
        choice: Sequence[int],
        position: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """One entry per row. Seeds are taken modulo 2**64. Off: top_k 0 or -1, top_p 1, min_p 0. A temperature below
        the smallest normal float32 is 0."""
        smallest = torch.finfo(torch.float32).tiny
        temperatures = torch.tensor([t if t >= smallest else 0.0 for t in temperature], dtype=torch.float32)
        nucleus = torch.tensor(top_p, dtype=torch.float32)
        limits = tuple(max(k, 0) for k in top_k)
        kinds = tuple(map(_kind, temperatures.tolist(), limits, nucleus.tolist()))
        return cls(
            temperature=temperatures.to(device),
            top_k=torch.tensor(limits, dtype=torch.int64, device=device),
            top_p=nucleus.to(device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            seed=torch.tensor([_signed(s) for s in seed], dtype=torch.int64, device=device),
            choice=torch.tensor(choice, dtype=torch.int64, device=device),
            position=torch.tensor(position, dtype=torch.int64, device=device),
            kinds=kinds,
            limits=limits,
        )

    def select(self, indices: Sequence[int]) -> SamplingRows:
        """Rows ``indices``, in that order; an index may repeat (one lane's parameters for each row of its span)."""
        index = torch.tensor(indices, dtype=torch.int64, device=self.seed.device)
        return SamplingRows(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            choice=self.choice[index],
            position=self.position[index],
            kinds=tuple(self.kinds[i] for i in indices),
            limits=tuple(self.limits[i] for i in indices),
        )

    def at(self, position: Tensor) -> SamplingRows:
        """The same rows drawing at other positions ([R] int64)."""
        return dataclasses.replace(self, position=position)

    def __len__(self) -> int:
        return len(self.kinds)


def _kind(temperature: float, limit: int, top_p: float) -> Kind:
    if temperature == 0.0:
        return "greedy"
    return "filtered" if limit > 0 or top_p < 1.0 else "unfiltered"


def _signed(seed: int) -> int:
    """The int64 with the bits of ``seed`` modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


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


# ---- picks


def pick(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The token each row draws: ``logits`` [R, V] float32 -> [R] int64. The module's docstring states the rule."""
    assert logits.dtype == torch.float32 and logits.shape[0] == len(rows), (logits.dtype, logits.shape, len(rows))
    members: dict[Kind, list[int]] = {}
    for row, kind in enumerate(rows.kinds):
        members.setdefault(kind, []).append(row)
    if len(members) == 1:
        return _pick_kind(rows.kinds[0], logits, rows)
    picks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for kind, indices in members.items():
        index = torch.tensor(indices, device=logits.device)
        picks[index] = _pick_kind(kind, logits[index], rows.select(indices))
    return picks


def pick_candidates(scores: Tensor, ids: Tensor, rows: SamplingRows) -> Tensor:
    """The drafter's draw among its own candidates: ``scores`` [R, k] float32, ``ids`` [R, k] int64, distinct in a row
    -> index into the row, [R] int64.

    The noise of an id is the one that ``pick`` gives it at this position, which couples the two draws: they agree
    often. The filters are not applied.
    """
    sampled = rows.temperature[:, None] > 0
    scaled = _scaled(scores, torch.where(sampled, rows.temperature[:, None], 1.0))
    if any(kind != "greedy" for kind in rows.kinds):
        noise = gumbel(rows.seed, rows.choice, rows.position, ids)
        scaled = torch.where(sampled, scaled + noise, scaled)
    return _best(scaled, ids)


def _pick_kind(kind: Kind, logits: Tensor, rows: SamplingRows) -> Tensor:
    if kind == "greedy":
        return argmax(logits)
    if kind == "unfiltered":
        return _pick_unfiltered(logits, rows)
    return _pick_filtered(logits, rows, _first_width(logits, rows))


def _pick_unfiltered(logits: Tensor, rows: SamplingRows) -> Tensor:
    scaled = _scaled(logits, rows.temperature[:, None])
    kept = scaled.exp() >= rows.min_p[:, None]  # the best one's weight is exactly 1
    noise = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, logits.shape[1])
    return argmax(torch.where(kept, scaled + noise, -torch.inf))


def _pick_filtered(logits: Tensor, rows: SamplingRows, width: int) -> Tensor:
    """Draw from the ``width`` best ids. Rows whose nucleus does not end inside are drawn again from more, which would
    give the others nothing new: neither a prefix sum nor the total depends on ``width``."""
    vocab = logits.shape[1]
    values, ids = top_k(logits, width)
    scaled = _scaled(values, rows.temperature[:, None])
    weights = scaled.exp()
    sums = _prefix_sums(weights)
    limit, top_p = rows.top_k[:, None], rows.top_p[:, None]
    total = sums.gather(1, limit.clamp(1, width) - 1)
    if 0 in rows.limits:
        whole = _sum(_scaled(logits, rows.temperature[:, None]).exp())[:, None]
        total = torch.where(limit > 0, total, whole)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    rank = torch.arange(width, device=logits.device)
    outside = (before >= top_p * total) & (top_p < 1)
    cut = torch.where(outside, rank, width).amin(dim=1, keepdim=True)
    kept = (rank < cut.clamp(min=1)) & ((limit == 0) | (rank < limit)) & (weights >= rows.min_p[:, None])
    if 4 * width < vocab:
        noise = gumbel(rows.seed, rows.choice, rows.position, ids)
    else:  # the same bits, four to a call
        noise = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, vocab).gather(1, ids)
    best = _best(torch.where(kept, scaled + noise, -torch.inf), ids)
    picks = ids.gather(1, best[:, None])[:, 0]
    if width < vocab and 0 in rows.limits:
        index = ((limit == 0) & (cut == width))[:, 0].nonzero()[:, 0]
        if len(index):
            more = min(vocab, width * _WIDENING)
            picks[index] = _pick_filtered(logits[index], rows.select(index.tolist()), more)
    return picks


def _first_width(logits: Tensor, rows: SamplingRows) -> int:
    """How many of the best ids to look at first: all that top-k may keep, and enough for the usual nucleus. Whether a
    nucleus ends inside is known on the device only; away from the CPU, rather than wait for it, look at all ids."""
    vocab = logits.shape[1]
    unlimited = _FIRST_WIDTH if logits.device.type == "cpu" else vocab
    return min(vocab, max(limit if limit > 0 else unlimited for limit in rows.limits))


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - row maximum) / T: at most 0, the maximum exactly 0 and never NaN. [R, C], T [R, 1] > 0."""
    largest = torch.finfo(torch.float32).max
    finite = torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    return (finite - finite.amax(dim=1, keepdim=True).clamp(min=-largest)) / temperature


def _best(scores: Tensor, ids: Tensor) -> Tensor:
    """Index of the largest score of each row; ties go to the lower id. Scores hold no NaN."""
    tied = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(tied, ids, torch.iinfo(torch.int64).max).min(dim=1).indices


def _prefix_sums(x: Tensor) -> Tensor:
    """Inclusive prefix sums over the columns of [R, C] in log2(C) steps. Column i is a fixed tree over columns 0 ... i,
    whatever C is."""
    step = 1
    while step < x.shape[1]:
        x = torch.cat((x[:, :step], x[:, step:] + x[:, :-step]), dim=1)
        step *= 2
    return x


def _sum(x: Tensor) -> Tensor:
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
