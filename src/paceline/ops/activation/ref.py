"""Activations from exp, log1p and division only (see ``paceline.ops``)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.linear.rows import Rows


def sigmoid(x: Tensor) -> Tensor:
    return _one_plus_exp_minus(x).reciprocal_()


def silu(x: Tensor) -> Tensor:
    below = _one_plus_exp_minus(x)
    return torch.div(x, below, out=below)


def _one_plus_exp_minus(x: Tensor) -> Tensor:
    """1 + e^-x, in one buffer: on a CPU each new one costs page faults."""
    return torch.neg(x).exp_().add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), and x itself above 20, as in torch."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def swiglu(gate: Tensor, up: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    """silu(gate) * up, [N, F] each. On a GPU ``operand``, float16 or float32, asks for ``Rows`` of this type, which saves
    ``linear`` a launch; elsewhere it changes nothing."""
    return silu(gate) * up


def gated_heads(o: Tensor, gate: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    """o * sigmoid(gate), [N, heads, D] each, as rows [N, heads * D]; ``operand`` as in ``swiglu``."""
    return (o * sigmoid(gate)).flatten(1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1)."""
    return cap * (1.0 - 2.0 / (torch.exp(2.0 * x / cap) + 1.0))
