"""Weights as the GPU products read them: the numbers of a GGUF matrix, none of them rounded, in the order in which the
tensor cores want them.

A matrix [N, K] is padded to tiles of 128 rows and blocks of 256 columns. Each (tile, block) is one contiguous *unit*, which
a bulk copy can fetch. Inside, row = 16 w + 8 r + g and column = 128 h + 32 s + 16 i + 8 j + 2 t + p, where w is a warp,
(g, t) the lane of it that multiplies this element, and (r, i, j, p) say which of the lane's registers holds it. A unit has,
one after the other:

``codes``   int32 [h, r, w, g, t, s]: eight codes (i, j, p) of 4 bits, or four of 8 bits, those of i = 0
``high``    what does not fit there. Q5_K: int32 [h, r, w, g, t], a fifth bit for the codes of four words; Q6_K: int32
            [h, r, w, g, t, s / 2], two bits for the codes of two words; Q8_0: like ``codes``, those of i = 1
``scales``  [w, g, h, s, r], one entry per 32 columns. IQ4_XS: uint8, scale + 32; Q4_K and Q5_K: int16, the scale and in
            the upper byte the minimum; Q6_K: int16, two scales + 128, one for each i; Q8_0: float16 d
``d``       [w, g, r], one entry per 256 columns. IQ4_XS and Q6_K: float16; Q4_K and Q5_K: int32, float16 d and dmin

The codes p = 0 and p = 1 are 16 bits apart, so that one step makes a pair of float16 of them; IQ4_XS keeps its eight codes
in order, as indices for a byte permutation. Padding has the value zero. In IQ4_XS and Q6_K a d of zero is stored as one,
with scales of zero: a product may divide its accumulators by d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops import quant
from paceline.ops.quant import BLOCKS, QuantTensor, dequantize, fields

TILE_ROWS = 128
_DENSE_COLUMNS = {"F16": 64, "F32": 32}
_FLOAT16_MAX = 65504.0
_FLOAT16_WINDOW = (2.0**-6, 2.0**15)
"""A matrix whose largest magnitude is in here becomes float16 as it is: what is too small for its normal range is 2^-8 of
the largest value or less, and off by at most 2^-19 of it."""
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class _Array:
    """One of the arrays of a unit."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_NONE = _Array(torch.int32, (0,))
_LANES = (2, 2, 8, 8, 4)
_CODES = _Array(torch.int32, (*_LANES, 4))
_SCALES = (8, 8, 2, 4, 2)
_UNITS = {
    "IQ4_XS": (_CODES, _NONE, _Array(torch.uint8, _SCALES), _Array(torch.float16, (8, 8, 2))),
    "Q4_K": (_CODES, _NONE, _Array(torch.int16, _SCALES), _Array(torch.int32, (8, 8, 2))),
    "Q5_K": (_CODES, _Array(torch.int32, _LANES), _Array(torch.int16, _SCALES), _Array(torch.int32, (8, 8, 2))),
    "Q6_K": (_CODES, _Array(torch.int32, (*_LANES, 2)), _Array(torch.int16, _SCALES), _Array(torch.float16, (8, 8, 2))),
    "Q8_0": (_CODES, _CODES, _Array(torch.float16, _SCALES), _NONE),
}
"""codes, high, scales and d of each form."""


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight [N, K] = ``shape`` on a GPU. ``form`` is IQ4_XS, Q4_K, Q5_K, Q6_K or Q8_0 and ``data`` uint8 [tiles, blocks,
    unit_bytes], or it is F16 or F32, which are dense, and ``data`` the padded matrix over ``scale``, a power of two.
    ``expanded`` may hold what a prefill product makes of ``data``, float16 [tiles * 128, columns]."""

    form: str
    shape: tuple[int, int]
    data: Tensor
    scale: float = 1.0
    expanded: Tensor | None = None

    @property
    def block_columns(self) -> int:
        return _DENSE_COLUMNS.get(self.form, 256)

    @property
    def tiles(self) -> int:
        return -(-self.shape[0] // TILE_ROWS)

    @property
    def blocks(self) -> int:
        return -(-self.shape[1] // self.block_columns)

    @property
    def columns(self) -> int:
        """K with its padding."""
        return self.blocks * self.block_columns

    @property
    def unit_bytes(self) -> int:
        """0 for a dense form."""
        return unit_bytes(self.form) if self.form in _UNITS else 0

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of codes, high, scales and d, [tiles, blocks, ...]; empty where a form has no use for one."""
        codes, high, scales, d = _split(self.form, self.data)
        return codes, high, scales, d

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def unit_bytes(form: str) -> int:
    """Size of a unit of a form that is not dense."""
    return sum(array.nbytes for array in _UNITS[form])


