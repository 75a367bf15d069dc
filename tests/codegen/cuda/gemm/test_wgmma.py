"""Matrix products by warp groups: every layout, type and size against float64, through the PTX machine."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.gemm.wgmma_tile import group_shape
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands, k_tiles_per_split
from jcuts.lower.region import lower_region
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from tests import programs
from tests.codegen.cuda.gemm.test_mma import (
    CONVOLUTIONS,
    LAYOUTS,
    SM80,
    SM90,
    compare,
    compiled,
    dense,
    normal,
    product_of,
    run,
    tf32,
)
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
ROUNDED = [
    WgmmaTile(64, 64, 32, (1, 1), 3, 1),
    WgmmaTile(128, 128, 32, (2, 1), 3, 2),
    WgmmaTile(64, 96, 64, (1, 1), 2, 1),
    WgmmaTile(128, 64, 32, (1, 1), 3, 1),
    WgmmaTile(64, 64, 64, (1, 1), 3, 1),
    WgmmaTile(64, 128, 32, (1, 2), 3, 1),
    WgmmaTile(64, 64, 32, (1, 1), 3, 1, 2),
    WgmmaTile(128, 64, 32, (1, 1), 3, 1, 1, 2),
    WgmmaTile(64, 64, 32, (1, 1), 2, 1, 1, 2),
]
"""Of float32."""
COPIED = [
    WgmmaTile(64, 64, 64, (1, 1), 3),
    WgmmaTile(128, 128, 64, (2, 1), 4),
    WgmmaTile(128, 96, 64, (1, 1), 3),
    WgmmaTile(64, 128, 64, (1, 2), 3),
    WgmmaTile(64, 64, 128, (1, 1), 3),
    WgmmaTile(64, 64, 64, (1, 1), 4, 0, 2),
    WgmmaTile(128, 64, 64, (2, 1), 3, 0, 1, 2),
]
"""Of 16-bit types."""
FRAGMENTS = [
    WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1),
    WgmmaTile(128, 128, 32, (2, 1), 4, rounded=1),
    WgmmaTile(128, 64, 32, (1, 1), 4, rounded=1),
    WgmmaTile(64, 96, 64, (1, 1), 3, rounded=1),
    WgmmaTile(64, 128, 32, (1, 2), 3, rounded=1),
    WgmmaTile(64, 64, 32, (1, 1), 4, 0, 2, rounded=1),
    WgmmaTile(128, 64, 32, (2, 1), 3, 0, 1, 2, rounded=1),
    WgmmaTile(128, 64, 64, (1, 1), 3, rounded=1),
]
"""Of float32 whose right operand is rounded already."""
SHORT = [
    WgmmaTile(64, 64, 32, (1, 1), 10, rounded=1, early=1),  # a stage for every tile of terms
    WgmmaTile(128, 64, 32, (2, 1), 2, cluster=5, rounded=1, push=1),  # the last blocks have fewer terms
    WgmmaTile(64, 64, 32, (1, 1), 2, cluster=8, rounded=1, push=1, early=1),  # more blocks than parts of the tile
    WgmmaTile(64, 192, 32, (1, 1), 6, cluster=2, rounded=1, push=1, early=1),  # totals over the tiles of terms
    WgmmaTile(64, 96, 32, (1, 2), 3, cluster=4, rounded=1, push=1, steps=2),
    WgmmaTile(128, 64, 32, (1, 1), 4, cluster=3, rounded=1, push=1, spread=1),
]
"""Of few rows: all tiles under way at once, blocks that push totals, results asked for early."""
HALF_FRAGMENTS = [
    WgmmaTile(64, 64, 64, (1, 1), 3, rounded=1),
    WgmmaTile(128, 128, 64, (2, 1), 4, rounded=1),
    WgmmaTile(128, 64, 128, (1, 1), 3, rounded=1),
    WgmmaTile(64, 128, 64, (1, 1), 4, rounded=1, spread=1, steps=2),
    WgmmaTile(64, 64, 64, (1, 1), 4, 0, 2, rounded=1),
    WgmmaTile(128, 64, 64, (2, 1), 3, 0, 1, 2, rounded=1),
    WgmmaTile(192, 64, 64, (3, 1), 4, rounded=1, steps=4, early=1),
]
"""Of bfloat16 whose left operand is computed on its way."""
UNEVEN = [
    WgmmaTile(64, 64, 32, (1, 1), 4, 0, 1, 8, rounded=1, steps=0, push=1, early=1),
    WgmmaTile(64, 32, 32, (1, 1), 4, 0, 1, 6, rounded=1, steps=2, push=1, early=1),
    WgmmaTile(64, 96, 32, (1, 1), 6, 0, 1, 5, rounded=1, steps=0, push=1, early=1),
    WgmmaTile(128, 64, 64, (2, 1), 3, 0, 1, 3, rounded=1, steps=1, push=1, early=1),
    WgmmaTile(64, 64, 64, (1, 1), 4, rounded=1),
    WgmmaTile(64, 64, 32, (1, 1), 4, 0, 1, 4, rounded=1),
]
"""Blocks whose last tiles of terms are not full, or are not there."""
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


@compiled
@pytest.mark.parametrize("tiling", ROUNDED, ids=str)
@pytest.mark.parametrize("size", [(128, 128, 128), (70, 164, 68), (65, 76, 200)])
def test_float32_of_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    x, w, b = normal(m, k), normal(k, n), normal(n)
    compare(run(dense, (x, w, b), tiling), [np.maximum(tf32(x) @ tf32(w) + b, 0)])


def marked(program):
    """The program with a right operand that is rounded already."""
    right = gemm_operands(program)[1].buffer
    return replace(program, buffers=tuple(replace(b, tf32=b.name == right) for b in program.buffers))


def run_rounded(fn, arguments, tiling):
    """The results of a kernel whose right operand, of rounded values, it takes as it is."""
    traced = programs.trace(fn, *arguments)
    program = tiling.of(traced.product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    return ptx_machine.run_kernel(ptx, kernel, traced.operands())


@compiled
@pytest.mark.parametrize("tiling", FRAGMENTS, ids=str)
@pytest.mark.parametrize("size", [(128, 128, 128), (70, 164, 68), (65, 76, 200), (64, 300, 64)])
def test_rounded_weights_of_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    x, w, b = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n)
    found = run_rounded(lambda x, w, b: jax.nn.relu(x @ w.T + b), (x, w, b), tiling)
    compare(found, [np.maximum(tf32(x) @ w.T.astype(np.float64) + b, 0)], 3e-6)


@compiled
@pytest.mark.parametrize("tiling", SHORT, ids=str)
@pytest.mark.parametrize("size", [(128, 320, 128), (70, 300, 68), (49, 256, 200), (130, 290, 64)])
def test_few_rows(size, tiling):
    """Everything that may follow: vectors, a matrix beside the result, one across it, several results."""
    m, k, n = size
    if k_tiles_per_split(k, 32, tiling.cluster)[1] != tiling.cluster:
        pytest.skip("not so many parts of the terms")
    tiling = replace(tiling, stages=min(tiling.stages, k_tiles_per_split(k, 32, tiling.cluster)[0]))
    x, w, b, r, t = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n), normal(m, n, seed=2), normal(n, m)

    def layer(x, w, b, r, t):
        y = jax.nn.relu(x @ w.T + b)
        return y + r, y - t.T

    y = np.maximum(tf32(x) @ w.T.astype(np.float64) + b, 0)
    compare(run_rounded(layer, (x, w, b, r, t), tiling), [y + r, y - t.T], 3e-6)
    if k % (32 * tiling.cluster) == 0:
        found = run_rounded(lambda x, w, s: jax.nn.relu(x * s) @ w.T, (x, w, normal(k)), tiling)
        compare(found, [tf32(np.maximum(x * normal(k), 0)) @ w.T.astype(np.float64)], 3e-6)


@compiled
@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool])
def test_narrow_operands_are_asked_for_wherever_they_lie(dtype):
    x, w = normal(49, 256), round_tf32(normal(200, 256, seed=1))
    b = (normal(201, seed=2) > 0).astype(dtype) if dtype is bool else normal(201, seed=2).astype(dtype)
    tiling = WgmmaTile(64, 96, 32, (1, 2), 8, rounded=1, early=1)
    found = run_rounded(lambda x, w, b: x @ w.T + b[1:].astype(jnp.float32), (x, w, b), tiling)
    compare(found, [tf32(x) @ w.T.astype(np.float64) + b[1:].astype(np.float64)], 3e-6)


@compiled
@pytest.mark.parametrize("tiling", FRAGMENTS, ids=str)
def test_what_stands_before_a_product(tiling):
    """A norm with known statistics and an activation, between the units and shared memory."""
    m, k, n = 70, 256, 68
    x, w, s, b = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(k), normal(k, seed=2)
    found = run_rounded(lambda x, w, s, b: jax.nn.relu(x * s + b) @ w.T * 2, (x, w, s, b), tiling)
    compare(found, [tf32(np.maximum(x * s + b, 0)) @ w.T.astype(np.float64) * 2], 3e-6)


@compiled
@pytest.mark.parametrize("tiling", UNEVEN, ids=str)
@pytest.mark.parametrize("k", [928, 700])
def test_what_stands_before_a_product_whose_terms_no_cluster_divides(k, tiling):
    """A shift that terms beyond the last must not add, part of wider rows that hold NaN besides."""
    m, n = 70, 72
    x, w, s, b = normal(m, k + 32), round_tf32(normal(n, k, seed=1)), normal(k), 1 + normal(k, seed=2)
    x[:, k:] = np.nan
    found = run_rounded(lambda x, w, s, b: jax.nn.relu(x[:, :k] * s + b) @ w.T, (x, w, s, b), tiling)
    compare(found, [tf32(np.maximum(x[:, :k] * s + b, 0)) @ w.T.astype(np.float64)], 3e-6)


@compiled
@pytest.mark.parametrize("tiling", HALF_FRAGMENTS, ids=str)
@pytest.mark.parametrize(("size", "along"), [((70, 256, 72), True), ((130, 224, 136), False), ((65, 96, 64), False)])
def test_what_stands_before_a_product_of_bfloat16(size, along, tiling):
    """A norm in float32 and an activation in bfloat16; terms beyond the last must add nothing to a shift of theirs."""
    m, k, n = size
    if k_tiles_per_split(k, tiling.terms, tiling.cluster * tiling.split)[1] != tiling.cluster * tiling.split:
        pytest.skip("not so many parts of the terms")
    if tiling.split > 1 and k % (tiling.terms * tiling.split):
        pytest.skip("parts of the grid have whole tiles of terms")
    x, w = normal(m, k).astype(jnp.bfloat16), normal(k, n, seed=1).astype(jnp.bfloat16)
    s, b, c = normal(k), normal(k, seed=2), 1 + normal(n) / 8

    def layer(x, w, s, b, c):
        y = jax.nn.relu((x.astype(jnp.float32) * s + b).astype(jnp.bfloat16))
        return jax.nn.relu((y @ (w.T if along else w)).astype(jnp.float32) * c).astype(jnp.bfloat16)

    normed = np.maximum(x.astype(np.float64) * s + b, 0).astype(jnp.bfloat16).astype(np.float64)
    wanted = np.maximum(normed @ w.astype(np.float64) * c, 0)
    found = run_rounded(layer, (x, np.ascontiguousarray(w.T) if along else w, s, b, c), tiling)
    compare(found, [wanted], 4.2 * EPS["bfloat16"])  # the largest result is some five times the others
    assert np.linalg.norm(found[0].astype(np.float64) - wanted) < EPS["bfloat16"] / 2 * np.linalg.norm(wanted)


@compiled
def test_other_things_before_a_product_of_bfloat16():
    x, w, s = (a.astype(jnp.bfloat16) for a in (normal(66, 96), normal(96, 40, seed=1), normal(96)))
    wide = w.astype(np.float64)
    found = run_rounded(lambda x, w: jnp.clip(-x, -0.5, 0.25) @ w, (x, w), HALF_FRAGMENTS[0])
    compare(found, [np.clip(-x.astype(np.float64), -0.5, 0.25) @ wide], 2.1 * EPS["bfloat16"])
    products = [lambda x, w, s: (x * s) @ w, lambda x, w, s: jnp.tanh(x) @ w]  # vectors are of float32; no functions
    for fn in products:
        built = lower_region(programs.trace(fn, x, w, s).graph, frozenset(range(2)), cheap=99.0)
        assert as_gemm(built) is None
    shifted = programs.trace(lambda x, w, s: (1 / (x.astype(jnp.float32) * s)).astype(x.dtype) @ w, x, w, normal(96))
    assert as_gemm(lower_region(shifted.graph, shifted.everything, cheap=99.0)) is None


@compiled
def test_other_things_before_a_product():
    """Without a vector, with a number, with the operand twice, and on the way to a convolution of several taps."""
    x, w, s = normal(66, 96), round_tf32(normal(40, 96, seed=1)), normal(96)
    wide = w.T.astype(np.float64)
    compare(run_rounded(lambda x, w: jnp.abs(x) @ w.T, (x, w), FRAGMENTS[0]), [tf32(np.abs(x)) @ wide], 3e-6)
    clipped = tf32(np.clip(x - s, np.float32(-0.5), np.float32(0.25)) * x)
    found = run_rounded(lambda x, w, s: (jnp.clip(x - s, -0.5, 0.25) * x) @ w.T, (x, w, s), FRAGMENTS[0])
    compare(found, [clipped @ wide], 3e-6)
    x, w, s, layout = normal(2, 9, 8, 32), round_tf32(normal(24, 3, 3, 32)), normal(32), ("NHWC", "OHWI", "NHWC")
    valid = {"padding": "VALID", "layout": layout}
    with jax.enable_x64(True):
        wanted = conv(jnp.asarray(tf32(np.maximum(x * s, 0))), jnp.asarray(w.astype(np.float64)), **valid)
    found = run_rounded(lambda x, w, s: conv(jax.nn.relu(x * s), w, **valid), (x, w, s), FRAGMENTS[0])
    compare(found, [np.asarray(wanted)], 3e-6)


@compiled
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("tiling", COPIED, ids=str)
@pytest.mark.parametrize("size", [(128, 256, 128), (70, 264, 136)])
def test_16_bit_types_of_sizes_that_divide_nothing(size, tiling, dtype):
    m, k, n = size
    x, w = normal(m, k).astype(jnp.dtype(dtype)), normal(k, n).astype(jnp.dtype(dtype))
    wanted = x.astype(np.float64) @ w.astype(np.float64)
    compare(run(lambda x, w: x @ w, (x, w), tiling), [wanted], 2.1 * EPS[dtype])


@compiled
@pytest.mark.parametrize("dtype", ["float32", *EPS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    fn, left, right = LAYOUTS[layout]
    m, k, n = 136, 88, 80
    x, w = left(normal(m, k)).astype(jnp.dtype(dtype)), right(normal(k, n)).astype(jnp.dtype(dtype))
    exact = tf32 if dtype == "float32" else np.float64
    wanted = left(exact(x)) @ right(exact(w))
    if dtype == "float32":
        compare(run(fn, (x, w), ROUNDED[1]), [wanted])
        compare(run(fn, (x, w), ROUNDED[4]), [wanted])
    else:
        compare(run(fn, (x, w), COPIED[1]), [wanted], 2.1 * EPS[dtype])


@compiled
def test_copies_of_less_than_a_piece():
    x, w = normal(66, 70), normal(46, 70)
    compare(run(lambda x, w: x @ w.T, (x, w), ROUNDED[0]), [tf32(x) @ tf32(w).T])
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    compare(run(lambda x, w: x @ w.T, (x, w), COPIED[0]), [wanted], 2.1 * EPS["bfloat16"])


@compiled
def test_batches_and_transposed_results():
    x, w = normal(68, 64), normal(64, 72)
    compare(run(lambda x, w: (x @ w).T * 2, (x, w), ROUNDED[0]), [(tf32(x) @ tf32(w)).T * 2])
    q, k = normal(2, 66, 3, 32), normal(2, 70, 3, 32)
    scores = np.einsum("bqhd,bkhd->bhqk", tf32(q), tf32(k)) * 0.25
    compare(run(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, (q, k), ROUNDED[0]), [scores])


@compiled
@pytest.mark.parametrize("tiling", [ROUNDED[1], ROUNDED[3], ROUNDED[8]], ids=str)
def test_everything_behind_a_product(tiling):
    """Bias and ReLU6, a residual, GELU, and two results."""

    def block(x, w, b, r):
        y = x @ w + b
        return y, jax.nn.gelu(jnp.clip(y, 0.0, 6.0) + r)

    x, w, b, r = normal(90, 64), normal(64, 100), normal(100), normal(90, 100)
    y = tf32(x) @ tf32(w) + b
    with jax.enable_x64(True):
        z = np.asarray(jax.nn.gelu(jnp.asarray(np.clip(y, 0, 6) + r)))
    compare(run(block, (x, w, b, r), tiling), [y, z])


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["3x3", "3x3 stride 2", "dilation", "one padded output"])
def test_convolutions_with_taps(name, dtype):
    (n, h, w_, _), (kh, kw, _, features), params = CONVOLUTIONS[name]
    channels, tilings = (32, ROUNDED[:2]) if dtype == "float32" else (64, COPIED[:2])
    features = -(-features // 8) * 8
    x = normal(n, h, w_, channels).astype(jnp.dtype(dtype))
    w = normal(kh, kw, channels, features).astype(jnp.dtype(dtype))
    exact = tf32 if dtype == "float32" else np.float64
    with jax.enable_x64(True):
        wanted = np.asarray(conv(jnp.asarray(exact(x)), jnp.asarray(exact(w)), **params))
    for tiling in tilings:
        limit = 3e-6 if dtype == "float32" else 2.1 * EPS[dtype]
        compare(run(lambda x, w: conv(x, w, **params), (x, w), tiling), [wanted], limit)


WAYS = {
    "spread": {"spread": 1},
    "two steps": {"steps": 2},
    "tiles": {"steps": 0},
    "both": {"spread": 1, "steps": 0},
    "all": {"spread": 1, "steps": 2, "cached": 1},
}
"""Of starting copies and products."""


@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tiling", [FRAGMENTS[k] for k in (0, 1, 3, 5, 6)], ids=str)
@pytest.mark.parametrize("size", [(70, 164, 68), (64, 300, 64), (130, 128, 64)])
def test_ways_of_starting_copies_and_products(size, tiling, way):
    m, k, n = size
    x, w = normal(m, k), round_tf32(normal(n, k, seed=1))
    tiling = replace(tiling, **WAYS[way])
    tiling = tiling if tiling.steps else replace(tiling, steps=tiling.terms // 8)
    compare(run_rounded(lambda x, w: x @ w.T, (x, w), tiling), [tf32(x) @ w.T.astype(np.float64)], 3e-6)
    if k % (tiling.terms * tiling.split * tiling.cluster) == 0:
        found = run_rounded(lambda x, w: jnp.abs(x) @ w.T, (x, w), tiling)
        compare(found, [np.abs(tf32(x)) @ w.T.astype(np.float64)], 3e-6)


@compiled
@pytest.mark.parametrize("name", ["3x3", "3x3 stride 2", "dilation", "one padded output"])
def test_convolutions_with_rounded_filters(name):
    (n, h, w_, _), (kh, kw, _, features), params = CONVOLUTIONS[name]
    features = -(-features // 8) * 8
    x, w = normal(n, h, w_, 32), round_tf32(normal(features, kh, kw, 32))
    layout = ("NHWC", "OHWI", "NHWC")
    with jax.enable_x64(True):
        wanted = np.asarray(conv(jnp.asarray(tf32(x)), jnp.asarray(w.astype(np.float64)), layout=layout, **params))
    narrow = WgmmaTile(128, 32, 32, (2, 1), 3, rounded=1)
    for tiling in (*FRAGMENTS[:3], narrow, replace(narrow, spread=1, cached=1)):
        compare(run_rounded(lambda x, w: conv(x, w, layout=layout, **params), (x, w), tiling), [wanted], 3e-6)


TAPS = [
    WgmmaTile(64, 64, 32, (1, 1), 5, cluster=4, rounded=1, push=1, early=1, steps=4),
    WgmmaTile(128, 32, 32, (2, 1), 9, cluster=2, rounded=1, push=1, early=1, steps=2),
    WgmmaTile(64, 96, 32, (1, 1), 4, cluster=3, rounded=1, push=1, spread=1, steps=2),
    WgmmaTile(64, 32, 64, (1, 1), 3, rounded=1, early=1),
    WgmmaTile(128, 64, 32, (2, 1), 4, rounded=1),
]
"""Of few rows, whose terms are taps, too."""


@compiled
@pytest.mark.parametrize("tiling", TAPS, ids=str)
@pytest.mark.parametrize(
    "channels, taps, strides, padding",
    [
        (64, (3, 3), 1, "SAME"),
        (48, (5, 5), 1, "SAME"),
        (80, (3, 3), 2, "VALID"),
        (160, (1, 7), 1, "SAME"),
        (16, (3, 3), 1, "SAME"),
    ],
)
def test_convolutions_of_few_rows(channels, taps, strides, padding, tiling):
    """Tiles of terms lie in several taps where 32 does not divide the channels, which lie among others that are NaN."""
    x, w = normal(1, 9, 8, channels + 8), round_tf32(normal(72, *taps, channels, seed=1))
    x[..., :4], x[..., 4 + channels :] = np.nan, np.nan
    if k_tiles_per_split(w[0].size, tiling.terms, tiling.cluster)[1] != tiling.cluster:
        pytest.skip("not so many parts of the terms")
    same = padding == "SAME"
    r = normal(1, 9, 8, 72, seed=2) if same else normal(1, 4, 3, 72, seed=2)
    params = {"strides": (strides, strides), "padding": padding}

    def fn(x, w, r):
        x = jax.lax.slice_in_dim(x, 4, 4 + channels, axis=3)
        return jax.nn.relu(conv(x, w, layout=("NHWC", "OHWI", "NHWC"), **params) + r)

    with jax.enable_x64(True):
        rounded = np.where(np.isnan(x), np.nan, tf32(x))
        want = np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in (rounded, w, r))))
    compare(run_rounded(fn, (x, w, r), tiling), [want], 3e-6)


@compiled
def test_tiles_that_wait_in_registers_lie_in_one_tap():
    """Only copies find their own places."""
    x, w = normal(1, 9, 8, 48), round_tf32(normal(64, 3, 3, 48, seed=1))
    made = programs.trace(lambda x, w: conv(x, w, layout=("NHWC", "OHWI", "NHWC")), x, w).product()
    with pytest.raises(CompileRejected):
        compiler.compile_program(WgmmaTile(64, 64, 32, (1, 1), 2, flight=1).of(made), SM90)


@compiled
@pytest.mark.parametrize(
    "size, channels, features, taps",
    [
        (14, 256, 256, 3),
        (7, 512, 512, 3),
        (56, 64, 64, 3),
        (14, 128, 32, 3),
        (35, 48, 64, 5),
        (35, 96, 96, 3),
    ],
)
def test_filters_at_batch_1_are_tried_in_clusters(size, channels, features, taps):
    """With a tile per tap, and with pixels that are kept in the first half of the ranking; all of them assemble."""
    shapes = (1, size, size, channels), (features, taps, taps, channels)
    made = programs.trace(
        lambda x, w: conv(x, w, layout=("NHWC", "OHWI", "NHWC")),
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes),
    ).product()
    ranked = [p for p, _ in gpu_candidates.candidates(made, MACHINE, 8)]
    clusters = [p for p in ranked if dict(p.params).get("push")]
    kept = [k for k, p in enumerate(ranked) if {"pixels", "cluster"} <= dict(p.params).keys()]
    assert len(clusters) >= 4 and kept and kept[0] < 4 and len(kept) < len(ranked)
    for program in clusters:
        compiler.compile_program(program, SM90)


@compiled
def test_the_machine_sees_what_pipelines_do_wrong():
    x, w = normal(64, 256), normal(256, 64)
    for tiling, arguments in (
        (ROUNDED[0], (x, w)),
        (ROUNDED[4], (x, w)),
        (COPIED[0], tuple(a.astype(jnp.bfloat16) for a in (x, w))),
    ):
        program = tiling.of(product_of(lambda x, w: x @ w, *arguments))
        kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
        changes = [
            (lambda t: t.replace("fence.proxy.async.shared::cta;", ""), "proxy fence"),
            (lambda t: t.replace("wgmma.fence.sync.aligned;", ""), "no wgmma.fence"),
            (lambda t: t.replace("bar.sync 0;", ""), "before a barrier|under way"),
            (lambda t: re.sub(r"wgmma.wait_group.sync.aligned [01];", "", t), "is reading"),
        ]
        if x.dtype == arguments[0].dtype:
            changes.append((lambda t: t.replace("cvt.rn.tf32.f32", "mov.b32"), "not rounded"))
        if not tiling.flight:
            changes.append((lambda t: re.sub(r"cp.async.wait_group \d;", "", t), "under way|proxy fence"))
        for change, what in changes:
            with pytest.raises((TensorFault, ptx_machine.Fault), match=what):
                ptx_machine.run_kernel(change(ptx), kernel, arguments)


@compiled
def test_the_machine_sees_what_clusters_do_wrong():
    x, w = normal(64, 256), round_tf32(normal(64, 256, seed=1))
    for tiling in SHORT[2:4]:
        traced = programs.trace(lambda x, w: x @ w.T, x, w)
        program = tiling.of(traced.product())
        kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
        for change, what in (
            ("barrier.cluster.wait.aligned;", "may not have begun"),
            ("mbarrier.init.shared.b64", "no barrier"),
            ("cp.async.wait_group", "under way|before a barrier"),
        ):
            changed = re.sub(rf"^.*{change}.*$", "", ptx, flags=re.MULTILINE)
            with pytest.raises((TensorFault, ptx_machine.Fault), match=what):
                ptx_machine.run_kernel(changed, kernel, traced.operands())


@compiled
def test_the_code_is_what_the_tiling_says():
    """Whole accesses, no instruction more than the tile needs, and the architecture with warp groups."""
    x, w, b = (np.zeros(s, np.float32) for s in ((512, 4096), (4096, 256), (256,)))
    ptx = compiler.ptx_of(WgmmaTile(128, 128, 32, (2, 1), 3, 2).of(product_of(dense, x, w, b)), SM90)
    words = (128 + 128) * 32 // 256
    assert ".target sm_90a" in ptx
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32") == 4
    assert ptx.count("wgmma.commit_group") == ptx.count("wgmma.fence") == 1 == ptx.count("fence.proxy.async") - 1
    assert ptx.count("bar.sync") == 1
    assert ptx.count("cvt.rn.tf32") == 2 * words  # of the first tile, and in the loop
    assert ptx.count("st.shared.v4.b32") == 2 * words // 4 and "st.shared.b32" not in ptx
    assert ptx.count("ld.global.nc.v4.b32") == (1 + 2 + 1) * words // 4 + 128 // 16  # the bias: four columns of each 16
    assert ptx.count("st.global.v4.b32") == 128 * 128 // 4 // 256 and "st.global.b32" not in ptx
    arguments = [a.astype(jnp.bfloat16) for a in (x, w, b)]
    ptx = compiler.ptx_of(WgmmaTile(128, 256, 64, (2, 1), 4).of(product_of(dense, *arguments)), SM90)
    loops = ptx.count("wgmma.fence")
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16") == 4 * loops
    assert ptx.count("cp.async.cg.shared.global") == (2 + loops) * (128 + 256) * 128 // 16 // 256
    assert "ld.local" not in ptx and "st.local" not in ptx


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(384, 768, 3072), (384, 3072, 768), (3072, 1024, 4096)])
def test_candidates_assemble_without_local_memory(size, dtype):
    m, k, n = size
    arguments = [np.zeros(s, jnp.dtype(dtype)) for s in ((m, k), (k, n), (n,))]
    found = [p for p, _ in gpu_candidates.candidates(programs.trace(dense, *arguments).program(), MACHINE, 8)]
    grouped = [p for p in found if "groups" in dict(p.params)]
    assert len(grouped) == len(found) >= 3
    for program in grouped:
        image = Image.unpack(compiler.compile_program(program, SM90).object_code)
        assert image.arch == "sm_90a"
        for launch in image.launches:
            assert launch.resources.stack == 0 and launch.shared <= SM90.max_shared
            assert launch.block[0] * launch.resources.registers <= 65536


LAYERS = {
    "dense": (lambda x, w, b: jax.nn.relu(x @ w.T + b), ((3072, 1024), (4096, 1024), (4096,))),
    "few rows": (lambda x, w: x @ w.T, ((384, 3072), (768, 3072))),
    "49 rows": (lambda x, w, b, r: jax.nn.relu(x @ w.T + b + r), ((49, 512), (2048, 512), (2048,), (49, 2048))),
    "gelu": (lambda x, w, b: jax.nn.gelu(x @ w.T + b, approximate=False), ((384, 768), (3072, 768), (3072,))),
    "norm": (lambda x, w, s, b: jax.nn.relu(x * s + b) @ w.T, ((12544, 768), (128, 768), (768,), (768,))),
    "norm of few rows": (lambda x, w, s, b: jax.nn.relu(x * s + b) @ w.T, ((196, 768), (128, 768), (768,), (768,))),
    "3x3": (
        lambda x, w, b: conv(x, w, layout=("NHWC", "OHWI", "NHWC")) + b,
        ((64, 14, 14, 256), (256, 3, 3, 256), (256,)),
    ),
    "3x3 to few": (lambda x, w: conv(x, w, layout=("NHWC", "OHWI", "NHWC")), ((64, 28, 28, 128), (32, 3, 3, 128))),
}


@compiled
@pytest.mark.parametrize("name", LAYERS)
def test_candidates_of_rounded_weights_assemble_without_local_memory(name):
    fn, shapes = LAYERS[name]
    program = programs.trace(fn, *(np.zeros(s, np.float32) for s in shapes)).rounded()
    grouped = [p for p, _ in gpu_candidates.candidates(program, MACHINE, 8) if "groups" in dict(p.params)]
    assert grouped and all(dict(p.params)["rounded"] for p in grouped)
    for candidate in grouped:
        image = Image.unpack(compiler.compile_program(candidate, SM90).object_code)
        assert image.arch == "sm_90a"
        for launch in image.launches:
            assert launch.resources.stack == 0 and launch.shared <= SM90.max_shared
            assert launch.block[0] * launch.resources.registers <= 65536


@compiled
def test_the_code_of_fragments_is_what_the_tiling_says():
    """One matrix load per 64 rows and step, four roundings of it, and as many groups as may be under way."""
    shapes = ((512, 4096), (256, 4096), (4096,), (4096,))
    traced = programs.trace(lambda x, w, s, b: (x * s + b) @ w.T, *(np.zeros(s, np.float32) for s in shapes))
    ptx = compiler.ptx_of(FRAGMENTS[1].of(traced.product()), SM90)
    steps = ptx.count("wgmma.commit_group")
    assert steps == ptx.count("wgmma.fence") == ptx.count("ldmatrix") and steps % 4 == 0
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32") == steps
    assert ptx.count("cvt.rn.tf32") == 4 * steps == 2 * ptx.count("ld.shared.v2.b32")  # two vectors, two terms of each
    assert ptx.count("fma.rn.f32") + ptx.count("mul.rn.f32") >= 4 * steps
    assert "ld.local" not in ptx and "st.local" not in ptx and "st.shared" not in ptx


def test_refusals():
    x, w = normal(128, 128), normal(128, 128)
    program = product_of(lambda x, w: x @ w, x, w)
    for tiling in (
        WgmmaTile(96, 64, 32, (1, 1), 3, 1),
        WgmmaTile(64, 64, 16, (1, 1), 3, 1),
        WgmmaTile(64, 64, 32, (1, 1), 4, 1),
        WgmmaTile(64, 64, 32, (1, 1), 3, 0),
        WgmmaTile(128, 256, 32, (1, 1), 3, 1),
        WgmmaTile(64, 288, 32, (1, 1), 3, 1),
    ):
        with pytest.raises(CompileRejected, match="no product of tiles"):
            emit_source(tiling.of(program))
    across = marked(program)  # weights that lie along columns
    raw = product_of(lambda x, w: x @ w.T, x, w)  # weights that may not be rounded
    turned = marked(product_of(lambda x, w: x.T @ w.T, x, w))
    for wrong in (across, raw, turned, replace(marked(raw), params=(("rounded", 1),))):
        for tiling in FRAGMENTS[:2] if wrong.params == () else [replace(FRAGMENTS[0], flight=1)]:
            with pytest.raises(CompileRejected, match="no product of tiles"):
                emit_source(tiling.of(wrong))
    emit_source(FRAGMENTS[0].of(marked(raw)))
    narrow = product_of(lambda x, w: x @ w, x, normal(128, 126))
    with pytest.raises(CompileRejected, match="no product of tiles"):  # squares need rows of 16 bytes
        emit_source(ROUNDED[0].of(narrow))
    for target in (SM80, CudaTarget((10, 0))):
        with pytest.raises(CompileRejected, match=r"capability 9\.0"):
            compiler.arch_of(ROUNDED[0].of(program), target)


def test_what_a_block_takes():
    x, w = np.zeros((512, 512), np.float32), np.zeros((512, 512), np.float32)
    shape = group_shape(WgmmaTile(128, 256, 32, (2, 1), 3, 1).of(product_of(lambda x, w: x @ w, x, w)))
    assert shape.threads == 256 and shape.shared == 3 * (128 + 256) * 128
    assert [t.words(shape.threads) for t in (shape.left, shape.right)] == [16, 32]
    assert (shape.left.is_transposed, shape.right.is_transposed) == (False, True)
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    shape = group_shape(replace(WgmmaTile(128, 96, 64, (2, 1), 4)).of(product_of(lambda x, w: x @ w, x, w)))
    assert shape.right.bytes == 2 * 64 * 128 and not shape.right.by_terms  # 96 columns take two blocks of 64
