"""Line charts as SVG that take their colours from the page's style sheet, so that they are readable in light and in dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float, float, float]
"""x, y, and the least and the greatest y over repeats."""

_WIDTH, _HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 40
_COLOURS = 6
"""``--series-0`` and so on in the style sheet; then the dashes change."""
_DASHES = ("", "6 3", "2 3")

STYLE = """
.chart { width: 100%; max-width: 34rem; height: auto; }
.chart text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.chart .title { font-weight: 600; }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart .line { fill: none; stroke-width: 2; }
.chart .spread { stroke-width: 1.5; opacity: .6; }
"""


def line_chart(title: str, x_name: str, series: Mapping[str, Sequence[Point]]) -> str:
    """One line per series over x, in a colour by its place among them, also by that of empty ones; no chart where there is
    nothing to draw."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    xs = sorted({point[0] for point in points})
    top = _nice(max(point[3] for point in points))
    column = {x: _LEFT + (index + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(xs) for index, x in enumerate(xs)}
    drawn = [(index, name, line) for index, (name, line) in enumerate(series.items()) if line]
    legend = 18 * math.ceil(len(drawn) / 2)

    def row(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT + legend}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
    ]
    for step in range(5):
        y = row(step * top / 4)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{step * top / 4:g}</text>')
    for x in xs:
        parts.append(f'<text x="{column[x]:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    for place, (index, name, line) in enumerate(drawn):
        look = f'style="stroke: var(--series-{index % _COLOURS})" stroke-dasharray="{_DASHES[index // _COLOURS % 3]}"'
        path = " ".join(f"{column[x]:.1f},{row(y):.1f}" for x, y, _, _ in sorted(line))
        parts.append(f'<polyline class="line" {look} points="{path}"/>')
        for x, y, low, high in line:
            ends = f'x1="{column[x]:.1f}" x2="{column[x]:.1f}" y1="{row(low):.1f}" y2="{row(high):.1f}"'
            parts.append(f'<line class="spread" {look} {ends}/>')
            fill = f'style="fill: var(--series-{index % _COLOURS})"'
            parts.append(f'<circle {fill} cx="{column[x]:.1f}" cy="{row(y):.1f}" r="3"/>')
        left, base = _LEFT + place % 2 * 200, _HEIGHT + 12 + 18 * (place // 2)
        parts.append(f'<line class="line" {look} x1="{left}" x2="{left + 22}" y1="{base - 4}" y2="{base - 4}"/>')
        parts.append(f'<text x="{left + 28}" y="{base}">{escape(name)}</text>')
    return "".join((*parts, "</svg>"))


def _nice(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * 0.999)
