"""Activations on a GPU: the kernels against float64, and all of them the same for a row wherever it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops import activation
from paceline.ops.linear import Rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


OPERANDS = [None, torch.float32, torch.float16]


def check(got: Tensor | Rows, expected: Tensor) -> None:
    """Against float64; in float16 what is far below a row's largest may vanish."""
    if isinstance(got, Tensor):
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-30)
        return
    assert not got.values[: got.rows, got.columns :].any(), "padding"
    values = got.values[: got.rows, : got.columns].double() * got.factors[: got.rows, None].double()
    half = got.values.dtype == torch.float16
    largest = expected.abs().amax(1, keepdim=True)
    bound = (2.0**-11 + 2e-6 if half else 2e-6) * expected.abs() + (2.0**-19 * largest if half else 0.0) + 1e-30
    assert ((values - expected).abs() <= bound).all()


def same(got: Tensor | Rows, whole: Tensor | Rows, chosen: Tensor) -> bool:
    if isinstance(got, Tensor) and isinstance(whole, Tensor):
        return torch.equal(got, whole[chosen])
    assert isinstance(got, Rows) and isinstance(whole, Rows)
    values = torch.equal(got.values[: got.rows], whole.values[chosen])
    return values and torch.equal(got.factors[: got.rows], whole.factors[chosen])


@pytest.fixture(autouse=True)
def poison() -> None:
    """Memory that is handed out again holds NaN: what a kernel leaves unwritten is seen."""
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in (2**12, 2**16, 2**20, 2**22) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize("size", [37, 1024, 4352, 17408])
def test_swiglu(size: int, operand: torch.dtype | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    both = 8.0 * torch.randn(70, 2 * size, generator=generator, device="cuda")
    both[0, :5] = torch.tensor([-100.0, 100.0, -1e4, 0.0, 1e4])
    both[1], both[2], both[3] = 0.0, both[2] * 1e-4, both[3] * 1e5
    gate, up = both.split(size, dim=1)
    whole = activation.swiglu(gate, up, operand)
    check(whole, gate.double() * gate.double().sigmoid() * up.double())
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert same(activation.swiglu(gate[chosen], up[chosen], operand), whole, chosen), f"{rows} rows"
    moved = torch.full((70, 2 * size + 1), torch.nan, device="cuda")
    moved[:, 1:] = both
    got = activation.swiglu(moved[:, 1 : size + 1], moved[:, size + 1 :], operand)
    assert same(got, whole, torch.arange(70, device="cuda")), "not aligned"


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(24, 256), (3, 96), (32, 128)])
def test_gated_heads(heads: int, dim: int, operand: torch.dtype | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    o = torch.randn(70, heads, dim, generator=generator, device="cuda")
    gate = 8.0 * torch.randn(70, heads, 2, dim, generator=generator, device="cuda")[:, :, 1]
    gate[2], o[3] = -150.0, o[3] * 1e6
    whole = activation.gated_heads(o, gate, operand)
    check(whole, (o.double() * gate.double().sigmoid()).flatten(1))
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert same(activation.gated_heads(o[chosen], gate[chosen], operand), whole, chosen), f"{rows} rows"


def test_rows_are_those_that_a_product_would_make() -> None:
    from paceline.ops.linear.kernel import prepare

    gate, up = (4.0 * torch.randn(9, 1000, generator=torch.Generator("cuda").manual_seed(i), device="cuda") for i in (0, 1))
    up *= 10.0 ** torch.arange(-4, 5, device="cuda")[:, None]
    plain, rows = activation.swiglu(gate, up), activation.swiglu(gate, up, torch.float16)
    assert isinstance(plain, Tensor) and isinstance(rows, Rows)
    assert same(rows, prepare(plain, torch.float16), torch.arange(9, device="cuda"))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elements_do_not_depend_on_their_place(name: str) -> None:
    function = getattr(activation, name)
    x = 8.0 * torch.randn(70, 37, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    whole = function(x)
    for rows in range(1, 71):
        chosen = torch.randperm(70, device="cuda")[:rows]
        assert torch.equal(function(x[chosen]), whole[chosen]), f"{rows} rows"
    assert torch.equal(function(x.t()), whole.t())
