"""Writing K/V rows on a GPU gives the bits that the reference gives on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.batch import facts, pack, unpack
from paceline.config import CACHE_TYPES, PAGE_SIZE, CacheType
from paceline.ops.kv import PagedTensor, StagedRows, allocate_pages, write_kept, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def equal(got: PagedTensor, expected: PagedTensor) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.cpu().isnan(), b.isnan())

    scales = got.scale is None or (expected.scale is not None and same(got.scale, expected.scale))
    return same(got.data, expected.data) and scales


@pytest.mark.parametrize("rows", [1, 7, 70, 400])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (2, 96), (4, 256), (8, 128)])
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_bits_equal_the_reference(kind: CacheType, heads: int, dim: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    magnitude = 10.0 ** torch.randint(-9, 5, (rows, heads, 1), generator=generator)
    values = torch.randn(rows, heads, dim, generator=generator) * magnitude
    values[0, 0, :32] = 0.0
    # ties between two levels: a group whose step is 1
    values[-1, -1, :32] = torch.arange(32) + 0.5
    values[-1, -1, 0] = 127.0
    slots = torch.randperm(30 * PAGE_SIZE, generator=generator)[:rows]
    expected, got = (allocate_pages(kind, 30, heads, dim, torch.device(device)) for device in ("cpu", "cuda"))
    write_rows(expected, slots, values)
    write_rows(got, slots.cuda(), values.cuda())
    assert equal(got, expected)


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_a_nan_is_not_hidden(kind: CacheType) -> None:
    values = torch.ones(2, 1, 64)
    values[0, 0, 3] = torch.nan
    expected, got = (allocate_pages(kind, 1, 1, 64, torch.device(device)) for device in ("cpu", "cuda"))
    write_rows(expected, torch.tensor([4, 9]), values)
    write_rows(got, torch.tensor([4, 9], device="cuda"), values.cuda())
    assert equal(got, expected)


def test_rows_that_are_views() -> None:
    both = torch.randn(5, 2, 2, 64, device="cuda")
    expected, got = (allocate_pages("q8_0", 1, 2, 64, torch.device("cuda")) for _ in range(2))
    slots = torch.tensor([3, 1, 15, 0, 7], device="cuda")
    write_rows(expected, slots, both[:, :, 1].clone())
    write_rows(got, slots, both[:, :, 1])
    assert torch.equal(got.data, expected.data)


def test_slots_behind_two_gigabytes() -> None:
    pages = 2**31 // (PAGE_SIZE * 1024) + 2
    cache = allocate_pages("q8_0", pages, 4, 256, torch.device("cuda"))
    write_rows(cache, torch.tensor([pages * PAGE_SIZE - 1], device="cuda"), torch.ones(1, 4, 256, device="cuda"))
    assert (cache.data[-1, -1] == 127).all() and not cache.data[-1, :-1].any() and not cache.data[0].any()


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_kept_rows_of_many_caches(kind: CacheType) -> None:
    """Against the reference, which gets the batch without the padding. Some values are slices of wider rows."""
    lengths, bases, lanes, kept = [5, 70, 3], [30, 64, 0], [2, 0, 3], [2, 70, 3]
    rows, ring = sum(lengths), 2 * PAGE_SIZE
    table = torch.randperm(5 * 10, dtype=torch.int32).view(5, 10)
    rings = torch.arange(5 * 2, dtype=torch.int32).view(5, 2).repeat(1, 5)
    values = torch.randn(3, rows + 4, 2, 2, 64, generator=torch.Generator().manual_seed(0))
    padded = torch.from_numpy(facts(lengths, bases, lanes, rows + 4, 5, 4)).cuda()
    for device, batch, keep in (
        ("cpu", pack("decode", lengths, bases, torch.device("cpu"), lanes), torch.tensor(kept)),
        ("cuda", unpack("decode", padded, [70] * 5, [64] * 5, rows + 4, 5), torch.tensor([*kept, 1, 1], device="cuda")),
    ):
        caches = [allocate_pages(kind, 50, 2, 64, torch.device(device)) for _ in range(6)]
        staged = []
        for index, cache in enumerate(caches):
            of_cache = values.to(device)[index // 2, : batch.num_rows, index % 2]
            part = of_cache.contiguous() if index < 2 else of_cache
            staged.append(StagedRows(cache, part, (rings if index % 3 else table).to(device), ring if index % 3 else None))
        write_kept(staged, keep, batch)
        if device == "cpu":
            expected = caches
    assert all(equal(got, want) for got, want in zip(caches, expected, strict=True))
    assert caches[0].data.any()
