from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import by_device, uses_kernels
from paceline.ops.linear import ref
from paceline.ops.linear.ref import TILE_ROWS, PackedWeight
from paceline.ops.linear.tiles import TiledWeight, tile
from paceline.ops.quant import QuantTensor

__all__ = ["TILE_ROWS", "PackedWeight", "TiledWeight", "linear", "pack"]

linear = by_device(ref.linear, "paceline.ops.linear.kernel")


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