def _split(form: str, units: Tensor) -> list[Tensor]:
    """Typed views of the arrays in ``units`` uint8 [tiles, blocks, unit_bytes]."""
    arrays = _UNITS[form]
    parts = units.split([array.nbytes for array in arrays], dim=-1)
    return [part.view(array.dtype).unflatten(-1, array.shape) for part, array in zip(parts, arrays, strict=True)]


def joined(weights: Sequence[TiledWeight]) -> TiledWeight:
    """Weights of equal form, K and scale below each other; between them is the padding of their tiles."""
    first, last = weights[0], weights[-1]
    rows = sum(weight.tiles for weight in weights[:-1]) * TILE_ROWS + last.shape[0]
    return TiledWeight(first.form, (rows, first.shape[1]), torch.cat([weight.data for weight in weights]), first.scale)


def tile(weight: QuantTensor | Tensor, dtype: torch.dtype, device: torch.device | str) -> TiledWeight:
    """Bring a stored or dense weight [N, K] to ``device``, some rows at a time, in the form that its product reads.

    ``dtype`` is the type of the products. For float32 the weight becomes dense float32. For a 16-bit type IQ4_XS, Q4_K,
    Q5_K, Q6_K and Q8_0 stay what they are; Q4_0, Q5_0 and IQ4_NL become Q8_0 and Q3_K becomes Q6_K, without loss;
    everything else becomes dense float16, times a power of two where it would leave the range of that type.
    """
    stored = weight if isinstance(weight, QuantTensor) else quant.pack(weight)
    if dtype == torch.float32:
        return _dense(stored, "F32", device, 1.0)
    if stored.qtype in _FORMS:
        tiled, largest = _quantised(stored, device)
        if largest <= _FLOAT16_MAX:
            return tiled
    tiled = _dense(stored, "F16", device, 1.0)
    largest = max(float(tiled.data.max()), -float(tiled.data.min()))
    if _FLOAT16_WINDOW[0] <= largest <= _FLOAT16_WINDOW[1]:
        return tiled
    largest = max(float(dequantize(part).abs().max()) for part, _ in _chunks(stored, device))
    if not 0 < largest < float("inf"):
        return tiled
    return _dense(stored, "F16", device, 2.0 ** (math.frexp(largest)[1] - 15))  # then the largest is 2^14 to 2^15


