"""GGUF files, opened through the ``gguf`` package and memory-mapped; nothing is read before it is used."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.errors import LoadError
from paceline.ops.quant import QuantTensor
from paceline.weights.template import ChatTemplate
from paceline.weights.tokenizer import Tokenizer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class _Reader(gguf.GGUFReader):
    """The package's reader with two changes: arrays are taken in one step (a vocabulary of 248,320 strings takes the
    original several seconds), and a tensor that ends past the end of the file is reported as such."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item == gguf.GGUFValueType.STRING:
            end, parts = self._strings(start, count)
        else:
            values = self._get(start, self.gguf_scalar_to_np[item], count)
            end, parts = start + values.nbytes, [values]
        return end - orig_offs, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, item]

    def _strings(self, offset: int, count: int) -> tuple[int, list[Any]]:
        view = memoryview(self.data)  # type: ignore[arg-type]
        strings = []
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", view, offset)
            strings.append(view[offset + 8 : offset + 8 + length])
            offset += 8 + length
        return offset, strings

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(raw_type[0]))]
            end = start_offs + int(offset[0]) + int(np.prod(dims, dtype=object)) // elements * size
            if end > len(self.data):
                raise ValueError(
                    f"truncated: tensor {bytes(name).decode()} ends at byte {end:,}, the file has {len(self.data):,} bytes"
                )
        super()._build_tensors(start_offs, fields)


class Metadata(Mapping[str, Any]):
    """Key-value pairs of a GGUF file, decoded when asked for (a tokenizer holds most of them) and not kept. ``LoadError``
    names the file and the key of a text that is not UTF-8."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = {key: field for key, field in fields.items() if not key.startswith("GGUF.")}

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            fault = f"byte {error.start} is {error.object[error.start]:#x}"
            raise LoadError(f"{self._path}: {key} holds text that is not UTF-8: {fault}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GgufFile:
    """One model in GGUF form, of one file or of several split ones.

    ``path`` is the (first) file, ``paths`` all of them, ``metadata`` the key-value pairs of the first, ``tensors`` every
    tensor by its GGUF name, whatever its type. ``LoadError`` names the file and what is wrong with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = _read(self.path)
        self.metadata = Metadata(self.path, first.fields)
        self.paths = _parts(self.path, self.metadata)
        readers = [first, *(_read(part) for part in self.paths[1:])]
        self.tensors: dict[str, QuantTensor] = {}
        for part, reader in zip(self.paths, readers, strict=True):
            for tensor in reader.tensors:
                if tensor.name in self.tensors:
                    raise LoadError(f"{part}: tensor {tensor.name} is already in an earlier part")
                self.tensors[tensor.name] = _tensor(tensor)
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise LoadError(f"{self.path}: the parts hold {len(self.tensors)} tensors, the metadata says {expected}")

    @property
    def architecture(self) -> str:
        """``general.architecture``, or "" when the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.path, self.metadata)

    def chat_template(self) -> ChatTemplate | None:
        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        tokens = self.metadata.get("tokenizer.ggml.tokens", ())
        ids = [self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")]
        bos, eos = (tokens[i] if i is not None and i < len(tokens) else "" for i in ids)
        return ChatTemplate(source, bos_token=bos, eos_token=eos, origin=str(self.path))


def is_later_part(path: Path) -> bool:
    """Whether a file name is that of the second or a later part of a split model."""
    name = _SPLIT_NAME.search(path.name)
    return name is not None and int(name[1]) > 1


def _read(path: Path) -> _Reader:
    if not path.is_file():
        raise LoadError(f"{path}: no such file")
    with path.open("rb") as file:
        head = file.read(24)
    if head[:4] != _MAGIC:
        raise LoadError(f"{path}: not a GGUF file: it starts with {head[:4]!r} instead of {_MAGIC!r}")
    if len(head) < 24:
        raise LoadError(f"{path}: truncated: {len(head)} bytes are too few for a GGUF header of 24")
    (version,) = struct.unpack_from("<I", head, 4)
    if version not in _VERSIONS:
        raise LoadError(f"{path}: GGUF version {version} is not supported; supported: 2 and 3, little endian")
    try:
        # Copy-on-write: torch wants writable memory, and the file is never changed.
        return _Reader(path, "c")
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        detail = str(error)
        if not detail.startswith("truncated"):
            detail = f"damaged header or truncated metadata ({detail}); the file has {path.stat().st_size:,} bytes"
        raise LoadError(f"{path}: {detail}") from error


def _parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files of a split model, in order; ``path`` must be the first."""
    count = int(metadata.get("split.count", 1))
    if count <= 1:
        return (path,)
    number = int(metadata.get("split.no", 0))
    name = _SPLIT_NAME.search(path.name)
    if name is None or int(name[2]) != count:
        raise LoadError(f"{path}: one of {count} parts, but not named like -00001-of-{count:05d}.gguf")
    stem = path.name[: name.start()]
    parts = tuple(path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    if number != 0:
        raise LoadError(f"{path}: part {number + 1} of {count}; open the first one, {parts[0].name}")
    return parts


def _tensor(tensor: Any) -> QuantTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    data = tensor.data if tensor.data.dtype == np.uint8 else tensor.data.view(np.uint8)
    return QuantTensor(torch.from_numpy(data), tensor.tensor_type.name, shape)
