"""What lies between the two matrices of an MLP, and the first of them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.activation import swiglu
from paceline.ops.linear import Merged, Rows, linears
from paceline.types import RowKind


def mlp_hidden(
    x: Tensor | Rows, gate_up: Merged, longest: float | None, kind: RowKind, operand: torch.dtype | None = None
) -> Tensor | Rows:
    """silu(gate x) * up x [M, F] of x [M, H]; ``operand`` as in ``swiglu``. ``longest`` is what ``longest_rows`` says of the
    weights, which only a kernel needs."""
    gate, up = linears(x, gate_up, kind)
    return swiglu(gate, up, operand)
