"""Sampling parameters per row of a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.sampling import SamplingRows
from paceline.types import Request


def sampling_rows(draws: Sequence[tuple[Request, int]], device: torch.device) -> SamplingRows:
    """One row per (request, absolute index of the token being drawn)."""
    requests = [request for request, _ in draws]
    return SamplingRows.from_lists(
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        min_p=[request.min_p for request in requests],
        seed=[request.seed for request in requests],
        choice=[0] * len(requests),
        position=[position for _, position in draws],
        device=device,
    )
