"""What a user can get wrong: one clear line on stderr each, an exit status, and never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.cli import main
from paceline.config import DEMO_DRAFTER, DEMO_TARGET
from paceline.engine import capacity

Change = Callable[[gguf.GGUFReader], None]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and the one line that was written."""
    capsys.readouterr()
    status = main(list(arguments))
    captured = capsys.readouterr()
    line, end, rest = captured.err.partition("\n")
    assert (captured.out, end, rest) == ("", "\n", "")
    assert line.startswith("error: ")
    return status, line


def changed(path: Path, original: Path, change: Change) -> str:
    """A copy of a GGUF file with something changed in place."""
    path.write_bytes(original.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    change(reader)
    reader.data.flush()
    return str(path)


def set_value(key: str, index: int, value: Any) -> Change:
    def change(reader: gguf.GGUFReader) -> None:
        field = reader.get_field(key)
        assert field is not None
        field.parts[field.data[index]][0] = value

    return change


def spoil_template(reader: gguf.GGUFReader) -> None:
    field = reader.get_field("tokenizer.chat_template")
    assert field is not None
    text = field.parts[field.data[0]]
    at = bytes(text).index(b"{%")
    text[at + 2 : at + 10] = list(b" wrong  ")


def halve_norm(reader: gguf.GGUFReader) -> None:
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    tensor.field.parts[3][0] = 256


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--no-such-option"], ["--no-such-option"]),
        (["serve", "--max-concurrency", "many"], ["error: --max-concurrency: ", "integer"]),
        (["serve", "--log-level", "loud"], ["--log-level", "loud", "warning"]),
        (["serve", "a.gguf", "--model", "b.gguf"], ["twice", "a.gguf", "b.gguf"]),
        (["generate"], ["PROMPT"]),
        (["inspect"], ["FILE"]),
        (["dance"], ["dance"]),
    ],
)
def test_a_command_line_that_cannot_be_read_is_status_2(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = run(capsys, *arguments)
    assert status == 2
    assert all(part in line for part in expected), line
    assert "--help)" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--port", "70000"], ["--port", "65535", "70000"]),
        (["serve", "--max-body-mib", "0"], ["--max-body-mib", "1", "0"]),
        (["serve", "--api-key-file", "/nowhere/keys"], ["--api-key-file /nowhere/keys: No such file"]),
        (["serve", "--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["serve", "--cache-type-k", "q4"], ["--cache-type-k", "q4", "q8_0"]),
        (["serve", "--cache-type-v", "q4"], ["--cache-type-v", "q4", "q8_0"]),
        (["serve", "--max-concurrency", "0"], ["--max-concurrency", "1", "0"]),
        (["serve", "--max-ctx", "1"], ["--max-ctx", "2", "1"]),
        (["serve", "--draft-block-size", "1"], ["--draft-block-size", "2", "1"]),
        (["serve", "--draft-max", "0"], ["--draft-max", "1", "0"]),
        (["serve", "--draft-swa", "0"], ["--draft-swa", "1", "0"]),
        (["serve", "--kv-pool-tokens", "0"], ["--kv-pool-tokens", "1", "0"]),
        (["serve", "--prefill-tokens", "63"], ["--prefill-tokens", "64", "63"]),
        (["serve", "--threads", "100000"], ["--threads", "1024", "100000"]),
        (["serve", "--admission-coalesce-ms", "-1"], ["--admission-coalesce-ms", "1000", "-1"]),
        (["serve", "--itl-budget-ms", "0"], ["--itl-budget-ms", "60000", "0"]),
        (["serve", "--max-queue", "-1"], ["--max-queue", "0", "-1"]),
        (["serve", "--request-timeout", "0"], ["--request-timeout", "86400", "0"]),
        (["serve", "--drain-timeout", "-2"], ["--drain-timeout", "86400", "-2"]),
        (["serve", "--api-key", ""], ["--api-key", "empty"]),
        (["serve", ""], ["MODEL", "empty"]),
        (["serve", "--model", ""], ["--model", "empty"]),
        (["serve", "--draft", ""], ["--draft", "empty"]),
        (["generate", "hi", "--model", ""], ["--model", "empty"]),
        (["selfcheck", "--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["selfcheck", "--device", "tpu"], ["--device", "tpu", "cpu"]),
        (["generate", "hi", "--top-p", "2"], ["--top-p", "1", "2"]),
        (["generate", "hi", "--temperature", "nan"], ["--temperature", "nan"]),
        (["generate", "hi", "--device", "tpu"], ["--device", "tpu", "cpu"]),
        (["generate", "hi", "--max-ctx", "99999"], ["--max-ctx", "99999", "8192"]),
        (["generate", "hi", "--draft-block-size", "9"], ["--draft-block-size", "9", "8"]),
        (["generate", "hi", "--draft-max", "8"], ["--draft-max", "8", "7"]),
        (["serve", "--port", "0", "--max-ctx", "99999"], ["--max-ctx", "99999", "8192"]),
        (["serve", "--port", "0", "--trace", "/nowhere/trace"], ["--trace", "/nowhere/trace"]),
        (["generate", "--prompt-file", "/nowhere/prompt.txt"], ["--prompt-file", "/nowhere/prompt.txt"]),
    ],
)
def test_a_bad_value_is_status_2_and_names_the_option(
    arguments: list[str], expected: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the engine finds it, in a process of its own. That logs in between."""
    assert main(arguments) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and line.endswith("--help)")
    assert all(part in line for part in expected), line


def test_an_error_of_what_was_not_typed_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the machine is too small for the defaults, the command line is not at fault; what it may change is named."""
    monkeypatch.setattr(capacity, "free_memory", lambda device: 2**20)
    status, line = run(capsys, "generate", "hi")
    assert status == 1
    assert "lower max_concurrency, --max-ctx or kv_pool_tokens" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "hi " * 9000, "--raw"], ["8192", "prompt"]),
        (["generate", "\udcff", "--raw"], ["Unicode"]),
        (["generate", "", "--raw"], ["0 tokens"]),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_status_1(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = run(capsys, *arguments)
    assert status == 1
    assert all(part in line for part in expected), line


def test_a_prompt_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"abc\xff")
    assert run(capsys, "generate", "-f", str(path)) == (
        2,
        f"error: --prompt-file {path}: not UTF-8 text: byte 3 is 0xff (see paceline generate --help)",
    )


def test_a_closed_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, "generate", "-f", "-") == (
        2,
        "error: --prompt-file -: stdin is closed (see paceline generate --help)",
    )


def test_a_closed_stderr_leaves_stdout_alone() -> None:
    program = f"{sys.executable} -m paceline.cli generate hi -n 1 --max-ctx 64 --top-k {{}} 2>&-"
    good, bad = (
        subprocess.run(["bash", "-c", program.format(top_k)], capture_output=True, text=True, timeout=60)
        for top_k in (1, -5)
    )
    assert (good.returncode, good.stderr) == (0, "") and "tok/s" not in good.stdout
    assert (bad.returncode, bad.stdout) == (2, "")


@pytest.mark.parametrize("command", ["serve", "generate", "inspect"])
def test_files_that_are_no_models(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = DEMO_TARGET.read_bytes()
    cases = {
        "missing.gguf": None,
        "truncated.gguf": whole[: len(whole) // 2],
        "cut in the header.gguf": whole[:1000],
        "magic.gguf": b"GGML" + whole[4:],
        "empty.gguf": b"",
    }
    for name, content in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        model = {"serve": ["--port", "0", str(path)], "generate": ["hi", "--model", str(path)], "inspect": [str(path)]}
        status, line = run(capsys, command, *model[command])
        assert status == 1
        assert str(path) in line


def test_a_drafter_of_another_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # llama.cpp counts these layers from 1
    drafter = changed(tmp_path / "drafter.gguf", DEMO_DRAFTER, set_value("dflash.target_layers", 2, 50))
    for arguments in (["serve", "--port", "0"], ["generate", "hi"]):
        status, line = run(capsys, *arguments, "--draft", drafter)
        assert status == 1
        assert all(part in line for part in (drafter, str(DEMO_TARGET), "layer 49", "8 layers")), line
    assert main(["inspect", str(DEMO_TARGET), drafter]) == 0
    pair = capsys.readouterr().out.split("\n\n")[2].splitlines()
    assert [line.split(":")[0] for line in pair] == ["pair", "cannot be run"]
    assert "layer 49" in pair[1]


def test_a_target_as_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    status, line = run(capsys, "serve", "--port", "0", "--draft", str(DEMO_TARGET))
    assert status == 1
    assert str(DEMO_TARGET) in line and "not a drafter" in line


def test_an_unreadable_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = changed(tmp_path / "target.gguf", DEMO_TARGET, spoil_template)
    for arguments in (["serve", "--port", "0", target], ["generate", "hi", "--model", target]):
        status, line = run(capsys, *arguments)
        assert status == 1
        assert target in line and "chat template" in line


def test_a_tensor_of_the_wrong_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = changed(tmp_path / "target.gguf", DEMO_TARGET, halve_norm)
    status, line = run(capsys, "generate", "hi", "--model", target)
    assert status == 1
    assert all(part in line for part in (target, "output_norm.weight", "[256]", "[512]")), line


def test_a_port_in_use_in_a_process_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "paceline.cli", "serve", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_reader_that_leaves_early() -> None:
    program = f"{sys.executable} -m paceline.cli inspect demo demo demo | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (1, "")
