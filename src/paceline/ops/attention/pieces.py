"""Where the decode kernel cuts a context into pieces, which are attended to side by side: at fixed positions, so that a
row meets the same pieces whatever is beside it. The first pieces are short, because short contexts have few of them and a
piece takes as long as its keys do, block after block. Later ones are longer, because each leaves a partial result for every
row and head.
"""

from __future__ import annotations

NEAR, MIDDLE, FAR = 64, 128, 256
"""Keys of a piece."""
MIDDLE_BEGIN, FAR_BEGIN = 512, 16384
"""Positions from which on pieces are longer."""
MIDDLE_FIRST = MIDDLE_BEGIN // NEAR
FAR_FIRST = MIDDLE_FIRST + (FAR_BEGIN - MIDDLE_BEGIN) // MIDDLE
"""The first pieces of these lengths."""


def piece_of(key: int) -> int:
    """The piece that has the key at position ``key``."""
    if key < MIDDLE_BEGIN:
        return key // NEAR
    if key < FAR_BEGIN:
        return MIDDLE_FIRST + (key - MIDDLE_BEGIN) // MIDDLE
    return FAR_FIRST + (key - FAR_BEGIN) // FAR


def pieces_of(context: int, run: int | None = None) -> int:
    """Pieces of a context of so many keys; of ``run`` consecutive ones of them, wherever they are, at most."""
    everything = piece_of(context - 1) + 1
    # No run touches more pieces than one at the beginning, where they are shortest, and one that it begins within.
    return everything if run is None else min(everything, piece_of(run - 1) + 2)
