"""Which implementation of an op runs: its kernel where the tensors live on a GPU, the torch reference elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

Implementation = Literal["ref", "portable", "kernel"]

_forced: ContextVar[Implementation | None] = ContextVar("forced", default=None)


def uses_kernels(device: torch.device) -> bool:
    """Whether ops on tensors of ``device`` run as kernels."""
    forced = _forced.get()
    return forced == "kernel" or (device.type == "cuda" and forced != "ref")


def uses_special_kernels() -> bool:
    """Whether kernels written for one generation of GPUs may be used in place of the portable ones."""
    return _forced.get() is None


def by_device(reference: Function, kernel_module: str) -> Function:
    """The op ``reference``, or the function of the same name in ``kernel_module`` when its first argument that is on a
    device is on a GPU.

    The module is imported on first use, because Triton is installed only where there is a GPU.
    """

    @functools.wraps(reference)
    def op(*arguments: Any, **keywords: Any) -> Any:
        device = next(a.device for a in arguments if isinstance(getattr(a, "device", None), torch.device))
        if uses_kernels(device):
            kernel = getattr(importlib.import_module(kernel_module), reference.__name__)
            return kernel(*arguments, **keywords)
        return reference(*arguments, **keywords)

    return cast(Function, op)


@contextmanager
def force(implementation: Implementation) -> Iterator[None]:
    """Run the references on every device, or only kernels that run on every GPU, to compare with; or kernels on a CPU too,
    which Triton's interpreter can."""
    token = _forced.set(implementation)
    try:
        yield
    finally:
        _forced.reset(token)
