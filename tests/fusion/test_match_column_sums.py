"""Column reductions of contractions: which reductions of a training step find one, and that programs compute them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.fusion import greedy
from jcuts.fusion.dag import Dag, is_acyclic_cover, is_convex
from jcuts.fusion.match_column_sums import column_sum_cones
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.column_sums import as_gemm_with_column_sums, match_column_sums
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.backward.separate_deviations import separate_deviations
from jcuts.rewrite.simplify import simplify
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests import programs
from tests.ops.cases import conv


def normed(y, gain, shift):
    mean = jnp.mean(y, (0, 1, 2), keepdims=True)
    return (y - mean) * jax.lax.rsqrt(jnp.var(y, (0, 1, 2), keepdims=True) + 1e-3) * gain + shift


def loss(weights, x, target):
    (w, g, b), (v, h, c) = weights
    y = jax.nn.relu(normed(conv(x, w), g, b))
    y = jax.nn.relu(normed(conv(y, v), h, c))
    return jnp.mean(jnp.square(y - target))


def training_step():
    """Two convolutions with batch norms and rectifiers, with gradients."""
    rng = np.random.default_rng(0)
    normal = lambda *s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    ones, zeros = np.ones(24, np.float32), np.zeros(24, np.float32)
    weights = [(normal(3, 3, 16, 24) / 12, ones, zeros), (normal(1, 1, 24, 24) / 5, ones, zeros)]
    arguments = weights, normal(4, 6, 5, 16), normal(4, 6, 5, 24)
    closed = jaxapi.closed_jaxpr_of(jax.value_and_grad(loss), *arguments)
    closed = separate_deviations(simplify(inline(closed)))
    values = tuple(np.asarray(a) for a in jax.tree.leaves(arguments))
    return programs.Traced(closed, build_graph(closed.jaxpr), values)


def test_statistics_and_gradients_go_to_their_convolutions():
    traced = training_step()
    found = greedy.group(traced.graph, column_sums=True)
    sums = [(members, program) for members, program in found.subsets if match_column_sums(program)]
    kinds = [match_column_sums(program) for _, program in sums]
    assert [kind.moments for kind in kinds if kind is not None].count(True) == 2  # of both convolutions
    assert any(kind is not None and len(kind.kept) >= 2 for kind in kinds)  # of the gradient between them
    dag = Dag.of((n.number for n in traced.graph.nodes), traced.graph.edges())
    cover = [members for members, _ in found.subsets]
    assert all(is_convex(dag, members) for members in cover)
    assert is_acyclic_cover(dag, [*cover, *(frozenset({n}) for n in dag.nodes - frozenset().union(*cover))])


def test_their_programs_compute_what_their_equations_do():
    traced = training_step()
    for members, program in greedy.group(traced.graph, column_sums=True).subsets:
        if match_column_sums(program) is None:
            continue
        gemm = as_gemm_with_column_sums(program)
        assert gemm is not None
        operands = [np.asarray(o) for o in traced.operands(members)]
        names = {number: var for var, number in traced.graph.of_var.items()}
        values = dict(zip((names[t] for t in traced.graph.subset_inputs(members)), operands, strict=True))
        for number in sorted(members):
            eqn = traced.closed.jaxpr.eqns[number]
            made = eqn.primitive.bind(*(v.val if hasattr(v, "val") else values[v] for v in eqn.invars), **eqn.params)
            values.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True))
        wanted = [np.asarray(values[names[t]]) for t in traced.graph.subset_outputs(members)]
        for one in (program, gemm):
            verify(one)
            for got, want in zip(interpret(one, operands), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_other_platforms_keep_their_regions():
    found = greedy.group(training_step().graph)
    assert not any(program.template == "column_sums" for _, program in found.subsets)


def test_a_deviation_that_others_need_is_copied_to_its_square():
    def both(y):
        d = y - jnp.sum(y, 0)
        return jnp.sum(jnp.square(d), 0), d * 2

    closed = simplify(inline(jaxapi.closed_jaxpr_of(both, np.ones((6, 4), np.float32))))
    made = separate_deviations(closed)
    names = [jaxapi.primitive_name(e) for e in made.jaxpr.eqns]
    assert names.count("sub") == 1 + [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns].count("sub")
    y = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    for one, other in zip(jax.core.eval_jaxpr(made.jaxpr, made.consts, y), both(y), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert separate_deviations(made) is made
    alone = simplify(inline(jaxapi.closed_jaxpr_of(lambda y: both(y)[0], y)))
    assert separate_deviations(alone) is alone


def test_sums_behind_other_operations_are_no_cones():
    w = np.ones((16, 24), np.float32)
    x = np.ones((32, 16), np.float32)
    for fn in (
        lambda x, w: jnp.sum(jnp.sort(x @ w, 0), 0),  # not per point
        lambda x, w: jnp.sum((x @ w).reshape(16, 48), 0) @ jnp.ones((48, 2)),
        lambda x, w: jnp.sum(x @ w, 1),
    ):
        graph = programs.trace(fn, x, w).graph
        found = greedy.group(graph, column_sums=True)
        assert not any(match_column_sums(program) for _, program in found.subsets)
    assert len(column_sum_cones(programs.trace(lambda x, w: (x @ w, jnp.sum(x @ w, 0)), x, w).graph)) == 1
