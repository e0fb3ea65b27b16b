"""The goldens of the demo pair, fed through it as scripted drafts in packed forwards.

The walk re-synchronises at every step: what is fed is always the golden path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from demo_pair import Pair, goldens, greedy_request

from paceline.engine.plan import VerifySpan
from paceline.models.qwen35 import Hidden
from paceline.ops.features import keep_features
from paceline.ops.topk import argmax
from paceline.state.pool import Half, SpanRows
from paceline.types import Request

LANES = 10


@dataclass(slots=True)
class Walk:
    """One golden being walked: ``picks`` by step, and what the drafter proposed and would have kept, by round."""

    golden: dict[str, Any]
    request: Request
    lane: int
    picks: dict[int, set[int]] = field(default_factory=dict)
    drafts: list[list[int]] = field(default_factory=list)
    keeps: list[int] = field(default_factory=list)
    step: int = 0

    @property
    def path(self) -> list[int]:
        return self.golden["tokens"]

    @property
    def done(self) -> bool:
        return self.step == len(self.path) - 1

    def add_picks(self, first: int, picks: Sequence[int]) -> None:
        for step, pick in enumerate(picks, first):
            self.picks.setdefault(step, set()).add(pick)


@torch.inference_mode()
def walk_all(everything: Pair) -> list[Walk]:
    """All goldens, ``LANES`` at a time."""
    rows = goldens()
    return [walk for start in range(0, len(rows), LANES) for walk in walk_together(everything, rows[start : start + LANES])]


def walk_together(everything: Pair, rows: list[dict[str, Any]]) -> Iterator[Walk]:
    walks = []
    for golden in rows:
        request = greedy_request(golden["prompt_tokens"], len(golden["tokens"]))
        lane = everything.pool.admit(len(request.prompt) + request.max_tokens)
        assert lane is not None
        walks.append(Walk(golden, request, lane))
    prefill(everything, walks)
    while live := [walk for walk in walks if not walk.done]:
        verify(everything, live)
        everything.pool.check()
    for walk in walks:
        everything.pool.release(walk.lane)
    yield from walks


def forward(everything: Pair, tokens: list[int], half: Half | None) -> Hidden:
    assert half is not None
    ids = torch.tensor(tokens, device=everything.pool.device)
    hidden, features = everything.target(ids, half.batch, half.target, everything.drafter.taps)
    assert features is not None
    if half.features is None:
        everything.drafter.project(features, half.batch, half.context)
    else:
        keep_features(half.features, features, half.batch)
    return hidden


def prefill(everything: Pair, walks: list[Walk]) -> None:
    txn = everything.pool.begin([SpanRows(walk.lane, 0, len(walk.request.prompt), "prefill") for walk in walks])
    hidden = forward(everything, [token for walk in walks for token in walk.request.prompt], txn.prefill)
    assert txn.prefill is not None
    batch = txn.prefill.batch
    last = everything.target.logits(hidden.rows(batch.starts + batch.span_lengths - 1))
    for walk, pick in zip(walks, argmax(last).tolist(), strict=True):
        walk.add_picks(0, [pick])
    everything.pool.commit(txn, txn.prefill.batch.lengths)


def verify(everything: Pair, live: list[Walk]) -> None:
    """One round: ask the drafter; feed the anchor and as many golden tokens as it would have drafted; keep of them what
    its own drafts would have kept."""
    block = everything.drafter.block_size
    spans, lengths = [], []
    for walk in live:
        start = len(walk.request.prompt) + walk.step
        spans.append(VerifySpan(walk.request, walk.lane, start, walk.path[walk.step], block - 1))
        lengths.append(min(block, len(walk.path) - 1 - walk.step))
    txn = everything.pool.begin(
        [SpanRows(s.lane, s.start, n, "decode", drafting=True) for s, n in zip(spans, lengths, strict=True)]
    )
    proposals = everything.drafter.propose(spans, everything.pool).tolist()
    fed = [walk.path[walk.step : walk.step + n] for walk, n in zip(live, lengths, strict=True)]
    hidden = forward(everything, [token for tokens in fed for token in tokens], txn.decode)
    picks = argmax(everything.target.logits(hidden)).split(lengths)
    keeps = []
    for walk, drafts, length, picked in zip(live, proposals, lengths, picks, strict=True):
        coming = walk.path[walk.step + 1 :]
        accepted = next((i for i, (a, b) in enumerate(zip(drafts, coming, strict=False)) if a != b), length - 1)
        walk.drafts.append(drafts)
        walk.keeps.append(min(accepted + 1, length))
        walk.add_picks(walk.step + 1, picked.tolist())
        walk.step += walk.keeps[-1]
        keeps.append(walk.keeps[-1])
    everything.pool.commit(txn, keeps)
