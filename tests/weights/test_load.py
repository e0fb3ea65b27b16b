"""Opening, filling and pairing GGUF checkpoints; Hugging Face directories are in ``test_safetensors``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    LAYERS,
    VOCAB,
    H,
    attention_shapes,
    changed,
    drafter_metadata,
    drafter_shapes,
    lucebox_metadata,
    module_for,
    random_tensors,
    target_metadata,
    target_shapes,
    tiny_drafter,
    tiny_target,
    write_gguf,
)
from torch import nn

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, RopeScaling
from paceline.errors import LoadError
from paceline.models.dflash import DFlash
from paceline.models.qwen35 import Qwen35
from paceline.ops.quant import BLOCKS, dequantize
from paceline.weights.files import sha256
from paceline.weights.load import Checkpoint, check_pair, fill, open_drafter, open_target

VECTOR = (np.ones(H, np.float32), "F32")


def test_demo_pair_fills_the_models() -> None:
    target, drafter = open_target(DEMO_TARGET), open_drafter(DEMO_DRAFTER)
    check_pair(target, drafter)
    with torch.device("meta"):
        pairs: list[tuple[nn.Module, Checkpoint[Any]]] = [
            (Qwen35(target.config, torch.float32), target),
            (DFlash(drafter.config, torch.float32), drafter),
        ]
    for model, checkpoint in pairs:
        fill(model, checkpoint)
        assert checkpoint.ignored == ()
        parameters = dict(model.named_parameters())
        assert set(parameters) == set(checkpoint.tensors)
        for name, parameter in parameters.items():
            assert torch.equal(parameter, dequantize(checkpoint.tensors[name], parameter.dtype))


def test_target_geometry(tmp_path: Path) -> None:
    config = open_target(tiny_target(tmp_path / "t.gguf")).config
    assert config.layer_types == ("gdn", "gdn", "gdn", "attention")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, H, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (2, 1, 128, 32)
    assert (config.gdn_key_heads, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim) == (2, 2, 128, 128)
    assert (config.head_layout, config.tie_embeddings, config.rope_scaling) == ("tiled", False, None)
    assert config.rms_eps == pytest.approx(1e-6)


def test_tied_target_has_no_head(tmp_path: Path) -> None:
    target = open_target(tiny_target(tmp_path / "t.gguf", tensors=random_tensors(target_shapes(tied=True))))
    assert target.config.tie_embeddings
    assert "lm_head.weight" not in target.tensors


def test_layer_types_come_from_the_list_where_there_is_one(tmp_path: Path) -> None:
    flags = {"qwen35.attention.recurrent_layers": [False, True, True, False, False], "qwen35.full_attention_interval": None}
    path = tiny_target(tmp_path / "t.gguf", **flags)
    assert open_target(path).config.layer_types == ("attention", "gdn", "gdn", "attention")
    with pytest.raises(LoadError, match=r"recurrent_layers has 2 entries for 4 layers"):
        open_target(tiny_target(tmp_path / "u.gguf", **{"qwen35.attention.recurrent_layers": [True, False]}))


def test_yarn_scaling_is_read(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    path = tiny_target(tmp_path / "t.gguf", **{f"qwen35.rope.scaling.{key}": value for key, value in keys.items()})
    assert open_target(path).config.rope_scaling == RopeScaling(4.0, 1024)


def test_mtp_blocks_are_skipped_and_listed(tmp_path: Path) -> None:
    extra = attention_shapes(f"blk.{LAYERS}", 512) | {f"blk.{LAYERS}.nextn.eh_proj.weight": (H, 2 * H)}
    keys = {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    path = tiny_target(tmp_path / "t.gguf", tensors=random_tensors(target_shapes() | extra), **keys)
    target = open_target(path)
    assert set(target.ignored) == set(extra)
    assert target.config.num_layers == LAYERS
    fill(module_for(target), target)


def test_a_file_of_mtp_blocks_alone_is_refused(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in target_shapes().items() if not name.startswith("blk.")}
    shapes |= attention_shapes(f"blk.{LAYERS}", 512)
    keys = {"qwen35.block_count": LAYERS + 1, "qwen35.nextn_predict_layers": 1}
    with pytest.raises(LoadError, match="holds no layers of the target itself"):
        open_target(tiny_target(tmp_path / "t.gguf", tensors=random_tensors(shapes), **keys))


@pytest.mark.parametrize("qtype", BLOCKS)
def test_every_tensor_type_loads(tmp_path: Path, qtype: str) -> None:
    tensors = random_tensors(target_shapes(), lambda name: qtype)
    target = open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))
    assert target.tensors["layers.3.self_attn.q_proj.weight"].qtype == qtype
    module = module_for(target, torch.bfloat16)
    fill(module, target)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, dequantize(target.tensors[name]).bfloat16())


def test_types_may_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    kinds = list(BLOCKS)
    tensors = random_tensors(target_shapes(), lambda name: kinds[sum(name.encode()) % len(kinds)])
    target = open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))
    assert len({tensor.qtype for tensor in target.tensors.values()}) > 8
    fill(module_for(target), target)


def test_a_tensor_type_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(target_shapes())
    tensors["blk.1.ffn_up.weight"] = (np.zeros((512, 66), np.uint8), "IQ2_XXS")
    with pytest.raises(LoadError, match=r"tensor blk\.1\.ffn_up\.weight has type IQ2_XXS"):
        open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"qwen35.block_count": None}, r"qwen35\.block_count is missing"),
        ({"qwen35.rope.freq_base": None}, r"qwen35\.rope\.freq_base is missing"),
        ({"qwen35.embedding_length": "wide"}, r"embedding_length must be an integer of at least 1, found 'wide'"),
        ({"qwen35.nextn_predict_layers": 4}, "no layers are left"),
        ({"qwen35.attention.value_length": 64}, r"value_length is 64; only 128 is supported"),
        ({"qwen35.attention.head_count": 3, "qwen35.attention.head_count_kv": 2}, r"heads \(3\) .* heads \(2\)"),
        ({"qwen35.ssm.inner_size": 255}, r"ssm\.inner_size \(255\) must be a multiple of ssm\.time_step_rank \(2\)"),
        ({"qwen35.rope.dimension_count": 130}, "130 rotary dimensions do not fit heads of 128"),
        ({"qwen35.rope.scaling.type": "linear"}, r"rope\.scaling\.type is 'linear'"),
    ],
)
def test_target_metadata_that_cannot_work_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        open_target(tiny_target(tmp_path / "t.gguf", **overrides))
    assert "t.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.0.ffn_gate_exps.weight", "a mixture of experts"),
        ("blk.0.ffn_up.scale", "scaled weights"),
        ("blk.3.attn_sinks", "attention sinks"),
        ("blk.0.attn_q.bias", r"\[256\] is unexpected"),
    ],
)
def test_target_tensors_without_a_place_are_named(tmp_path: Path, name: str, message: str) -> None:
    tensors = random_tensors(target_shapes()) | {name: VECTOR}
    with pytest.raises(LoadError, match=rf"tensor {name} .*{message}"):
        open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next", "llama"])
def test_other_architectures_are_named(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "t.gguf", arch, {}, {"token_embd.weight": VECTOR})
    with pytest.raises(LoadError, match=f"architecture '{arch}' is not supported as a target; supported: qwen35"):
        open_target(path)
    with pytest.raises(LoadError, match=f"architecture '{arch}' is not supported as a drafter; supported: dflash"):
        open_drafter(path)


def test_roles_are_not_mixed_up() -> None:
    with pytest.raises(LoadError, match=r"a drafter \(dflash\), not a target"):
        open_target(DEMO_DRAFTER)
    with pytest.raises(LoadError, match=r"a target \(qwen35\), not a drafter"):
        open_drafter(DEMO_TARGET)


def test_a_directory_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen35", target_metadata(), random_tensors(target_shapes()), split_tensors=20)
    assert open_target(tmp_path).path.name == "m-00001-of-00003.gguf"
    tiny_target(tmp_path / "other.gguf")
    with pytest.raises(LoadError, match=r"GGUF models: m-00001-of-00003\.gguf, other\.gguf"):
        open_target(tmp_path)


# Filling


def test_fill_refuses_what_does_not_match(tmp_path: Path) -> None:
    target = open_target(tiny_target(tmp_path / "t.gguf"))
    shape = r"tensor blk\.0\.attn_norm\.weight has shape \[256\], the model's layers\.0\.input_layernorm\.weight has \[8\]"
    with pytest.raises(LoadError, match=rf"t\.gguf: {shape}"):
        fill(module_for(target, layers__0__input_layernorm__weight=(8,)), target)
    with pytest.raises(LoadError, match=r"no tensor for parameter extra\.weight \[3\]"):
        fill(module_for(target, extra__weight=(3,)), target)
    with pytest.raises(LoadError, match=r"no place for 1 tensors, first output_norm\.weight \[256\]"):
        fill(module_for(target, norm__weight=()), target)


# Drafters


def test_drafter_geometry(tmp_path: Path) -> None:
    config = open_drafter(tiny_drafter(tmp_path / "d.gguf")).config
    assert config.kind == "DFlash2"
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (8, (1, 2), VOCAB - 1)
    assert (config.conv_kernel, config.conv_group, config.selector_rank, config.selector_top_k) == (2, 16, 32, 16)
    assert (config.selector_vocab, config.own_embedding_rows, config.own_head_rows) == (VOCAB, 0, 0)


def test_dflash_without_selector(tmp_path: Path) -> None:
    tensors = random_tensors(drafter_shapes(selector=False))
    metadata = changed(drafter_metadata(selector=False), {"dflash.block_size": None})
    drafter = open_drafter(write_gguf(tmp_path / "d.gguf", "dflash", metadata, tensors))
    assert (drafter.config.kind, drafter.config.block_size) == ("DFlash", 16)
    fill(module_for(drafter), drafter)


WINDOW, PATTERN, CAUSAL = (f"dflash.attention.{key}" for key in ("sliding_window", "sliding_window_pattern", "causal"))


@pytest.mark.parametrize(
    ("overrides", "window", "sliding", "causal", "source"),
    [
        ({}, 64, (True, False), (True, False), "metadata"),
        ({CAUSAL: False}, 64, (True, False), (False, False), "metadata"),
        ({CAUSAL: True}, 64, (True, False), (True, True), "metadata"),
        ({PATTERN: [True, True]}, 64, (True, True), (True, True), "metadata"),
        ({PATTERN: [False, False]}, None, (False, False), (False, False), "metadata"),
        ({WINDOW: None}, None, (False, False), (False, False), "metadata"),
        ({WINDOW: 0}, None, (False, False), (False, False), "metadata"),
        ({PATTERN: None}, 64, (True, False), (True, False), "inferred"),
        ({PATTERN: None, WINDOW: None}, None, (False, False), (False, False), "inferred"),
    ],
)
def test_attention_pattern(
    tmp_path: Path, overrides: dict[str, Any], window: int | None, sliding: Any, causal: Any, source: str
) -> None:
    config = open_drafter(tiny_drafter(tmp_path / "d.gguf", **overrides)).config
    assert (config.sliding_window, config.sliding, config.causal) == (window, sliding, causal)
    assert config.pattern_source == source


@pytest.mark.parametrize("pattern", [[True], [True, False, True], 2])
def test_a_pattern_of_another_length_is_refused(tmp_path: Path, pattern: Any) -> None:
    with pytest.raises(LoadError, match=r"sliding_window_pattern must (have 2 entries|be a list), found"):
        open_drafter(tiny_drafter(tmp_path / "d.gguf", **{PATTERN: pattern}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dflash.selector_rank": None}, "selector_rank is 0 and selector_top_k is 16; both or neither"),
        ({"dflash.selector_rank": None, "dflash.selector_top_k": None}, "selector_rank is 0, but the file has the"),
        ({"dflash.conv_group_size": None}, "conv_kernel is 2 and conv_group is 0; both or neither"),
        ({"dflash.conv_group_size": 48}, r"hidden size \(256\) must be a multiple of conv_group \(48\)"),
        ({"dflash.target_layers": None}, r"dflash\.target_layers is missing"),
        ({"dflash.target_layers": [1, 2, 3]}, "fc.weight has 512 columns, but 3 target layers of 256 make 768"),
        ({"dflash.block_size": 1}, "block_size is 1; a block has at least 2 rows"),
        ({"tokenizer.ggml.mask_token_id": None}, r"tokenizer\.ggml\.mask_token_id is missing"),
        ({"dflash.hyper_connection.count": 4}, "hyper-connections"),
        ({"dflash.hidden_activation": "gelu"}, "hidden_activation is 'gelu'; only 'silu' is supported"),
        ({"dflash.attention.value_scale": 0.5}, r"value_scale is 0\.5"),
        ({"dflash.attention.scale": 0.5}, r"attention\.scale is 0\.5; only 1/sqrt\(128\)"),
        ({"dflash.rope.dimension_count": 64}, "dimension_count is 64; only 128 is supported"),
    ],
)
def test_drafter_metadata_that_cannot_work_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        open_drafter(tiny_drafter(tmp_path / "d.gguf", **overrides))
    assert "d.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("markov_w1.weight", "a DSpark head"),
        ("dflash.dspark.markov.w1", "a DSpark head"),
        ("d2t", "a reduced draft vocabulary"),
        ("hc_head.weight", "hyper-connections"),
        ("blk.0.attn_sinks", "attention sinks"),
        ("blk.0.post_attention_norm.weight", "sandwich norms"),
        ("blk.0.post_ffw_norm.weight", "sandwich norms"),
        ("blk.0.layer_output_scale.weight", "a scale on each layer's output"),
        ("rope_freqs.weight", "RoPE frequency factors"),
        ("blk.0.attn_gate.weight", "a gate on the drafter's attention output"),
        ("dflash.aux_hidden_norm.0.weight", "a norm on each tapped layer"),
    ],
)
def test_drafter_features_that_are_not_supported_are_named(tmp_path: Path, name: str, feature: str) -> None:
    tensors = random_tensors(drafter_shapes()) | {name: VECTOR}
    with pytest.raises(LoadError, match=rf"d\.gguf: tensor {name} belongs to {feature}, which is not supported"):
        open_drafter(tiny_drafter(tmp_path / "d.gguf", tensors=tensors))


def test_shared_keys_and_values_are_refused(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in drafter_shapes().items() if "attn_v" not in name}
    with pytest.raises(LoadError, match="share keys and values"):
        open_drafter(tiny_drafter(tmp_path / "d.gguf", tensors=random_tensors(shapes)))


def test_own_embedding_serves_as_head_too(tmp_path: Path) -> None:
    tensors = random_tensors(drafter_shapes() | {"token_embd.weight": (VOCAB, H)})
    drafter = open_drafter(tiny_drafter(tmp_path / "d.gguf", tensors=tensors))
    assert (drafter.config.own_embedding_rows, drafter.config.own_head_rows) == (VOCAB, VOCAB)
    assert drafter.tensors["lm_head.weight"] is drafter.tensors["embed_tokens.weight"]


# The older dialect


def lucebox_tensors(fc: str, hidden_norm: str, mlp_norm: str) -> dict[str, Any]:
    rename = {"fc.weight": fc, "enc.output_norm.weight": hidden_norm}
    shapes = drafter_shapes(selector=False)
    return random_tensors({rename.get(n, n.replace(".ffn_norm.", f".{mlp_norm}.")): s for n, s in shapes.items()})


@pytest.mark.parametrize("arch", ["dflash-draft", "qwen35-dflash-draft"])
@pytest.mark.parametrize(
    "spelling",
    [
        ("dflash.fc.weight", "dflash.hidden_norm.weight", "ffn_norm"),
        ("dflash_fc.weight", "dflash_hidden_norm.weight", "post_attention_norm"),
    ],
)
def test_lucebox_dialect(tmp_path: Path, arch: str, spelling: tuple[str, str, str]) -> None:
    tensors = lucebox_tensors(*spelling) | {"dflash.domino.start": VECTOR}
    drafter = open_drafter(write_gguf(tmp_path / "d.gguf", arch, lucebox_metadata(arch=arch), tensors))
    plain = open_drafter(
        write_gguf(
            tmp_path / "p.gguf", "dflash", drafter_metadata(selector=False), random_tensors(drafter_shapes(selector=False))
        )
    )
    assert drafter.ignored == ("dflash.domino.start",)
    assert set(drafter.tensors) == set(plain.tensors)
    config = drafter.config
    # Layer ids count from 0 here, and sizes follow from the tensors.
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ((1, 2), 16, VOCAB - 1)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (2, 1, 128, 512)
    assert (config.sliding, config.pattern_source) == ((False, False), "inferred")
    fill(module_for(drafter), drafter)


def test_lucebox_blanket_causal_key_is_not_believed(tmp_path: Path) -> None:
    extra = {"sliding_window": 64, "sliding_window_pattern": [True, False], "causal": False}
    metadata = lucebox_metadata() | {f"dflash-draft.attention.{key}": value for key, value in extra.items()}
    tensors = lucebox_tensors("dflash.fc.weight", "dflash.hidden_norm.weight", "ffn_norm")
    config = open_drafter(write_gguf(tmp_path / "d.gguf", "dflash-draft", metadata, tensors)).config
    assert (config.sliding, config.causal) == ((True, False), (True, False))


def test_lucebox_dspark_is_refused(tmp_path: Path) -> None:
    metadata = lucebox_metadata() | {"dflash-draft.dflash.dspark.enabled": 1}
    tensors = lucebox_tensors("dflash.fc.weight", "dflash.hidden_norm.weight", "ffn_norm")
    with pytest.raises(LoadError, match="DSpark"):
        open_drafter(write_gguf(tmp_path / "d.gguf", "dflash-draft", metadata, tensors))


# Pairs


def wide_drafter(path: Path) -> Path:
    """A drafter for a target of another width."""
    tensors = random_tensors({name: tuple(2 * n if n == H else n for n in s) for name, s in drafter_shapes().items()})
    tensors["fc.weight"] = random_tensors({"fc.weight": (2 * H, 4 * H)})["fc.weight"]
    return tiny_drafter(path, tensors=tensors, **{"dflash.embedding_length": 2 * H})


@pytest.mark.parametrize(
    ("make", "theirs", "ours"),
    [
        (lambda p: wide_drafter(p), "hidden size 512", "hidden size 256"),
        (lambda p: small_codebooks(p), "selector rows 64", "vocabulary 320"),
        (
            lambda p: tiny_drafter(p, **{"tokenizer.ggml.mask_token_id": VOCAB}),
            "mask token id 320",
            "vocabulary 320",
        ),
        (
            lambda p: tiny_drafter(p, **{"dflash.target_layers": [1, 5]}),
            r"target layer 4 \(counted from 0\)",
            "4 layers",
        ),
        (
            lambda p: tiny_drafter(p, **{"dflash.target_layers": [0, 1]}),
            r"target layer -1 \(counted from 0\)",
            "4 layers",
        ),
        (lambda p: own_embedding(p), "embedding rows 64", "vocabulary 320"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], theirs: str, ours: str
) -> None:
    target, drafter = open_target(tiny_target(tmp_path / "t.gguf")), open_drafter(make(tmp_path / "d.gguf"))
    with pytest.raises(LoadError, match=rf"d\.gguf has {theirs}, \S+t\.gguf has {ours}"):
        check_pair(target, drafter)


def small_codebooks(path: Path) -> Path:
    shapes = {name: (64, 32) if "cessor" in name else shape for name, shape in drafter_shapes().items()}
    return tiny_drafter(path, tensors=random_tensors(shapes))


def own_embedding(path: Path) -> Path:
    return tiny_drafter(path, tensors=random_tensors(drafter_shapes() | {"token_embd.weight": (64, H)}))


def test_codebooks_are_checked_against_the_head_too(tmp_path: Path) -> None:
    tensors = random_tensors(target_shapes() | {"output.weight": (VOCAB + 8, H)})
    target = open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))
    with pytest.raises(LoadError, match=r"selector rows 320, \S+ has head rows 328"):
        check_pair(target, open_drafter(tiny_drafter(tmp_path / "d.gguf")))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(target_shapes() | {"token_embd.weight": (VOCAB - 1, H)})
    target = open_target(tiny_target(tmp_path / "t.gguf", tensors=tensors))
    with pytest.raises(LoadError, match="320 tokens, but only 319 embedding rows"):
        target.tokenizer()


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc" * 1000)
    assert sha256(tmp_path / "f") == hashlib.sha256(b"abc" * 1000).hexdigest()
