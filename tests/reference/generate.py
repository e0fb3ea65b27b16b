"""Write the foreign reference values that ``tests/models/test_reference.py`` compares with.

A separate step, not part of the test suite, because it needs two packages that Paceline does not depend on::

    python3 -m venv /path/to/venv
    /path/to/venv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /path/to/venv/bin/pip install --no-deps dflash==0.1.0
    /path/to/venv/bin/python tests/reference/generate.py

Targets come from ``Qwen3_5ForCausalLM`` of ``transformers``, drafters from ``dflash.model``, both on random tiny
configurations in float32 on one CPU thread with eager attention. What is written to ``tests/data/reference``:

``target_*.weights``     the checkpoint under its Hugging Face names
``target_*.outputs``     ``tokens`` [T], ``hidden`` [layers, T, H] (residual stream after each layer, before the final
                         norm) and ``logits`` [T, V]
``drafter_*.weights``    the checkpoint of a drafter; a variant may use a subset of it
``drafter_inputs``       ``features`` [T, taps * H], ``anchors`` [steps], ``embedding`` and ``lm_head`` [V, H]
``drafter_outputs``      per variant: ``hidden`` [steps, B, H] (after the final norm), ``logits`` [steps, B, V] and the
                         greedy ``drafts`` [steps, B - 1]
``reference.json``       configurations, versions, and the reference's own error (see ``self_error``)

Weights are rounded to bfloat16 *before* the reference runs, so that half the bytes hold them exactly.
"""

from __future__ import annotations

import copy
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from dflash.model import (  # type: ignore[import-not-found, unused-ignore]
    DFlash2DraftModel,
    DFlashDraftModel,
)
from safetensors.torch import save_file
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
)

OUTPUT = Path(__file__).parent.parent / "data" / "reference"
HIDDEN, VOCAB = 64, 160
SEQUENCE = 140
"""Tokens per target sequence: two whole chunks of 64 and a rest. The first 70 are compared on their own as well."""
CONTEXTS = (40, 41, 44, 52)
"""Context lengths of the drafter's steps: a prompt of 40, then rounds that keep 1, 3 and 8 rows."""
BLOCK = 8
MIN_MARGIN = 2e-3
"""Smallest score difference a reference draft may rest on, far above float32 noise."""


def target_config(key_heads: int, value_heads: int, head_dim: int, tied: bool, layers: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": {32: [2, 1, 1], 64: [4, 2, 2]}[head_dim],
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "layer_types": layers,
        "eos_token_id": 1,
    }


GDN, FULL = "linear_attention", "full_attention"
TARGETS = {
    "target_equal_heads": target_config(2, 2, 64, tied=True, layers=[GDN, GDN, GDN, FULL]),
    "target_two_per_key": target_config(2, 4, 32, tied=False, layers=[GDN, GDN, GDN, FULL]),
    "target_three_per_key": target_config(2, 6, 32, tied=True, layers=[GDN, FULL, GDN, FULL]),
}


def drafter_config(layers: str, causal: bool | None, kernel: int | None, **extra: float) -> dict[str, Any]:
    """``layers`` spells the pattern, S for sliding and F for full; ``kernel`` None is a DFlash v1 drafter."""
    dflash: dict[str, Any] = {"target_layer_ids": [0, 2, 3], "mask_token_id": VOCAB - 1, "block_size": BLOCK, **extra}
    if kernel is not None:
        dflash |= {"conv_kernel_size": kernel, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if kernel is None else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["sliding_attention" if letter == "S" else FULL for letter in layers],
        "use_sliding_window": "S" in layers,
        "sliding_window": 16 if "S" in layers else None,
        "max_window_layers": 0,
        "num_target_layers": 4,
        "dflash_config": dflash,
    }
    if causal is not None:
        config["is_causal"] = causal
    return config


