"""Parts that the HTML reports of training and serving plans share: the page, legends, bars, timelines, layouts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jcuts.plan.search.stage_layout import COLUMNS, Layout
from jcuts.plan.spec.cluster import Cluster

COLOURS = {
    "compute": "#2f6fb0",
    "recompute": "#7fb0dd",
    "tensor": "#d9822b",
    "context": "#e8b04a",
    "expert": "#b5651d",
    "pipeline": "#8e5ea2",
    "embedding": "#c977b5",
    "gradients": "#3cba9f",
    "launch": "#999999",
    "bubble": "#dddddd",
    "tiers": "#c45850",
    "optimizer": "#5b8c5a",
    "overhead": "#444444",
}
PASSES = {"forward": "#2f6fb0", "backward": "#173f6b", "idle": "#dddddd"}
"""Colours of the timeline beside those of the parts."""


@dataclass(frozen=True)
class Span:
    """An activity of a timeline lane, from ``start`` to ``end`` (seconds)."""

    lane: str
    start: float
    end: float
    kind: str
    label: str


def document(title: str, intro: str, sections: Iterable[tuple[str, str]], cluster: Cluster) -> str:
    """A self-contained page (no scripts, no external files): sections are (heading, HTML), the last one says where the
    cluster's constants are from."""
    e = html.escape
    sources = table((), [(e(key), e(str(said))) for key, said in cluster.sources.items()])
    body = "\n".join(
        f"<h2>{e(heading)}</h2>{inner}" for heading, inner in [*sections, ("Where the constants are from", sources)]
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{e(title)}</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .25em .6em; border-bottom: 1px solid #eee; vertical-align: top }}
.n {{ text-align: right; white-space: nowrap }}
.bar {{ display: flex; height: 14px; margin-top: 4px }} .time {{ width: 260px }} .memory {{ width: 150px }}
.frame {{ background: #f3f3f3; width: 140px }}
.key {{ margin-right: 1em; white-space: nowrap }}
.key i {{ display: inline-block; width: 12px; height: 12px; margin-right: .3em }}
svg {{ max-width: 100%; height: auto }} svg text {{ font: 11px system-ui, sans-serif }}
</style></head><body>
<h1>{e(title)}</h1>
<p>{intro}</p>
{body}
</body></html>
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; ``right`` are the columns that hold numbers."""
    mark = lambda i: ' class="n"' if i in right else ""  # noqa: E731
    head = "".join(f"<th{mark(i)}>{column}</th>" for i, column in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{mark(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>\n" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}\n{body}</table>"


def placement(layout: Layout) -> str:
    """The layout of a plan as a table."""
    rows = [[html.escape(cell) for cell in row] for row in layout.rows()]
    return table(COLUMNS, rows, right=(len(COLUMNS) - 1,)) + f"<p>{html.escape(layout.note())}.</p>"


def bar(
    pieces: Mapping[str, float], whole: float, colours: Mapping[str, str], say: Mapping[str, str], *, frame: str = ""
) -> str:
    """A bar of coloured pieces, ``whole`` long; ``say``: what hovering over each tells."""
    inner = "".join(
        f'<span title="{html.escape(say[name])}" '
        f'style="width:{100 * value / whole:.2f}%;background:{colours[name]}"></span>'
        for name, value in pieces.items()
        if value > 0
    )
    return f'<div class="bar{frame}">{inner}</div>'


def legend(names: Iterable[str], colours: Mapping[str, str]) -> str:
    """Names with their colours."""
    return "".join(f'<span class="key"><i style="background:{colours[name]}"></i>{name}</span>' for name in names)


def svg(spans: Sequence[Span], width: int = 1080, height: int = 22) -> str:
    """A timeline: a lane per row, its activities as boxes; seconds."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    end = max(span.end for span in spans)
    left = 70
    scale = (width - left) / end
    colours = COLOURS | PASSES
    parts = []
    total = len(lanes) * (height + 4)
    for tick in range(5):
        x = left + tick / 4 * (width - left)
        anchor = "start" if tick == 0 else "end" if tick == 4 else "middle"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{total + 2}" stroke="#bbb" stroke-dasharray="2 3"/>'
            f'<text x="{x:.1f}" y="{total + 14}" text-anchor="{anchor}">{end * tick / 4:.4g}{" s" * (tick == 4)}</text>'
        )
    for row, lane in enumerate(lanes):
        y = row * (height + 4)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(lane)}</text>')
        for span in spans:
            if span.lane == lane:
                x, w = left + span.start * scale, max((span.end - span.start) * scale, 0.5)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{colours[span.kind]}" '
                    f'stroke="white" stroke-width="0.5">'
                    f"<title>{html.escape(span.label)}: {span.start:.4g} to {span.end:.4g} s</title></rect>"
                )
                if span.kind in ("forward", "backward") and w > 22:
                    parts.append(
                        f'<text x="{x + w / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="white" '
                        f'pointer-events="none">{span.label.replace("forward ", "F").replace("backward ", "B")}</text>'
                    )
    return f'<svg viewBox="0 0 {width} {total + 20}" width="{width}" role="img">{"".join(parts)}</svg>'
