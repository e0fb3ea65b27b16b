"""From a path to a checked checkpoint, and from a checkpoint into a model. Strict: every parameter is filled once, every
tensor is used or listed as ignored, and every refusal names the file and both sides of what does not fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from paceline.config import DrafterConfig, TargetConfig
from paceline.errors import LoadError
from paceline.ops.dispatch import uses_kernels
from paceline.ops.quant import BLOCKS, KeepsStored, QuantTensor, dequantize
from paceline.weights import gguf_geometry, hf_geometry, names
from paceline.weights.geometry import rows
from paceline.weights.gguf import GgufFile, is_later_part
from paceline.weights.safetensors import HfDirectory, effective_target_tensor
from paceline.weights.template import ChatTemplate
from paceline.weights.tokenizer import Tokenizer

log = logging.getLogger("paceline.weights")

ModelFile = GgufFile | HfDirectory
Config = TypeVar("Config", TargetConfig, DrafterConfig)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(Generic[Config]):
    """A model that can be run.

    ``tensors`` are by parameter name of our model, in their stored form, ``sources`` says what each is called in the file,
    ``ignored`` lists the tensors that are left out on purpose.
    """

    file: ModelFile
    config: Config
    tensors: Mapping[str, QuantTensor]
    sources: Mapping[str, str]
    ignored: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The GGUF file (the first of a split one) or the Hugging Face directory."""
        return self.file.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that holds weights."""
        return self.file.paths

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key-value pairs, or ``config.json``."""
        return self.file.metadata

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; ``LoadError`` when the checkpoint has none, one of another kind, or one that is too large."""
        tokenizer = self.file.tokenizer()
        embedding = self.tensors.get("embed_tokens.weight")
        if embedding is not None and tokenizer.vocab_size > embedding.shape[0]:
            raise LoadError(f"{self.path}: {tokenizer.vocab_size} tokens, but only {embedding.shape[0]} embedding rows")
        return tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """The chat template, compiled; ``None`` when there is none, ``LoadError`` when it cannot be read."""
        return self.file.chat_template()


def open_file(path: str | Path) -> ModelFile:
    """Open whatever ``path`` holds: a GGUF file, a Hugging Face directory, or a directory with one GGUF model in it."""
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> ModelFile:
    if not path.is_dir():
        return GgufFile(path)
    if (path / "config.json").is_file():
        return HfDirectory(path)
    files = [file for file in sorted(path.glob("*.gguf")) if not is_later_part(file)]
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise LoadError(f"{path}: a directory with neither config.json nor exactly one GGUF model; GGUF models: {found}")
    return GgufFile(files[0])


def open_target(path: str | Path) -> Checkpoint[TargetConfig]:
    """Open a Qwen3.5-family target. ``LoadError`` when it cannot be run as it is."""
    return target_of(open_file(path))


def open_drafter(path: str | Path) -> Checkpoint[DrafterConfig]:
    """Open a DFlash or DFlash2 drafter. ``LoadError`` when it cannot be run as it is."""
    return drafter_of(open_file(path))


def target_of(file: ModelFile) -> Checkpoint[TargetConfig]:
    """See ``open_target``."""
    _check_role(file, "target", TARGETS, DRAFTERS)
    return _hf_target(file) if isinstance(file, HfDirectory) else _gguf_target(file)


def drafter_of(file: ModelFile) -> Checkpoint[DrafterConfig]:
    """See ``open_drafter``."""
    _check_role(file, "drafter", DRAFTERS, TARGETS)
    return _hf_drafter(file) if isinstance(file, HfDirectory) else _gguf_drafter(file)


TARGETS = (*gguf_geometry.TARGET_ARCHITECTURES, *hf_geometry.TARGET_ARCHITECTURES)
DRAFTERS = (
    *gguf_geometry.DRAFTER_ARCHITECTURES,
    *gguf_geometry.LUCEBOX_ARCHITECTURES,
    *hf_geometry.DRAFTER_ARCHITECTURES,
)


def _check_role(file: ModelFile, role: str, supported: tuple[str, ...], others: tuple[str, ...]) -> None:
    found = file.architecture
    if found in supported:
        return
    if "dspark" in found.lower():
        raise LoadError(f"{file.path}: a DSpark drafter ({found}); supported: DFlash and DFlash2")
    if found in others:
        raise LoadError(f"{file.path}: a {'drafter' if role == 'target' else 'target'} ({found}), not a {role}")
    raise LoadError(f"{file.path}: architecture {found!r} is not supported as a {role}; supported: {', '.join(supported)}")


def _gguf_target(file: GgufFile) -> Checkpoint[TargetConfig]:
    layers = gguf_geometry.target_layers(file)

    def beyond(name: str) -> bool:
        block = names.gguf_block(name)
        return block is not None and block >= layers

    tensors, sources, ignored = _named(file, names.target_from_gguf, beyond)
    return Checkpoint(file, gguf_geometry.target_config(file, tensors), tensors, sources, ignored)


def _hf_target(file: HfDirectory) -> Checkpoint[TargetConfig]:
    tied = hf_geometry.ties_embeddings(file)

    def dropped(name: str) -> bool:
        return names.hf_is_dropped(name) or (tied and name == "lm_head.weight")

    tensors, sources, ignored = _named(file, names.target_from_hf, dropped)
    config = hf_geometry.target_config(file, rows(file.path, tensors, "embed_tokens.weight"))
    tensors = {name: effective_target_tensor(name, tensor) for name, tensor in tensors.items()}
    return Checkpoint(file, config, tensors, sources, ignored)


def _gguf_drafter(file: GgufFile) -> Checkpoint[DrafterConfig]:
    lucebox = file.architecture in gguf_geometry.LUCEBOX_ARCHITECTURES
    parameter = names.drafter_from_lucebox if lucebox else names.drafter_from_gguf
    tensors, sources, ignored = _named(file, parameter, names.is_domino)
    config = gguf_geometry.drafter_config(file, tensors)
    return Checkpoint(file, config, _with_tied_head(tensors), sources, ignored)


def _hf_drafter(file: HfDirectory) -> Checkpoint[DrafterConfig]:
    uses_own = hf_geometry.drafter_keys(file).get("has_embed_tokens", True)

    def dropped(name: str) -> bool:
        return not uses_own and name.endswith("embed_tokens.weight")

    tensors, sources, ignored = _named(file, names.drafter_from_hf, dropped)
    config = hf_geometry.drafter_config(file, tensors)
    return Checkpoint(file, config, _with_tied_head(tensors), sources, ignored)


def _with_tied_head(tensors: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
    """A drafter with an embedding of its own and no head uses the embedding for both."""
    if "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        return {**tensors, "lm_head.weight": tensors["embed_tokens.weight"]}
    return tensors


def _named(
    file: ModelFile,
    parameter: Callable[[str], str | None],
    dropped: Callable[[str], bool],
) -> tuple[dict[str, QuantTensor], dict[str, str], tuple[str, ...]]:
    """Sort a file's tensors into parameters (by our name, and what the file calls them) and ignored ones."""
    named: dict[str, QuantTensor] = {}
    sources: dict[str, str] = {}
    ignored = []
    for name, tensor in file.tensors.items():
        if dropped(name):
            ignored.append(name)
            continue
        target = parameter(name)
        if target is None:
            feature = names.unsupported_feature(name)
            why = f"belongs to {feature}, which is not supported" if feature else f"{list(tensor.shape)} is unexpected"
            raise LoadError(f"{file.path}: tensor {name} {why}")
        if target in sources:
            raise LoadError(f"{file.path}: tensors {sources[target]} and {name} are the same parameter, {target}")
        if tensor.qtype not in BLOCKS:
            raise LoadError(
                f"{file.path}: tensor {name} has type {tensor.qtype}, which is not supported; supported: {', '.join(BLOCKS)}"
            )
        named[target], sources[target] = tensor, name
    return named, sources, tuple(ignored)


