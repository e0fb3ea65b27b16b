"""Activations against torch's own in float64, also where exponentials overflow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.activation import gated_heads, sigmoid, silu, softcap, softplus, swiglu

X = torch.cat((torch.linspace(-30, 30, 2401), torch.tensor([0.0, 20.0, 20.000002, -87.0, 1e-30])))
EXTREMES = torch.tensor([-1e30, -1000.0, 1000.0, 1e30])


def close(got: Tensor, expected: Tensor, *, absolute: float = 1e-12) -> None:
    # exp is good to one unit in the last place of its result, which is the argument's relative error times |x| <= 88
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=absolute)


def test_sigmoid() -> None:
    close(sigmoid(X), torch.sigmoid(X.double()))
    assert sigmoid(EXTREMES).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_silu() -> None:
    close(silu(X), F.silu(X.double()))
    assert torch.equal(silu(EXTREMES), torch.where(EXTREMES > 0, EXTREMES, 0.0))


def test_softplus() -> None:
    close(softplus(X), torch.log1p(torch.exp(X.double())))
    assert torch.equal(softplus(EXTREMES), torch.where(EXTREMES > 0, EXTREMES, 0.0))


def test_swiglu() -> None:
    up = torch.linspace(-5, 7, len(X))
    got = swiglu(X, up)
    assert isinstance(got, Tensor)
    close(got, F.silu(X.double()) * up.double())


def test_softcap() -> None:
    # 1 - 2 / (e^2y + 1) cancels near 0: the error is a rounding of 1, times the cap
    for cap in (15.0, 30.0):
        close(softcap(X, cap), cap * torch.tanh(X.double() / cap), absolute=cap * 2.0**-22)
        assert softcap(EXTREMES, cap).tolist() == [-cap, -cap, cap, cap]


def test_gated_heads() -> None:
    o, gate = X[:2400].view(5, 3, 160), X[:2400].flip(0).view(5, 3, 160)
    got = gated_heads(o, gate, torch.float16)
    assert isinstance(got, Tensor)
    close(got, (o.double() * torch.sigmoid(gate.double())).view(5, 480), absolute=1e-11)
