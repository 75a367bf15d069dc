"""Minimal filtering: exact identities of the matrices, and the graphs that apply them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from jcuts.base.errors import IRError
from jcuts.kernel_ir.index import Index
from jcuts.kernel_ir.node import Graph
from jcuts.kernel_ir.numpy_semantics import apply
from jcuts.lower import toom_cook

SIZES = [(points, taps) for points in toom_cook.POINTS for taps in range(2, points)]


@pytest.mark.parametrize(("points", "taps"), SIZES)
def test_the_identity_holds_exactly(points, taps):
    a_t, g, b_t = toom_cook.matrices(points, taps)
    m = toom_cook.outputs_of(points, taps)
    assert (len(a_t), len(g), len(b_t)) == (m, points, points)
    for k in range(taps):  # linear in filter and data: unit vectors suffice
        for j in range(points):
            product = [g[p][k] * b_t[p][j] for p in range(points)]
            found = [sum(a * x for a, x in zip(row, product, strict=True)) for row in a_t]
            assert found == [Fraction(int(j == i + k)) for i in range(m)]


def test_constants_of_data_and_results_are_exact_in_float32():
    for points, taps in SIZES:
        a_t, _, b_t = toom_cook.matrices(points, taps)
        for value in (v for matrix in (a_t, b_t) for row in matrix for v in row):
            assert Fraction(float(np.float32(float(value)))) == value


@pytest.mark.parametrize(("points", "taps"), [(5, 3), (4, 5), (8, 3)])
def test_sizes_without_points(points, taps):
    with pytest.raises(IRError, match="no minimal filtering") as error:
        toom_cook.matrices(points, taps)
    assert error.value.values["points"] == points


def evaluate(graph: Graph, wanted, inputs):
    values = []
    for node in graph.nodes:
        if node.op == "load":
            values.append(inputs[node.index.const])
        elif node.op == "const":
            values.append(np.float64(node.value))
        else:
            values.append(apply(node.op, node.dtype, ["float64"] * len(node.args), [values[a] for a in node.args], {}))
    return [values[w] for w in wanted]


@pytest.mark.parametrize(("points", "taps"), SIZES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_graphs_compute_the_matrices_with_fewer_operations(points, taps, which):
    matrix = toom_cook.matrices(points, taps)[which]
    graph = Graph()
    loads = [graph.load("x", Index(k), "float64") for k in range(len(matrix[0]))]
    wanted = toom_cook.emit(graph, matrix, loads, "float64")
    x = np.random.default_rng([points, taps, which]).standard_normal(len(loads))
    np.testing.assert_allclose(
        evaluate(graph, wanted, x), np.array(matrix, dtype=np.float64) @ x, rtol=1e-12, atol=1e-12
    )
    operations = sum(n.op not in ("load", "const") for n in graph.nodes)
    assert operations <= sum(1 for row in matrix for v in row if v)
