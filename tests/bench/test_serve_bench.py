"""The HTTP benchmark: its arithmetic, and one small run against a real server on the demo pair."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from paceline.bench.serve import (
    Answer,
    Configuration,
    Plan,
    Workload,
    closed_loop,
    figures,
    percentile,
    run,
    table,
    text_differences,
)
from paceline.errors import ConfigError

PEER = Path(__file__).parents[2] / "benchmarks" / "peers" / "llamacpp-h200.json"


def metrics(spans: float, emitted: float, rounds: float) -> dict[str, float]:
    names = ("verify_spans", "emitted_in_verify", "rounds")
    return {f"paceline_{name}_total": value for name, value in zip(names, (spans, emitted, rounds), strict=True)}


def cell(name: str, concurrency: int, rate: float, acceptance: float, *, plain: bool) -> dict[str, object]:
    answers = [Answer(0, 0.0, [0.5, 0.6, 0.8], 1.5, 10, round(rate))]
    made = figures(answers, metrics(0, 0, 0), metrics(100, 100 * acceptance, 50))
    return {"configuration": name, "concurrency": concurrency, "plain": plain, **made}


def test_figures_count_tokens_by_usage_and_time_by_events() -> None:
    answers = [
        Answer(0, 10.0, [10.5, 10.6, 10.9], 11.0, 7, 8),
        Answer(1, 10.2, [10.4, 10.5], 12.0, 7, 8),
        Answer(2, 10.0, error="status 500"),
    ]
    made = figures(answers, metrics(3, 5, 2), metrics(7, 15, 4))
    assert made["tokens"] == 16 and made["requests"] == 3 and made["errors"] == ["prompt 2: status 500"]
    assert made["window_throughput"] == pytest.approx(16 / 1.6)  # 10.4 to 12.0
    assert made["goodput"] == pytest.approx(16 / 2.0)
    assert made["ttft_ms"] == pytest.approx({"p50": 200, "p95": 500})
    assert made["itl_ms"] == pytest.approx({"p50": 100, "p99": 300})
    assert (made["acceptance_length"], made["rounds"]) == (2.5, 2)


def test_an_answer_without_visible_text_has_its_end() -> None:
    assert Answer(0, 0.0, [], 3.0).first == 3.0
    assert figures([Answer(0, 0.0, error="gone")], {}, {}) == {"requests": 1, "errors": ["prompt 0: gone"]}


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert (percentile([3.0], 50), percentile([3.0], 99), percentile([], 50)) == (3.0, 3.0, 0.0)


def test_the_table_compares_with_plain_and_with_the_peer() -> None:
    cells = [
        cell("plain", 1, 174, 1.0, plain=True),
        cell("spec-4.0", 1, 544, 4.1, plain=False),
        cell("spec-1.0", 1, 170, 1.0, plain=False),
        cell("spec-4.0", 2, 600, 4.0, plain=False),
    ]
    lines = table(cells, json.loads(PEER.read_text())).splitlines()
    assert "x llama.cpp" in lines[0]
    assert lines[1].split()[:5] == ["plain", "1", "174.0", "1.00", "2.00"]
    assert lines[2].split()[:5] == ["spec-4.0", "1", "544.0", "3.13", "4.00"]
    assert lines[3].split()[:5] == ["spec-1.0", "1", "170.0", "0.98", "113.3"]  # the peer has no such cell
    assert lines[4].split()[:4] == ["spec-4.0", "2", "600.0", "400.0"]
    failed = {"configuration": "plain", "concurrency": 1, "plain": True, "requests": 1, "errors": ["prompt 0: gone"]}
    assert table([failed]).splitlines()[1].endswith("no answer: prompt 0: gone")


def test_text_differences_name_prompt_and_place() -> None:
    assert text_differences({"plain": {0: "abc", 1: "x"}, "spec": {0: "abc", 1: "x"}}) == []
    assert text_differences({"plain": {0: "abc", 1: "x"}, "spec": {0: "abd"}, "more": {0: "ab", 1: "x"}}) == [
        "prompt 0: spec differs from plain at character 2: 'd', 'c'",
        "prompt 1: no answer from spec",
        "prompt 0: more differs from plain at character 2: '', 'c'",
    ]


def test_configurations_are_names_and_flags() -> None:
    plain = Configuration.parse("plain=--no-speculation")
    forced = Configuration.parse("spec-4.0=--spec-synth-len 4.0 --log-level debug")
    assert (plain.plain, plain.synthetic, forced.plain, forced.synthetic) == (True, False, False, True)
    assert forced.flags == ("--spec-synth-len", "4.0", "--log-level", "debug")
    assert Configuration.parse("on=").flags == ()
    for wrong in ("--no-speculation", "=--x", "a/b=--x", "plain"):
        with pytest.raises(ConfigError, match="NAME=FLAGS"):
            Configuration.parse(wrong)


def test_plans_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    plain, forced = Configuration("plain", ("--no-speculation",)), Configuration("forced", ("--spec-synth-len=4",))
    out = tmp_path / "serve.json"
    with pytest.raises(ConfigError, match="got 1"):
        Plan("demo", "demo", (plain, forced), Workload(), out, check_equal=True)
    with pytest.raises(ConfigError, match="plain, plain"):
        Plan("demo", "demo", (plain, plain), Workload(), out)
    with pytest.raises(ConfigError, match="output_tokens must be at least 1, got 0"):
        Workload(output_tokens=0)
    with pytest.raises(ConfigError, match="concurrency"):
        Workload(concurrency=(0, 1))


def test_a_server_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    plan = Plan("demo", "demo", (Configuration("odd", ("--no-such-flag",)),), Workload(), tmp_path / "serve.json")
    with pytest.raises(ConfigError, match=r"status 2: error: .*no-such-flag.*serve-odd.log"):
        run(plan)


def test_a_run_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = Workload(prompt_tokens=11, output_tokens=3, concurrency=(1, 2), warm_up=2)
    flags = ("--dtype", "float32", "--max-ctx", "128", "--threads", "1")
    out = tmp_path / "record" / "serve.json"
    assert run(Plan("demo", "demo", (Configuration("on", ()),), workload, out, flags, peer=PEER)) == 0
    record = json.loads(out.read_text())
    assert [(c["concurrency"], c["requests"], c["tokens"], c["errors"]) for c in record["cells"]] == [
        (1, 6, 18, []),
        (2, 9, 27, []),
    ]
    assert all(1 <= c["acceptance_length"] <= 8 and c["window_throughput"] > c["goodput"] > 0 for c in record["cells"])
    answers = [answer for c in record["cells"] for answer in c["answers"]]
    assert all(a["start_ms"] < a["first_ms"] <= a["last_ms"] and a["prompt_tokens"] == 11 for a in answers)
    assert sorted(answer["prompt"] for answer in answers) == [*range(2, 8), *range(10, 19)]  # the others warmed up
    (configuration,) = record["configurations"]
    assert configuration["arithmetic"].startswith("device=") and configuration["fingerprint"].startswith("pl-")
    assert record["target"]["sha256"] and record["versions"]["torch"] and record["hardware"]["cores"]
    assert "on" in capsys.readouterr().out.splitlines()[-1]


def test_failures_are_recorded_and_do_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a transport that answers wrongly in several ways."""

    def answer(request: httpx.Request) -> httpx.Response:
        (token,) = json.loads(request.content)["prompt"]
        events = {
            0: 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
            'data: {"error": {"message": "lane failed"}}\n\n',
            1: 'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
            'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\ndata: [DONE]\n\n',
        }
        if token == 2:
            return httpx.Response(503, text="not yet")
        if token == 3:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text=events[token])

    client = httpx.AsyncClient
    monkeypatch.setattr(
        httpx, "AsyncClient", lambda **options: client(transport=httpx.MockTransport(answer), base_url="http://x")
    )
    asked = [(token, [token]) for token in range(4)]
    answers = asyncio.run(closed_loop("http://x", asked, 2, Workload(prompt_tokens=1, output_tokens=3)))
    errors = {a.prompt: a.error for a in answers}
    assert errors == {
        0: "lane failed",
        1: "usage says 2 output tokens, asked for 3",
        2: "status 503: not yet",
        3: "ConnectError: gone",
    }
