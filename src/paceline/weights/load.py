"""From a path to a checked checkpoint, and from a checkpoint into a model. Strict: every parameter is filled once, every
tensor is used or listed as ignored, and every refusal names the file and both sides of what does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from paceline.config import DrafterConfig, TargetConfig
from paceline.errors import LoadError
from paceline.ops.quant import BLOCKS, QuantTensor, dequantize
from paceline.weights import geometry, names
from paceline.weights.gguf import GgufFile
from paceline.weights.template import ChatTemplate
from paceline.weights.tokenizer import Tokenizer

Config = TypeVar("Config", TargetConfig, DrafterConfig)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(Generic[Config]):
    """A model file that can be run.

    ``tensors`` are by parameter name of our model, in their stored form, ``sources`` says what each is called in the file,
    ``ignored`` lists the tensors that are left out on purpose. ``metadata`` is the GGUF metadata or ``config.json``.
    """

    path: Path
    paths: tuple[Path, ...]
    config: Config
    tensors: Mapping[str, QuantTensor]
    sources: Mapping[str, str]
    ignored: tuple[str, ...]
    metadata: Mapping[str, Any]

    def tokenizer(self) -> Tokenizer:
        """Build the checkpoint's tokenizer; ``LoadError`` when it has none or one of another kind."""
        return Tokenizer.from_gguf(self.path, self.metadata)

    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, compiled; ``None`` when it has none."""
        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        texts = {}
        for kind in ("bos", "eos"):
            index = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
            texts[f"{kind}_token"] = tokens[index] if index is not None and index < len(tokens) else ""
        return ChatTemplate(source, **texts, origin=str(self.path))


def open_target(path: str | Path) -> Checkpoint[TargetConfig]:
    """Open a Qwen3.5-family target. ``LoadError`` when it cannot be run as it is."""
    file = GgufFile(path)
    if file.architecture not in geometry.TARGET_ARCHITECTURES:
        raise LoadError(_wrong_architecture(file, "target", geometry.TARGET_ARCHITECTURES))
    layers = geometry.gguf_target_layers(file)
    config = geometry.gguf_target_config(file)

    def beyond(name: str) -> bool:
        block = names.gguf_block(name)
        return block is not None and block >= layers

    tensors, sources, ignored = _named(file.path, file.tensors, names.target_from_gguf, beyond, drafter=False)
    return Checkpoint(file.path, file.paths, config, tensors, sources, ignored, file.metadata)


def open_drafter(path: str | Path) -> Checkpoint[DrafterConfig]:
    """Open a DFlash or DFlash2 drafter. ``LoadError`` when it cannot be run as it is."""
    file = GgufFile(path)
    known = (*geometry.DRAFTER_ARCHITECTURES, *geometry.LUCEBOX_ARCHITECTURES)
    if file.architecture not in known:
        raise LoadError(_wrong_architecture(file, "drafter", known))
    tensors, sources, ignored = _named(file.path, file.tensors, names.drafter_from_gguf, _is_domino, drafter=True)
    config = geometry.gguf_drafter_config(file)
    if "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return Checkpoint(file.path, file.paths, config, tensors, sources, ignored, file.metadata)


def _is_domino(name: str) -> bool:
    """An optional extra head of older drafters; drafting works without it."""
    return name.startswith("dflash.domino.")


def _wrong_architecture(file: GgufFile, role: str, supported: tuple[str, ...]) -> str:
    return f"{file.path}: architecture {file.architecture!r} is not supported as a {role}; supported: {', '.join(supported)}"


def _named(
    path: Path,
    tensors: Mapping[str, QuantTensor],
    parameter: Callable[[str], str | None],
    dropped: Callable[[str], bool],
    *,
    drafter: bool,
) -> tuple[dict[str, QuantTensor], dict[str, str], tuple[str, ...]]:
    """Sort a file's tensors into parameters (by our name, and what the file calls them) and ignored ones."""
    named: dict[str, QuantTensor] = {}
    sources: dict[str, str] = {}
    ignored = []
    for name, tensor in tensors.items():
        if dropped(name):
            ignored.append(name)
            continue
        feature = names.unsupported_feature(name, drafter=drafter)
        if feature is not None:
            raise LoadError(f"{path}: tensor {name} needs {feature}, which is not supported")
        target = parameter(name)
        if target is None:
            raise LoadError(f"{path}: unexpected tensor {name} {list(tensor.shape)}")
        if target in sources:
            raise LoadError(f"{path}: tensors {sources[target]} and {name} are the same parameter, {target}")
        if tensor.qtype not in BLOCKS:
            raise LoadError(
                f"{path}: tensor {name} has type {tensor.qtype}, which is not supported; supported: {', '.join(BLOCKS)}"
            )
        named[target], sources[target] = tensor, name
    return named, sources, tuple(ignored)


