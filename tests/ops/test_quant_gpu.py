"""Embedding rows on a GPU: the reference's bits."""

from __future__ import annotations

import pytest
import torch
from block_data import random_blocks

from paceline.ops.quant import BLOCKS, dequantize_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("columns", [256, 5120])
@pytest.mark.parametrize("qtype", BLOCKS)
def test_rows_have_the_bits_of_the_reference(qtype: str, columns: int) -> None:
    table = random_blocks(qtype, 50, columns, seed=2)
    on_gpu, ids = table.to("cuda"), torch.tensor([[49, 0, 7], [7, 31, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize_rows(table, ids, dtype)
        assert torch.equal(dequantize_rows(on_gpu, ids.cuda(), dtype).cpu(), expected)
        assert torch.equal(dequantize_rows(on_gpu, ids[1].cuda()[1:], dtype).cpu(), expected[1, 1:])


def test_half_a_step_of_a_type_with_small_blocks() -> None:
    table, ids = random_blocks("Q8_0", 9, 288), torch.tensor([8, 0, 3])
    assert torch.equal(dequantize_rows(table.to("cuda"), ids.cuda()).cpu(), dequantize_rows(table, ids))


def test_rows_of_nobody_may_have_any_id() -> None:
    table = random_blocks("Q6_K", 9, 512)
    ids = torch.tensor([-1, 4, 9, 2**40, -(2**62)])
    got = dequantize_rows(table.to("cuda"), ids.cuda()).cpu()
    assert torch.equal(got[1], dequantize_rows(table, torch.tensor(4)))
