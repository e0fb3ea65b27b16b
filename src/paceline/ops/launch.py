"""What launches depend on a GPU for: whether they overlap, and how much shared memory there is.

Launches overlap by programmatic dependent launch (NVIDIA GPUs from compute capability 9.0 on).

In a stream a kernel begins when the one before it has ended, and beginning takes as long as a small kernel does. Launched
with ``pdl`` it may begin earlier: as soon as every program of the one before has called ``await_turn``, or ended. There it
waits until that one has ended and its writes can be seen. So a kernel launched with ``pdl``

- calls ``await_turn`` in every program, on every path: the next kernel takes it that what is before this one has ended too;
- calls it before it touches anything that another kernel may write or still read. What is left are weights, and what only
  changes between forwards: the facts of a batch, page tables, and committed states, histories, keys and values. A forward
  writes keys and values of its own rows only, behind those that are committed; kernels that change committed states and
  histories call ``await_turn_alone``, and between a commit, or the drafter's context that is made of committed rows, and
  the next forward something is launched without ``pdl``, if only the forward's graph.

A kernel launched without it waits for everything, and what is launched behind it, for it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def pdl(device: torch.device) -> dict[str, bool]:
    """Keywords for the launch of a kernel that calls ``await_turn`` with its constant ``PDL``."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


_SMALL = 128 << 10


@functools.cache
def has_little_shared_memory(device: torch.device) -> bool:
    """Whether a program has about 100 KiB of it, as on GPUs of compute capability 8.6, 8.9 and 12.0, and not 160 or more."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin < _SMALL


@triton.jit
def await_turn(PDL: tl.constexpr):
    """Let the next kernel begin, and wait until the one before has ended."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def await_turn_alone(PDL: tl.constexpr):
    """Wait until the one before has ended. The next kernel begins when this one has ended too."""
    if PDL:
        gdc_wait()
