"""Paged storage: each value comes back as its type rounds it, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.batch import pack
from paceline.config import CACHE_TYPES, PAGE_SIZE, CacheType
from paceline.ops.kv import PagedTensor, StagedRows, allocate_pages, bytes_per_token, read_pages, write_kept, write_rows

CPU = torch.device("cpu")
SLOTS = torch.tensor([5, 47, 16, 0, 31])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def through(kind: CacheType, values: Tensor) -> tuple[Tensor, PagedTensor]:
    """Values [5, heads, D] written to five slots of three pages, as read back, and the pages."""
    cache = allocate_pages(kind, 3, values.shape[1], values.shape[2], CPU)
    write_rows(cache, SLOTS, values)
    return read_pages(cache, SLOTS // PAGE_SIZE)[torch.arange(5), SLOTS % PAGE_SIZE], cache


@pytest.mark.parametrize(("kind", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_dense_types_round_once(kind: CacheType, dtype: torch.dtype) -> None:
    values = randn(5, 2, 64)
    assert torch.equal(through(kind, values)[0], values.to(dtype).float())


def test_q8_0_is_within_half_a_level() -> None:
    values = randn(5, 2, 64) * torch.tensor([1e-3, 1.0, 30.0, 1000.0, 1e-2]).view(5, 1, 1)
    got, cache = through("q8_0", values)
    largest = values.unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True)
    error = (got - values).unflatten(-1, (2, 32)).abs()
    # half a level of largest / 127; the level itself is rounded to float16, 2^-11 of it (more where it is subnormal)
    assert (error <= largest / 127 * (0.5 + 2.0**-10) + 2.0**-25 * 127).all()
    assert (error > largest / 127 * 0.25).any()
    assert cache.data.abs().max() == 127


def test_q8_0_of_nothing_and_next_to_nothing_is_zero() -> None:
    values = torch.zeros(5, 1, 32)
    values[1] = 1e-9  # its scale vanishes in float16
    assert torch.equal(through("q8_0", values)[0], torch.zeros(5, 1, 32))


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_other_slots_stay_as_they_were(kind: CacheType) -> None:
    cache = allocate_pages(kind, 3, 2, 32, CPU)
    everything = torch.arange(3 * PAGE_SIZE)
    write_rows(cache, everything, randn(3 * PAGE_SIZE, 2, 32))
    before = read_pages(cache, torch.arange(3)).flatten(0, 1)
    write_rows(cache, SLOTS, torch.ones(5, 2, 32))
    after = read_pages(cache, torch.arange(3)).flatten(0, 1)
    changed = (before != after).flatten(1).any(1)
    assert everything[changed].tolist() == sorted(SLOTS.tolist())


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_bytes_per_token(kind: CacheType) -> None:
    cache = allocate_pages(kind, 3, 2, 64, CPU)
    stored = cache.data.nbytes + (cache.scale.nbytes if cache.scale is not None else 0)
    assert bytes_per_token(kind, 2, 64) * 3 * PAGE_SIZE == stored


def test_kept_rows_go_where_their_lane_has_its_pages() -> None:
    batch, keep = pack("decode", [3, 2], [15, 40], CPU, [1, 0]), torch.tensor([2, 9])
    values, table = randn(5, 1, 32), torch.tensor([[9, 9, 4], [2, 3, 9]])
    cache = allocate_pages("f32", 10, 1, 32, CPU)
    write_kept([StagedRows(cache, values, table)], keep, batch)
    stored = {(2, 15): 0, (3, 0): 1, (4, 8): 3, (4, 9): 4}
    for (page, offset), row in stored.items():
        assert torch.equal(cache.data[page, offset], values[row])
        cache.data[page, offset] = 0.0
    assert not cache.data.any()


def test_a_ring_holds_the_last_of_the_kept_rows() -> None:
    rows, ring = 5 * PAGE_SIZE, 2 * PAGE_SIZE
    batch, table = pack("prefill", [rows], [0], CPU), torch.tensor([[1, 2, 1, 2, 1]])
    values, cache = randn(rows, 1, 32), allocate_pages("f32", 3, 1, 32, CPU)
    write_kept([StagedRows(cache, values, table, ring)], torch.tensor([rows - 3]), batch)
    last = torch.arange(rows - 3 - ring, rows - 3)
    assert torch.equal(cache.data[table[0, last // PAGE_SIZE], last % PAGE_SIZE], values[last])
