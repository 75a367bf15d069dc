"""Elements of the HTML report: escaped text, tables, disclosure widgets, the style sheet (light, dark, narrow)."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

REGION_COLOURS = 8
"""Colours of regions in the style sheet, classes ``r0`` to ``r7``; regions take turns."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6473; --line: #d9dde4; --paper: #ffffff; --panel: #f5f6f8;
  --good: #1a7f4b; --bad: #b3392f; --plain: #9aa3b0; --accent: #2f5fb3; --edge: #aab2be;
  --r0: #4c78c9; --r1: #d98a2b; --r2: #3f9e6e; --r3: #b65fa8; --r4: #5aa6b8; --r5: #c65a4f; --r6: #8b78c6;
  --r7: #9a8b3c }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ef; --soft: #9aa4b3; --line: #343b47; --paper: #15181e; --panel: #1e232b;
    --good: #5fcf95; --bad: #f08a80; --plain: #6d7683; --accent: #8db4f5; --edge: #566070;
    --r0: #7ba1e6; --r1: #eab06a; --r2: #6cc798; --r3: #d793cb; --r4: #82c7d6; --r5: #e58c82; --r6: #b0a1e3;
    --r7: #c8bb6f }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem }
p { margin: .4rem 0 } .soft, figcaption { color: var(--soft) } figcaption { font-size: .87rem }
.verdict { font-size: 1.15rem; font-weight: 600 } .good { color: var(--good) } .bad { color: var(--bad) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .75rem; margin: 1rem 0 }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--panel) }
.tall { max-height: 30rem; overflow-y: auto } figure { margin: .5rem 0 }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 } th { color: var(--soft); font-weight: 600; white-space: nowrap }
td { min-width: 3rem; overflow-wrap: break-word }
td.n, th.n { text-align: right; white-space: nowrap } td.w { min-width: 11rem }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; background: var(--panel) }
details details { background: var(--paper); margin: .5rem .75rem }
summary { cursor: pointer; padding: .5rem .75rem; font-weight: 600 } details > :not(summary) { margin-inline: .75rem }
details .scroll { margin-bottom: .75rem; background: var(--paper) }
pre { margin: 0; padding: .75rem; overflow-x: auto; font: 12px/1.45 ui-monospace, monospace; overflow-wrap: normal }
pre.long { max-height: 26rem; overflow-y: auto }
svg { display: block; height: auto } svg.wide { min-width: 36rem; width: 100% }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) } svg .soft { fill: var(--soft) }
svg .axis { stroke: var(--line) } svg .edge { stroke: var(--edge); fill: none }
svg .roof { stroke: var(--soft); fill: none }
.plain { fill: var(--plain) } .r0 { fill: var(--r0) } .r1 { fill: var(--r1) } .r2 { fill: var(--r2) }
.r3 { fill: var(--r3) } .r4 { fill: var(--r4) } .r5 { fill: var(--r5) } .r6 { fill: var(--r6) } .r7 { fill: var(--r7) }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: .15em; vertical-align: -.05em }
.bound { fill: none; stroke: var(--soft); stroke-width: 1.5 } .predicted { stroke: var(--ink); stroke-width: 1.5 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem }
@media (max-width: 40rem) { body { padding: 1rem .75rem 3rem; font-size: 14px } h1 { font-size: 1.25rem } }
"""


def escaped(text: object) -> str:
    """Text of users and programs, safe in HTML and in attributes."""
    return html.escape(str(text), quote=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """A table of plain cells, which are escaped here. Args: numbers: headings of columns to the right."""
    kind = dict.fromkeys(numbers, ' class="n"')
    wide: dict[str, str] = dict.fromkeys(("operations", "reason", "where", "why it lost", "candidate"), ' class="w"')
    head = "".join(f"<th{kind.get(h, '')}>{escaped(h)}</th>" for h in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind.get(h) or wide.get(h, '')}>{escaped(cell)}</td>" for h, cell in zip(headings, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def details(summary: str, *parts: str) -> str:
    """A disclosure widget. Args: summary: plain text; parts: HTML."""
    return f"<details><summary>{escaped(summary)}</summary>{''.join(parts)}</details>"


def code(text: str) -> str:
    """Source text, which scrolls."""
    return f'<div class="scroll"><pre class="long">{escaped(text)}</pre></div>'


def region_class(region: int) -> str:
    """The class of a region's colour; ``plain`` of what XLA keeps."""
    return "plain" if region < 0 else f"r{region % REGION_COLOURS}"
