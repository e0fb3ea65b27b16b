"""Rows as the GPU products read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLUMN_STEP = 256
"""Columns are padded to a multiple of this."""
ROW_STEP = 256
"""Rows are padded to a multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """x [``rows``, ``columns``] on a GPU, ready for any product on float16 weights: x[m] = values[m] * factors[m].

    ``values`` float16 [R, C], contiguous, R and C being multiples of 256 that are at least ``rows`` and ``columns``: columns
    from ``columns`` on are zero, rows from ``rows`` on hold anything. ``factors`` float32 [R]: powers of two that undo what
    brought a row into the range of float16. For float32 weights ``values`` is float32. ``norms`` float32 [R], if there are
    any, are the squared norms of x's rows.
    """

    values: Tensor
    factors: Tensor
    rows: int
    columns: int
    norms: Tensor | None = None

    def __post_init__(self) -> None:
        held, width = self.values.shape
        if held % ROW_STEP or width % COLUMN_STEP or held < self.rows or width < self.columns:
            raise ValueError(f"{self.rows} rows of {self.columns} columns do not lie in values of {held} by {width}")
        if not self.values.is_contiguous() or self.factors.shape != (held,):
            raise ValueError("values must be contiguous, with a factor for each of their rows")

    @property
    def device(self) -> torch.device:
        return self.values.device


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Room for a kernel to leave its rows in."""
    held = padded(rows, ROW_STEP)
    values = torch.empty(held, padded(columns, COLUMN_STEP), dtype=dtype, device=device)
    return Rows(values, torch.empty(held, device=device), rows, columns)


def padded(count: int, step: int) -> int:
    """``count``, rounded up to a multiple of ``step``."""
    return -(-count // step) * step
