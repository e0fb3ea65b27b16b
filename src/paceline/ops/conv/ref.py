"""Short convolutions: the depthwise causal one of Gated DeltaNet, and DFlash2's grouped dynamic one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.ops.activation import silu
from paceline.ops.linear.rows import Rows


def causal_conv(x: Tensor, history: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
    """silu(Σ_i weight[:, i] * x[t - (w-1) + i]) per channel, over the packed spans of ``batch``.

    x [N, C] raw inputs; history [L, w-1, C] the last raw inputs of every lane, oldest first, of which ``batch.lanes`` are
    read; weight [C, w], whose last tap belongs to the current token. Returns [N, C].
    """
    extended, first = _extended(x, history[batch.lanes], batch)
    taps = weight.t().contiguous()
    outputs = extended.shape[0] - taps.shape[0] + 1
    # one pass over the packed runs; what straddles two spans is computed too and dropped by the gather
    total = extended[:outputs] * taps[0]
    for tap in range(1, taps.shape[0]):
        total += extended[tap : outputs + tap] * taps[tap]
    return silu(total[first])


def conv_history(x: Tensor, history: Tensor, keep: Tensor, batch: PackedBatch, room: Tensor | None = None) -> Tensor:
    """The new history [S, w-1, C] of the spans' lanes after the first ``keep`` [S] rows of each: rows keep … keep + w - 2 of
    (history ‖ inputs), counted from 0. It is the first S of ``room`` [>= S, w-1, C] where one is given."""
    history, width = history[batch.lanes], history.shape[1]
    spans = torch.arange(history.shape[0], device=x.device)
    extended = torch.cat((history.flatten(0, 1), x))
    offset = keep.unsqueeze(1) + torch.arange(width, device=x.device)
    old = spans.unsqueeze(1) * width + offset
    new = history.shape[0] * width + batch.starts.unsqueeze(1) + offset - width
    after = extended[torch.where(offset < width, old, new)]
    return after if room is None else room[: len(after)].copy_(after)


def advance_history(history: Tensor, raw: Tensor, keep: Tensor, batch: PackedBatch) -> None:
    """``conv_history`` of every layer, in place: history [layers, L, w-1, C], raw inputs [layers, >= N, C]. A span that
    keeps no row leaves its lane as it is."""
    for layer in range(history.shape[0]):
        history[layer, batch.lanes] = conv_history(raw[layer, : batch.num_rows], history[layer], keep, batch)


def _extended(x: Tensor, history: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Per span (history ‖ inputs), packed, and each row's index of its oldest tap in it."""
    width = history.shape[1]
    first = torch.arange(x.shape[0], device=x.device) + batch.row_span * width
    extended = torch.empty(x.shape[0] + history.shape[0] * width, x.shape[1], dtype=x.dtype, device=x.device)
    extended[first + width] = x
    heads = batch.starts + torch.arange(history.shape[0], device=x.device) * width
    extended[heads.unsqueeze(1) + torch.arange(width, device=x.device)] = history
    return extended, first


class Convolved(NamedTuple):
    """Rows [L * B, C] that are ``dynamic_conv`` of ``x`` [L * B, C], left to the op that reads them. On a GPU that saves a
    launch."""

    x: Tensor
    base: Tensor
    dynamic: Tensor


def dynamic_conv(x: Tensor, base: Tensor, dynamic: Tensor, operand: torch.dtype | None = None) -> Tensor | Rows:
    """DFlash2: y[j, c] = Σ_t (base[t, c] + dynamic[j, t, c // group]) * x[j - t, c], zeros before the block.

    x [L, B, C], one block per lane, so a lane never sees another's; base [K, C]; dynamic [L, B, K, G] with
    group = C / G. Taps that reach before the block contribute nothing, also where B < K. Returns [L, B, C]. On a GPU
    ``operand``, float16 or float32, asks for L * B ``Rows`` of this type, which saves ``linear`` a launch; elsewhere it
    changes nothing.
    """
    lanes, rows, channels = x.shape
    group = channels // dynamic.shape[-1]
    total = torch.zeros_like(x)
    for tap in range(min(base.shape[0], rows)):
        kernel = base[tap] + dynamic[:, tap:, tap].repeat_interleave(group, dim=-1)
        total[:, tap:] = total[:, tap:] + kernel * x[:, : rows - tap]
    return total
