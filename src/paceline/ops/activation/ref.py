"""Activations from exp, log1p and division only (see ``paceline.ops``)."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), and x itself above 20, as in torch."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with tanh(y) = 1 - 2 / (e^2y + 1)."""
    return cap * (1.0 - 2.0 / (torch.exp(2.0 * x / cap) + 1.0))
