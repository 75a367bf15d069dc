"""Emits Winograd (Toom-Cook) transforms as data-flow graphs, by few additions (`base.toom_cook` has the matrices)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from jcuts.base.toom_cook import POINTS as POINTS
from jcuts.base.toom_cook import Matrix
from jcuts.base.toom_cook import matrices as matrices
from jcuts.base.toom_cook import outputs_of as outputs_of
from jcuts.kernel_ir.node import Graph


def emit(graph: Graph, matrix: Matrix, values: Sequence[int], dtype: str) -> list[int]:
    """Nodes of ``matrix @ values``.

    Two columns that are equal but for signs (points +-a) share a sum and a difference; two rows that are equal but for
    signs share their common part E and the other, O: they are E + O and E - O.
    """
    rows, terms = _joined_columns(graph, [list(row) for row in matrix], list(values), dtype)
    done: dict[int, int] = {}
    for i, row in enumerate(rows):
        if i in done:
            continue
        twin = next((k for k in range(i + 1, len(rows)) if k not in done and _common_subexpression(row, rows[k])), None)
        if twin is None:
            done[i] = _sum(graph, row, terms, dtype)
            continue
        even = [a if a == b else Fraction(0) for a, b in zip(row, rows[twin], strict=True)]
        odd = [a if a != b else Fraction(0) for a, b in zip(row, rows[twin], strict=True)]
        e, o = _sum(graph, even, terms, dtype), _sum(graph, odd, terms, dtype)
        done[i] = graph.apply("add", dtype, e, o)
        done[twin] = graph.apply("sub", dtype, e, o)
    return [done[i] for i in range(len(rows))]


def _common_subexpression(row: Sequence[Fraction], other: Sequence[Fraction]) -> bool:
    """Equal but for signs, with something in the common part and something in the other."""
    pairs = list(zip(row, other, strict=True))
    return (
        all(abs(a) == abs(b) for a, b in pairs) and any(a == b != 0 for a, b in pairs) and any(a != b for a, b in pairs)
    )


def _joined_columns(
    graph: Graph, rows: list[list[Fraction]], terms: list[int], dtype: str
) -> tuple[list[list[Fraction]], list[int]]:
    for j in range(len(terms)):
        for k in range(j + 1, len(terms)):
            if not _common_subexpression([r[j] for r in rows], [r[k] for r in rows]):
                continue
            total = graph.apply("add", dtype, terms[j], terms[k])
            difference = graph.apply("sub", dtype, terms[j], terms[k])
            for row in rows:
                same = row[j] == row[k]
                row[j], row[k] = (row[j], Fraction(0)) if same else (Fraction(0), row[j])
            terms[j], terms[k] = total, difference
    return rows, terms


def _sum(graph: Graph, row: Sequence[Fraction], terms: Sequence[int], dtype: str) -> int:
    live = [(c, t) for c, t in zip(row, terms, strict=True) if c]
    if not live:
        return graph.const(0.0, dtype)
    live.sort(key=lambda item: item[0] != 1)  # a factor of 1 needs no multiplication: it starts the sum
    (first, total), *rest = live
    if first != 1:
        total = graph.apply("mul", dtype, total, graph.const(float(first), dtype))
    for c, t in rest:
        if abs(c) == 1:
            total = graph.apply("add" if c == 1 else "sub", dtype, total, t)
        else:
            total = graph.apply("fma", dtype, t, graph.const(float(c), dtype), total)
    return total
