"""Masks along drafts, and structured answers of the demo pair."""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline import LLM, SamplingParams, Structure
from paceline.engine.plan import VerifySpan
from paceline.engine.structures import Path, Permits, Structures, paths
from paceline.errors import InvalidRequest, LaneFailed
from paceline.structure import Compiler
from paceline.types import Emission, Forcing, Request
from paceline.weights.template import ChatTemplate
from paceline.weights.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person."}]


def request(structure: Structure, forcing: Forcing | None = None, name: str = "a") -> Request:
    return Request(name, (1,), 0.0, 1.0, 0, 0.0, 0, 100, structure=structure, forcing=forcing)


def masks(permits: Permits) -> dict[int, frozenset[int]]:
    """The tokens that each row allows."""
    bits = np.unpackbits(permits.words.view(np.uint8), axis=1, bitorder="little")
    return {row: frozenset(line.nonzero()[0].tolist()) for row, line in zip(permits.rows, bits, strict=True)}


def test_rows_along_drafts_allow_what_plain_decoding_would(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """Answers at random, drafts good and bad, lanes that are away for a round, and another answer under the same name."""
    dice = random.Random(0)
    lanes = {
        request(Structure.json(SCHEMA), name="json"): [],
        request(Structure.regex(r"([a-z]+ ){2,6}\d+"), name="regex"): [],
        request(Structure.json_object(), Forcing((5, 6), True, None, (7, 8), 3), name="thought"): [3],
        request(Structure.choice(["yes", "no"]), Forcing((), False, 9, (8,)), name="may think"): [9],
    }
    structures = Structures(compiler)
    never = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xff")  # is no text

    def plain(lane: Request, tokens: Sequence[int]) -> frozenset[int] | None:
        return masks(Structures(compiler).permits([Path(lane, 0, tokens)])).get(0)

    def following(lane: Request, tokens: Sequence[int]) -> int:
        allowed = plain(lane, tokens)
        if allowed is not None:
            return dice.choice(sorted(allowed))
        assert lane.forcing is not None
        end = lane.forcing.end_of_thought(tokens)
        return dice.choice((50, 8)) if end is None else lane.forcing.opening[len(tokens) - end]

    said = {lane: [*tokens] for lane, tokens in lanes.items()}
    compared = 0
    for _ in range(40):
        asked: list[tuple[Path, int]] = []
        for lane, tokens in said.items():
            if dice.random() < 0.2:
                continue
            drafts: list[int] = []
            for _ in range(dice.randrange(4)):
                draft = following(lane, tokens + drafts)
                if draft in tokenizer.eos_ids:  # what is behind an end is nobody's
                    break
                drafts.append(draft)
            good = len(drafts)
            if plain(lane, tokens + drafts) is not None:
                drafts += [never, never]
            first = sum(len(path.drafts) + 1 for path, _ in asked)
            asked.append((Path(lane, first, tuple(tokens), drafts), good))
        structures.begin([path.request for path, _ in asked])
        got = masks(structures.permits([path for path, _ in asked]))
        for path, good in asked:
            for row in range(good + 1):
                assert got.pop(path.first + row, None) == plain(path.request, [*path.generated, *path.drafts[:row]])
                compared += 1
            tokens = said[path.request]
            tokens.append(following(path.request, tokens))
            if tokens[-1] in tokenizer.eos_ids:
                said[path.request] = [*lanes[path.request]]
        assert got == {}, "rows behind a draft that does not fit"
    assert compared > 200


def test_where_a_structure_begins(compiler: Compiler, tokenizer: Tokenizer) -> None:
    begin, end, blank = 16379, 16380, 266
    yes_or_no = Structure.choice(["yes", "no"])
    first = masks(Structures(compiler).permits([Path(request(yes_or_no), 0)]))[0]

    def rows(forcing: Forcing, generated: Sequence[int], *drafts: int) -> dict[int, frozenset[int]]:
        return masks(Structures(compiler).permits([Path(request(yes_or_no, forcing), 0, generated, drafts)]))

    opened = Forcing((blank,), True, None, (198, end))
    assert rows(opened, ()) == {}
    assert rows(opened, (50, 51), 52, end, blank, 99) == {3: first}, "behind the thought and the empty line"
    assert rows(opened, (50, end, blank)) == {0: first}
    free = Forcing((), False, begin, (198, end))
    assert rows(free, ()) == {0: first | {begin}}
    assert rows(free, (begin,), 50, end) == {2: first}
    assert rows(free, (), begin, 50, end) == {0: first | {begin}, 3: first}, "a thought that a draft begins"
    assert rows(free, tuple(tokenizer.encode("no"))) == {0: tokenizer.eos_ids}


def test_spans_give_paths() -> None:
    constrained, free = (
        request(Structure.json_object(), name="a"),
        replace(request(Structure.json_object()), structure=None, id="b"),
    )
    spans = [
        VerifySpan(free, 0, 10, 1, 2),
        VerifySpan(constrained, 1, 10, 1, 0, (4,)),
        VerifySpan(constrained, 2, 10, 1, 2, (5, 6)),
        VerifySpan(constrained, 3, 10, 1, 2, known=(7, 8)),
    ]
    drafts = [[21, 22, 23], [31, 32, 33], [7, 8, 0]]
    assert paths(spans, drafts) == [Path(constrained, 3, (4,), ()), Path(constrained, 4, (5, 6), [31, 32])]
    assert paths(spans[:2], ()) == [Path(constrained, 3, (4,), ())]


def test_a_token_that_does_not_fit_fails_its_lane(compiler: Compiler) -> None:
    structures = Structures(compiler)
    with pytest.raises(LaneFailed, match="token 99 does not fit"):
        structures.permits([Path(request(Structure.json_object()), 0, (99,))])
    assert structures.permits([Path(request(Structure.json_object()), 0)]).rows == [0], "nothing is left of it"


def test_limits_that_earlier_answers_have_reached_end_no_later_one(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """The automaton behind a structure grows with the answers, and copies of its matcher share it."""
    dice, structures = random.Random(0), Structures(compiler)
    lane, said = request(Structure.regex(".*a.{25}b")), [*tokenizer.encode("a long way off")]
    with pytest.raises(LaneFailed, match="too many states"):
        while True:
            allowed = masks(structures.permits([Path(lane, 0, said)]))[0]
            said.append(dice.choice(sorted(allowed)))
    again = masks(structures.permits([Path(lane, 0, said)]))
    assert again == masks(Structures(compiler).permits([Path(lane, 0, said)])) and again[0]


def test_a_request_is_ready_when_its_structure_is_compiled(compiler: Compiler) -> None:
    structures, wanting = Structures(compiler), request(Structure.regex("[ab]{3}"))
    assert structures.ready(replace(wanting, structure=None))
    structures.ready(wanting)
    deadline = time.monotonic() + 10
    while not structures.ready(wanting):
        assert time.monotonic() < deadline
    assert structures.ready(replace(wanting, id="b")), "all choices of a request at once"
    many = [request(Structure.choice([str(number)])) for number in range(100)]
    while many:
        many = [one for one in many if not structures.ready(one)]
        assert time.monotonic() < deadline, "more wait than are kept"
    assert len(structures._compiled) == 32 and not structures._pending


# -- the demo pair ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_ctx=512, max_concurrency=3, draft_policy="fixed") as llm:
        yield llm


def test_answers_fit_and_lanes_go_on_drafting(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=150, structure=Structure.json(SCHEMA))
        for temperature in (0.0, 0.7, 1.2)
        for seed in range(3)
    ]
    results = llm.generate([ASK] * len(params), params)
    for result in results:
        assert result.finish_reason == "stop", result
        assert result.tokens[-1] in llm.info.eos_ids
        person = json.loads(result.text)
        assert list(person) == ["name", "age"] and 0 <= person["age"] <= 150 and len(person["name"]) <= 40
    rounds = sum(len(result.stats.keeps) for result in results)
    assert sum(sum(result.stats.keeps) for result in results) > 1.3 * rounds, "tokens for every round"


def test_choices_of_one_prompt_each_follow(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, n=5, structure=Structure.regex("[ab]{6}"))
    (result,) = llm.generate([ASK], params)
    texts = {choice.text for choice in result.choices}
    assert all(len(text) == 6 and set(text) <= set("ab") for text in texts) and len(texts) > 1


def test_what_fits_comes_before_bans(llm: LLM) -> None:
    banned = tuple(range(1000))
    params = SamplingParams(min_tokens=30, banned_token_ids=banned, max_tokens=40, structure=Structure.choice(["yes", "no"]))
    (result,) = llm.generate(["Is it? "], params)
    assert result.text in ("yes", "no") and result.finish_reason == "stop"


def test_a_bad_structure_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="unclosed") as caught:
        llm.generate(["x"], SamplingParams(structure=Structure.regex("(")))
    assert caught.value.param == "structure"


