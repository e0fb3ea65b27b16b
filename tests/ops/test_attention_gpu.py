"""The attention kernels: against softmax in float64 over the stored keys, and the same bits however rows are batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.config import CACHE_TYPES, PAGE_SIZE, CacheType
from paceline.ops.activation import gated_heads
from paceline.ops.attention import attention, attention_arithmetic, attention_inputs, gated_attention, value_bound
from paceline.ops.dispatch import force
from paceline.ops.kv import PagedTensor, allocate_pages, read_pages, write_rows
from paceline.ops.linear import Rows, linear, merge
from paceline.ops.linear import pack as pack_weight
from paceline.ops.norm import add_rms_norm, rms_norm
from paceline.ops.quant import dequantize
from paceline.ops.rope import RopeTable, apply_rope
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
        # every other vector of a product, as in the target
        self.gate = 4.0 * torch.randn(length, shape.heads, 2, shape.dim, generator=generator, device="cuda")[:, :, 1]


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
    bound: int | None = None,
    values: float | None = None,
) -> list[Tensor]:
    """Outputs of spans (lane, first row, rows). Nothing behind a span's last row is stored; pages are dealt at random, so
    are places among the lanes. With ``bound`` the batch is as a graph of up to that many keys has it: padded, and with upper
    bounds on the host. With ``values``, a bound of the values, there are gates, and the outputs are those that the next
    product reads."""
    counts = [-(-(base + rows) // PAGE_SIZE) for _, base, rows in spans]
    generator = torch.Generator("cuda").manual_seed(seed)
    total = sum(counts) + 3
    order = (torch.randperm(total, generator=generator, device="cuda") + first_page).split(counts + [3])
    k_pool, v_pool = (poisoned(shape, cache, first_page + total) for _ in range(2))
    lanes = torch.randperm(len(spans) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lanes), max(counts)), first_page + total - 1, device="cuda")
    table[lanes[-1]] = first_page
    for index, (lane, base, rows) in enumerate(spans):
        pages = order[index]
        table[lanes[index], : len(pages)] = pages
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()[: base + rows]
        write_rows(k_pool, slots, lane.k[: base + rows])
        write_rows(v_pool, slots, lane.v[: base + rows])
    lengths, bases = [rows for *_, rows in spans], [base for _, base, _ in spans]
    batch = pack(kind, lengths, bases, torch.device("cuda"), lanes[: len(spans)])
    if bound is not None:
        batch = padded(kind, lengths, bases, lanes, bound)
    q = torch.zeros(batch.num_rows, shape.heads, shape.dim, device="cuda")
    q[: sum(lengths)] = torch.cat([lane.q[base : base + rows] for lane, base, rows in spans])
    options = {"scale": shape.dim**-0.5, "causal": causal}
    if values is None:
        out = attention(q, k_pool, v_pool, table, batch, **options, window=window)
        return list(out[: sum(lengths)].split(lengths))
    gate = torch.zeros(batch.num_rows, shape.heads, 2, shape.dim, device="cuda")[:, :, 1]
    gate[: sum(lengths)] = torch.cat([lane.gate[base : base + rows] for lane, base, rows in spans])
    made = gated_attention(q, gate, k_pool, v_pool, table, batch, **options, operand=torch.float16, bound=values)
    assert isinstance(made, Rows) and (made.rows, made.columns) == (batch.num_rows, shape.heads * shape.dim)
    return list((made.values.float() * made.factors[:, None])[: sum(lengths)].split(lengths))


def padded(kind: RowKind, lengths: list[int], bases: list[int], lanes: list[int], bound: int) -> PackedBatch:
    """Two empty spans of the last lane and three rows more than there are; on the host every span is as wide as the widest
    and at ``bound``."""
    rows, spans = sum(lengths) + 3, len(lengths) + 2
    given = torch.from_numpy(facts(lengths, bases, lanes[: len(lengths)], rows, spans, lanes[-1])).cuda()
    return unpack(kind, given, [max(lengths)] * spans, [bound] * spans, rows, spans)


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
    *((Shape(2 * group, 2, 256), "q8_0", None) for group in (1, 2, 5, 7)),
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
    for base in (0, 57, 250, 508, 1020, 16_380):
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


# ---- with a gate, as rows for the next product

GATED = [(Shape(8, 2, 64), "q8_0"), (Shape(8, 2, 64), "bf16"), (TARGET, "q8_0"), (TARGET, "f16"), (TARGET, "f32")]
BOUND = 200.0
"""Of the values of ``Lane``, which are below 7; those of the target's layers are as far below theirs."""


