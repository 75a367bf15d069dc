"""Interval analysis of attention's element-wise graphs: tiles in which a mask of positions makes every weight 0.

A causal or sliding-window mask compares positions.  Where such a comparison has one value in a whole tile, intervals of
all operations of the graphs tell whether the tile's weights, and in the backward pass their gradients, are 0 for all
operands up to a magnitude: 0 times a number is 0 only if that is finite.  A kernel then leaves out the tile whose
operands are no larger (FlashAttention-2, "causal masking"), and its result is what XLA computes, infinities and NaN
included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Node
from jcuts.kernel_ir.program import Phase
from jcuts.lower.patterns.attention import Attention
from jcuts.lower.patterns.attention_backward import AttentionBackward
from jcuts.lower.patterns.gemm import COLUMNS, ROWS

Interval = tuple[float, float]
LIMITS = ((2**12, 2**20), (2**8, 2**16), (2**4, 2**9))
"""Magnitudes of operands and of what graphs load (logsumexp, bias): the first pair with which masked weights are 0."""
VANISHES = 150
"""exp(-x) is 0 in float32 from here on, denormals or not."""
MASKED_SCORE = -1000
"""Scores below are taken for masked: maxima of rows are far above."""
SLACK = 1 / 64
"""What rounding to 16 bits, and the units' own, may add to a bound, relatively."""
COMPARED: Mapping[str, tuple[tuple[bool, int, int], tuple[bool, int, int]]] = {
    "ge": ((False, 1, -1), (True, -1, 0)),
    "gt": ((False, 1, 0), (True, -1, -1)),
    "lt": ((False, -1, 0), (True, 1, -1)),
    "le": ((False, -1, -1), (True, 1, 0)),
}
"""Comparison -> (value, sign, constant): it has the value where sign * (right - left) + constant >= 0."""


@dataclass(frozen=True)
class MaskedTiles:
    """Tiles whose weights are 0.

    Attributes:
        positions: affine in the row ``m`` and the column ``n``; a tile is masked where one is >= 0 in all of it.
        operands, loads: largest magnitudes of the products' operands, and of what the graphs load.
        row_loads, column_loads: these loads, by what their address depends on.
        score: upper bound of a masked score (forward pass).
    """

    positions: tuple[Index, ...]
    operands: float
    loads: float
    row_loads: tuple[Node, ...]
    column_loads: tuple[Node, ...]
    score: float = -math.inf


def masked_forward(attention: Attention) -> MaskedTiles | None:
    """The tiles of keys that need not be looked at once a row has seen others; None where none is known."""
    loads = _loads((attention.scores,), "")
    if loads is None or loads[1]:
        return None
    for operands, loaded in LIMITS:
        found: list[tuple[Index, float]] = []
        product = attention.query.length * operands**2
        for number, value, position in _comparisons(attention.scores.exit):
            score = _stored(attention.scores, {number: value}, product, loaded)
            if score is not None and score[1] < MASKED_SCORE:
                found.append((position, score[1]))
        if found:
            return MaskedTiles(tuple(p for p, _ in found), operands, loaded, *loads, max(most for _, most in found))
    return None


def masked_backward(attention: AttentionBackward) -> MaskedTiles | None:
    """The tiles that add nothing to a gradient; None where none is known."""
    weights = attention.weights.stores[0].buffer
    loads = _loads((attention.weights, attention.change), weights)
    if loads is None:
        return None
    for operands, loaded in LIMITS:
        products = [side.length * operands**2 for side in (attention.scores, attention.gradient)]
        change = _stored(attention.change, {}, products[1], loaded, weights)
        positions = tuple(
            position
            for number, value, position in _comparisons(attention.weights.exit)
            if _stored(attention.weights, {number: value}, products[0], loaded) == (0.0, 0.0)
        )
        if positions and change == (0.0, 0.0):
            return MaskedTiles(positions, operands, loaded, *loads)
    return None


