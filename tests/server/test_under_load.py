"""A slice of ``python -m paceline.bench.soak`` in one process, where every round is looked at; and what it would find."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from typing import Any

import pytest
from demo_server import demo_server
from scripted import eventually

from paceline.bench import soak
from paceline.bench.law import ShortOfPages
from paceline.bench.soak_answers import Answer, folded, is_part_of
from paceline.bench.soak_cases import CHAT, COMPLETIONS, Asked, catalogue
from paceline.engine import admission
from paceline.engine.engine import Engine
from paceline.engine.plan import Fork, PrefillSpan, Round, RoundResult, VerifySpan

FATES = {"whole": 3, "stream": 3, "slow": 1, "leaves a stream": 2, "leaves": 2, "half a body": 1, "wrong": 1, "deadline": 1}


class Watch:
    """The pool's invariants after every round, and that nobody who was cancelled has more than the round that runs."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.rounds = 0
        self.cancelled: dict[str, int] = {}
        self.late: list[str] = []

    def __call__(self, round: Round, result: RoundResult) -> None:
        assert self.engine is not None
        self.engine.parts.runner.pool.check()
        self.rounds += 1
        spans: list[VerifySpan | PrefillSpan | Fork] = [*round.verify, *round.prefill, *round.forks]
        for name in (span.request.id for span in spans):
            if self.rounds > self.cancelled.get(name, self.rounds) + 1:
                self.late.append(name)


def test_a_mixed_load_stays_exact_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SOON", 8)
    monkeypatch.setattr(soak, "FATES", FATES)
    watch = Watch()
    with demo_server(watch, {"max_queue": 16}, max_concurrency=8, kv_pool_tokens=1024) as server:
        engine: Any = server.service.backend and server.service.backend.handle
        assert isinstance(engine, Engine)
        watch.engine, cancel = engine, engine.cancel
        # it says at random that there is no room, so that lanes are parked whoever meets whom
        engine.parts.scheduler.admission.lanes = ShortOfPages(engine.parts.runner.pool, random.Random(1))

        def noted(request_id: str) -> None:
            cancel(request_id)
            watch.cancelled.setdefault(request_id, watch.rounds)

        monkeypatch.setattr(engine, "cancel", noted)
        asked = [shortened(one) for one in catalogue(16, seed=1)]
        answers = soak.alone(server.url, asked)
        clients = soak.Soak(server.url, asked, answers, seed=1)
        clients.run(40)
        assert not clients.tally.failures
        outcomes = Counter(outcome.split(": ")[-1] for outcome in clients.tally.outcomes.elements())
        assert outcomes["exact"] > 10 and outcomes["left"] > 3
        assert eventually(lambda: engine.stats().lanes == engine.stats().queued == 0)
        assert not watch.late and watch.cancelled
        assert sum(engine.stats().parkings.values()) > 0 < engine.stats().restored_tokens
        assert eventually(lambda: engine.stats().pages_free == engine.stats().pages_total)
        assert eventually(lambda: not server.service._generations and not engine._sinks._sinks)
        assert soak.alone(server.url, asked[:4]) == answers[:4]


def shortened(one: Asked) -> Asked:
    name = "max_output_tokens" if "max_output_tokens" in one.body else "max_tokens"
    return dataclasses.replace(one, body=one.body | {name: max(min(one.body[name], 24), one.body.get("min_tokens", 1))})


# -- what it would find ----------------------------------------------------------------------------------------------------


def choice(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **parts}]}


WHOLE = choice(message={"content": "Hello", "tool_calls": None}, token_ids=[1, 2], finish_reason="stop")
STREAM = [
    choice(delta={"content": "Hel"}, token_ids=[1]),
    choice(delta={"content": "lo"}, token_ids=[2]),
    choice(delta={}, finish_reason="stop"),
]


def test_a_stream_is_the_same_answer() -> None:
    due = folded(CHAT, [WHOLE])
    assert folded(CHAT, STREAM) == due and due.parts[0]["text"] == "Hello"
    assert is_part_of(folded(CHAT, STREAM[:1]), due)
    for other in (
        [STREAM[0], choice(delta={"content": "la"}, token_ids=[2])],
        [choice(delta={"content": "Hel"}, token_ids=[7])],
        [STREAM[0], choice(delta={}, finish_reason="length")],
    ):
        assert not is_part_of(folded(CHAT, other), due)


def test_errors_that_end_streams() -> None:
    due = Answer([], {}, None)
    failed = 'data: {"error": {"code": "lane_failed", "type": "server_error", "message": "x"}}\n\n'
    assert soak._judged(COMPLETIONS, failed, due).startswith("FAILED")
    assert soak._judged(COMPLETIONS, failed.replace("lane_failed", "client_too_slow"), due) == "client_too_slow"
    assert soak._judged(COMPLETIONS, 'data: {"choices": [{"index": 0, "text": "x"}]}\n\n', due).startswith("FAILED")


def test_chunks_are_of_bytes() -> None:
    assert soak._unchunked("3\r\nüa\r\n2\r\nbc\r\n0\r\n\r\n".encode()) == "üabc"


def test_rounds_after_leaving(tmp_path: Any) -> None:
    log, trace = tmp_path / "log", tmp_path / "trace"
    log.write_text('{"message": "request started", "id": "a", "engine_ids": ["1", "2"]}\nServing …\n')
    rounds = [
        json.dumps({"round": number, "time": ended, "lanes": [{"request": request}], "us": {"verify": 100_000}})
        for number, ended, request in ((1, 10.0, "1"), (2, 10.3, "2"), (3, 10.4, "3"))
    ]
    trace.write_text("\n".join(['{"engine": "x"}', *rounds]))
    late = soak.rounds_after_leaving({"a": 9.95, "b": 1.0}, log, trace)
    assert late == {"clients": 2, "with_rounds_after": 1, "most_rounds": 1, "latest_ms": 250.0}
