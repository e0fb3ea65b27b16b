"""Weights as the GPU products read them: the numbers of a GGUF matrix, none of them rounded, in the order in which the
tensor cores want them.

A matrix [N, K] is padded to tiles of 128 rows and blocks of 256 columns, and each (tile, block) lies in one piece. Inside,
row = 16 w + 8 r + g and column = 128 h + 32 s + 16 i + 8 j + 2 t + p, where w is a warp, (g, t) the lane of it that
multiplies this element, and (r, i, j, p) say which of the lane's registers holds it. In memory:

``codes``   int32 [h, r, w, g, t, s]: eight codes (i, j, p) of 4 bits, or four of 8 bits, those of i = 0
``high``    what does not fit there. Q5_K: int32 [h, r, w, g, t], a fifth bit for the codes of four words; Q6_K: int32
            [h, r, w, g, t, s / 2], two bits for the codes of two words; Q8_0: like ``codes``, those of i = 1
``scales``  [r, w, g, h, s], one entry per 32 columns. IQ4_XS: uint8, scale + 32; Q4_K and Q5_K: int16, the scale and in the
            upper byte the minimum; Q6_K: int16, two scales + 128, one for each i; Q8_0: float16 d
``d``       [r, w, g], one entry per 256 columns. IQ4_XS and Q6_K: float32; Q4_K and Q5_K: two float16, d and dmin

The codes p = 0 and p = 1 are 16 bits apart, so that one step makes a pair of float16 of them; IQ4_XS keeps its eight codes
in order, as indices for a byte permutation. Padding has scale zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight [N, K] = ``shape`` on a GPU. ``form`` is IQ4_XS, Q4_K, Q5_K, Q6_K or Q8_0, or F16 or F32, which are dense:
    then ``codes`` is the padded matrix divided by ``scale``, a power of two. Arrays that a form has no use for are empty."""

    form: str
    shape: tuple[int, int]
    codes: Tensor
    high: Tensor
    scales: Tensor
    d: Tensor
    scale: float = 1.0

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
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.codes, self.high, self.scales, self.d))


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
    largest = max(float(tiled.codes.max()), -float(tiled.codes.min()))
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
    none = torch.empty(0, dtype=torch.int32, device=device)
    tiled = TiledWeight(form, (stored.shape[0], stored.shape[1]), none, none, none, none, scale)
    codes = torch.zeros(tiled.tiles * TILE_ROWS, tiled.columns, dtype=dtype, device=device)
    for part, start in _chunks(stored, device):
        codes[start : start + part.shape[0], : part.shape[1]] = dequantize(part) / scale
    return TiledWeight(form, tiled.shape, codes, none, none, none, scale)


def _quantised(stored: QuantTensor, device: torch.device | str) -> tuple[TiledWeight, float]:
    """The weight, and a bound of its magnitudes."""
    form, numbers_of = _FORMS[stored.qtype]
    rows, columns = stored.shape
    tiles = -(-rows // TILE_ROWS)
    arrays: tuple[Tensor, ...] = ()
    largest = torch.zeros((), device=device)
    for part, start in _chunks(stored, device):
        numbers = numbers_of(part.data.reshape(-1, BLOCKS[stored.qtype][1]))
        largest = torch.maximum(largest, numbers.bound)
        arranged = _arranged(form, numbers, part.shape[0], columns)
        if not arrays:
            arrays = tuple(torch.empty(tiles, *a.shape[1:], dtype=a.dtype, device=device) for a in arranged)
        first = start // TILE_ROWS
        for array, a in zip(arrays, arranged, strict=True):
            array[first : first + a.shape[0]] = a
    codes, high, scales, d = arrays
    return TiledWeight(form, (rows, columns), codes, high, scales, d), float(largest)


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
    return _Numbers(codes, (scales + 32).view(torch.uint8), d, (d * scales).abs().max() * 127)


def _q6_k(d: Tensor, scales: Tensor, codes: Tensor) -> _Numbers:
    """codes -32...31"""
    pairs = (scales.view(torch.uint8) ^ 128).view(torch.int16)
    return _Numbers((codes + 32).view(torch.uint8), pairs, d, (d * scales).abs().max() * 32)


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


def _arranged(form: str, numbers: _Numbers, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, high, scales and d of whole tiles, as the module's description says, the first index being the tile."""
    blocks = -(-columns // 256)

    def padded(x: Tensor, per_block: int) -> Tensor:
        x = x.reshape(rows, x.numel() // rows)
        return F.pad(x, (0, per_block * blocks - x.shape[1], 0, -rows % TILE_ROWS))

    codes = padded(numbers.codes, 256).view(-1, 8, 2, 8, blocks, 2, 4, 2, 2, 4, 2)  # tile w r g block h s i j t p
    codes = codes.permute(0, 4, 5, 2, 1, 3, 9, 6, 7, 8, 10)  # tile block h r w g t s i j p
    scales = padded(numbers.scales, 8).view(-1, 8, 2, 8, blocks, 8).permute(0, 4, 2, 1, 3, 5)
    d = numbers.d
    if d.numel():
        d = padded(d, 1).view(-1, 8, 2, 8, blocks).permute(0, 4, 2, 1, 3)
    none = codes.new_empty(codes.shape[0], 0)
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
