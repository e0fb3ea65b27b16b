"""Building blocks shared by the target and the drafter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.ops.activation import swiglu
from paceline.ops.linear import PackedWeight, TiledWeight, linear, pack
from paceline.ops.norm import rms_norm
from paceline.ops.quant import QuantTensor, dequantize_rows
from paceline.types import RowKind


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without storage, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ, weight [out, in], products of ``dtype``. A weight comes either from the loader in its stored form (``keep``)
    or as a dense parameter of ``dense_dtype`` (by default ``dtype``), which ``pack``, called once after loading, moves into
    the layout that the product wants."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, dense_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = parameter(outputs, inputs, dtype=dense_dtype or dtype)
        self.packed: PackedWeight | TiledWeight | None = None

    def keep(self, weight: QuantTensor, device: torch.device) -> None:
        self.packed = pack(weight, self.dtype, device)
        self._parameters.pop("weight", None)

    def pack(self) -> None:
        if self.packed is None:
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
    """Rows of a table [vocab, hidden], float32: kept dense, or in its stored form, whose rows are decoded when asked for."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden)
        self.stored: QuantTensor | None = None

    def keep(self, weight: QuantTensor, device: torch.device) -> None:
        self.stored = weight.to(device)
        del self.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.stored is not None:
            return dequantize_rows(self.stored, token_ids)
        return self.weight[token_ids]

    def share(self, head: Linear) -> None:
        """Let ``head`` multiply by this table."""
        if self.stored is not None:
            head.keep(self.stored, self.stored.data.device)
        else:
            head.weight = self.weight


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, dtype)
        self.up_proj = Linear(hidden, intermediate, dtype)
        self.down_proj = Linear(intermediate, hidden, dtype)

    def forward(self, x: Tensor, kind: RowKind) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x, kind), self.up_proj(x, kind)), kind)
