from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.ops import nvrtc
from paceline.ops.dispatch import by_device, uses_kernels
from paceline.ops.gdn import hopper, ref
from paceline.ops.gdn.ref import CHUNK_PLAN, GdnInputs, ReplayLog, chunk_facts
from paceline.ops.linear import Merged, TiledWeight, row_norms
from paceline.ops.linear.hopper import takes

gdn_inputs = by_device(ref.gdn_inputs, "paceline.ops.gdn.kernel")
gdn_verify = by_device(ref.gdn_verify, "paceline.ops.gdn.kernel")
gdn_mixer = by_device(ref.gdn_mixer, "paceline.ops.gdn.kernel")
gdn_replay = by_device(ref.gdn_replay, "paceline.ops.gdn.kernel")
gdn_prefill = by_device(ref.gdn_prefill, "paceline.ops.gdn.kernel")


def output_bound(in_proj: Merged, gate: int, norm: Tensor) -> float | None:
    """Of ``gdn_mixer``, whose z is part ``gate`` of a product, for the weight ``norm``: an output is a normed number, at
    most the root of their number times its weight, times silu(z), at most the norm of the product's input times that of a
    row of z's weight. None where the launch is not for these weights or this GPU."""
    index, rows = in_proj.parts[gate]
    weight = in_proj.weights[index]
    if not (isinstance(weight, TiledWeight) and takes(weight)):
        return None
    return math.sqrt(len(norm)) * float(norm.abs().max() * row_norms(weight)[rows].max())


def verify_arithmetic(device: torch.device) -> str:
    """Which kernels generated rows of heads of 128 by 128 go through on ``device``, with their version: those of different
    names give different bits."""
    if not uses_kernels(device):
        return "reference-1"
    return f"hopper-{hopper.VERSION}" if nvrtc.available(device) else "portable-1"


__all__ = [
    "CHUNK_PLAN",
    "GdnInputs",
    "ReplayLog",
    "chunk_facts",
    "gdn_inputs",
    "gdn_mixer",
    "gdn_prefill",
    "gdn_replay",
    "gdn_verify",
    "output_bound",
    "verify_arithmetic",
]
