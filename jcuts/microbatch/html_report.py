"""HTML report of an analysis: every convolution's division, its Pareto front as a plot, workspaces as bars."""

from __future__ import annotations

import html
import math

from jcuts.microbatch.analysis import Analysis, Row
from jcuts.microbatch.timings import Division

MIB = 1 << 20
COLOURS = ("#2f6fb0", "#d9822b", "#3cba9f", "#8e5ea2", "#c45850", "#e8b04a", "#5b8c5a", "#7fb0dd", "#444444")
STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:24px;max-width:1180px;color:#222}
table{border-collapse:collapse;margin:12px 0}td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:left}
td.n,th.n{text-align:right}.bar{display:inline-block;height:10px;background:#2f6fb0}figure{display:inline-block;margin:8px}
figcaption{font-size:12px;color:#555}svg text{font:10px system-ui,sans-serif;fill:#444}
"""


def page(analysis: Analysis) -> str:
    """A self-contained HTML page."""
    limit = "no limit" if analysis.limit is None else f"{analysis.limit / MIB:,.1f} MiB"
    what = "per kernel" if analysis.method == "WR" else f"for the network, constraint {analysis.constraint}"
    title = f"{html.escape(analysis.network.name)} on {html.escape(str(analysis.device))}"
    names = sorted({part.algorithm for row in analysis.rows for d in row.desirable for part in d.parts})
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    top = max((row.division.workspace for row in analysis.rows), default=0) or 1
    rows = "".join(_row(row, top) for row in analysis.rows)
    plots = "".join(_plot(row, colours) for row in analysis.rows if len(row.desirable) > 1)
    key = " ".join(f'<span style="color:{colours[name]}">&#9632;</span> {html.escape(name)}' for name in names)
    undivided = analysis.undivided
    gain = "" if undivided is None else f", undivided under the same limits {undivided * 1e3:.4g} ms"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{analysis.method}, {limit} {what}, policy {html.escape(analysis.policy)}"
        f"{'' if analysis.proven else ' (not proven to be the best)'}: {analysis.seconds * 1e3:.4g} ms{gain}; "
        f"workspaces {analysis.total / MIB:,.1f} MiB in all, {analysis.peak / MIB:,.1f} MiB at once.</p>"
        '<table><tr><th>kernel<th>division<th class="n">ms<th class="n">undivided ms<th class="n">workspace MiB'
        "<th></tr>"
        f"{rows}</table><h2>Desirable sets</h2><p>{key}</p>{plots}</html>"
    )


def _row(row: Row, top: int) -> str:
    plain = "" if row.undivided is None else f"{row.undivided.seconds * 1e3:.4g}"
    width = 200 * row.division.workspace / top
    return (
        f'<tr><td>{html.escape(row.use.name)}<td>{html.escape(str(row.division))}<td class="n">'
        f'{row.division.seconds * 1e3:.4g}<td class="n">{plain}<td class="n">{row.division.workspace / MIB:,.1f}'
        f'<td><span class="bar" style="width:{width:.0f}px"></span></tr>'
    )


def _plot(row: Row, colours: dict[str, str], width: int = 520, height: int = 260) -> str:
    """Workspace across, time up; beside each point its micro-batches as a bar of the batch, coloured by algorithm."""
    spaces = [d.workspace / MIB for d in row.desirable]
    times = [d.seconds * 1e3 for d in row.desirable]
    left, bottom = 56, 28
    wide, high = width - left - 110, height - bottom - 12
    most, low, most_time = max(spaces) or 1.0, min(times), max(times)
    span = (most_time - low) or most_time

    def place(division: Division) -> tuple[float, float]:
        x = left + division.workspace / MIB / most * wide
        return x, 12 + (most_time - division.seconds * 1e3) / span * high

    points = [place(division) for division in row.desirable]
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [
        f'<line x1="{left}" y1="{height - bottom}" x2="{left + wide}" y2="{height - bottom}" stroke="#888"/>'
        f'<line x1="{left}" y1="12" x2="{left}" y2="{height - bottom}" stroke="#888"/>'
        f'<text x="{left + wide / 2:.0f}" y="{height - 4}" text-anchor="middle">workspace, MiB (to {most:.4g})</text>'
        f'<text x="4" y="16">{most_time:.4g} ms</text><text x="4" y="{height - bottom}">{low:.4g} ms</text>'
        f'<polyline points="{steps}" fill="none" stroke="#bbb"/>'
    ]
    shown = _spread(points, 12)
    for number, (division, (x, y)) in enumerate(zip(row.desirable, points, strict=True)):
        chosen = division == row.division
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if chosen else 3}" fill="{"#c00" if chosen else "#2f6fb0"}">'
            f"<title>{html.escape(str(division))}: {division.seconds * 1e3:.4g} ms, "
            f"{division.workspace / MIB:,.1f} MiB</title></circle>"
        )
        if chosen or number in shown:
            parts.append(_bar(division, x + 7, y - 4, 100, colours))
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(parts)}</svg>'
        f"<figcaption>{html.escape(row.use.name)}: {len(row.desirable)} configurations, chosen in red</figcaption>"
        "</figure>"
    )


def _bar(division: Division, x: float, y: float, width: float, colours: dict[str, str]) -> str:
    made, batch = [], division.batch
    for start, part in division.offsets:
        w = part.batch / batch * width
        made.append(
            f'<rect x="{x + start / batch * width:.1f}" y="{y:.1f}" width="{max(w - 0.5, 0.3):.1f}" height="8" '
            f'fill="{colours[part.algorithm]}"/>'
        )
    return "".join(made)


def _spread(points: list[tuple[float, float]], gap: float) -> set[int]:
    """Points whose bars do not cover each other."""
    kept: list[int] = []
    for number, (x, y) in enumerate(points):
        if all(math.hypot(0.1 * (x - points[k][0]), y - points[k][1]) >= gap for k in kept):
            kept.append(number)
    return set(kept)
