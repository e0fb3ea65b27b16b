"""Pieces of a context: every key in one, in order, and never more of them than is said."""

from __future__ import annotations

from paceline.ops.attention import pieces_of
from paceline.ops.attention.pieces import FAR, NEAR, piece_of

KEYS = 18000


def test_pieces_follow_each_other_and_grow() -> None:
    pieces = [piece_of(key) for key in range(KEYS)]
    assert pieces[0] == 0 and {after - before for before, after in zip(pieces, pieces[1:], strict=False)} == {0, 1}
    begins = [key for key in range(KEYS) if key == 0 or pieces[key] != pieces[key - 1]]
    sizes = [after - before for before, after in zip(begins, begins[1:], strict=False)]
    assert sizes == sorted(sizes) and sizes[0] == NEAR and sizes[-1] == FAR
    assert all(begin % NEAR == 0 for begin in begins), "a block of keys lies in one piece"


def test_as_many_as_a_context_has() -> None:
    for context in (1, 64, 65, 512, 513, 2048, 2049, 16384, 16385, 17000):
        assert pieces_of(context) == len({piece_of(key) for key in range(context)})


def test_no_run_touches_more() -> None:
    for run in (1, 2, 63, 64, 65, 200, 512, 700, 2048, 2500):
        touched = max(piece_of(start + run - 1) - piece_of(start) + 1 for start in range(KEYS - run))
        assert touched <= pieces_of(KEYS, run) <= pieces_of(KEYS)
