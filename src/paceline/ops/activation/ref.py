"""Activations from exp, log1p and division only (see ``paceline.ops``)."""

from __future__ import annotations

import torch
from torch import Tensor


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


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [N, F] each, as rows for ``linear``."""
    return silu(gate) * up


def gated_heads(o: Tensor, gate: Tensor) -> Tensor:
    """o * sigmoid(gate), [N, heads, D] each, as rows [N, heads * D] for ``linear``."""
    return (o * sigmoid(gate)).flatten(1)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1)."""
    return cap * (1.0 - 2.0 / (torch.exp(2.0 * x / cap) + 1.0))
