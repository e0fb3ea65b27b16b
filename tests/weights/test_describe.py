"""Describing model files, those that cannot be run included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import LAYERS, H, random_tensors, target_shapes, tiny_target, write_gguf

from paceline.config import DEMO_DRAFTER, DEMO_TARGET
from paceline.errors import LoadError
from paceline.weights.describe import describe


def test_demo_target() -> None:
    d = describe(DEMO_TARGET)
    assert (d.role, d.architecture, d.name, d.problems) == ("target", "qwen35", "Paceline demo target", ())
    assert d.parameters == 40_186_184
    assert {use.qtype: use.tensors for use in d.types} == {"IQ4_XS": 61, "Q6_K": 1, "Q5_K": 1, "F32": 45}
    assert sum(use.bytes for use in d.types) == d.weight_bytes
    assert (d.vocab_tokens, d.has_chat_template) == (16_384, True)


def test_demo_drafter() -> None:
    d = describe(DEMO_DRAFTER)
    assert (d.role, d.architecture, d.problems) == ("drafter", "dflash", ())


def test_ignored_tensors_are_not_weight_to_load(tmp_path: Path) -> None:
    extra = {f"blk.{LAYERS}.nextn.eh_proj.weight": (H, 2 * H)}
    keys = {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    plain = describe(tiny_target(tmp_path / "a.gguf"))
    merged = describe(tiny_target(tmp_path / "b.gguf", tensors=random_tensors(target_shapes() | extra), **keys))
    assert merged.ignored == tuple(extra)
    assert merged.weight_bytes == plain.weight_bytes
    assert merged.parameters == plain.parameters + 2 * H * H


def test_a_target_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    tensors = random_tensors(target_shapes()) | {"blk.1.ffn_up.weight": (np.zeros((512, 66), np.uint8), "IQ2_XXS")}
    keys = {"tokenizer.ggml.pre": "gpt-4o", "tokenizer.chat_template": "{% if %}"}
    d = describe(tiny_target(tmp_path / "t.gguf", tensors=tensors, **keys))
    assert (d.role, d.config, d.vocab_tokens, d.has_chat_template) == ("target", None, None, False)
    assert [word for word in ("IQ2_XXS", "gpt-4o", "template") if any(word in p for p in d.problems)] == [
        "IQ2_XXS",
        "gpt-4o",
        "template",
    ]
    assert "IQ2_XXS" in {use.qtype for use in d.types}


def test_another_architecture_is_described(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (np.zeros((8, 32), np.float16), "F16")}
    d = describe(write_gguf(tmp_path / "t.gguf", "llama", {"general.name": "other"}, tensors))
    assert (d.role, d.name, d.parameters, d.weight_bytes) == (None, "other", 256, 512)
    assert len(d.problems) == 1 and "architecture 'llama' is not supported" in d.problems[0]


def test_what_cannot_be_opened_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file"):
        describe(tmp_path / "nothing.gguf")
