"""The gated delta rule against the recurrence in float64, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import pack
from paceline.ops.gdn import ReplayLog, gdn_inputs, gdn_mixer, gdn_prefill, gdn_replay, gdn_verify
from paceline.ops.norm import gated_output

CPU = torch.device("cpu")
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 32, 24
TILED = torch.arange(VALUE_HEADS) % KEY_HEADS
GROUPED = torch.arange(VALUE_HEADS) // (VALUE_HEADS // KEY_HEADS)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int) -> Inputs:
    q = F.normalize(randn(rows, KEY_HEADS, KEY_DIM, seed=1), dim=-1) * KEY_DIM**-0.5
    k = F.normalize(randn(rows, KEY_HEADS, KEY_DIM, seed=2), dim=-1)
    v = randn(rows, VALUE_HEADS, VALUE_DIM, seed=3)
    beta = torch.sigmoid(randn(rows, VALUE_HEADS, seed=4))
    return q, k, v, beta, -0.2 * F.softplus(randn(rows, VALUE_HEADS, seed=5))


def states(spans: int) -> Tensor:
    return 0.3 * randn(spans, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=6)


def recurrence(rows: Inputs, state: Tensor, head_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(o [n, Hv, Dv], d [n, Hv, Dv], S after) of one span, head by head."""
    q, k, v, beta, g = (x.double() for x in rows)
    state = state.double().clone()
    out, deltas = torch.empty_like(v), torch.empty_like(v)
    for t in range(len(v)):
        for head, key_head in enumerate(head_map.tolist()):
            s = g[t, head].exp() * state[head]
            d = beta[t, head] * (v[t, head] - s.T @ k[t, key_head])
            state[head] = s + torch.outer(k[t, key_head], d)
            out[t, head], deltas[t, head] = state[head].T @ q[t, key_head], d
    return out, deltas, state


def close(got: Tensor, expected: Tensor) -> None:
    # states and values are of order 1; errors of single roundings decay with the state and do not pile up
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_map", [TILED, GROUPED], ids=["tiled", "grouped"])
def test_verify_and_replay(head_map: Tensor) -> None:
    """Spans in any order of lanes, of a pool that has more; every keep, also none."""
    lengths, lanes = [3, 8, 1, 5], [4, 0, 3, 1]
    rows, first = inputs(sum(lengths)), states(5)
    q, k, v, beta, g = rows
    batch = pack("decode", lengths, [7, 0, 70, 3], CPU, lanes)
    before = first.clone()
    o, d = gdn_verify(q, k, v, beta, g, first, head_map, batch)
    assert torch.equal(first, before), "verify must leave the committed state alone"
    parts = [x.split(lengths) for x in rows]
    expected = [recurrence(part, first[lane], head_map) for lane, part in zip(lanes, zip(*parts, strict=True), strict=True)]
    close(o, torch.cat([out for out, _, _ in expected]))
    close(d, torch.cat([deltas for _, deltas, _ in expected]))
    k, d, g = (torch.stack((torch.zeros_like(x), x)) for x in (k, d, g))
    for kept in range(max(lengths) + 1):
        keep = [min(kept, length) for length in lengths]
        after = torch.stack((first, first))
        gdn_replay(after, k, d, g, torch.tensor(keep), head_map, batch)
        assert torch.equal(after[:, 2], before[2].expand(2, -1, -1, -1)), "the lane of no span"
        for span, lane in enumerate(lanes):
            q_, k_, v_, beta_, g_ = (x[span][: keep[span]] for x in parts)
            close(after[1, lane], recurrence((q_, k_, v_, beta_, g_), first[lane], head_map)[2])
            close(after[0, lane], first[lane].double())


@pytest.mark.parametrize("lengths", [[1], [64], [65, 3], [200, 128, 63]], ids=str)
@pytest.mark.parametrize("head_map", [TILED, GROUPED], ids=["tiled", "grouped"])
def test_chunks_equal_the_recurrence(lengths: list[int], head_map: Tensor) -> None:
    (q, k, v, beta, g), first = inputs(sum(lengths)), states(len(lengths))
    o, after = gdn_prefill(q, k, v, beta, g, first, head_map, pack("prefill", lengths, [0] * len(lengths), CPU))
    offset = 0
    for span, length in enumerate(lengths):
        at = slice(offset, offset + length)
        out, _, state = recurrence((q[at], k[at], v[at], beta[at], g[at]), first[span], head_map)
        close(o[at], out)
        close(after[span], state)
        offset += length


