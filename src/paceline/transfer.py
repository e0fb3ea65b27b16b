"""Small facts on their way to the device: nobody waits for them."""

from __future__ import annotations

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
