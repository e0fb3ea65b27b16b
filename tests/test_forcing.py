"""Forced tokens against a plain walk over each row's past; the engine with and without drafts."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.forcing import forced, foretold
from paceline.types import Emission, Forcing, Request, Row

OPEN, CLOSE = 1, 2
STOPS = frozenset({98, 97})


def request(forcing: Forcing, name: str = "r") -> Request:
    return Request(name, (5,), 0.0, 1.0, 0, 0.0, 0, 20, STOPS, forcing=forcing)


def expected(forcing: Forcing, past: Sequence[int], pick: int) -> int:
    """The token behind ``past`` where ``pick`` would be drawn, found by walking through it."""
    thinking, spent, said = forcing.thinking, 0, 0
    for place, token in enumerate(past):
        if place == 0 and token == forcing.begin and not thinking:
            thinking = True
        elif thinking:
            thinking, spent = token != CLOSE, spent + 1
        else:
            said += 1
    if thinking:
        over = -1 if forcing.budget is None else spent - forcing.budget
        if 0 <= over < len(forcing.closing):
            return forcing.closing[over]
        return CLOSE if pick in STOPS and forcing.opening else pick
    return forcing.opening[said] if said < len(forcing.opening) else pick


tokens = st.integers(1, 5)
forcings = st.builds(
    lambda opening, thinking, closing, budget: Forcing(opening, thinking, OPEN, (*closing, CLOSE), budget),
    st.lists(tokens, max_size=4).map(tuple),
    st.booleans(),
    st.lists(st.integers(3, 5), max_size=2).map(tuple),
    st.none() | st.integers(0, 5),
)
spans = st.lists(st.tuples(forcings, st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=7)), max_size=4)


@given(spans, st.data())
@settings(max_examples=300, deadline=None)
def test_every_row_of_every_span(spans: list[tuple[Forcing, list[int], list[int]]], data: st.DataObject) -> None:
    rows: list[Row] = []
    inputs: list[int] = []
    wanted: list[int] = []
    free = data.draw(st.lists(st.sampled_from([98, 99]), min_size=40, max_size=40))
    for number, (forcing, known, drafts) in enumerate(spans):
        first, asked = len(inputs), request(forcing, str(number))
        inputs += [known[-1], *drafts]
        for count in range(len(drafts) + 1):
            rows.append(Row(first + count, asked, tuple(known), (first + 1, first + 1 + count)))
            wanted.append(expected(forcing, [*known, *drafts[:count]], free[first + count]))
    picks = torch.tensor(free[: len(inputs)], dtype=torch.long)
    got = forced(picks, rows, torch.tensor(inputs, dtype=torch.long))
    assert got.tolist() == wanted
    assert picks.tolist() == free[: len(inputs)], "the picks are left alone"


@given(st.lists(st.tuples(forcings, st.lists(tokens, min_size=1, max_size=8)), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_will_be_forced_is_drafted(lanes: list[tuple[Forcing, list[int]]]) -> None:
    """A thought that no free draft ends (they are all 99) is over when its budget is."""
    pasts: list[list[int]] = []
    for forcing, free in lanes:
        pasts.append([])
        for token in free:
            pasts[-1].append(expected(forcing, pasts[-1], token))
    drafts = torch.full((len(lanes), 7), 99)
    got = foretold(drafts, [(request(forcing), tuple(past)) for (forcing, _), past in zip(lanes, pasts, strict=True)])
    for line, (forcing, _), past in zip(got.tolist(), lanes, pasts, strict=True):
        for at in range(7):
            assert line[at] == expected(forcing, [*past, *line[:at]], 99)


def test_the_first_token_of_an_answer() -> None:
    picks = torch.tensor([9, 9, 9])
    rows = [
        Row(0, request(Forcing((7, 8)), "a"), ()),
        Row(2, request(Forcing((7,), True, None, (4, CLOSE), 0), "b"), ()),
    ]
    assert forced(picks, rows).tolist() == [7, 9, 4]
    assert forced(picks, []) is picks


PROMPT = "def fib(n):\n"
TEXT = '<tool_call>\n{"name": "f", "arguments":'


def answer(
    llm: LLM, forcing: Forcing, temperature: float, *, speculate: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    made = Request.create(llm.encode(PROMPT), params, llm.info)
    emissions: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    llm._engine.submit(replace(made, forcing=forcing, speculate=speculate), emissions.put)
    said: tuple[int, ...] = ()
    while True:
        emission = emissions.get(timeout=60)
        said += emission.tokens
        if emission.finish_reason is not None:
            assert emission.stats is not None and emission.error is None, emission
            return said, emission.stats.keeps


def test_the_engine_with_and_without_drafts() -> None:
    """A thought of eleven tokens, its end, then the opening of a call: with the same tokens whoever drafts, and drafts hold
    inside the thought and behind the opening."""
    with LLM(max_ctx=256, max_concurrency=2, draft_policy="fixed") as llm:
        opening, closing = tuple(llm.encode(TEXT)), tuple(llm.encode("\n</think>"))
        budget = 11
        forcing = Forcing(opening, True, None, closing, budget)
        for temperature in (0.0, 0.8):
            plain, _ = answer(llm, forcing, temperature, speculate=False)
            drafted, keeps = answer(llm, forcing, temperature)
            assert drafted == plain
            assert plain[budget : budget + len(closing) + len(opening)] == closing + opening
            assert max(keeps) > 1
            said = answer(llm, Forcing(opening), temperature)
            assert said[0][: len(opening)] == opening
            assert said[1][0] == 8, "what is forced is drafted"
        free, _ = answer(llm, Forcing((), True, None, (plain[4],), 2**20), 0.8, speculate=False)
        assert free[:budget] == plain[:budget], "an unspent budget changes nothing"
