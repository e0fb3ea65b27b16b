"""``linear``: y = x Wᵀ with the same bits for a row whatever the number of rows.

Rows are cut into tiles of a fixed number of rows, the last one padded with zeros, and each tile is one product of one
shape. On a CPU the weight is reordered once into oneDNN's blocked layout (1.5 to 3 times faster than an unpacked
product at these sizes); where oneDNN is missing the tiles go through ``torch.nn.functional.linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.linear.rows import Rows
from paceline.ops.linear.tiles import TiledWeight
from paceline.ops.quant import QuantTensor, dequantize
from paceline.types import RowKind

TILE_ROWS: dict[RowKind, int] = {"decode": 16, "prefill": 64}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A dense weight [N, K] ready for ``linear``; ``blocked`` says that ``data`` is in oneDNN's own layout."""

    data: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    blocked: bool


def pack(weight: Tensor | QuantTensor, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """A dense weight [N, K] on ``device``, its values rounded once to ``dtype`` (float32, bfloat16 or float16)."""
    if isinstance(weight, QuantTensor):
        weight = dequantize(weight, dtype)
    weight = weight.to(device, dtype)
    rows, columns = weight.shape
    blocked = weight.device.type == "cpu" and _blocked_layout_available(weight.dtype)
    data = weight.contiguous()
    if blocked:
        data = torch.ops.mkldnn._reorder_linear_weight(data, TILE_ROWS["decode"])
    return PackedWeight(data, (rows, columns), weight.dtype, blocked)


def _blocked_layout_available(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def linear(x: Tensor | Rows, weight: PackedWeight | TiledWeight | QuantTensor, kind: RowKind) -> Tensor:
    """x [M, K] (any float type, any strides; on a GPU also ``Rows``) times weight [N, K] transposed -> float32 [M, N].

    x is rounded to the weight's type, products accumulate in float32, and their sums are rounded to the weight's type once
    more where the library returns that type (bfloat16, float16). A ``QuantTensor`` is dequantised to bfloat16 or
    float32, whichever x has, on each call: the same values as dequantising at load.
    """
    if isinstance(x, Rows) or isinstance(weight, TiledWeight):
        raise TypeError("rows and weights made for the kernels cannot be used with the reference")
    if isinstance(weight, QuantTensor):
        weight = pack(weight, x.dtype, x.device)
    rows, tile = x.shape[0], TILE_ROWS[kind]
    source = F.pad(x.to(weight.dtype), (0, 0, 0, -rows % tile)).contiguous()
    out = torch.empty(source.shape[0], weight.shape[0], device=x.device)
    for target, part in zip(out.split(tile), source.split(tile), strict=True):
        target.copy_(_product(part, weight))
    return out[:rows]


def products(x: Tensor | Rows, weights: Sequence[PackedWeight | TiledWeight], kind: RowKind) -> list[Tensor]:
    """``linear`` with each of the weights."""
    return [linear(x, weight, kind) for weight in weights]


def _product(tile: Tensor, weight: PackedWeight) -> Tensor:
    if weight.blocked:
        return torch.ops.mkldnn._linear_pointwise(tile, weight.data, None, "none", [], "")
    return F.linear(tile, weight.data)
