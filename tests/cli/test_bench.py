"""``paceline bench``: its commands are described, refuse what they cannot read, and need no torch to say so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from paceline.cli import main
from paceline.cli.bench import bench

DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_document_has_every_command_and_option() -> None:
    group = typer.main.get_command(bench)
    assert isinstance(group, typer.core.TyperGroup)
    words = {word for span in re.findall(r"`([^`\n]+)`", DOCUMENT) for word in (span, *re.split(r"[ ,]+", span))}
    for name, command in group.commands.items():
        assert f"`paceline bench {name}`" in DOCUMENT
        assert command.help
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"
            options = {option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("-")}
            assert options - words <= {"--help"}, name


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from paceline.cli import main; main(['bench', 'serve', '--help']); assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "") and "--workload" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--concurrency", "1,x"], "--concurrency must be integers with commas between them, got '1,x'"),
        (["serve", "--concurrency", "2,2"], "--concurrency must hold different numbers of at least 1, got (2, 2)"),
        (["serve", "--config", "fast"], "--config must be NAME=FLAGS, such as off=--no-speculation, got 'fast'"),
        (["serve", "--config", "a=", "--config", "a=-x"], "--config names must differ, got a, a"),
        (["serve", "--workload", "fixed", "--output-tokens", "0"], "--output-tokens must be at least 1, got 0"),
        (["serve", "--workload", "mixed"], "--workload must be manifest or fixed, got 'mixed'"),
        (["serve", "--server", "tgi"], "--server: there is no server 'tgi'; there are paceline, llama-server"),
        (["serve", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["serve", "--fresh", "never"], "--fresh must be cell or configuration, got 'never'"),
        (["screen", "all"], "NAME: there is no screen 'all'; there are drafts, blocks, acceptance, contexts, burst, mixed"),
        (["screen", "contexts", "--longest", "10"], "--longest must be at least 1024 for this screen, got 10"),
        (["serve", "--servers", "/nowhere/a.toml"], "--servers: /nowhere/a.toml: No such file or directory"),
        (["serve", "--peer", "/nowhere/peer.json"], "--peer: /nowhere/peer.json: No such file or directory"),
        (["serve", "--serve-flags", "'x"], '--serve-flags: cannot be read as flags: No closing quotation: "\'x"'),
        (["serve", "--config", "a='x"], '--config: cannot be read as flags: No closing quotation: "\'x"'),
        (["round", "--lanes", "0"], "--lanes must be at least 1, got 0"),
        (["round", "--option", "max_ctx=1"], "--option max_ctx must be at least 2, got 1"),
        (["report"], "a directory of a run is needed, or --compare with two"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message} (see paceline bench {arguments[0]} --help)\n"


def test_a_run_its_report_and_the_ratios_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = tmp_path / "servers.toml"
    stand_in = Path(__file__).parents[1] / "bench" / "standin.py"
    servers.write_text(
        f'[stand-in]\ncommand = ["{{python}}", "{stand_in}", "--port", "{{port}}"]\n'
        "[stand-in.configurations]\noff = { speculation = false }\n"
        'on = { flags = ["--drafts"], speculation = true }\n'
    )
    shared = ["--servers", str(servers), "--server", "stand-in", "--requests", "4", "--fresh", "configuration"]
    for name in ("a", "b"):
        command = ["bench", "serve", *shared, "--concurrency", "1,2", "--out", str(tmp_path / name)]
        assert main(command) == 0, capsys.readouterr()
    assert main([*command, "--seed", "1"]) == 1
    shown = capsys.readouterr()
    assert "holds a run with another plan" in shown.err and "stand-in on, manifest, C=2, repeat 0: " in shown.out

    assert main(["bench", "report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("| stand-in | on | 2 |") == 2
    assert (tmp_path / "a" / "report.html").read_text().count("<h2>") == 3
    assert main(["bench", "report", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("| stand-in |") == 4

    cell = next((tmp_path / "a" / "cells").iterdir())
    cell.write_text(cell.read_text() + " ")
    assert main(["bench", "report", str(tmp_path / "a")]) == 1
    assert cell.name in capsys.readouterr().err


def test_a_benchmark_that_is_ended_ends_its_server_and_says_so_of_its_cell(tmp_path: Path) -> None:
    servers, stand_in = tmp_path / "servers.toml", Path(__file__).parents[1] / "bench" / "standin.py"
    servers.write_text(
        f'[slow]\ncommand = ["{{python}}", "{stand_in}", "--port", "{{port}}", "--fault", "hang", "--at", "1"]\n'
    )
    out = tmp_path / "run"
    command = [sys.executable, "-m", "paceline.cli", "bench", "serve", "--servers", str(servers), "--server", "slow"]
    process = subprocess.Popen([*command, "--concurrency", "1", "--requests", "3", "--out", str(out)])
    log = out / "logs" / "slow--default--manifest--c1--r0.log"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("POST") == 3):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=20) == 130
    (cell,) = json.loads((out / "matrix.json").read_text())["cells"]
    assert cell["status"] == "interrupted" and "successes" not in cell
    assert not [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if str(stand_in).encode() in _read(entry)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
