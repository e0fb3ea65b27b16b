"""What a case is, how it is checked, and the random circumstances that may not matter."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.ops.dispatch import uses_kernels

CPU = torch.device("cpu")
Outputs = list[tuple[Tensor, ...]]
"""For each item of a batch the tensors that belong to it."""

_MIN_BATCHES = 24
_COLUMNS_BEFORE = 128
"""Where the second of some joined weights begins at the earliest."""
_POISONED = (2**10, 2**14, 2**17, 2**20, 2**22)
"""Elements of blocks of float32: an allocator keeps small and large ones apart."""


class Rng(np.random.Generator):
    """Random numbers, and tensors on ``device``."""

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        super().__init__(np.random.PCG64(seed))
        self.device = device

    def tensor(self, array: np.ndarray) -> Tensor:
        """The numbers of an array that were drawn here."""
        return torch.from_numpy(array).to(self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """``items`` rows or lanes with fixed contents, and a way to compute any of them together.

    ``compute(chosen, rng)`` puts the chosen items into one batch, in that order. Whatever else there is to say about the
    batch (strides, pages, cuts, what lies in memory that nobody should read) it draws from ``rng``: none of it may change
    a bit. ``ops`` names the functions under test, which run on ``device``.
    """

    name: str
    ops: tuple[str, ...]
    items: int
    compute: Callable[[Sequence[int], Rng], Outputs]
    device: torch.device = CPU


@torch.inference_mode()
def violation(case: Case, threads: Sequence[int]) -> str | None:
    """Compare each item alone, under one thread, with itself in batches of every size, composition and order.

    Returns None, or a sentence about the first batch in which bits differ. Deterministic.
    """
    rng = Rng(zlib.crc32(case.name.encode()), case.device)
    with _threads() as set_threads:
        set_threads(1)
        alone = [case.compute([item], rng)[0] for item in range(case.items)]
        for item, outputs in enumerate(alone):
            for index, output in enumerate(outputs):
                if output.isnan().any():
                    return f"item {item}: output {index} is NaN when computed alone"
        for batch in range(max(case.items, _MIN_BATCHES)):
            size = 1 + batch % case.items
            chosen = rng.permutation(case.items)[:size].tolist()
            count = int(rng.choice(threads))
            set_threads(count)
            _poison(case.device)
            difference = _difference(chosen, [alone[item] for item in chosen], case.compute(chosen, rng))
            if difference:
                under = f" under {count} thread(s)" if case.device.type == "cpu" else ""
                item, what = difference
                return f"item {item} in a batch of {size}{under}: {what}"
    return None


def _difference(items: Sequence[int], expected: Outputs, got: Outputs) -> tuple[int, str] | None:
    """The first of ``items`` whose outputs differ, and what does."""
    pairs = zip(zip(*expected, strict=True), zip(*got, strict=True), strict=True)
    if all(torch.equal(_joined(a), _joined(b)) for a, b in pairs):  # one comparison for all items is one wait on a GPU
        return None
    for item, wanted, outputs in zip(items, expected, got, strict=True):
        for index, (a, b) in enumerate(zip(wanted, outputs, strict=True)):
            if not torch.equal(a, b):
                where = f"{int((a != b).sum())} of {a.numel()} values" if a.shape == b.shape else f"{b.shape} for {a.shape}"
                return item, f"output {index} differs in {where}"
    raise AssertionError("outputs differ together but not one by one")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _poison(device: torch.device) -> None:
    """Leave NaN in the memory that a GPU's allocator hands out next, where the results of the last batch would otherwise
    stand in for what a kernel does not write."""
    if device.type == "cuda":
        blocks = [torch.full((size,), torch.nan, device=device) for size in _POISONED]
        del blocks


@contextmanager
def _threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    try:
        yield torch.set_num_threads
    finally:
        torch.set_num_threads(before)


def randn(rng: Rng, *shape: int) -> Tensor:
    return rng.tensor(rng.standard_normal(shape, dtype=np.float32))


def laid_out(x: Tensor, rng: Rng) -> Tensor:
    """The same values in another memory layout: contiguous, every other element of a wider tensor, stored transposed, or
    behind one element that spoils the alignment. On a GPU, where each alignment would be compiled for, the last is instead
    columns of a wider tensor, as they come from weights that were joined."""
    choice = rng.integers(4)
    if choice == 1:
        wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        return wide[..., ::2]
    if choice == 2 and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if choice == 3 and not uses_kernels(x.device):
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    if choice == 3 and x.ndim > 1:
        wide = torch.cat((x.new_zeros(len(x), _COLUMNS_BEFORE), x.flatten(1)), 1)
        return wide[:, _COLUMNS_BEFORE:].unflatten(1, x.shape[1:])
    return x.contiguous()
