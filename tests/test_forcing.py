"""Forced tokens against a plain walk over each row's past; the engine with and without drafts."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.forcing import forced
from paceline.types import Emission, Forcing, Request, Row

OPEN, CLOSE = 1, 2


def request(forcing: Forcing, name: str = "r") -> Request:
    return Request(name, (5,), 0.0, 1.0, 0, 0.0, 0, 20, forcing=forcing)


def expected(forcing: Forcing, past: Sequence[int]) -> int | None:
    """The token forced behind ``past``, found by walking through it."""
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
        return forcing.closing[over] if 0 <= over < len(forcing.closing) else None
    return forcing.opening[said] if said < len(forcing.opening) else None


tokens = st.integers(1, 5)
forcings = st.builds(
    lambda opening, thinking, closing, budget: Forcing(opening, thinking, OPEN, (*closing, CLOSE), budget),
    st.lists(tokens, max_size=4).map(tuple),
    st.booleans(),
    st.lists(st.integers(3, 5), max_size=2).map(tuple),
    st.none() | st.integers(0, 5),
)
spans = st.lists(st.tuples(forcings, st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=7)), max_size=4)


@given(spans)
@settings(max_examples=300, deadline=None)
def test_every_row_of_every_span(spans: list[tuple[Forcing, list[int], list[int]]]) -> None:
    rows: list[Row] = []
    inputs: list[int] = []
    wanted: list[int | None] = []
    for number, (forcing, known, drafts) in enumerate(spans):
        first, asked = len(inputs), request(forcing, str(number))
        inputs += [known[-1], *drafts]
        for count in range(len(drafts) + 1):
            rows.append(Row(first + count, asked, tuple(known), (first + 1, first + 1 + count)))
            wanted.append(expected(forcing, [*known, *drafts[:count]]))
    picks = torch.full((len(inputs),), 99)
    got = forced(picks, rows, torch.tensor(inputs, dtype=torch.long))
    assert got.tolist() == [99 if token is None else token for token in wanted]
    assert set(picks.tolist()) <= {99}, "the picks are left alone"


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
        free, _ = answer(llm, Forcing((), True, None, (plain[4],), 2**20), 0.8, speculate=False)
        assert free[:budget] == plain[:budget], "an unspent budget changes nothing"
