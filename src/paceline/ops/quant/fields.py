"""Where the numbers are in a GGUF block. Layouts: ggml's ``ggml-common.h``.

``b`` is uint8 ``[n, block_bytes]``. Scales ``d`` and ``dmin`` are float32 ``[n, 1]`` (stored as float16), everything else
is integers: sub-block scales and minima ``[n, subs]``, codes ``[n, elements]`` or ``[n, subs, elements / subs]``, in the
order of the elements.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook of IQ4_NL and IQ4_XS."""


def half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` as float32 ``[n, 1]``."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(qs: Tensor) -> Tensor:
    """Low nibbles of every byte, then the high nibbles: ``[..., k]`` to ``[..., 2, k]``."""
    return torch.stack((qs & 15, qs >> 4), dim=-2)


def bits(planes: Tensor, shifts: range, mask: int) -> Tensor:
    """``(planes >> s) & mask`` for every shift: ``[..., k]`` to ``[..., len(shifts), k]``."""
    return torch.stack([(planes >> s) & mask for s in shifts], dim=-2)


def fifth_bits(qh: Tensor) -> Tensor:
    """Bit ``e`` of the four bytes is bit 4 of element ``e``: uint8 ``[n, 4]`` to ``[n, 32]``, values 0 or 16."""
    return (bits(qh, range(8), 1).transpose(-1, -2) << 4).flatten(1)


def two_bits(qs: Tensor) -> Tensor:
    """Q2_K and Q3_K: two halves of 32 bytes, each holding four runs of 32 elements: ``[n, 64]`` to ``[n, 8, 32]``."""
    return bits(qs.reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1, 2)


def iq4_values(indices: Tensor) -> Tensor:
    """Codebook values, float32, of 4-bit indices of any shape."""
    return _codebook(indices.device)[indices.int()]


@functools.cache
def _codebook(device: torch.device) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


def q8_0(b: Tensor) -> tuple[Tensor, Tensor]:
    """d, codes (int8)."""
    return half(b, 0), b[:, 2:].view(torch.int8)


def q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    """d, codes -8...7 (int8)."""
    return half(b, 0), (nibbles(b[:, 2:]).view(torch.int8) - 8).flatten(1)


def q5_0(b: Tensor) -> tuple[Tensor, Tensor]:
    """d, codes -16...15 (int8)."""
    return half(b, 0), (nibbles(b[:, 6:]).flatten(1) | fifth_bits(b[:, 2:6])).view(torch.int8) - 16


def q3_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d, 16 scales (int8), codes -4...3 (int8)."""
    packed = b[:, 96:108]
    low = nibbles(packed[:, :8]).flatten(1)
    high = bits(packed[:, 8:], range(0, 8, 2), 3).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    # A cleared bit of the mask means that 4 is to be subtracted.
    low_by = (bits(b[:, :32], range(8), 1) ^ 1) << 2
    codes = two_bits(b[:, 32:96]).view(torch.int8) - low_by.view(torch.int8)
    return half(b, 108), scales, codes.view(-1, 16, 16)


def _six_bit_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The twelve bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima, each ``[n, 8]``."""
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def q4_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d, dmin, 8 scales, 8 minima, codes 0...15; a value is d * scale * code - dmin * minimum."""
    return half(b, 0), half(b, 2), *_six_bit_scales(b[:, 4:16]), nibbles(b[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)


def q5_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As ``q4_k`` with codes 0...31."""
    low = nibbles(b[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    codes = low | (bits(b[:, 16:48], range(8), 1) << 4)
    return half(b, 0), half(b, 2), *_six_bit_scales(b[:, 4:16]), codes


def q6_k(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d, 16 scales (int8), codes -32...31 (int8)."""
    low = nibbles(b[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = bits(b[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3)
    codes = (low | (high << 4)).view(torch.int8) - 32
    return half(b, 208), b[:, 192:208].view(torch.int8), codes.view(-1, 16, 16)


def iq4_nl(b: Tensor) -> tuple[Tensor, Tensor]:
    """d, codebook indices."""
    return half(b, 0), nibbles(b[:, 2:]).flatten(1)


def iq4_xs(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d, 8 scales -32...31 (int8), codebook indices."""
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), dim=-1).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = ((b[:, 2:4, None] >> shifts) & 3).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    return half(b, 0), scales, nibbles(b[:, 8:].reshape(-1, 8, 16)).flatten(2)