SCALED = {"output_multiplier": 0.7, "final_logit_softcapping": 6.0, "input_embedding_scale": 1.7}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "k2_sliding_bidirectional": ("drafter_k2", drafter_config("SSS", False, 2)),
    "k2_sliding_causal": ("drafter_k2", drafter_config("SSS", True, 2)),
    "k2_sliding_default": ("drafter_k2", drafter_config("SSS", None, 2)),
    "k2_mixed_default": ("drafter_k2", drafter_config("SSF", None, 2)),
    "k2_mixed_bidirectional": ("drafter_k2", drafter_config("SFS", False, 2)),
    "k2_full_causal": ("drafter_k2", drafter_config("FFF", True, 2)),
    "k2_full_default": ("drafter_k2", drafter_config("FFF", None, 2)),
    "k2_scaled": ("drafter_k2", drafter_config("SSS", False, 2, **SCALED)),
    "k4_sliding_bidirectional": ("drafter_k4", drafter_config("SSS", False, 4)),
    "k4_mixed_default_scaled": ("drafter_k4", drafter_config("FSS", None, 4, **SCALED)),
    "v1_full_default": ("drafter_k2", drafter_config("FFF", None, None)),
    "v1_mixed_default": ("drafter_k2", drafter_config("SSF", None, None)),
    "v1_sliding_bidirectional": ("drafter_k2", drafter_config("SSS", False, None)),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fill a model with values at which everything it has matters: no norm weight is 0 or 1, the decay of the recurrent
    state is slow enough for the state to carry, no convolution tap vanishes."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            value = -1.5 + noise
        elif name.endswith("dt_bias"):
            value = -1.0 + noise
        elif name.endswith("base_kernel"):
            value = 0.3 * noise
            value[:, 0] += 1.0
        elif "conv1d" in name:
            value = 0.5 * noise
        elif "norm" in name:
            # the target's norms multiply by 1 + weight, except the gated one and all of a drafter's
            plain = "linear_attn" in name or not isinstance(model, Qwen3_5ForCausalLM)
            value = 0.3 * noise + (1.0 if plain else 0.0)
        elif "embed" in name or "codebook" in name:
            value = noise
        elif "kernel_projection" in name:
            value = 0.3 * noise / parameter.shape[-1] ** 0.5
        else:
            value = noise / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value.to(torch.bfloat16))


def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, OUTPUT / f"{name}.safetensors")


def write_weights(name: str, model: torch.nn.Module) -> None:
    tensors = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):
        del tensors["lm_head.weight"]
    # published drafters carry the codebooks as bare parameters
    for codebook in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        if f"{codebook}.weight" in tensors:
            tensors[codebook] = tensors.pop(f"{codebook}.weight")
    write(f"{name}.weights", tensors)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# --- targets ---


def run_target(model: Any, tokens: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual stream after each layer [layers, T, H] (``hidden_states[-1]`` of transformers is past the final norm, so
    the layers are observed themselves) and logits [T, V]."""
    hidden: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: hidden.append(output)) for layer in model.model.layers
    ]
    try:
        logits = model(tokens[None], **kwargs).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([layer[0] for layer in hidden]), logits


def step_target(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same token by token through the cache, which takes other code in transformers."""
    cache = DynamicCache(config=model.config)
    steps = [run_target(model, token[None], past_key_values=cache, use_cache=True) for token in tokens]
    return torch.cat([hidden for hidden, _ in steps], dim=1), torch.cat([logits for _, logits in steps])


def make_target(name: str, config: dict[str, Any], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**copy.deepcopy(config)), attn_implementation="eager")
    model = model.float().eval()
    randomise(model, generator)
    tokens = torch.randint(VOCAB, (SEQUENCE,), generator=generator)
    hidden, logits = run_target(model, tokens, use_cache=False)
    stepped_hidden, stepped_logits = step_target(model, tokens)
    prefix_hidden, prefix_logits = run_target(model, tokens[:70], use_cache=False)
    write_weights(name, model)
    write(f"{name}.outputs", {"tokens": tokens.to(torch.int32), "hidden": hidden, "logits": logits})
    return {
        "config": config,
        "self_error": {
            "hidden_stepped": [gap(a, b) for a, b in zip(hidden, stepped_hidden, strict=True)],
            "logits_stepped": gap(logits, stepped_logits),
            "hidden_prefix": gap(hidden[:, :70], prefix_hidden),
            "logits_prefix": gap(logits[:70], prefix_logits),
        },
        "largest": {"hidden": float(hidden.abs().max()), "logits": float(logits.abs().max())},
    }


# --- drafters ---


def make_drafter(config: dict[str, Any]) -> Any:
    kind = DFlash2DraftModel if "conv_kernel_size" in config["dflash_config"] else DFlashDraftModel
    model = kind(Qwen3Config(**copy.deepcopy(config))).float().eval()
    assert len(model.layers) == len(config["layer_types"])
    return model


def block_embedding(config: dict[str, Any], anchor: int, embedding: torch.Tensor) -> torch.Tensor:
    dflash = config["dflash_config"]
    block = torch.tensor([anchor] + [dflash["mask_token_id"]] * (BLOCK - 1))
    return embedding[block][None] * float(dflash.get("input_embedding_scale", 1.0))


