"""Generated rows through all that lies between a layer's products: one launch against three, and a row's bits whatever
company it has and however its sequence is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_data import random_blocks
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.ops.conv import advance_history
from paceline.ops.gdn import ReplayLog, gdn_inputs, gdn_mixer, gdn_replay, gdn_verify, hopper, output_bound
from paceline.ops.linear import Rows, linears, merge
from paceline.ops.linear import pack as pack_weight
from paceline.ops.norm import add_rms_norm, gated_output
from paceline.ops.quant import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]

DEVICE = torch.device("cuda")
KEY_HEADS, HEADS, DIM, LANES, EPS = 16, 48, 128, 9, 1e-6
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
WIDTH = CHANNELS + HEADS * DIM + 2 * 128
LENGTHS, OWN = [8, 1, 3, 17, 2, 8, 5], [4, 0, 3, 8, 1, 6, 2]
"""Rows of spans, and their lanes."""


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


TAPS, DECAY, DT_BIAS, NORM = (CHANNELS, 4), (HEADS,), (HEADS,), (DIM,)


class Layer:
    """Weights, and what is committed of every lane: NaN in those that no span is of."""

    def __init__(self, tiled: bool = False) -> None:
        self.taps, self.decay, self.dt_bias = randn(*TAPS, seed=1), -randn(*DECAY, seed=2).exp(), randn(*DT_BIAS, seed=3)
        self.norm = randn(*NORM, seed=4)
        heads = torch.arange(HEADS, device=DEVICE)
        self.head_map = heads % KEY_HEADS if tiled else heads // (HEADS // KEY_HEADS)
        self.state = torch.full((LANES, HEADS, DIM, DIM), torch.nan, device=DEVICE)
        self.history = torch.full((LANES, 3, CHANNELS), torch.nan, device=DEVICE)
        self.state[OWN] = 0.3 * randn(len(OWN), HEADS, DIM, DIM, seed=5)
        self.history[OWN] = randn(len(OWN), 3, CHANNELS, seed=6)
        self.bound = float(8 * DIM**0.5 * self.norm.abs().max())

    def one(self, wide: Tensor, norms: Tensor, batch: PackedBatch, *, bound: bool = True) -> tuple[Tensor, ReplayLog]:
        """The rows, with their factors beside them in a last column, and the log; without a bound it is three launches."""
        log = log_of(len(wide) + 3)
        raw, z, b, a = cut(wide)
        of_layer = (self.history, self.taps, self.decay, self.dt_bias, KEY_HEADS, self.state, self.head_map, self.norm, EPS)
        padded = torch.nn.functional.pad(norms, (0, -len(norms) % 256), value=torch.nan)
        known = (padded, self.bound) if bound else (None, None)
        got = gdn_mixer(raw, z, b, a, *of_layer, batch, log, torch.float16, *known)
        assert isinstance(got, Rows) and (got.rows, got.columns) == (len(wide), HEADS * DIM)
        assert all(part[len(wide) :].isnan().all() for part in log)
        return torch.cat((got.values[: got.rows].float(), got.factors[: got.rows, None]), dim=1), log


def rows_of(count: int, magnitude: float = 1.0, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Columns of one product, and the squared norms of what it multiplied."""
    wide, norms = randn(count, WIDTH, seed=seed), 1.0 + randn(count, seed=seed + 1).abs()
    wide[:, :CHANNELS] *= magnitude
    wide[0, -256], wide[0, -255], wide[0, -128], wide[0, -127] = 90.0, -90.0, 40.0, -40.0
    return wide, norms


