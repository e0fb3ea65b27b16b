"""Triton kernels of ``ref.py``: one program per lane; the walk goes through a lane's slots in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.launch import await_turn, pdl
from paceline.ops.sample.kernel import best_candidate
from paceline.ops.topk.kernel import key_id


def candidate_scores(
    logits: Tensor, candidates: Tensor, hidden: Tensor, previous: Tensor, predecessor: Tensor, successor: Tensor
) -> Tensor:
    lanes, k = logits.shape
    rank = predecessor.shape[1]
    logits, candidates, hidden, previous = (t.contiguous() for t in (logits, candidates, hidden, previous))
    scores = torch.empty(lanes, k, dtype=torch.float32, device=logits.device)
    _scores[(lanes,)](
        logits,
        candidates,
        hidden,
        previous,
        predecessor,
        successor,
        scores,
        k,
        rank,
        K=triton.next_power_of_2(k),
        RANK=triton.next_power_of_2(rank),
        num_warps=4,
        **pdl(logits.device),
    )
    return scores


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
    lanes, slots, k = logits.shape
    rank = predecessor.shape[1]
    tokens = torch.empty(lanes, slots, dtype=torch.int64, device=logits.device)
    logits, candidates, hidden, anchors = (t.contiguous() for t in (logits, candidates, hidden, anchors))
    _walk[(lanes,)](
        logits,
        candidates,
        hidden,
        anchors,
        predecessor,
        successor,
        *(t.contiguous() for t in (temperature, seed, choice, position)),
        tokens,
        slots,
        predecessor.shape[0],
        k,
        rank,
        K=triton.next_power_of_2(k),
        RANK=triton.next_power_of_2(rank),
        num_warps=4,
        **pdl(logits.device),
    )
    return tokens


@triton.jit
def _score(logits, hidden, row, ids, inside, previous, predecessor, successor, k, rank, K: tl.constexpr, RANK: tl.constexpr):
    """Scores [K] of one slot: its row of logits and hidden, its int64 ids, the token before it."""
    dims = tl.arange(0, RANK)
    there = dims < rank
    # What does not depend on the token before comes first, so that its latency is hidden.
    after = tl.load(successor + ids[:, None] * rank + dims[None, :], mask=inside[:, None] & there[None, :], other=0.0).to(
        tl.float32
    )
    state = tl.load(hidden + row * rank + dims, mask=there, other=0.0).to(tl.float32)
    logit = tl.load(logits + row * k + tl.arange(0, K), mask=inside, other=float("-inf"))
    before = tl.load(predecessor + previous * rank + dims, mask=there, other=0.0).to(tl.float32)
    return logit + tl.sum(after * (before * state)[None, :], axis=1)


@triton.jit
def _scores(
    logits,
    candidates,
    hidden,
    previous,
    predecessor,
    successor,
    scores,
    k,
    rank,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    lane = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    inside = at < k
    ids = tl.load(candidates + lane * k + at, mask=inside, other=0)
    before = tl.load(previous + lane)
    score = _score(logits, hidden, lane, ids, inside, before, predecessor, successor, k, rank, K, RANK)
    tl.store(scores + lane * k + at, score, mask=inside)


@triton.jit(
    do_not_specialize=["slots"], do_not_specialize_on_alignment=["anchors", "temperature", "seed", "choice", "position"]
)
def _walk(
    logits,
    candidates,
    hidden,
    anchors,
    predecessor,
    successor,
    temperature,
    seed,
    choice,
    position,
    tokens,
    slots,
    vocab,
    k,
    rank,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_turn(PDL)
    lane = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    inside = at < k
    # The lanes that fill a batch up may have any anchor.
    previous = tl.minimum(tl.maximum(tl.load(anchors + lane), 0), vocab - 1)
    for slot in range(slots):
        row = lane * slots + slot
        ids = tl.load(candidates + row * k + at, mask=inside, other=0)
        score = _score(logits, hidden, row, ids, inside, previous, predecessor, successor, k, rank, K, RANK)
        key = best_candidate(
            score,
            ids.to(tl.int32),
            inside,
            tl.load(temperature + row),
            tl.load(seed + row),
            tl.load(choice + row),
            tl.load(position + row),
        )
        previous = key_id(key).to(tl.int64)
        tl.store(tokens + row, previous)
