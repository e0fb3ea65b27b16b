"""Acceptance against a plain loop that reads like its definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ops.accept import PADDING, Verdict, accept

Span = tuple[list[int], list[int]]
"""Drafts, and picks of one more row."""


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    token = st.integers(0, 2)  # few values, so that long runs of matches are common
    drawn = []
    for _ in range(draw(st.integers(1, 5))):
        drafts = [draw(token) for _ in range(draw(st.integers(0, 7)))]
        agreeing = draw(st.integers(0, len(drafts)))
        drawn.append((drafts, drafts[:agreeing] + [draw(token) for _ in range(len(drafts) + 1 - agreeing)]))
    return drawn


def emitted_by(drafts: list[int], picks: list[int], held: int = -1) -> list[int]:
    """The tokens one lane emits."""
    if held >= 0:
        held = min(held, len(drafts))
        return [*drafts[:held], picks[held]]
    emitted = []
    for row, pick in enumerate(picks):
        emitted.append(pick)
        if row == len(drafts) or drafts[row] != pick:
            break
    return emitted


def verdict_of(given: list[Span], held: list[int] | None = None, peaks: torch.Tensor | None = None) -> Verdict:
    """With an empty span and two rows of nobody at the end."""
    tokens = torch.tensor([token for drafts, _ in given for token in (99, *drafts)] + [0, 0])
    picks = torch.tensor([pick for _, picks in given for pick in picks])
    lengths = torch.tensor([len(picks) for _, picks in given] + [0])
    starts = lengths.cumsum(0) - lengths
    peaks = torch.zeros(len(picks), 1) if peaks is None else peaks
    of_spans = None if held is None else torch.tensor([*held, -1])
    return accept(tokens, picks, peaks, starts, lengths, int(lengths.max()), of_spans)


@settings(max_examples=300, deadline=None)
@given(spans(), st.data())
def test_equals_the_definition(given: list[Span], data: st.DataObject) -> None:
    held = [data.draw(st.integers(-1, len(drafts) + 2)) for drafts, _ in given] if data.draw(st.booleans()) else None
    verdict = verdict_of(given, held)
    width = verdict.report.shape[1] - 3
    for at, (drafts, picks) in enumerate(given):
        emitted = emitted_by(drafts, picks, held[at] if held else -1)
        assert verdict.keep[at] == len(emitted)
        assert verdict.ends[at].tolist() == [len(emitted), emitted[-1]]
        assert verdict.report[at, 2:].tolist() == [0, *emitted, *[PADDING] * (width - len(emitted))]
    assert verdict.keep[len(given) :].tolist() == [0]


def test_plain_decoding_emits_the_pick() -> None:
    verdict = verdict_of([([], [7]), ([], [8]), ([], [9])])
    assert verdict.keep.tolist() == [1, 1, 1, 0]
    assert verdict.report[:3].tolist() == [[1, 7, 0, 7], [1, 8, 0, 8], [1, 9, 0, 9]]


def test_a_match_behind_a_mismatch_does_not_count() -> None:
    verdict = verdict_of([([5, 6, 7], [5, 9, 7, 8])])
    assert verdict.report[0].tolist() == [2, 9, 0, 5, 9, PADDING, PADDING]


def test_only_kept_rows_have_to_be_numbers() -> None:
    peaks = torch.zeros(8, 3)
    peaks[2, 1], peaks[4, 0], peaks[5] = torch.nan, torch.inf, -torch.inf
    peaks[3, :2] = -torch.inf  # parts of a row may be
    of_spans = [([5, 6], [5, 9, 1]), ([], [4]), ([], [4]), ([5, 5], [5, 5, 5])]
    assert verdict_of(of_spans, peaks=peaks).report[:4, 2].tolist() == [0, 0, 1, 1]
    peaks[1, 2] = -torch.nan
    assert verdict_of(of_spans, peaks=peaks).report[:4, 2].tolist() == [1, 0, 1, 1]