def test_a_thought_is_free_and_the_answer_behind_it_fits(llm: LLM) -> None:
    template = llm.template
    assert isinstance(template, ChatTemplate)
    llm.template = ChatTemplate(template.source + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}")
    try:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=150, structure=Structure.json(SCHEMA))
        (result,) = llm.generate([ASK], params)
    finally:
        llm.template = template
    thought, _, answer = result.text.partition("</think>")
    # the demo pair does not know thoughts: it wants to end the answer, and ends the thought
    assert result.finish_reason == "stop" and thought.strip() and answer.startswith("\n\n{")
    assert list(json.loads(answer)) == ["name", "age"]


def test_a_grammar_that_is_too_much_ends_its_own_lane(llm: LLM) -> None:
    """It is found out only in the middle of the answer; its neighbour says what it says alone."""
    neighbour = SamplingParams(temperature=0.7, seed=4, max_tokens=40, ignore_eos=True)
    (alone,) = llm.generate(["def fib(n):\n"], neighbour)
    bomb = SamplingParams(temperature=0.0, max_tokens=60, structure=Structure.regex("((((a{100}){100}){100}){100})"))
    both = llm.generate(["def fib(n):\n", "x"], [neighbour, bomb])
    assert both[0].tokens == alone.tokens
    assert both[1].finish_reason == "error" and "structure could not be followed" in (both[1].error or "")


def test_a_request_may_leave_while_its_structure_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm._engine.parts.runner
    waiting = True
    monkeypatch.setattr(type(runner), "ready", lambda self, request: request.structure is None or not waiting)
    emissions: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=3, structure=Structure.choice(["yes"]))
    leaving, staying = (Request.create(llm.encode("x"), params, llm.info) for _ in range(2))
    for one in (leaving, staying):
        llm._engine.submit(one, emissions.put)
    llm._engine.cancel(leaving.id)
    gone = emissions.get(timeout=10)
    assert (gone.request_id, gone.finish_reason) == (leaving.id, "cancelled")
    (beside,) = llm.generate(["y"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(beside.tokens) == 2, "others do not wait"
    waiting = False
    while (emission := emissions.get(timeout=10)).finish_reason is None:
        pass
    assert emission.finish_reason in ("stop", "length") and emission.request_id == staying.id
