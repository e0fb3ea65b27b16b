"""Sampling as a pure function: a token depends on its logits, the request's parameters, and (seed, choice, position).

A token is ``argmax(logits / T + gumbel)`` over the ids that the filters keep, which is an exact draw from the filtered
softmax (the Gumbel-max trick). The noise is counter-based and keyed by the token *id*, so that it does not matter in
which round, batch or order a token is drawn, or whether it was drafted first. ``T == 0`` is ``argmax`` of the logits.

The order is: divide by T; keep the ``top_k`` best; of these, renormalised, keep each whose better ones sum to less than
``top_p``; keep what is at least ``min_p`` times as likely as the best; pick. At least one token stays. Ties everywhere
(cut, order, pick): higher value, then lower id. The best logit is subtracted before dividing by T, so that no
temperature overflows. A NaN counts as -inf; a row that is -inf throughout gives id 0.

Every row's bits are the same in every batch. Sums over the vocabulary are trees whose shape depends on the vocabulary's
size only, and a prefix sum depends on the entries before it only. The arithmetic is in ``ops.sample``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.ops.sample import draw, draw_candidates, gumbel, gumbel_of_vocabulary, last_kept
from paceline.ops.sample.ref import best, count_kept, scaled, tree_sum
from paceline.ops.topk import argmax, top_k
from paceline.transfer import to_device

Kind = Literal["greedy", "unfiltered", "filtered"]
"""What a row needs: argmax; noise over the whole vocabulary (with or without min-p); a sorted head (top-k or top-p)."""

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
        packed, kinds, limits = pack_rows(temperature, top_k, top_p, min_p, seed, choice, position)
        return cls.unpack(to_device(packed, torch.device(device)), kinds, limits)

    @classmethod
    def unpack(cls, packed: Tensor, kinds: tuple[Kind, ...], limits: tuple[int, ...]) -> SamplingRows:
        """Rows whose tensors are views of what ``pack_rows`` made, on a device."""
        rows = len(kinds)
        integers, floats = packed.split((4 * rows, packed.shape[0] - 4 * rows))
        seed, choice, position, top_k = integers.view(4, rows).unbind()
        temperature, top_p, min_p = floats.view(torch.float32)[: 3 * rows].view(3, rows).unbind()
        return cls(temperature, top_k, top_p, min_p, seed, choice, position, kinds, limits)

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


def pack_rows(
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    seed: Sequence[int],
    choice: Sequence[int],
    position: Sequence[int],
) -> tuple[np.ndarray, tuple[Kind, ...], tuple[int, ...]]:
    """The numbers of R rows in one int64 array, for one transfer, and their kinds and limits (``SamplingRows``)."""
    rows = len(temperature)
    limits = tuple(max(k, 0) for k in top_k)
    packed = np.zeros(packed_size(rows), np.int64)
    integers, floats = packed[: 4 * rows].reshape(4, rows), packed[4 * rows :].view(np.float32)[: 3 * rows].reshape(3, rows)
    integers[:] = [_signed(s) for s in seed], choice, position, limits
    floats[:] = temperature, top_p, min_p
    floats[0][floats[0] < np.finfo(np.float32).tiny] = 0.0
    return packed, tuple(map(_kind, floats[0].tolist(), limits, floats[1].tolist())), limits


def packed_size(rows: int) -> int:
    """Length of the array that ``pack_rows`` makes."""
    return 4 * rows + (3 * rows + 1) // 2


def _kind(temperature: float, limit: int, top_p: float) -> Kind:
    if temperature == 0.0:
        return "greedy"
    return "filtered" if limit > 0 or top_p < 1.0 else "unfiltered"


def _signed(seed: int) -> int:
    """The int64 with the bits of ``seed`` modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


# ---- picks


def pick(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The token each row draws: ``logits`` [R, V] float32 -> [R] int64. The module's docstring states the rule."""
    assert logits.dtype == torch.float32 and logits.shape[0] == len(rows), (logits.dtype, logits.shape, len(rows))
    return _pick_by_kind(logits, rows) if logits.device.type == "cpu" else _pick_together(logits, rows)


def _pick_together(logits: Tensor, rows: SamplingRows) -> Tensor:
    """All rows go through the same few launches, none of which waits for the device."""
    if all(kind == "greedy" for kind in rows.kinds):
        return argmax(logits)
    limits = tuple(limit for limit, kind in zip(rows.limits, rows.kinds, strict=True) if kind == "filtered")
    cut = last_kept(logits, rows.temperature, rows.top_k, rows.top_p, limits) if limits else None
    return draw(logits, rows.temperature, rows.min_p, rows.seed, rows.choice, rows.position, cut)


def pick_candidates(scores: Tensor, ids: Tensor, rows: SamplingRows) -> Tensor:
    """The drafter's draw among its own candidates: ``scores`` [R, k] float32, ``ids`` [R, k] int64, distinct in a row
    -> index into the row, [R] int64.

    The noise of an id is the one that ``pick`` gives it at this position, which couples the two draws: they agree
    often. The filters are not applied.
    """
    return draw_candidates(scores, ids, rows.temperature, rows.seed, rows.choice, rows.position)


def _pick_by_kind(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Each row does what its kind needs and no more."""
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


def _pick_kind(kind: Kind, logits: Tensor, rows: SamplingRows) -> Tensor:
    if kind == "greedy":
        return argmax(logits)
    if kind == "unfiltered":
        return draw(logits, rows.temperature, rows.min_p, rows.seed, rows.choice, rows.position)
    return _pick_filtered(logits, rows, _first_width(logits.shape[1], rows))


def _pick_filtered(logits: Tensor, rows: SamplingRows, width: int) -> Tensor:
    """Draw from the ``width`` best ids. Rows whose nucleus does not end inside are drawn again from more, which would
    give the others nothing new: neither a prefix sum nor the total depends on ``width``."""
    vocab = logits.shape[1]
    temperature = rows.temperature[:, None]
    values, ids = top_k(logits, width)
    weighed = scaled(values, temperature)
    weights = weighed.exp()
    whole = tree_sum(scaled(logits, temperature).exp()) if 0 in rows.limits else None
    count = count_kept(weights, whole, rows.top_k, rows.top_p)
    kept = (torch.arange(width, device=logits.device) < count) & (weights >= rows.min_p[:, None])
    if 4 * width < vocab:
        noise = gumbel(rows.seed, rows.choice, rows.position, ids)
    else:  # the same bits, four to a call
        noise = gumbel_of_vocabulary(rows.seed, rows.choice, rows.position, vocab).gather(1, ids)
    index = best(torch.where(kept, weighed + noise, -torch.inf), ids)
    picks = ids.gather(1, index[:, None])[:, 0]
    if width < vocab and 0 in rows.limits:
        again = ((rows.top_k == 0) & (count[:, 0] == width)).nonzero()[:, 0]
        if len(again):
            more = min(vocab, width * _WIDENING)
            picks[again] = _pick_filtered(logits[again], rows.select(again.tolist()), more)
    return picks


def _first_width(vocab: int, rows: SamplingRows) -> int:
    """How many of the best ids to look at first: all that top-k may keep, and enough for the usual nucleus."""
    return min(vocab, max(limit if limit > 0 else _FIRST_WIDTH for limit in rows.limits))
