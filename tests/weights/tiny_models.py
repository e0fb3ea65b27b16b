"""Writes tiny random checkpoints in the file formats that are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.ops.quant import BLOCKS
from paceline.weights.load import Checkpoint

H, F, LAYERS, VOCAB = 256, 512, 4, 320
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 128
KEY_HEADS, VALUE_HEADS, GDN_DIM = 2, 2, 128
CHANNELS = 2 * KEY_HEADS * GDN_DIM + VALUE_HEADS * GDN_DIM
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

Shapes = dict[str, tuple[int, ...]]


def attention_shapes(prefix: str, query_rows: int) -> Shapes:
    kv = KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.attn_q.weight": (query_rows, H),
        f"{prefix}.attn_k.weight": (kv, H),
        f"{prefix}.attn_v.weight": (kv, H),
        f"{prefix}.attn_output.weight": (H, HEADS * HEAD_DIM),
        f"{prefix}.attn_q_norm.weight": (HEAD_DIM,),
        f"{prefix}.attn_k_norm.weight": (HEAD_DIM,),
    }


def mlp_shapes(prefix: str) -> Shapes:
    return {
        f"{prefix}.ffn_gate.weight": (F, H),
        f"{prefix}.ffn_up.weight": (F, H),
        f"{prefix}.ffn_down.weight": (H, F),
    }


def target_shapes(*, tied: bool = False) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (VOCAB, H), "output_norm.weight": (H,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, H)
    for i in range(LAYERS):
        prefix, values = f"blk.{i}", VALUE_HEADS * GDN_DIM
        shapes |= {f"{prefix}.attn_norm.weight": (H,), f"{prefix}.post_attention_norm.weight": (H,)} | mlp_shapes(prefix)
        if (i + 1) % 4 == 0:
            shapes |= attention_shapes(prefix, 2 * HEADS * HEAD_DIM)
            continue
        shapes |= {
            f"{prefix}.attn_qkv.weight": (CHANNELS, H),
            f"{prefix}.attn_gate.weight": (values, H),
            f"{prefix}.ssm_beta.weight": (VALUE_HEADS, H),
            f"{prefix}.ssm_alpha.weight": (VALUE_HEADS, H),
            f"{prefix}.ssm_conv1d.weight": (CHANNELS, 4),
            f"{prefix}.ssm_a": (VALUE_HEADS,),
            f"{prefix}.ssm_dt.bias": (VALUE_HEADS,),
            f"{prefix}.ssm_norm.weight": (GDN_DIM,),
            f"{prefix}.ssm_out.weight": (H, values),
        }
    return shapes


def drafter_shapes(*, layers: int = 2, taps: int = 2, selector: bool = True) -> Shapes:
    shapes: Shapes = {"fc.weight": (H, taps * H), "enc.output_norm.weight": (H,), "output_norm.weight": (H,)}
    for i in range(layers):
        prefix = f"blk.{i}"
        shapes |= {f"{prefix}.attn_norm.weight": (H,), f"{prefix}.ffn_norm.weight": (H,)}
        shapes |= mlp_shapes(prefix) | attention_shapes(prefix, HEADS * HEAD_DIM)
        if selector:
            for part in ("attn", "ffn"):
                shapes |= {f"{prefix}.{part}_conv_base": (2, 2, H), f"{prefix}.{part}_conv_proj.weight": (2 * 2 * 16, H)}
    if selector:
        shapes |= {
            "selector_predecessor.weight": (VOCAB, 32),
            "selector_successor.weight": (VOCAB, 32),
            "selector_hidden.weight": (32, H),
        }
    return shapes


def target_metadata() -> dict[str, Any]:
    keys = {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": H,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 32,
        "ssm.conv_kernel": 4,
        "ssm.state_size": GDN_DIM,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * GDN_DIM,
        "full_attention_interval": 4,
    }
    return {"general.name": "tiny", **{f"qwen35.{key}": value for key, value in keys.items()}, **tokenizer_metadata()}


def drafter_metadata(*, layers: int = 2, selector: bool = True) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": H,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "block_size": 8,
        "target_layers": [2, 3],
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [i < layers - 1 for i in range(layers)],
    }
    if selector:
        keys |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16}
    return {**{f"dflash.{key}": value for key, value in keys.items()}, "tokenizer.ggml.mask_token_id": VOCAB - 1}


def lucebox_metadata(*, layers: int = 2, arch: str = "dflash-draft") -> dict[str, Any]:
    """Only what the oldest files have: other sizes follow from tensor shapes."""
    keys = {
        "block_count": layers,
        "embedding_length": H,
        "rope.freq_base": 1e7,
        "dflash.block_size": 16,
        "dflash.n_target_layers": 2,
        "dflash.target_layer_ids": [1, 2],
        "dflash.mask_token_id": VOCAB - 1,
    }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def tokenizer_metadata() -> dict[str, Any]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    special = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4}
    tokens = alphabet + [merge.replace(" ", "") for merge in merges] + list(special)
    padding = [f"[PAD{i}]" for i in range(len(tokens), VOCAB)]
    types = [1] * (len(tokens) - len(special)) + list(special.values()) + [5] * len(padding)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def random_tensors(shapes: Shapes, qtype: Callable[[str], str] = lambda name: "F32", seed: int = 0) -> dict[str, Any]:
    """Stored tensors by GGUF name: (numpy array, type name). Vectors and convolutions are F32, as in real files."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        kind = qtype(name) if len(shape) == 2 and "conv" not in name else "F32"
        if kind == "F32":
            tensors[name] = (rng.standard_normal(shape).astype(np.float32), kind)
        else:
            elements, size, _ = BLOCKS[kind]
            row_bytes = shape[-1] // elements * size
            tensors[name] = (rng.integers(0, 60, (*shape[:-1], row_bytes), dtype=np.uint8), kind)
    return tensors


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, split_tensors: int = 0
) -> Path:
    """Write a GGUF file (or parts of ``split_tensors`` tensors); returns the file to open."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not split_tensors:
        return path
    parts = -(-len(tensors) // split_tensors)
    return path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def tiny_target(path: Path, **overrides: Any) -> Path:
    """A target; ``overrides`` change metadata by full key (``None`` removes it), ``tensors`` the tensors."""
    tensors = overrides.pop("tensors", None) or random_tensors(target_shapes())
    return write_gguf(path, "qwen35", changed(target_metadata(), overrides), tensors)


def tiny_drafter(path: Path, **overrides: Any) -> Path:
    """A DFlash2 drafter; see ``tiny_target``."""
    tensors = overrides.pop("tensors", None) or random_tensors(drafter_shapes())
    return write_gguf(path, "dflash", changed(drafter_metadata(), overrides), tensors)


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``changes``; a change to ``None`` removes the key."""
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def write_hf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    index = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def module_for(checkpoint: Checkpoint[Any], dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> nn.Module:
    """A module on the meta device with exactly the parameters of ``checkpoint``; ``shapes`` (with ``__`` for the dots)
    changes or adds some, and an empty shape takes one away."""
    wanted = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    wanted |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    root = nn.Module()
    for name, shape in wanted.items():
        if not shape:
            continue
        *parents, leaf = name.split(".")
        owner = root
        for parent in parents:
            if parent not in dict(owner.named_children()):
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
    return root
