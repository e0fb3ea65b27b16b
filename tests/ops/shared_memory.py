"""Compile kernels for a GPU that is not here, as a program of its own: ``shared_memory.py CAPABILITY``. Prints, as JSON, the
bytes of shared memory that the largest forms of the kernels that need most of it take where there is little."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from absent_gpu import pretend
from block_data import random_blocks
from triton.runtime.jit import JITFunction

from paceline.batch import pack
from paceline.config import CacheType
from paceline.ops import launch
from paceline.ops.kv import allocate_pages
from paceline.types import RowKind

CPU = torch.device("cpu")


def compile_only(sizes: dict[str, int]) -> None:
    """Launches compile, and note what the kernel takes."""
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        sizes[name] = max(sizes.get(name, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compiled


def attend(kind: RowKind, cache: CacheType, dim: int) -> None:
    from paceline.ops.attention.kernel import attention

    k, v = (allocate_pages(cache, 40, 4, dim, CPU) for _ in range(2))
    rows = 8 if kind == "decode" else 128
    batch = pack(kind, [rows], [300 if kind == "decode" else 0], CPU, [0])
    attention(torch.zeros(rows, 24, dim), k, v, torch.zeros(1, 40, dtype=torch.int32), batch, scale=0.1, causal=True)


def walk_chunks() -> None:
    from paceline.ops.gdn.kernel import gdn_prefill

    q, v, gates = torch.zeros(107, 2, 128), torch.zeros(107, 6, 128), torch.zeros(107, 6)
    batch = pack("prefill", [107], [0], CPU, [0])
    gdn_prefill(q, q, v, gates, gates, torch.zeros(1, 6, 128, 128), torch.arange(6) % 2, batch)


def multiply(form: str, rows: int) -> None:
    from paceline.ops.linear.kernel import linear
    from paceline.ops.linear.tiles import tile

    weight = tile(random_blocks(form, 256, 2048), torch.bfloat16, CPU)
    linear(torch.zeros(rows, 2048), weight, "decode")


def main(capability: int) -> None:
    pretend(capability)
    setattr(launch, "has_little_shared_memory", lambda device: True)  # noqa: B010
    sizes: dict[str, int] = {}
    compile_only(sizes)
    attend("prefill", "f16", 256)
    attend("prefill", "q8_0", 128)
    attend("decode", "f16", 256)
    walk_chunks()
    for rows in (1, 17, 33):
        multiply("Q6_K", rows)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main(int(sys.argv[1]))
