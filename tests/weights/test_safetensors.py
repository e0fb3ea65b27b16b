"""Hugging Face directories: the same values and geometry as the GGUF form of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    CHANNELS,
    HEAD_DIM,
    LAYERS,
    VOCAB,
    F,
    H,
    changed,
    drafter_metadata,
    drafter_shapes,
    module_for,
    random_tensors,
    target_shapes,
    tiny_target,
    write_gguf,
    write_hf,
)
from torch import Tensor

from paceline.config import DrafterConfig, RopeScaling, TargetConfig
from paceline.errors import LoadError
from paceline.ops.quant import dequantize
from paceline.weights import names
from paceline.weights.describe import describe
from paceline.weights.load import Checkpoint, fill, open_drafter, open_target

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": False,
}
DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1e7,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "block_size": 4,
    "dflash_config": {
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
        "target_layer_ids": [1, 2],
        "mask_token_id": VOCAB - 1,
    },
}


def target_tensors(*, tied: bool = False, prefix: str = "model.") -> dict[str, Tensor]:
    """The float32 tensors of the tiny target under their Hugging Face names and in their Hugging Face form."""
    result = {}
    for name, (array, _) in random_tensors(target_shapes(tied=tied)).items():
        parameter = names.target_from_gguf(name)
        assert parameter is not None
        values = torch.from_numpy(array)
        if parameter.endswith("linear_attn.A"):
            parameter, values = f"{parameter}_log", torch.log(values.abs())
        elif parameter.endswith("conv1d.weight"):
            values = values.unsqueeze(1)
        elif parameter.endswith("norm.weight") and "linear_attn" not in parameter:
            values = values - 1
        result[parameter if parameter == "lm_head.weight" else prefix + parameter] = values
    return result


def drafter_tensors(prefix: str = "", codebook_suffix: str = "") -> dict[str, Tensor]:
    result = {}
    for name, (array, _) in random_tensors(drafter_shapes()).items():
        parameter = names.drafter_from_gguf(name)
        assert parameter is not None
        suffix = codebook_suffix if parameter.endswith("codebook") else ""
        result[prefix + parameter + suffix] = torch.from_numpy(array)
    return result


def hf_target(path: Path, tensors: dict[str, Tensor] | None = None, shards: int = 1, **changes: Any) -> Path:
    return write_hf(path, changed(TARGET_CONFIG, changes), tensors or target_tensors(), shards)


def hf_drafter(path: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    nested = changed(DRAFTER_CONFIG["dflash_config"], changes.pop("dflash", {}))
    return write_hf(path, changed(DRAFTER_CONFIG | {"dflash_config": nested}, changes), tensors or drafter_tensors())


def assert_same(hf: Checkpoint[Any], gguf_form: Checkpoint[Any]) -> None:
    assert set(hf.tensors) == set(gguf_form.tensors)
    for name, tensor in hf.tensors.items():
        want = dequantize(gguf_form.tensors[name])
        if name.endswith("linear_attn.A"):
            want = -want.abs()
        torch.testing.assert_close(dequantize(tensor), want, rtol=1e-6, atol=1e-6, msg=name)


def geometry(config: TargetConfig | DrafterConfig) -> dict[str, Any]:
    values = {field: getattr(config, field) for field in config.__dataclass_fields__}
    return values | {"rms_eps": pytest.approx(config.rms_eps), "head_layout": None}


def test_flat_target_equals_its_gguf_form(tmp_path: Path) -> None:
    hf, plain = open_target(hf_target(tmp_path / "hf")), open_target(tiny_target(tmp_path / "t.gguf"))
    assert hf.config.head_layout == "grouped"
    assert geometry(hf.config) == geometry(plain.config)
    assert_same(hf, plain)
    fill(module_for(plain), hf)


def test_nested_sharded_target_drops_images_and_mtp(tmp_path: Path) -> None:
    extra = {"model.visual.patch_embed.proj.weight": torch.zeros(3, 2), "mtp.fc.weight": torch.zeros(H, 2 * H)}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": changed(TARGET_CONFIG, {"architectures": None, "tie_word_embeddings": None}),
        "tie_word_embeddings": True,
    }
    tensors = target_tensors(tied=True, prefix="model.language_model.") | extra
    path = write_hf(tmp_path / "hf", config, tensors, shards=3)
    target = open_target(path)
    assert set(target.ignored) == set(extra)
    assert len(target.paths) == 3
    assert target.config.tie_embeddings
    assert_same(target, open_target(tiny_target(tmp_path / "t.gguf", tensors=random_tensors(target_shapes(tied=True)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in target_tensors().items()}
    target = open_target(hf_target(tmp_path / "hf", tensors))
    stored = target.tensors["layers.0.mlp.up_proj.weight"]
    assert torch.equal(dequantize(stored, dtype), tensors["model.layers.0.mlp.up_proj.weight"])
    norm = target.tensors["layers.0.input_layernorm.weight"]
    assert (norm.qtype, norm.shape) == ("F32", (H,))
    assert torch.equal(dequantize(norm), 1 + tensors["model.layers.0.input_layernorm.weight"].float())
    assert target.tensors["layers.0.linear_attn.conv1d.weight"].shape == (CHANNELS, 4)


def test_a_head_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    target = open_target(hf_target(tmp_path / "hf", tie_word_embeddings=True))
    assert target.ignored == ("lm_head.weight",)
    assert "lm_head.weight" not in target.tensors


def test_layer_types_follow_from_the_interval(tmp_path: Path) -> None:
    target = open_target(hf_target(tmp_path / "hf", layer_types=None))
    assert target.config.layer_types == ("gdn", "gdn", "gdn", "attention")


def test_yarn_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 1024}
    target = open_target(hf_target(tmp_path / "hf", rope_parameters=rope | {"attention_factor": 1.5}))
    assert target.config.rope_scaling == RopeScaling(4.0, 1024, attention_factor=1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; this is not supported"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must have 4 entries, found 3"),
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "layer_types holds 'mamba'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope_type is 'longrope'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "architecture 'Qwen3_5MoeForCausalLM' is not supported as a target"),
    ],
)
def test_target_configurations_that_cannot_work_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        open_target(hf_target(tmp_path / "hf", **changes))


def test_unknown_tensors_and_types_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(LoadError, match=rf"tensor {name} \[8\] is unexpected"):
        open_target(hf_target(tmp_path / "a", target_tensors() | {name: torch.zeros(8)}))
    tensors = target_tensors() | {"model.norm.weight": torch.zeros(H, dtype=torch.int64)}
    with pytest.raises(LoadError, match=r"tensor model\.norm\.weight has type I64"):
        open_target(hf_target(tmp_path / "b", tensors))


# Damaged directories


def test_damaged_directories_are_named(tmp_path: Path) -> None:
    path = hf_target(tmp_path / "hf", shards=2)
    index = path / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": listing["weight_map"] | {"absent": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(LoadError, match=r"00001-of-00002\.safetensors: tensor absent is missing"):
        open_target(path)
    index.write_text(json.dumps({"weight_map": {"a": "../secrets.safetensors"}}))
    with pytest.raises(LoadError, match="files outside its directory"):
        open_target(path)
    index.write_text(json.dumps(listing))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"00002-of-00002\.safetensors: no such file"):
        open_target(path)
    (path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config\.json: not readable as JSON"):
        open_target(path)


def test_a_shard_cut_anywhere_is_a_load_error(tmp_path: Path) -> None:
    path = hf_target(tmp_path / "hf")
    file = path / "model.safetensors"
    data = file.read_bytes()
    for size in [0, 4, 8, 100, 5000, len(data) // 2]:
        file.write_bytes(data[:size])
        with pytest.raises(LoadError, match=r"model\.safetensors: "):
            open_target(path)
    file.write_bytes(data[:-1])
    with pytest.raises(
        LoadError, match=rf"truncated: the tensors end at byte {len(data):,}, the file has {len(data) - 1:,}"
    ):
        open_target(path)


# Drafters


@pytest.mark.parametrize(("prefix", "codebook_suffix"), [("", ""), ("model.", ".weight")])
def test_drafter_equals_its_gguf_form(tmp_path: Path, prefix: str, codebook_suffix: str) -> None:
    hf = open_drafter(hf_drafter(tmp_path / "hf", drafter_tensors(prefix, codebook_suffix)))
    plain = open_drafter(write_gguf(tmp_path / "d.gguf", "dflash", drafter_metadata(), random_tensors(drafter_shapes())))
    assert geometry(hf.config) == geometry(plain.config)
    assert_same(hf, plain)


@pytest.mark.parametrize(
    ("changes", "window", "sliding", "causal", "source"),
    [
        ({}, 64, (True, False), (True, False), "metadata"),
        ({"is_causal": False}, 64, (True, False), (False, False), "metadata"),
        ({"dflash": {"causal": True}}, 64, (True, False), (True, True), "metadata"),
        ({"is_causal": False, "dflash": {"causal": True}}, 64, (True, False), (False, False), "metadata"),
        # The window is switched off, but the layers stay causal.
        ({"use_sliding_window": False}, None, (False, False), (True, False), "metadata"),
        ({"sliding_window": None}, None, (False, False), (True, False), "metadata"),
        ({"layer_types": None}, None, (False, False), (False, False), "inferred"),
        (
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": 1},
            64,
            (False, True),
            (False, True),
            "metadata",
        ),
    ],
)
def test_attention_pattern(
    tmp_path: Path, changes: dict[str, Any], window: int | None, sliding: Any, causal: Any, source: str
) -> None:
    config = open_drafter(hf_drafter(tmp_path / "hf", **changes)).config
    assert (config.sliding_window, config.sliding, config.causal) == (window, sliding, causal)
    assert config.pattern_source == source


def test_target_layers_are_spread_when_the_file_does_not_say(tmp_path: Path) -> None:
    config = open_drafter(hf_drafter(tmp_path / "hf", num_target_layers=8, dflash={"target_layer_ids": None})).config
    assert config.target_layer_ids == (1, 5)


def test_an_embedding_that_is_not_to_be_used_is_dropped(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"embed_tokens.weight": torch.zeros(VOCAB, H)}
    assert open_drafter(hf_drafter(tmp_path / "a", tensors)).config.own_embedding_rows == VOCAB
    drafter = open_drafter(hf_drafter(tmp_path / "b", tensors, has_embed_tokens=False))
    assert (drafter.config.own_embedding_rows, drafter.ignored) == (0, ("embed_tokens.weight",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_is_neox_style": False}, "rope_is_neox_style is False"),
        ({"dflash": {"attention_value_scale": 0.7}}, r"attention_value_scale is 0\.7"),
        ({"dflash": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
        ({"dflash": {"markov_rank": 256}}, "a DSpark drafter"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark drafter"),
        ({"dspark_config": {"markov_rank": 256}}, "a DSpark drafter"),
        ({"transformer_layer_config": {}}, "transformer_layer_config"),
        ({"dflash": {"mask_token_id": None}}, "mask_token_id is missing"),
        ({"dflash": {"selector_top_k": None}}, "both or neither"),
    ],
)
def test_drafter_configurations_that_cannot_work_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        open_drafter(hf_drafter(tmp_path / "hf", **changes))


def test_a_separate_mask_embedding_is_refused(tmp_path: Path) -> None:
    path = hf_drafter(tmp_path / "hf")
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(LoadError, match=r"mask_embedding\.pt"):
        open_drafter(path)


def test_a_directory_is_described_as_what_it_is_started_with(tmp_path: Path) -> None:
    path = hf_target(tmp_path / "hf", shards=2)
    described = describe(path)
    assert (described.path, len(described.paths)) == (path, 2)
