"""``paceline bench``: its commands are described, refuse what they cannot read, and need no torch to say so."""

from __future__ import annotations

import re
import subprocess
import sys
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
    assert (ended.returncode, ended.stderr) == (0, "") and "--check-equal" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--concurrency", "1,x"], "concurrency must be integers with commas between them, got '1,x'"),
        (["serve", "--config", "fast"], "--config must be NAME=FLAGS, such as plain=--no-speculation, got 'fast'"),
        (["serve", "--output-tokens", "0"], "output_tokens must be at least 1, got 0"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