def fill(module: nn.Module, checkpoint: Checkpoint[Any], device: torch.device | str = "cpu") -> None:
    """Give every parameter of ``module`` (built on the meta device) its values, in the parameter's dtype, on ``device``.

    Values are decoded in float32 and rounded once; a weight whose module keeps the stored form is not decoded on a GPU.
    Tensors go one by one from the mapped file to the device, and nothing refers to the file afterwards: beside the mapping,
    which the system can drop at any time, host memory holds what is decoded for a CPU and nothing else. A long load is
    logged. ``LoadError`` names file, tensor and both shapes; nothing is decoded before all names and shapes fit.
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
    progress = _Progress(checkpoint)
    for name, parameter in parameters.items():
        path, _, leaf = name.rpartition(".")
        owner, stored = module.get_submodule(path), checkpoint.tensors[name]
        if leaf == "weight" and isinstance(owner, KeepsStored) and uses_kernels(torch.device(device)):
            owner.keep(stored, torch.device(device))
        else:
            values = dequantize(stored.to(device), parameter.dtype)
            setattr(owner, leaf, nn.Parameter(values, requires_grad=False))
        progress.add(stored.nbytes)


_REPORT_SECONDS = 3.0


class _Progress:
    """A log line every few seconds."""

    def __init__(self, checkpoint: Checkpoint[Any]) -> None:
        self._name = checkpoint.path.name
        self._total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        self._done = 0
        self._started = self._reported = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        rate = self._done / (now - self._started)
        log.info("%s: %.1f of %.1f GB loaded, %.2f GB/s", self._name, self._done / 1e9, self._total / 1e9, rate / 1e9)


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
