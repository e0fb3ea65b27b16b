"""``paceline inspect``: what a model file holds and what it takes to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.config import DEMO_DRAFTER, DEMO_TARGET, DrafterConfig, TargetConfig

if TYPE_CHECKING:
    from paceline.weights.describe import Description

_CONTEXT = 8192
"""The context for which the needs of a lane are shown, or the model's if that is shorter."""


def inspect(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="GGUF files or Hugging Face directories; 'demo': the built-in pair."),
    ],
) -> None:
    """Show what a model file holds and needs.

    Architecture, sizes, tensor types, chat template, and the memory it takes to run it.
    """
    from paceline.weights.describe import describe

    paths = [path for file in files for path in ((DEMO_TARGET, DEMO_DRAFTER) if file == "demo" else (file,))]
    for index, path in enumerate(paths):
        if index:
            print()
        for name, value in _lines(describe(path)):
            print(f"{name + ':':<16}{value}")


def _lines(found: Description) -> list[tuple[str, str]]:
    lines = [("file", str(path)) for path in found.paths]
    lines.append(("architecture", found.architecture + (f", a {found.role}" if found.role else "")))
    if found.name:
        lines.append(("name", found.name))
    if isinstance(found.config, TargetConfig):
        lines += _target(found.config)
    elif found.config is not None:
        lines += _drafter(found.config)
    lines.append(("parameters", f"{found.parameters:,}"))
    lines += [("tensor type", f"{use.qtype}: {use.tensors} tensors, {_size(use.bytes)}") for use in found.types]
    if found.ignored:
        lines.append(("not used", f"{len(found.ignored)} tensors, first {found.ignored[0]}"))
    if found.vocab_tokens is not None:
        lines.append(("tokenizer", f"{found.vocab_tokens:,} tokens"))
    lines.append(("chat template", "yes" if found.has_chat_template else "no"))
    lines += _needs(found)
    lines += [("cannot be run", problem) for problem in found.problems]
    return lines


def _target(config: TargetConfig) -> list[tuple[str, str]]:
    attention = config.layer_types.count("attention")
    gdn = config.num_layers - attention
    return [
        ("layers", f"{config.num_layers}: {gdn} Gated DeltaNet, {attention} attention"),
        ("sizes", f"hidden {config.hidden_size}, feed-forward {config.intermediate_size}, vocabulary {config.vocab_size:,}"),
        ("attention", f"{config.num_heads} query heads, {config.num_kv_heads} K/V heads of {config.head_dim}"),
        (
            "Gated DeltaNet",
            f"{config.gdn_key_heads} key heads, {config.gdn_value_heads} value heads of {config.gdn_value_dim}",
        ),
        ("output head", "tied to the embedding" if config.tie_embeddings else "its own"),
        ("context", f"{config.context_length:,} tokens"),
    ]


def _drafter(config: DrafterConfig) -> list[tuple[str, str]]:
    lines = [
        ("drafter", f"{config.kind}, block {config.block_size}: up to {config.block_size - 1} drafts per round"),
        ("layers", f"{config.num_layers}, of which {sum(config.sliding)} slide over {config.sliding_window or 'no'} tokens"),
        ("sizes", f"hidden {config.hidden_size} (the target's too), feed-forward {config.intermediate_size}"),
        ("attention", f"{config.num_heads} query heads, {config.num_kv_heads} K/V heads of {config.head_dim}"),
        ("target layers", f"{', '.join(map(str, config.target_layer_ids))}, whose outputs it reads"),
    ]
    if config.selector_rank:
        size = f"rank {config.selector_rank}, top {config.selector_top_k}, vocabulary {config.selector_vocab:,}"
        lines.append(("selector", size))
    return lines


def _needs(found: Description) -> list[tuple[str, str]]:
    """Memory on a CPU, where weights are decoded once into the type of the products."""
    if found.problems:
        return []
    lines = [
        (
            "to run it",
            f"weights about {_size(2 * found.parameters)} in bfloat16 or float16, {_size(4 * found.parameters)} in float32",
        )
    ]
    per_token = found.cache_bytes_per_token
    if found.role == "target":
        caches = ", ".join(f"{size / 1024:.1f} KiB in {kind}" for kind, size in per_token.items())
        lines.append(("K/V per token", caches))
        lines.append(("per lane", f"{_size(found.state_bytes_per_lane)} of state beside the K/V"))
        lines.append(("start it", f"paceline serve {found.path}"))
    else:
        caches = ", ".join(f"{size / 1024:.1f} KiB in {kind}" for kind, size in per_token.items())
        lines.append(("K/V per token", f"{caches}, at most the window's tokens in sliding layers"))
        lines.append(("start it", f"paceline serve TARGET --draft {found.path}"))
    return lines


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
