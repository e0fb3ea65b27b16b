"""The trace of rounds, against what the requests themselves report."""

from __future__ import annotations

import json
import logging
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineOptions
from paceline.engine.plan import Fork, PrefillSpan, Round, RoundResult, RoundTimes, VerifySpan
from paceline.engine.process import EngineProcess
from paceline.engine.trace import Trace
from paceline.errors import ConfigError
from paceline.types import Emission, Request, RequestStats, SamplingParams

OPTIONS = EngineOptions(max_concurrency=2, max_ctx=256, threads=1, draft_policy="fixed")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), 0.0, 1.0, 0, 0.0, 1, 8)


def test_a_trace_says_what_the_requests_say(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"engine":"an earlier one"}\n', encoding="utf-8")
    engine = EngineProcess(OPTIONS, log_level=logging.WARNING, trace=str(path))
    emitted: queue.SimpleQueue[Emission] = queue.SimpleQueue()
    prompts = {"a": tuple(range(100, 180)), "b": tuple(range(200, 230))}
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for prompt in prompts.values():
        engine.submit(Request.create(prompt, sampling, engine.info), emitted.put)
    ends: dict[str, RequestStats] = {}
    while len(ends) < len(prompts):
        emission = emitted.get(timeout=60)
        if emission.stats is not None:
            ends[emission.request_id] = emission.stats
    engine.close()

    earlier, begin, *rounds = read(path)
    assert earlier == {"engine": "an earlier one"}
    assert (begin["lanes"], begin["fingerprint"]) == (2, engine.info.fingerprint)
    assert [line["round"] for line in rounds] == list(range(1, len(rounds) + 1))
    assert all(line["us"]["commit"] > 0 and line["time"] >= begin["time"] for line in rounds)
    for name, stats in ends.items():
        spans = [span for line in rounds for span in line["lanes"] if span["request"] == name]
        keeps = [span["keep"] for span in spans if span["kind"] == "verify"]
        assert keeps[:-1] == list(stats.keeps[:-1]) and keeps[-1] >= stats.keeps[-1]  # the last is cut at max_tokens
        assert all(1 <= span["keep"] <= span["width"] <= 8 for span in spans if span["kind"] == "verify")
        assert sum(span["keep"] for span in spans if span["kind"] == "prefill") == stats.prompt_tokens


def test_every_kind_has_a_line(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace.jsonl"))
    verify = (
        VerifySpan(request("v"), 0, 10, 5, 3),
        VerifySpan(request("r"), 1, 4, 5, 2, known=(6, 7)),
    )
    round = Round(verify, (PrefillSpan(request("p"), 2, 0, (1, 2, 3), True),), (Fork(request("f"), 3, 2),))
    round = replace(round, reading=(PrefillSpan(request("q"), 4, 64, (1, 2), False),))
    trace.observe(round, RoundResult(((7, 8), ()), (9,), RoundTimes(0.001, 0.002, 0.003, 0.0005), (4,)))
    assert read(tmp_path / "trace.jsonl") == []
    trace.write()
    trace.write()
    (line,) = read(tmp_path / "trace.jsonl")
    assert line["us"] == {"draft": 1000, "verify": 2000, "prefill": 3000, "commit": 500}
    assert line["lanes"] == [
        {"lane": 0, "request": "v", "kind": "verify", "start": 10, "width": 4, "keep": 2},
        {"lane": 1, "request": "r", "kind": "restore", "start": 4, "width": 3, "keep": 3},
        {"lane": 2, "request": "p", "kind": "prefill", "start": 0, "width": 3, "keep": 3},
        {"lane": 4, "request": "q", "kind": "reading", "start": 64, "width": 2, "keep": 0},
        {"lane": 3, "request": "f", "kind": "fork", "source": 2},
    ]


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full")
    for _ in range(3):
        trace.observe(Round((VerifySpan(request("v"), 0, 10, 5, 3),), ()), RoundResult(((7, 8),), (), RoundTimes()))
        trace.write()
    assert [record.message for record in caplog.records] == ["the trace ends here, /dev/full: No space left on device"]


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace .*: No such file or directory"):
        EngineProcess(OPTIONS, trace=str(tmp_path / "no" / "trace"))
