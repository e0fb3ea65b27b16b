"""Convolution kernels against float64, and the same bits for a row in any company."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import PackedBatch, facts, pack, unpack
from paceline.ops.conv import advance_history, causal_conv, conv_history, dynamic_conv
from paceline.ops.linear import Rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
LENGTHS, LANES = [1, 2, 3, 9, 4, 70], [6, 0, 2, 5, 3, 8]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch_of(spans: list[int]) -> PackedBatch:
    return pack("decode", [LENGTHS[i] for i in spans], [0] * len(spans), DEVICE, [LANES[i] for i in spans])


def histories(width: int, channels: int) -> Tensor:
    """Of all lanes; NaN in those that no span is of."""
    history = torch.full((9, width, channels), torch.nan, device=DEVICE)
    history[LANES] = randn(len(LANES), width, channels, seed=1)
    return history


EVERYONE = list(range(len(LENGTHS)))


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("channels", [12, 1000, 10240])
def test_causal_conv(channels: int, taps: int, magnitude: float) -> None:
    x, history, weight = (
        magnitude * randn(sum(LENGTHS), channels),
        histories(taps - 1, channels),
        randn(channels, taps, seed=2),
    )
    history = magnitude * history
    parts, expected = x.split(LENGTHS), []
    for lane, rows in zip(LANES, parts, strict=True):
        line = torch.cat((history[lane], rows)).double().T[None]
        expected.append(F.silu(F.conv1d(line, weight.double()[:, None], groups=channels))[0].T)
    # sums of four products of up to about 10; a quotient good to 2^-22
    got = causal_conv(x, history, weight, batch_of(EVERYONE))
    torch.testing.assert_close(got.double(), torch.cat(expected), rtol=2e-6, atol=4e-6 * magnitude)
    whole = got.split(LENGTHS)
    for spans in ([5], [0], [4, 1], [3, 0, 5, 2]):
        got = causal_conv(torch.cat([parts[i] for i in spans]), history, weight, batch_of(spans))
        assert torch.equal(got, torch.cat([whole[i] for i in spans])), f"spans {spans}"
    for row in range(1, 70):
        line = torch.cat((history[LANES[5]], parts[5]))
        one = pack("decode", [1], [row], DEVICE)
        got = causal_conv(parts[5][row : row + 1], line[None, row : row + taps - 1], weight, one)
        assert torch.equal(got, whole[5][row : row + 1]), f"row {row} alone"


@pytest.mark.parametrize("channels", [12, 1000, 10240])
def test_history_after_every_keep(channels: int) -> None:
    x, history, batch = randn(sum(LENGTHS), channels), histories(3, channels), batch_of(EVERYONE)
    for wanted in range(10):
        keep = [min(wanted, length) for length in LENGTHS]
        got = conv_history(x, history, torch.tensor(keep, device=DEVICE), batch)
        for span, (lane, rows) in enumerate(zip(LANES, x.split(LENGTHS), strict=True)):
            assert torch.equal(got[span], torch.cat((history[lane], rows[: keep[span]]))[-3:]), f"span {span}, {keep[span]}"
        room = torch.full((2, len(LENGTHS) + 1, 3, channels), torch.nan, device=DEVICE)
        there = conv_history(x, history, torch.tensor(keep, device=DEVICE), batch, room[1])
        assert torch.equal(there, got) and there.data_ptr() == room[1].data_ptr()
        assert room[0].isnan().all() and room[1, -1].isnan().all()


@pytest.mark.parametrize(("rows", "taps"), [(8, 2), (8, 4), (2, 4), (1, 4)])
@pytest.mark.parametrize(("channels", "group"), [(5120, 32), (12, 4), (1100, 11)])
def test_dynamic_conv(channels: int, group: int, rows: int, taps: int) -> None:
    lanes = 7
    x, base = randn(lanes, rows, channels), randn(taps, channels, seed=1)
    dynamic = randn(lanes, rows, 2, taps, channels // group, seed=2)[:, :, 1]
    expected = torch.zeros(lanes, rows, channels, dtype=torch.float64, device=DEVICE)
    for tap in range(min(taps, rows)):
        kernel = base[tap].double() + dynamic[:, tap:, tap].double().repeat_interleave(group, dim=-1)
        expected[:, tap:] += kernel * x[:, : rows - tap].double()
    got = dynamic_conv(x, base, dynamic)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=4e-6)
    for chosen in ([3], [6, 0, 2]):
        some = dynamic_conv(x[chosen], base, dynamic[chosen])
        assert isinstance(some, Tensor) and torch.equal(some, got[chosen]), f"lanes {chosen}"
    prepare = importlib.import_module("paceline.ops.linear.kernel").prepare
    packed, expected_rows = dynamic_conv(x, base, dynamic, torch.float16), prepare(got.flatten(0, 1), torch.float16)
    assert isinstance(packed, Rows) and (packed.rows, packed.columns) == (expected_rows.rows, expected_rows.columns)
    assert torch.equal(packed.values[: packed.rows], expected_rows.values[: packed.rows])
    assert torch.equal(packed.factors[: packed.rows], expected_rows.factors[: packed.rows])


@pytest.mark.parametrize("channels", [12, 1000, 10240])
def test_histories_advance_in_place(channels: int) -> None:
    """In all layers; beside the spans there are empty ones of a spare lane, and rows of nobody."""
    layers, rows, spans = 3, sum(LENGTHS) + 5, len(LENGTHS) + 2
    packed = torch.from_numpy(facts(LENGTHS, [0] * len(LENGTHS), LANES, rows, spans, 7)).to(DEVICE)
    batch = unpack("decode", packed, LENGTHS, [0] * len(LENGTHS), rows, spans)
    first = torch.full((layers, 9, 3, channels), torch.nan, device=DEVICE)
    first[:, LANES] = randn(layers, len(LANES), 3, channels, seed=3)
    raw = torch.full((layers, rows + 3, channels + 4), torch.nan, device=DEVICE)[..., 1 : channels + 1]
    raw[:, : sum(LENGTHS)] = randn(layers, sum(LENGTHS), channels, seed=4)
    for wanted in (0, 1, 2, 3, 4, 9):
        keep = [min(wanted, length) for length in LENGTHS]
        history = first.clone()
        advance_history(history, raw, torch.tensor([*keep, 1, 1], device=DEVICE), batch)
        for layer in range(layers):
            parts = raw[layer, : sum(LENGTHS)].split(LENGTHS)
            for span, (lane, own) in enumerate(zip(LANES, parts, strict=True)):
                expected = torch.cat((first[layer, lane], own[: keep[span]]))[-3:]
                assert torch.equal(history[layer, lane], expected), f"layer {layer}, span {span}, {keep[span]}"
        assert history[:, [1, 4, 7]].isnan().all(), "lanes of no span"
