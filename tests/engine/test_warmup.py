"""The rounds before the first request leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine.plan import Round, RoundResult
from paceline.engine.warmup import warm_up


@pytest.mark.parametrize("lanes", [1, 3])
def test_warming_up_leaves_no_trace(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Workbench().parts(Case("warm-up", lanes=lanes, threads=torch.get_num_threads()), {})
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
