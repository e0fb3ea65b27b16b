"""The commands themselves, in this process, on the demo pair."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline.selfcheck
from paceline.cli import demo, main, selfcheck
from paceline.config import DEMO_DRAFTER, DEMO_TARGET, EngineOptions
from paceline.engine.build import build
from paceline.selfcheck import Outcome
from paceline.types import Emission, Request
from paceline.weights import describe
from paceline.weights.load import open_target

QUESTION = "Tom has 3 boxes with 4 pencils each. How many pencils does he have?"


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == status
    return capsys.readouterr().out


def test_help_and_version_need_no_torch() -> None:
    program = (
        "import sys; from paceline.cli import main; main(sys.argv[1:]); assert not {'torch', 'fastapi'} & set(sys.modules)"
    )
    for arguments, expected in ((["serve", "--help"], "--max-concurrency"), (["--version"], "paceline"), ([], "selfcheck")):
        ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=20)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert expected in ended.stdout


def test_generate_gives_the_same_text_with_and_without_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", QUESTION, "--max-tokens", "12", "--seed", "7"]
    text = output(capsys, *arguments)
    assert len(text) > 20
    assert output(capsys, *arguments, "--no-speculation") == text


def test_generate_answers_several_prompts_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [output(capsys, "generate", text, "-n", "8", "--temperature", "0") for text in (QUESTION, "Hello")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    together = output(capsys, "generate", QUESTION, "--prompt-file", "-", "-n", "8", "--temperature", "0")
    assert together == f"[1/2] {QUESTION}\n{alone[0]}[2/2] Hello\n{alone[1]}"


def test_generate_reports_figures_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "def add(a, b):", "-n", "8", "--temperature", "0", "--seed", "11", "--raw"]) == 0
    figures = capsys.readouterr().err
    assert all(part in figures for part in ("+ 8 tokens", "acceptance length", "seed 11", "finish length"))


def test_generate_stops_at_a_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", QUESTION, "-n", "12", "--temperature", "0"]
    text = output(capsys, *arguments).strip()
    cut = text[5:8]
    assert output(capsys, *arguments, "--stop", cut) == text[: text.index(cut)] + "\n"


def test_inspect_shows_the_demo_pair(capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter, pair = output(capsys, "inspect", "demo").split("\n\n")
    for part in ("qwen35", str(DEMO_TARGET), "8,192", "16,384", "IQ4_XS", "6 Gated DeltaNet", "chat template:  yes", "q8_0"):
        assert part in target
    for part in ("dflash", str(DEMO_DRAFTER), "DFlash2, block 8", "1, 3, 5", "2048", "Q8_0", "rank 128"):
        assert part in drafter
    assert "cannot be run" not in target + drafter + pair
    assert f"paceline serve {DEMO_TARGET} --draft {DEMO_DRAFTER}" in pair


def test_inspect_counts_the_state_as_the_engine_does(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    target, _, pair = output(capsys, "inspect", "demo").split("\n\n")
    for shown, speculation in ((target, False), (pair, True)):
        (line,) = [line for line in shown.splitlines() if line.startswith("state:")]
        with caplog.at_level(logging.INFO, "paceline.engine"):
            build(EngineOptions(device="cpu", speculation=speculation))
        assert line.partition(":")[2].strip() in [record.getMessage().partition(";")[0] for record in caplog.records]


def test_inspect_starts_a_directory_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a Hugging Face directory are files in it, which nothing can be started with."""
    described = replace(describe.describe(DEMO_TARGET), path=tmp_path, paths=(tmp_path / "model.safetensors",))
    monkeypatch.setattr(describe, "describe", lambda path: described)
    lines = output(capsys, "inspect", str(tmp_path)).splitlines()
    assert lines[-1].split() == ["start", "it:", "paceline", "serve", str(tmp_path)]


def test_help_says_what_is_not_used_without_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "generate"):
        words = " ".join(output(capsys, command, "--help").split())
        assert words.count("Neither used nor checked with") == 4


def test_selfcheck_passes_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cases = paceline.selfcheck.all_cases()[:2]
    monkeypatch.setattr(paceline.selfcheck, "all_cases", lambda device: cases)
    monkeypatch.setattr(selfcheck, "_MAX_TOKENS", 8)
    shown = output(capsys, "selfcheck", "--device", "cpu")
    assert shown.startswith("The arithmetic of the engine, pl-") and "device=cpu" in shown.splitlines()[0]
    assert shown.count("  ok  ") == len(cases) + 3
    assert all(case.name in shown for case in cases)
    assert shown.splitlines()[-1].startswith("OK: ")


def test_selfcheck_fails_when_an_operation_or_the_pair_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Outcome("linear", 0.1, "item 3 in a batch of 5 under 2 thread(s): output 0 differs in 7 of 9 values")

    def run_all(report: Callable[[Outcome], None], cases: list[Any]) -> list[Outcome]:
        report(failure)
        return [failure]

    monkeypatch.setattr(paceline.selfcheck, "run_all", run_all)
    monkeypatch.setattr(selfcheck, "_tokens", lambda options, speculation, lanes: [[1, 2 + (lanes == 3 and speculation)]])
    shown = output(capsys, "selfcheck", status=1)
    assert "FAIL linear" in shown and "item 3" in shown
    assert shown.count("  ok  ") == 2 and "FAIL speculation on, 3 lanes" in shown
    assert shown.splitlines()[-1].startswith("FAILED: 2 ")


def test_demo_runs_twice_and_compares(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PER_SUITE", 1)
    monkeypatch.setattr(demo, "LANES", 3)  # fewer than prompts
    monkeypatch.setattr(demo, "MAX_TOKENS", 8)
    shown = output(capsys, "demo")
    for part in (
        "goodput",
        "output-window throughput",
        "median TTFT",
        "acceptance length",
        "Tokens identical: yes",
        "of 4 requests",
    ):
        assert part in shown
    assert shown.count("first after") == 2 * 4
    assert "\x1b" not in shown


def test_demo_fails_when_tokens_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(console: Console, speculation: bool, threads: int | None) -> demo.Run:
        return demo.Run([[1, 2], [3, 4 + speculation]], 1.0, 1.0, 1.0, 1.0, "fp")

    monkeypatch.setattr(demo, "_run", run)
    assert "Tokens identical: NO, 1 of 2 requests differ" in output(capsys, "demo", status=1)


def test_the_live_table_shows_lanes_tokens_and_acceptance() -> None:
    request = Request("0", (1, 2), 0.0, 1.0, 0, 0.0, 0, 10)
    running, waiting = demo.Job("code", "Write [bold]code[/bold]", request), demo.Job("gsm", "A sum", request)
    tokenizer = open_target(DEMO_TARGET).tokenizer()
    words = tokenizer.encode("return the sum")
    running.take(Emission("0", tuple(words[:1])), now=1.0)
    running.take(Emission("0", tuple(words[1:])), now=2.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(demo._lanes([running, waiting], 1, tokenizer, speculation=True))
    shown = console.export_text()
    assert f"with speculation: 1 of 6 lanes, {len(words)} tokens, acceptance length {len(words) - 1:.2f}" in shown
    assert "[bold]code[/bold]" in shown and "return the sum" in shown and "A sum" in shown
