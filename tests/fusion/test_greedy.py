"""Grouping: every subset is convex, the quotient graph acyclic, and everything left out has a reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jcuts.fusion.greedy import group
from jcuts.kernel_ir.interpret import interpret
from tests import programs

X = np.random.default_rng(0).standard_normal((12, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)


def diamond(x):
    a = jnp.sin(x)
    return jnp.exp(a) + jnp.cos(a) * a


def residual(x, w):
    return x + jax.nn.relu(x @ w) @ w


def through_xla(x):
    """A value that goes through an operation without a rule, and around it."""
    a = x * 2
    return a + lax.sort(a, dimension=1)


def branches(x, w):
    return jnp.tanh(x @ w), jax.nn.sigmoid(x @ (w * 2))


def many_users(x, w):
    h = x @ w
    return h + 1, h * 2, jnp.maximum(h, 0).sum(1), h


def softmax_chain(x, w):
    return jax.nn.softmax(jax.nn.softmax(x @ w) @ w)


def all_sorts(x, w):
    h = jax.nn.relu(x @ w)
    s = lax.cumsum(h, axis=1)
    return (s * h).sum(0) + jnp.argmax(h, 0).astype(x.dtype), s


FUNCTIONS = {
    "diamond": (diamond, (X,)),
    "residual": (residual, (X, W)),
    "through XLA": (through_xla, (X,)),
    "branches": (branches, (X, W)),
    "many users": (many_users, (X, W)),
    "softmax": (softmax_chain, (X, W)),
    "all sorts": (all_sorts, (X, W)),
}


def assert_legal(graph, grouping) -> None:
    """Disjoint subsets, each node placed once, and an acyclic quotient graph (which implies convexity)."""
    unit: dict[int, int] = {}
    for number, (members, program) in enumerate(grouping.subsets):
        assert not members & unit.keys()
        unit.update(dict.fromkeys(members, number))
        assert len(program.inputs) == len(graph.subset_inputs(members))
        assert len(program.outputs) == len(graph.subset_outputs(members))
    for node in graph.nodes:
        assert (node.number in unit) != (node.number in grouping.left_out)
    for number in grouping.left_out:
        unit[number] = len(graph.nodes) + number
        assert grouping.left_out[number].reason
    waiting = {(unit[a], unit[b]) for a, b in graph.edges() if unit[a] != unit[b]}
    todo = set(unit.values())
    while todo:
        ready = {u for u in todo if all(b != u for _, b in waiting)}
        assert ready, "the subsets depend on each other in a cycle"
        todo -= ready
        waiting = {(a, b) for a, b in waiting if a not in ready}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fuse", [True, False])
def test_groupings_are_legal(name, fuse):
    fn, arguments = FUNCTIONS[name]
    graph = programs.trace(fn, *arguments).graph
    grouping = group(graph, fuse=fuse)
    assert_legal(graph, grouping)
    if not fuse:
        assert all(len(members) == 1 for members, _ in grouping.subsets)


def primitives(name):
    fn, arguments = FUNCTIONS[name]
    trace = programs.trace(fn, *arguments)
    grouping = group(trace.graph)
    return [sorted(trace.graph.nodes[m].prim for m in members) for members, _ in grouping.subsets], grouping


def test_a_diamond_of_element_operations_is_one_kernel():
    found, _ = primitives("diamond")
    assert found == [["add", "cos", "exp", "mul", "sin"]]


def test_a_residual_connection_joins_the_second_product():
    found, _ = primitives("residual")
    assert sorted("dot_general" in f for f in found) == [True, True]
    assert any("add" in f and "dot_general" in f for f in found)


def test_an_operation_of_xlas_in_between_keeps_its_neighbours_apart():
    found, grouping = primitives("through XLA")
    assert found == [["mul"], ["add"]]
    assert [r.op for r in grouping.left_out.values()] == ["sort"]
    assert "no op rule" in next(iter(grouping.left_out.values())).reason


def test_a_value_with_users_in_and_out_of_a_subset_is_a_result():
    fn, arguments = FUNCTIONS["many users"]
    graph = programs.trace(fn, *arguments).graph
    grouping = group(graph)
    product = next(m for m, p in grouping.subsets if any(graph.nodes[n].prim == "dot_general" for n in m))
    names = [graph.nodes[graph.tensors[t].producer].prim for t in graph.subset_outputs(product)]
    assert "dot_general" in names


def test_fuel_stops_fusing():
    fn, arguments = FUNCTIONS["diamond"]
    graph = programs.trace(fn, *arguments).graph
    sizes = []
    for amount in range(6):
        left = [amount]

        def fuel(left=left):
            left[0] -= 1
            return left[0] >= 0

        grouping = group(graph, fuel=fuel)
        assert_legal(graph, grouping)
        sizes.append(len(grouping.subsets))
    assert sizes == [5, 4, 3, 2, 1, 1]


@st.composite
def random_functions(draw):
    """Straight-line programs over (6, 6) matrices with element operations, products, reductions and sorts."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 50), st.integers(0, 50)), min_size=3, max_size=12)
    )
    outputs = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))

    def fn(x, y):
        values = [x, y]
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(
                [
                    lambda a, b: a + b,
                    lambda a, b: a * b,
                    lambda a, b: jnp.maximum(a, b),
                    lambda a, b: a @ b * 0.1,
                    lambda a, b: jnp.tanh(a) - b,
                    lambda a, b: a.sum(0, keepdims=True) * 0.1 + b,
                    lambda a, b: a.T + b,
                    lambda a, b: lax.sort(a, dimension=0) + b,
                    lambda a, b: jax.nn.softmax(a),
                ][kind](a, b)
            )
        return [values[-1 - o % (len(values) - 2)] for o in outputs]

    return fn


@settings(max_examples=25, deadline=None, derandomize=True)
@given(random_functions())
def test_random_programs_are_grouped_legally_and_compute_the_same(fn):
    x, y = X[:6, :6], W[:6, :6]
    trace = programs.trace(fn, x, y)
    graph = trace.graph
    grouping = group(graph)
    assert_legal(graph, grouping)
    names = {number: var for var, number in graph.of_var.items()}
    value = dict(zip(trace.closed.jaxpr.invars, trace.arguments, strict=True))
    every = intermediate_values(trace)
    value.update(every)
    for members, program in grouping.subsets:
        got = interpret(program, [np.asarray(value[names[t]]) for t in graph.subset_inputs(members)])
        for tensor, array in zip(graph.subset_outputs(members), got, strict=True):
            np.testing.assert_allclose(array, every[names[tensor]], rtol=1e-4, atol=1e-4)


def intermediate_values(trace):
    """Every variable of the jaxpr with its value, evaluated equation by equation."""
    env = dict(zip(trace.closed.jaxpr.invars, trace.arguments, strict=True))
    env.update(zip(trace.closed.jaxpr.constvars, trace.closed.consts, strict=True))
    for eqn in trace.closed.jaxpr.eqns:
        inputs = [a.val if hasattr(a, "val") else env[a] for a in eqn.invars]
        results = eqn.primitive.bind(*inputs, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return env


def test_reductions_of_nothing_but_constants_are_grouped():
    def function(x):
        return lax.iota(jnp.float32, 40).sum(), jnp.sin(lax.iota(jnp.float32, 40)).sum(), x * 2

    traced = programs.trace(function, X)
    assert not group(traced.graph).left_out
