"""Random weights in every stored type."""

from __future__ import annotations

import numpy as np
import torch

from paceline.ops.quant import BLOCKS, QuantTensor, pack

# Byte offsets of the float16 fields inside a block; random bytes there could be an infinity or a NaN.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(qtype: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    rng = np.random.default_rng(seed)
    elements, size, _ = BLOCKS[qtype]
    if qtype in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[qtype]
        return pack(torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype))
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for at in HALVES[qtype]:
        blocks[:, at : at + 2] = rng.standard_normal(len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return QuantTensor(torch.from_numpy(blocks).view(rows, -1), qtype, (rows, columns))
