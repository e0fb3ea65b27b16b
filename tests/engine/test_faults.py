"""Faults in what only some lanes have (structures, scores, penalties, forced tokens), and in rounds of which a part was run
ahead: only the lane concerned ends, the others' tokens are unchanged, and the next request is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from test_ahead import Plain, Uncaptured
from test_loop import CASE, FAULTS, VICTIM, Fault, Run, by_length, request, serve

from paceline.bench.law import Workbench
from paceline.engine import admission
from paceline.engine.ahead import verify_ahead
from paceline.engine.build import EngineParts
from paceline.engine.decode import DecodeInputs, decode_inputs
from paceline.engine.loop import Message, Submit
from paceline.engine.plan import VerifySpan
from paceline.engine.scores import Scores
from paceline.engine.structures import Path, Structures
from paceline.forcing import forced
from paceline.penalties import adjusted
from paceline.state.pages import PageAllocator
from paceline.state.shapes import pages_for
from paceline.structure import Compiler
from paceline.types import Adjustments, Forcing, Request, Row, Structure

Inject = Callable[[Fault, pytest.MonkeyPatch], None]
STRUCTURE = Structure.regex("[a-z ,.]{400,}")


def messages(parts: EngineParts, max_tokens: int = 12) -> list[Message]:
    """Three lanes with everything; the victim's prompt takes several chunks."""
    ordered = by_length()
    prompts = {"0": ordered[0], VICTIM: next(prompt for prompt in ordered if len(prompt) > 140), "2": ordered[2]}
    made = []
    for name, prompt in prompts.items():
        plain = request(parts, name, prompt, max_tokens)
        extras: dict[str, Any] = {
            "adjust": Adjustments(presence_penalty=0.5, repetition_penalty=1.2, prompt_ids=tuple(sorted(set(prompt)))),
            "logprobs": 2,
            "prompt_logprobs": 1,
        }
        own: dict[str, Any] = {"structure": STRUCTURE} if name != "0" else {"forcing": Forcing(opening=(100, 200, 300))}
        made.append(Submit(replace(plain, **extras, **own)))
    return [*made]


@pytest.fixture(scope="module")
def undisturbed(bench: Workbench) -> dict[str, tuple[int, ...]]:
    parts = bench.parts(CASE, {})
    run = serve(parts, messages(parts))
    assert set(run.reasons().values()) == {"length"} and run.tokens["0"][:3] == (100, 200, 300)
    return run.tokens


# -- stages that only some lanes have --------------------------------------------------------------------------------------


