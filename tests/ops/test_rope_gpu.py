"""The rotation kernel against the reference on a CPU in float64."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.rope import RopeTable, apply_rope

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
