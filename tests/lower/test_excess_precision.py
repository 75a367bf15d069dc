"""bfloat16 on its way through a float32 norm behind a sum: what is left, and that it computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.fusion.greedy import group
from jcuts.fusion.match_attention import fuse_attention
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.lower.patterns.gemm import as_gemm, prologue
from jcuts.lower.region import lower_region
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
    found = drop_bf16_round_trips(program)
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
        assert drop_bf16_round_trips(program) is program


def test_values_that_are_used_twice():
    traced = programs.trace(
        lambda x, w, s: [(y := (x @ w).astype(jnp.float32) * s) + 1, y * 2], half(5, 16), half(16, 8), single(8)
    )
    program = traced.program()
    found = drop_bf16_round_trips(program)
    verify(found)
    assert "fma" not in [node.op for node in found.phases[0].exit.nodes]
    for got, want in zip(interpret(found, traced.operands()), interpret(program, traced.operands()), strict=True):
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7)


def test_a_rounding_that_is_declared_stays():
    """`lax.reduce_precision`: beside a conversion and back, which goes, and alone, where nothing goes."""

    def fn(x, w, s):
        y = x @ w
        return lax.reduce_precision(y, 8, 7), lax.reduce_precision(y.astype(jnp.bfloat16).astype(jnp.float32) * s, 8, 7)

    x, w, s = single(7, 33), single(33, 20), single(20)
    for arguments, function in (((x, w, s), fn), ((x, w), lambda x, w: lax.reduce_precision(x @ w, 8, 7))):
        traced = programs.trace(function, *arguments)
        program = traced.program()
        found = drop_bf16_round_trips(program)
        verify(found)
        assert (found is program) == (len(arguments) == 2)
        for got in interpret(found, traced.operands()):
            np.testing.assert_array_equal(got, got.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_rounding_before_a_product(declared):
    """What is computed before a product of bfloat16 is rounded once, at its end, unless more is asked for."""

    def fn(x, w, s):
        y = x.astype(jnp.float32) * s
        y = lax.reduce_precision(y, 8, 7) if declared else y.astype(jnp.bfloat16).astype(jnp.float32)
        return (y * s).astype(jnp.bfloat16) @ w

    traced = programs.trace(fn, half(64, 32), half(32, 16), single(32))
    product = as_gemm(lower_region(traced.graph, traced.everything, cheap=8.0))
    assert (product is not None and prologue(product) is not None) != declared


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_rounding_of_attention_weights(declared):
    def fn(q, k, v):
        weights = jnp.exp((scores := q @ k.T) - scores.max(-1, keepdims=True))
        if declared:
            weights = lax.reduce_precision(weights, 8, 7)
        return weights / weights.sum(-1, keepdims=True) @ v

    traced = programs.trace(fn, single(32, 16), single(32, 16), single(32, 16))
    cover = fuse_attention(traced.graph, group(traced.graph).subsets)
    assert any(p.template == "attention" for _, p in cover) != declared
