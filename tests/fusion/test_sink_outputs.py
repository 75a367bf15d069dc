"""Element-wise results that their reader computes from what is in memory: which move, and that programs agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.fusion import greedy
from jcuts.fusion.dag import Dag, is_acyclic_cover, is_convex
from jcuts.fusion.sink_outputs import LEAST_BYTES, sink_outputs, traffic
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.backward.deviation_sums import deviation_sums
from jcuts.rewrite.backward.separate_deviations import separate_deviations
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests import programs
from tests.fusion.test_match_column_sums import normed

RNG = np.random.default_rng(41)
MACHINE = gpu_candidates.GpuMachine(132)


def has_form(program):
    return bool(gpu_candidates.candidates(program, MACHINE, 1))


def traced(function, *args):
    closed = simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))
    closed = separate_deviations(deviation_sums(closed)[0])
    values = tuple(np.asarray(a) for a in jax.tree.leaves(args))
    return programs.Traced(closed, build_graph(closed.jaxpr), values)


def values(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def covers(made):
    before = greedy.group(made.graph, column_sums=True).subsets
    return before, sink_outputs(made.graph, before, has_form)


def check_programs(made, cover):
    """Every region computes what its equations do."""
    names = {number: var for var, number in made.graph.of_var.items()}
    for members, program in cover:
        verify(program)
        operands = [np.asarray(o) for o in made.operands(members)]
        known = dict(zip((names[t] for t in made.graph.subset_inputs(members)), operands, strict=True))
        for number in sorted(members):
            eqn = made.closed.jaxpr.eqns[number]
            found = eqn.primitive.bind(*(v.val if hasattr(v, "val") else known[v] for v in eqn.invars), **eqn.params)
            known.update(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))
        wanted = [np.asarray(known[names[t]], np.float64) for t in made.graph.subset_outputs(members)]
        for got, want in zip(interpret(program, operands), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def depthwise(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
    )


def loss(weights, x, target):
    (w, g, b), (v, h, c) = weights
    y = jnp.clip(normed(depthwise(x, w), g, b), 0.0, 6.0)
    y = jnp.clip(normed(depthwise(y, v), h, c), 0.0, 6.0)
    return jnp.mean(jnp.square(y - target))


def training_step():
    """Two depthwise convolutions with batch norms and rectifiers, with gradients."""
    ones, zeros = np.ones(24, np.float32), np.zeros(24, np.float32)
    weights = [(values(3, 3, 1, 24), ones, zeros), (values(3, 3, 1, 24), ones, zeros)]
    return traced(jax.value_and_grad(loss), weights, values(4, 17, 19, 24), values(4, 17, 19, 24))


def test_a_training_step_moves_fewer_bytes():
    made = training_step()
    before, after = covers(made)
    assert {m for members, _ in before for m in members} == {m for members, _ in after for m in members}
    assert sum(len(members) for members, _ in after) == sum(len(members) for members, _ in before)
    moved = [traffic(made.graph, *(members for members, _ in cover)) for cover in (before, after)]
    activation = 4 * 17 * 19 * 24 * 4
    assert moved[1] <= moved[0] - 2 * activation
    dag = Dag.of((n.number for n in made.graph.nodes), made.graph.edges())
    cover = [members for members, _ in after]
    assert all(is_convex(dag, members) for members in cover)
    assert is_acyclic_cover(dag, [*cover, *(frozenset({n}) for n in dag.nodes - frozenset().union(*cover))])
    check_programs(made, [item for item in after if item not in before])


def gradient(x, w, m, s, further):
    """A masked product, and the same times a scale; something else reads both."""
    g = jnp.where(m, x @ w, 0.0)
    return jnp.sort(g, 0), *further(g, g * s)


def arguments(rows):
    return values(rows, 32), values(32, 64), values(rows, 64) > 0, values(64)


def test_a_scaled_gradient_moves_to_its_reader():
    other = values(1024, 64)
    made = traced(lambda *a: gradient(*a, lambda g, t: (jnp.sum(jnp.abs(other + t), 1),)), *arguments(1024))
    before, after = covers(made)
    gained = [traffic(made.graph, *dict(cover)) for cover in (before, after)]
    assert gained[0] - gained[1] == 1024 * 64 * 4
    check_programs(made, after)


@pytest.mark.parametrize(
    ("rows", "further"),
    [
        (1024, lambda g, t: (t,)),  # a result
        (1024, lambda g, t: (jnp.sum(t, 1), jnp.cumsum(t, 0))),  # several readers
        (1024, lambda g, t: (t @ jnp.ones((64, 8)),)),  # a product reads it
        (8, lambda g, t: (jnp.sum(jnp.abs(g + t), 1),)),  # too little
    ],
)
def test_others_stay(rows, further):
    made = traced(lambda *a: gradient(*a, further), *arguments(rows))
    before, after = covers(made)
    assert rows == 1024 or LEAST_BYTES > 8 * 64 * 4
    assert dict(before).keys() == dict(after).keys()


def masks(cover, graph):
    return [t for members, _ in cover for t in graph.subset_outputs(members) if graph.tensors[t].type.dtype == "bool"]


@pytest.mark.parametrize(("rows", "stays"), [(2048, 0), (64, 1)])
def test_masks_of_what_is_stored_go_to_their_reader_at_any_traffic(rows, stays):
    def function(x, w):
        y = jax.nn.relu(x @ w)
        return jnp.sum(jnp.where(y > 0, jnp.sort(y, 0), 0.5), 1)

    made = traced(function, values(rows, 32), values(32, 64))
    before, after = covers(made)
    assert len(masks(before, made.graph)) == 1
    assert len(masks(after, made.graph)) == stays
    check_programs(made, after)


def test_masks_whose_operands_would_live_on_for_them_stay():
    def function(x, w):
        u, v = jnp.sort(x, 0), jnp.sort(w, 0)
        y = jnp.tanh(u + v)
        return jnp.sum(jnp.where(y > u * v, jnp.sort(y, 0), 0.5), 1)

    made = traced(function, values(2048, 64), values(2048, 64))
    before, after = covers(made)
    assert len(masks(before, made.graph)) == len(masks(after, made.graph)) == 1
