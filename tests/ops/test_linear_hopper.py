"""How the Hopper product lies in shared memory, for every form and width."""

from __future__ import annotations

import pytest

from paceline.ops.linear import hopper
from paceline.ops.linear.tiles import unit_bytes

BEGIN, END = 1 << 10, 228 << 10
TABLE_BYTES, ROW_FACTORS, BARRIERS, EXCHANGED = 1 << 16, 4 * 64, 128, 8 * 32 * 16


@pytest.mark.parametrize("tokens", hopper._WIDTHS)
@pytest.mark.parametrize("form", hopper.FORMS)
@pytest.mark.parametrize(("swiglu", "halves"), [(False, False), (True, False), (False, True)])
def test_nothing_overlaps_and_everything_is_aligned(form: str, tokens: int, swiglu: bool, halves: bool) -> None:
    if halves and tokens > hopper._HALVED:
        pytest.skip("halves are for few tokens")
    layout = hopper._layout(form, tokens, swiglu, halves)
    x, weights = (1 + halves) * tokens * 512, 2 * unit_bytes(form)
    assert layout.stages >= 2
    assert layout.x % 1024 == 0 and layout.weights % 128 == 0 and layout.last_weights % 128 == 0 and layout.barriers % 8 == 0
    assert layout.exchange % 16 == 0
    assert layout.table % TABLE_BYTES == 0 and bool(layout.table) == (form == "IQ4_XS")
    pieces = [(layout.x + stage * x, x) for stage in range(layout.stages)]
    pieces += [(layout.weights + stage * weights, weights) for stage in range(layout.stages - 1)]
    pieces += [(layout.last_weights, weights), (layout.barriers, BARRIERS + (1 + swiglu) * ROW_FACTORS)]
    if swiglu or halves:
        pieces += [(layout.exchange, EXCHANGED)]
    if layout.table:
        pieces += [(layout.table, TABLE_BYTES)]
    pieces.sort()
    assert pieces[0][0] >= BEGIN and sum(pieces[-1]) <= END
    for (at, size), (following, _) in zip(pieces, pieces[1:], strict=False):
        assert at + size <= following


def test_the_source_names_its_constants() -> None:
    text = hopper.source("IQ4_XS", 24)
    assert "#define FORM IQ4_XS\n" in text and "m64n24k16" in text and "float (&sums)[12]" in text
    # -127, -104, -83 and -65, and from the last of the positive values 113, 89, 69 and 53
    assert "#define NEGATIVE_0 0x4153687fu" in text and "#define POSITIVE_0 0x35455971u" in text


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((34816, 5120), (132, 1, 80)),  # a pair for each, and 4 pairs of 20 steps for 80
        ((16640, 5120), (130, 0, 130)),  # 10 steps for each, half a pair, where 132 would have up to as many
        ((5120, 6144), (120, 0, 120)),  # 4 of a pair's 24 steps
        ((5120, 17408), (132, 0, 132)),  # 6 to a pair would have up to 12 steps instead of 11
        ((300, 512), (4, 0, 4)),
    ],
)
def test_how_the_steps_of_a_weight_are_shared_out(shape: tuple[int, int], cut: tuple[int, int, int]) -> None:
    tiles, blocks = -(-shape[0] // 128), shape[1] // 256
    assert hopper._cut(tiles, blocks, 132) == cut