@pytest.mark.parametrize("bound", [BOUND, 7.0, 1e9])
@pytest.mark.parametrize(("shape", "cache"), GATED)
def test_gated_rows_are_gate_times_attention(shape: Shape, cache: CacheType, bound: float) -> None:
    """To the bit, rounded to float16 once, whether a context is one piece or many."""
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["decode"])]
    scale = 2.0 ** (14 - math.floor(math.log2(bound)))
    for spans in (lanes, lanes[:2], lanes[3:4]):
        apart = run(shape, "decode", cache, spans)
        got = run(shape, "decode", cache, spans, values=bound)
        for (lane, base, rows), o, rounded in zip(spans, apart, got, strict=True):
            exact = gated_heads(o, lane.gate[base : base + rows])
            assert isinstance(exact, Tensor)
            assert torch.equal(rounded, (exact * scale).half().float() / scale), f"span at {base} of {rows}"


@pytest.mark.parametrize(("shape", "cache"), GATED)
def test_gated_rows_alone_and_in_company(shape: Shape, cache: CacheType) -> None:
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["decode"])]
    alone = [run(shape, "decode", cache, [span], seed=9, values=BOUND)[0] for span in lanes]
    for seed in range(3):
        order = torch.randperm(len(lanes), generator=torch.Generator().manual_seed(seed)).tolist()
        for bound in (None, 1023, 3000, 70_000):
            together = run(shape, "decode", cache, [lanes[i] for i in order], seed=seed, bound=bound, values=BOUND)
            differ = [lanes[i][1:] for i, o in zip(order, together, strict=True) if not torch.equal(o, alone[i])]
            assert not differ, f"order {order}, bound {bound}: spans {differ} differ"


@pytest.mark.parametrize(("shape", "cache"), GATED)
def test_gated_rows_however_cut(shape: Shape, cache: CacheType) -> None:
    for base in (0, 57, 250, 508, 1020, 16_380):
        lane = Lane(shape, base + 8, base)
        (whole,) = run(shape, "decode", cache, [(lane, base, 8)], values=BOUND)
        for cut in ([1] * 8, [3, 5], [7, 1]):
            pieces, start = [], base
            for rows in cut:
                pieces += run(shape, "decode", cache, [(lane, start, rows)], seed=rows, values=BOUND)
                start += rows
            assert torch.equal(torch.cat(pieces), whole), f"cut {cut} at {base}"


@pytest.mark.parametrize("cache", ["q8_0", "f16", "bf16"])
@pytest.mark.parametrize("form", ["IQ4_XS", "Q6_K", "Q8_0", "F16"])
def test_values_are_within_their_bound(form: str, cache: CacheType) -> None:
    """Rows that are as long as a norm leaves any, in the direction of the longest row of the weight."""
    stored = random_blocks(form, 256, 512)
    dense, norm = dequantize(stored).cuda(), 1e-5 * torch.rand(512, device="cuda")
    projections = merge(
        [pack_weight(random_blocks(form, 256, 512, seed), torch.bfloat16, torch.device("cuda")) for seed in (2, 0)]
    )
    bound = value_bound(projections, 1, norm)
    assert bound is not None
    _, n = add_rms_norm(torch.cat((dense / norm, dense, torch.randn_like(dense))), None, norm, 1e-6, torch.float16)
    values = linear(n, pack_weight(stored, torch.bfloat16, torch.device("cuda")), "decode").unflatten(1, (4, 64))
    read_back = stored_values(cache, values)
    assert 0.01 * bound < read_back.abs().max() < 0.51 * bound


