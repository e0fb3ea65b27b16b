"""Rotary position embedding, NeoX pairing (i, i + n/2), full or partial, with YaRN scaling.

Angles come from a table that is computed in float64 by blocks of fixed size, so that the entry of a position does not
depend on how long the table is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.config import RopeScaling
from paceline.ops.norm import rms_norm

_BLOCK = 1024


class RopeTable:
    """cos and sin, float32 [length, rotary_dim / 2], for positions 0 … length - 1.

    ``theta`` is the base; with ``scaling`` (YaRN, Peng et al. 2023) the inverse frequencies are blended by a ramp and both
    tables are multiplied by the attention factor.
    """

    def __init__(
        self, length: int, rotary_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
    ) -> None:
        inverse = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        factor = 1.0
        if scaling is not None:
            inverse, factor = _yarn(inverse, rotary_dim, theta, scaling)
        blocks = [
            np.arange(start, start + _BLOCK, dtype=np.float64)[:, None] * inverse for start in range(0, length, _BLOCK)
        ]
        self.cos = _table([np.cos(block) * factor for block in blocks], length, device)
        self.sin = _table([np.sin(block) * factor for block in blocks], length, device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [N, 1, rotary_dim / 2] of positions [N], to be shared by all layers of one forward."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def _table(blocks: list[np.ndarray], length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(blocks)[:length].astype(np.float32)).to(device)


def _yarn(inverse: np.ndarray, dim: int, theta: float, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    def correction(beta: float) -> float:
        return dim * math.log(scaling.original_context_length / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(0, math.floor(correction(scaling.beta_fast)))
    high = min(dim - 1, math.ceil(correction(scaling.beta_slow)))
    pairs = np.arange(dim // 2, dtype=np.float64)
    ramp = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    factor = scaling.attention_factor
    return inverse * (ramp + (1.0 - ramp) / scaling.factor), factor or 1.0 + 0.1 * math.log(scaling.factor)


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first rotary_dim of x [N, heads, D]; the rest passes through. ``angles`` from ``RopeTable.at``."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)


def norm_and_rope(layers: Sequence[Tensor], weights: Tensor, eps: float, table: RopeTable, positions: Tensor) -> Tensor:
    """``apply_rope`` of the ``rms_norm`` of every head of each x [N, heads, D] in ``layers``, whose weights are the rows of
    ``weights`` [layers, D]; ``positions`` [N]. Returns [layers, N, heads, D]."""
    angles = table.at(positions)
    return torch.stack([apply_rope(rms_norm(x, weight, eps), angles) for x, weight in zip(layers, weights, strict=True)])
