"""The gated delta rule's kernels against the recurrence in float64, and their bits against one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.ops.conv import advance_history
from paceline.ops.dispatch import force
from paceline.ops.gdn import GdnInputs, ReplayLog, gdn_inputs, gdn_prefill, gdn_replay, gdn_verify, verify_arithmetic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
LANES = 9
SHAPES = [(2, 6, 128, 128), (1, 2, 16, 16), (2, 2, 48, 80), (1, 3, 64, 24)]
"""Key heads, value heads, Dk, Dv."""
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, beta, g."""


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rows_of(count: int, shape: tuple[int, int, int, int], magnitude: float = 1.0) -> Rows:
    """v is a slice of a wider tensor, as in the model."""
    key_heads, heads, dk, dv = shape
    q = F.normalize(randn(count, key_heads, dk, seed=1), dim=-1) * dk**-0.5
    k = F.normalize(randn(count, key_heads, dk, seed=2), dim=-1)
    v = magnitude * randn(count, 64 + heads * dv, seed=3)[:, 64:].unflatten(1, (heads, dv))
    beta = torch.sigmoid(randn(count, heads, seed=4))
    return q, k, v, beta, -0.2 * F.softplus(randn(count, heads, seed=5))


def states(lanes: list[int], shape: tuple[int, int, int, int]) -> Tensor:
    """Of all lanes; NaN in those that no span is of."""
    state = torch.full((LANES, shape[1], shape[2], shape[3]), torch.nan, device=DEVICE)
    state[lanes] = 0.3 * randn(len(lanes), *shape[1:], seed=6)
    return state


def heads_of(shape: tuple[int, int, int, int], tiled: bool) -> Tensor:
    heads = torch.arange(shape[1], device=DEVICE)
    return heads % shape[0] if tiled else heads // (shape[1] // shape[0])


def decode_batch(lengths: list[int], lanes: list[int]) -> PackedBatch:
    return pack("decode", lengths, [0] * len(lengths), DEVICE, lanes)


def cut(rows: Rows, start: int, end: int) -> Rows:
    q, k, v, beta, g = (x[start:end] for x in rows)
    return q, k, v, beta, g


