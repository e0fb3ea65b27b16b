"""``paceline inspect``: what a model file holds and what it takes to run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.config import (
    CACHE_TYPES,
    DEMO_DRAFTER,
    DEMO_TARGET,
    CacheType,
    DrafterConfig,
    EngineOptions,
    TargetConfig,
)
from paceline.errors import LoadError

if TYPE_CHECKING:
    from paceline.state.shapes import StateShape
    from paceline.weights.describe import Description

_CONTEXT = 8192
"""The context for which the state is shown, or the model's if that is shorter."""

_CACHE = EngineOptions().cache_type_k


def inspect(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="GGUF files or Hugging Face directories; 'demo': the built-in pair."),
    ],
) -> None:
    """Show what a model file holds and needs.

    Architecture, sizes, tensor types, chat template, and the memory it takes to run it; of a target and a drafter also what
    the pair needs.
    """
    from paceline.weights.describe import describe

    paths = [path for file in files for path in ((DEMO_TARGET, DEMO_DRAFTER) if file == "demo" else (file,))]
    found = []
    for path in paths:
        found.append(describe(path))
        _print(_lines(found[-1]), first=len(found) == 1)
    if sorted(each.role or "" for each in found) == ["drafter", "target"] and not any(each.problems for each in found):
        _print(_pair(*sorted(found, key=lambda each: each.role != "target")))


def _print(lines: list[tuple[str, str]], *, first: bool = False) -> None:
    if not first:
        print()
    for name, value in lines:
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
    """Memory: weights on a CPU, where they are decoded once into the type of the products; state as the engine counts it."""
    from paceline.engine.capacity import state_line
    from paceline.ops.kv import bytes_per_token
    from paceline.state.shapes import kv_bytes_per_token

    if found.problems:
        return []
    lines = [
        (
            "to run it",
            f"weights about {_size(2 * found.parameters)} in bfloat16 or float16, {_size(4 * found.parameters)} in float32",
        )
    ]
    if isinstance(found.config, TargetConfig):
        per_token = {kind: kv_bytes_per_token(_shape(found.config, None, kind)) for kind in CACHE_TYPES}
        lines.append(("K/V per token", _sizes(per_token)))
        lines.append(("state", state_line(_shape(found.config, None))))
        lines.append(("start it", f"paceline serve {found.path}"))
    elif found.config is not None:
        config = found.config
        kinds: tuple[CacheType, ...] = ("f32", "f16")  # on a CPU, on a GPU
        per_token = {
            kind: 2 * config.num_layers * bytes_per_token(kind, config.num_kv_heads, config.head_dim) for kind in kinds
        }
        lines.append(("K/V per token", f"{_sizes(per_token)}, at most the window's tokens in sliding layers"))
        lines.append(("start it", f"paceline serve TARGET --draft {found.path}"))
    return lines


def _pair(target: Description, drafter: Description) -> list[tuple[str, str]]:
    from paceline.engine.capacity import state_line
    from paceline.weights.load import check_pair

    lines = [("pair", f"{target.path.name} with {drafter.path.name}")]
    assert target.checkpoint is not None and drafter.checkpoint is not None, "without problems"
    try:
        check_pair(target.checkpoint, drafter.checkpoint)
    except LoadError as error:
        return [*lines, ("cannot be run", error.message)]
    return [
        *lines,
        ("state", state_line(_shape(target.checkpoint.config, drafter.checkpoint.config))),
        ("start it", f"paceline serve {target.path} --draft {drafter.path}"),
    ]


def _shape(target: TargetConfig, drafter: DrafterConfig | None, kind: CacheType = _CACHE) -> StateShape:
    """The state that ``paceline serve`` makes by default, for a context that is given."""
    from paceline.engine.arithmetic import resolve_device
    from paceline.engine.capacity import state_shape

    options = EngineOptions(cache_type_k=kind, cache_type_v=kind)
    return state_shape(options, target, drafter, min(_CONTEXT, target.context_length), resolve_device(options.device))


def _sizes(per_token: Mapping[CacheType, int]) -> str:
    return ", ".join(f"{size / 1024:.1f} KiB in {kind}" for kind, size in per_token.items())


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
