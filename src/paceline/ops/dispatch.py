"""Which implementation of an op runs: its kernel where the tensors live on a GPU, the torch reference elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

_forced: ContextVar[Literal["ref"] | None] = ContextVar("forced", default=None)


def uses_kernels(device: torch.device) -> bool:
    """Whether ops on tensors of ``device`` run as kernels."""
    return device.type == "cuda" and _forced.get() is None


def by_device(reference: Function, kernel_module: str) -> Function:
    """The op ``reference``, or the function of the same name in ``kernel_module`` when its first tensor is on a GPU.

    The module is imported on first use, because Triton is installed only where there is a GPU.
    """

    @functools.wraps(reference)
    def op(*arguments: Any, **keywords: Any) -> Any:
        first = next(a for a in arguments if isinstance(a, Tensor))
        if uses_kernels(first.device):
            kernel = getattr(importlib.import_module(kernel_module), reference.__name__)
            return kernel(*arguments, **keywords)
        return reference(*arguments, **keywords)

    return cast(Function, op)


@contextmanager
def force(implementation: Literal["ref"]) -> Iterator[None]:
    """Run the references on every device, to compare with."""
    token = _forced.set(implementation)
    try:
        yield
    finally:
        _forced.reset(token)
