"""Building blocks shared by the target and the drafter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.ops.activation import swiglu
from paceline.ops.linear import PackedWeight, linear, pack
from paceline.ops.norm import rms_norm
from paceline.types import RowKind


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without storage, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ, weight [out, in]. ``pack`` must be called once after loading; it moves the weight into the layout that the
    product wants and frees the loaded one."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        self.packed = pack(self.weight)
        del self.weight

    def forward(self, x: Tensor, kind: RowKind) -> Tensor:
        assert self.packed is not None, "pack() has not been called"
        return linear(x, self.packed, kind)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Rows of a float32 table [vocab, hidden]."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, dtype)
        self.up_proj = Linear(hidden, intermediate, dtype)
        self.down_proj = Linear(intermediate, hidden, dtype)

    def forward(self, x: Tensor, kind: RowKind) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x, kind), self.up_proj(x, kind)), kind)
