"""An MLP's hidden numbers on a CPU: the composition of their parts."""

from __future__ import annotations

import torch

from paceline.ops.activation import swiglu
from paceline.ops.linear import linear, merge, pack
from paceline.ops.mlp import longest_rows, mlp_hidden


def test_is_silu_of_the_gate_times_up() -> None:
    torch.manual_seed(0)
    gate, up = (pack(torch.randn(96, 64)) for _ in range(2))
    x, merged = torch.randn(5, 64), merge([gate, up])
    hidden = mlp_hidden(x, merged, None, "decode")
    apart = swiglu(linear(x, gate, "decode"), linear(x, up, "decode"))
    assert isinstance(hidden, torch.Tensor) and isinstance(apart, torch.Tensor) and torch.equal(hidden, apart)


def test_nothing_is_measured_where_no_kernel_needs_it() -> None:
    assert longest_rows(merge([pack(torch.ones(256, 64)) for _ in range(2)])) is None
