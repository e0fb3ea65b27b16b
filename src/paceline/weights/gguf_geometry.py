"""Model geometry from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.config import DrafterConfig, LayerType, RopeScaling, TargetConfig
from paceline.errors import LoadError
from paceline.ops.quant import QuantTensor
from paceline.weights.geometry import Keys, check_drafter, check_target, divide, infer_sliding, own_rows, rows, rows_or_zero
from paceline.weights.gguf import GgufFile

TARGET_ARCHITECTURES = ("qwen35",)
DRAFTER_ARCHITECTURES = ("dflash",)
LUCEBOX_ARCHITECTURES = ("qwen35-dflash-draft", "dflash-draft")
"""An older dialect of DFlash drafters: other key names, and ``target_layer_ids`` counted from 0."""


def target_layers(file: GgufFile) -> int:
    """Layers of the trunk: the blocks that follow are for multi-token prediction."""
    keys = Keys(file.path, file.metadata, "qwen35.")
    blocks, extra = keys.count("block_count"), keys.integer("nextn_predict_layers", 0)
    if extra >= blocks:
        raise LoadError(f"{file.path}: nextn_predict_layers is {extra} and block_count {blocks}: no layers are left")
    return blocks - extra


def target_config(file: GgufFile, tensors: Mapping[str, QuantTensor]) -> TargetConfig:
    """Geometry of a ``qwen35`` file; ``tensors`` are by parameter name."""
    keys = Keys(file.path, file.metadata, "qwen35.")
    if "layers.0.input_layernorm.weight" not in tensors:
        raise LoadError(f"{file.path}: blk.0.attn_norm.weight is missing: the file holds no layers of the target itself")
    head_dim, value_heads = keys.count("attention.key_length"), keys.count("ssm.time_step_rank")
    keys.refuse_unless("attention.value_length", (head_dim,))
    inner = keys.count("ssm.inner_size")
    return check_target(
        file.path,
        TargetConfig(
            vocab_size=rows(file.path, tensors, "embed_tokens.weight"),
            hidden_size=keys.count("embedding_length"),
            intermediate_size=keys.count("feed_forward_length"),
            layer_types=_layer_types(keys, target_layers(file)),
            num_heads=keys.count("attention.head_count"),
            num_kv_heads=keys.count("attention.head_count_kv"),
            head_dim=head_dim,
            rotary_dim=keys.count("rope.dimension_count"),
            rope_theta=keys.number("rope.freq_base"),
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            context_length=keys.count("context_length"),
            conv_kernel=keys.count("ssm.conv_kernel"),
            gdn_key_heads=keys.count("ssm.group_count"),
            gdn_value_heads=value_heads,
            gdn_key_dim=keys.count("ssm.state_size"),
            gdn_value_dim=divide(file.path, "ssm.inner_size", inner, "ssm.time_step_rank", value_heads),
            head_layout="tiled",
            tie_embeddings="lm_head.weight" not in tensors,
            rope_scaling=_rope_scaling(keys),
        ),
    )


def _layer_types(keys: Keys, layers: int) -> tuple[LayerType, ...]:
    if keys.get("attention.recurrent_layers") is None:
        interval = keys.count("full_attention_interval")
        return tuple("gdn" if (i + 1) % interval else "attention" for i in range(layers))
    # One entry per block, those for multi-token prediction included.
    recurrent = keys.items("attention.recurrent_layers")
    if len(recurrent) < layers:
        raise LoadError(f"{keys.path}: attention.recurrent_layers has {len(recurrent)} entries for {layers} layers")
    return tuple("gdn" if flag else "attention" for flag in recurrent[:layers])


def _rope_scaling(keys: Keys) -> RopeScaling | None:
    keys.refuse_unless("rope.scaling.type", ("none", "yarn"))
    if keys.get("rope.scaling.type", "none") == "none":
        return None
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.refuse_unless(f"rope.scaling.{key}", (1.0,))
    return RopeScaling(
        factor=keys.number("rope.scaling.factor"),
        original_context_length=keys.count("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def drafter_config(file: GgufFile, tensors: Mapping[str, QuantTensor]) -> DrafterConfig:
    """Geometry of a DFlash or DFlash2 file, in llama.cpp's dialect or in lucebox's; ``tensors`` are by parameter name."""
    lucebox = file.architecture in LUCEBOX_ARCHITECTURES
    keys = Keys(file.path, file.metadata, f"{file.architecture}.")
    _refuse_unsupported(keys)
    layers = keys.count("block_count")
    window, sliding, source = _sliding(keys, layers)
    causal = keys.get("attention.causal")
    # lucebox's converter writes a blanket False beside layers that its runtime treats as causal.
    per_layer = causal is None or (lucebox and not causal)
    own_embedding, own_head = own_rows(tensors)
    config = DrafterConfig(
        **_sizes(file, keys, tensors),
        num_layers=layers,
        rope_theta=keys.number("rope.freq_base"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6 if lucebox else None),
        context_length=keys.count("context_length", _FAMILY_CONTEXT if lucebox else None),
        block_size=keys.count("dflash.block_size" if lucebox else "block_size", 16),
        # llama.cpp's dialect counts the layer whose input is tapped.
        target_layer_ids=keys.integers("dflash.target_layer_ids")
        if lucebox
        else tuple(i - 1 for i in keys.integers("target_layers")),
        mask_token_id=_mask_id(file, keys),
        sliding_window=window,
        sliding=sliding,
        causal=sliding if per_layer else (bool(causal),) * layers,
        conv_kernel=keys.integer("conv_kernel_size", 0),
        conv_group=keys.integer("conv_group_size", 0),
        selector_rank=keys.integer("selector_rank", 0),
        selector_top_k=keys.integer("selector_top_k", 0),
        selector_vocab=rows_or_zero(tensors, "candidate_selector.predecessor_codebook"),
        output_multiplier=keys.number("logit_scale", 1.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        embedding_scale=keys.number("embedding_scale", 1.0),
        own_embedding_rows=own_embedding,
        own_head_rows=own_head,
        rope_scaling=_rope_scaling(keys),
        pattern_source=source,
    )
    return check_drafter(file.path, config, tensors)


_FAMILY_CONTEXT = 262_144
"""Trained context of the published models, for files that do not state one."""


def _refuse_unsupported(keys: Keys) -> None:
    if keys.get("dflash.dspark.enabled"):
        raise LoadError(f"{keys.path}: a DSpark drafter; supported: DFlash and DFlash2")
    if keys.get("hyper_connection.count"):
        raise LoadError(f"{keys.path}: the drafter needs hyper-connections, which are not supported")
    keys.refuse_unless("hidden_activation", ("silu",))
    keys.refuse_unless("attention.value_scale", (1.0,))
    keys.refuse_unless("dflash.context_kv_layer_norm", (False,))


def _sizes(file: GgufFile, keys: Keys, tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Sizes from the metadata; what older files leave out follows from tensor shapes."""
    path, layer = file.path, "layers.0."
    head_dim = keys.count("attention.key_length", rows(path, tensors, f"{layer}self_attn.k_norm.weight"))
    keys.refuse_unless("attention.value_length", (head_dim,))
    keys.refuse_unless("rope.dimension_count", (head_dim,))
    scale = keys.number("attention.scale", head_dim**-0.5)
    if abs(scale * head_dim**0.5 - 1) > 1e-5:
        raise LoadError(f"{path}: attention.scale is {scale:g}; only 1/sqrt({head_dim}) is supported")
    return {
        "hidden_size": keys.count("embedding_length", rows(path, tensors, "fc.weight")),
        "intermediate_size": keys.count("feed_forward_length", rows(path, tensors, f"{layer}mlp.gate_proj.weight")),
        "num_heads": keys.count("attention.head_count", rows(path, tensors, f"{layer}self_attn.q_proj.weight") // head_dim),
        "num_kv_heads": keys.count(
            "attention.head_count_kv", rows(path, tensors, f"{layer}self_attn.k_proj.weight") // head_dim
        ),
        "head_dim": head_dim,
    }


def _sliding(keys: Keys, layers: int) -> tuple[int | None, tuple[bool, ...], Literal["metadata", "inferred"]]:
    window = keys.integer("attention.sliding_window", 0)
    if keys.get("attention.sliding_window_pattern") is None:
        return window or None, infer_sliding(layers) if window else (False,) * layers, "inferred"
    pattern = keys.items("attention.sliding_window_pattern", layers)
    sliding = tuple(bool(flag) and window > 0 for flag in pattern)
    return (window if any(sliding) else None), sliding, "metadata"


def _mask_id(file: GgufFile, keys: Keys) -> int:
    if keys.get("dflash.mask_token_id") is not None:
        return keys.integer("dflash.mask_token_id")
    return Keys(file.path, file.metadata).integer("tokenizer.ggml.mask_token_id")
