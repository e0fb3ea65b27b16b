"""Pairs with random weights: valid files that run, the same ones for the same seed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench import synth_model
from paceline.bench.synth_model import SHAPES, write_pair
from paceline.cli import main
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35
from paceline.ops.quant import dequantize
from paceline.types import SamplingParams
from paceline.weights.load import check_pair, open_drafter, open_target

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair("tiny", tmp_path_factory.mktemp("pair"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_seed_decides_every_byte(pair: Pair, tmp_path: Path) -> None:
    again, other = write_pair("tiny", tmp_path / "again"), write_pair("tiny", tmp_path / "other", seed=1)
    for first, second, third in zip(pair, again, other, strict=True):
        assert digest(first) == digest(second) != digest(third)


def test_the_files_fit_each_other_and_their_tokenizer_works(pair: Pair) -> None:
    target, drafter = open_target(pair[0]), open_drafter(pair[1])
    check_pair(target, drafter)
    assert target.ignored == drafter.ignored == ()
    tokenizer = target.tokenizer()
    assert tokenizer.vocab_size == target.config.vocab_size == SHAPES["tiny"].vocab_size
    ids = tokenizer.encode("<|im_start|>def add(a, b):<|im_end|>")
    assert tokenizer.decode(ids) == b"<|im_start|>def add(a, b):<|im_end|>" and len(ids) < 12
    assert {"<|im_end|>", "<|endoftext|>"} == {tokenizer.id_to_token(token) for token in tokenizer.eos_ids}
    assert drafter.config.mask_token_id in tokenizer.special_ids
    assert target.chat_template() is not None


def test_weights_keep_the_size_of_what_goes_through_them(pair: Pair) -> None:
    checked = 0
    for checkpoint in (open_target(pair[0]), open_drafter(pair[1])):
        for name, tensor in checkpoint.tensors.items():
            values = dequantize(tensor)
            assert values.isfinite().all()
            if name.endswith("_proj.weight") and "kernel" not in name and values.numel() > 10_000:
                assert values.std() * values.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.05), name
                checked += 1
    assert checked > 20


def test_rows_of_the_head_differ(pair: Pair) -> None:
    """The pool of random blocks is smaller than a large matrix; equal rows would make equal logits."""
    rows = open_target(pair[0]).tensors["lm_head.weight"].data
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert all(shape.vocab_size < synth_model._POOL_BLOCKS for shape in SHAPES.values())
    assert all(synth_model._POOL_BLOCKS % n for n in range(2, 600))


def test_the_pair_runs_with_and_without_speculation(pair: Pair) -> None:
    prompts: list[Any] = ["def add(a, b):", [{"role": "user", "content": "What is 3 plus 4?"}]]
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    answers = []
    for speculation in (False, True):
        with LLM(str(pair[0]), str(pair[1]), speculation=speculation, max_ctx=256, max_concurrency=2) as llm:
            answers.append([(result.tokens, result.text) for result in llm.generate(prompts, sampling)])
    assert answers[0] == answers[1]
    assert all(len(set(tokens)) > 6 and text for tokens, text in answers[0]), "constant logits would repeat themselves"


def test_the_27b_shape_is_the_published_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything but the weights, which are left out: a sparse file of the full size is opened as a model."""

    def skip(self: synth_model._Pool, file: object, count: int, deviation: float) -> None:
        size = self.blocks.shape[1] * count
        file.seek(size - 1, 1)  # type: ignore[attr-defined]
        file.write(b"\0")  # type: ignore[attr-defined]

    monkeypatch.setattr(synth_model._Pool, "write", skip)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    files = write_pair("qwen3.8-27b", tmp_path)
    target, drafter = open_target(files[0]), open_drafter(files[1])
    check_pair(target, drafter)
    assert 14.5e9 < sum(tensor.nbytes for tensor in target.tensors.values()) < 15.1e9
    assert 1.9e9 < sum(tensor.nbytes for tensor in drafter.tensors.values()) < 2.3e9
    for model, checkpoint in (
        (Qwen35(target.config, torch.float32), target),
        (DFlash(drafter.config, torch.float32), drafter),
    ):
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert wanted == {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    assert target.config.conv_channels == 10240 and target.config.layer_types.count("attention") == 16
    assert drafter.config.target_layer_ids == (5, 19, 33, 47, 61) and drafter.config.kind == "DFlash2"
    assert len(open_target(files[0]).file.tensors) == 851 and len(drafter.file.tensors) == 81


def test_what_cannot_be_written_is_refused(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'huge'; known: qwen3\.8-27b, tiny"):
        write_pair("huge", tmp_path)
    before = digest(pair[0])
    assert main(["bench", "synth-model", "--shape", "tiny", "--out", str(pair[0].parent)]) == 1
    message = capsys.readouterr().err
    assert message == f"error: {pair[0]} exists and has {pair[0].stat().st_size:,} bytes; --force replaces it\n"
    assert digest(pair[0]) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000_000))
    with pytest.raises(ConfigError, match=r"the pair needs 17\.1 GB, 3\.0 GB are free"):
        write_pair("qwen3.8-27b", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: synth_model._Pool, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synth_model._Pool, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_pair("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "synth-model", "--shape", "tiny", "--out", str(tmp_path)]
    assert main(arguments) == 0
    target, drafter = sorted(tmp_path.iterdir(), reverse=True)
    before = digest(target)
    assert main([*arguments, "--seed", "9", "--force"]) == 0
    assert digest(target) != before
    assert f"paceline serve {target} --draft {drafter}" in capsys.readouterr().out
