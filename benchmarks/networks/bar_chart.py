"""Grouped horizontal bar chart as SVG text: a group of bars per row of a table; equal numbers give equal text."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = ("#9aa5b1", "#3b7dd8", "#e08a2e", "#2e9e5b", "#8a5bbf", "#c2514b")
LABEL = 250
PLOT = 520
BAR = 11
GAP = 9
HEAD = 58


def svg_head(title: str, width: int, height: int) -> list[str]:
    """The first lines of a chart: its size, a white ground, the title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-size="14">{escape(title)}</text>',
    ]


def bar_chart(
    title: str, unit: str, series: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]]
) -> str:
    """The chart. Args: series: names of the bars of a group; groups: (name, a value per series, None: no bar)."""
    top = max((v for _, values in groups for v in values if v is not None), default=1.0)
    height = HEAD + sum(BAR * len(series) + GAP for _ in groups) + 8
    legend = [max(110, 28 + 6 * len(name)) for name in series]
    lines = svg_head(title, LABEL + max(PLOT + 90, sum(legend)), height)
    x = LABEL
    for k, name in enumerate(series):
        lines.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{COLOURS[k]}"/>')
        lines.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
        x += legend[k]
    y = HEAD
    for name, values in groups:
        middle = y + BAR * len(series) / 2 + 4
        lines.append(f'<text x="{LABEL - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for k, value in enumerate(values):
            at = y + BAR * k
            if value is not None:
                width = PLOT * value / top
                lines.append(f'<rect x="{LABEL}" y="{at}" width="{width:.1f}" height="{BAR - 1}" fill="{COLOURS[k]}"/>')
                lines.append(f'<text x="{LABEL + width + 4:.1f}" y="{at + 9}" font-size="9">{value:.2f}{unit}</text>')
        y += BAR * len(series) + GAP
    return "\n".join([*lines, "</svg>", ""])