def _loads(phases: Sequence[Phase], local: str) -> tuple[tuple[Node, ...], tuple[Node, ...]] | None:
    """Loads of floats by row and by column; None where one depends on both, or on values."""
    rows, columns = [], []
    for node in (node for phase in phases for node in phase.exit.nodes if node.op == "load" and node.buffer != local):
        axes = set() if node.index is None else node.index.axes()
        if node.index is None or node.index.values() or {ROWS, COLUMNS} <= axes:
            return None
        if node.dtype != "bool":
            (columns if COLUMNS in axes else rows).append(node)
    return tuple(rows), tuple(columns)


def _comparisons(graph: Graph) -> list[tuple[int, bool, Index]]:
    """Comparisons of positions: number, a value, and the position that is >= 0 where it has the value."""
    found = []
    for number, node in enumerate(graph.nodes):
        sides = [_position(graph, a) for a in node.args] if node.op in COMPARED else []
        if len(sides) != 2 or sides[0] is None or sides[1] is None:
            continue
        apart = sides[1] - sides[0]
        if apart.axes() and apart.axes() <= {ROWS, COLUMNS} and all(atom.kind == "axis" for atom, _ in apart.terms):
            found += [(number, value, apart * sign + constant) for value, sign, constant in COMPARED[node.op]]
    return found


def _position(graph: Graph, number: int) -> Index | None:
    """The index expression that an integer is."""
    node = graph.nodes[number]
    if node.op == "index":
        return node.index
    if node.op == "const" and isinstance(node.value, int):
        return Index(int(node.value))
    sides = [_position(graph, a) for a in node.args]
    if node.op in ("add", "sub") and sides[0] is not None and sides[1] is not None:
        return sides[0] + sides[1] if node.op == "add" else sides[0] - sides[1]
    return None


def _stored(phase: Phase, known: Mapping[int, bool], product: float, loaded: float, zero: str = "") -> Interval | None:
    """Interval of what a phase stores, None where nothing is known, or it may be NaN or infinite.

    Args: known: values of comparisons; product: largest magnitude of the products' sums; loaded: of loads; zero: the
        local buffer that is 0.
    """
    found: list[Interval | None] = []
    for number, node in enumerate(phase.exit.nodes):
        if number in known:
            found.append((float(known[number]), float(known[number])))
        elif node.op == "acc":
            found.append((-product, product))
        elif node.op == "load":
            bound = 0.0 if node.buffer == zero else loaded
            found.append((0.0, 1.0) if node.dtype == "bool" else (-bound, bound))
        elif node.op == "const":
            value = float(node.value) if isinstance(node.value, (bool, int, float)) else math.nan
            found.append(None if math.isnan(value) else (value, value))
        else:
            made = _INTERVALS.get(node.op)
            args = [found[a] for a in node.args]
            if node.op == "select" and args[0] in ((0.0, 0.0), (1.0, 1.0)):
                found.append(args[1 if args[0] == (1.0, 1.0) else 2])
                continue
            known_args = [a for a in args if a is not None]
            found.append(None if made is None or len(known_args) < len(args) else _widened(node, made(*known_args)))
    return found[phase.stores[0].value]


def _widened(node: Node, interval: Interval) -> Interval | None:
    low, high = interval
    if math.isnan(low) or math.isnan(high):
        return None
    if node.dtype == "bool" or low == high == 0.0:
        return interval
    low = low - SLACK * abs(low) if math.isfinite(low) else low
    return low, high + SLACK * abs(high) if math.isfinite(high) else high


def _product(a: Interval, b: Interval) -> Interval:
    every = [x * y for x in a for y in b]
    return (math.nan, math.nan) if any(map(math.isnan, every)) else (min(every), max(every))


def _exponential(a: Interval) -> Interval:
    if a[1] < -VANISHES:
        return 0.0, 0.0
    return 0.0, math.exp(a[1]) if a[1] < VANISHES / 2 else math.inf


_UNKNOWN: Interval = (0.0, 1.0)
_INTERVALS = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "exp": _exponential,
    "tanh": lambda a: (-1.0, 1.0),
    "convert": lambda a: a,
    "widen": lambda a: a,
    "select": lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "not": lambda a: (1.0 - a[1], 1.0 - a[0]),
    "and": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "or": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "index": lambda: (-(2**31), 2**31),
    **dict.fromkeys(("ge", "gt", "le", "lt", "eq", "ne"), lambda a, b: _UNKNOWN),
}
"""Operation -> interval of its result from those of its operands."""
