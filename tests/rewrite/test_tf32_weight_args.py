"""Weights that are arguments: which are rounded and turned in every call, and what kernels know of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.settings import Settings
from jcuts.pipeline import computation
from jcuts.rewrite.registry import applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.tf32_weight_args import rounded_operands, turned_shapes
from jcuts.rewrite.tf32_weights import round_tf32
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.session import make_problem

RNG = np.random.default_rng(17)
F32 = jnp.float32


def values(*shape, dtype=F32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def shape(*extents, dtype=F32):
    return jax.ShapeDtypeStruct(extents, dtype)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def named(closed, *names):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) in names]


def products(closed):
    return named(closed, "dot_general", "conv_general_dilated")


def calls(closed):
    return named(closed, "jit", "pjit")


def conv(x, w, stride=1, padding="SAME", **more):
    return lax.conv_general_dilated(x, w, (stride,) * 2, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


TURNED = {
    "dot": (lambda w, x: x @ w, (256, 128), (4096, 256), (128, 256)),
    "few rows": (lambda w, x: x @ w, (512, 256), (49, 512), (256, 512)),
    "along terms": (lambda w, x: x @ w.T, (128, 256), (4096, 256), (128, 256)),
    "reshaped": (lambda w, x: x @ w.reshape(256, 128), (1, 1, 256, 128), (4096, 256), (128, 256)),
    "filter": (lambda w, x: conv(x, w), (3, 3, 32, 64), (8, 32, 32, 32), (64, 3, 3, 32)),
    "small filter of few outputs": (lambda w, x: conv(x, w), (3, 3, 32, 32), (1, 56, 56, 32), (32, 3, 3, 32)),
}


@pytest.mark.parametrize("name", TURNED)
def test_arguments_are_turned_once_per_call(name):
    function, weights, operand, made = TURNED[name]
    w, x = values(*weights), values(*operand)
    closed = flat(function, w, x)
    assert applicable(closed) == ("turns",)
    new = rewritten(closed, ("turns",)).closed
    jaxapi.check(new)
    (call,), (product,) = calls(new), products(new)
    assert new.jaxpr.eqns[0] is call and call.invars == [new.jaxpr.invars[0]]
    assert product.invars[1] is call.outvars[0] and call.outvars[0].aval.shape == made
    assert rounded_operands(new) == {call.outvars[0]} and not rounded_operands(closed)
    # The same as with weights that were rounded before: nothing but their rounding changed.
    (got,), (want,) = jaxapi.eval_closed(new, w, x), jaxapi.eval_closed(closed, round_tf32(np.asarray(w)), x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(got, jaxapi.eval_closed(closed, w, x)[0])
    (inside,) = (body for _, _, body in jaxapi.inner_jaxprs(call))
    (turned,) = jaxapi.eval_closed(inside, w)
    matrix = (
        np.asarray(w).reshape(made) if name == "along terms" else np.asarray(w).reshape(-1, made[0]).T.reshape(made)
    )
    np.testing.assert_array_equal(turned, round_tf32(matrix))


LEFT = {
    "activations": (lambda x, y: jnp.tanh(x) @ jnp.tanh(y), ((4096, 256), (256, 128))),
    "few products": (lambda w, x: x @ w, ((256, 128), (64, 256))),
    "weights as large as results": (lambda w, x: x @ w, ((2048, 2048), (576, 2048))),
    "a higher precision": (lambda w, x: jnp.dot(x, w, precision="highest"), ((256, 128), (4096, 256))),
    "groups": (lambda w, x: conv(x, w, feature_group_count=2), ((3, 3, 16, 64), (8, 32, 32, 32))),
    "filter of few outputs": (lambda w, x: conv(x, w), ((3, 3, 256, 256), (1, 14, 14, 256))),
    "first layer": (lambda w, x: conv(x, w, 2), ((7, 7, 3, 64), (8, 112, 112, 3))),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name):
    function, shapes = LEFT[name]
    assert "turns" not in applicable(flat(function, *(shape(*s) for s in shapes)))
    bf16 = [shape(*s, dtype=jnp.bfloat16) for s in shapes]
    assert "turns" not in applicable(flat(function, *bf16))


def test_each_weight_is_made_once_and_those_that_a_kernel_can_turn_by_one_call():
    def function(w, v, x):
        return (x @ w) @ v + (x @ w.T) @ v

    closed = flat(function, shape(256, 256), shape(256, 128), shape(4096, 256))
    new = rewritten(closed, ("turns",))
    first, second = calls(new.closed)
    assert new.counts == {"turns": 4} and len(turned_shapes(first)) == 2
    assert len(second.outvars) == 1 and turned_shapes(second) is None
    made = {*first.outvars, *second.outvars}
    assert {e.invars[1] for e in products(new.closed)} == made == rounded_operands(new.closed)


def test_only_results_that_a_call_rounds_are_known_to_be_rounded():
    @jax.jit
    def half(w, v):
        return lax.reduce_precision(w, 8, 10), lax.reduce_precision(v, 8, 11)

    def function(w, v, x):
        w, v = half(w, v)
        return x @ w.T + x @ v.T

    closed = jaxapi.closed_jaxpr_of(function, shape(128, 256), shape(128, 256), shape(4096, 256))
    (call,) = calls(closed)
    assert not rounded_operands(closed)  # these lie across terms
    turned = jaxapi.closed_jaxpr_of(
        lambda w, v, x: [lax.dot_general(x, u, (((1,), (1,)), ((), ()))) for u in half(w, v)],
        shape(128, 256),
        shape(128, 256),
        shape(4096, 256),
    )
    (call,) = calls(turned)
    assert rounded_operands(turned) == {call.outvars[0]}


def test_kernels_know_that_such_weights_are_rounded_and_no_kernel_rounds_them():
    def function(w, b, x):
        return jnp.maximum(x @ w + b, 0.0)

    closed = flat(function, shape(256, 128), shape(128), shape(4096, 256))
    new = rewritten(closed, ("turns",)).closed
    level = computation.group(new, Settings(), computation.Fuel(), "cuda")
    (subset,) = level.subsets
    assert subset.rounded and not any("reduce_precision" in str(e) for e in subset.closed.jaxpr.eqns)
    computation.add_candidates([subset], "cpu")
    problem = make_problem(subset, Settings(), "cpu")
    assert [i.recipe for i in problem.inputs if i.shape == (128, 256)] == ["normal tf32"]
