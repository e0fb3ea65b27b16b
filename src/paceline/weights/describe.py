"""What a model file holds, also for files that cannot be run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.config import DrafterConfig, TargetConfig
from paceline.errors import LoadError
from paceline.weights.load import DRAFTERS, TARGETS, Checkpoint, ModelFile, drafter_of, open_file, target_of


@dataclass(frozen=True, slots=True)
class TypeUse:
    """How much of a file one tensor type makes up."""

    qtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Description:
    """A model file at a glance. ``problems`` says why it cannot be run and is empty when it can.

    ``path`` is what to start it with, the (first) GGUF file or the Hugging Face directory; ``paths`` hold the weights.
    ``parameters`` counts the numbers in all tensors, ``weight_bytes`` their stored size without the ignored ones.
    """

    path: Path
    paths: tuple[Path, ...]
    architecture: str
    name: str | None
    role: Literal["target", "drafter"] | None
    checkpoint: Checkpoint[Any] | None
    problems: tuple[str, ...]
    parameters: int
    types: tuple[TypeUse, ...]
    weight_bytes: int
    vocab_tokens: int | None
    has_chat_template: bool

    @property
    def config(self) -> TargetConfig | DrafterConfig | None:
        return self.checkpoint.config if self.checkpoint else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that are not used."""
        return self.checkpoint.ignored if self.checkpoint else ()


def describe(path: str | Path) -> Description:
    """Describe the model at ``path``. ``LoadError`` only for what cannot be opened at all (missing, damaged, no model)."""
    file = open_file(path)
    role = _role(file)
    problems: list[str] = []
    checkpoint = _attempt(lambda: _checkpoint(file, role), problems)
    # A drafter works with its target's tokenizer and template; what it carries itself is only reported.
    text_problems = problems if role == "target" else []
    tokenizer = _attempt(file.tokenizer, text_problems)
    template = _attempt(file.chat_template, text_problems)
    ignored = set(checkpoint.ignored if checkpoint else ())
    return Description(
        path=file.path,
        paths=file.paths,
        architecture=file.architecture,
        name=file.metadata.get("general.name"),
        role=role,
        checkpoint=checkpoint,
        problems=tuple(problems),
        parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        types=_types(file),
        weight_bytes=sum(tensor.nbytes for name, tensor in file.tensors.items() if name not in ignored),
        vocab_tokens=tokenizer.vocab_size if tokenizer else None,
        has_chat_template=template is not None,
    )


def _role(file: ModelFile) -> Literal["target", "drafter"] | None:
    if file.architecture in TARGETS:
        return "target"
    return "drafter" if file.architecture in DRAFTERS or "dspark" in file.architecture.lower() else None


def _checkpoint(file: ModelFile, role: str | None) -> Checkpoint[Any]:
    if role is None:
        supported = f"targets: {', '.join(TARGETS)}; drafters: {', '.join(DRAFTERS)}"
        raise LoadError(f"{file.path}: architecture {file.architecture!r} is not supported; {supported}")
    return target_of(file) if role == "target" else drafter_of(file)


def _attempt(action: Any, problems: list[str]) -> Any:
    try:
        return action()
    except LoadError as error:
        problems.append(error.message)
        return None


def _types(file: ModelFile) -> tuple[TypeUse, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.qtype] += 1
        sizes[tensor.qtype] += tensor.nbytes
    return tuple(TypeUse(qtype, counts[qtype], size) for qtype, size in sizes.most_common())
