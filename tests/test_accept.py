"""Acceptance against a plain loop that reads like its definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.accept import PADDING, accept


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[list[int]]]:
    lanes = draw(st.integers(1, 5))
    drafts = draw(st.integers(0, 7))
    token = st.integers(0, 2)  # few values, so that long runs of matches are common
    proposed = [[draw(token) for _ in range(drafts)] for _ in range(lanes)]
    counts = [draw(st.integers(0, drafts)) for _ in range(lanes)]
    picks = []
    for lane in range(lanes):
        agreeing = draw(st.integers(0, drafts))
        picks.append(proposed[lane][:agreeing] + [draw(token) for _ in range(drafts + 1 - agreeing)])
    return proposed, counts, picks


def accept_one(drafts: list[int], count: int, picks: list[int]) -> list[int]:
    """The tokens one lane emits."""
    emitted = []
    for row in range(count + 1):
        emitted.append(picks[row])
        if row == count or drafts[row] != picks[row]:
            break
    return emitted


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_equals_the_definition(case: tuple[list[list[int]], list[int], list[list[int]]]) -> None:
    proposed, counts, picks = case
    lanes, width = len(picks), len(picks[0])
    drafts = torch.tensor(proposed, dtype=torch.int64).reshape(lanes, width - 1)
    verdict = accept(drafts, torch.tensor(counts), torch.tensor(picks))
    for lane in range(lanes):
        emitted = accept_one(proposed[lane], counts[lane], picks[lane])
        assert verdict.keep[lane] == len(emitted)
        assert verdict.accepted[lane] == len(emitted) - 1
        assert verdict.tokens[lane].tolist() == emitted + [PADDING] * (width - len(emitted))
        assert proposed[lane][: len(emitted) - 1] == emitted[:-1]


def test_plain_decoding_emits_the_pick() -> None:
    verdict = accept(torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.tensor([[7], [8], [9]]))
    assert verdict.keep.tolist() == [1, 1, 1]
    assert verdict.tokens.tolist() == [[7], [8], [9]]


def test_a_match_behind_a_mismatch_does_not_count() -> None:
    verdict = accept(torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.tensor([[5, 9, 7, 8]]))
    assert verdict.accepted.tolist() == [1]
    assert verdict.tokens.tolist() == [[5, 9, PADDING, PADDING]]


def test_a_draft_that_is_not_verified_does_not_count() -> None:
    verdict = accept(torch.tensor([[5, 6, 7]]), torch.tensor([2]), torch.tensor([[5, 6, 7, 8]]))
    assert verdict.accepted.tolist() == [2]
    assert verdict.tokens.tolist() == [[5, 6, 7, PADDING]]
