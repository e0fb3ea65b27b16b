import torch

from paceline.ops.dispatch import by_device, uses_kernels
from paceline.ops.gdn import hopper, ref
from paceline.ops.gdn.ref import CHUNK_PLAN, GdnInputs, ReplayLog, chunk_facts

gdn_inputs = by_device(ref.gdn_inputs, "paceline.ops.gdn.kernel")
gdn_verify = by_device(ref.gdn_verify, "paceline.ops.gdn.kernel")
gdn_replay = by_device(ref.gdn_replay, "paceline.ops.gdn.kernel")
gdn_prefill = by_device(ref.gdn_prefill, "paceline.ops.gdn.kernel")


def verify_arithmetic(device: torch.device) -> str:
    """Which verify runs on ``device`` for heads of 128 by 128, with its version: those of different names give different
    bits."""
    if not uses_kernels(device):
        return "reference-1"
    return f"hopper-{hopper.VERSION}" if hopper.runs_on(device) else "portable-1"


__all__ = [
    "CHUNK_PLAN",
    "GdnInputs",
    "ReplayLog",
    "chunk_facts",
    "gdn_inputs",
    "gdn_prefill",
    "gdn_replay",
    "gdn_verify",
    "verify_arithmetic",
]
