"""Norm kernels against float64, and the same bits for a row wherever and however it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.ops.norm import gated_rms_norm, l2_norm, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SHAPES = [(70, 5120), (70, 100), (70, 24, 256), (70, 3, 96)]
NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rms": lambda x, gate, weight: rms_norm(x, weight, 1e-6),
    "l2": lambda x, gate, weight: l2_norm(x),
    "gated": lambda x, gate, weight: gated_rms_norm(x, gate, weight, 1e-6),
}


def exact(name: str, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    x, gate, weight = x.double(), gate.double(), weight.double()
    square = (x * x).sum(-1, keepdim=True)
    if name == "l2":
        return x / (square + 1e-6).sqrt()
    y = x / (square / x.shape[-1] + 1e-6).sqrt() * weight
    return y * gate * gate.sigmoid() if name == "gated" else y


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x, gate = (torch.randn(*shape, generator=generator, device="cuda") for _ in range(2))
    magnitude = 10.0 ** torch.randint(-4, 5, (shape[0],), generator=generator, device="cuda")
    return x * magnitude.view(-1, *[1] * (len(shape) - 1)), 4.0 * gate, torch.rand(shape[-1], device="cuda") + 0.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_close_to_exact(name: str, shape: tuple[int, ...]) -> None:
    x, gate, weight = inputs(shape)
    # a sum of squares in float32 is good to 1e-6, the rest is a handful of roundings
    torch.testing.assert_close(NORMS[name](x, gate, weight).double(), exact(name, x, gate, weight), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_rows_do_not_depend_on_their_place(name: str, shape: tuple[int, ...]) -> None:
    x, gate, weight = inputs(shape)
    norm, whole = NORMS[name], NORMS[name](x, gate, weight)
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert torch.equal(norm(x[chosen], gate[chosen], weight), whole[chosen]), f"{rows} rows"
    wide = torch.full((71, *shape[1:-1], shape[-1] + 3), torch.nan, device="cuda")
    wide[1:, ..., 1 : shape[-1] + 1] = x
    assert torch.equal(norm(wide[1:, ..., 1 : shape[-1] + 1], gate, weight), whole), "not contiguous, not aligned"
    wide[1:, ..., 1 : shape[-1] + 1] = gate
    assert torch.equal(norm(x, wide[1:, ..., 1 : shape[-1] + 1], weight), whole), "gate not contiguous, not aligned"
