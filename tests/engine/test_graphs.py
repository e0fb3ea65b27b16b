"""Prompt forwards as if captured, on a CPU: to run a graph is to call its forward again, on what lies in its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine import graphs
from paceline.engine.decode import DecodeShape
from paceline.engine.graphs import CapturedPrefill, Graphs, prompt_shapes
from paceline.engine.plan import PrefillSpan, Round, RoundResult
from paceline.engine.prompts import PromptShape, unpack_prompts
from paceline.engine.runner import Runner
from paceline.models.qwen35 import Hidden
from paceline.state.pool import StatePool
from paceline.types import Request

LENGTHS = (150, 70, 20, 170)
ROUNDS = (((0, 0, 64), (1, 0, 70)), ((0, 64, 64), (2, 0, 20)), ((0, 128, 22), (3, 0, 170)))
"""Of each span the prompt, start and length."""
ROWS = (140, 90, 200)
"""Of the graph that each round runs."""


def test_graphs_have_room_for_what_comes_together() -> None:
    for lanes in (1, 3, 6, 8, 40):
        shapes = prompt_shapes(lanes)
        assert [shape.rows for shape in shapes] == [*range(128, 768, 32), 768, 832, 896, 960, 1024]
        spans = [shape.spans for shape in shapes]
        assert spans == sorted(spans) and spans[-1] == min(lanes, 8) + 1, "one is padding"
        for shape in shapes:
            short = shape.spans - 2  # prompts of a row, beside one that has all others
            assert shape.padded and shape.chunks >= short + -(-(shape.rows - short) // 64)
    assert [shape.spans for shape in prompt_shapes(8)][:6] == [5, 6, 7, 8, 9, 9]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs can be made on a CPU, of the rounds' prompts only; gathers the rows of those that run."""
    rows: list[int] = []

    def captured(self: Graphs, forward: Callable[[], None], capture: Any) -> Any:
        forward()
        return SimpleNamespace(replay=forward)

    def unpack(packed: Tensor, shape: PromptShape, *bounds: Sequence[int]) -> tuple[PackedBatch, Tensor]:
        # kernels read facts on the device, the references those of the host, which must therefore be those of the round
        spans = ROUNDS[ROWS.index(shape.rows)]
        lengths = [length for _, _, length in spans]
        return unpack_prompts(packed, shape, [*lengths, shape.rows - sum(lengths)], [*(start for _, start, _ in spans), 0])

    def run(self: CapturedPrefill) -> Hidden:
        rows.append(self.shape.rows)
        return original(self)

    original = CapturedPrefill.run
    monkeypatch.setattr(CapturedPrefill, "run", run)
    monkeypatch.setattr(Graphs, "_captured", captured)
    monkeypatch.setattr(Graphs, "_capture_verify", lambda self, shape: SimpleNamespace(shape=shape))
    monkeypatch.setattr(graphs, "unpack_prompts", unpack)
    monkeypatch.setattr(
        graphs, "prompt_shapes", lambda lanes: [PromptShape(rows, 3, 6, padded=True) for rows in sorted(ROWS)]
    )
    monkeypatch.setattr(graphs, "decode_shapes", lambda lanes, block: [DecodeShape(1, 2, padded=True)])
    monkeypatch.setattr(graphs, "draft_buckets", lambda lanes: ())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
    return rows


def read(runner: Runner) -> list[RoundResult]:
    requests = []
    for number, length in enumerate(LENGTHS):
        assert runner.pool.admit(length + 32) == number
        prompt = tuple((7 + 31 * number * at + at * at) % 5000 for at in range(length))
        requests.append(Request(f"{number}", prompt, 0.7, 1.0, 0, 0.0, number, 32, logprobs=1, prompt_logprobs=1))
    results = []
    for spans in ROUNDS:
        prompts = [
            PrefillSpan(
                requests[lane], lane, start, requests[lane].prompt[start : start + length], start + length == LENGTHS[lane]
            )
            for lane, start, length in spans
        ]
        results.append(runner.run(Round((), tuple(prompts))))
    return results


def committed(pool: StatePool) -> list[Tensor]:
    """What lanes have, but not the page of padding."""
    paged = [part for cache in (*pool.k, *pool.v, *pool.draft_k, *pool.draft_v) for part in (cache.data, cache.scale)]
    return [pool.gdn, pool.history, *(part[1:] for part in paged if part is not None)]


def test_prompt_graphs_share_what_they_leave(bench: Workbench, recorded: list[int]) -> None:
    case = Case("prompt graphs", lanes=4, threads=torch.get_num_threads())
    plain, runner = (bench.parts(case, {}).runner for _ in range(2))
    with torch.inference_mode():
        captured = Graphs(runner.target, runner.drafter, runner.pool)
    results, expected = read(Runner(runner.target, runner.drafter, runner.pool, graphs=captured)), read(plain)
    assert recorded == [*ROWS]
    for got, want in zip(results, expected, strict=True):
        assert (got.prefill, got.logprobs, got.prompt_logprobs) == (want.prefill, want.logprobs, want.prompt_logprobs)
    for ours, theirs in zip(committed(runner.pool), committed(plain.pool), strict=True):
        assert torch.equal(ours, theirs)
    places = {hidden.data_ptr() for graph in captured._prefill for hidden in graph.hidden if hidden is not None}
    assert len(places) == 2, "one for all graphs"
