"""Packed ragged batches: the rows of several lanes, one after another, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.transfer import to_device
from paceline.types import RowKind


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """N rows in S spans. A span is a run of consecutive positions of one lane; all rows are of one kind.

    What a forward computes comes from the device, int64: ``positions`` and ``row_span`` [N] of the rows; ``starts`` (index
    of the first row), ``span_lengths``, ``span_bases`` (position of the first row) and ``lanes`` (where in the state of all
    lanes that of a span's lane is) [S]. ``lengths`` and ``bases`` repeat it on the host. In a batch that is captured once
    and run with other contents they are upper bounds, from which launches are sized; there a span may also be empty, and
    rows behind the last real one belong to such a span: what they compute is nobody's. No two spans with rows share a lane.
    ``plans`` caches what an op derives from these, so that the layers of one forward share it.
    """

    kind: RowKind
    lengths: tuple[int, ...]
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
        return self.positions.shape[0]

    @property
    def num_spans(self) -> int:
        return self.starts.shape[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index of the first row of each span, by the host's lengths."""
        ends = np.cumsum(self.lengths)
        return tuple(int(end) - length for end, length in zip(ends, self.lengths, strict=True))

    def without_plans(self) -> PackedBatch:
        """The same tensors, from which nothing has been derived yet: their contents may have changed."""
        return replace(self, plans={})

    def row_offsets(self) -> Tensor:
        """[N]: how many rows of its span come before each row."""
        return self.positions - self.span_bases[self.row_span]


def facts(
    lengths: Sequence[int],
    bases: Sequence[int],
    lanes: Sequence[int],
    rows: int | None = None,
    spans: int | None = None,
    spare_lane: int = 0,
) -> np.ndarray:
    """What ``unpack`` reads, int64 [2 N + 4 S]. With ``rows`` and ``spans``, at least one more than there are, the batch is
    padded: the last spans are empty ones of ``spare_lane``, to which the last rows belong, at position 0."""
    real = sum(lengths)
    starts = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
    count, total = len(lengths), rows or real
    padding = (spans or count) - count
    out = np.zeros(2 * total + 4 * (count + padding), np.int64)
    positions, row_span, of_spans = out[:total], out[total : 2 * total], out[2 * total :].reshape(4, -1)
    row_span[:real] = np.repeat(np.arange(count), np.asarray(lengths, np.int64))
    row_span[real:] = count + padding - 1
    positions[:real] = np.arange(real) + np.repeat(np.asarray(bases, np.int64) - starts, np.asarray(lengths, np.int64))
    for place, values, spare in zip(of_spans, (starts, lengths, bases, lanes), (real, 0, 0, spare_lane), strict=True):
        place[:count], place[count:] = np.asarray(values), spare
    return out


def unpack(
    kind: RowKind, packed: Tensor, lengths: Sequence[int], bases: Sequence[int], rows: int, spans: int
) -> PackedBatch:
    """A batch whose tensors are views of ``packed``, the ``facts`` on a device."""
    positions, row_span, of_spans = packed.split((rows, rows, 4 * spans))
    return PackedBatch(kind, tuple(lengths), tuple(bases), positions, row_span, *of_spans.view(4, spans).unbind())


def pack(
    kind: RowKind,
    lengths: Sequence[int],
    bases: Sequence[int],
    device: torch.device,
    lanes: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay spans out one after another. Every length must be at least 1. Without ``lanes`` span i is of lane i."""
    assert lengths and min(lengths) > 0, "a span without rows"
    packed = to_device(facts(lengths, bases, range(len(lengths)) if lanes is None else lanes), device)
    return unpack(kind, packed, lengths, bases, sum(lengths), len(lengths))
