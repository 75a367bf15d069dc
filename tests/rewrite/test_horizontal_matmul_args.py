"""Products of one operand with weights that are arguments: joined where they are turned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.rewrite.registry import rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.tf32_weight_args import rounded_operands
from jcuts.rewrite.tf32_weights import round_tf32
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.verify.float64_eval import evaluate

RNG = np.random.default_rng(5)


def normal(*shape):
    return np.asarray(RNG.standard_normal(shape) / 4, np.float32)


def names(closed):
    return [jaxapi.primitive_name(e) for e in closed.jaxpr.eqns]


def attention(x, q, k, v, bq, bk, bv):
    return (x @ q + bq).reshape(2, -1, 4, 32), jnp.tanh(x @ k + bk), x @ v + bv


WEIGHTS = {
    "with biases": (
        attention,
        normal(2, 4096, 128),
        [*(normal(128, 128) for _ in "qkv"), *(normal(128) for _ in "qkv")],
    ),
    "without": (lambda x, a, b: (x @ a, jnp.tanh(x @ b)), normal(8192, 256), [normal(256, 96), normal(256, 64)]),
    "of all layers": (lambda x, w: (x @ w[0], x @ w[2]), normal(8192, 256), [normal(3, 256, 72)]),
}
CALLS = ("jit", "pjit")


@pytest.mark.parametrize("name", WEIGHTS)
def test_siblings_are_one_product_of_weights_made_in_one_call(name):
    function, x, weights = WEIGHTS[name]
    closed = simplify(inline(jax.make_jaxpr(function)(x, *weights)))
    new = rewritten(closed, ("joins", "turns"))
    jaxapi.check(new.closed)
    found = names(new.closed)
    parts = names(closed).count("dot_general")
    assert new.counts == {"joins": parts, "turns": 1}
    assert found.count("dot_general") == 1 and found.count("slice") == parts and found[0] in CALLS
    assert len(rounded_operands(new.closed)) == 1
    assert rewritten(new.closed, ("joins", "turns")).counts == {}
    with jax.enable_x64(True):
        exact = [np.asarray(a) for a in evaluate(closed, [jnp.asarray(a, jnp.float64) for a in (x, *weights)])]
    rounded = [round_tf32(w) if w.ndim > 1 else w for w in weights]
    got, wanted = jaxapi.eval_closed(new.closed, x, *weights), jaxapi.eval_closed(closed, x, *rounded)
    for mine, same, wide in zip(got, wanted, exact, strict=True):
        assert mine.shape == wide.shape and mine.dtype == np.float32
        np.testing.assert_allclose(mine, same, rtol=1e-5, atol=3e-5 * np.abs(wide).max())
        assert np.linalg.norm(mine - wide) < 2.0**-11 * np.linalg.norm(wide)


def test_biases_are_one_addition():
    function, x, weights = WEIGHTS["with biases"]
    new = rewritten(simplify(inline(jax.make_jaxpr(function)(x, *weights))), ("joins", "turns")).closed
    assert names(new).count("add") == 1 and names(new).count("concatenate") == 1


LEFT = {
    "one product": (lambda x, w: x @ w, normal(8192, 256), normal(256, 72)),
    "different operands": (lambda x, w, v: (x @ w, (x + 1) @ v), normal(8192, 256), normal(256, 72), normal(256, 72)),
    "few rows": (lambda x, w, v: (x @ w, x @ v), normal(20, 512), normal(512, 512), normal(512, 512)),
    "computed": (lambda x, w, v: (x @ jnp.tanh(w), x @ jnp.tanh(v)), normal(8192, 256), *[normal(256, 72)] * 2),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    function, *arguments = LEFT[name]
    closed = simplify(inline(jax.make_jaxpr(function)(*arguments)))
    assert "joins" not in rewritten(closed, ("joins",)).counts
