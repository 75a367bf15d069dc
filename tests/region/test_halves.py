"""bfloat16 on its way through a float32 norm behind a sum: what is left, and that it computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jcuts.dfg.interpret import interpret
from jcuts.dfg.verify import verify
from jcuts.region.halves import eased
from tests import programs

RNG = np.random.default_rng(0)


def half(*shape):
    return RNG.standard_normal(shape).astype(jnp.bfloat16)


def single(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def layer(x, w, b, s, t, r):
    y = x @ w + b
    return jax.nn.relu((y.astype(jnp.float32) * s + t).astype(x.dtype) + r)


def test_a_norm_behind_a_product():
    arguments = half(9, 33), half(33, 20), half(20), single(20), single(20), half(9, 20)
    traced = programs.trace(layer, *arguments)
    program = traced.program()
    found = eased(program)
    verify(found)
    ops = [node.op for node in found.phases[0].exit.nodes]
    assert "convert" in [node.op for node in program.phases[0].exit.nodes] and "mul" not in ops
    assert ops.count("fma") == ops.count("widen") == 1
    (got,) = interpret(found, traced.operands())
    wide = [np.asarray(a, np.float64) for a in arguments]
    wanted = np.maximum((wide[0] @ wide[1] + wide[2]) * wide[3] + wide[4] + wide[5], 0)
    assert np.abs(got.astype(np.float64) - wanted).max() <= 2.0**-8 * np.abs(wanted).max()  # one rounding


def test_what_stays_as_it_is():
    x, w, s = half(5, 16), half(16, 8), single(8)
    for fn, arguments in (
        (lambda x, w: x @ w, (x, w)),  # no way back
        (lambda x, w, s: (x @ w).astype(jnp.float32) * s, (x.astype(np.float32), w.astype(np.float32), s)),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (single(7),)),  # nothing is summed: a cast is exact
    ):
        program = programs.trace(fn, *arguments).program()
        assert eased(program) is program


def test_values_that_are_used_twice():
    traced = programs.trace(
        lambda x, w, s: [(y := (x @ w).astype(jnp.float32) * s) + 1, y * 2], half(5, 16), half(16, 8), single(8)
    )
    program = traced.program()
    found = eased(program)
    verify(found)
    assert "fma" not in [node.op for node in found.phases[0].exit.nodes]
    for got, want in zip(interpret(found, traced.operands()), interpret(program, traced.operands()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7)
