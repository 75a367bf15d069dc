"""Graphs and tiles: what merges, what stays apart, and hand counts of the loads of register tiles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph, Guard, Node
from jcuts.kernel_ir.register_tiling import Extent, body_tile, exit_tile, points
from tests import programs
from tests.ops.cases import conv

ROW, J = Index.axis("i"), Index.axis("j")


def test_equal_nodes_merge():
    graph = Graph()
    a = graph.load("x", ROW * 4 + J, "float32")
    assert graph.load("x", J + ROW * 4, "float32") == a
    assert graph.load("y", ROW * 4 + J, "float32") != a
    one = graph.apply("mul", "float32", a, a)
    assert graph.apply("mul", "float32", a, a) == one
    assert graph.apply("mul", "float32", a, a, mode=1) != one
    assert len(graph.nodes) == 4


def test_constants_are_told_apart_by_bits_and_type():
    graph = Graph()
    numbers = [graph.const(v, "float32") for v in (0.0, -0.0, math.nan, math.nan, 1.0, True, 1)]
    assert numbers == [0, 1, 2, 2, 3, 4, 5]


def test_a_guard_is_part_of_a_load():
    graph = Graph()
    guard = Guard(ROW, 0, 3)
    assert graph.load("x", ROW, "float32", (guard,), 0.0) != graph.load("x", ROW, "float32")
    assert graph.load("x", ROW, "float32", (guard,), 0.0) != graph.load("x", ROW, "float32", (guard,), -math.inf)


def test_arguments_come_first():
    with pytest.raises(IRError, match="not defined yet"):
        Graph().add(Node("neg", "float32", args=(0,)))


def test_guards_against_ranges():
    assert Guard(ROW, 0, 4).always({"i": 5}) and not Guard(ROW, 0, 3).always({"i": 5})
    assert Guard(ROW, 5, None).never({"i": 5}) and not Guard(ROW, 4, None).never({"i": 5})
    assert not Guard(ROW, None, 3).always({})


def test_needed_walks_back_from_the_stores():
    graph = Graph()
    row = graph.load("index", ROW, "int64")
    used = graph.load("x", Index.value(row) + J, "float32")
    graph.load("unused", ROW, "float32")
    assert graph.needed([used]) == [row, used]


def test_copying_folds_guards_that_a_point_decides():
    graph = Graph()
    value = graph.load("x", ROW, "float32", (Guard(ROW, 0, 3),), -1.0)
    for place, op in ((2, "load"), (9, "const")):
        target = Graph()
        (number,) = graph.copy_into(target, [value], {"i": Index(place)}, {})
        assert target.nodes[number].op == op
        assert target.nodes[number].guards == ()


# -- tiles ------------------------------------------------------------------------------------------------------------
def loads(graph: Graph, buffer: str = "") -> int:
    return sum(n.op == "load" and n.buffer.startswith(buffer) for n in graph.nodes)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_points_are_row_major():
    found = [tuple(o for _, o in p) for p in points([Extent("a", 2), Extent("b", 2, 8)])]
    assert found == [(0, 0), (0, 8), (1, 0), (1, 8)]


def gemm():
    return programs.trace(lambda a, b: a @ b, random(12, 32), random(32, 16)).program().phases[0]


@pytest.mark.parametrize(("rows", "columns"), [(6, 4), (1, 4), (6, 1), (12, 2)])
def test_a_gemm_tile_loads_each_operand_once(rows, columns):
    phase = gemm()
    axes = [Extent("d0", rows), Extent("d1", columns)]
    tile = body_tile(phase, axes, [Extent("k0", 1)], {"d0": 12, "d1": 16, "k0": 32})
    assert loads(tile.graph, "in0") == rows
    assert loads(tile.graph, "in1") == columns
    assert len(tile.terms) == rows * columns
    assert sum(n.op == "mul" for n in tile.graph.nodes) == rows * columns


def test_unrolling_the_reduction_adds_loads():
    tile = body_tile(gemm(), [Extent("d0", 6), Extent("d1", 4)], [Extent("k0", 2)], {"d0": 12, "d1": 16, "k0": 32})
    assert loads(tile.graph) == 2 * (6 + 4)


def depthwise(stride=1):
    x, w = random(1, 12, 12, 8), random(3, 3, 1, 8)
    traced = programs.trace(lambda x, w: conv(x, w, strides=(stride, stride), padding="VALID", groups=8), x, w)
    return traced.program().phases[0]


@pytest.mark.parametrize(("stride", "columns", "input_columns"), [(1, 4, 6), (1, 1, 3), (2, 4, 9), (2, 2, 5)])
def test_a_depthwise_tile_shares_the_windows_columns(stride, columns, input_columns):
    """A row of outputs needs 3 input rows of (columns - 1) * stride + 3 columns."""
    phase = depthwise(stride)
    axes = [Extent(a.name, columns if a.name == "d2" else 1) for a in phase.axes]
    reds = [Extent(r.name, r.extent, fixed=True) for r in phase.reds]
    tile = body_tile(phase, axes, reds, phase.ranges())
    assert loads(tile.graph, "in0") == 3 * input_columns
    assert loads(tile.graph, "in1") == 9
    assert len(tile.terms) == 9 * columns


def test_what_does_not_depend_on_the_point_is_computed_once():
    traced = programs.trace(lambda x, b: np.float32(2) * x + b * b, random(6, 8), random(8))
    phase = traced.program().phases[0]
    tile = exit_tile(phase, [Extent("d0", 6), Extent("d1", 1)], phase.ranges())
    assert loads(tile.graph, "in0") == 6
    assert loads(tile.graph, "in1") == 1
    assert len(tile.stores) == 6
    squares = [n for n in tile.graph.nodes if n.op == "mul" and n.args[0] == n.args[1]]
    assert len(squares) == 1


def test_every_point_has_accumulators_of_its_own():
    tile = exit_tile(gemm(), [Extent("d0", 2), Extent("d1", 2)], {"d0": 12, "d1": 16})
    assert sorted(tile.accs.values()) == sorted((p, 0) for p in points([Extent("d0", 2), Extent("d1", 2)]))
    assert [str(s[3]) for s in tile.stores] == ["16*d0 + d1", "16*d0 + d1 + 1", "16*d0 + d1 + 16", "16*d0 + d1 + 17"]
