from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.ops import nvrtc
from paceline.ops.attention import hopper, ref
from paceline.ops.attention.pieces import pieces_of
from paceline.ops.attention.ref import KEY_BLOCK, QUERY_TILE
from paceline.ops.dispatch import by_device, uses_kernels
from paceline.ops.linear import Merged, TiledWeight, row_norms

attention = by_device(ref.attention, "paceline.ops.attention.kernel")
attention_inputs = by_device(ref.attention_inputs, "paceline.ops.attention.kernel")
gated_attention = by_device(ref.gated_attention, "paceline.ops.attention.kernel")

_PORTABLE = "portable-4"
"""What a Hopper GPU runs too, where heads, pages or groups are not those of its own kernel."""
_SMALLEST_NORMAL = 2.0**-14
"""Of float16. What is below it may be stored as twice of what it is."""


def attention_arithmetic(device: torch.device) -> str:
    """Which attention of generated rows runs on ``device``, with its version: others give other bits."""
    if not uses_kernels(device):
        return "reference-1"
    return f"hopper-{hopper.VERSION} {_PORTABLE}" if nvrtc.available(device) else _PORTABLE


def value_bound(projections: Merged, values: int, norm: Tensor) -> float | None:
    """Of the values that part ``values`` of a product makes of rows behind a norm of weight ``norm``: such a row is at most
    as long as the root of its numbers times the largest weight, and a value at most that times the norm of its row of the
    projection. Twice that leaves room for all that is rounded until a value has been stored, read and weighted. None where
    no kernel needs it, it is not finite, or as small as what float16 cannot store well."""
    index, rows = projections.parts[values]
    weight = projections.weights[index]
    if not isinstance(weight, TiledWeight) or weight.form == "F32":
        return None
    bound = 2.0 * math.sqrt(len(norm)) * float(norm.abs().max() * row_norms(weight)[rows].max())
    return bound if _SMALLEST_NORMAL <= bound < math.inf else None


__all__ = [
    "KEY_BLOCK",
    "QUERY_TILE",
    "attention",
    "attention_arithmetic",
    "attention_inputs",
    "gated_attention",
    "pieces_of",
    "value_bound",
]
