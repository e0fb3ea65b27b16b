"""What the drafter sees when it is asked: of every committed row the context that projecting its features at once gives,
whichever rounds were plain, failed, were run ahead, or put a parked lane into state again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_ahead import Plain, Uncaptured
from test_loop import Run, by_length, request, serve
from torch import Tensor

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine.build import EngineParts
from paceline.engine.drafting import DFlashDrafter, DraftInputs
from paceline.engine.loop import Message, Submit
from paceline.engine.plan import PrefillSpan
from paceline.engine.prompts import prefill_forward, prompt_inputs
from paceline.ops.kv import read_pages
from paceline.state.pool import SpanRows
from paceline.views import AttentionView, ContextView

TOKENS = 60
CASE = Case("context", lanes=3, threads=1, prefill_tokens=64, prompts_beside=False)
Context = list[tuple[Tensor, Tensor]]


def messages(parts: EngineParts) -> list[Message]:
    prompts = [*by_length()[:4], next(prompt for prompt in by_length() if len(prompt) > 140)]
    return [Submit(request(parts, str(at), prompt, TOKENS)) for at, prompt in enumerate(prompts)]


@torch.inference_mode()
def context_of(bench: Workbench, case: Case, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Context:
    """Keys and values of each drafter layer, of all rows before the last anchor."""
    runner = bench.parts(replace(case, lanes=1, parking=False, faults=False), {}).runner
    pool, target, drafter = runner.pool, runner.target, runner.drafter
    assert isinstance(drafter, DFlashDrafter)
    lane = pool.admit(len(prompt) + len(tokens))
    assert lane is not None
    parts: list[list[ContextView]] = []
    some: Any = None
    txn = pool.begin([SpanRows(lane, 0, len(prompt), "prefill")])
    inputs = prompt_inputs([PrefillSpan(some, lane, 0, prompt, False)], pool)
    prefill_forward(target, drafter, inputs)
    txn.prefill = inputs.half
    parts.append(inputs.half.context)
    pool.commit(txn, [len(prompt)])
    for start in range(0, len(tokens) - 1, drafter.block_size):
        fed = tokens[start : min(start + drafter.block_size, len(tokens) - 1)]
        txn = pool.begin([SpanRows(lane, pool.committed(lane), len(fed), "decode")])
        assert txn.decode is not None
        _, features = target(torch.tensor(fed), txn.decode.batch, txn.decode.target, drafter.taps)
        assert features is not None
        views = pool.context_views()
        drafter.project(features, txn.decode.batch, views)
        parts.append(views)
        pool.commit(txn, [len(fed)])
        pool.caught_up([lane])

    def joined(layer: int, name: str) -> Tensor:
        rows = [getattr(views[layer], name) for views in parts]
        return torch.cat([row for row in rows if row is not None])

    return [(joined(layer, "k"), joined(layer, "v")) for layer in range(len(parts[0]))]


CASES = {
    "parking": (replace(CASE, parking=True), None),
    "drafts ahead": (CASE, Uncaptured),
    "ahead": (CASE, Plain),
    "window": (replace(CASE, draft_swa=64, parking=True, faults=True), Plain),
}


@pytest.fixture(scope="module")
def undisturbed(bench: Workbench) -> Run:
    parts = bench.parts(replace(CASE, lanes=1, speculation=False), {})
    return serve(parts, messages(parts))


@pytest.mark.parametrize("name", CASES)
def test_the_drafter_sees_what_was_committed(
    name: str, bench: Workbench, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, kind = CASES[name]
    parts = bench.parts(replace(case, name=name), {})
    asked = [one.request for one in messages(parts) if isinstance(one, Submit)]
    expected = {one.id: context_of(bench, case, one.prompt, undisturbed.tokens[one.id]) for one in asked}
    pool, drafter, dice = parts.runner.pool, parts.runner.drafter, random.Random(name)
    assert isinstance(drafter, DFlashDrafter)
    window = drafter.model.config.sliding_window or pool.shape.max_ctx
    if kind is not None:
        parts.runner.graphs, parts.runner.run_ahead = kind(parts.runner), True
    seen: list[int] = []
    forward = DFlashDrafter.forward

    def looking(self: DFlashDrafter, inputs: DraftInputs, views: list[AttentionView]) -> Tensor:
        owners = {one.lane: one.request.id for one in parts.scheduler.running}
        batch = inputs.batch
        for lane, end in zip(batch.lanes.tolist(), batch.span_bases.tolist(), strict=True):
            if lane == pool.spare_lane:
                continue
            first = max(0, end - window + 1)
            for layer, view in enumerate(views):
                for cache, rows in zip((view.k, view.v), expected[owners[lane]][layer], strict=True):
                    stored = read_pages(cache, view.page_table[lane].long()).flatten(0, 1)[first:end]
                    same = (stored == rows[first:end]).flatten(1).all(1)
                    wrong = (~same).nonzero().flatten() + first
                    assert not len(wrong), f"{owners[lane]} at {end}, layer {layer}: rows {wrong.tolist()}"
            seen.append(end)
        return forward(self, inputs, views)

    errors: list[AssertionError] = []

    def noting(*arguments: Any) -> Tensor:
        try:
            return looking(*arguments)
        except AssertionError as error:  # which the loop would take for a fault of the drafter's
            errors.append(error)
            raise

    monkeypatch.setattr(DFlashDrafter, "forward", noting)

    def vary(run: Run) -> None:
        parts.scheduler.max_drafts = dice.choice([0] * 12 + [1, 3, 7, 7])

    run = serve(parts, messages(parts), vary)
    assert not errors, errors[0]
    assert run.tokens == undisturbed.tokens and set(run.reasons().values()) == {"length"}
    plain = sum(not span.drafts for round in run.rounds for span in round.verify)
    assert len(seen) > 10 and plain > 10, (len(seen), plain)