def _chunks(stored: QuantTensor, device: torch.device | str) -> Iterator[tuple[QuantTensor, int]]:
    """Whole tiles of rows on the device, and the index of the first row."""
    rows, columns = stored.shape
    step = max(1, _CHUNK_ELEMENTS // columns // TILE_ROWS) * TILE_ROWS
    for start in range(0, rows, step):
        data = stored.data[start : start + step].to(device)
        yield QuantTensor(data, stored.qtype, (data.shape[0], columns)), start


def _dense(stored: QuantTensor, form: str, device: torch.device | str, scale: float) -> TiledWeight:
    dtype = {"F16": torch.float16, "F32": torch.float32}[form]
    rows, columns = stored.shape
    block = _DENSE_COLUMNS[form]
    data = torch.zeros(-(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // block) * block, dtype=dtype, device=device)
    for part, start in _chunks(stored, device):
        data[start : start + part.shape[0], : part.shape[1]] = dequantize(part) / scale
    return TiledWeight(form, (rows, columns), data, scale)


def _quantised(stored: QuantTensor, device: torch.device | str) -> tuple[TiledWeight, float]:
    """The weight, and a bound of its magnitudes."""
    form, numbers_of = _FORMS[stored.qtype]
    rows, columns = stored.shape
    data = torch.empty(-(-rows // TILE_ROWS), -(-columns // 256), unit_bytes(form), dtype=torch.uint8, device=device)
    largest = torch.zeros((), device=device)
    for part, start in _chunks(stored, device):
        numbers = numbers_of(part.data.reshape(-1, BLOCKS[stored.qtype][1]))
        largest = torch.maximum(largest, numbers.bound)
        arranged = _arranged(form, numbers, part.shape[0], columns)
        units = data[start // TILE_ROWS :][: arranged[0].shape[0]]
        for array, values in zip(_split(form, units), arranged, strict=True):
            array.copy_(values)
    return TiledWeight(form, (rows, columns), data), float(largest)


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """What blocks of one type hold, row by row, as their form stores it: codes (unsigned), scales, d, and a bound of the
    magnitudes of the values."""

    codes: Tensor
    scales: Tensor
    d: Tensor
    bound: Tensor


def _q8_0(d: Tensor, codes: Tensor) -> _Numbers:
    """codes -128...127"""
    return _Numbers(codes.view(torch.uint8) ^ 128, d.half(), d[:0], 128 * d.abs().max())


def _iq4_xs(b: Tensor) -> _Numbers:
    d, scales, codes = fields.iq4_xs(b)
    return _Numbers(codes, (scales + 32).view(torch.uint8), d.half(), (d * scales).abs().max() * 127)


def _q6_k(d: Tensor, scales: Tensor, codes: Tensor) -> _Numbers:
    """codes -32...31"""
    pairs = (scales.view(torch.uint8) ^ 128).view(torch.int16)
    return _Numbers((codes + 32).view(torch.uint8), pairs, d.half(), (d * scales).abs().max() * 32)


def _q5_k(d: Tensor, dmin: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> _Numbers:
    """codes 0...31"""
    pairs = torch.stack((scales, minima), dim=-1).view(torch.int16)
    bound = (d * scales).abs().max() * 31 + (dmin * minima).abs().max()
    return _Numbers(codes, pairs, torch.cat((d, dmin), dim=1).half().view(torch.int32), bound)


def _iq4_nl(d: Tensor, indices: Tensor) -> _Numbers:
    return _q8_0(d, fields.iq4_values(indices).to(torch.int8))


_FORMS: dict[str, tuple[str, Callable[[Tensor], _Numbers]]] = {
    "IQ4_XS": ("IQ4_XS", _iq4_xs),
    "Q4_K": ("Q4_K", lambda b: _q5_k(*fields.q4_k(b))),
    "Q5_K": ("Q5_K", lambda b: _q5_k(*fields.q5_k(b))),
    "Q6_K": ("Q6_K", lambda b: _q6_k(*fields.q6_k(b))),
    "Q3_K": ("Q6_K", lambda b: _q6_k(*fields.q3_k(b))),
    "Q8_0": ("Q8_0", lambda b: _q8_0(*fields.q8_0(b))),
    "Q4_0": ("Q8_0", lambda b: _q8_0(*fields.q4_0(b))),
    "Q5_0": ("Q8_0", lambda b: _q8_0(*fields.q5_0(b))),
    "IQ4_NL": ("Q8_0", lambda b: _iq4_nl(*fields.iq4_nl(b))),
}
"""Stored type: the form that holds the same values."""
_ZERO_SCALE = {"IQ4_XS": 32, "Q6_K": (128 << 8 | 128) - (1 << 16)}
"""What stands for a scale of zero, or two, where a product divides by d."""


def _arranged(form: str, numbers: _Numbers, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, high, scales and d of whole tiles, as the module's description says, the first index being the tile."""
    blocks = -(-columns // 256)

    def padded(x: Tensor, per_block: int) -> Tensor:
        x = x.reshape(rows, x.numel() // rows)
        return F.pad(x, (0, per_block * blocks - x.shape[1], 0, -rows % TILE_ROWS))

    codes = padded(numbers.codes, 256).view(-1, 8, 2, 8, blocks, 2, 4, 2, 2, 4, 2)  # tile w r g block h s i j t p
    codes = codes.permute(0, 4, 5, 2, 1, 3, 9, 6, 7, 8, 10)  # tile block h r w g t s i j p
    scales, d = padded(numbers.scales, 8), numbers.d
    if d.numel():
        d = padded(d, 1)
    if form in _ZERO_SCALE:
        zero = d == 0
        d = d.masked_fill(zero, 1.0)
        scales = scales.masked_fill(zero.repeat_interleave(8, 1), _ZERO_SCALE[form])
    scales = scales.view(-1, 8, 2, 8, blocks, 2, 4).permute(0, 4, 1, 3, 5, 6, 2)  # tile block w g h s r
    if d.numel():
        d = d.view(-1, 8, 2, 8, blocks).permute(0, 4, 1, 3, 2)
    none = codes.new_empty(*codes.shape[:2], 0)
    if form == "Q8_0":
        return _word(codes[..., 0, :, :], 8, 16), _word(codes[..., 1, :, :], 8, 16), scales, none
    if form == "IQ4_XS":
        return _word(codes, 16, 8, 4), none, scales, d
    low, high = _word(codes & 15, 8, 4, 16), codes >> 4
    if form == "Q4_K":
        return low, none, scales, d
    if form == "Q5_K":
        return low, _word(high, 4, 2, 1, 16), scales, d
    return low, _word(high.unflatten(7, (2, 2)), 8, 4, 2, 16), scales, d


def _word(values: Tensor, *bits: int) -> Tensor:
    """int32 with the small integers of the last ``len(bits)`` dimensions side by side, one step of an index so many bits."""
    values = values.int()
    for step in reversed(bits):
        shift = step * torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)
        values = (values << shift).sum(-1, dtype=torch.int32)
    return values
