"""Line charts as SVG text: rows of panels, the curves of a panel overlaid; equal numbers give equal text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.networks.bar_chart import COLOURS, svg_head

WIDTH = 300
HEIGHT = 170
LEFT = 58
HEAD = 62
BELOW = 34
POINTS = 150
"""Points of a line, at most."""
TICKS = 4


@dataclass(frozen=True)
class Panel:
    """A chart of curves over steps. Args: series: (name, a value per step); logarithmic: the vertical axis."""

    title: str
    series: Sequence[tuple[str, Sequence[float]]]
    logarithmic: bool = False

    def scale(self) -> tuple[Callable[[float], float], list[float]]:
        """Height of a value above the axis, from 0 to 1, and the values of the ticks."""
        values = [v for _, line in self.series for v in line if math.isfinite(v) and (v > 0 or not self.logarithmic)]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if self.logarithmic:
            first, last = math.floor(math.log10(low or 1.0)), math.ceil(math.log10(high or 1.0))
            span, step = max(1, last - first), max(1, (last - first) // TICKS)
            ticks = [10.0**k for k in range(first, first + span + 1, step)]
            return (lambda v: (math.log10(v) - first) / span if v > 0 else 0.0), ticks
        low, span = min(low, 0.0), (high - min(low, 0.0)) or 1.0
        return (lambda v: (v - low) / span), [low + span * k / TICKS for k in range(TICKS + 1)]


def drawn(panel: Panel, x: float, y: float, colours: dict[str, str]) -> list[str]:
    """SVG elements of a panel whose plot has its upper left corner at (x, y)."""
    height_of, ticks = panel.scale()
    lines = [
        f'<text x="{x}" y="{y - 8}" font-size="12">{escape(panel.title)}</text>',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#c5ccd3"/>',
    ]
    for tick in ticks:
        at = y + HEIGHT * (1 - height_of(tick))
        text = f"{tick:.0e}" if panel.logarithmic else f"{tick:.2f}"
        lines.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e6eaee"/>')
        lines.append(f'<text x="{x - 5}" y="{at + 3:.1f}" text-anchor="end" font-size="9">{text}</text>')
    count = max((len(line) for _, line in panel.series), default=0)
    lines += [
        f'<text x="{x}" y="{y + HEIGHT + 13}" font-size="9">1</text>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 13}" font-size="9" text-anchor="end">{count} steps</text>',
    ]
    for name, line in panel.series:
        every = max(1, -(-len(line) // POINTS))
        points = [
            f"{x + WIDTH * k / max(1, count - 1):.1f},{y + HEIGHT * (1 - height_of(v)):.1f}"
            for k, v in list(enumerate(line))[::every]
            if math.isfinite(v)
        ]
        lines.append(f'<polyline fill="none" stroke="{colours[name]}" points="{" ".join(points)}"/>')
    return lines


def line_chart(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """The charts below each other in rows; a curve's name has one colour in all of them."""
    names = list(dict.fromkeys(name for row in rows for panel in row for name, _ in panel.series))
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    wide = max((len(row) for row in rows), default=1) * (LEFT + WIDTH) + 14
    high = HEAD + len(rows) * (HEIGHT + BELOW) + 4
    lines = svg_head(title, wide, high)
    for k, name in enumerate(names):
        x = LEFT + 190 * k
        lines.append(f'<rect x="{x}" y="28" width="11" height="3" fill="{colours[name]}"/>')
        lines.append(f'<text x="{x + 16}" y="34">{escape(name)}</text>')
    for number, row in enumerate(rows):
        for place, panel in enumerate(row):
            lines += drawn(panel, LEFT + place * (LEFT + WIDTH), HEAD + number * (HEIGHT + BELOW), colours)
    return "\n".join([*lines, "</svg>", ""])
