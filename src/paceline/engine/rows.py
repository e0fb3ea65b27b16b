"""Sampling parameters per row of a forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.ops.topk import argmax
from paceline.sampling import Kind, SamplingRows, pack_rows, pick
from paceline.transfer import to_device
from paceline.types import Request

Draw = tuple[Request, int]
"""Who draws a token, and its absolute index in the sequence."""


def pack_draws(draws: Sequence[Draw]) -> tuple[np.ndarray, tuple[Kind, ...], tuple[int, ...]]:
    """What ``SamplingRows.unpack`` reads once it is on a device."""
    requests = [request for request, _ in draws]
    return pack_rows(
        temperature=[request.temperature for request in requests],
        top_k=[request.top_k for request in requests],
        top_p=[request.top_p for request in requests],
        min_p=[request.min_p for request in requests],
        seed=[request.seed for request in requests],
        choice=[request.choice for request in requests],
        position=[position for _, position in draws],
    )


def picked(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The token of each draw, [R] int64: ``logits`` [R, V] float32."""
    if all(request.temperature == 0.0 for request, _ in draws):
        return argmax(logits)  # which wants to know nothing else
    packed, kinds, limits = pack_draws(draws)
    return pick(logits, SamplingRows.unpack(to_device(packed, logits.device), kinds, limits))