def recurrence(rows: Rows, state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(o [n, Hv, Dv], d [n, Hv, Dv], S after) of one span in float64."""
    q, k, v, beta, g = (x.double() for x in rows)
    q, k, s = q[:, head_map], k[:, head_map], state.double()
    out, deltas = [torch.empty_like(v[:0])], [torch.empty_like(v[:0])]
    for t in range(len(v)):
        s = g[t].exp()[:, None, None] * s
        d = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t, :, :, None] * d[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", s, q[t])[None])
        deltas.append(d[None])
    return torch.cat(out), torch.cat(deltas), s


def close(got: Tensor, expected: Tensor, magnitude: float = 1.0, what: str = "") -> None:
    # values and states are of order ``magnitude``; single roundings decay with the state and do not pile up. exp is good to
    # 2^-22, products of two float16 halves to about 1e-6
    error = (got.double() - expected).abs().max().item() if got.numel() else 0.0
    assert error <= 6e-6 * magnitude, f"{what}: error {error}"


@pytest.fixture(autouse=True)
def poison() -> None:
    """Memory that is handed out again holds NaN: what a kernel leaves unwritten is seen."""
    blocks = [
        torch.full((size,), torch.nan, device=DEVICE) for size in (2**10, 2**14, 2**17, 2**18, 2**20) for _ in range(4)
    ]
    del blocks


@pytest.fixture(params=[False, True], ids=["", "portable"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of this GPU, and those that run on every GPU."""
    with force("portable") if request.param else nullcontext():
        yield


def padded_batch(lengths: list[int], lanes: list[int], rows: int, spans: int, spare: int) -> PackedBatch:
    """Rows of nobody behind the real ones, and empty spans of a spare lane."""
    packed = torch.from_numpy(facts(lengths, [0] * len(lengths), lanes, rows, spans, spare)).to(DEVICE)
    return unpack("decode", packed, lengths, [0] * len(lengths), rows, spans)


# -- inputs ----------------------------------------------------------------------------------------------------------------

Projections = tuple[Tensor, Tensor, Tensor]
"""raw, b, a: columns of one wider tensor."""
Weights = tuple[Tensor, Tensor, Tensor]
"""Of the convolution; A; dt_bias."""


def projections(rows: int, shape: tuple[int, int, int, int], magnitude: float = 1.0) -> Projections:
    key_heads, heads, dk, dv = shape
    channels = 2 * key_heads * dk + heads * dv
    wide = randn(rows, channels + 2 * heads + 5, seed=11)
    wide[:, :channels] *= magnitude
    b, a = wide[:, channels + 1 : channels + 1 + heads], wide[:, -heads:]
    b[0, 0], b[0, 1], a[0, 0], a[0, 1] = 90.0, -90.0, 40.0, -40.0
    return wide[:, :channels], b, a


def weights_of(shape: tuple[int, int, int, int]) -> Weights:
    key_heads, heads, dk, dv = shape
    taps = randn(2 * key_heads * dk + heads * dv, 4, seed=12)
    return taps, -randn(heads, seed=13).exp(), randn(heads, seed=14)


def histories(lanes: list[int], channels: int) -> Tensor:
    history = torch.full((LANES, 3, channels), torch.nan, device=DEVICE)
    history[lanes] = randn(len(lanes), 3, channels, seed=15)
    return history


def exact_inputs(given: Projections, line: Tensor, weights: Weights, shape: tuple[int, int, int, int]) -> list[Tensor]:
    """Of one span, in float64; ``line`` [3, C] is its history."""
    key_heads, heads, dk, dv = shape
    raw, b, a = (x.double() for x in given)
    taps, decay, dt_bias = (x.double() for x in weights)
    mixed = F.conv1d(torch.cat((line.double(), raw)).T[None], taps[:, None], groups=len(taps))[0].T
    mixed = mixed * mixed.sigmoid()
    q, k, v = mixed.split((key_heads * dk, key_heads * dk, heads * dv), dim=1)
    q, k = (x.unflatten(1, (key_heads, dk)) for x in (q, k))
    q, k = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return [q * dk**-0.5, k, v.unflatten(1, (heads, dv)), b.sigmoid(), decay * F.softplus(a + dt_bias, threshold=60.0)]


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
@pytest.mark.parametrize("shape", [(16, 48, 128, 128), *SHAPES], ids=str)
def test_inputs(shape: tuple[int, int, int, int], magnitude: float) -> None:
    """Against float64, with a log and without, in a batch that is filled up; and row by row."""
    lengths, lanes, real = [3, 1, 9, 70, 2], [4, 0, 3, 7, 8], 85
    (raw, b, a), weights = projections(real + 6, shape, magnitude), weights_of(shape)
    history = magnitude * histories(lanes, raw.shape[1])
    for x in (raw, b, a):
        x[real:] = torch.nan
    key_heads, heads, dk, dv = shape
    room = ((raw.shape[1],), (key_heads, dk), (heads, dv), (heads,))
    log = ReplayLog(*(torch.full((real + 20, *size), torch.nan, device=DEVICE) for size in room))
    batch = padded_batch(lengths, lanes, real + 6, 7, 5)
    got = gdn_inputs(raw, b, a, history, *weights, key_heads, dk, batch, log)
    assert got.k.data_ptr() == log.k.data_ptr() and got.g.data_ptr() == log.g.data_ptr()
    assert torch.equal(log.raw[:real], raw[:real]) and log.raw[real + 6 :].isnan().all()
    start = 0
    for length, lane in zip(lengths, lanes, strict=True):
        rows = slice(start, start + length)
        expected = exact_inputs((raw[rows], b[rows], a[rows]), history[lane], weights, shape)
        for name, mine, want in zip(GdnInputs._fields, got, expected, strict=True):
            scale = magnitude if name == "v" else 1.0
            # sums of four products of up to about 10; unit vectors of them; exp is good to 2^-22
            torch.testing.assert_close(mine[rows].double(), want, rtol=4e-6, atol=6e-6 * scale, msg=f"{name} of lane {lane}")
        one = pack("decode", [length], [0], DEVICE, [lane])
        alone = gdn_inputs(raw[rows], b[rows], a[rows], history, *weights, key_heads, dk, one)
        for row in range(length):
            line = torch.cat((history[lane], raw[rows]))[row : row + 3]
            single = pack("decode", [1], [row], DEVICE)
            at = slice(start + row, start + row + 1)
            step = gdn_inputs(raw[at], b[at], a[at], line[None], *weights, key_heads, dk, single)
            for mine, span, whole in zip(step, alone, got, strict=True):
                assert torch.equal(mine, whole[at]) and torch.equal(span[row : row + 1], whole[at]), f"row {start + row}"
        start += length


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_that_is_filled_up_has_the_bits_of_one_that_is_not(shape: tuple[int, int, int, int]) -> None:
    lengths, lanes, real, head_map = [3, 8, 1], [4, 0, 3], 12, heads_of(shape, True)
    rows, state, plain = rows_of(real, shape), states(lanes, shape), decode_batch(lengths, lanes)
    o, d = gdn_verify(*rows, state, head_map, plain)
    keep = torch.tensor([2, 8, 0, 1, 1], device=DEVICE)
    expected = torch.stack((state, state))
    logs = [torch.stack((x, 0.5 * x)) for x in (rows[1], d, rows[4])]
    gdn_replay(expected, logs[0], logs[1], logs[2], keep[:3], head_map, plain)

    q, k, v, beta, g = (torch.cat((x, torch.full_like(x[:4], torch.nan))) for x in rows)
    batch = padded_batch(lengths, lanes, real + 4, 5, 6)
    log = torch.full((real + 9, *v.shape[1:]), torch.nan, device=DEVICE)
    got, logged = gdn_verify(q, k, v, beta, g, state, head_map, batch, log)
    assert torch.equal(got[:real], o) and torch.equal(logged[:real], d) and logged.data_ptr() == log.data_ptr()
    assert log[real:].isnan().all()
    after = torch.stack((state, state))
    logs = [torch.stack((x, 0.5 * x)) for x in (k, logged, g)]
    gdn_replay(after, logs[0], logs[1], logs[2], keep, head_map, batch)
    assert torch.equal(after.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.usefixtures("kernels")
def test_a_captured_round_runs_with_other_contents() -> None:
    """Inputs, verify, and the commit, captured once for 5 spans and 24 rows; then other lanes, lengths and keeps."""
    shape, rows, spans = SHAPES[0], 24, 5
    key_heads, heads, dk, dv = shape
    head_map, weights = heads_of(shape, True), weights_of(shape)
    (raw, b, a), lanes = projections(rows, shape), list(range(LANES))
    batch = padded_batch([8, 8, 1], [1, 2, 3], rows, spans, LANES - 1)
    keep = torch.zeros(spans, dtype=torch.int64, device=DEVICE)
    state, history = states(lanes, shape)[None].clone(), histories(lanes, raw.shape[1])[None].clone()
    room = ((raw.shape[1],), (key_heads, dk), (heads, dv), (heads,))
    log = ReplayLog(*(torch.zeros(1, rows, *size, device=DEVICE) for size in room))

    def turn() -> Tensor:
        own = ReplayLog(*(x[0] for x in log))
        inputs = gdn_inputs(raw, b, a, history[0], *weights, key_heads, dk, batch, own)
        o, _ = gdn_verify(*inputs, state[0], head_map, batch, own.d)
        advance_history(history, log.raw, keep, batch)
        gdn_replay(state, log.k, log.d, log.g, keep, head_map, batch)
        return o

    turn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = turn()
    tensors = (batch.positions, batch.row_span, batch.starts, batch.span_lengths, batch.span_bases, batch.lanes)
    for lengths, own, kept in (
        ([8, 8, 1], [1, 2, 3], [3, 8, 1]),
        ([1], [6], [1]),
        ([5, 1, 7, 2], [0, 7, 2, 4], [5, 0, 6, 2]),
    ):
        other = padded_batch(lengths, own, rows, spans, LANES - 1)
        for place, values in zip(
            tensors,
            (other.positions, other.row_span, other.starts, other.span_lengths, other.span_bases, other.lanes),
            strict=True,
        ):
            place.copy_(values)
        keep.zero_()
        keep[: len(kept)] = torch.tensor(kept, device=DEVICE)
        before = state.clone(), history.clone()
        eager = turn().clone()
        wanted = state.clone(), history.clone()
        state.copy_(before[0])
        history.copy_(before[1])
        captured.fill_(torch.nan)
        graph.replay()
        real = sum(lengths)
        assert torch.equal(captured[:real], eager[:real]), f"spans {lengths}"
        assert torch.equal(state, wanted[0]) and torch.equal(history, wanted[1]), f"spans {lengths}"
        untouched = [lane for lane in lanes if lane not in own]
        assert torch.equal(state[:, untouched], before[0][:, untouched])


# -- generated rows --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verify_and_replay_are_the_recurrence(shape: tuple[int, int, int, int], magnitude: float, tiled: bool) -> None:
    lengths, lanes, head_map = [3, 8, 1, 16], [4, 0, 3, 7], heads_of(shape, tiled)
    rows, state, batch = rows_of(sum(lengths), shape, magnitude), states(lanes, shape), decode_batch(lengths, lanes)
    before = state.clone()
    o, d = gdn_verify(*rows, state, head_map, batch)
    assert torch.equal(state.nan_to_num(9.0), before.nan_to_num(9.0)), "verify must leave the committed state alone"
    for kept in (0, 1, 2, 7, 16):
        keep = [min(kept, length) for length in lengths]
        after = torch.stack((before, before))
        log = [torch.stack((torch.zeros_like(x), x)) for x in (rows[1], d, rows[4])]
        gdn_replay(after, log[0], log[1], log[2], torch.tensor(keep, device=DEVICE), head_map, batch)
        assert after[:, [1, 2, 5, 6, 8]].isnan().all(), "the lanes of no span"
        for offset, length, rows_kept, lane in zip(batch.offsets, lengths, keep, lanes, strict=True):
            expected = recurrence(cut(rows, offset, offset + rows_kept), before[lane], head_map)
            close(after[1, lane], expected[2], magnitude, f"state of lane {lane} after {rows_kept}")
            assert torch.equal(after[0, lane], before[lane]), "a log of zeros"
            if kept == 16:
                close(o[offset : offset + length], expected[0], magnitude, f"o of lane {lane}")
                close(d[offset : offset + length], expected[1], magnitude, f"d of lane {lane}")


def stepped(rows: Rows, state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One lane, one row at a time: o, d, and the state after each number of rows."""
    outs, deltas, after = [], [], [state]
    batch = decode_batch([1], [0])
    for t in range(len(rows[0])):
        row = cut(rows, t, t + 1)
        o, d = gdn_verify(*row, after[-1][None], head_map, batch)
        outs.append(o)
        deltas.append(d)
        pool = after[-1].clone()[None, None]
        gdn_replay(
            pool, row[1][None], d[None], row[4][None], torch.ones(1, dtype=torch.long, device=DEVICE), head_map, batch
        )
        after.append(pool[0, 0])
    return torch.cat(outs), torch.cat(deltas), after


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spans_have_the_bits_of_steps_in_any_company(shape: tuple[int, int, int, int]) -> None:
    lengths, head_map = [8, 1, 3, 16, 2, 8], heads_of(shape, True)
    lanes = [4, 0, 3, 7, 8, 1]
    rows, state = rows_of(sum(lengths), shape), states(lanes, shape)
    batch = decode_batch(lengths, lanes)
    parts = [cut(rows, offset, offset + length) for offset, length in zip(batch.offsets, lengths, strict=True)]
    plain = [stepped(part, state[lane], head_map) for part, lane in zip(parts, lanes, strict=True)]
    for order in ([0, 1, 2, 3, 4, 5], [3, 5, 0], [2, 4, 1, 0], [1], [3]):
        q, k, v, beta, g = (torch.cat(x) for x in zip(*(parts[span] for span in order), strict=True))
        together = decode_batch([lengths[span] for span in order], [lanes[span] for span in order])
        o, d = gdn_verify(q, k, v, beta, g, state, head_map, together)
        assert torch.equal(o, torch.cat([plain[span][0] for span in order])), f"o, spans {order}"
        assert torch.equal(d, torch.cat([plain[span][1] for span in order])), f"d, spans {order}"
        for kept in range(17):
            keep = [min(max(kept - span, 0), lengths[span]) for span in order]
            after = torch.stack([state, state, state])
            log = [torch.stack((0.5 * x, x, x)) for x in (k, d, g)]
            gdn_replay(after, log[0], log[1], log[2], torch.tensor(keep, device=DEVICE), head_map, together)
            for span, rows_kept in zip(order, keep, strict=True):
                got, expected = after[1:, lanes[span]], plain[span][2][rows_kept]
                assert torch.equal(got, expected.expand_as(got)), f"state, span {span} of {order}, keep {rows_kept}"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("offset", [1, 4])
def test_where_tensors_lie_does_not_matter(offset: int) -> None:
    shape, lengths, lanes = SHAPES[0], [3, 8], [1, 0]
    rows, state, head_map, batch = (
        rows_of(11, shape),
        states(lanes, shape),
        heads_of(shape, True),
        decode_batch(lengths, lanes),
    )
    moved = []
    for x in (*rows, state):
        place = torch.empty(x.numel() + offset, device=DEVICE)[offset:].view(x.shape)
        moved.append(place.copy_(x))
    expected = gdn_verify(*rows, state, head_map, batch)
    q, k, v, beta, g, elsewhere = moved
    got = gdn_verify(q, k, v, beta, g, elsewhere, head_map, batch)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# -- heads of 128 by 128, which some GPUs have a verify of their own for ----------------------------------------------------

MODEL = (16, 48, 128, 128)


def test_which_verify_this_is() -> None:
    hopper = torch.cuda.get_device_capability(DEVICE) == (9, 0)
    assert verify_arithmetic(DEVICE).startswith("hopper-" if hopper else "portable-")
    with force("portable"):
        assert verify_arithmetic(DEVICE).startswith("portable-")
    with force("ref"):
        assert verify_arithmetic(DEVICE).startswith("reference-")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", range(1, 18))
def test_any_number_of_rows(count: int) -> None:
    """q and k in wider tensors; what is behind the last row stays as it is."""
    head_map, state = heads_of(MODEL, False), states([4], MODEL)
    q, k, v, beta, g = rows_of(count, MODEL)
    expected = recurrence((q, k, v, beta, g), state[4], head_map)
    q, k = torch.cat((q, q), dim=1)[:, :16], torch.cat((k, k), dim=1)[:, 16:]
    log = torch.full((count + 3, *v.shape[1:]), torch.nan, device=DEVICE)
    o, d = gdn_verify(q, k, v, beta, g, state, head_map, decode_batch([count], [4]), log)
    close(o, expected[0], what="o")
    close(d, expected[1], what="d")
    assert d.data_ptr() == log.data_ptr() and log[count:].isnan().all()


@pytest.mark.parametrize("spans", range(1, 9))
def test_a_span_among_others_has_the_bits_of_one_alone(spans: int) -> None:
    """Some spans are empty, those that fill up the batch too, and in the end one span's rows are NaN."""
    lengths = [8, 1, 3, 0, 11, 2, 8, 5][:spans]
    lanes, real, head_map = [4, 0, 3, 7, 8, 1, 6, 2][:spans], sum(lengths), heads_of(MODEL, False)
    rows, state = rows_of(real + 2, MODEL), states(lanes, MODEL)
    for x in rows:
        x[real:] = torch.nan
    offsets = [sum(lengths[:span]) for span in range(spans)]
    parts = [cut(rows, offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)]
    alone = [
        gdn_verify(*part, state, head_map, decode_batch([length], [lane])) if length else (part[2], part[2])
        for part, length, lane in zip(parts, lengths, lanes, strict=True)
    ]
    for extra in (0, 1, 3):
        o, d = gdn_verify(*rows, state, head_map, padded_batch(lengths, lanes, real + 2, spans + extra, 5))
        assert torch.equal(o[:real], torch.cat([x for x, _ in alone])), f"o, {extra} spans of nobody"
        assert torch.equal(d[:real], torch.cat([x for _, x in alone])), f"d, {extra} spans of nobody"
    for x in rows:
        x[lengths[0] - 1] = torch.nan
    o, d = gdn_verify(*rows, state, head_map, padded_batch(lengths, lanes, real + 2, spans, 5))
    assert o[lengths[0] - 1].isnan().all()
    others = [row for row in range(real) if row != lengths[0] - 1]
    assert torch.equal(o[others], torch.cat([x for x, _ in alone])[others])
    assert torch.equal(d[others], torch.cat([x for _, x in alone])[others])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", [2, 8, 9, 17])
def test_a_walk_may_be_cut_and_committed_between(count: int) -> None:
    """At every row: walk, replay of what was walked, walk of the rest."""
    rows, state, head_map = rows_of(count, MODEL), states([2], MODEL), heads_of(MODEL, False)
    o, d = gdn_verify(*rows, state, head_map, decode_batch([count], [2]))
    for at in range(1, count):
        first, second = cut(rows, 0, at), cut(rows, at, count)
        before = gdn_verify(*first, state, head_map, decode_batch([at], [2]))
        pool = state[None].clone()
        keep = torch.tensor([at], device=DEVICE)
        gdn_replay(pool, first[1][None], before[1][None], first[4][None], keep, head_map, decode_batch([at], [2]))
        after = gdn_verify(*second, pool[0], head_map, decode_batch([count - at], [2]))
        assert torch.equal(torch.cat((before[0], after[0])), o), f"o, cut at {at}"
        assert torch.equal(torch.cat((before[1], after[1])), d), f"d, cut at {at}"


# -- prompt rows -----------------------------------------------------------------------------------------------------------


def prefill(rows: Rows, lengths: list[int], lanes: list[int], state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor]:
    return gdn_prefill(*rows, state, head_map, pack("prefill", lengths, [0] * len(lengths), DEVICE, lanes))


@pytest.mark.parametrize("lengths", [[1], [64], [65, 3], [200, 128, 63], [15, 16, 17, 31, 33]], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_the_recurrence(shape: tuple[int, int, int, int], magnitude: float, lengths: list[int]) -> None:
    lanes, head_map = [5, 2, 8, 0, 6][: len(lengths)], heads_of(shape, False)
    rows, state = rows_of(sum(lengths), shape, magnitude), states(lanes, shape)
    o, after = prefill(rows, lengths, lanes, state, head_map)
    offset = 0
    for span, (length, lane) in enumerate(zip(lengths, lanes, strict=True)):
        expected = recurrence(cut(rows, offset, offset + length), state[lane], head_map)
        close(o[offset : offset + length], expected[0], magnitude, f"o of span {span}")
        close(after[span], expected[2], magnitude, f"state of span {span}")
        offset += length


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_states_in_a_given_place(shape: tuple[int, int, int, int]) -> None:
    lengths, lanes, head_map = [107, 3, 128], [5, 2, 8], heads_of(shape, False)
    rows, state = rows_of(sum(lengths), shape), states(lanes, shape)
    o, after = prefill(rows, lengths, lanes, state, head_map)
    room = torch.full((2, 4, *after.shape[1:]), torch.nan, device=DEVICE)
    batch = pack("prefill", lengths, [0] * len(lengths), DEVICE, lanes)
    same, there = gdn_prefill(*rows, state, head_map, batch, room[1])
    assert torch.equal(same, o) and torch.equal(there, after) and there.data_ptr() == room[1].data_ptr()
    assert room[0].isnan().all() and room[1, 3].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_may_be_cut_and_have_company(shape: tuple[int, int, int, int]) -> None:
    """At multiples of 64, beside spans of any length."""
    length, lanes, head_map = 300, [5], heads_of(shape, True)
    rows, state = rows_of(length, shape), states([5], shape)
    others, beside = rows_of(200, shape, 3.0), states([0, 8], shape)
    whole, after = prefill(rows, [length], lanes, state, head_map)
    for cuts in ([0, 64, 300], [0, 128, 192, 300], [0, 256, 300], [0, 64, 128, 192, 256, 300]):
        now, outs = state[5], []
        for start, end in zip(cuts, cuts[1:], strict=False):
            q, k, v, beta, g = (torch.cat((x[:70], y, x[70:])) for x, y in zip(others, cut(rows, start, end), strict=True))
            beside[5] = now
            o, new = prefill((q, k, v, beta, g), [70, end - start, 130], [0, 5, 8], beside, head_map)
            outs.append(o[70 : 70 + end - start])
            now = new[1]
        assert torch.equal(torch.cat(outs), whole), f"o, cut at {cuts}"
        assert torch.equal(now, after[0]), f"state, cut at {cuts}"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_that_forget_everything_and_rows_that_forget_nothing(share: float) -> None:
    """Decays of e^-1000 and of 1 in any mixture; the chunked form's sums of them are exact in float32."""
    shape = SHAPES[0]
    (q, k, v, beta, _), state, head_map = rows_of(150, shape), states([0], shape), heads_of(shape, True)
    chosen = torch.rand(150, shape[1], generator=torch.Generator().manual_seed(7)).to(DEVICE) < share
    rows = q, k, v, beta, torch.where(chosen, -1000.0, 0.0)
    expected, deltas, last = recurrence(rows, state[0], head_map)
    o, d = gdn_verify(*rows, state, head_map, decode_batch([150], [0]))
    close(o, expected, what="verify o")
    close(d, deltas, what="verify d")
    o, after = prefill(rows, [150], [0], state, head_map)
    close(o, expected, what="prefill o")
    close(after[0], last, what="prefill state")


def test_equal_keys_written_with_full_strength() -> None:
    """The hardest triangular system: every entry below the diagonal is 1, and its inverse has entries of 1 and -1 only."""
    shape = SHAPES[0]
    q, k, v, _, _ = rows_of(128, shape)
    rows = q, k[:1].expand(128, -1, -1).contiguous(), v, torch.ones(128, shape[1], device=DEVICE), v.new_zeros(128, shape[1])
    state, head_map = states([0], shape), heads_of(shape, True)
    expected = recurrence(rows, state[0], head_map)
    o, after = prefill(rows, [128], [0], state, head_map)
    # sums of up to 64 values of order 1 cancel
    close(o, expected[0], 8.0, "o")
    close(after[0], expected[2], 8.0, "state")
