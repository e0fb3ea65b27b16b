"""Prompts that are read beside several rounds: the same tokens, whatever happens meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
from test_loop import by_length

from paceline.bench.law import Workbench
from paceline.bench.law_cases import Case
from paceline.engine.build import EngineParts
from paceline.engine.loop import Cancel, EngineLoop, Message, Stop, Submit
from paceline.engine.pacing import Joining
from paceline.engine.plan import PrefillSpan, Round, RoundResult
from paceline.engine.runner import Runner
from paceline.types import Emission, EngineStats, Request, SamplingParams

CASE = Case("reading", lanes=3, prefill_tokens=64, threads=1)
VICTIM = "3"


class Later(Joining):
    """Every forward over prompts runs beside so many rounds before it is committed."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = self.left = rounds

    def now(self, tokens: int, elapsed: float, decoding: int, prompts: int) -> bool:
        if not decoding or not self.left:
            self.left = self.rounds
            return True
        self.left -= 1
        return False


Meddler = Callable[[EngineParts, "queue.SimpleQueue[Message | None]", Round], None]


class Served:
    """Answers of an engine to one request after another: each is sent when the one before it has begun to decode."""

    def __init__(self, bench: Workbench, joining: Joining | None, meddle: Meddler | None = None) -> None:
        parts = bench.parts(CASE, {})
        parts.scheduler.joining = joining
        prompts = by_length()
        chosen = [*prompts[:3], next(prompt for prompt in prompts if len(prompt) > 300), prompts[3], prompts[4]]
        self._unsent = [_request(parts, str(number), prompt) for number, prompt in enumerate(chosen)]
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.rounds: list[Round] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.reasons: dict[str, str | None] = {}

        def observe(round: Round, result: RoundResult) -> None:
            parts.runner.pool.check()
            self.rounds.append(round)
            if meddle is not None:
                meddle(parts, self._inbox, round)

        self._send()
        EngineLoop(parts.runner, parts.scheduler, self, self._hear, coalesce_seconds=0.0, observe=observe).run()
        allocator = parts.runner.pool.allocator
        assert allocator.free == allocator.total and len(self.reasons) == len(chosen)

    def get(self, timeout: float | None) -> Message | None:
        if not self._inbox.empty():
            return self._inbox.get()
        return Stop() if timeout is None else None

    def _send(self) -> None:
        if self._unsent:
            self._inbox.put(Submit(self._unsent.pop(0)))

    def _hear(self, emissions: list[Emission], stats: EngineStats) -> None:
        for emission in emissions:
            if emission.tokens and emission.request_id not in self.tokens or emission.finish_reason == "cancelled":
                self._send()
            self.tokens[emission.request_id] = self.tokens.get(emission.request_id, ()) + emission.tokens
            if emission.finish_reason is not None:
                self.reasons[emission.request_id] = emission.finish_reason

    @property
    def beside(self) -> list[Round]:
        return [round for round in self.rounds if round.reading]


def _request(parts: EngineParts, name: str, prompt: tuple[int, ...]) -> Request:
    params = SamplingParams(temperature=0.7 * (int(name) % 2), seed=int(name), max_tokens=16, ignore_eos=True)
    made = Request.create(prompt, params, parts.info)
    return Request(**{field: getattr(made, field) for field in made.__slots__} | {"id": name})


@pytest.fixture(scope="module")
def known(bench: Workbench) -> dict[str, tuple[int, ...]]:
    served = Served(bench, None)
    assert not served.beside and set(served.reasons.values()) == {"length"}
    return served.tokens


@pytest.mark.parametrize("rounds", [1, 3])
def test_prompts_read_beside_several_rounds(bench: Workbench, known: dict[str, tuple[int, ...]], rounds: int) -> None:
    served = Served(bench, Later(rounds))
    assert served.tokens == known and len(served.beside) > 5
    assert all(round.verify and not round.prefill for round in served.beside), "nobody waits, and nothing else is read"


def test_who_is_cancelled_while_read_leaves_nothing_behind(bench: Workbench, known: dict[str, tuple[int, ...]]) -> None:
    cancelled: list[PrefillSpan] = []

    def meddle(parts: EngineParts, inbox: queue.SimpleQueue[Message | None], round: Round) -> None:
        for span in round.reading:
            if span.request.id == VICTIM and span.start and not cancelled:
                cancelled.append(span)
                inbox.put(Cancel(VICTIM))

    served = Served(bench, Later(2), meddle)
    assert cancelled and served.reasons[VICTIM] == "cancelled"
    assert {name: tokens for name, tokens in served.tokens.items() if name != VICTIM} == {
        name: tokens for name, tokens in known.items() if name != VICTIM
    }


def test_a_round_that_fails_while_prompts_are_read(
    bench: Workbench, known: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []
    run: Any = Runner._verify

    def verify(self: Runner, spans: Any, *others: Any) -> Any:
        if self._reading is not None and len(failed) < 3:
            failed.append("verify")
            raise MemoryError("out of memory")
        return run(self, spans, *others)

    monkeypatch.setattr(Runner, "_verify", verify)
    served = Served(bench, Later(3))
    assert len(failed) == 3 and served.tokens == known


def test_parked_while_read(bench: Workbench, known: dict[str, tuple[int, ...]]) -> None:
    parked: list[str] = []

    def meddle(parts: EngineParts, inbox: queue.SimpleQueue[Message | None], round: Round) -> None:
        if round.reading and not parked:
            admission = parts.scheduler.admission
            victim = next(one for one in admission.running if one.request is round.reading[0].request)
            parked.append(victim.request.id)
            admission._park(victim, "pages")

    served = Served(bench, Later(2), meddle)
    assert parked and served.tokens == known


def test_the_same_request_again_while_it_is_read(bench: Workbench, known: dict[str, tuple[int, ...]]) -> None:
    """The lane and its number are given back at once, to an object that is the same."""
    again: list[Request] = []

    def meddle(parts: EngineParts, inbox: queue.SimpleQueue[Message | None], round: Round) -> None:
        for span in round.reading:
            if span.request.id == VICTIM and span.start == 0 and not again:
                again.append(span.request)
                inbox.put(Cancel(VICTIM))
                inbox.put(Submit(span.request))

    served = Served(bench, Later(2), meddle)
    assert again and served.reasons[VICTIM] == "length" and served.tokens == known


def test_prompts_are_read_though_others_come_and_go(bench: Workbench) -> None:
    """Whoever is read together with one that is cancelled is read again, and not left to be forgotten once more."""
    parts = bench.parts(CASE, {})
    parts.scheduler.joining = Later(3)
    prompts = by_length()
    scheduler, runner = parts.scheduler, parts.runner
    scheduler.add(_request(parts, "0", prompts[0]))
    while not scheduler.running or not scheduler.running[0].decoding:
        round = scheduler.plan()
        scheduler.apply(round, runner.run(round))
    scheduler.add(_request(parts, "2", prompts[2]))
    spoken = []
    for number in range(100, 104):
        scheduler.add(_request(parts, str(number), prompts[1]))
        round = scheduler.plan()
        spoken += [emission.request_id for emission in scheduler.apply(round, runner.run(round)) if emission.tokens]
        runner.pool.check()
        scheduler.cancel(str(number))
    assert "2" in spoken
    for name in scheduler.requests():
        scheduler.cancel(name)
    runner.forget()
