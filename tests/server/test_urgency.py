"""The bounded queue, deadlines and priorities, as clients see them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from scripted import Running, bursts, eventually, running, until_cancelled

from paceline.errors import DeadlineExceeded, InvalidRequest, QueueFull
from paceline.server.urgency import Places, Urgency
from paceline.structure import Compiler
from paceline.types import Emission, Request, Structure

COMPLETIONS = "/v1/completions"


def post(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json={"prompt": "hello"} | fields, timeout=10)


@pytest.fixture
def server() -> Iterator[Running]:
    """Two lanes, one answer may wait."""
    with running(max_queue=1, request_timeout=50) as server:
        yield server


def late(request: Request) -> Iterator[Emission]:
    yield Emission(request.id, tuple(b"He"))
    yield Emission(request.id, (), "timeout", None, "the request had 2 s, which are over")


@pytest.mark.parametrize("stream", [False, True])
def test_what_exceeds_the_queue_is_refused_and_nothing_else_changes(server: Running, stream: bool) -> None:
    server.engine.script = until_cancelled("a")
    with ThreadPoolExecutor(3) as pool, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        streams = list(
            pool.map(lambda _: client.completions.create(model="-", prompt="x", stream=True), range(3)),
        )
        assert eventually(lambda: len(server.engine.submitted) == 3)
        refused = post(server, stream=stream)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert "3 answers" in error["message"] and "2 run" in error["message"]
        assert len(server.engine.submitted) == 3
        streams[0].close()
        server.engine.script = bursts("b")
        assert eventually(lambda: post(server).status_code == 200)
        for other in streams[1:]:
            other.close()


def test_choices_and_prompts_count_and_more_than_ever_fit_is_wrong(server: Running) -> None:
    assert post(server, n=3).status_code == 200
    for fields in ({"n": 4}, {"prompt": ["a", "b"], "n": 2}):
        refused = post(server, **fields)
        assert refused.status_code == 400 and "4 answers" in refused.json()["error"]["message"]
    assert len(server.engine.submitted) == 3


def test_the_engine_hears_of_priority_and_of_the_time_that_is_left(server: Running) -> None:
    post(server, priority=-7, timeout=9)
    post(server)
    urgent, plain = server.engine.submitted
    assert urgent.priority == -7 and urgent.timeout is not None and 8 < urgent.timeout <= 9
    assert plain.priority == 0 and plain.timeout is not None and 49 < plain.timeout <= 50


def test_a_request_whose_time_is_over_gets_a_504_or_an_error_event(server: Running) -> None:
    server.engine.script = late
    answer = post(server, timeout=2)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded" and "2 s" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    streamed = post(server, timeout=2, stream=True)
    assert streamed.status_code == 200
    last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "deadline_exceeded"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=3) as client:
        before = len(server.engine.submitted)
        with pytest.raises(openai.APIStatusError):
            client.completions.create(model="-", prompt="x", extra_body={"timeout": 2})
        assert len(server.engine.submitted) == before + 1, "it asks once"
    metrics = httpx.get(server.url + "/metrics").text
    assert 'paceline_generations_total{endpoint="completions",finish_reason="timeout"} 3.0' in metrics


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 101), ("priority", 0.5), ("priority", True), ("priority", "high"), ("timeout", 0), ("timeout", -1)]
    + [("timeout", 1e9), ("timeout", "5"), ("timeout", False)],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Urgency.of({field: value})
    assert caught.value.param == field and repr(value) in caught.value.message


def test_time_that_is_over_before_the_engine_is_asked() -> None:
    request = Request("a", (1,), 0.0, 1.0, 0, 0.0, 0, 1)
    with pytest.raises(DeadlineExceeded, match="0.5 s"):
        Urgency(timeout=0.5).urging(request, time.monotonic() - 1, None)
    assert Urgency(timeout=None).urging(request, time.monotonic() - 1, None).timeout is None


def test_the_wait_for_other_structures_counts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: list[Future[None]] = []

    def submit(compiler: Compiler, structure: Structure) -> Future[None]:
        compiling.append(Future())
        return compiling[-1]

    monkeypatch.setattr(Compiler, "submit", submit)
    reply = post(server, structured_outputs={"regex": "a"}, timeout=0.1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert eventually(lambda: compiling[0].cancelled()), "what nobody waits for is not compiled"
    assert not server.engine.submitted


def test_retry_after_follows_how_long_answers_take() -> None:
    places = Places(0)
    for _ in range(30):
        places.ended(40.0)
    with pytest.raises(QueueFull) as caught:
        places.check(1, 4, 4)
    assert caught.value.headers == {"retry-after": "10"}
    for _ in range(60):
        places.ended(4000.0)
    with pytest.raises(QueueFull) as caught:
        places.check(1, 4, 4)
    assert caught.value.headers == {"retry-after": "60"}
    places.check(1, 3, 4)
