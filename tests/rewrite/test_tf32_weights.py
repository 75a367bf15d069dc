"""Rounding of constant weights: what it applies to, what it leaves alone, values, and what kernels are told of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.settings import Settings
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands
from jcuts.pipeline import computation
from jcuts.rewrite import tf32_weights
from jcuts.rewrite.registry import RULES, applicable, rewritten
from jcuts.rewrite.simplify import simplify
from jcuts.rewrite.tf32_weights import is_rounded, round_tf32, rounded_constants
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from jcuts.tune.session import make_problem
from jcuts.tune.verify.inputs import make_inputs
from tests.ptx import tensor_core

RNG = np.random.default_rng(11)


def values(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def flat(function, *args):
    return simplify(inline(jaxapi.closed_jaxpr_of(function, *args)))


def shape(*extents, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(extents, dtype)


def products(closed):
    return [e for e in closed.jaxpr.eqns if jaxapi.primitive_name(e) in ("dot_general", "conv_general_dilated")]


def conv(x, w, numbers=("NHWC", "HWIO", "NHWC"), stride=1, padding="SAME", **more):
    return lax.conv_general_dilated(x, w, (stride,) * 2, padding, dimension_numbers=numbers, **more)


def test_tf32_has_ten_bits_and_ties_go_to_even():
    x = RNG.standard_normal(1000).astype(np.float32)
    x[:6] = 1 + 2**-11, 1 + 3 * 2**-11, np.inf, -np.inf, np.nan, 0.0
    found = round_tf32(x)
    np.testing.assert_array_equal(found, tensor_core.round_tf32(x))
    assert not (found.view(np.uint32)[np.isfinite(found)] & 0x1FFF).any()
    assert np.nanmax(np.abs(found[6:] / x[6:] - 1)) <= 2.0**-11
    np.testing.assert_array_equal(round_tf32(found), found)


W = values(256, 128)
FILTER, ROW = values(3, 3, 32, 64), values(3, 32, 64)
SQUARE = values(128, 128)
WEIGHTS = {
    "dot": (lambda x: x @ W, shape(4096, 256), (128, 256), lambda w: w.T, W),
    "dot of few rows": (lambda x: x @ W, shape(7, 49, 256), (128, 256), lambda w: w.T, W),
    "dot of three dimensions": (lambda x: x @ W, shape(16, 256, 256), (128, 256), lambda w: w.T, W),
    "already along terms": (lambda x: x @ W.T, shape(16384, 128), (256, 128), lambda w: w, W),
    "two dimensions of terms": (
        lambda x: jnp.einsum("mhd,hdn->mn", x, ROW),
        shape(65536, 3, 32),
        (64, 3, 32),
        lambda w: w.transpose(2, 0, 1),
        ROW,
    ),
    "convolution": (
        lambda x: conv(x, FILTER),
        shape(8, 32, 32, 32),
        (64, 3, 3, 32),
        lambda w: w.transpose(3, 0, 1, 2),
        FILTER,
    ),
    "convolution of few rows": (
        lambda x: conv(x, FILTER),
        shape(1, 28, 28, 32),
        (64, 3, 3, 32),
        lambda w: w.transpose(3, 0, 1, 2),
        FILTER,
    ),
    "convolution with strides": (
        lambda x: conv(x, FILTER, stride=2),
        shape(32, 32, 32, 32),
        (64, 3, 3, 32),
        lambda w: w.transpose(3, 0, 1, 2),
        FILTER,
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_large_products_are_turned_and_rounded_once(name):
    function, x, wanted, turn, weights = WEIGHTS[name]
    closed = flat(function, x)
    assert applicable(closed) == ("rounds",)
    new = rewritten(closed, ("rounds",))
    assert new.counts == {"rounds": 1} and len(new.closed.jaxpr.eqns) == len(closed.jaxpr.eqns) == 1
    (made,) = new.closed.consts
    assert made.shape == wanted
    np.testing.assert_array_equal(made, tensor_core.round_tf32(turn(np.asarray(weights))))
    assert applicable(new.closed) == () and rewritten(new.closed, tuple(RULES)).counts == {}
    assert rounded_constants(new.closed) == {new.closed.jaxpr.constvars[0]} and not rounded_constants(closed)
    jaxapi.check(new.closed)
    value = np.asarray(RNG.standard_normal(x.shape), np.float32)
    with jax.enable_x64(True):
        wide = jaxapi.eval_closed(closed, value)[0]
    (got,) = jaxapi.eval_closed(new.closed, value)
    assert got.dtype == np.float32 and got.shape == wide.shape
    assert np.linalg.norm(got - wide) < 2.0**-11 * np.linalg.norm(wide)


LONG = values(1024, 512)
LARGE, FEW, HALF = values(256, 128), values(4, 128), values(256, 128).astype(jnp.bfloat16)
GROUPS, CHANNELS = values(3, 3, 16, 64), values(3, 3, 3, 64)
INFINITE, TOO_LARGE = (LARGE.at[0, 0].set(v) for v in (jnp.inf, jnp.finfo(jnp.float32).max))
LEFT = {
    "argument": (lambda x, w: x @ w, shape(4096, 256), shape(256, 128)),
    "highest": (lambda x: jnp.dot(x, LARGE, precision="highest"), shape(4096, 256)),
    "high": (lambda x: jnp.dot(x, LARGE, precision=lax.Precision.HIGH), shape(4096, 256)),
    "algorithm": (
        lambda x: lax.dot_general(x, LARGE, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F32_F32_F32),
        shape(4096, 256),
    ),
    "one is highest": (lambda x: jnp.dot(x, LARGE, precision=("default", "highest")), shape(4096, 256)),
    "small": (lambda x: x @ LARGE, shape(64, 256)),
    "few rows": (lambda x: x @ LONG, shape(32, 1024)),
    "few rows, taps": (lambda x: conv(x, FILTER), shape(1, 5, 6, 32)),
    "few products, taps": (lambda x: conv(x, FILTER[:1, :2]), shape(1, 7, 7, 32)),
    "few products": (lambda x: x @ FEW, shape(16384, 4)),
    "half": (lambda x: x @ HALF, shape(4096, 256, dtype=jnp.bfloat16)),
    "left": (lambda x: LARGE @ x, shape(128, 8192)),
    "batch": (lambda x: jnp.einsum("bmk,bkn->bmn", x, ROW), shape(3, 8192, 32)),
    "terms first": (lambda x: lax.dot_general(x, LARGE, (((0,), (0,)), ((), ()))), shape(256, 4096)),
    "groups": (lambda x: conv(x, GROUPS, feature_group_count=2), shape(8, 32, 32, 32)),
    "channels first": (lambda x: conv(x, FILTER, ("NCHW", "HWIO", "NCHW")), shape(8, 32, 32, 32)),
    "few channels": (lambda x: conv(x, CHANNELS), shape(64, 64, 64, 3)),
    "infinite": (lambda x: x @ INFINITE, shape(4096, 256)),
    "too large": (lambda x: x @ TOO_LARGE, shape(4096, 256)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    function, *arguments = LEFT[name]
    closed = simplify(inline(jax.make_jaxpr(function)(*arguments)))
    assert products(closed)
    assert rewritten(closed, ("rounds",)).counts == {}
    assert not rounded_constants(closed)


def test_bodies_of_loops_are_left_alone():
    closed = flat(lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ SQUARE), None), x, None, length=3), shape(8192, 128))
    assert rewritten(closed, ("rounds",)).counts == {}


def test_after_all_other_rules():
    s, w = values(128), values(1, 1, 256, 128)
    closed = flat(lambda x: jax.nn.relu(conv(x, w) * s + s), shape(16, 16, 16, 256))
    new = rewritten(closed, ("scales", "dots", "rounds"))
    assert new.counts == {"scales": 1, "dots": 1, "rounds": 1}
    (product,) = products(new.closed)
    assert jaxapi.primitive_name(product) == "dot_general" and product.invars[1].aval.shape == (128, 256)
    assert [jaxapi.primitive_name(e) for e in new.closed.jaxpr.eqns].count("transpose") == 0


def test_weights_are_rounded_once_for_all_forms():
    closed = flat(lambda x: x @ W, shape(4096, 256))
    first, second = (rewritten(closed, ("rounds",)).closed.consts[0] for _ in range(2))
    assert first is second
    changing = np.asarray(W).copy()
    closed = jaxapi.make_closed(
        closed.jaxpr.constvars, closed.jaxpr.invars, closed.jaxpr.outvars, closed.jaxpr.eqns, [changing], like=closed
    )
    before = np.asarray(rewritten(closed, ("rounds",)).closed.consts[0])
    changing += 1
    assert (np.asarray(rewritten(closed, ("rounds",)).closed.consts[0]) != before).any()
    assert not is_rounded(changing)
    assert is_rounded(round_tf32(changing))


def test_sizes_are_those_of_the_kernels():
    assert (
        tf32_weights.LEAST_POINTS == gemm_wgmma.LEAST_POINTS
        and tf32_weights.LEAST_PRODUCTS == gemm_wgmma.LEAST_PRODUCTS
    )
    assert tf32_weights.FEW_ROWS == gemm_wgmma.FEW_ROWS and tf32_weights.FEW_PRODUCTS == gemm_wgmma.FEW_PRODUCTS
    assert tf32_weights.LINE * 4 == gemm_wgmma.LINE
    assert min(columns for _, columns, _ in gemm_wgmma.NARROW) // 2 + 1 == tf32_weights.LEAST_COLUMNS


def test_kernels_know_their_weights_and_so_do_their_keys_and_their_tests():
    """The mark is part of the program, of the subset's identity and of the values that it is checked with."""
    b = values(128)
    plain = flat(lambda x: jax.nn.relu(x @ W + b), shape(4096, 256))
    new = rewritten(plain, ("rounds",)).closed
    unmarked = jaxapi.make_closed(
        new.jaxpr.constvars,
        new.jaxpr.invars,
        new.jaxpr.outvars,
        new.jaxpr.eqns,
        [c if c.ndim == 1 else c + 2.0**-12 for c in new.consts],
        like=new,
    )
    found = {}
    for name, closed, platform in (("new", new, "cuda"), ("raw", unmarked, "cuda"), ("cpu", new, "cpu")):
        (subset,) = computation.group(closed, Settings(), computation.Fuel(), platform).subsets
        found[name] = subset, make_problem(subset, Settings(), 4)
    subset, problem = found["new"]
    product = as_gemm(subset.program)
    assert product is not None
    right = gemm_operands(product)[1]
    marked = [b.name for b in subset.program.buffers if b.tf32]
    assert marked == [right.buffer] and right.along_terms and right.width == 4
    recipes = dict(zip([v.aval.shape for v in subset.inputs], problem.inputs, strict=True))
    assert recipes[(128, 256)].recipe == "normal tf32" and recipes[(4096, 256)].recipe == "normal"
    for kind in ("normal", "special", "huge"):
        arrays = dict(zip([i.shape for i in problem.inputs], make_inputs(problem, kind, 1), strict=True))
        assert not (arrays[(128, 256)].view(np.uint32) & 0x1FFF).any()
        assert (arrays[(4096, 256)].view(np.uint32) & 0x1FFF).any()
    for other in ("raw", "cpu"):
        its, problem_of_it = found[other]
        assert not any(b.tf32 for b in its.program.buffers)
        assert its.identity != subset.identity and problem_of_it.digest != problem.digest
        assert its.program.digest != subset.program.digest
    machine = gpu_candidates.GpuMachine(132)
    assert all(dict(p.params).get("rounded") for p, _ in gpu_candidates.candidates(subset.program, machine, 3))
    raw = gpu_candidates.candidates(found["raw"][0].program, machine, 20)
    assert not any("rounded" in dict(p.params) for p, _ in raw) and any("groups" in dict(p.params) for p, _ in raw)
