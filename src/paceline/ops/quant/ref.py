"""GGUF block formats as tensors: what a stored row of bytes means in float32.

Notation of the decoders: ``b`` is uint8 ``[n, block_bytes]``, the result float32 ``[n, block_elements]``. Each formula
multiplies scale by sub-scale first and by the integer last, in float32, which is the order of ggml's own reference; the
values therefore agree to the bit. ``fields`` says where in a block each number is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.ops.quant import fields

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements decoded at a time. On a CPU the intermediates of a chunk stay in the cache, on a GPU a chunk is worth its
launches; on both a large matrix needs little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A matrix in its stored form.

    ``data`` is uint8 ``[rows..., row_bytes]``, ``qtype`` the GGUF type name ("IQ4_XS", "BF16", ...), and ``shape`` the
    logical shape, last index fastest, as in PyTorch. The bytes may be a view of a memory-mapped file.
    """

    data: Tensor
    qtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def to(self, device: torch.device | str) -> QuantTensor:
        return QuantTensor(self.data.to(device), self.qtype, self.shape)


@runtime_checkable
class KeepsStored(Protocol):
    """A module that takes its parameter ``weight`` in its stored form where ops run as kernels."""

    def keep(self, weight: QuantTensor, device: torch.device) -> None: ...


def pack(tensor: Tensor) -> QuantTensor:
    """Wrap a dense float32, float16 or bfloat16 tensor (at least one dimension) without copying contiguous data."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return QuantTensor(tensor.contiguous().view(torch.uint8), names[tensor.dtype], tuple(tensor.shape))


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ``q``, shape ``q.shape``: decoded in float32, then rounded once to ``dtype``."""
    elements, size, decode = _format(q.qtype)
    blocks = q.data.reshape(-1, size)
    out = torch.empty(blocks.shape[0], elements, dtype=dtype, device=blocks.device)
    step = _CHUNK_ELEMENTS[blocks.device.type] // elements
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(q.shape)


def dequantize_rows(q: QuantTensor, row_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows ``row_ids`` (integers, any shape ``[...]``) of a matrix: ``[..., columns]``. The others are not decoded."""
    rows = q.data[row_ids]
    return dequantize(QuantTensor(rows, q.qtype, (*row_ids.shape, q.shape[-1])), dtype)


def _format(qtype: str) -> tuple[int, int, Callable[[Tensor], Tensor]]:
    if qtype not in BLOCKS:
        raise ValueError(f"tensor type {qtype} cannot be decoded; known types: {', '.join(BLOCKS)}")
    return BLOCKS[qtype]


def _f32(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float32)


def _f16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def _bf16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.bfloat16).float()


def _q8_0(b: Tensor) -> Tensor:
    d, codes = fields.q8_0(b)
    return d * codes


def _q4_0(b: Tensor) -> Tensor:
    d, codes = fields.q4_0(b)
    return d * codes


def _q4_1(b: Tensor) -> Tensor:
    return fields.half(b, 0) * fields.nibbles(b[:, 4:]).flatten(1) + fields.half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    d, codes = fields.q5_0(b)
    return d * codes


def _q5_1(b: Tensor) -> Tensor:
    values = fields.nibbles(b[:, 8:]).flatten(1) | fields.fifth_bits(b[:, 4:8])
    return fields.half(b, 0) * values + fields.half(b, 2)


def _q2_k(b: Tensor) -> Tensor:
    scales = b[:, :16, None]
    scale = fields.half(b, 80).unsqueeze(-1) * (scales & 15)
    minimum = fields.half(b, 82).unsqueeze(-1) * (scales >> 4)
    return (scale * fields.two_bits(b[:, 16:80]).view(-1, 16, 16) - minimum).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    d, scales, codes = fields.q3_k(b)
    return ((d * scales).unsqueeze(-1) * codes).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _scale_and_shift(*fields.q4_k(b))


def _q5_k(b: Tensor) -> Tensor:
    return _scale_and_shift(*fields.q5_k(b))


def _scale_and_shift(d: Tensor, dmin: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    return ((d * scales).unsqueeze(-1) * codes - (dmin * minima).unsqueeze(-1)).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    d, scales, codes = fields.q6_k(b)
    return ((d * scales).unsqueeze(-1) * codes).flatten(1)


def _iq4_nl(b: Tensor) -> Tensor:
    d, indices = fields.iq4_nl(b)
    return d * fields.iq4_values(indices)


def _iq4_xs(b: Tensor) -> Tensor:
    d, scales, indices = fields.iq4_xs(b)
    return ((d * scales).unsqueeze(-1) * fields.iq4_values(indices)).flatten(1)


BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "F32": (1, 4, _f32),
    "F16": (1, 2, _f16),
    "BF16": (1, 2, _bf16),
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
}
"""Type name: elements per block, bytes per block, decoder. These are the types that can be run."""