def test_new_states_in_a_given_place() -> None:
    lengths = [65, 3, 70]
    (q, k, v, beta, g), first = inputs(sum(lengths)), states(len(lengths))
    batch, room = pack("prefill", lengths, [0] * len(lengths), CPU), torch.full((4, *first.shape[1:]), torch.nan)
    o, after = gdn_prefill(q, k, v, beta, g, first, TILED, batch)
    same, there = gdn_prefill(q, k, v, beta, g, first, TILED, batch, room)
    assert torch.equal(same, o) and torch.equal(there, after)
    assert there.data_ptr() == room.data_ptr() and room[3].isnan().all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_that_forget_everything_and_rows_that_forget_nothing(share: float) -> None:
    """Decays of e^-1000 and of 1 in any mixture; the chunked form's sums of them are exact in float32."""
    (q, k, v, beta, _), first = inputs(70), states(1)
    g = torch.where(torch.rand(70, VALUE_HEADS, generator=torch.Generator().manual_seed(7)) < share, -1000.0, 0.0)
    expected, deltas, state = recurrence((q, k, v, beta, g), first[0], TILED)
    o, d = gdn_verify(q, k, v, beta, g, first, TILED, pack("decode", [70], [0], CPU))
    close(o, expected)
    close(d, deltas)
    o, after = gdn_prefill(q, k, v, beta, g, first, TILED, pack("prefill", [70], [0], CPU))
    close(o, expected)
    close(after[0], state)


@pytest.mark.parametrize("logged", [True, False])
def test_inputs(logged: bool) -> None:
    """Of two spans, against their definition in float64, with what a log is left."""
    lengths, keys = [3, 5], KEY_HEADS * KEY_DIM
    channels = 2 * keys + VALUE_HEADS * VALUE_DIM
    raw, b, a = randn(8, channels, seed=1), 4.0 * randn(8, VALUE_HEADS, seed=2), 8.0 * randn(8, VALUE_HEADS, seed=3)
    history, taps = randn(2, 3, channels, seed=4), randn(channels, 4, seed=5)
    decay, dt_bias = -randn(VALUE_HEADS, seed=6).exp(), randn(VALUE_HEADS, seed=7)
    room = ((channels,), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM), (VALUE_HEADS,))
    log = ReplayLog(*(torch.full((10, *size), torch.nan) for size in room))
    batch = pack("decode", lengths, [0, 0], CPU)
    got = gdn_inputs(raw, b, a, history, taps, decay, dt_bias, KEY_HEADS, KEY_DIM, batch, log if logged else None)
    lines = [torch.cat((before, rows)).double().T for before, rows in zip(history, raw.split(lengths), strict=True)]
    mixed = torch.cat([F.silu(F.conv1d(line, taps.double()[:, None], groups=channels)).T for line in lines])
    q, k, v = mixed.split((keys, keys, channels - 2 * keys), dim=1)
    q, k = (x.unflatten(1, (KEY_HEADS, KEY_DIM)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    expected = (
        q * KEY_DIM**-0.5,
        k,
        v.unflatten(1, (VALUE_HEADS, VALUE_DIM)),
        torch.sigmoid(b.double()),
        decay.double() * F.softplus(a.double() + dt_bias),
    )
    for mine, want in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=2e-6, atol=4e-6)
    for place, values in ((log.raw, raw), (log.k, got.k), (log.g, got.g)):
        assert torch.equal(place[:8], values) if logged else place.isnan().all()
        assert place[8:].isnan().all()
    assert log.d.isnan().all()


def test_a_mixer_is_its_parts() -> None:
    lengths, batch = [3, 5], pack("decode", [3, 5], [0, 0], CPU)
    channels, heads = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, (VALUE_HEADS, VALUE_DIM)
    raw, z = randn(8, channels, seed=1), randn(8, *heads, seed=2)
    b, a, weight = randn(8, VALUE_HEADS, seed=3), randn(8, VALUE_HEADS, seed=4), randn(channels, 4, seed=5)
    decay, dt_bias, norm = -randn(VALUE_HEADS, seed=6).exp(), randn(VALUE_HEADS, seed=7), randn(VALUE_DIM, seed=8)
    history, state = randn(len(lengths), 3, channels, seed=9), randn(len(lengths), VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=10)
    room = ((channels,), (KEY_HEADS, KEY_DIM), heads, (VALUE_HEADS,))
    log = ReplayLog(*(torch.full((9, *size), torch.nan) for size in room))
    of_layer = (history, weight, decay, dt_bias, KEY_HEADS, state, TILED, norm, 1e-6, batch, log)
    got = gdn_mixer(raw, z, b, a, *of_layer, torch.float16)
    inputs = gdn_inputs(raw, b, a, history, weight, decay, dt_bias, KEY_HEADS, KEY_DIM, batch)
    o, d = gdn_verify(*inputs, state, TILED, batch)
    want = gated_output(o, z, norm, 1e-6)
    assert isinstance(got, Tensor) and isinstance(want, Tensor) and torch.equal(got, want)
    for place, values in zip(log, (raw, inputs.k, d, inputs.g), strict=True):
        assert torch.equal(place[:8], values) and place[8:].isnan().all()
