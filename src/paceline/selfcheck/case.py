"""What a case is, how it is checked, and the random circumstances that may not matter."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Rng = np.random.Generator
Outputs = list[tuple[Tensor, ...]]
"""For each item of a batch the tensors that belong to it."""

_MIN_BATCHES = 24


@dataclass(frozen=True, slots=True)
class Case:
    """``items`` rows or lanes with fixed contents, and a way to compute any of them together.

    ``compute(chosen, rng)`` puts the chosen items into one batch, in that order. Whatever else there is to say about the
    batch (strides, pages, cuts, what lies in memory that nobody should read) it draws from ``rng``: none of it may change
    a bit. ``ops`` names the functions under test.
    """

    name: str
    ops: tuple[str, ...]
    items: int
    compute: Callable[[Sequence[int], Rng], Outputs]


@torch.inference_mode()
def violation(case: Case, threads: Sequence[int]) -> str | None:
    """Compare each item alone, under one thread, with itself in batches of every size, composition and order.

    Returns None, or a sentence about the first batch in which bits differ. Deterministic.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    with _threads() as set_threads:
        set_threads(1)
        alone = [case.compute([item], rng)[0] for item in range(case.items)]
        for batch in range(max(case.items, _MIN_BATCHES)):
            size = 1 + batch % case.items
            chosen = rng.permutation(case.items)[:size].tolist()
            count = int(rng.choice(threads))
            set_threads(count)
            for item, got in zip(chosen, case.compute(chosen, rng), strict=True):
                difference = _difference(alone[item], got)
                if difference:
                    return f"item {item} in a batch of {size} under {count} thread(s): {difference}"
    return None


def _difference(expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> str | None:
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a.isnan().any():
            return f"output {index} is NaN when computed alone"
        if not torch.equal(a, b):
            where = f"{int((a != b).sum())} of {a.numel()} values" if a.shape == b.shape else f"{b.shape} for {a.shape}"
            return f"output {index} differs in {where}"
    return None


@contextmanager
def _threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    try:
        yield torch.set_num_threads
    finally:
        torch.set_num_threads(before)


def randn(rng: Rng, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def laid_out(x: Tensor, rng: Rng) -> Tensor:
    """The same values in another memory layout: contiguous, every other element of a wider tensor, stored transposed, or
    behind one element that spoils the alignment."""
    choice = rng.integers(4)
    if choice == 1:
        wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if choice == 2 and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if choice == 3:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x.contiguous()
