"""Features of the rows that wait for the drafter."""

from __future__ import annotations

import torch

from paceline.batch import pack
from paceline.ops.features import keep_features, kept_features

LANES, PLACES = 3, 8


def test_the_latest_rows_of_every_lane_are_kept() -> None:
    ring, features = torch.zeros(LANES, PLACES, 5), torch.randn(LANES, 40, 5)
    for start in range(0, 40, 4):
        lanes = [2, 0] if start % 8 else [0, 1, 2]
        batch = pack("decode", [4] * len(lanes), [start] * len(lanes), torch.device("cpu"), lanes)
        keep_features(ring, torch.cat([features[lane, start : start + 4] for lane in lanes]), batch)
    latest = pack("decode", [8, 4, 3], [32, 32, 36], torch.device("cpu"), [0, 1, 2])
    expected = torch.cat((features[0, 32:], features[1, 32:36], features[2, 36:39]))
    assert torch.equal(kept_features(ring, latest), expected)
