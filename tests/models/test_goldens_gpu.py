"""The demo pair on a GPU against its goldens, which are of a float32 implementation: 16-bit operands, 16-bit or 8-bit K/V.

Rounding moves logits by some hundredths, so a step is decided where the two best are 0.3 apart.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from demo_pair import pair
from golden_walk import LANES, Walk, walk_all

from paceline.config import CacheType
from paceline.engine.arithmetic import configure, resolve_dtype

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
DECIDED, CLOSE = 0.3, 0.1


@pytest.fixture(scope="module", params=["q8_0", "f16"])
def walks(request: pytest.FixtureRequest) -> list[Walk]:
    configure(DEVICE)
    cache = cast(CacheType, request.param)
    return walk_all(pair(lanes=LANES, dtype=resolve_dtype("auto", DEVICE), cache_type=cache, device=DEVICE))


def differences(walks: list[Walk], margin: float) -> tuple[list[str], int]:
    """The steps of at least this margin whose pick is not the golden token, in words, and how many there are in all."""
    found, total = [], 0
    for walk in walks:
        for step, (token, gap) in enumerate(zip(walk.path, walk.golden["margins"], strict=True)):
            if gap >= margin:
                total += 1
                if walk.picks[step] != {token}:
                    picks = sorted(walk.picks[step])
                    found.append(f"step {step} of {walk.golden['text'][:40]!r}, margin {gap:.3f}: {picks} for {token}")
    return found, total


def test_picks_equal_the_golden_tokens_where_the_margin_decides(walks: list[Walk]) -> None:
    close, steps = differences(walks, CLOSE)
    print(f"equal at {steps - len(close)} of {steps} steps with a margin of at least {CLOSE}", *close, sep="\n")
    differing, decided = differences(walks, DECIDED)
    assert decided == 1818
    assert not differing, f"{len(differing)} of {decided} steps differ, the first: {differing[0]}"


def test_a_step_gives_the_same_pick_each_time(walks: list[Walk]) -> None:
    """Whatever the span in which it was fed, and also where the margin is small."""
    assert all(len(picks) == 1 for walk in walks for picks in walk.picks.values())
