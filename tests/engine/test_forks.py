"""Several answers to one prompt, and logprobs, on the demo pair: the same bits as alone, however lanes and rounds fall."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_loop import by_length

from paceline import LLM
from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine.build import EngineParts
from paceline.engine.engine import Engine
from paceline.engine.plan import Round, RoundResult
from paceline.errors import InvalidRequest
from paceline.state.pool import StatePool, Txn
from paceline.types import Emission, Request, SamplingParams, TokenLogprob

CASE = Case("forks", lanes=3, threads=1, prefill_tokens=64)
SAMPLING = SamplingParams(temperature=1.0, seed=9, max_tokens=6, ignore_eos=True, n=3, logprobs=3, prompt_logprobs=2)


Meddler = Callable[[Engine, Round], None]


class Answer:
    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.reason: str | None = None
        self.sampled_by = 0

    def add(self, emission: Emission) -> None:
        assert not emission.prompt_logprobs or not self.tokens, "logprobs of the prompt come with the first token"
        self.tokens += emission.tokens
        self.logprobs += emission.logprobs
        self.prompt_logprobs += emission.prompt_logprobs
        self.reason = emission.finish_reason

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)


class Served:
    """Answers of one engine to some requests, and what its rounds were."""

    def __init__(self, parts: EngineParts, case: Case, requests: Sequence[Request], meddle: Meddler | None = None) -> None:
        self.rounds: list[Round] = []
        self.answers = {request.id: Answer() for request in requests}
        pool = parts.runner.pool

        def observe(round: Round, result: RoundResult) -> None:
            pool.check()
            self.rounds.append(round)
            if meddle is not None:
                meddle(engine, round)

        engine = Engine(case.options(), parts, observe)
        emissions: queue.SimpleQueue[Emission] = queue.SimpleQueue()
        try:
            for request in requests:
                engine.submit(request, emissions.put)
            while any(answer.reason is None for answer in self.answers.values()):
                emission = emissions.get(timeout=60)
                self.answers[emission.request_id].add(emission)
        finally:
            engine.close()
        assert pool.allocator.free == pool.allocator.total, "pages are back"

    @property
    def in_order(self) -> list[Answer]:
        return list(self.answers.values())

    def prompt_tokens_read(self) -> int:
        return sum(span.length for round in self.rounds for span in round.prefill)


def asked(prompt: Sequence[int], parts: EngineParts, **changes: Any) -> tuple[Request, ...]:
    return Request.choices(prompt, replace(SAMPLING, **changes), parts.info)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(token for text in by_length() for token in text)[:length]


@pytest.mark.parametrize("length", [1, 16, 70, 200])
def test_a_choice_is_what_it_is_alone(bench: Workbench, length: int) -> None:
    prompt = prompt_of(length)
    plain = replace(CASE, lanes=1, speculation=False, prefill_tokens=4096)
    parts = bench.parts(plain, {})
    requests = asked(prompt, parts)
    alone = [Served(bench.parts(plain, {}), plain, [replace(request, group=None)]).in_order[0] for request in requests]
    assert len({answer.tokens for answer in alone}) > 1, "the choices differ"

    together = Served(bench.parts(CASE, {}), CASE, requests)
    assert together.in_order == alone
    assert together.prompt_tokens_read() == length, "the prompt is read once"
    assert any(span.drafts for round in together.rounds for span in round.verify)
    assert all(len(answer.logprobs) == 6 and len(answer.prompt_logprobs) == length - 1 for answer in alone)

    few = replace(CASE, lanes=2)
    later = Served(bench.parts(few, {}), few, requests)
    assert later.in_order == alone, "lanes that come free one after another"


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"repetition_penalty": 1.3, "top_p": 0.9}])
def test_choices_of_any_sampling(bench: Workbench, changes: dict[str, Any]) -> None:
    plain = replace(CASE, lanes=1, speculation=False)
    parts = bench.parts(CASE, {})
    requests = asked(prompt_of(70), parts, **changes)
    alone = [Served(bench.parts(plain, {}), plain, [replace(request, group=None)]).in_order[0] for request in requests]
    assert Served(parts, CASE, requests).in_order == alone
    assert (len({answer.tokens for answer in alone}) == 1) == (changes.get("temperature") == 0.0)


def test_who_follows_goes_on_when_the_reader_is_cancelled(bench: Workbench) -> None:
    prompt = prompt_of(300)
    parts = bench.parts(CASE, {})
    requests = asked(prompt, parts)
    expected = Served(parts, CASE, requests).in_order

    def cancel_reader(engine: Engine, round: Round) -> None:
        if round.prefill and not round.prefill[0].final:
            engine.cancel(requests[0].id)

    first, *others = Served(bench.parts(CASE, {}), CASE, requests, cancel_reader).in_order
    assert first.reason == "cancelled" and others == expected[1:]


def test_a_round_that_fails_with_its_forks_is_made_good(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = bench.parts(CASE, {})
    requests = asked(prompt_of(70), parts, logprobs=2)
    expected = Served(parts, CASE, requests).in_order
    original, raised = StatePool.apply, 0

    def apply(self: StatePool, txn: Txn, keep: torch.Tensor) -> None:
        nonlocal raised
        if txn.forks and not raised:
            raised += 1
            raise MemoryError("made up")
        original(self, txn, keep)

    monkeypatch.setattr(StatePool, "apply", apply)
    again = bench.parts(CASE, {})
    for state in (again.runner.pool.gdn, again.runner.pool.history):
        state.normal_(generator=torch.Generator().manual_seed(1))  # as somebody before has left it
    assert Served(again, CASE, requests).in_order == expected
    assert raised == 1


def test_a_prompts_logprobs_are_those_of_drawing_there(bench: Workbench) -> None:
    """The last token of a prompt has the distribution that a prompt without it draws its first token from, to the bit."""
    prompt = prompt_of(66)
    parts = bench.parts(CASE, {})
    for length in (2, 33, 64, 65, 66):
        (whole,) = asked(prompt[:length], parts, n=1, prompt_logprobs=20, max_tokens=1)
        (before,) = asked(prompt[: length - 1], parts, n=1, logprobs=20, max_tokens=1)
        ours, theirs = Served(bench.parts(CASE, {}), CASE, [whole, replace(before, id="before")]).in_order
        assert ours.prompt_logprobs[-1].top == theirs.logprobs[0].top
        likeliest = dict(theirs.logprobs[0].top)
        if prompt[length - 1] in likeliest:
            assert ours.prompt_logprobs[-1].logprob == likeliest[prompt[length - 1]]


def test_logprobs_are_of_the_model_and_cost_no_token(bench: Workbench) -> None:
    """Neither temperature nor bans change them, and asking for them changes no token."""
    prompt = prompt_of(40)
    parts = bench.parts(CASE, {})
    (with_them,) = asked(prompt, parts, n=1, temperature=0.0)
    (without,) = asked(prompt, parts, n=1, temperature=0.0, logprobs=None, prompt_logprobs=None)
    scored, bare = Served(parts, CASE, [with_them, without]).in_order
    assert scored.tokens == bare.tokens and bare.logprobs == bare.prompt_logprobs == ()
    assert all(entry.top[0] == (token, entry.logprob) for token, entry in zip(scored.tokens, scored.logprobs, strict=True))
    (banned,) = asked(prompt, parts, n=1, temperature=1.3, banned_token_ids=(scored.tokens[0],), max_tokens=1)
    other = Served(bench.parts(CASE, {}), CASE, [banned]).in_order[0]
    assert other.tokens[0] != scored.tokens[0] and other.logprobs[0].top == scored.logprobs[0].top


def test_llm_gives_choices_and_logprobs() -> None:
    with LLM(max_concurrency=3, max_ctx=256, threads=1, admission_coalesce_ms=1) as llm:
        sampling = SamplingParams(seed=3, max_tokens=10, n=3, logprobs=2, prompt_logprobs=0, stop=(" ",))
        several, one = llm.generate(["The quick brown", "The quick brown"], [sampling, replace(sampling, n=1)])
        assert several.choices[0] == several and [len(several.others), len(one.others)] == [2, 0]
        assert (several.tokens, several.logprobs) == (one.tokens, one.logprobs), "choice 0 is the answer to n = 1"
        assert len({tuple(choice.tokens) for choice in several.choices}) == 3
        for choice in several.choices:
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.tokens)
            assert choice.prompt_logprobs == one.prompt_logprobs and choice.prompt_logprobs is not None
            assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == choice.usage.prompt_tokens
        plain = llm.generate("The quick brown", replace(sampling, logprobs=None, prompt_logprobs=None, n=1))[0]
        assert plain.tokens == one.tokens and plain.logprobs is plain.prompt_logprobs is None
        deltas = list(llm.stream("The quick brown", replace(sampling, n=1)))
        assert [entry for delta in deltas for entry in delta.logprobs] == one.logprobs
        with pytest.raises(InvalidRequest, match="n is 3"):
            next(llm.stream("The quick brown", sampling))
