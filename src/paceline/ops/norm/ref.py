"""Normalisations over the last dimension, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.activation import silu
from paceline.ops.conv import Convolved, dynamic_conv
from paceline.ops.linear.rows import Rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight; x [..., D] float32, weight [D] is the effective weight (no + 1)."""
    x = x.contiguous()
    scale = 1.0 / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return x * scale * weight


def add_rms_norm(
    x: Tensor, delta: Tensor | Convolved | None, weight: Tensor, eps: float, operand: torch.dtype | None = None
) -> tuple[Tensor, Tensor | Rows]:
    """(x + delta, its ``rms_norm``): the residual stream [N, H] behind a sublayer that adds ``delta`` (None: nothing), and
    the input of the next one. On a GPU ``operand``, float16 or float32, asks for that input as ``Rows`` of this type, which
    saves ``linear`` a launch; elsewhere it changes nothing."""
    if isinstance(delta, Convolved):
        mixed = dynamic_conv(delta.x.unflatten(0, delta.dynamic.shape[:2]), delta.base, delta.dynamic)
        assert isinstance(mixed, Tensor)
        delta = mixed.flatten(0, 1)
    if delta is not None:
        x = x + delta
    return x, rms_norm(x, weight, eps)


def add_rms_norm_twice(
    x: Tensor, delta: Tensor | Convolved | None, weight: Tensor, eps: float, operand: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | Rows]:
    """``add_rms_norm`` where the norm is wanted as numbers and as what products multiply: (x + delta, its norm [N, H], what
    ``linear`` makes of that one: on a GPU ``Rows`` of type ``operand``)."""
    total, n = add_rms_norm(x, delta, weight, eps)
    assert isinstance(n, Tensor)
    return total, n, n


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x²) + eps); eps sits inside the root of the *sum* (Gated DeltaNet), so zeros stay zeros."""
    x = x.contiguous()
    return x * (1.0 / ((x * x).sum(-1, keepdim=True) + eps).sqrt())


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate): the output norm of a Gated-DeltaNet head; x, gate [..., Dv], weight [Dv]."""
    return rms_norm(x, weight, eps) * silu(gate)


def gated_output(o: Tensor, z: Tensor, weight: Tensor, eps: float, operand: torch.dtype | None = None) -> Tensor | Rows:
    """``gated_rms_norm`` of every head, o and z [N, Hv, Dv], as rows [N, Hv * Dv]; ``operand`` as in ``add_rms_norm``."""
    return gated_rms_norm(o, z, weight, eps).flatten(1)
