"""The rotation kernel against the reference on a CPU in float64, and with a norm before it against the two one by one."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.norm import rms_norm
from paceline.ops.rope import RopeTable, apply_rope, norm_and_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize(("dim", "rotary"), [(256, 64), (128, 128), (96, 24), (64, 64)])
def test_equals_the_reference_and_rows_do_not_depend_on_their_place(dim: int, rotary: int) -> None:
    both = 30 * torch.randn(70, 5, 2, dim, generator=torch.Generator().manual_seed(0))
    positions = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:70]
    tables = [RopeTable(5000, rotary, 1e7, None, torch.device(device)) for device in ("cpu", "cuda")]
    cos, sin = tables[0].at(positions)
    x = both[:, :, 0]
    whole = apply_rope(x.cuda(), tables[1].at(positions.cuda()))
    expected = apply_rope(x.double(), (cos.double(), sin.double()))
    torch.testing.assert_close(whole.cpu().double(), expected, rtol=1e-6, atol=1e-5)
    for rows in range(1, 71):
        chosen = torch.randperm(70)[:rows]
        angles = tables[1].at(positions[chosen].cuda())
        assert torch.equal(apply_rope(both.cuda()[chosen.cuda()][:, :, 0], angles), whole[chosen.cuda()])


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(8, 128, 128), (2, 256, 64), (1, 96, 24)])
def test_norm_and_rope_is_as_good_as_one_after_the_other(heads: int, dim: int, rotary: int) -> None:
    """Of layers that lie in one product, and of one that lies elsewhere, not aligned. Rows are the same in any company."""
    rows, width, generator = 70, heads * dim, torch.Generator("cuda").manual_seed(0)
    wide = 30 * torch.randn(rows, 5 * width, generator=generator, device="cuda")
    other = torch.full((rows, width + 3), torch.nan, device="cuda")
    other[:, 3:] = wide[:, 2 * width : 3 * width].square()
    layers = [x.unflatten(1, (heads, dim)) for x in (wide[:, :width], wide[:, 2 * width : 3 * width], other[:, 3:])]
    weights = 1.0 + 0.1 * torch.randn(3, dim, generator=generator, device="cuda")
    table, positions = RopeTable(5000, rotary, 1e7, None, wide.device), torch.randperm(5000, device="cuda")[:rows]
    whole = norm_and_rope(layers, weights, 1e-6, table, positions)
    for got, x, weight in zip(whole, layers, weights, strict=True):
        expected = apply_rope(rms_norm(x, weight, 1e-6), table.at(positions))
        assert (got - expected).abs().max() < 1e-6 * expected.abs().max()  # which sums and products are fused is left open
    for count in (1, 2, 7, 48, 69):
        chosen = torch.randperm(rows, device="cuda")[:count]
        part = norm_and_rope([x[chosen] for x in layers], weights, 1e-6, table, positions[chosen])
        assert torch.equal(part, whole[:, chosen]), f"{count} rows"
