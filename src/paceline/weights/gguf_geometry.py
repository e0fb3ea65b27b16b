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
    blocks, extra = keys.count("block_count"), int(keys.get("nextn_predict_layers", 0))
    if not 0 <= extra < blocks:
        raise LoadError(f"{file.path}: nextn_predict_layers is {extra} and block_count {blocks}: no layers are left")
    return blocks - extra


def target_config(file: GgufFile) -> TargetConfig:
    """Geometry of a ``qwen35`` GGUF file."""
    keys = Keys(file.path, file.metadata, "qwen35.")
    layers = target_layers(file)
    if "blk.0.attn_norm.weight" not in file.tensors:
        raise LoadError(f"{file.path}: blk.0.attn_norm.weight is missing: the file holds no layers of the target itself")
    head_dim, value_heads = keys.count("attention.key_length"), keys.count("ssm.time_step_rank")
    keys.refuse_unless("attention.value_length", (head_dim,))
    inner = keys.count("ssm.inner_size")
    return check_target(
        file.path,
        TargetConfig(
            vocab_size=rows(file.path, file.tensors, "token_embd.weight"),
            hidden_size=keys.count("embedding_length"),
            intermediate_size=keys.count("feed_forward_length"),
            layer_types=_layer_types(keys, layers),
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
            tie_embeddings="output.weight" not in file.tensors,
            rope_scaling=_rope_scaling(keys),
        ),
    )


def _layer_types(keys: Keys, layers: int) -> tuple[LayerType, ...]:
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.count("full_attention_interval")
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    if len(recurrent) < layers:
        raise LoadError(f"{keys.path}: attention.recurrent_layers has {len(recurrent)} entries for {layers} layers")
    return tuple("gdn" if flag else "attention" for flag in recurrent[:layers])


def _rope_scaling(keys: Keys) -> RopeScaling | None:
    keys.refuse_unless("rope.scaling.type", ("none", "yarn"))
    if keys.get("rope.scaling.type", "none") == "none":
        return None
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        keys.refuse_unless(f"rope.scaling.{key}", (neutral,))
    return RopeScaling(
        factor=keys.number("rope.scaling.factor"),
        original_context_length=keys.count("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def drafter_config(file: GgufFile) -> DrafterConfig:
    """Geometry of a DFlash or DFlash2 GGUF file, in llama.cpp's dialect or in lucebox's."""
    lucebox = file.architecture in LUCEBOX_ARCHITECTURES
    keys = Keys(file.path, file.metadata, f"{file.architecture}.")
    _refuse_unsupported(keys)
    layers = keys.count("block_count")
    sizes = _drafter_sizes(file, keys)
    sliding_window, sliding, source = _sliding(keys, layers)
    causal = keys.get("attention.causal")
    # lucebox's converter writes a blanket False beside layers that its runtime treats as causal.
    per_layer = causal is None or (lucebox and not causal)
    targets = keys.require("dflash.target_layer_ids") if lucebox else [i - 1 for i in keys.require("target_layers")]
    own_embedding, own_head = own_rows(file.tensors, "token_embd.weight", "output.weight")
    config = DrafterConfig(
        **sizes,
        num_layers=layers,
        rope_theta=keys.number("rope.freq_base"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6 if lucebox else None),
        context_length=keys.count("context_length"),
        block_size=keys.count("dflash.block_size" if lucebox else "block_size", 16),
        target_layer_ids=tuple(int(i) for i in targets),
        mask_token_id=_mask_id(file, keys),
        sliding_window=sliding_window,
        sliding=sliding,
        causal=sliding if per_layer else (bool(causal),) * layers,
        conv_kernel=int(keys.get("conv_kernel_size", 0)),
        conv_group=int(keys.get("conv_group_size", 0)),
        selector_rank=int(keys.get("selector_rank", 0)),
        selector_top_k=int(keys.get("selector_top_k", 0)),
        selector_vocab=rows_or_zero(file.tensors, "selector_predecessor.weight"),
        output_multiplier=keys.number("logit_scale", 1.0),
        logit_softcap=float(keys.get("final_logit_softcapping", 0.0)),
        embedding_scale=keys.number("embedding_scale", 1.0),
        own_embedding_rows=own_embedding,
        own_head_rows=own_head,
        rope_scaling=_rope_scaling(keys),
        pattern_source=source,
    )
    return check_drafter(file.path, config, "selector_hidden.weight" in file.tensors, _fc_columns(file.tensors))


def _refuse_unsupported(keys: Keys) -> None:
    if keys.get("dflash.dspark.enabled"):
        raise LoadError(f"{keys.path}: a DSpark drafter; supported: DFlash and DFlash2")
    if keys.get("hyper_connection.count"):
        raise LoadError(f"{keys.path}: the drafter needs hyper-connections, which are not supported")
    keys.refuse_unless("hidden_activation", ("silu",))
    keys.refuse_unless("attention.value_scale", (1.0,))
    keys.refuse_unless("dflash.context_kv_layer_norm", (False,))


def _drafter_sizes(file: GgufFile, keys: Keys) -> dict[str, int]:
    """Sizes from the metadata; what older files leave out follows from tensor shapes."""
    tensors, path = file.tensors, file.path
    head_dim = keys.get("attention.key_length") or rows(path, tensors, "blk.0.attn_k_norm.weight")
    keys.refuse_unless("attention.value_length", (head_dim,))
    keys.refuse_unless("rope.dimension_count", (head_dim,))
    scale = keys.get("attention.scale")
    if scale is not None and abs(scale * head_dim**0.5 - 1) > 1e-5:
        raise LoadError(f"{path}: attention.scale is {scale:g}; only 1/sqrt({head_dim}) is supported")

    def heads(key: str, tensor: str) -> int:
        return int(keys.get(key) or divide(path, tensor, rows(path, tensors, tensor), "head size", head_dim))

    return {
        "hidden_size": keys.get("embedding_length") or rows(path, tensors, "blk.0.attn_norm.weight"),
        "intermediate_size": keys.get("feed_forward_length") or rows(path, tensors, "blk.0.ffn_gate.weight"),
        "num_heads": heads("attention.head_count", "blk.0.attn_q.weight"),
        "num_kv_heads": heads("attention.head_count_kv", "blk.0.attn_k.weight"),
        "head_dim": head_dim,
    }


def _sliding(keys: Keys, layers: int) -> tuple[int | None, tuple[bool, ...], Literal["metadata", "inferred"]]:
    window = int(keys.get("attention.sliding_window", 0))
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return (window or None, infer_sliding(layers) if window else (False,) * layers, "inferred")
    if not isinstance(pattern, list) or len(pattern) != layers:
        found = f"{len(pattern)} entries" if isinstance(pattern, list) else repr(pattern)
        raise LoadError(f"{keys.path}: attention.sliding_window_pattern must have {layers} entries, found {found}")
    sliding = tuple(bool(flag) and window > 0 for flag in pattern)
    return (window if any(sliding) else None, sliding, "metadata")


def _mask_id(file: GgufFile, keys: Keys) -> int:
    value = keys.get("dflash.mask_token_id", file.metadata.get("tokenizer.ggml.mask_token_id"))
    if value is None:
        raise LoadError(f"{file.path}: tokenizer.ggml.mask_token_id is missing")
    return int(value)


def _fc_columns(tensors: Mapping[str, QuantTensor]) -> int:
    names = ("fc.weight", "dflash.fc.weight", "dflash_fc.weight")
    return next((tensors[name].shape[-1] for name in names if name in tensors), 0)