def stored_values(cache: CacheType, x: Tensor) -> Tensor:
    return stored(Shape(4, x.shape[1], x.shape[2]), cache, x)


def test_weights_without_a_bound() -> None:
    def bound(weight: Tensor, norm: Tensor, dtype: torch.dtype = torch.bfloat16) -> float | None:
        return value_bound(merge([pack_weight(weight, dtype, torch.device("cuda"))]), 0, norm)

    weight, norm = torch.randn(128, 256, device="cuda"), torch.ones(256, device="cuda")
    found = bound(weight, norm)
    assert found is not None
    assert found == pytest.approx(2.0 * 16.0 * float(weight.norm(dim=1).max()), rel=1e-2)
    assert bound(1e6 * weight, norm) == pytest.approx(1e6 * found, rel=1e-2)
    assert bound(0.0 * weight, norm) is None and bound(weight, 1e-9 * norm) is None
    assert bound(weight, torch.nan * norm) is None and bound(weight, torch.inf * norm) is None
    assert bound(weight, norm, torch.float32) is None


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


@pytest.mark.parametrize(("shape", "cache", "window"), [*ALIKE, (DRAFTER, "f16", 512)])
def test_upper_bounds_and_padding_do_not_show(shape: Shape, cache: CacheType, window: int | None) -> None:
    causal = shape is not DRAFTER
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["decode"])]
    for spans in (lanes, lanes[:2]):
        exact = run(shape, "decode", cache, spans, causal=causal, window=window)
        for bound in (1023, 3000, 70_000):
            got = run(shape, "decode", cache, spans, causal=causal, window=window, seed=bound, bound=bound)
            differ = [span[1:] for span, a, b in zip(spans, exact, got, strict=True) if not torch.equal(a, b)]
            assert not differ, f"bound {bound}: spans {differ} differ"


