"""GGUF block formats as tensors: what a stored row of bytes means in float32.

Notation of the decoders: ``b`` is uint8 ``[n, block_bytes]``, the result float32 ``[n, block_elements]``. Each formula
multiplies scale by sub-scale first and by the integer last, in float32, which is the order of ggml's own reference; the
values therefore agree to the bit. Layouts: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at a time: the intermediates of a chunk stay in the cache, and a large matrix needs little memory."""


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


def pack(tensor: Tensor) -> QuantTensor:
    """Wrap a dense float32, float16 or bfloat16 tensor (at least one dimension) without copying contiguous data."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return QuantTensor(tensor.contiguous().view(torch.uint8), names[tensor.dtype], tuple(tensor.shape))


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ``q``, shape ``q.shape``: decoded in float32, then rounded once to ``dtype``."""
    elements, size, decode = _format(q.qtype)
    blocks = q.data.reshape(-1, size)
    out = torch.empty(blocks.shape[0], elements, dtype=dtype, device=blocks.device)
    step = _CHUNK_ELEMENTS // elements
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


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` as float32 ``[n, 1]``."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """Low nibbles of every byte, then the high nibbles: ``[..., k]`` to ``[..., 2, k]``."""
    return torch.stack((qs & 15, qs >> 4), dim=-2)


def _bits(planes: Tensor, shifts: range, mask: int) -> Tensor:
    """``(planes >> s) & mask`` for every shift: ``[..., k]`` to ``[..., len(shifts), k]``."""
    return torch.stack([(planes >> s) & mask for s in shifts], dim=-2)


def _f32(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float32)


def _f16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def _bf16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.bfloat16).float()


def _q8_0(b: Tensor) -> Tensor:
    return _half(b, 0) * b[:, 2:].view(torch.int8)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).view(torch.int8) - 8).flatten(1)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]).flatten(1) + _half(b, 2)


def _fifth_bits(qh: Tensor) -> Tensor:
    """Bit ``e`` of the four bytes is bit 4 of element ``e``: uint8 ``[n, 4]`` to ``[n, 32]``, values 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return (((qh.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q5_0(b: Tensor) -> Tensor:
    values = _nibbles(b[:, 6:]).flatten(1) | _fifth_bits(b[:, 2:6])
    return _half(b, 0) * (values.view(torch.int8) - 16)


def _q5_1(b: Tensor) -> Tensor:
    values = _nibbles(b[:, 8:]).flatten(1) | _fifth_bits(b[:, 4:8])
    return _half(b, 0) * values + _half(b, 2)


def _two_bits(qs: Tensor) -> Tensor:
    """Q2_K and Q3_K: two halves of 32 bytes, each holding four runs of 32 elements: ``[n, 64]`` to ``[n, 8, 32]``."""
    return _bits(qs.reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1, 2)


def _q2_k(b: Tensor) -> Tensor:
    scales = b[:, :16, None]
    scale = _half(b, 80).unsqueeze(-1) * (scales & 15)
    minimum = _half(b, 82).unsqueeze(-1) * (scales >> 4)
    return (scale * _two_bits(b[:, 16:80]).view(-1, 16, 16) - minimum).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    packed = b[:, 96:108]
    low = _nibbles(packed[:, :8]).flatten(1)
    high = _bits(packed[:, 8:], range(0, 8, 2), 3).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    # A cleared bit of the mask means that 4 is to be subtracted.
    low_by = (_bits(b[:, :32], range(8), 1) ^ 1) << 2
    values = _two_bits(b[:, 32:96]).view(torch.int8) - low_by.view(torch.int8)
    return ((_half(b, 108) * scales).unsqueeze(-1) * values.view(-1, 16, 16)).flatten(1)


def _six_bit_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The twelve bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, each ``[n, 8]``."""
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _scale_and_shift(b: Tensor, values: Tensor) -> Tensor:
    """Q4_K and Q5_K: ``d * scale * value - dmin * minimum`` for values ``[n, 8, 32]``."""
    scales, minima = _six_bit_scales(b[:, 4:16])
    scale, minimum = _half(b, 0) * scales, _half(b, 2) * minima
    return (scale.unsqueeze(-1) * values - minimum.unsqueeze(-1)).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _scale_and_shift(b, _nibbles(b[:, 16:].reshape(-1, 4, 32)).flatten(1, 2))


def _q5_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    return _scale_and_shift(b, low | (_bits(b[:, 16:48], range(8), 1) << 4))


def _q6_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3)
    values = (low | (high << 4)).view(torch.int8) - 32
    scale = _half(b, 208) * b[:, 192:208].view(torch.int8)
    return (scale.unsqueeze(-1) * values.view(-1, 16, 16)).flatten(1)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_values(qs: Tensor) -> Tensor:
    """Codebook values of a run of packed nibbles, low ones first: uint8 ``[..., k]`` to float32 ``[..., 2, k]``."""
    codebook = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=qs.device)
    return codebook[_nibbles(qs).int()]


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b, 0) * _iq4_values(b[:, 2:]).flatten(1)


def _iq4_xs(b: Tensor) -> Tensor:
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=-1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = ((b[:, 2:4, None] >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    values = _iq4_values(b[:, 8:].reshape(-1, 8, 16)).flatten(2)
    return ((_half(b, 0) * scales).unsqueeze(-1) * values).flatten(1)


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
