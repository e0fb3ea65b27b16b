"""Activations on a GPU: the swiglu kernel against float64, and all of them the same for an element wherever it is."""

from __future__ import annotations

import pytest
import torch

from paceline.ops import activation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("size", [37, 1024, 17408])
def test_swiglu(size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    both = 8.0 * torch.randn(70, 2 * size, generator=generator, device="cuda")
    both[0, :5] = torch.tensor([-100.0, 100.0, -1e4, 0.0, 1e4])
    gate, up = both.split(size, dim=1)
    whole = activation.swiglu(gate, up)
    expected = gate.double() * gate.double().sigmoid() * up.double()
    torch.testing.assert_close(whole.double(), expected, rtol=2e-6, atol=1e-30)
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert torch.equal(activation.swiglu(gate[chosen], up[chosen]), whole[chosen]), f"{rows} rows"


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elements_do_not_depend_on_their_place(name: str) -> None:
    function = getattr(activation, name)
    x = 8.0 * torch.randn(70, 37, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    whole = function(x)
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert torch.equal(function(x[chosen]), whole[chosen]), f"{rows} rows"
    assert torch.equal(function(x.t()), whole.t())
