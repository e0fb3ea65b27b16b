from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.ops import nvrtc
from paceline.ops.dispatch import by_device, uses_kernels
from paceline.ops.linear import hopper, ref
from paceline.ops.linear.merged import Merged, merge
from paceline.ops.linear.ref import TILE_ROWS, PackedWeight
from paceline.ops.linear.rows import Rows
from paceline.ops.linear.tiles import TILE_ROWS as TILE
from paceline.ops.linear.tiles import TiledWeight, tile
from paceline.ops.quant import QuantTensor
from paceline.types import RowKind

__all__ = [
    "TILE_ROWS",
    "Merged",
    "PackedWeight",
    "Rows",
    "TiledWeight",
    "compile_ahead",
    "decode_arithmetic",
    "expanded",
    "linear",
    "linears",
    "merge",
    "pack",
    "row_norms",
]

_KERNEL = "paceline.ops.linear.kernel"
_ROWS_AT_ONCE = 4096

linear = by_device(ref.linear, _KERNEL)
_products = by_device(ref.products, _KERNEL)


def linears(x: Tensor | Rows, weights: Sequence[PackedWeight | TiledWeight] | Merged, kind: RowKind) -> list[Tensor]:
    """``linear`` of x [M, K] with each of several weights [N_i, K]: float32 [M, N_i], of merged weights column slices of one
    tensor."""
    if not isinstance(weights, Merged):
        return _products(x, weights, kind)
    products = _products(x, weights.weights, kind)
    return [products[index][:, columns] for index, columns in weights.parts]


def decode_arithmetic(device: torch.device) -> str:
    """Which decode product runs on ``device``, with its version: products of different names give different bits."""
    if not uses_kernels(device):
        return "reference-1"
    if nvrtc.available(device):
        return f"hopper-{hopper.VERSION}"
    return "portable-2"


def expanded(weight: PackedWeight | TiledWeight, room: int) -> tuple[PackedWeight | TiledWeight, int]:
    """The weight with the 16-bit form that prompt rows multiply kept beside it, if that takes at most ``room`` bytes, and
    how many it takes. Only quantised weights on a GPU have one; without it each prefill product makes its own."""
    if not isinstance(weight, TiledWeight) or not weight.unit_bytes or weight.expanded is not None:
        return weight, 0
    needed = 2 * weight.tiles * TILE * weight.columns
    if needed > room:
        return weight, 0
    kernel = importlib.import_module(_KERNEL)
    return dataclasses.replace(weight, expanded=kernel.expand(weight)), needed


def compile_ahead(weights: Iterable[PackedWeight | TiledWeight], gated: Iterable[PackedWeight | TiledWeight]) -> None:
    """What decode products with these weights will run, and with SwiGLU those that are ``gated``, if that is compiled at run
    time: all at once, and once on a machine."""
    compiled = [[each for each in some if isinstance(each, TiledWeight) and hopper.takes(each)] for some in (weights, gated)]
    if any(compiled):
        hopper.compile_ahead(*compiled)


def row_norms(weight: TiledWeight) -> Tensor:
    """The norm [N] of each row of a weight, as the products have it."""
    dense = expanded(weight, 2 * weight.tiles * TILE * weight.columns)[0]
    assert isinstance(dense, TiledWeight)
    parts = (dense.data if dense.expanded is None else dense.expanded).split(_ROWS_AT_ONCE)
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32) for rows in parts])
    return weight.scale * norms[: weight.shape[0]]


def pack(
    weight: Tensor | QuantTensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> PackedWeight | TiledWeight:
    """Prepare a weight [N, K] for ``linear`` on ``device``, by default the one it is on.

    ``dtype``, by default a dense weight's own, is the type of the products: see ``ref.pack`` and, for a GPU, ``tiles.tile``.
    """
    device = device or weight.data.device
    if dtype is None:
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
    if uses_kernels(device):
        return tile(weight, dtype, device)
    return ref.pack(weight, dtype, device)
