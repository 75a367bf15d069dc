"""Partition graph as inline SVG, before and after fusion: layered drawing of equations, and of regions (Sugiyama)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jcuts.report.html.elements import escaped, region_class
from jcuts.report.report_data import GraphNode, ReportData, operations_text

MOST_NODES = 1500
"""Nodes that are drawn; of larger graphs the first ones."""
HEIGHT = 18
GAP = 14
STEP = 40
LETTER = 6
LONGEST = 26
"""Letters of a node's label."""


@dataclass(frozen=True)
class Box:
    """A node of the drawing. Args: reads: boxes by number; kind: CSS class; title: shown when pointed at."""

    label: str
    title: str
    kind: str
    reads: tuple[int, ...]


def before(report: ReportData) -> str:
    """The function's equations, coloured by the region that takes them."""
    nodes = report.graph[:MOST_NODES]
    return drawing(
        [
            Box(
                node.primitive,
                f"{node.primitive}  {node.where}\n" + (node.reason or f"region {node.region}"),
                region_class(node.region if _is_kernel(report, node) else -1),
                tuple(r for r in node.reads if r < len(nodes)),
            )
            for node in nodes
        ],
        "equations of the function before fusion",
    )


def after(report: ReportData) -> str:
    """What runs: a box per region, and one per equation that XLA keeps."""
    nodes = report.graph[:MOST_NODES]
    place: dict[tuple[str, int], int] = {}
    keys = [("region", n.region) if n.region >= 0 else ("equation", k) for k, n in enumerate(nodes)]
    for key in keys:
        place.setdefault(key, len(place))
    reads: list[dict[int, None]] = [{} for _ in place]
    for key, node in zip(keys, nodes, strict=True):
        target = place[key]
        reads[target].update((place[keys[r]], None) for r in node.reads if r < len(nodes) and place[keys[r]] != target)
    boxes = []
    for (kind, number), boxed in zip(place, reads, strict=True):
        if kind == "equation":
            node = nodes[number]
            boxes.append(Box(node.primitive, f"left to XLA: {node.reason}\n{node.where}", "plain", tuple(boxed)))
            continue
        row = next(n.row for n in nodes if n.region == number)
        subset = report.subsets[row]
        by = "XLA" if subset.chosen == "xla" else subset.chosen
        title = f"region {number}: {operations_text(subset.operations)}\n{by}\n{'; '.join(subset.where[:3])}"
        main = operations_text(subset.operations).split(", ")[0].split(" ")[-1]
        count = sum(subset.operations.values())
        label = main if count == 1 else f"{main} +{count - 1}"
        boxes.append(Box(label, title, region_class(number if subset.chosen != "xla" else -1), tuple(boxed)))
    return drawing(boxes, "regions and equations after fusion")


def _is_kernel(report: ReportData, node: GraphNode) -> bool:
    return node.row >= 0 and report.subsets[node.row].chosen != "xla"


def layers(reads: Sequence[Sequence[int]]) -> list[int]:
    """The layer of every node: one below the deepest that it reads (longest path, by Kahn's order).

    >>> layers([(), (0,), (4,), (1, 2), ()])
    [0, 1, 1, 2, 0]
    """
    found, waits = [0] * len(reads), [len(read) for read in reads]
    users: list[list[int]] = [[] for _ in reads]
    for node, read in enumerate(reads):
        for r in read:
            users[r].append(node)
    ready = [node for node, count in enumerate(waits) if not count]
    while ready:
        node = ready.pop()
        for user in users[node]:
            found[user] = max(found[user], found[node] + 1)
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return found


def drawing(boxes: Sequence[Box], label: str) -> str:
    """A layered drawing: one row per layer, edges from what is read to what reads."""
    if not boxes:
        return ""
    depth = layers([box.reads for box in boxes])
    rows: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    centre: dict[int, float] = {}
    widths = [LETTER * min(len(box.label), LONGEST) + GAP for box in boxes]
    total = GAP / 1
    for node, layer in enumerate(depth):
        rows[layer].append(node)
    for row in rows:  # by the mean place of what is read, as barycentre ordering does
        row.sort(key=lambda node: _mean([centre[r] for r in boxes[node].reads if r in centre]))
        x = GAP / 1
        for node in row:
            centre[node] = x + widths[node] / 2
            x += widths[node] + GAP
        total = max(total, x)
    for row in rows:  # rows in the middle
        width = sum(widths[node] + GAP for node in row) + GAP
        for node in row:
            centre[node] += (total - width) / 2
    edges, shapes = [], []
    for node, box in enumerate(boxes):
        x, y = centre[node], GAP + depth[node] * STEP
        for read in box.reads:
            x0, y0 = centre[read], GAP + depth[read] * STEP + HEIGHT
            middle = (y0 + y) / 2
            edges.append(f"M{x0:.0f} {y0}C{x0:.0f} {middle:.0f} {x:.0f} {middle:.0f} {x:.0f} {y}")
        text = box.label if len(box.label) <= LONGEST else box.label[: LONGEST - 1] + "…"
        shapes.append(
            f'<g><title>{escaped(box.title)}</title><rect class="{box.kind}" x="{x - widths[node] / 2:.0f}" y="{y}" '
            f'width="{widths[node]}" height="{HEIGHT}" rx="4" fill-opacity="0.45"/>'
            f'<text x="{x:.0f}" y="{y + 13}" text-anchor="middle">{escaped(text)}</text></g>'
        )
    height = GAP + len(rows) * STEP
    return (
        f'<svg role="img" aria-label="{escaped(label)}" viewBox="0 0 {total:.0f} {height}" width="{total:.0f}" '
        f'height="{height}"><path class="edge" d="{"".join(edges)}"/>{"".join(shapes)}</svg>'
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