def forward_whole(model: Any, features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One block after all of its context at once, without a cache: [B, H]."""
    positions = torch.arange(features.shape[0] + BLOCK)[None]
    return model(position_ids=positions, noise_embedding=noise, target_hidden=features[None])[0]


def forward_cached(model: Any, features: torch.Tensor, noises: list[torch.Tensor]) -> list[torch.Tensor]:
    """The blocks one after the other, each appending the features that its round added, as ``dflash_generate`` does."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    outputs, start = [], 0
    for end, noise in zip(CONTEXTS, noises, strict=True):
        positions = torch.arange(start, end + BLOCK)[None]
        outputs.append(
            model(
                position_ids=positions,
                noise_embedding=noise,
                target_hidden=features[None, start:end],
                past_key_values=cache,
                use_cache=True,
            )[0]
        )
        cache.crop(end - cache.get_seq_length())
        start = end
    return outputs


def select(model: Any, hidden: torch.Tensor, anchor: int, head: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, V] and greedy drafts [B - 1]."""
    logits = model.compute_logits(hidden[None], head)[0]
    if isinstance(model, DFlash2DraftModel):
        path, _, _ = model.propose(hidden[None, 1:], torch.tensor([anchor]), head, 0.0)
        return logits, path[0]
    return logits, logits[1:].argmax(-1)


def margin(model: Any, hidden: torch.Tensor, logits: torch.Tensor, anchor: int, drafts: torch.Tensor) -> float:
    """The smallest lead of a draft over its rivals: the other candidates of its row, and also the token just below the
    selector's top-k cut where the cut itself is a near tie."""
    rows = logits[1:]
    if not isinstance(model, DFlash2DraftModel):
        best = rows.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())
    selector = model.candidate_selector
    previous = torch.cat([torch.tensor([anchor]), drafts[:-1]])
    query = selector.predecessor_codebook.weight[previous] * selector.hidden_projection(hidden[1:])
    values, candidates = rows.topk(selector.top_k + 1, dim=-1)
    scores = values + torch.einsum("br,bkr->bk", query, selector.successor_codebook.weight[candidates])
    inside = scores[:, :-1].topk(2, dim=-1).values
    cut = values[:, -2] - values[:, -1]
    rival = torch.where(cut < MIN_MARGIN, torch.maximum(inside[:, 1], scores[:, -1]), inside[:, 1])
    return float((inside[:, 0] - rival).min())


def make_variant(
    name: str, config: dict[str, Any], weights: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = make_drafter(config)
    wanted = model.state_dict().keys()
    model.load_state_dict({key: weights[key] for key in wanted})
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data.copy_(inputs["lm_head"])
    anchors = inputs["anchors"].tolist()
    noises = [block_embedding(config, anchor, inputs["embedding"]) for anchor in anchors]
    whole = [forward_whole(model, inputs["features"][:end], noise) for end, noise in zip(CONTEXTS, noises, strict=True)]
    cached = forward_cached(model, inputs["features"], noises)
    error = max(gap(a, b) for a, b in zip(whole, cached, strict=True))
    chosen = [select(model, hidden, anchor, head) for hidden, anchor in zip(whole, anchors, strict=True)]
    smallest = min(
        margin(model, hidden, logits, anchor, drafts)
        for hidden, anchor, (logits, drafts) in zip(whole, anchors, chosen, strict=True)
    )
    print(f"{name}: cached against whole {error:.2e}, smallest margin {smallest:.4f}")
    if error > 1e-4 or smallest < MIN_MARGIN:
        sys.exit(f"{name}: the reference disagrees with itself or rests on a near tie; choose another seed")
    outputs = {
        f"{name}.hidden": torch.stack(whole),
        f"{name}.logits": torch.stack([logits for logits, _ in chosen]),
        f"{name}.drafts": torch.stack([drafts for _, drafts in chosen]).to(torch.int32),
    }
    largest = {
        "hidden": float(outputs[f"{name}.hidden"].abs().max()),
        "logits": float(outputs[f"{name}.logits"].abs().max()),
    }
    return outputs, {"config": config, "self_error": error, "smallest_margin": smallest, "largest": largest}


def make_drafters(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "features": torch.randn(CONTEXTS[-1], 3 * HIDDEN, generator=generator),
        "embedding": torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16).float(),
        "lm_head": (torch.randn(VOCAB, HIDDEN, generator=generator) / 4).to(torch.bfloat16).float(),
        "anchors": torch.randint(VOCAB - 1, (len(CONTEXTS),), generator=generator),
    }
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, kernel in (("drafter_k2", 2), ("drafter_k4", 4)):
        model = make_drafter(drafter_config("SSS", False, kernel))
        randomise(model, generator)
        write_weights(name, model)
        weights[name] = model.state_dict()
    outputs: dict[str, torch.Tensor] = {}
    report: dict[str, Any] = {}
    for name, (source, config) in DRAFTERS.items():
        tensors, facts = make_variant(name, config, weights[source], inputs)
        outputs |= tensors
        report[name] = {"weights": source, **facts}
    stored = {key: value.to(torch.bfloat16) for key, value in inputs.items() if key in ("embedding", "lm_head")}
    write("drafter_inputs", inputs | stored | {"anchors": inputs["anchors"].to(torch.int32)})
    write("drafter_outputs", outputs)
    return report


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    targets = {name: make_target(name, config, seed=index + 1) for index, (name, config) in enumerate(TARGETS.items())}
    drafters = make_drafters(seed=14)
    packages = ("torch", "transformers", "dflash", "safetensors")
    report = {
        "command": "python tests/reference/generate.py",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "contexts": CONTEXTS,
        "targets": targets,
        "drafters": drafters,
    }
    (OUTPUT / "reference.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
