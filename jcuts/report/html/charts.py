"""Charts of the report as inline SVG: roofline with every kernel, and time by kind of region (thesis Figure 5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from jcuts.microbatch.report import microseconds
from jcuts.report.html.elements import escaped
from jcuts.report.report_data import ReportData, SubsetReport, operations_text

WIDTH = 760
LEFT = 64
BOTTOM = 34
KINDS = ("complex (fusion)", "complex", "simple (fusion)", "simple")
PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def amount(value: float, unit: str) -> str:
    """A rate with a prefix.

    >>> amount(2.5e11, "FLOP/s"), amount(40, "FLOP/s")
    ('250 GFLOP/s', '40 FLOP/s')
    """
    for size, prefix in PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def roofline(report: ReportData) -> str:
    """FLOP/s over FLOP per byte, logarithmic: every kernel measured, predicted, and at its bound; the device's roof.

    Kernels without FLOP (copies, reductions by comparison) have no place in it.  '' where nothing can be drawn.
    """
    kernels = [
        (number, s)
        for number, s in enumerate(report.subsets)
        if s.chosen != "xla" and s.flop and s.bytes and (s.seconds or s.predicted_seconds or s.bound_seconds)
    ]
    if not kernels:
        return ""
    intensity = [s.flop / s.bytes for _, s in kernels]
    rates = [s.flop / t for _, s in kernels for t in (s.seconds, s.predicted_seconds, s.bound_seconds) if t]
    peaks = report.peaks if report.peaks.get("flop") and report.peaks.get("bytes") else {}
    ridge = peaks["flop"] / peaks["bytes"] if peaks else None
    x = LogScale([*intensity, *([ridge] if ridge else [])], LEFT, WIDTH - 12)
    height = 340
    y = LogScale([*rates, *([peaks["flop"]] if peaks else [])], height - BOTTOM, 14)
    parts = [_grid(x, y, height)]
    if peaks and ridge:
        low, high = x.low, x.high
        path = f"M{x(low):.1f} {y(low * peaks['bytes']):.1f}L{x(ridge):.1f} {y(peaks['flop']):.1f}"
        parts.append(f'<path class="roof" clip-path="url(#plot)" d="{path}L{x(high):.1f} {y(peaks["flop"]):.1f}"/>')
    parts += [_kernel(number, s, x, y) for number, s in kernels]
    return (
        f'<svg class="wide" role="img" aria-label="roofline" viewBox="0 0 {WIDTH} {height}">'
        f'<defs><clipPath id="plot"><rect x="{LEFT}" y="8" width="{WIDTH - LEFT}" height="{height - BOTTOM - 8}"/>'
        f"</clipPath></defs>{''.join(parts)}</svg>"
    )


class LogScale:
    """Decades of values to pixels."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        known = [v for v in values if v > 0]
        first, last = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
        self.decades = range(first, max(last, first + 1) + 1)
        self.low, self.high = 10 ** self.decades[0], 10 ** self.decades[-1]
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.decades[0]) / (len(self.decades) - 1)
        return self.start + share * (self.end - self.start)


def _grid(x: LogScale, y: LogScale, height: int) -> str:
    parts = []
    for decade in x.decades:
        place = x(10**decade)
        parts.append(f'<path class="axis" d="M{place:.1f} 8V{height - BOTTOM}"/>')
        parts.append(
            f'<text class="soft" x="{place:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{10**decade:g}</text>'
        )
    for decade in y.decades:
        place = y(10**decade)
        parts.append(f'<path class="axis" d="M{LEFT} {place:.1f}H{WIDTH - 12}"/>')
        parts.append(
            f'<text class="soft" x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{amount(10**decade, "")}</text>'
        )
    parts.append(f'<text class="soft" x="{WIDTH - 12}" y="{height - 4}" text-anchor="end">FLOP per byte</text>')
    parts.append(f'<text class="soft" x="{LEFT + 6}" y="18">FLOP/s</text>')
    return "".join(parts)


def _kernel(number: int, s: SubsetReport, x: LogScale, y: LogScale) -> str:
    place = x(s.flop / s.bytes)
    title = (
        f"{operations_text(s.operations)}\n{s.chosen}, {s.count} times\nmeasured {microseconds(s.seconds)} us, "
        f"predicted {microseconds(s.predicted_seconds)} us, bound {microseconds(s.bound_seconds or None)} us"
    )
    marks = []
    heights = [y(s.flop / t) for t in (s.seconds, s.predicted_seconds, s.bound_seconds) if t]
    marks.append(f'<path class="axis" d="M{place:.1f} {min(heights):.1f}V{max(heights):.1f}"/>')
    if s.bound_seconds:
        marks.append(f'<circle class="bound" cx="{place:.1f}" cy="{y(s.flop / s.bound_seconds):.1f}" r="4.5"/>')
    if s.predicted_seconds:
        at = y(s.flop / s.predicted_seconds)
        marks.append(f'<path class="predicted" d="M{place - 6:.1f} {at:.1f}h12"/>')
    if s.seconds:
        marks.append(f'<circle class="r{number % 8}" cx="{place:.1f}" cy="{y(s.flop / s.seconds):.1f}" r="5"/>')
    return f"<g><title>{escaped(title)}</title>{''.join(marks)}</g>"


def time_by_kind(report: ReportData) -> str:
    """Measured time of the regions by kind, as they run and with XLA's code for all; '' where nothing was measured."""

    def ours(s: SubsetReport) -> float | None:
        return s.xla_seconds if s.chosen == "xla" else s.seconds

    rows: list[tuple[str, Callable[[SubsetReport], float | None]]] = [
        ("as it runs", ours),
        ("with XLA's code", lambda s: s.xla_seconds),
    ]
    timed = [s for s in report.subsets if ours(s) and s.xla_seconds]
    if not timed:
        return ""
    sums = [{kind: sum((of(s) or 0) * s.count for s in timed if s.kind == kind) for kind in KINDS} for _, of in rows]
    longest = max(sum(row.values()) for row in sums)
    parts, left = [], 110
    for number, ((name, _), row) in enumerate(zip(rows, sums, strict=True)):
        top, x = 8 + 34 * number, left / 1
        parts.append(f'<text x="{left - 8}" y="{top + 16}" text-anchor="end">{escaped(name)}</text>')
        for place, kind in enumerate(KINDS):
            width = row[kind] / longest * (WIDTH - left - 90)
            if width > 0:
                parts.append(
                    f"<g><title>{kind}: {microseconds(row[kind])} us</title>"
                    f'<rect class="r{place}" x="{x:.1f}" y="{top}" width="{max(width - 1, 1):.1f}" height="24"/></g>'
                )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{top + 16}">{microseconds(sum(row.values()))} us</text>')
    legend = "  ".join(
        f'<span><span class="swatch" style="background:var(--r{place})"></span> {kind}</span>'
        for place, kind in enumerate(KINDS)
        if any(row[kind] for row in sums)
    )
    return (
        f'<div class="scroll"><svg class="wide" role="img" aria-label="time by kind" viewBox="0 0 {WIDTH} 78">'
        f"{''.join(parts)}</svg></div><figcaption>{legend}</figcaption>"
    )
