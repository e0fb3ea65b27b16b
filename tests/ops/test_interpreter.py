"""The Triton kernels under Triton's interpreter, on a CPU, against the references: small shapes, where Triton is installed.

The interpreter computes with numpy, so bits differ; what is found here are wrong indices, masks and formulas.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("needs Triton, and no GPU, where the kernels themselves are tested", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the ops do on first use

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.config import PAGE_SIZE, CacheType
from paceline.ops.accept import accept
from paceline.ops.activation import gated_heads, swiglu
from paceline.ops.advance import advance, advance_counts, input_tokens
from paceline.ops.attention import attention, attention_inputs, gated_attention, value_bound
from paceline.ops.conv import Convolved, advance_history, causal_conv, conv_history, dynamic_conv
from paceline.ops.dispatch import force
from paceline.ops.features import keep_features, kept_features
from paceline.ops.gdn import gdn_inputs, gdn_prefill, gdn_replay, gdn_verify
from paceline.ops.kv import PagedTensor, allocate_pages, row_slots, write_rows
from paceline.ops.linear import Rows, TiledWeight, linear, merge
from paceline.ops.linear import pack as pack_weight
from paceline.ops.norm import add_rms_norm, add_rms_norm_twice, gated_output, rms_norm
from paceline.ops.quant import dequantize, dequantize_rows
from paceline.ops.rope import RopeTable, apply_rope, norm_and_rope
from paceline.ops.sample import draw
from paceline.ops.topk import argmax, peaks, top_k
from paceline.types import RowKind

CPU = torch.device("cpu")
LENGTHS, BASES, LANES = [3, 1, 5], [20, 70, 0], [2, 0, 3]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def batch_of(kind: RowKind = "decode", padded: bool = False) -> PackedBatch:
    """Three spans; padded, the tensors hold two empty ones of lane 4 more, and two rows of theirs."""
    if not padded:
        return pack(kind, LENGTHS, BASES, CPU, LANES)
    rows, spans = sum(LENGTHS) + 2, len(LENGTHS) + 2
    packed = torch.from_numpy(facts(LENGTHS, BASES, LANES, rows, spans, spare_lane=4))
    return unpack(kind, packed, [max(LENGTHS)] * spans, [96] * spans, rows, spans)


def both(op: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
    """(what the kernel gives, what the reference gives)."""
    with force("kernel"):
        ours = op(*arguments, **keywords)
    return ours, op(*arguments, **keywords)


def close(got: Tensor, expected: Tensor, limit: float = 2e-5) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    assert error <= limit * max(1.0, expected.abs().max().item()), f"error {error}"


@pytest.mark.parametrize("qtype", ["IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32"])
def test_decode_product(qtype: str) -> None:
    stored = random_blocks(qtype, 150, 512)
    with force("kernel"):
        weight = pack_weight(stored, torch.float16, CPU)
        x = torch.randn(5, 512) * torch.tensor([[1.0], [1e6], [1e-7], [1.0], [3.0]])
        got, alone = linear(x, weight, "decode"), linear(x[3:4], weight, "decode")
    assert isinstance(weight, TiledWeight)
    expected = x.double() @ dequantize(stored).double().T
    error = (got - expected).norm(dim=1) / (x.double().norm(dim=1) * dequantize(stored).double().norm(dim=1).mean())
    assert error.max() < 2e-3 and torch.equal(got[3:4], alone)


@pytest.mark.parametrize("qtype", ["IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_embedding_rows(qtype: str) -> None:
    stored = random_blocks(qtype, 40, 512)
    ours, reference = both(dequantize_rows, stored, torch.tensor([3, 39, 0, 3]))
    close(ours, reference, 1e-6)


def filled(kind: CacheType, heads: int, dim: int) -> PagedTensor:
    cache = allocate_pages(kind, 24, heads, dim, CPU)
    write_rows(cache, torch.arange(24 * PAGE_SIZE), torch.randn(24 * PAGE_SIZE, heads, dim))
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "cache", "causal", "window"), [
    ("decode", "q8_0", True, None), ("decode", "f16", False, 40), ("prefill", "q8_0", True, None)
])  # fmt: skip
def test_attention(kind: RowKind, cache: CacheType, causal: bool, window: int | None, padded: bool) -> None:
    k, v, table = filled(cache, 2, 64), filled(cache, 2, 64), torch.randperm(24)[: 4 * 6].view(4, 6).int()
    table = torch.cat((table, torch.zeros(1, 6, dtype=torch.int32)))
    exact, batch = batch_of(kind), batch_of(kind, padded)
    q = torch.randn(batch.num_rows, 4, 64)
    options: dict[str, Any] = {"scale": 0.125, "causal": causal, "window": window}
    expected = attention(q[: exact.num_rows], k, v, table, exact, **options)
    with force("kernel"):
        got = attention(q, k, v, table, batch, **options)
    close(got[: exact.num_rows], expected, 3e-3)  # weights and values enter the products in 16 bits


@pytest.mark.parametrize("window", [None, 700])
def test_attention_over_pieces_of_all_lengths(window: int | None) -> None:
    pages = 1030
    k, v = (allocate_pages("f16", pages, 1, 32, CPU) for _ in range(2))
    for cache in (k, v):
        write_rows(cache, torch.arange(pages * PAGE_SIZE), torch.randn(pages * PAGE_SIZE, 1, 32))
    table = torch.randperm(pages)[None, :].int()
    for base in (500, 640, 2500, 16_380):
        batch, q = pack("decode", [3], [base], CPU, [0]), torch.randn(3, 2, 32)
        options: dict[str, Any] = {"scale": 0.2, "causal": True, "window": window}
        expected = attention(q, k, v, table, batch, **options)
        with force("kernel"):
            got = attention(q, k, v, table, batch, **options)
        close(got, expected, 3e-3)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bases", [BASES, [5, 30, 0]], ids=["pieces", "one piece"])
def test_gated_attention_leaves_rows_of_one_factor(bases: list[int], padded: bool) -> None:
    """To the bit what attention, the gate and one rounding to float16 give."""
    rows, spans, heads, dim = sum(LENGTHS), len(LENGTHS), 4, 64
    k, v, table = filled("q8_0", 2, dim), filled("q8_0", 2, dim), torch.randperm(24)[: 4 * 6].view(4, 6).int()
    table = torch.cat((table, torch.zeros(1, 6, dtype=torch.int32)))
    batch = pack("decode", LENGTHS, bases, CPU, LANES)
    if padded:
        given = torch.from_numpy(facts(LENGTHS, bases, LANES, rows + 2, spans + 2, spare_lane=4))
        batch = unpack("decode", given, [max(LENGTHS)] * (spans + 2), [96] * (spans + 2), rows + 2, spans + 2)
    q, gate = torch.randn(batch.num_rows, heads, dim), 3.0 * torch.randn(batch.num_rows, heads, 2, dim)[:, :, 1]
    options: dict[str, Any] = {"scale": 0.125, "causal": True}
    with force("kernel"):
        apart = gated_heads(attention(q, k, v, table, batch, **options), gate)
    for bound, scale in ((100.0, 2.0**8), (6.0, 2.0**12), (2.0**20, 2.0**-6)):
        with force("kernel"):
            got = gated_attention(q, gate, k, v, table, batch, **options, operand=torch.float16, bound=bound)
        assert isinstance(got, Rows) and isinstance(apart, Tensor) and (got.rows, got.columns) == apart.shape
        assert torch.equal(got.values[:rows], (apart * scale).half()[:rows]) and bool(
            (got.factors[:rows] == 1 / scale).all()
        )
    exact = pack("decode", LENGTHS, bases, CPU, LANES)
    reference = gated_attention(q[:rows], gate[:rows], k, v, table, exact, **options)
    assert isinstance(reference, Tensor) and isinstance(apart, Tensor)
    close(apart[:rows], reference, 3e-3)


@pytest.mark.parametrize("form", ["Q8_0", "F32"])
def test_values_are_within_their_bound(form: str) -> None:
    stored, norm = random_blocks(form, 130, 256), 1e-3 * torch.rand(256)
    with force("kernel"):
        projections = merge([pack_weight(stored, torch.float16, CPU) for _ in range(2)])
        bound = value_bound(projections, 1, norm)
        assert value_bound(projections, 1, 1e-12 * norm) is None and value_bound(projections, 1, torch.nan * norm) is None
    dense = dequantize(stored)
    largest = (rms_norm(dense, norm, 1e-6) @ dense.T).abs().max()
    assert bound is not None and 0.01 * bound < largest < 0.51 * bound


@pytest.mark.parametrize("cache", ["q8_0", "f16", "f32"])
def test_attention_inputs(cache: CacheType) -> None:
    rows, table = 4, RopeTable(64, 32, 1e4, None, CPU)
    q, k, v = torch.randn(rows, 3, 64), torch.randn(rows, 2, 64), torch.randn(rows, 2, 64)
    slots, angles = torch.tensor([5, 40, 1, 17]), table.at(torch.tensor([3, 9, 0, 63]))
    results = []
    for run in (force("kernel"), force("ref")):
        k_pages, v_pages = (allocate_pages(cache, 3, 2, 64, CPU) for _ in range(2))
        with run:
            out = attention_inputs(q, k, v, torch.rand(64) * 0 + 1.5, torch.ones(64), 1e-6, angles, k_pages, v_pages, slots)
        results.append((out, k_pages.data.float(), v_pages.data.float()))
    for ours, reference in zip(*results, strict=True):
        close(ours, reference, 1.0 / 127 if cache == "q8_0" else 1e-3)  # a value at the edge of two levels may take either


@pytest.mark.parametrize("padded", [False, True])
def test_gated_delta_rule(padded: bool) -> None:
    exact, batch, head_map = batch_of(), batch_of(padded=padded), torch.tensor([0, 1, 0, 1])
    rows, state, history = exact.num_rows, torch.randn(5, 4, 32, 32), torch.randn(5, 3, 2 * 64 + 128)
    raw, b, a = torch.randn(batch.num_rows, 256), torch.randn(batch.num_rows, 4), torch.randn(batch.num_rows, 4)
    rest = (torch.randn(256, 4), -torch.rand(4), torch.rand(4), 2, 32)
    expected = gdn_inputs(raw[:rows], b[:rows], a[:rows], history, *rest, exact)
    o, d = gdn_verify(*expected, state, head_map, exact)
    with force("kernel"):
        inputs = gdn_inputs(raw, b, a, history, *rest, batch)
        got_o, got_d = gdn_verify(*inputs, state, head_map, batch)
    for ours, reference in zip((*inputs, got_o, got_d), (*expected, o, d), strict=True):
        close(ours[:rows], reference)
    keep = torch.tensor([2, 1, 4] + [0, 0] * padded)
    k, delta, g = (torch.stack((x, x)) for x in (inputs.k, got_d, inputs.g))
    after, moved = [], []
    for run, at in ((force("kernel"), batch), (force("ref"), exact)):
        states, histories = torch.stack((state, 2 * state)), torch.stack((history, 2 * history))
        with run:
            log = (k[:, : at.num_rows], delta[:, : at.num_rows], g[:, : at.num_rows])
            gdn_replay(states, *log, keep[: at.num_spans], head_map, at)
            advance_history(histories, torch.stack((raw, raw)), keep[: at.num_spans], at)
        after.append(states)
        moved.append(histories)
    close(after[0], after[1])
    assert torch.equal(moved[0], moved[1])


def test_prompt_rows_of_the_delta_rule() -> None:
    lengths = [70, 5]
    batch, head_map = pack("prefill", lengths, [0, 64], CPU, [1, 0]), torch.tensor([0, 0])
    q, k = (torch.nn.functional.normalize(torch.randn(75, 1, 32), dim=-1) for _ in range(2))
    v, beta, g = torch.randn(75, 2, 32), torch.rand(75, 2), -0.2 * torch.rand(75, 2)
    state = torch.randn(2, 2, 32, 32)
    ours, reference = both(gdn_prefill, q, k, v, beta, g, state, head_map, batch)
    for got, expected in zip(ours, reference, strict=True):
        close(got, expected, 1e-4)
    room = torch.full((2, 3, 2, 32, 32), torch.nan)
    with force("kernel"):
        _, after = gdn_prefill(q, k, v, beta, g, state, head_map, batch, room[1])
    assert (
        torch.equal(after, ours[1])
        and torch.equal(room[1, :2], after)
        and room[0].isnan().all()
        and room[1, 2].isnan().all()
    )


def test_convolutions() -> None:
    batch = batch_of()
    x, history, weight = torch.randn(9, 40), torch.randn(5, 3, 40), torch.randn(40, 4)
    close(*both(causal_conv, x, history, weight, batch))
    ours, reference = both(conv_history, x, history, torch.tensor([1, 1, 4]), batch)
    assert torch.equal(ours, reference)
    room = torch.full((4, 3, 40), torch.nan)
    with force("kernel"):
        there = conv_history(x, history, torch.tensor([1, 1, 4]), batch, room)
    assert torch.equal(there, ours) and torch.equal(room[:3], ours) and room[3].isnan().all()
    close(*both(dynamic_conv, torch.randn(2, 4, 64), torch.randn(2, 64), torch.randn(2, 4, 2, 8)))


def test_norms_and_gates() -> None:
    x, delta, weight = torch.randn(4, 300), torch.randn(4, 300), torch.rand(300)
    close(*both(rms_norm, x, weight, 1e-6))
    for ours, reference in zip(*both(add_rms_norm, x, delta, weight, 1e-6), strict=True):
        close(ours, reference)
    close(*both(gated_output, torch.randn(4, 3, 32), torch.randn(4, 3, 32), torch.rand(32), 1e-6))
    close(*both(swiglu, x, delta))
    close(*both(gated_heads, torch.randn(4, 3, 32), torch.randn(4, 3, 32)))
    close(*both(apply_rope, torch.randn(4, 3, 32), RopeTable(16, 16, 1e4, None, CPU).at(torch.arange(4))))


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("size", [640, 1100])
def test_add_rms_norm_twice_is_a_norm_and_rows_of_it(size: int, with_delta: bool) -> None:
    x, weight = torch.randn(4, size) * torch.tensor([[1.0], [1e6], [0.0], [1e-7]]), torch.rand(size)
    delta = torch.randn(4, size) if with_delta else None
    prepare = importlib.import_module("paceline.ops.linear.kernel").prepare
    with force("kernel"):
        total, n = add_rms_norm(x, delta, weight, 1e-6)
        same, plain, rows = add_rms_norm_twice(x, delta, weight, 1e-6, torch.float16)
        assert isinstance(n, Tensor) and isinstance(rows, Rows)
        expected = prepare(n, torch.float16)
    assert torch.equal(same, total) and torch.equal(plain, n)
    assert torch.equal(rows.values[:4], expected.values[:4]) and torch.equal(rows.factors[:4], expected.factors[:4])
    close(plain, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize(("size", "rows", "taps"), [(300, 4, 2), (1100, 2, 4), (64, 1, 2)])
def test_a_convolution_may_be_left_to_the_norm_behind_it(size: int, rows: int, taps: int) -> None:
    x, delta, weight, base = (
        torch.randn(3 * rows, size),
        torch.randn(3 * rows, size),
        torch.rand(size),
        torch.randn(taps, size),
    )
    dynamic = torch.randn(3, rows, 2, taps, size // 4)[:, :, 1]
    left = Convolved(delta, base, dynamic)
    for ours, reference in zip(*both(add_rms_norm, x, left, weight, 1e-6), strict=True):
        close(ours, reference)
    with force("kernel"):
        mixed = dynamic_conv(delta.unflatten(0, (3, rows)), base, dynamic)
        assert isinstance(mixed, Tensor)
        expected = add_rms_norm_twice(x, mixed.flatten(0, 1), weight, 1e-6, torch.float16)
        got = add_rms_norm_twice(x, left, weight, 1e-6, torch.float16)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert isinstance(got[2], Rows) and isinstance(expected[2], Rows)
    assert torch.equal(got[2].values[: 3 * rows], expected[2].values[: 3 * rows])


@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (24, 8)])
def test_norm_and_rope_is_one_after_the_other(dim: int, rotary: int) -> None:
    wide, alone, weights = torch.randn(4, 7 * dim), torch.randn(4, 2, dim), torch.rand(3, dim)
    layers = [wide[:, : 2 * dim].unflatten(1, (2, dim)), alone, wide[:, 5 * dim :].unflatten(1, (2, dim))]
    table, positions = RopeTable(16, rotary, 1e4, None, CPU), torch.tensor([3, 0, 15, 3])
    ours, reference = both(norm_and_rope, layers, weights, 1e-6, table, positions)
    close(ours, reference)
    with force("kernel"):
        parts = [apply_rope(rms_norm(x, w, 1e-6), table.at(positions)) for x, w in zip(layers, weights, strict=True)]
    assert torch.equal(ours, torch.stack(parts))


def test_vocabulary() -> None:
    logits = torch.randn(3, 3000)
    logits[0, 70] = logits[0, 2900] = 9.0
    assert torch.equal(*both(argmax, logits))
    for ours, reference in zip(*both(top_k, logits, 16), strict=True):
        assert torch.equal(ours, reference)
    seeds = (torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.long), torch.tensor([5, 6, 7]))
    assert torch.equal(*both(draw, logits, torch.tensor([0.7, 0.0, 1.2]), torch.zeros(3), *seeds))


@pytest.mark.parametrize("size", [96, 37])
def test_rows_may_lie_anywhere(size: int) -> None:
    x, delta, weight = torch.randn(3, size), torch.randn(3, size), torch.rand(size)
    moved = torch.full((4, 3, size + 5), torch.nan)
    moved[0, :, 1 : size + 1], moved[1, :, 3 : size + 3] = x, delta
    x_moved, delta_moved = moved[0, :, 1 : size + 1], moved[1, :, 3 : size + 3]
    with force("kernel"):
        total, n = add_rms_norm(x, delta, weight, 1e-6)
        assert isinstance(n, Tensor)
        got = add_rms_norm(x_moved, delta_moved, weight, 1e-6)
        assert torch.equal(got[0], total) and isinstance(got[1], Tensor) and torch.equal(got[1], n)
        one, other = swiglu(x_moved, delta_moved), swiglu(x, delta)
        assert isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    close(n, rms_norm(x + delta, weight, 1e-6))


@pytest.mark.parametrize("given", [False, True])
def test_acceptance(given: bool) -> None:
    lengths = torch.tensor([3, 1, 8, 5, 0])
    starts = lengths.cumsum(0) - lengths
    tokens, picks = torch.randint(0, 2, (19,)), torch.randint(0, 2, (17,))
    logits = torch.randn(17, 5000)
    logits[3, 4900], logits[0, 17] = torch.nan, torch.inf
    held = torch.tensor([1, -1, 7, 6, 3]) if given else None  # more than there are of the last two
    with force("kernel"):
        parts = peaks(logits)
    assert parts.shape[1] > 1 and torch.equal(parts.amax(1)[[0, 3]].isfinite(), torch.tensor([False, False]))
    for got, expected in zip(*both(accept, tokens, picks, parts, starts, lengths, 8, held), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("drafting", [False, True])
def test_inputs_advance(drafting: bool) -> None:
    blocks, ends = 130, torch.tensor([[3, 90, 0], [8, 91, 0], [0, 92, 0]])[:, :2]
    lengths = [4] * blocks if drafting else [1 + at % 4 for at in range(blocks)]
    packed = torch.from_numpy(facts(lengths, [*range(blocks)], [*range(blocks)]))
    places, limits = torch.arange(blocks) % 4 - 1, torch.arange(blocks) % 9
    results = []
    for implementation in ("ref", "kernel"):
        batch = unpack("decode", packed.clone(), lengths, [0] * blocks, sum(lengths), blocks)
        anchors, draws = torch.arange(blocks), torch.arange(3 * blocks)
        with force(implementation):
            advance(ends, places, anchors, batch, None if drafting else limits, draws if drafting else None)
        results.append((batch.positions, batch.span_bases, batch.span_lengths, anchors, draws))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_counts_advance() -> None:
    ends, places = torch.tensor([[3, 90, 0], [8, 91, 0]])[:, :2], torch.arange(300) % 3 - 1
    counts, expected = torch.arange(300).repeat(2, 1)
    with force("kernel"):
        advance_counts(ends, places, counts)
    advance_counts(ends, places, expected)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("width", [40, 5000])
def test_features(width: int) -> None:
    batch = unpack("decode", torch.from_numpy(facts([5, 1, 4], [13, 7, 100], [2, 0, 3])), [5, 1, 4], [0] * 3, 10, 3)
    rings, features = torch.randn(4, 8, width).repeat(2, 1, 1, 1), torch.randn(10, width)
    keep_features(rings[0], features, batch)
    with force("kernel"):
        keep_features(rings[1], features, batch)
        found = kept_features(rings[0], batch)
    assert torch.equal(*rings) and torch.equal(found, features) and torch.equal(kept_features(rings[1], batch), features)


@pytest.mark.parametrize("drafts", [None, 300])
def test_input_tokens(drafts: int | None) -> None:
    anchors, made = torch.arange(100, 105), None if drafts is None else torch.arange(drafts).view(-1, 3)
    sources = torch.randint(0, 5 + (drafts or 0), (200,))
    out, expected = torch.zeros(2, 200, dtype=torch.long)
    with force("kernel"):
        input_tokens(anchors, sources, made, out)
    input_tokens(anchors, sources, made, expected)
    assert torch.equal(out, expected)


def test_slots_of_rows() -> None:
    table = torch.randint(0, 9, (5, 8), dtype=torch.int32)
    got, expected = both(row_slots, table, batch_of(padded=True))
    assert torch.equal(got, expected)
