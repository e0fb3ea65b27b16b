"""Each request has a code word in its prompt that the demo pair repeats, and nobody ever says another's."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from test_loop import Run, serve

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine import admission
from paceline.engine.build import EngineParts
from paceline.engine.loop import Cancel, Submit
from paceline.state.pages import PageAllocator
from paceline.types import Request, SamplingParams, Structure
from paceline.weights.tokenizer import Tokenizer

LANES, AT_ONCE = 4, 5
PAGES = 20
"""Of 16 tokens: too few for all lanes, some of which are therefore parked."""
WORD = re.compile(r"[A-Z]{6}\d{2}")
LINES = Structure.regex(r"(code = '[A-Z]{6}[0-9]{2}'\n){9}")
"""Whose word, the structure does not say."""


class Crowd:
    """Clients that come, stay for some tokens, and leave; ``words`` are those of their code words, by request."""

    def __init__(self, parts: EngineParts, tokenizer: Tokenizer, rounds: int) -> None:
        self.words: dict[str, str] = {}
        self._parts, self._tokenizer, self._rounds, self._dice = parts, tokenizer, rounds, random.Random(1)

    def watch(self, run: Run) -> None:
        """After a round: somebody may leave, and others come."""
        live = [name for name in self.words if name not in run.ends]
        if live and self._dice.random() < 0.05:
            run.messages.append(Cancel(self._dice.choice(live)))
        while len(live) < AT_ONCE and len(run.rounds) < self._rounds:
            came = self.come()
            run.messages += [Submit(request) for request in came]
            live += [request.id for request in came]

    def come(self) -> tuple[Request, ...]:
        dice, word = self._dice, self._new_word()
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.3]),
            seed=dice.randrange(2**32),
            max_tokens=dice.choice([12, 40, 90]),
            n=dice.choice([1, 1, 1, 2]),
            structure=dice.choice([None, LINES]),
        )
        prompt = self._tokenizer.encode(f"code = '{word}'\n" * dice.choice([3, 4, 5]))
        made = Request.choices(prompt, params, self._parts.info)
        made = tuple(replace(request, priority=dice.choice([0, 0, 3])) for request in made)
        self.words |= dict.fromkeys((request.id for request in made), word)
        return made

    def _new_word(self) -> str:
        syllables = "".join(self._dice.choice("BCDFGHKLMNPRSTVWZ") + self._dice.choice("AEIOU") for _ in range(3))
        word = f"{syllables}{self._dice.randrange(10, 100)}"
        return self._new_word() if word in self.words.values() else word


@pytest.mark.parametrize("rounds", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_nobody_says_another_ones_word(
    bench: Workbench, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(admission, "SOON", 8)
    parts = bench.parts(Case("code words", lanes=LANES, threads=1), {})
    parts.runner.pool.allocator = PageAllocator(PAGES)
    crowd = Crowd(parts, tokenizer, rounds)
    run = serve(parts, [Submit(request) for request in crowd.come()], crowd.watch)
    assert len(run.rounds) >= rounds and len(set(crowd.words.values())) > rounds / 12
    assert run.stats.parkings["pages"] > 0 < run.stats.parkings["priority"] and run.stats.restored_tokens > 0
    assert run.stats.requests_finished.get("error", 0) == 0 < run.stats.requests_finished["cancelled"]
    said = [name for name in crowd.words if own_word_in(name, crowd, run, tokenizer)]
    assert len(said) > len(crowd.words) / 2, "few said their word: nothing is shown"


def own_word_in(name: str, crowd: Crowd, run: Run, tokenizer: Tokenizer) -> bool:
    text = b"".join(map(tokenizer.token_bytes, run.tokens.get(name, ()))).decode(errors="replace")
    words = set(WORD.findall(text))
    others = words & set(crowd.words.values()) - {crowd.words[name]}
    assert not others, f"{crowd.words[name]} was told {others}: {text!r}"
    return crowd.words[name] in words
