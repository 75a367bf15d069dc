"""The HTML page of a function's report: verdict first, then regions, partition graph, roofline, candidates, kernels."""

from __future__ import annotations

from jcuts.microbatch.report import (
    DIVISION_HEADINGS,
    FRONT_HEADINGS,
    division_rows,
    division_total,
    microseconds,
    pareto_rows,
)
from jcuts.report import verdict
from jcuts.report.html import charts, kernel_code, partition_graph
from jcuts.report.html.elements import STYLE, code, details, escaped, table
from jcuts.report.report_data import (
    HEADINGS,
    ReportData,
    SubsetReport,
    alone_line,
    budget_line,
    costliest_first,
    dropped,
    guard_line,
    operations_text,
    reasons,
    refused,
    regimes,
    rows,
    sources,
    summary,
    thrown_out,
)

NUMBERS = ("row", "n", "us", "XLA us", "gain", "predicted us", "bound us", "PUL", "score")
MOST_CANDIDATES = 100
"""Candidates of one region that are listed."""


def document(report: ReportData) -> str:
    """The page: self-contained, no scripts; everything that comes from users is escaped."""
    body = "\n".join(part for part in _sections(report) if part)
    name = escaped(report.name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>jcuts: {name}</title><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _sections(report: ReportData) -> list[str]:
    return [
        _head(report),
        _three_regions(report),
        _graph(report),
        _roofline(report),
        _kinds(report),
        _regions(report),
        _divisions(report),
        _candidates(report),
        _kernels(report),
        _refusals(report),
        f"<h2>Rewritten program</h2>{details('as jaxpr, with source lines', code(report.source))}",
        _stages(report),
    ]


def _head(report: ReportData) -> str:
    said = verdict.verdict(report)
    kind = "good" if said.gain else "plain" if said.gain is None else "bad"
    parts = [f"<h1>{escaped(report.name)}</h1>", f'<p class="verdict {kind}">{escaped(said.text)}</p>']
    parts += [f"<p>{escaped(line)}</p>" for line in (guard_line(report), alone_line(report), summary(report)) if line]
    found = sources(report)
    parts += [f'<p class="soft">choices of kernels: {escaped(found)}</p>'] if found else []
    found = regimes(report)
    parts += [f'<p class="soft">measured: {escaped(found)}</p>'] if found else []
    parts += [f"<p>{escaped(line)}</p>" for line in [budget_line(report)] if line]
    parts += [f'<p class="soft">note: {escaped(note)}</p>' for note in report.notes]
    if dropped(report):
        parts.append(table(("program ruled out", "reason"), [list(row) for row in dropped(report)]))
    return "".join(parts)


def _three_regions(report: ReportData) -> str:
    cards = []
    for region in verdict.most_important(report):
        cards.append(
            f'<div class="card"><b class="{"good" if region.gained else "soft"}">{escaped(region.gain)}</b>'
            f"{escaped(region.operations)}<br/>"
            f'<span class="soft">{escaped(region.times)}<br/>{escaped(region.where)}</span></div>'
        )
    return f'<h2>The regions that matter</h2><div class="cards">{"".join(cards)}</div>' if cards else ""


def _graph(report: ReportData) -> str:
    if not report.graph:
        return ""
    left = len(report.graph) - partition_graph.MOST_NODES
    note = f" The first {partition_graph.MOST_NODES} of {len(report.graph)} are drawn." if left > 0 else ""
    figures = [
        f'<figure><div class="scroll tall">{drawing}</div><figcaption>{caption}</figcaption></figure>'
        for drawing, caption in (
            (partition_graph.before(report), f"Before: {len(report.graph)} equations.{note}"),
            (partition_graph.after(report), "After: one box per kernel; grey is XLA's. Point at a box for its lines."),
        )
    ]
    return f'<h2>Partition</h2><div class="pair">{"".join(figures)}</div>'


def _roofline(report: ReportData) -> str:
    drawn = charts.roofline(report)
    if not drawn:
        return ""
    caption = (
        "A dot is measured, a dash predicted by the performance model, a ring the bound of the schedule: above the "
        "roof where operands fit a cache, or where fewer operations suffice (Winograd)."
    )
    if report.peaks:
        flop, moved = (charts.amount(report.peaks[name], unit) for name, unit in (("flop", "FLOP/s"), ("bytes", "B/s")))
        caption += f" The roof: {flop} in float32, {moved} from memory."
    return f'<h2>Roofline</h2><figure><div class="scroll">{drawn}</div><figcaption>{caption}</figcaption></figure>'


def _kinds(report: ReportData) -> str:
    drawn = charts.time_by_kind(report)
    return f"<h2>Time by kind of region</h2><figure>{drawn}</figure>" if drawn else ""


def _regions(report: ReportData) -> str:
    if not report.subsets:
        return ""
    numbered = zip(costliest_first(report), rows(report), strict=True)
    cells = [[str(number), *row] for number, row in numbered]
    return f"<h2>Regions</h2>{table(('row', *HEADINGS), cells, numbers=NUMBERS)}"


def _divisions(report: ReportData) -> str:
    if not report.divisions:
        return ""
    parts = [
        f"<h2>Convolutions</h2>{table(DIVISION_HEADINGS, division_rows(report.divisions))}",
        f"<p>{escaped(division_total(report.divisions))}</p>",
    ]
    if fronts := pareto_rows(report.divisions):
        parts.append(table(FRONT_HEADINGS, fronts))
    return "".join(parts)


def _candidates(report: ReportData) -> str:
    parts = []
    for number in costliest_first(report):
        subset = report.subsets[number]
        if not subset.candidates:
            continue
        order = sorted(subset.candidates, key=lambda c: (c.seconds is None, c.seconds or 0))
        cells = [
            (
                c.label,
                microseconds(c.seconds),
                microseconds(c.bound_seconds or None),
                f"{c.pul:.2f}" if c.pul else "-",
                c.lost or "runs",
            )
            for c in order[:MOST_CANDIDATES]
        ]
        headings = ("candidate", "us", "bound us", "PUL", "why it lost")
        parts.append(details(_title(number, subset, len(order)), table(headings, cells, numbers=NUMBERS)))
    lost, out = reasons(report), thrown_out(report)
    won = f"<h2>Where XLA won</h2>{table(('operations', 'reason', 'where'), lost)}" if lost else ""
    rejected = f"<h2>Rejected candidates</h2>{table(('subset', 'reason'), out)}" if out else ""
    return (f"<h2>Candidates, and why each lost</h2>{''.join(parts)}" if parts else "") + won + rejected


def _title(number: int, subset: SubsetReport, count: int) -> str:
    return f"row {number}: {operations_text(subset.operations)}, {count} candidates, {subset.chosen} runs"


def _kernels(report: ReportData) -> str:
    parts = []
    for number in costliest_first(report):
        subset, program = report.subsets[number], report.programs[number] if report.programs else None
        if program is None:
            continue
        texts = [details(title, code(text)) for title, text in kernel_code.listings(program)]
        parts.append(details(f"row {number}: {subset.chosen}, {operations_text(subset.operations)}", *texts))
    return f"<h2>Kernels</h2>{''.join(parts)}" if parts else ""


def _refusals(report: ReportData) -> str:
    cells = [(str(count), op, why, where) for op, why, count, where in refused(report)]
    if not cells:
        return ""
    return f"<h2>Left to XLA</h2>{table(('n', 'operation', 'reason', 'where'), cells, numbers=NUMBERS)}"


def _stages(report: ReportData) -> str:
    if not report.seconds:
        return ""
    cells = [(stage, f"{seconds:.3f}") for stage, seconds in report.seconds.items()]
    return "<h2>Stages</h2>" + details("time of planning", table(("stage", "s"), cells, numbers=("s",)))
