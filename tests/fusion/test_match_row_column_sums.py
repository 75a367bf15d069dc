"""Column reductions that join row reductions: which regions of a gradient take them over, and what they compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.fusion import greedy
from jcuts.fusion.dag import Dag, is_acyclic_cover, is_convex
from jcuts.fusion.match_row_column_sums import row_hosts
from jcuts.fusion.sink_outputs import sink_outputs
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower.patterns.row_column_sums import TEMPLATE
from tests import programs
from tests.codegen.cuda.reduction.test_row_column_sums import FUNCTIONS, arguments_of, layer_norm


def templates(traced, column_sums=True):
    return sorted(p.template for _, p in greedy.group(traced.graph, column_sums=column_sums).subsets)


def test_gradients_of_norms_are_one_region():
    for fn in FUNCTIONS.values():
        traced = programs.trace(fn, *arguments_of((37, 100)))
        assert templates(traced) == [TEMPLATE]
        ((members, program),) = greedy.group(traced.graph, column_sums=True).subsets
        assert members == traced.everything and sorted(b.shape for b in program.outputs) == [(37, 100), (100,), (100,)]
        assert sink_outputs(traced.graph, [(members, program)], lambda p: True) == [(members, program)]


def test_other_platforms_keep_their_regions():
    traced = programs.trace(FUNCTIONS["layer norm"], *arguments_of((37, 100)))
    assert templates(traced, column_sums=False) == ["reduction", "reduction", "rows"]


def test_what_does_not_fit_stays_apart():
    wide = programs.trace(FUNCTIONS["layer norm"], *arguments_of((3, 16384)))
    assert TEMPLATE not in templates(wide) and len(templates(wide)) == 3
    apart = programs.trace(lambda x, y: (jax.nn.softmax(x), jnp.sum(y, 0)), *(np.ones((16, 24), np.float32),) * 2)
    assert templates(apart) == ["reduction", "rows"]  # nothing is read by both
    found = dict(greedy.group(apart.graph, column_sums=True).subsets)
    assert not list(row_hosts(apart.graph, dict(enumerate(found))))


def test_a_region_whose_operand_is_summed_reads_it_once():
    traced = programs.trace(lambda x: (jax.nn.softmax(x), jnp.sum(x * x, 0)), np.ones((16, 24), np.float32))
    ((members, program),) = greedy.group(traced.graph, column_sums=True).subsets
    assert program.template == TEMPLATE and len(program.inputs) == 1 and members == traced.everything


def test_a_network_of_norms_is_partitioned_into_convex_regions():
    """Two layer norms with a residual between: gradients of both, and a momentum update behind the sums."""

    def loss(parameters, x):
        y = x + jnp.tanh(layer_norm(x, *parameters[0]))
        return jnp.sum(jnp.square(layer_norm(y, *parameters[1])))

    def step(parameters, x):
        gradients = jax.grad(loss)(parameters, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

    x, scale, offset, _ = arguments_of((29, 60))
    traced = programs.trace(lambda s, t, u, v, x: step([(s, t), (u, v)], x), scale, offset, scale + 1, offset - 1, x)
    found = greedy.group(traced.graph, column_sums=True)
    assert any(program.template == TEMPLATE for _, program in found.subsets)
    dag = Dag.of((n.number for n in traced.graph.nodes), traced.graph.edges())
    cover = [members for members, _ in found.subsets]
    assert all(is_convex(dag, members) for members in cover)
    assert is_acyclic_cover(dag, [*cover, *(frozenset({n}) for n in dag.nodes - frozenset().union(*cover))])
    names = {number: var for var, number in traced.graph.of_var.items()}
    for members, program in found.subsets:
        if program.template != TEMPLATE:
            continue
        operands = traced.operands(members)
        values = dict(zip((names[t] for t in traced.graph.subset_inputs(members)), operands, strict=True))
        for number in sorted(members):
            eqn = traced.closed.jaxpr.eqns[number]
            made = eqn.primitive.bind(*(v.val if hasattr(v, "val") else values[v] for v in eqn.invars), **eqn.params)
            values.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True))
        wanted = [np.asarray(values[names[t]]) for t in traced.graph.subset_outputs(members)]
        for got, want in zip(interpret(program, operands), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
