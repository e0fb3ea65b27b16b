"""Paged attention against a dense softmax in float64 over the stored keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.batch import pack
from paceline.config import CACHE_TYPES, PAGE_SIZE, CacheType
from paceline.ops.activation import gated_heads
from paceline.ops.attention import attention, attention_inputs, gated_attention, value_bound
from paceline.ops.kv import allocate_pages, read_pages, write_rows
from paceline.ops.linear import merge
from paceline.ops.linear import pack as pack_weight
from paceline.ops.rope import RopeTable
from paceline.types import RowKind

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 6, 2, 64
TOLERANCE = 1e-5
"""A score is a float32 sum of 64 products, off by about 1e-6, and its exponential as much, relatively; a mean of values of
up to 4 then is off by a few 1e-6. A window one key too wide changes results by more than 1e-2."""

SPANS: dict[RowKind, list[tuple[int, int]]] = {
    "decode": [(0, 1), (63, 2), (200, 8), (15, 11)],
    "prefill": [(0, 1), (64, 70), (0, 130), (128, 64)],
}
"""(position of the first row, rows) per span."""


def dense(q: Tensor, k: Tensor, v: Tensor, first: int, *, causal: bool, window: int | None) -> Tensor:
    """One span: q [n, Hq, D] at positions first ..., k and v [first + n, Hkv, D]; the definition, one head at a time."""
    rows, keys = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))
    sees = keys <= rows if causal else torch.ones(len(q), len(k), dtype=torch.bool)
    if window is not None:
        sees &= (rows - keys).abs() < window
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = q[:, head].double() @ k[:, group].double().T / DIM**0.5
        out[:, head] = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v[:, group].double()
    return out


def both(kind: RowKind, cache: CacheType, *, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """(ours, dense) on the spans of a kind."""
    generator = torch.Generator().manual_seed(0)
    bases, lengths = zip(*SPANS[kind], strict=True)
    counts = [-(-(base + rows) // PAGE_SIZE) for base, rows in SPANS[kind]]
    order = torch.randperm(sum(counts), generator=generator)
    lanes = [5, 0, 3, 1]
    table = torch.zeros(6, max(counts), dtype=torch.int64)
    k_pages, v_pages = (allocate_pages(cache, sum(counts), KV_HEADS, DIM, CPU) for _ in range(2))
    q = torch.randn(sum(lengths), HEADS, DIM, generator=generator)
    expected, taken, offset = [], 0, 0
    for span, (base, rows) in enumerate(SPANS[kind]):
        pages = order[taken : taken + counts[span]]
        taken += counts[span]
        table[lanes[span], : len(pages)] = pages
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: base + rows]
        for store in (k_pages, v_pages):
            write_rows(store, slots, torch.randn(base + rows, KV_HEADS, DIM, generator=generator))
        k, v = (read_pages(store, pages).flatten(0, 1)[: base + rows] for store in (k_pages, v_pages))
        expected.append(dense(q[offset : offset + rows], k, v, base, causal=causal, window=window))
        offset += rows
    batch = pack(kind, lengths, bases, CPU, lanes)
    got = attention(q, k_pages, v_pages, table, batch, scale=DIM**-0.5, causal=causal, window=window)
    return got, torch.cat(expected)


@pytest.mark.parametrize("window", [None, 1, 40, 64, 150])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", list(SPANS))
def test_equals_dense(kind: RowKind, causal: bool, window: int | None) -> None:
    got, expected = both(kind, "f32", causal=causal, window=window)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cache", CACHE_TYPES)
def test_reads_what_is_stored(cache: CacheType) -> None:
    got, expected = both("decode", cache, causal=True, window=None)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE)


def test_one_visible_key_gives_its_value() -> None:
    pages = [allocate_pages("f32", 1, 1, 32, CPU) for _ in range(2)]
    value = torch.randn(1, 1, 32)
    write_rows(pages[0], torch.tensor([0]), torch.full((1, 1, 32), 1e4))
    write_rows(pages[1], torch.tensor([0]), value)
    q, table = torch.full((1, 2, 32), 1e4), torch.zeros(1, 1, dtype=torch.int64)
    got = attention(q, pages[0], pages[1], table, pack("decode", [1], [0], CPU), scale=1.0, causal=True)
    assert torch.equal(got, value.expand(1, 2, 32))


@pytest.mark.parametrize("kind", list(SPANS))
def test_gated_is_the_gate_times_attention(kind: RowKind) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (allocate_pages("q8_0", 9, KV_HEADS, DIM, CPU) for _ in range(2))
    for cache in (k, v):
        write_rows(cache, torch.arange(9 * PAGE_SIZE), torch.randn(9 * PAGE_SIZE, KV_HEADS, DIM, generator=generator))
    q, gate = torch.randn(2, 8, HEADS, DIM, generator=generator).unbind()
    of_lanes = (k, v, torch.randperm(9, generator=generator)[None], pack(kind, [8], [128], CPU))
    o = attention(q, *of_lanes, scale=0.1, causal=True)
    got = gated_attention(q, gate, *of_lanes, scale=0.1, causal=True, operand=torch.float16, bound=7.0)
    apart = gated_heads(o, gate)
    assert isinstance(got, Tensor) and isinstance(apart, Tensor) and torch.equal(got, apart)


def test_values_have_no_bound_where_no_kernel_needs_it() -> None:
    assert value_bound(merge([pack_weight(torch.ones(64, 32)) for _ in range(3)]), 2, torch.ones(32)) is None


@pytest.mark.parametrize("rotary", [16, 64])
def test_inputs_are_normed_rotated_and_stored(rotary: int) -> None:
    """By the definition in float64: each head over the root of its mean square, each pair turned in the complex plane."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(7, HEADS, 2, DIM, generator=generator)
    k, v = torch.randn(2, 7, KV_HEADS, DIM, generator=generator).unbind(0)
    weights = 1.0 + 0.1 * torch.randn(2, DIM, generator=generator)
    positions, slots = torch.tensor([0, 1, 17, 300, 301, 302, 90]), torch.tensor([5, 47, 16, 0, 31, 33, 8])
    pages = [allocate_pages("f32", 3, KV_HEADS, DIM, CPU) for _ in range(2)]
    angles = RopeTable(400, rotary, 1e4, None, CPU).at(positions)
    q = attention_inputs(both[:, :, 0], k, v, weights[0], weights[1], 1e-3, angles, pages[0], pages[1], slots)
    half = rotary // 2
    frequency = 1e4 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    turn = torch.polar(torch.ones(7, half, dtype=torch.float64), positions.double()[:, None] * frequency)[:, None]
    stored = [read_pages(cache, slots // PAGE_SIZE)[torch.arange(7), slots % PAGE_SIZE] for cache in pages]
    for got, x, weight in ((q, both[:, :, 0], weights[0]), (stored[0], k, weights[1])):
        normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
        turned = torch.complex(normed[..., :half], normed[..., half:rotary]) * turn
        expected = torch.cat((turned.real, turned.imag, normed[..., rotary:]), dim=-1)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(stored[1], v)
