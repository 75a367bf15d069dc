"""SVG charts of the micro-batching figures: stacked charts, whiskers, a Pareto front, micro-batches on a time axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.networks.bar_chart import COLOURS, svg_head

LABEL = 190
PLOT = 560
ROW = 22
HEAD = 34


def below(*charts: str) -> str:
    """Charts one below the other as one SVG."""
    sizes = [re.search(r'width="(\d+)" height="(\d+)"', chart) for chart in charts]
    extents = [(int(found[1]), int(found[2])) for found in sizes if found is not None]
    wide, high = max(w for w, _ in extents), sum(h for _, h in extents)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}">']
    y = 0
    for chart, (_, height) in zip(charts, extents, strict=True):
        lines.append(chart.strip().replace("<svg ", f'<svg y="{y}" ', 1))
        y += height
    return "\n".join([*lines, "</svg>", ""])


def whiskers(title: str, series: Sequence[str], groups: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> str:
    """Least, mean and largest of every group's values on a logarithmic axis that begins at 1.

    Args: groups: (name, values per series).
    """
    top = max((v for _, values in groups for one in values for v in one), default=2.0)
    span = math.log(max(top, 2.0))
    height = HEAD + 20 + sum(ROW * len(series) + 10 for _ in groups) + 22
    lines = svg_head(title, LABEL + PLOT + 120, height)

    def place(value: float) -> float:
        return LABEL + PLOT * math.log(max(value, 1.0)) / span

    for k, name in enumerate(series):
        lines.append(f'<circle cx="{LABEL + 150 * k}" cy="{HEAD}" r="4" fill="{COLOURS[k + 1]}"/>')
        lines.append(f'<text x="{LABEL + 150 * k + 9}" y="{HEAD + 4}">{escape(name)}</text>')
    bottom = height - 18
    for tick in (1, 1.5, 2, 3, 5, 10, 20):
        if tick <= top * 1.01:
            x = place(tick)
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD + 14}" y2="{bottom}" stroke="#e6eaee"/>')
            lines.append(f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="middle" font-size="9">{tick:g}x</text>')
    y = HEAD + 22
    for name, values in groups:
        middle = y + ROW * len(series) / 2 + 2
        lines.append(f'<text x="{LABEL - 10}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for k, one in enumerate(values):
            at, colour = y + ROW * k + ROW / 2, COLOURS[k + 1]
            if one:
                low, high, mean = place(min(one)), place(max(one)), place(sum(one) / len(one))
                lines.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{at}" y2="{at}" stroke="{colour}"/>')
                for x in (low, high):
                    lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{at - 5}" y2="{at + 5}" stroke="{colour}"/>')
                lines.append(f'<circle cx="{mean:.1f}" cy="{at}" r="4" fill="{colour}"/>')
                text = f"{sum(one) / len(one):.2f} ({min(one):.2f} to {max(one):.2f})"
                lines.append(f'<text x="{high + 8:.1f}" y="{at + 3}" font-size="9">{text}</text>')
        y += ROW * len(series) + 10
    return "\n".join([*lines, "</svg>", ""])


def front(title: str, points: Sequence[tuple[float, float, str]], *, height: int = 250) -> str:
    """A Pareto front: workspace [MiB] across, time [ms] up; a circle and a step for every point.

    Args: points: (workspace, time, text of a point, shown where there is room), by workspace.
    """
    wide, top = max(p[0] for p in points) or 1.0, max(p[1] for p in points)
    left, base = 60, HEAD + height

    def at(x: float, y: float) -> tuple[float, float]:
        return left + PLOT * x / wide, base - (height - 10) * y / top

    lines = svg_head(title, left + PLOT + 190, base + 40)
    for k in range(6):
        x, y = left + PLOT * k / 5, base - (height - 10) * k / 5
        lines.append(f'<line x1="{left}" x2="{left + PLOT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6eaee"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 3:.1f}" text-anchor="end" font-size="9">{top * k / 5:.2f}</text>')
        lines.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle" font-size="9">{wide * k / 5:.0f}</text>')
    lines.append(
        f'<text x="{left + PLOT / 2}" y="{base + 30}" text-anchor="middle">workspace, MiB (up: time, ms)</text>'
    )
    corners: list[str] = []
    for k, (x, y, _) in enumerate(points):
        px, py = at(x, y)
        if k:
            corners.append(f"{px:.1f},{at(0, points[k - 1][1])[1]:.1f}")
        corners.append(f"{px:.1f},{py:.1f}")
    lines.append(f'<polyline fill="none" stroke="#9aa5b1" points="{" ".join(corners)}"/>')
    last = -100.0
    for x, y, text in points:
        px, py = at(x, y)
        lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{COLOURS[1]}"/>')
        if text and (abs(px - last) > 95 or (x, y, text) == points[-1]):
            lines.append(f'<text x="{px + 5:.1f}" y="{py - 7:.1f}" font-size="9">{escape(text)}</text>')
            last = px
    return "\n".join([*lines, "</svg>", ""])


def timeline(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Micro-batches on a time axis, a row per policy, a colour per algorithm, its size in each rectangle.

    Args: rows: (name, (size, seconds, algorithm) of every micro-batch).
    """
    end = max(sum(part[1] for part in parts) for _, parts in rows)
    names = list(dict.fromkeys(part[2] for _, parts in rows for part in parts))
    colours = {name: COLOURS[(k + 1) % len(COLOURS)] for k, name in enumerate(names)}
    lines = svg_head(title, LABEL + PLOT + 90, HEAD + 18 + 30 * len(rows) + 8)
    x = float(LABEL)
    for name in names:
        lines.append(f'<rect x="{x:.0f}" y="{HEAD - 8}" width="10" height="10" fill="{colours[name]}"/>')
        lines.append(f'<text x="{x + 14:.0f}" y="{HEAD + 1}" font-size="10">{escape(name)}</text>')
        x += 26 + 6.2 * len(name)
    for k, (name, parts) in enumerate(rows):
        y, x = HEAD + 14 + 30 * k, float(LABEL)
        lines.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for size, seconds, algorithm in parts:
            width, colour = PLOT * seconds / end, colours[algorithm]
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="20"'
            lines.append(f'<rect {box} fill="{colour}" stroke="white"/>')
            if width > 7 * len(size):
                place = f'x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" font-size="10"'
                lines.append(f'<text {place} fill="white">{size}</text>')
            x += width
        total = 1e3 * sum(part[1] for part in parts)
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}" font-size="10">{total:.2f} ms</text>')
    return "\n".join([*lines, "</svg>", ""])
