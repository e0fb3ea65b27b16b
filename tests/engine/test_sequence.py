"""What a sequence says of itself."""

from __future__ import annotations

from paceline.engine.sequence import Sequence
from paceline.types import LaneStats, Request


def test_lane_stats() -> None:
    request = Request("r", tuple(range(7)), 0.0, 1.0, 0, 0.0, 1, 8)
    sequence = Sequence(request, arrived=10.0, lane=3)
    sequence.prefilled = 5
    assert sequence.lane_stats(12.5) == LaneStats(3, "r", "prefill", 7, 5, 0, 0, 0, 0, 0, 2.5)
    assert sequence.lane_stats(12.5).acceptance_length == 0.0
    sequence.prefilled = 7
    sequence.tokens = [1, 2, 3, 4, 5, 6]
    sequence.keeps = [3, 2]
    sequence.drafted, sequence.accepted, sequence.width = 7, 3, 4
    stats = sequence.lane_stats(13.0)
    assert stats == LaneStats(3, "r", "decode", 7, 7, 6, 4, 2, 7, 3, 3.0)
    assert stats.acceptance_length == 2.5