def cut(wide: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = wide[:, CHANNELS : CHANNELS + HEADS * DIM].unflatten(1, (HEADS, DIM))
    return wide[:, :CHANNELS], z, wide[:, -256 : -256 + HEADS], wide[:, -128 : -128 + HEADS]


def log_of(rows: int) -> ReplayLog:
    sizes = ((CHANNELS,), (KEY_HEADS, DIM), (HEADS, DIM), (HEADS,))
    return ReplayLog(*(torch.full((rows, *size), torch.nan, device=DEVICE) for size in sizes))


def padded_batch(lengths: list[int], lanes: list[int], rows: int, spans: int) -> PackedBatch:
    """Rows of nobody behind the real ones, and empty spans of a spare lane."""
    packed = torch.from_numpy(facts(lengths, [0] * len(lengths), lanes, rows, spans, 5)).to(DEVICE)
    return unpack("decode", packed, lengths, [0] * len(lengths), rows, spans)


def alone(length: int, lane: int) -> PackedBatch:
    return pack("decode", [length], [0], DEVICE, [lane])


def read(rows: Tensor) -> Tensor:
    return rows[:, :-1] * rows[:, -1:]


def error(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)).max())


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that is handed out again holds NaN: what a kernel leaves unwritten is seen."""
    blocks = [torch.full((2**bits,), torch.nan, device=DEVICE) for bits in (10, 14, 17, 20, 22) for _ in range(4)]
    del blocks
    yield


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_against_its_parts(magnitude: float, tiled: bool) -> None:
    layer, real = Layer(tiled), sum(LENGTHS)
    layer.history[OWN] *= magnitude
    wide, norms = rows_of(real, magnitude)
    got, log = layer.one(wide, norms, pack("decode", LENGTHS, [0] * len(LENGTHS), DEVICE, OWN))
    want, parts = layer.one(wide, norms, pack("decode", LENGTHS, [0] * len(LENGTHS), DEVICE, OWN), bound=False)
    assert got[:, :-1].abs().max() < 2**15, "a bound of every row"
    assert error(read(got), read(want)) < 1e-3
    assert torch.equal(log.raw[:real], parts.raw[:real])
    for name, limit in (("k", 1e-6), ("d", 6e-6 * magnitude), ("g", 1e-5)):
        mine, theirs = getattr(log, name)[:real], getattr(parts, name)[:real]
        torch.testing.assert_close(mine, theirs, rtol=4e-6, atol=limit, msg=name)


@pytest.mark.parametrize("spans", [1, 2, 3, 5, 6, 7])
def test_a_span_has_the_same_bits_alone_and_in_company(spans: int) -> None:
    layer, lengths, lanes = Layer(), LENGTHS[:spans], OWN[:spans]
    real = sum(lengths)
    wide, norms = rows_of(real + 2)
    wide[real:] = torch.nan
    firsts = [sum(lengths[:span]) for span in range(spans)]
    singles = [
        layer.one(wide[first : first + length], norms[first : first + length], alone(length, lane))
        for first, length, lane in zip(firsts, lengths, lanes, strict=True)
    ]
    for extra in (1, 4):
        got, log = layer.one(wide, norms, padded_batch(lengths, lanes, real + 2, spans + extra))
        for first, length, (single, own) in zip(firsts, lengths, singles, strict=True):
            at = slice(first, first + length)
            assert torch.equal(got[at], single), f"{extra} spans of nobody"
            assert all(torch.equal(x[at], y[:length]) for x, y in zip(log, own, strict=True))


@pytest.mark.parametrize("form", hopper.FORMS, ids=str)
def test_every_form_has_the_same_bits(form: hopper.Form, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (wide, norms) = Layer(), rows_of(sum(LENGTHS))
    batch = pack("decode", LENGTHS, [0] * len(LENGTHS), DEVICE, OWN)
    want, log = layer.one(wide, norms, batch)
    monkeypatch.setattr(hopper, "form_for", lambda spans: form)
    got, other = layer.one(wide, norms, batch)
    assert torch.equal(got, want)
    assert all(torch.equal(x[: len(wide)], y[: len(wide)]) for x, y in zip(log, other, strict=True))


@pytest.mark.parametrize("count", [2, 8, 9, 17])
def test_a_walk_may_be_cut_and_committed_between(count: int) -> None:
    layer, lane = Layer(), OWN[0]
    wide, norms = rows_of(count)
    whole, log = layer.one(wide, norms, alone(count, lane))
    committed = layer.state, layer.history
    for at in range(1, count):
        layer.state, layer.history = committed
        first, before = layer.one(wide[:at], norms[:at], alone(at, lane))
        state, history, keep = committed[0][None].clone(), committed[1][None].clone(), torch.tensor([at], device=DEVICE)
        gdn_replay(state, before.k[None], before.d[None], before.g[None], keep, layer.head_map, alone(at, lane))
        advance_history(history, before.raw[None], keep, alone(at, lane))
        layer.state, layer.history = state[0], history[0]
        second, after = layer.one(wide[at:], norms[at:], alone(count - at, lane))
        assert torch.equal(torch.cat((first, second)), whole), f"cut at {at}"
        for x, y, both in zip(before, after, log, strict=True):
            assert torch.equal(torch.cat((x[:at], y[: count - at])), both[:count]), f"log, cut at {at}"


def test_a_row_of_nan_stays_in_its_span() -> None:
    layer, real = Layer(), sum(LENGTHS)
    wide, norms = rows_of(real + 2)
    batch = padded_batch(LENGTHS, OWN, real + 2, len(LENGTHS) + 1)
    want, log = layer.one(wide, norms, batch)
    span = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(DEVICE)
    for row in (0, 3, 8, 14, real - 1):
        broken, unknown = wide.clone(), norms.clone()
        broken[row], unknown[row] = torch.nan, torch.nan
        got, other = layer.one(broken, unknown, batch)
        behind = (span == span[row]) & (torch.arange(real, device=DEVICE) >= row)
        assert bool(got[:real][behind].isnan().any(1).all())
        assert torch.equal(got[:real][~behind], want[:real][~behind])
        assert all(torch.equal(x[:real][~behind], y[:real][~behind]) for x, y in zip(other, log, strict=True))


def test_rows_that_lie_anywhere() -> None:
    layer, (wide, norms) = Layer(), rows_of(5)
    want, _ = layer.one(wide, norms, alone(5, OWN[0]))
    layer.taps, layer.decay, layer.norm = (
        torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in (layer.taps, layer.decay, layer.norm)
    )
    moved = torch.cat((wide[:, :1], wide), dim=1)[:, 1:]
    got, _ = layer.one(moved, norms, alone(5, OWN[0]))
    assert torch.equal(got, want)


def test_many_launches_in_a_row_agree() -> None:
    """A race would show as another bit, sooner or later."""
    layer, (wide, norms) = Layer(), rows_of(sum(LENGTHS))
    batch = pack("decode", LENGTHS, [0] * len(LENGTHS), DEVICE, OWN)
    want, log = layer.one(wide, norms, batch)
    for _ in range(50):
        got, other = layer.one(wide, norms, batch)
        assert torch.equal(got, want)
        assert all(torch.equal(x[: len(wide)], y[: len(wide)]) for x, y in zip(log, other, strict=True))


def test_the_bound_holds_for_rows_of_a_product() -> None:
    """From the norm before the projections, with rows of all sizes, to their gated output."""
    layer, hidden = Layer(), 512
    sizes = (CHANNELS, HEADS * DIM, HEADS, HEADS)
    stored = [random_blocks("IQ4_XS", size, hidden, seed=seed) for seed, size in enumerate(sizes)]
    in_proj = merge([pack_weight(part, torch.bfloat16, DEVICE) for part in stored])
    bound = output_bound(in_proj, 1, layer.norm)
    longest = dequantize(stored[1]).norm(dim=1).max()
    assert bound == pytest.approx(float(DIM**0.5 * layer.norm.abs().max().cpu() * longest), rel=1e-2)
    x = randn(8, hidden, seed=9) * 10.0 ** torch.arange(-6, 10, 2, device=DEVICE)[:, None]
    _, n = add_rms_norm(x, None, 1e-3 + randn(hidden, seed=10).abs(), EPS, torch.float16)
    assert isinstance(n, Rows) and n.norms is not None and bound is not None
    raw, z, b, a = linears(n, in_proj, "decode")
    z, log, batch = z.unflatten(1, (HEADS, DIM)), log_of(8), alone(8, OWN[0])
    of_layer = (layer.history, layer.taps, layer.decay, layer.dt_bias, KEY_HEADS)
    rest = (layer.state, layer.head_map, layer.norm, EPS, batch, log, torch.float16, n.norms, bound)
    everything = (*of_layer, *rest)
    got = gdn_mixer(raw, z, b, a, *everything)
    inputs = gdn_inputs(raw, b, a, *of_layer, DIM, batch)
    want = gated_output(gdn_verify(*inputs, layer.state, layer.head_map, batch)[0], z, layer.norm, EPS, torch.float16)
    assert isinstance(got, Rows) and isinstance(want, Rows)
    assert got.values[:8].abs().max() < 2**15
    mine, theirs = (rows.values[:8].float() * rows.factors[:8, None] for rows in (got, want))
    assert error(mine, theirs) < 1e-3
