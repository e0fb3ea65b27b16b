"""Features wait for the drafter until their context is made for good, also where it was made ahead in vain."""

from __future__ import annotations

import pytest
import torch
from test_ahead import Plain, _request, after, begin, demo, expecting, watched

from paceline.bench.law import Workbench
from paceline.ops.kv import read_pages
from paceline.state.pool import StatePool


def context(pool: StatePool, lane: int) -> list[torch.Tensor]:
    caches = [(cache, view.page_table[lane].long()) for view in pool.draft_views() for cache in (view.k, view.v)]
    return [read_pages(cache, table).flatten(0, 1)[: pool.committed(lane)] for cache, table in caches]


@pytest.mark.parametrize("plain", [1, 7, 8, 9])
def test_what_was_begun_in_vain_takes_no_features(bench: Workbench, plain: int) -> None:
    """Behind so many plain rounds a block is drafted and verified ahead, and forgotten; then the lane drafts."""
    left = []
    for ahead in (True, False):
        first = demo(bench, 1)
        runner = watched(first, Plain(first), ahead)
        spans = begin(runner, [_request("a")], drafts=0)
        for number in range(plain):
            result = runner.run(expecting(spans, 7 if number == plain - 1 else 0))
            spans = after(spans, result.verify)
        assert runner.pool.backlog(spans[0].lane) == (plain if plain <= 8 else 1)
        assert (runner._begun is not None) == ahead
        runner._begun = None
        assert runner.drafter is not None
        runner.drafter.propose(spans, runner.pool)
        left.append(context(runner.pool, spans[0].lane))
    for got, want in zip(*left, strict=True):
        assert torch.equal(got, want)
