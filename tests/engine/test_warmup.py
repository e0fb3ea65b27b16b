"""The rounds before the first request leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine.plan import Round, RoundResult, RoundTimes
from paceline.engine.warmup import warm_up
from paceline.state.pool import SpanRows
from paceline.state.shapes import StateShape


@pytest.mark.parametrize("lanes", [1, 3])
def test_warming_up_leaves_no_trace(lanes: int, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = bench.parts(Case("warm-up", lanes=lanes, threads=torch.get_num_threads()), {})
    rounds: list[Round] = []
    original = parts.runner.run

    def run(round: Round) -> RoundResult:
        rounds.append(round)
        return original(round)

    monkeypatch.setattr(parts.runner, "run", run)
    warm_up(parts.runner)
    parts.runner.pool.check()
    allocator = parts.runner.pool.allocator
    assert allocator.free == allocator.total
    assert len(rounds) == 20 and max(len(round.prefill) for round in rounds) == min(lanes, 3)
    assert {span.drafts for round in rounds for span in round.verify} == {0, 7}


def test_there_is_room_for_the_longest_blocks(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of which hold."""
    runner = bench.parts(Case("warm-up", lanes=1, threads=torch.get_num_threads()), {}).runner
    pool, longest = runner.pool, 0
    monkeypatch.setattr(runner.drafter, "block_size", 64, raising=False)
    monkeypatch.setattr(StateShape, "draft_rows", 64)

    def run(round: Round) -> RoundResult:
        nonlocal longest
        rows = [SpanRows(span.lane, span.start, span.length, "decode", ahead=True) for span in round.verify]
        rows += [SpanRows(span.lane, span.start, span.length, "prefill") for span in round.prefill]
        pool.caught_up(span.lane for span in rows)
        pool.settle(pool.begin(rows, packed=False), [span.length for span in rows])
        longest = max(longest, *(span.length for span in rows if span.kind == "decode"), 0)
        return RoundResult(tuple((0,) * span.length for span in round.verify), (0,) * len(round.prefill), RoundTimes())

    monkeypatch.setattr(runner, "run", run)
    warm_up(runner)
    pool.check()
    assert longest == 64
