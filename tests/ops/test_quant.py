"""Block formats against the numpy reference of the gguf package: equal to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from block_data import random_blocks

from paceline.ops.quant import BLOCKS, QuantTensor, dequantize, dequantize_rows, pack


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("qtype", BLOCKS)
def test_equals_the_gguf_package_to_the_bit(qtype: str) -> None:
    q = random_blocks(qtype, 600, 512)
    raw = q.data.numpy()
    if qtype in ("F32", "F16"):
        raw = raw.view({"F32": np.float32, "F16": np.float16}[qtype])
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype])
    got = dequantize(q)
    assert got.shape == q.shape == want.shape
    assert torch.equal(bits(got), bits(torch.from_numpy(want)))


@pytest.mark.parametrize("qtype", BLOCKS)
def test_block_sizes_are_those_of_the_gguf_package(qtype: str) -> None:
    assert BLOCKS[qtype][:2] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]


@pytest.mark.parametrize("qtype", BLOCKS)
def test_rows_are_the_rows_of_the_whole(qtype: str) -> None:
    q = random_blocks(qtype, 9, 256, seed=1)
    ids = torch.tensor([[8, 0], [3, 3]])
    assert torch.equal(dequantize_rows(q, ids), dequantize(q)[ids])


def test_other_dtypes_are_rounded_once_from_float32() -> None:
    q = random_blocks("Q6_K", 4, 256)
    assert torch.equal(dequantize(q, torch.bfloat16), dequantize(q).bfloat16())


def test_pack_keeps_shape_and_values() -> None:
    values = torch.randn(2, 3, 5).bfloat16()
    q = pack(values.transpose(0, 1))
    assert (q.qtype, q.shape, q.nbytes) == ("BF16", (3, 2, 5), 60)
    assert torch.equal(dequantize(q, torch.bfloat16), values.transpose(0, 1))


def test_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match="IQ1_S"):
        dequantize(QuantTensor(torch.zeros(1, 50, dtype=torch.uint8), "IQ1_S", (1, 256)))