def fill(module: nn.Module, checkpoint: Checkpoint[Any], device: torch.device | str = "cpu") -> None:
    """Give every parameter of ``module`` (built on the meta device) its values, in the parameter's dtype, on ``device``.

    Values are decoded in float32 and rounded once. ``LoadError`` names file, tensor and both shapes; nothing is decoded
    before all names and shapes fit.
    """
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if name not in checkpoint.tensors:
            raise LoadError(f"{checkpoint.path}: no tensor for parameter {name} {list(parameter.shape)}")
        tensor = checkpoint.tensors[name]
        if tensor.shape != tuple(parameter.shape):
            raise LoadError(
                f"{checkpoint.path}: tensor {checkpoint.sources.get(name, name)} has shape {list(tensor.shape)}, "
                f"the model's {name} has {list(parameter.shape)}"
            )
    unexpected = [name for name in checkpoint.tensors if name not in parameters]
    if unexpected:
        tensor, source = checkpoint.tensors[unexpected[0]], checkpoint.sources.get(unexpected[0], unexpected[0])
        raise LoadError(
            f"{checkpoint.path}: the model has no place for {len(unexpected)} tensors, first {source} {list(tensor.shape)}"
        )
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        values = dequantize(checkpoint.tensors[name], parameter.dtype).to(device)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))


def check_pair(target: Checkpoint[TargetConfig], drafter: Checkpoint[DrafterConfig]) -> None:
    """Refuse a drafter that was made for another target: ``LoadError`` with both files and both numbers."""
    ours, theirs = target.config, drafter.config
    head = target.tensors.get("lm_head.weight") or target.tensors["embed_tokens.weight"]
    equal = [
        ("hidden size", theirs.hidden_size, "hidden size", ours.hidden_size),
        ("selector rows", theirs.selector_vocab, "vocabulary", ours.vocab_size),
        ("selector rows", theirs.selector_vocab, "head rows", head.shape[0]),
        ("embedding rows", theirs.own_embedding_rows, "vocabulary", ours.vocab_size),
        ("head rows", theirs.own_head_rows, "vocabulary", ours.vocab_size),
    ]
    for mine, number, other, reference in equal:
        if number and number != reference:  # 0: the drafter has none and uses the target's
            raise _pair_error(target, drafter, f"{mine} {number}", f"{other} {reference}")
    if not 0 <= theirs.mask_token_id < ours.vocab_size:
        raise _pair_error(target, drafter, f"mask token id {theirs.mask_token_id}", f"vocabulary {ours.vocab_size}")
    for layer in theirs.target_layer_ids:
        if not 0 <= layer < ours.num_layers:
            raise _pair_error(target, drafter, f"target layer {layer} (counted from 0)", f"{ours.num_layers} layers")


def _pair_error(target: Checkpoint[Any], drafter: Checkpoint[Any], theirs: str, ours: str) -> LoadError:
    return LoadError(f"the drafter does not fit the target: {drafter.path} has {theirs}, {target.path} has {ours}")


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
