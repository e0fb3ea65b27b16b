"""What the tensors of a checkpoint are called in a file and in our models.

A model's parameter names are the Hugging Face names without their prefix (``model.`` or ``model.language_model.``). Two
differ, because they hold what GGUF stores: ``linear_attn.A`` is ``-exp(A_log)``, and ``linear_attn.conv1d.weight`` is
``[channels, taps]``. Sources: llama.cpp's converters for Qwen3.5 and DFlash, lucebox's loader for the older dialect.
"""

from __future__ import annotations

import re

_TARGET_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TARGET_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    # The norm before the MLP, despite its name.
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    **_ATTENTION,
    **_MLP,
}
_DRAFTER_TOP = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    **_TARGET_TOP,
}
_LUCEBOX_TOP = {
    **_DRAFTER_TOP,
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "hidden_norm.weight",
    "dflash_hidden_norm.weight": "hidden_norm.weight",
}
_DRAFTER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
    **_ATTENTION,
    **_MLP,
}

_LUCEBOX_LAYER = {**_DRAFTER_LAYER, "post_attention_norm.weight": "post_attention_layernorm.weight"}

_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"layers\.\d+\.(.+)")
_HF_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_HF_DROPPED = re.compile(r"^(model\.)?(visual|mtp)\.")


def gguf_block(name: str) -> int | None:
    """Block number of a GGUF tensor name; ``None`` outside the blocks."""
    match = _GGUF_BLOCK.match(name)
    return int(match[1]) if match else None


def target_from_gguf(name: str) -> str | None:
    """Parameter of the target that a GGUF tensor fills, ``None`` when there is none."""
    return _from_gguf(name, _TARGET_TOP, _TARGET_LAYER)


def drafter_from_gguf(name: str) -> str | None:
    """Parameter of the drafter that a GGUF tensor fills, ``None`` when there is none."""
    return _from_gguf(name, _DRAFTER_TOP, _DRAFTER_LAYER)


def drafter_from_lucebox(name: str) -> str | None:
    """The same for the older dialect of ``dflash-draft`` files."""
    return _from_gguf(name, _LUCEBOX_TOP, _LUCEBOX_LAYER)


def _from_gguf(name: str, top: dict[str, str], layer: dict[str, str]) -> str | None:
    match = _GGUF_BLOCK.match(name)
    if match is None:
        return top.get(name)
    leaf = layer.get(match[2])
    return leaf and f"layers.{match[1]}.{leaf}"


def is_domino(name: str) -> bool:
    """Whether a GGUF tensor belongs to the optional extra head of older drafters; drafting works without it."""
    return name.startswith("dflash.domino.")


def hf_is_dropped(name: str) -> bool:
    """Whether a Hugging Face tensor belongs to the image tower or to the multi-token-prediction head."""
    return _HF_DROPPED.match(name) is not None


def target_from_hf(name: str) -> str | None:
    """Parameter of the target that a Hugging Face tensor fills, ``None`` when there is none."""
    name = _HF_PREFIX.sub("", name)
    if name.endswith(".linear_attn.A_log"):
        name = name.removesuffix("_log")
    return _known(name, _TARGET_TOP, _TARGET_LAYER)


def drafter_from_hf(name: str) -> str | None:
    """Parameter of the drafter that a Hugging Face tensor fills, ``None`` when there is none. The codebooks are stored
    with or without ``.weight``."""
    name = _HF_PREFIX.sub("", name)
    if name.endswith("_codebook.weight"):
        name = name.removesuffix(".weight")
    return _known(name, _DRAFTER_TOP, _DRAFTER_LAYER)


def _known(name: str, top: dict[str, str], layer: dict[str, str]) -> str | None:
    match = _HF_LAYER.match(name)
    return name if (match[1] in layer.values() if match else name in top.values()) else None


_UNSUPPORTED = [
    (re.compile(pattern), feature)
    for pattern, feature in (
        (r"^markov_w[12]\.|^conf_proj\.|^dflash\.dspark\.|markov_head\.|confidence_head\.", "a DSpark head"),
        (r"^d2t$|^t2d$|\.d2t$", "a reduced draft vocabulary"),
        (r"hyper_connection|^hc_|\.hc_", "hyper-connections"),
        (r"attn_sinks|\.sinks$|attention_sink", "attention sinks"),
        (r"post_attention_norm\.|post_ffw_norm\.|(pre|post)_feedforward_layernorm\.", "sandwich norms"),
        (r"layer_output_scale|layer_scalar", "a scale on each layer's output"),
        (r"^rope_freqs|rope_factors", "RoPE frequency factors"),
        (r"\.attn_gate\.|self_attn\.g(ate)?_proj\.", "a gate on the drafter's attention output"),
        (r"(^|\.)aux_hidden_norm\.", "a norm on each tapped layer"),
        (r"\.(input_)?scale$|weight_scale", "scaled weights (an NVFP4 or FP8 export)"),
        (r"_exps\.|_shexp\.|mlp\.experts\.", "a mixture of experts"),
    )
]


def unsupported_feature(name: str) -> str | None:
    """What a tensor that fills no parameter belongs to, for features that are known and not supported."""
    return next((feature for pattern, feature in _UNSUPPORTED if pattern.search(name)), None)
