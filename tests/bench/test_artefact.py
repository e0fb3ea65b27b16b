"""What a record says of its models and its machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.bench import artefact
from paceline.bench.artefact import machine, model_file, prompts
from paceline.config import DEMO_TARGET
from paceline.weights.load import open_target


def test_small_files_are_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert model_file(path) == {"file": "model.gguf", "bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(artefact, "_BLOCK_BYTES", 10)
    path, seen = tmp_path / "model.gguf", set()
    for at in (None, 0, 9, 63_990, 127_999):
        content = bytearray(128_000)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        facts = model_file(path)
        assert facts["bytes"] == 128_000 and "sha256" not in facts
        seen.add(facts["sampled_sha256"])
    path.write_bytes(bytes(127_999))
    assert len(seen) >= 4 and model_file(path)["sampled_sha256"] not in seen


def test_a_directory_counts_as_one_model(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    facts = model_file(tmp_path)
    (tmp_path / "config.json").write_bytes(b"other")
    assert facts["bytes"] == 26 and facts == model_file(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"A.safetensors")
    assert facts["sampled_sha256"] != model_file(tmp_path)["sampled_sha256"]


def test_programs_that_are_missing_leave_their_facts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    facts = machine()
    assert (facts["commit"], facts["dirty"], facts["hardware"]["gpus"]) == (None, False, [])


def test_prompts_are_as_long_as_asked_and_differ() -> None:
    tokenizer = open_target(DEMO_TARGET).tokenizer()
    made = prompts(tokenizer, 150, 107)
    assert {len(prompt) for prompt in made} == {107}
    assert len({tuple(prompt[:5]) for prompt in made}) == 150
    assert made[:10] == prompts(tokenizer, 10, 107)
    assert [len(prompt) for prompt in prompts(tokenizer, 2, 20_000)] == [20_000, 20_000]
    assert not tokenizer.special_ids & {token for prompt in made for token in prompt}