def in_structures(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    original = Structures._spans

    def spans(self: Structures, path: Path, *rest: Any) -> Any:
        found = original(self, path, *rest)
        fault(path.request.id == VICTIM and len(path.generated) > 4)
        return found

    patch.setattr(Structures, "_spans", spans)


def in_compiling(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    original = Structures._compile

    def compiled(self: Structures, request: Request) -> Any:
        fault(request.id == VICTIM)
        return original(self, request)

    patch.setattr(Structures, "_compile", compiled)


def in_scores(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    original, calls = Scores.add, []

    def add(self: Scores, logits: torch.Tensor, picks: torch.Tensor, requests: Sequence[Request]) -> None:
        original(self, logits, picks, requests)
        concerned = VICTIM in [request.id for request in requests]
        calls.append(concerned)
        fault(concerned and sum(calls) > 3)

    patch.setattr(Scores, "add", add)


def in_prompt_scores(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    original = Scores.add_prompt

    def add(self: Scores, logits: torch.Tensor, tokens: torch.Tensor, request: Request) -> None:
        original(self, logits, tokens, request)
        fault(request.id == VICTIM)

    patch.setattr(Scores, "add_prompt", add)


def in_penalties(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    def rows(logits: torch.Tensor, rows: Sequence[Row], tokens: torch.Tensor | None) -> torch.Tensor:
        fault(any(row.request.id == VICTIM and len(row.generated) > 4 for row in rows))
        return adjusted(logits, rows, tokens)

    patch.setattr("paceline.engine.runner.adjusted", rows)


STAGES: dict[str, Inject] = {
    "structures": in_structures,
    "compiling": in_compiling,
    "scores": in_scores,
    "scores of the prompt": in_prompt_scores,
    "penalties": in_penalties,
}


def only_the_victim_ends(run: Run, undisturbed: dict[str, tuple[int, ...]]) -> None:
    assert run.reasons() == {"0": "length", VICTIM: "error", "2": "length"}
    assert "out of memory" in (run.ends[VICTIM].error or "")
    assert run.tokens["0"] == undisturbed["0"] and run.tokens["2"] == undisturbed["2"]
    assert run.tokens.get(VICTIM, ()) == undisturbed[VICTIM][: len(run.tokens.get(VICTIM, ()))]


@pytest.mark.parametrize("once", [True, False], ids=["once", "always"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_concerns_one_lane(
    stage: str, once: bool, bench: Workbench, undisturbed: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, fault = bench.parts(CASE, {}), Fault(once)
    STAGES[stage](fault, monkeypatch)
    run = serve(parts, messages(parts))
    assert fault.raised == 1 if once else fault.raised >= 2, "in the round, and alone"
    if once:
        assert run.tokens == undisturbed and set(run.reasons().values()) == {"length"}
    else:
        only_the_victim_ends(run, undisturbed)
        monkeypatch.undo()
        assert serve(parts, messages(parts)[2:]).tokens["2"] == undisturbed["2"], "the next one is as good as any"


def test_a_structure_that_could_not_be_compiled_is_compiled_again(
    bench: Workbench, undisturbed: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for the same later is not told of a fault that is over."""
    parts, fault = bench.parts(CASE, {}), Fault(once=True)
    monkeypatch.setattr(parts.runner, "structures", Structures(parts.runner.structures.compiler))  # type: ignore[union-attr]
    submit = Compiler.submit

    def failing(self: Compiler, structure: Structure) -> Future[LLMatcher]:
        try:
            fault(True)
        except MemoryError as error:
            failed: Future[LLMatcher] = Future()
            failed.set_exception(error)
            return failed
        return submit(self, structure)

    monkeypatch.setattr(Compiler, "submit", failing)
    run = serve(parts, messages(parts))
    assert fault.raised == 1 and run.tokens == undisturbed


def test_a_fault_in_forcing_ends_whose_tokens_are_forced(
    bench: Workbench, undisturbed: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(once=False)

    def force(picks: torch.Tensor, rows: Sequence[Row], tokens: torch.Tensor | None) -> torch.Tensor:
        fault(any(len(row.generated) == 1 for row in rows))
        return forced(picks, rows, tokens)

    monkeypatch.setattr("paceline.engine.runner.forced", force)
    parts = bench.parts(CASE, {})
    run = serve(parts, messages(parts))
    assert run.reasons() == {"0": "error", VICTIM: "length", "2": "length"}
    assert run.tokens[VICTIM] == undisturbed[VICTIM] and run.tokens["2"] == undisturbed["2"]


def test_a_fault_while_a_parked_lane_comes_back(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are put into state again beside others that go on."""
    monkeypatch.setattr(admission, "SOON", 8)

    def run() -> Run:
        parts = bench.parts(CASE, {})
        asked = messages(parts, 28)
        longest = max(len(one.request.prompt) for one in asked if isinstance(one, Submit))
        parts.runner.pool.allocator = PageAllocator(pages_for(longest + 48) + 3)
        return serve(parts, asked)

    undisturbed = run()
    victim = next(span.request.id for round in undisturbed.rounds for span in round.verify if span.known is not None)
    fault = Fault(once=False)

    def inputs(spans: Sequence[VerifySpan], *rest: Any) -> DecodeInputs:
        made = decode_inputs(spans, *rest)
        fault(any(span.known is not None and span.request.id == victim for span in spans))
        return made

    monkeypatch.setattr("paceline.engine.runner.decode_inputs", inputs)
    faulty = run()
    assert fault.raised >= 2 and faulty.reasons()[victim] == "error"
    for name, tokens in undisturbed.tokens.items():
        assert faulty.tokens[name] == (tokens if name != victim else tokens[: len(faulty.tokens[name])])


# -- rounds run ahead ------------------------------------------------------------------------------------------------------


AHEAD = [(Uncaptured, True), (Plain, False), (Plain, True)]
"""What there are graphs for, and whether lanes draft."""


def ahead_of_the_host(parts: EngineParts, kind: type[Uncaptured]) -> Uncaptured:
    graphs = kind(parts.runner)
    parts.runner.graphs, parts.runner.run_ahead = graphs, True
    return graphs


@pytest.mark.parametrize(("kind", "speculation"), AHEAD, ids=["drafts", "forwards", "both"])
@pytest.mark.parametrize("place", ["verify", "first verify", "commit of a verify span", "structures", "scores"])
def test_a_fault_in_a_round_that_was_begun_ahead(
    place: str,
    kind: type[Uncaptured],
    speculation: bool,
    bench: Workbench,
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, fault = bench.parts(replace(CASE, speculation=speculation), {}), Fault(once=False)
    graphs = ahead_of_the_host(parts, kind)
    if place in FAULTS:
        FAULTS[place](fault, parts, monkeypatch)
    else:
        STAGES[place](fault, monkeypatch)
    run = serve(parts, messages(parts))
    assert fault.raised >= 2 and graphs.times
    only_the_victim_ends(run, undisturbed)


@pytest.mark.parametrize(("kind", "speculation"), AHEAD, ids=["drafts", "forwards", "both"])
def test_a_fault_in_running_ahead_costs_only_time(
    kind: type[Uncaptured],
    speculation: bool,
    bench: Workbench,
    undisturbed: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = bench.parts(replace(CASE, speculation=speculation), {})
    ahead_of_the_host(parts, kind)
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        work = verify_ahead(*arguments)
        if len(calls) % 2:
            raise MemoryError("out of memory")
        return work

    monkeypatch.setattr("paceline.engine.runner.verify_ahead", fail)
    run = serve(parts, messages(parts))
    assert run.tokens == undisturbed and len(calls) > 3
