"""Building blocks shared by the target and the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.ops.conv import Convolved
from paceline.ops.linear import (
    Merged,
    PackedWeight,
    Rows,
    TiledWeight,
    compile_ahead,
    expanded,
    linear,
    linears,
    merge,
    pack,
)
from paceline.ops.mlp import longest_rows, mlp_hidden
from paceline.ops.norm import add_rms_norm, add_rms_norm_twice
from paceline.ops.quant import QuantTensor, dequantize_rows
from paceline.types import RowKind

Delta = Tensor | Convolved
"""What a sublayer adds to the residual stream."""


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter without storage, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


def operand_type(dtype: torch.dtype) -> torch.dtype:
    """What a GPU's products of type ``dtype`` multiply: all 16-bit ones are of float16."""
    return torch.float32 if dtype == torch.float32 else torch.float16


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

    def expand(self, room: int) -> int:
        """Keep the form that prompt rows multiply, if it takes at most ``room`` bytes; how many it takes."""
        if self.packed is None:
            return 0
        self.packed, size = expanded(self.packed, room)
        return size

    @property
    def multiplied(self) -> tuple[PackedWeight | TiledWeight, ...]:
        """The weights that it multiplies by, none if they are a sibling's."""
        return () if self.packed is None else (self.packed,)

    def forward(self, x: Tensor | Rows, kind: RowKind) -> Tensor:
        assert self.packed is not None, "pack() has not been called"
        return linear(x, self.packed, kind)


class Siblings:
    """Linear modules that share their input, as few products as possible. It is no module itself: the members stay where the
    checkpoint has them, but hand over their weights, or a copy where others need them ``too``."""

    def __init__(self, *members: Linear, too: bool = False) -> None:
        self._members, self.too = members, too
        self._merged: Merged | None = None

    def expand(self, room: int) -> int:
        """As ``Linear.expand``."""
        weights, taken = [], 0
        for weight in self.weights.weights:
            kept, size = expanded(weight, room - taken)
            weights.append(kept)
            taken += size
        self._merged = replace(self.weights, weights=tuple(weights))
        return taken

    def merge(self) -> None:
        """Once after the members have been packed."""
        weights = []
        for member in self._members:
            assert member.packed is not None, "pack() has not been called"
            weights.append(member.packed)
            if not self.too:
                member.packed = None
        self._merged = merge(weights)

    @property
    def multiplied(self) -> tuple[PackedWeight | TiledWeight, ...]:
        return self.weights.weights

    @property
    def weights(self) -> Merged:
        assert self._merged is not None, "merge() has not been called"
        return self._merged

    def __call__(self, x: Tensor | Rows, kind: RowKind) -> list[Tensor]:
        """[N, in] -> a tensor [N, out] of each member, in order."""
        return linears(x, self.weights, kind)


def products(module: nn.Module) -> Iterator[Linear | Siblings]:
    """Everything in a model that multiplies by weights."""
    for part in module.modules():
        if isinstance(part, Linear):
            yield part
        yield from (value for value in vars(part).values() if isinstance(value, Siblings))


def finish(module: nn.Module) -> None:
    """Pack every product of a loaded model, merge siblings, and measure what kernels have to know of the result."""
    for product in products(module):
        if isinstance(product, Linear):
            product.pack()
    siblings = [product for product in products(module) if isinstance(product, Siblings)]
    for product in sorted(siblings, key=lambda product: not product.too):
        product.merge()
    mlps = [part for part in module.modules() if isinstance(part, MLP)]
    for mlp in mlps:
        mlp.measure()
    gated = [weight for mlp in mlps if mlp.longest is not None for weight in mlp.gate_up.weights.weights]
    compile_ahead([weight for product in products(module) for weight in product.multiplied], gated)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def after(self, x: Tensor, delta: Delta | None, operand: torch.dtype | None) -> tuple[Tensor, Tensor | Rows]:
        """(x + delta, its norm as the input of products of type ``operand``, or None: as a plain tensor)."""
        return add_rms_norm(x, delta, self.weight, self.eps, operand)

    def after_twice(self, x: Tensor, delta: Delta | None, operand: torch.dtype) -> tuple[Tensor, Tensor, Tensor | Rows]:
        """(x + delta, its norm as a plain tensor, and as the input of products of type ``operand``)."""
        return add_rms_norm_twice(x, delta, self.weight, self.eps, operand)


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
        self.gate_up = Siblings(self.gate_proj, self.up_proj)
        self.longest: float | None = None
        self.operand = operand_type(dtype)

    def measure(self) -> None:
        """Once after the weights have been merged."""
        self.longest = longest_rows(self.gate_up.weights)

    def forward(self, x: Tensor | Rows, kind: RowKind) -> Tensor:
        return self.down_proj(mlp_hidden(x, self.gate_up.weights, self.longest, kind, self.operand), kind)
