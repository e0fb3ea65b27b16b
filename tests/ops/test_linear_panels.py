"""How prompt rows are cut into panels, whichever heights a library serves with the same bits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from paceline.ops.linear import kernel
from paceline.ops.linear.rows import padded


@pytest.mark.parametrize("heights", [kernel._PANELS, (256,), (128, 256), (256, 288, 512), (160, 256, 672)])
def test_panels_cover_the_rows_within_their_padding(heights: tuple[int, ...]) -> None:
    for rows in range(1, 2100):
        panels = list(kernel._panels(rows, heights))
        assert [panel.start for panel in panels] == [0, *(panel.stop for panel in panels[:-1])]
        assert panels[-1].start < rows <= panels[-1].stop <= padded(rows, kernel.PANEL)
        assert all(panel.stop - panel.start in heights for panel in panels)


@pytest.mark.parametrize(
    ("rows", "heights"),
    [(1, [128]), (107, [128]), (130, [160]), (642, [672]), (769, [512, 288]), (2000, [512, 512, 512, 480])],
)
def test_the_last_panel_is_as_low_as_it_can_be(rows: int, heights: list[int]) -> None:
    assert [panel.stop - panel.start for panel in kernel._panels(rows, kernel._PANELS)] == heights
