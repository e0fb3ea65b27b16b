"""Packed ragged batches: the rows of several lanes, one after another, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.types import RowKind


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """N rows in S spans. A span is a run of consecutive positions of one lane; all rows are of one kind.

    ``lengths``, ``offsets`` and ``bases`` are host facts per span: number of rows, index of the first row, position of the
    first row. ``positions`` [N] and ``row_span`` [N] say the same per row; ``starts``, ``span_lengths`` and ``span_bases``
    [S] are the host facts on the device, int64. ``lanes`` [S], int64 on the device: where in the
    state of all lanes that of a span's lane is; no two spans are of one lane.
    ``plans`` caches what an op derives from these, so that the layers of one forward share it.
    """

    kind: RowKind
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    bases: tuple[int, ...]
    positions: Tensor
    row_span: Tensor
    starts: Tensor
    span_lengths: Tensor
    span_bases: Tensor
    lanes: Tensor
    plans: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def num_spans(self) -> int:
        return len(self.lengths)

    def last_rows(self) -> Tensor:
        """Index of the last row of each span [S]."""
        ends = [offset + length - 1 for offset, length in zip(self.offsets, self.lengths, strict=True)]
        return torch.tensor(ends, device=self.starts.device)


def pack(
    kind: RowKind,
    lengths: Sequence[int],
    bases: Sequence[int],
    device: torch.device,
    lanes: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay spans out one after another. Every length must be at least 1. Without ``lanes`` span i is of lane i."""
    assert lengths and min(lengths) > 0, "a span without rows"
    offsets = [0]
    for length in lengths[:-1]:
        offsets.append(offsets[-1] + length)
    positions = [torch.arange(base, base + length) for base, length in zip(bases, lengths, strict=True)]
    row_span = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return PackedBatch(
        kind,
        tuple(lengths),
        tuple(offsets),
        tuple(bases),
        torch.cat(positions).to(device),
        row_span.to(device),
        torch.tensor(offsets, device=device),
        torch.tensor(lengths, device=device),
        torch.tensor(bases, device=device),
        torch.tensor(range(len(lengths)) if lanes is None else lanes, device=device),
    )
