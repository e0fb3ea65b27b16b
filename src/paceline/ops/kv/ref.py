"""Paged K/V storage in float32, float16, bfloat16 or q8_0 (32 values: one float16 scale and 32 int8).

Values are rounded to the stored type once, on writing; every reader sees the stored value, also the forward that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batch import PackedBatch
from paceline.config import PAGE_SIZE, CacheType

_DENSE: dict[str, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_GROUP = 32


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """``data`` [pages, PAGE_SIZE, heads, D]; ``scale`` [pages, PAGE_SIZE, heads, D / 32] float16 for q8_0, else None."""

    data: Tensor
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows [N, heads, D] float32 that are to be stored in ``cache``, by a table [L, P] of every lane's pages. ``ring``: how
    many rows a lane's pages hold where they are used again and again, None where there is a page for every position."""

    cache: PagedTensor
    values: Tensor
    page_table: Tensor
    ring: int | None = None


def allocate_pages(kind: CacheType, pages: int, heads: int, dim: int, device: torch.device) -> PagedTensor:
    shape = (pages, PAGE_SIZE, heads)
    if kind == "q8_0":
        data = torch.zeros(*shape, dim, dtype=torch.int8, device=device)
        return PagedTensor(data, torch.zeros(*shape, dim // _GROUP, dtype=torch.float16, device=device))
    return PagedTensor(torch.zeros(*shape, dim, dtype=_DENSE[kind], device=device), None)


def bytes_per_token(kind: CacheType, heads: int, dim: int) -> int:
    """Bytes that one token of one layer's K (or V) takes."""
    if kind == "q8_0":
        return heads * (dim + 2 * (dim // _GROUP))
    return heads * dim * _DENSE[kind].itemsize


def copy_pages(cache: PagedTensor, source: int, target: int, count: int = 1) -> None:
    """Copy ``count`` pages from page ``source`` on to page ``target`` on."""
    for part in (cache.data, cache.scale):
        if part is not None:
            part[target : target + count] = part[source : source + count]


def row_slots(page_table: Tensor, batch: PackedBatch) -> Tensor:
    """[N] int64: where the K/V of each row lies, page * PAGE_SIZE + offset, by a table [L, P] of every lane's pages."""
    pages = page_table[batch.lanes[batch.row_span], batch.positions // PAGE_SIZE].long()
    return pages * PAGE_SIZE + batch.positions % PAGE_SIZE


def write_rows(cache: PagedTensor, slots: Tensor, values: Tensor) -> None:
    """Store values [N, heads, D] float32 at slots [N] (page * PAGE_SIZE + offset), in place."""
    data = cache.data.view(-1, *cache.data.shape[2:])
    if cache.scale is None:
        data[slots] = values.to(data.dtype)
        return
    groups = values.unflatten(-1, (-1, _GROUP))
    scale = (groups.abs().amax(-1) / 127.0).to(torch.float16)
    divisor = scale.float().unsqueeze(-1)
    levels = torch.where(divisor > 0, groups / divisor, torch.zeros_like(groups)).round().clamp(-127, 127)
    data[slots] = levels.to(torch.int8).flatten(-2)
    cache.scale.view(-1, *cache.scale.shape[2:])[slots] = scale


def write_kept(staged: Sequence[StagedRows], keep: Tensor, batch: PackedBatch) -> None:
    """Store the rows among the first ``keep`` [S] of each span, in place, each in its cache. Of more than a ring's worth the
    last are stored. The caches and the values are of one shape and type, but for the number of pages."""
    kept = keep.minimum(batch.span_lengths)
    behind = batch.row_offsets() - kept[batch.row_span]  # negative in rows that are kept
    tables = {id(part.page_table): part.page_table for part in staged}
    slots = {key: row_slots(table, batch) for key, table in tables.items()}
    for part in staged:
        stored = (behind < 0) if part.ring is None else (behind < 0) & (behind >= -part.ring)
        write_rows(part.cache, slots[id(part.page_table)][stored], part.values[stored])


def read_pages(cache: PagedTensor, pages: Tensor) -> Tensor:
    """Gather whole pages: pages [...] -> float32 [..., PAGE_SIZE, heads, D]."""
    data = cache.data[pages].float()
    if cache.scale is None:
        return data
    return (data.unflatten(-1, (-1, _GROUP)) * cache.scale[pages].float().unsqueeze(-1)).flatten(-2)
