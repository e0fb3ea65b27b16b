"""Model geometry from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from paceline.config import DrafterConfig, LayerType, RopeScaling, TargetConfig
from paceline.errors import LoadError
from paceline.ops.quant import QuantTensor
from paceline.weights.geometry import Keys, check_drafter, check_target, own_rows, rows, rows_or_zero
from paceline.weights.safetensors import HfDirectory

T = TypeVar("T")

TARGET_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
DRAFTER_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel")


def _text_keys(directory: HfDirectory) -> Keys:
    """The language model's part of the configuration: the multimodal wrapper nests it."""
    config = directory.metadata
    return Keys(directory.path / "config.json", config.get("text_config") or config)


def ties_embeddings(directory: HfDirectory) -> bool:
    """Whether the embedding is the head as well. The flag sits at either level; without it the tensors decide."""
    flags = [level.get("tie_word_embeddings") for level in (directory.metadata, _text_keys(directory).values)]
    declared = [flag for flag in flags if flag is not None]
    return any(declared) if declared else "lm_head.weight" not in directory.tensors


def target_config(directory: HfDirectory, vocab_size: int) -> TargetConfig:
    """Geometry of a Qwen3.5-family checkpoint whose embedding has ``vocab_size`` rows."""
    keys = _text_keys(directory)
    for level in (keys, Keys(keys.path, directory.metadata)):
        level.refuse_unless("quantization_config", ())
    keys.refuse_unless("hidden_act", ("silu",))
    keys.refuse_unless("attention_bias", (False,))
    keys.refuse_unless("attn_output_gate", (True,))
    rope = _rope(keys)
    head_dim = keys.count("head_dim", 256)
    return check_target(
        keys.path,
        TargetConfig(
            vocab_size=vocab_size,
            hidden_size=keys.count("hidden_size"),
            intermediate_size=keys.count("intermediate_size"),
            layer_types=_layer_types(keys),
            num_heads=keys.count("num_attention_heads"),
            num_kv_heads=keys.count("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.number("partial_rotary_factor", 0.25)),
            rope_theta=rope.number("rope_theta"),
            rms_eps=keys.number("rms_norm_eps"),
            context_length=keys.count("max_position_embeddings"),
            conv_kernel=keys.count("linear_conv_kernel_dim"),
            gdn_key_heads=keys.count("linear_num_key_heads"),
            gdn_value_heads=keys.count("linear_num_value_heads"),
            gdn_key_dim=keys.count("linear_key_head_dim"),
            gdn_value_dim=keys.count("linear_value_head_dim"),
            head_layout="grouped",
            tie_embeddings=ties_embeddings(directory),
            rope_scaling=_rope_scaling(rope),
        ),
    )


def _layer_types(keys: Keys) -> tuple[LayerType, ...]:
    layers = keys.count("num_hidden_layers")
    if keys.get("layer_types") is None:
        interval = keys.count("full_attention_interval", 4)
        return tuple("gdn" if (i + 1) % interval else "attention" for i in range(layers))
    known: dict[str, LayerType] = {"linear_attention": "gdn", "full_attention": "attention"}
    return tuple(_lookup(keys, "layer_types", known, layers))


def _rope(keys: Keys) -> Keys:
    """RoPE settings: an object of their own, or (before transformers 5) spread over the configuration."""
    legacy = {key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return Keys(keys.path, {**legacy, **(keys.get("rope_scaling") or {}), **(keys.get("rope_parameters") or {})})


def _rope_scaling(rope: Keys) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise LoadError(f"{rope.path}: rope_type is {kind!r}; only 'default' or 'yarn' is supported")
    for key in ("mscale", "mscale_all_dim"):
        rope.refuse_unless(key, ())
    rope.refuse_unless("truncate", (True,))
    attention_factor = rope.get("attention_factor")
    return RopeScaling(
        factor=rope.number("factor"),
        original_context_length=rope.count("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


def drafter_keys(directory: HfDirectory) -> Keys:
    """A drafter's settings; its own sit in ``dflash_config`` or at the top level, where the nested one wins."""
    config = directory.metadata
    return Keys(directory.path / "config.json", {**config, **(config.get("dflash_config") or {})})


def drafter_config(directory: HfDirectory, tensors: Mapping[str, QuantTensor]) -> DrafterConfig:
    """Geometry of a DFlash or DFlash2 checkpoint; ``tensors`` are by parameter name."""
    keys = drafter_keys(directory)
    _refuse_unsupported(directory, keys)
    rows(directory.path, tensors, "fc.weight")
    layers = keys.count("num_hidden_layers")
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    window, sliding, causal, source = _attention_pattern(keys, layers)
    rope = _rope(keys)
    rope.refuse_unless("partial_rotary_factor", (1,))
    own_embedding, own_head = own_rows(tensors)
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads"),
        head_dim=keys.count("head_dim", hidden // heads),
        rope_theta=rope.number("rope_theta"),
        rms_eps=keys.number("rms_norm_eps"),
        context_length=keys.count("max_position_embeddings"),
        block_size=keys.count("block_size", 16),
        target_layer_ids=_target_layer_ids(keys, layers),
        mask_token_id=keys.integer("mask_token_id"),
        sliding_window=window,
        sliding=sliding,
        causal=causal,
        conv_kernel=keys.integer("conv_kernel_size", 0),
        conv_group=keys.integer("conv_group_size", 0),
        selector_rank=keys.integer("selector_rank", 0),
        selector_top_k=keys.integer("selector_top_k", 0),
        selector_vocab=rows_or_zero(tensors, "candidate_selector.predecessor_codebook"),
        output_multiplier=keys.number("output_multiplier", 1.0),
        logit_softcap=keys.number("final_logit_softcapping", 0.0),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        own_embedding_rows=own_embedding,
        own_head_rows=own_head,
        rope_scaling=_rope_scaling(rope),
        pattern_source=source,
    )
    return check_drafter(directory.path, config, tensors)


def _refuse_unsupported(directory: HfDirectory, keys: Keys) -> None:
    if keys.get("markov_rank") or keys.get("dspark_config") or keys.get("projector_type") == "dspark":
        raise LoadError(f"{keys.path}: a DSpark drafter; supported: DFlash and DFlash2")
    mask_embedding = directory.path / "mask_embedding.pt"
    if mask_embedding.exists():
        raise LoadError(f"{mask_embedding}: a mask embedding of its own is not supported")
    accepted: dict[str, tuple[Any, ...]] = {
        "quantization_config": (),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_value_scale": (1,),
        "attention_sink_bias": (False,),
        # False: pairs of neighbours are rotated instead of halves.
        "rope_is_neox_style": (True,),
        "transformer_layer_config": (),
    }
    for key, values in accepted.items():
        keys.refuse_unless(key, values)


def _target_layer_ids(keys: Keys, layers: int) -> tuple[int, ...]:
    if keys.get("target_layer_ids") is not None:
        return keys.integers("target_layer_ids")
    depth = keys.count("num_target_layers")
    if layers == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))


def _attention_pattern(
    keys: Keys, layers: int
) -> tuple[int | None, tuple[bool, ...], tuple[bool, ...], Literal["metadata", "inferred"]]:
    """Window, sliding flags, causal flags and where they come from.

    A layer *named* sliding is causal unless the file says otherwise, also when the window itself is switched off.
    """
    window = keys.integer("sliding_window", 0) if keys.get("use_sliding_window", True) else 0
    source: Literal["metadata", "inferred"] = "metadata"
    if keys.get("layer_types") is not None:
        kinds = {"full_attention": False, "sliding_attention": True}
        named_sliding = tuple(_lookup(keys, "layer_types", kinds, layers))
    else:
        first = keys.integer("max_window_layers", layers) if keys.get("use_sliding_window") else layers
        named_sliding = tuple(i >= first for i in range(layers))
        source = "metadata" if any(named_sliding) else "inferred"
    sliding = tuple(flag and window > 0 for flag in named_sliding)
    explicit = keys.get("is_causal", keys.get("causal"))
    causal = named_sliding if explicit is None else (bool(explicit),) * layers
    return (window if any(sliding) else None), sliding, causal, source


def _lookup(keys: Keys, key: str, known: dict[str, T], length: int) -> list[T]:
    """The meaning of each entry of a list of names."""
    names = keys.items(key, length)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise LoadError(f"{keys.path}: {key} holds {unknown!r}; known: {', '.join(known)}")
    return [known[name] for name in names]
