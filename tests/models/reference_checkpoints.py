"""Write the tensors of a Hugging Face checkpoint to disk in the layouts that Paceline reads: a directory with
``config.json`` and ``model.safetensors``, or a GGUF file in llama.cpp's dialect (``qwen35``, ``dflash``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]

_TARGET_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_TARGET_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
_DRAFTER_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_DRAFTER_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def write_directory(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_wrapped_directory(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A target inside the multimodal wrapper: nested settings, another prefix, and parts that text does not use."""
    wrapped = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": {key: value for key, value in config.items() if key != "tie_word_embeddings"},
    }
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    return write_directory(path, wrapped, renamed)


def _gguf_name(name: str, whole: dict[str, str], layer: dict[str, str]) -> str:
    if name in whole:
        return whole[name]
    _, index, rest = name.removeprefix("model.").split(".", 2)
    return f"blk.{index}.{layer[rest]}"


def _tile_value_heads(tensor: Tensor, key_heads: int, value_heads: int, dim: int = 0) -> Tensor:
    """Value head ``k * r + j`` of key head k goes to place ``j * Hk + k``."""
    ratio = value_heads // key_heads
    size = tensor.shape[dim] // value_heads
    order = [k * ratio + j for j in range(ratio) for k in range(key_heads)]
    rows = torch.tensor([head * size + i for head in order for i in range(size)])
    return tensor.index_select(dim, rows)


def _convert_target_tensor(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = (config["linear_num_key_heads"], config["linear_num_value_heads"])
    keys = 2 * heads[0] * config["linear_key_head_dim"]
    part = name.rsplit("linear_attn.", 1)[-1] if "linear_attn." in name else ""
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = torch.cat([tensor[:keys], _tile_value_heads(tensor[keys:], *heads)])
        return tensor.squeeze(1) if part == "conv1d.weight" else tensor
    if part == "A_log":
        return _tile_value_heads(-tensor.exp(), *heads)
    if part in ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "dt_bias"):
        return _tile_value_heads(tensor, *heads)
    if part == "out_proj.weight":
        return _tile_value_heads(tensor, *heads, dim=1)
    if name.endswith("norm.weight") and part != "norm.weight":
        return tensor + 1
    return tensor


def write_target_gguf(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Matrices stay BF16 (they hold the values exactly), vectors and convolutions are F32 as in published files."""
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_uint32("qwen35.ssm.conv_kernel", config["linear_conv_kernel_dim"])
    writer.add_uint32("qwen35.ssm.state_size", config["linear_key_head_dim"])
    writer.add_uint32("qwen35.ssm.group_count", config["linear_num_key_heads"])
    writer.add_uint32("qwen35.ssm.time_step_rank", config["linear_num_value_heads"])
    writer.add_uint32("qwen35.ssm.inner_size", config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_array("qwen35.attention.recurrent_layers", [kind == "linear_attention" for kind in config["layer_types"]])
    for name, tensor in tensors.items():
        converted = _convert_target_tensor(name, tensor.float(), config)
        _add_tensor(writer, _gguf_name(name, _TARGET_NAMES, _TARGET_LAYER_NAMES), converted)
    return _close(writer, path)


def write_drafter_gguf(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    dflash = config["dflash_config"]
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_uint32("dflash.block_size", dflash["block_size"])
    writer.add_array("dflash.target_layers", [layer + 1 for layer in dflash["target_layer_ids"]])
    writer.add_uint32("tokenizer.ggml.mask_token_id", dflash["mask_token_id"])
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if key in dflash:
            writer.add_uint32(f"dflash.{key}", dflash[key])
    for source, key in (
        ("output_multiplier", "logit_scale"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("input_embedding_scale", "embedding_scale"),
    ):
        if source in dflash:
            writer.add_float32(f"dflash.{key}", dflash[source])
    if config["sliding_window"] is not None:
        writer.add_uint32("dflash.attention.sliding_window", config["sliding_window"])
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("dflash.attention.sliding_window_pattern", sliding)
    if "is_causal" in config:
        writer.add_bool("dflash.attention.causal", config["is_causal"])
    for name, tensor in tensors.items():
        _add_tensor(writer, _gguf_name(name, _DRAFTER_NAMES, _DRAFTER_LAYER_NAMES), tensor.float())
    return _close(writer, path)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    array = tensor.contiguous().numpy()
    if array.ndim == 1 or "conv1d" in name or name.endswith("_base"):
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _close(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
