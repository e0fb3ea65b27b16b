from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops import nvrtc
from paceline.ops.linear import Merged, Rows, TiledWeight, hopper, row_norms
from paceline.ops.linear.rows import COLUMN_STEP
from paceline.ops.mlp import ref
from paceline.types import RowKind

__all__ = ["longest_rows", "mlp_hidden"]


def mlp_hidden(
    x: Tensor | Rows, gate_up: Merged, longest: float | None, kind: RowKind, operand: torch.dtype | None = None
) -> Tensor | Rows:
    """See ``ref.mlp_hidden``. Decode rows that have norms are one launch on Hopper GPUs."""
    if (
        kind == "decode"
        and longest is not None
        and isinstance(x, Rows)
        and x.norms is not None
        and nvrtc.available(x.device)
    ):
        weight = gate_up.weights[0]
        assert isinstance(weight, TiledWeight)
        return hopper.decode_swiglu(x, weight, longest)
    return ref.mlp_hidden(x, gate_up, longest, kind, operand)


def longest_rows(gate_up: Merged) -> float | None:
    """The norm of gate's longest row times that of up's, by which a row's hidden numbers are bounded; None where no launch
    multiplies by both and applies SwiGLU."""
    weight, *others = gate_up.weights
    (_, gate), (_, up) = gate_up.parts
    features = gate.stop - gate.start
    if others or not isinstance(weight, TiledWeight) or not hopper.takes(weight):
        return None
    if features % COLUMN_STEP or (up.start, up.stop) != (features, 2 * features):
        return None
    norms = row_norms(weight)
    return float(norms[:features].max() * norms[features:].max())
