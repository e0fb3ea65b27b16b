"""Model geometry from a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import Any, Literal

from paceline.config import DrafterConfig, LayerType, RopeScaling, TargetConfig
from paceline.errors import LoadError
from paceline.weights.geometry import Keys, check_drafter, check_target, own_rows, rows, rows_or_zero
from paceline.weights.safetensors import HfDirectory

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
    keys.refuse_unless("quantization_config", ())
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
    found = keys.get("layer_types")
    if found is None:
        interval = keys.count("full_attention_interval", 4)
        return tuple("gdn" if (i + 1) % interval else "attention" for i in range(layers))
    known: dict[str, LayerType] = {"linear_attention": "gdn", "full_attention": "attention"}
    unknown = [name for name in found if name not in known]
    if unknown or len(found) != layers:
        problem = f"holds {unknown[0]!r}" if unknown else f"has {len(found)} entries for {layers} layers"
        raise LoadError(f"{keys.path}: layer_types {problem}")
    return tuple(known[name] for name in found)


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


def drafter_config(directory: HfDirectory) -> DrafterConfig:
    """Geometry of a DFlash or DFlash2 checkpoint. Its own settings sit in ``dflash_config`` or at the top level."""
    tensors = directory.tensors
    config = directory.metadata
    keys = Keys(directory.path / "config.json", {**config, **(config.get("dflash_config") or {})})
    _refuse_unsupported(directory, keys)
    layers = keys.count("num_hidden_layers")
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    window, sliding, causal, source = _attention_pattern(keys, layers)
    rope = _rope(keys)
    prefix = "" if "fc.weight" in tensors else "model."
    embedding = "" if keys.get("has_embed_tokens") is False else f"{prefix}embed_tokens.weight"
    own_embedding, own_head = own_rows(tensors, embedding, "lm_head.weight")
    codebook = f"{prefix}candidate_selector.predecessor_codebook"
    result = DrafterConfig(
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
        mask_token_id=int(keys.require("mask_token_id")),
        sliding_window=window,
        sliding=sliding,
        causal=causal,
        conv_kernel=int(keys.get("conv_kernel_size", 0)),
        conv_group=int(keys.get("conv_group_size", 0)),
        selector_rank=int(keys.get("selector_rank", 0)),
        selector_top_k=int(keys.get("selector_top_k", 0)),
        selector_vocab=rows_or_zero(tensors, codebook) or rows_or_zero(tensors, f"{codebook}.weight"),
        output_multiplier=keys.number("output_multiplier", 1.0),
        logit_softcap=float(keys.get("final_logit_softcapping", 0.0)),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        own_embedding_rows=own_embedding,
        own_head_rows=own_head,
        rope_scaling=_rope_scaling(rope),
        pattern_source=source,
    )
    rows(directory.path, tensors, f"{prefix}fc.weight")
    has_selector = f"{prefix}candidate_selector.hidden_projection.weight" in tensors
    return check_drafter(directory.path, result, has_selector, tensors[f"{prefix}fc.weight"].shape[-1])


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
        "attention_value_scale": (1, 1.0),
        "attention_sink_bias": (False,),
        # False: pairs of neighbours are rotated instead of halves.
        "rope_is_neox_style": (True,),
        "partial_rotary_factor": (1, 1.0),
        "transformer_layer_config": (),
    }
    for key, values in accepted.items():
        keys.refuse_unless(key, values)


def _target_layer_ids(keys: Keys, layers: int) -> tuple[int, ...]:
    ids = keys.get("target_layer_ids")
    if ids is not None:
        return tuple(int(i) for i in ids)
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
    window = keys.get("sliding_window") if keys.get("use_sliding_window", True) else None
    names = keys.get("layer_types")
    if names is None:
        first = keys.get("max_window_layers", layers) if keys.get("use_sliding_window") else layers
        names = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    unknown = [name for name in names if name not in ("full_attention", "sliding_attention")]
    if unknown or len(names) != layers:
        problem = f"holds {unknown[0]!r}" if unknown else f"has {len(names)} entries for {layers} layers"
        raise LoadError(f"{keys.path}: layer_types {problem}")
    named_sliding = tuple(name == "sliding_attention" for name in names)
    sliding = tuple(flag and window is not None for flag in named_sliding)
    explicit = keys.get("is_causal", keys.get("causal"))
    causal = named_sliding if explicit is None else (bool(explicit),) * layers
    source: Literal["metadata", "inferred"] = (
        "metadata" if keys.get("layer_types") is not None or any(sliding) else "inferred"
    )
    return (int(window) if window and any(sliding) else None, sliding, causal, source)