def test_a_prompt_behind_padding() -> None:
    lanes = [(Lane(SMALL, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["prefill"])]
    exact = run(SMALL, "prefill", "q8_0", lanes)
    assert all(map(torch.equal, run(SMALL, "prefill", "q8_0", lanes, seed=1, bound=2000), exact))


@pytest.mark.parametrize("walkers", [1, 2, 3, 64])
@pytest.mark.parametrize("shape", [SMALL, TARGET])
def test_who_walks_a_piece_does_not_show(shape: Shape, walkers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = [(Lane(shape, base + rows, seed), base, rows) for seed, (base, rows) in enumerate(SPANS["decode"])]
    for window in (None, 300):
        expected = run(shape, "decode", "q8_0", lanes, window=window)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.ops.attention.kernel._walkers", lambda pieces, tiles: min(pieces, walkers))
            assert all(map(torch.equal, run(shape, "decode", "q8_0", lanes, window=window), expected))


@pytest.mark.parametrize("base", [5000, 16_300, 20_000, 118_000])
def test_long_contexts(base: int) -> None:
    """Of pieces of all lengths, added up in several turns; at the longest their peaks, too, are looked at in two."""
    lanes = [(Lane(TARGET, base + 130 * n + 8, n), base + 130 * n, 8) for n in range(4)]
    together = run(TARGET, "decode", "q8_0", lanes)
    for (lane, start, rows), o in zip(lanes, together, strict=True):
        assert (o.double() - dense(TARGET, "q8_0", lane, start, rows, True, None)).abs().max() < TOLERANCE["q8_0"]
        for first, count in ((0, 8), (0, 1), (3, 4)):
            (alone,) = run(TARGET, "decode", "q8_0", [(lane, start + first, count)], seed=1)
            assert torch.equal(alone, o[first : first + count])


def test_which_attention_this_is() -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda")
    assert attention_arithmetic(device).startswith("hopper-" if hopper else "portable-")
    with force("portable"):
        assert attention_arithmetic(device).startswith("portable-")


@pytest.mark.parametrize("shape", [SMALL, TARGET])
def test_one_graph_for_other_contents(shape: Shape) -> None:
    """Captured over a short context of one lane, replayed over long ones of three, with lanes and widths exchanged."""
    lengths, bound, spans, rows = 8, 2000, 4, 27
    lanes = [Lane(shape, 1500, seed) for seed in range(4)]
    pages = -(-1500 // PAGE_SIZE)
    table = torch.zeros(5, pages, dtype=torch.int64, device="cuda")
    table[:4] = torch.randperm(4 * pages, device="cuda").view(4, pages) + 1
    k_pool, v_pool = (poisoned(shape, "q8_0", 4 * pages + 1) for _ in range(2))
    for index, lane in enumerate(lanes):
        slots = (table[index][:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()[:1500]
        write_rows(k_pool, slots, lane.k)
        write_rows(v_pool, slots, lane.v)
    contents = [[(1, 40, 3)], [(3, 1400, 8), (0, 700, 1), (2, 255, 5)], [(2, 0, 1), (3, 1492, 8)]]  # (lane, base, rows)
    q = torch.zeros(rows, shape.heads, shape.dim, device="cuda")

    def filled(spans_now: list[tuple[int, int, int]]) -> Tensor:
        numbers, bases, widths = ([span[i] for span in spans_now] for i in range(3))
        q[: sum(widths)] = torch.cat([lanes[i].q[base : base + n] for i, base, n in spans_now])
        return torch.from_numpy(facts(widths, bases, numbers, rows, spans, 4)).cuda()

    given = filled(contents[0])
    batch = unpack("decode", given, [lengths] * spans, [bound] * spans, rows, spans)
    call = lambda b: attention(q, k_pool, v_pool, table, b, scale=shape.dim**-0.5, causal=True)  # noqa: E731
    call(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(batch)
    for spans_now in contents:
        given.copy_(filled(spans_now))
        graph.replay()
        numbers, bases, widths = ([span[i] for span in spans_now] for i in range(3))
        eager = attention(
            q[: sum(widths)],
            k_pool,
            v_pool,
            table,
            pack("decode", widths, bases, torch.device("cuda"), numbers),
            scale=shape.dim**-0.5,
            causal=True,
        )
        assert torch.equal(out[: sum(widths)], eager)


INPUTS = [(SMALL, 64), (Shape(24, 4, 256), 64), (Shape(32, 8, 128), 128), (Shape(4, 2, 96), 24)]


def stored_rows(pool: PagedTensor, slots: Tensor) -> Tensor:
    return read_pages(pool, slots // PAGE_SIZE)[torch.arange(len(slots), device="cuda"), slots % PAGE_SIZE]


class Heads:
    """Queries with their gates beside them and k and v beside each other, as merged products give them, for 70 rows."""

    def __init__(self, shape: Shape, rotary: int) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        randn = lambda *sizes: torch.randn(*sizes, generator=generator, device="cuda")  # noqa: E731
        self.shape = shape
        scale = 10.0 ** torch.randint(-3, 4, (70, 1), generator=generator, device="cuda")
        columns = shape.heads * 2 * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim
        self.product = scale * randn(70, sum(columns) + 5)
        self.columns = columns
        self.q_weight, self.k_weight = 1 + 0.1 * randn(shape.dim), 1 + 0.1 * randn(shape.dim)
        self.table = RopeTable(5000, rotary, 1e7, None, torch.device("cuda"))
        self.positions = torch.randint(0, 5000, (70,), generator=generator, device="cuda")

    def split(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = product[:, : sum(self.columns)].split(self.columns, 1)
        heads = (-1, self.shape.dim)
        return q.unflatten(1, (self.shape.heads, 2, -1)).unbind(2)[0], k.unflatten(1, heads), v.unflatten(1, heads)

    def run(self, cache: tuple[CacheType, CacheType], chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k as stored, v as stored, slots) of the chosen rows."""
        pools = [poisoned(self.shape, kind, 10) for kind in cache]
        slots = torch.randperm(10 * PAGE_SIZE, device="cuda")[: len(chosen)]
        heads, angles = self.split(self.product[chosen]), self.table.at(self.positions[chosen])
        q = attention_inputs(*heads, self.q_weight, self.k_weight, 1e-6, angles, pools[0], pools[1], slots)
        k, v = (stored_rows(pool, slots) for pool in pools)
        return q, k, v, slots


@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize(("shape", "rotary"), INPUTS)
def test_inputs_equal_the_definition(shape: Shape, rotary: int, cache: CacheType) -> None:
    heads, every = Heads(shape, rotary), torch.arange(70, device="cuda")
    q, k, v, slots = heads.run((cache, cache), every)
    assert q.is_contiguous()
    given = heads.split(heads.product)
    cos, sin = (table.double() for table in heads.table.at(heads.positions))
    with force("ref"):
        weighted = zip(given, (heads.q_weight, heads.k_weight), strict=False)
        exact = [apply_rope(rms_norm(x.double(), w.double(), 1e-6), (cos, sin)) for x, w in weighted]
    torch.testing.assert_close(q.double(), exact[0], rtol=2e-6, atol=2e-6)
    step = {"f32": 2e-6, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.51 / 127}[cache]  # of the largest value
    assert (k.double() - exact[1]).abs().max() <= step * exact[1].abs().max()
    pool = allocate_pages(cache, 10, shape.kv_heads, shape.dim, torch.device("cuda"))
    write_rows(pool, slots, given[2])
    assert torch.equal(v, stored_rows(pool, slots))


@pytest.mark.parametrize("cache", [("q8_0", "q8_0"), ("f16", "q8_0"), ("f32", "bf16")])
@pytest.mark.parametrize(("shape", "rotary"), INPUTS)
def test_inputs_of_rows_alone_and_in_company(shape: Shape, rotary: int, cache: tuple[CacheType, CacheType]) -> None:
    heads, every = Heads(shape, rotary), torch.arange(70, device="cuda")
    whole = heads.run(cache, every)[:3]
    for rows in range(1, 71, 3):
        chosen = torch.randperm(70, generator=torch.Generator().manual_seed(rows))[:rows].cuda()
        got = heads.run(cache, chosen)[:3]
        assert all(torch.equal(a, b[chosen]) for a, b in zip(got, whole, strict=True))
    q, k, v = (x.contiguous() for x in heads.split(heads.product))  # another memory layout
    pools = [poisoned(shape, kind, 10) for kind in cache]
    angles, slots = heads.table.at(heads.positions), torch.arange(70, device="cuda")
    q = attention_inputs(q, k, v, heads.q_weight, heads.k_weight, 1e-6, angles, pools[0], pools[1], slots)
    assert torch.equal(q, whole[0])
    assert all(torch.equal(stored_rows(pool, slots), want) for pool, want in zip(pools, whole[1:], strict=True))


def test_inputs_write_no_other_slot() -> None:
    heads = Heads(TARGET, 64)
    pools = [allocate_pages("q8_0", 2, 4, 256, torch.device("cuda")) for _ in range(2)]
    slots = torch.tensor([3, 17, 30], device="cuda")
    rows = heads.split(heads.product[:3])
    angles = heads.table.at(heads.positions[:3])
    attention_inputs(*rows, heads.q_weight, heads.k_weight, 1e-6, angles, pools[0], pools[1], slots)
    for pool in pools:
        assert pool.scale is not None
        for stored in (pool.data, pool.scale):
            written = stored.view(32, -1).any(1).nonzero().flatten().tolist()
            assert written == slots.tolist()


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
    lanes = [(Lane(TARGET, base + rows, 0), base, rows) for base, rows in SPANS["decode"]]
    for spans in (lanes, lanes[:2]):
        assert not torch.cat(run(TARGET, "decode", "q8_0", spans, values=BOUND)).isnan().any()
