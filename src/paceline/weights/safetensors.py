"""Hugging Face directories: ``config.json`` beside one or several memory-mapped ``*.safetensors`` files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import safetensors
import torch

from paceline.errors import LoadError
from paceline.ops.quant import QuantTensor, dequantize, pack
from paceline.weights.files import read_json
from paceline.weights.template import ChatTemplate
from paceline.weights.tokenizer import Tokenizer, token_text

_INDEX = "model.safetensors.index.json"


class HfDirectory:
    """One model as a Hugging Face directory.

    ``path`` is the directory, ``paths`` its weight files, ``metadata`` the whole ``config.json``, ``tensors``
    every tensor by the name it has in the file. ``LoadError`` names the file and what is wrong with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata = read_json(self.path / "config.json")
        if not self.metadata:
            raise LoadError(f"{self.path / 'config.json'}: no such file, or empty")
        index = self._index()
        self.paths = self._weight_files(index)
        self.tensors: dict[str, QuantTensor] = {}
        for file in self.paths:
            for name, tensor in _read(file).items():
                if name in self.tensors:
                    raise LoadError(f"{file}: tensor {name} is already in an earlier file")
                self.tensors[name] = tensor
        for name, shard in index.items():
            if name not in self.tensors:
                raise LoadError(f"{self.path / shard}: tensor {name} is missing, but {_INDEX} lists it there")

    @property
    def architecture(self) -> str:
        """The first entry of ``architectures``, or "" when there is none."""
        names = self.metadata.get("architectures") or [""]
        return str(names[0])

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.path)

    def chat_template(self) -> ChatTemplate | None:
        settings = read_json(self.path / "tokenizer_config.json")
        file = self.path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # named templates
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if source is None:
            return None
        bos, eos = (token_text(settings.get(kind)) or "" for kind in ("bos_token", "eos_token"))
        return ChatTemplate(source, bos_token=bos, eos_token=eos, origin=str(self.path))

    def _index(self) -> dict[str, str]:
        """Tensor name to file name, as the index of a sharded checkpoint lists them; empty without an index."""
        weight_map = read_json(self.path / _INDEX).get("weight_map", {})
        if any(Path(shard).name != shard for shard in weight_map.values()):
            raise LoadError(f"{self.path / _INDEX}: lists files outside its directory")
        return weight_map

    def _weight_files(self, index: dict[str, str]) -> tuple[Path, ...]:
        names = set(index.values()) or {file.name for file in self.path.glob("*.safetensors")}
        if not names:
            raise LoadError(f"{self.path}: no *.safetensors file")
        return tuple(self.path / name for name in sorted(names))


def _read(path: Path) -> dict[str, QuantTensor]:
    """All tensors of one file, as views of the mapped file."""
    if not path.is_file():
        raise LoadError(f"{path}: no such file")
    types = _check_header(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: _wrap(file.get_tensor(name), types[name]) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise LoadError(f"{path}: not a readable safetensors file: {error}") from error


def _check_header(path: Path) -> dict[str, str]:
    """Tensor types by name. Refuses a file that is shorter than its header says, with both sizes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= size - 8:
            raise LoadError(f"{path}: not a safetensors file, or truncated: a header of {length:,} bytes in {size:,}")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            types = {name: str(entry["dtype"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LoadError(f"{path}: not a safetensors file: its header cannot be read") from error
    if end > size:
        raise LoadError(f"{path}: truncated: the tensors end at byte {end:,}, the file has {size:,} bytes")
    return types


def _wrap(tensor: torch.Tensor, dtype: str) -> QuantTensor:
    rows = tensor if tensor.dim() else tensor.reshape(1)
    return QuantTensor(rows.view(torch.uint8), dtype, tuple(tensor.shape))


def effective_target_tensor(parameter: str, tensor: QuantTensor) -> QuantTensor:
    """A target's tensor as our models use it: norm weights are stored minus one (the gated norm's is not), the decay as
    its logarithm, the convolution with an axis of size one."""
    if parameter.endswith("norm.weight") and not parameter.endswith("linear_attn.norm.weight"):
        return pack(1.0 + dequantize(tensor))
    if parameter.endswith("linear_attn.A"):
        return pack(-torch.exp(dequantize(tensor)))
    if parameter.endswith("conv1d.weight") and len(tensor.shape) == 3 and tensor.shape[1] == 1:
        return QuantTensor(tensor.data.squeeze(1), tensor.qtype, (tensor.shape[0], tensor.shape[2]))
    return tensor
