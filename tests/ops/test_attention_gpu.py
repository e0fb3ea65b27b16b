"""The attention kernel: against softmax in float64 over the stored keys, and the same bits however rows are batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.batch import pack
from paceline.config import PAGE_SIZE, CacheType
from paceline.ops.attention import attention
from paceline.ops.kv import PagedTensor, allocate_pages, read_pages, write_rows
from paceline.types import RowKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2, "q8_0": 6e-3}
"""Of means of values up to 4. Factors have 11 bits (bfloat16: 8): a score, a sum of 64 to 256 products times dim^-0.5, is
off by a few 2^-11 and its exponential as much, relatively. A window one key too wide changes results by more than 1e-1."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


SMALL, TARGET, DRAFTER = Shape(6, 2, 64), Shape(24, 4, 256), Shape(32, 8, 128)


class Lane:
    """Queries, keys and values of a sequence."""

    def __init__(self, shape: Shape, length: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.q, self.k, self.v = (
            torch.randn(length, heads, shape.dim, generator=generator, device="cuda") for heads in sizes
        )


def poisoned(shape: Shape, cache: CacheType, pages: int) -> PagedTensor:
    pool = allocate_pages(cache, pages, shape.kv_heads, shape.dim, torch.device("cuda"))
    (pool.data if pool.scale is None else pool.scale).fill_(torch.nan)
    if pool.scale is not None:
        pool.data.random_(-128, 128)
    return pool


def run(
    shape: Shape,
    kind: RowKind,
    cache: CacheType,
    spans: Sequence[tuple[Lane, int, int]],
    *,
    causal: bool = True,
    window: int | None = None,
    seed: int = 0,
    first_page: int = 0,
) -> list[Tensor]:
    """Outputs of spans (lane, first row, rows). Nothing behind a span's last row is stored; pages are dealt at random."""
    counts = [-(-(base + rows) // PAGE_SIZE) for _, base, rows in spans]
    generator = torch.Generator("cuda").manual_seed(seed)
    total = sum(counts) + 3
    order = (torch.randperm(total, generator=generator, device="cuda") + first_page).split(counts + [3])
    k_pool, v_pool = (poisoned(shape, cache, first_page + total) for _ in range(2))
    table = torch.full((len(spans), max(counts)), first_page + total - 1, device="cuda")
    for span, (lane, base, rows) in enumerate(spans):
        pages = order[span]
        table[span, : len(pages)] = pages
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()[: base + rows]
        write_rows(k_pool, slots, lane.k[: base + rows])
        write_rows(v_pool, slots, lane.v[: base + rows])
    lengths, bases = [rows for *_, rows in spans], [base for _, base, _ in spans]
    batch = pack(kind, lengths, bases, torch.device("cuda"))
    q = torch.cat([lane.q[base : base + rows] for lane, base, rows in spans])
    options = {"scale": shape.dim**-0.5, "causal": causal, "window": window}
    return list(attention(q, k_pool, v_pool, table, batch, **options).split(lengths))


def dense(shape: Shape, cache: CacheType, lane: Lane, base: int, rows: int, causal: bool, window: int | None) -> Tensor:
    """The definition in float64 over what the cache type stores."""
    end = base + rows
    k, v = (stored(shape, cache, x[:end]) for x in (lane.k, lane.v))
    q, keys = torch.arange(base, end, device="cuda")[:, None], torch.arange(end, device="cuda")
    sees = keys <= q if causal else torch.ones(rows, end, dtype=torch.bool, device="cuda")
    if window is not None:
        sees &= (q - keys).abs() < window
    k, v = (x.double().repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", lane.q[base:end].double(), k) * shape.dim**-0.5
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def stored(shape: Shape, cache: CacheType, x: Tensor) -> Tensor:
    pages = -(-len(x) // PAGE_SIZE)
    pool = allocate_pages(cache, pages, shape.kv_heads, shape.dim, torch.device("cuda"))
    write_rows(pool, torch.arange(len(x), device="cuda"), x)
    return read_pages(pool, torch.arange(pages, device="cuda")).flatten(0, 1)[: len(x)]


SPANS: dict[RowKind, list[tuple[int, int]]] = {
    "decode": [(0, 1), (63, 2), (600, 8), (15, 11), (255, 1), (254, 3), (1023, 16)],
    "prefill": [(0, 1), (64, 70), (0, 130), (128, 64), (576, 200)],
}
"""(position of the first row, rows) per span."""

CASES = [
    (SMALL, "decode", "q8_0", True),
    (SMALL, "decode", "q8_0", False),
    (SMALL, "decode", "f16", True),
    (SMALL, "decode", "bf16", True),
    (SMALL, "decode", "f32", True),
    (SMALL, "prefill", "q8_0", True),
    (SMALL, "prefill", "f16", True),
    (SMALL, "prefill", "f32", True),
    (Shape(4, 1, 80), "decode", "f16", True),
    (Shape(4, 2, 96), "decode", "q8_0", True),
    (DRAFTER, "decode", "f16", False),
    (TARGET, "decode", "q8_0", True),
    (TARGET, "decode", "f16", True),
    (TARGET, "decode", "f32", True),
    (TARGET, "prefill", "q8_0", True),
]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("shape", "kind", "cache", "causal"), CASES)
def test_equals_dense(shape: Shape, kind: RowKind, cache: CacheType, causal: bool, windowed: bool) -> None:
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS[kind])]
    for window in (1, 40, 64, 300) if windowed else (None,):
        for spans in (lanes, lanes[:2]):  # with a long context and without: the sum over pieces, and none
            got = run(shape, kind, cache, spans, causal=causal, window=window)
            for (lane, base, rows), o in zip(spans, got, strict=True):
                expected = dense(shape, cache, lane, base, rows, causal, window)
                error = (o.double() - expected).abs().max().item()
                assert error < TOLERANCE[cache], f"window {window}, {len(spans)} spans, span at {base} of {rows}: {error}"


def test_large_magnitudes() -> None:
    lane = Lane(SMALL, 700, 0)
    lane.q, lane.k, lane.v = 30 * lane.q, 30 * lane.k, 1e6 * lane.v
    (got,) = run(SMALL, "decode", "f32", [(lane, 692, 8)])
    # a score of up to 30^2 * 40 / 8 = 4,500 is off by 1e-3 at most, so is its exponential, and the mean in proportion
    assert (got.double() - dense(SMALL, "f32", lane, 692, 8, True, None)).abs().max() < 4e6 * 2e-3
    lane = Lane(SMALL, 700, 1)
    lane.v = 1e4 * lane.v
    (got,) = run(SMALL, "decode", "q8_0", [(lane, 692, 8)])
    assert (got.double() - dense(SMALL, "q8_0", lane, 692, 8, True, None)).abs().max() < 1e4 * TOLERANCE["q8_0"]


def test_pages_behind_two_gigabytes() -> None:
    shape = Shape(8, 4, 256)
    lane = Lane(shape, 300, 0)
    (far,) = run(shape, "decode", "q8_0", [(lane, 292, 8)], first_page=2**31 // (PAGE_SIZE * 4 * 256) + 5)
    (near,) = run(shape, "decode", "q8_0", [(lane, 292, 8)])
    assert torch.equal(far, near)


ALIKE = [
    (SMALL, "q8_0", None),
    (SMALL, "q8_0", 100),
    (SMALL, "f16", None),
    (SMALL, "bf16", None),
    (SMALL, "f32", None),
    (TARGET, "q8_0", None),
    (TARGET, "f16", None),
]


@pytest.mark.parametrize(("shape", "cache", "window"), ALIKE)
def test_decode_rows_alone_and_in_company(shape: Shape, cache: CacheType, window: int | None) -> None:
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["decode"])]
    alone = [run(shape, "decode", cache, [span], window=window, seed=9)[0] for span in lanes]
    for seed in range(3):
        order = torch.randperm(len(lanes), generator=torch.Generator().manual_seed(seed)).tolist()
        together = run(shape, "decode", cache, [lanes[i] for i in order], window=window, seed=seed)
        differ = [lanes[i][1:] for i, o in zip(order, together, strict=True) if not torch.equal(o, alone[i])]
        assert not differ, f"order {order}: spans {differ} differ"


@pytest.mark.parametrize("outlier", [1.0, 1e4])
@pytest.mark.parametrize(("shape", "cache", "window"), ALIKE)
def test_decode_rows_however_cut(shape: Shape, cache: CacheType, window: int | None, outlier: float) -> None:
    """One verify span, several, or steps of one row, with nothing behind a step's row. With outliers a row's own values are
    tiny beside those of rows that it does not see: a zero weight must not cost the sum its low bits."""
    for base in (0, 57, 250, 508, 1020):
        lane = Lane(shape, base + 8, base)
        lane.v = lane.v / outlier
        lane.v[base + 1 :] *= outlier**2
        (whole,) = run(shape, "decode", cache, [(lane, base, 8)], window=window)
        for cut in ([1] * 8, [3, 5], [7, 1]):
            pieces, start = [], base
            for rows in cut:
                pieces += run(shape, "decode", cache, [(lane, start, rows)], window=window, seed=rows)
                start += rows
            rows_apart = (torch.cat(pieces) != whole).flatten(1).any(1).nonzero().flatten().tolist()
            assert not rows_apart, f"cut {cut} at {base}: rows {rows_apart} differ"


@pytest.mark.parametrize("lanes", [1, 2, 5, 16, 17, 70])
def test_any_number_of_lanes(lanes: int) -> None:
    spans = [(Lane(SMALL, 40 + seed, seed), 39 + seed, 1) for seed in range(70)]
    alone = [run(SMALL, "decode", "q8_0", [span])[0] for span in spans[:lanes]]
    assert all(map(torch.equal, run(SMALL, "decode", "q8_0", spans[:lanes]), alone))


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_block_rows_alone_and_in_company(cache: CacheType) -> None:
    blocks = [(Lane(DRAFTER, base + 16, base), base, 16) for base in (5, 250, 1000, 3000)]
    for window in (None, 512):
        alone = [run(DRAFTER, "decode", cache, [block], causal=False, window=window)[0] for block in blocks]
        together = run(DRAFTER, "decode", cache, blocks, causal=False, window=window, seed=1)
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize(("shape", "cache", "window"), ALIKE)
def test_prompts_however_cut(shape: Shape, cache: CacheType, window: int | None) -> None:
    """Chunks end at multiples of 64, except at the prompt's end."""
    lane, other = Lane(shape, 410, 0), Lane(shape, 200, 1)
    (whole,) = run(shape, "prefill", cache, [(lane, 0, 410)], window=window)
    for ends in ([64, 410], [128, 320, 410], [384, 410]):
        pieces, start = [], 0
        for end in ends:
            pieces.append(run(shape, "prefill", cache, [(other, 64, 136), (lane, start, end - start)], window=window)[1])
            start = end
        rows_apart = (torch.cat(pieces) != whole).flatten(1).any(1).nonzero().flatten().tolist()
        assert not rows_apart, f"cut at {ends}: {len(rows_apart)} rows differ, the first {rows_apart[:3]}"


def test_unwritten_outputs_are_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, new_empty = torch.empty, Tensor.new_empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    for kind in SPANS:
        lanes = [(Lane(SMALL, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS[kind])]
        for window in (None, 40):
            assert not torch.cat(run(SMALL, kind, "f16", lanes, window=window)).isnan().any()
