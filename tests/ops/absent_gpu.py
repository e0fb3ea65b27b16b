"""A GPU that is not here, for programs that compile for it or ask what would be compiled."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    """A driver that says which GPU to compile for, and has none."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def pretend(capability: int) -> None:
    driver.set_active(Absent(capability))
