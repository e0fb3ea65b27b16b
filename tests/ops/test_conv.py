"""Convolutions against torch's and against plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.batch import PackedBatch, pack
from paceline.ops.conv import advance_history, causal_conv, conv_history, dynamic_conv

CPU = torch.device("cpu")
LENGTHS = [1, 2, 3, 9, 4]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(lengths: list[int]) -> PackedBatch:
    return pack("decode", lengths, [0] * len(lengths), CPU)


@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv_equals_conv1d_on_each_span(taps: int) -> None:
    x, history, weight = randn(sum(LENGTHS), 12), randn(len(LENGTHS), taps - 1, 12, seed=1), randn(12, taps, seed=2)
    expected = []
    for before, rows in zip(history, x.split(LENGTHS), strict=True):
        line = torch.cat((before, rows)).double().T
        expected.append(F.silu(F.conv1d(line, weight.double()[:, None], groups=12)).T)
    got = causal_conv(x, history, weight, batch_of(LENGTHS))
    # four products and sums of values of up to about 10
    torch.testing.assert_close(got.double(), torch.cat(expected), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("lengths", [[1, 1], LENGTHS])
def test_history_after_every_keep(lengths: list[int]) -> None:
    x, history = randn(sum(lengths), 5), randn(len(lengths), 3, 5, seed=1)
    for wanted in range(1, max(lengths) + 1):
        keep = [min(wanted, length) for length in lengths]
        got = conv_history(x, history, torch.tensor(keep), batch_of(lengths))
        for span, (before, rows) in enumerate(zip(history, x.split(lengths), strict=True)):
            assert torch.equal(got[span], torch.cat((before, rows[: keep[span]]))[-3:])
        room = torch.full((len(lengths) + 1, 3, 5), torch.nan)
        there = conv_history(x, history, torch.tensor(keep), batch_of(lengths), room)
        assert torch.equal(there, got) and there.data_ptr() == room.data_ptr() and room[-1].isnan().all()


def test_histories_of_all_layers_advance_in_place() -> None:
    """The lanes are in any order, and one has no span; the raw inputs have room for more rows."""
    lanes, rows = [4, 0, 5, 2, 1], sum(LENGTHS)
    batch = pack("decode", LENGTHS, [0] * len(LENGTHS), CPU, lanes)
    first, raw = randn(2, 6, 3, 5, seed=1), randn(2, rows + 4, 5)
    for keep in ([1, 2, 3, 9, 4], [0, 1, 2, 3, 0]):
        history = first.clone()
        advance_history(history, raw, torch.tensor(keep), batch)
        for layer in range(2):
            for span, own in enumerate(raw[layer, :rows].split(LENGTHS)):
                expected = torch.cat((first[layer, lanes[span]], own[: keep[span]]))[-3:]
                assert torch.equal(history[layer, lanes[span]], expected)
        assert torch.equal(history[:, 3], first[:, 3])


@pytest.mark.parametrize(("rows", "taps"), [(8, 2), (8, 4), (2, 4), (1, 4)])
def test_dynamic_conv_equals_its_definition(rows: int, taps: int) -> None:
    lanes, channels, group = 3, 12, 4
    x, base = randn(lanes, rows, channels), randn(taps, channels, seed=1)
    dynamic = randn(lanes, rows, taps, channels // group, seed=2)
    expected = torch.zeros(lanes, rows, channels, dtype=torch.float64)
    for lane in range(lanes):
        for row in range(rows):
            for tap in range(min(taps, row + 1)):
                for channel in range(channels):
                    kernel = base[tap, channel].double() + dynamic[lane, row, tap, channel // group].double()
                    expected[lane, row, channel] += kernel * x[lane, row - tap, channel].double()
    got = dynamic_conv(x, base, dynamic)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=4e-6)
