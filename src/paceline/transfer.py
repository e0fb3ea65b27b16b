"""Small facts on their way to the device, for which nobody waits, and results on their way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device, into: Tensor | None = None) -> Tensor:
    """A host array on ``device``, in ``into`` (of the same shape and type) where that is given. The array may be changed
    once this returns, except that on a CPU the result shares its memory."""
    source = torch.from_numpy(array)
    if device.type == "cuda":
        source = source.pin_memory()  # from a pinned block, which the allocator keeps until the copy has been made
    if into is not None:
        return into.copy_(source, non_blocking=True)
    return source.to(device, non_blocking=True)


class Arriving:
    """The numbers of a tensor, on their way to the host. What the device is given to do meanwhile is not waited for."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._arrived = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
