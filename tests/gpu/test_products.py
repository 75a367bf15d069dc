"""Matrix products on a GPU: every candidate, against float64 with operands rounded to TF32 (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import contraction
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.ops.cases import conv
from tests.ptx.tensor_core import round_tf32

pytestmark = pytest.mark.gpu
LIMIT = 5e-7
"""Allowed error over the root mean square, by root of the terms: units add up with fewer bits than float32 has."""


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


def added(x, w, b, r):
    return jax.nn.relu(x @ w + b + r)


def convolved(x, w, b):
    return jnp.clip(conv(x, w) + b, 0.0, 6.0)


def layer(x, w, b):
    return jax.nn.relu(conv(x, w, strides=(2, 2)) + b)


CASES = {
    "network": (dense, ((196, 1024), (1024, 256), (256,))),
    "odd": (dense, ((131, 211), (211, 77), (77,))),
    "one row": (dense, ((1, 1280), (1280, 1000), (1000,))),
    "transposed": (lambda x, w, b: (x.T @ w.T + b).T, ((96, 120), (72, 96), (72,))),
    "batch": (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), ((2, 65, 3, 32), (2, 70, 3, 32))),
    "large": (dense, ((1000, 264), (264, 520), (520,))),
    "large residual": (added, ((17000, 64), (64, 136), (136,), (17000, 136))),
    "large transposed": (lambda x, w, b: (x.T @ w.T + b).T, ((384, 640), (648, 384), (648,))),
    "large 3x3": (convolved, ((16, 28, 28, 64), (3, 3, 64, 64), (64,))),
    "3x3": (convolved, ((2, 15, 14, 64), (3, 3, 64, 48), (48,))),
    "layer 7x7": (layer, ((2, 63, 61, 3), (7, 7, 3, 64), (64,))),
    "layer 3x3": (layer, ((3, 40, 76, 3), (3, 3, 3, 40), (40,))),
    "3x3 deep": (convolved, ((1, 7, 7, 512), (3, 3, 512, 128), (128,))),
}


ALONG = ("NHWC", "OHWI", "NHWC")
ROUNDED = {
    "dense": (lambda x, w, b: jax.nn.relu(x @ w.T + b), ((4100, 520), (136, 520), (136,))),
    "norm": (lambda x, w, s, t: jax.nn.relu(x * s + t) @ w.T, ((4100, 512), (136, 512), (512,), (512,))),
    "activation": (lambda x, w: (jnp.clip(x, -0.5, 1.5) * x) @ w.T, ((700, 1024), (520, 1024))),
    "49 rows": (lambda x, w, b, r: jax.nn.relu(x @ w.T + b + r), ((49, 512), (2048, 512), (2048,), (49, 2048))),
    "residual": (lambda x, w, b, r: jax.nn.relu(x @ w.T + b + r), ((17000, 64), (136, 64), (136,), (17000, 136))),
    "residual, more terms": (
        lambda x, w, b, r: jax.nn.relu(x @ w.T + b + r),
        ((17000, 264), (136, 264), (136,), (17000, 136)),
    ),
    "residual by stages": (
        lambda x, w, b, r: jax.nn.relu(x @ w.T + b + r),
        ((12500, 256), (1000, 256), (1000,), (12500, 1000)),
    ),
    "two residuals": (lambda x, w, r, q: (x @ w.T + r) * q, ((8192, 544), (512, 544), (8192, 512), (8192, 512))),
    "1x1 stride 2": (lambda x, w: conv(x, w, layout=ALONG, strides=(2, 2)), ((64, 29, 28, 256), (264, 1, 1, 256))),
    "results alone": (lambda x, w, b: jax.nn.relu(x @ w.T + b), ((17000, 64), (136, 64), (136,))),
    "384 rows": (lambda x, w, b: jax.nn.gelu(x @ w.T + b, approximate=False), ((384, 768), (760, 768), (760,))),
    "large GELU": (
        lambda x, w, b: jax.nn.gelu(x @ w.T + b, approximate=False),
        ((2000, 768), (2312, 768), (2312,)),
    ),
    "fitted tiles": (lambda x, w, b, r: x @ w.T + b + r, ((3000, 776), (776, 776), (776,), (3000, 776))),
    "norm of few rows": (lambda x, w, s, t: jax.nn.relu(x * s + t) @ w.T, ((196, 768), (128, 768), (768,), (768,))),
    "norm of odd terms": (lambda x, w, s, t: jax.nn.relu(x * s + t) @ w.T, ((196, 928), (128, 928), (928,), (928,))),
    "3x3": (lambda x, w, b: conv(x, w, layout=ALONG) + b, ((16, 28, 28, 64), (64, 3, 3, 64), (64,))),
    "3x3 to few": (lambda x, w, b: conv(x, w, layout=ALONG) + b, ((16, 28, 28, 64), (32, 3, 3, 64), (32,))),
    "1x7": (lambda x, w, b: conv(x, w, layout=ALONG) + b, ((16, 35, 27, 96), (72, 1, 7, 96), (72,))),
    "5x5 inside": (lambda x, w: conv(x, w, layout=ALONG, padding="VALID"), ((40, 23, 20, 48), (64, 5, 5, 48))),
    "3x3 stride 2": (lambda x, w: conv(x, w, layout=ALONG, strides=(2, 2)), ((32, 57, 56, 64), (128, 3, 3, 64))),
    "3x3 deep": (lambda x, w: jax.nn.relu(conv(x, w, layout=ALONG)), ((64, 7, 7, 512), (512, 3, 3, 512))),
    "one image, 3x3": (
        lambda x, w, b: jax.nn.relu(conv(x, w, layout=ALONG) + b),
        ((1, 7, 7, 512), (512, 3, 3, 512), (512,)),
    ),
    "one image, 5x5": (lambda x, w, b: conv(x, w, layout=ALONG) + b, ((1, 35, 35, 48), (64, 5, 5, 48), (64,))),
    "one image, 1x7": (
        lambda x, w, r: conv(x, w, layout=ALONG) + r,
        ((1, 17, 17, 160), (160, 1, 7, 160), (1, 17, 17, 160)),
    ),
}
"""Products whose weights are numbers of TF32."""
STAGED = ("residual by stages", "two residuals")
"""Those of which at least one kernel gets what is added by the stages of its operands."""
MOST = 12
"""Candidates that are tried."""


@pytest.mark.parametrize("name", ROUNDED)
def test_every_candidate_of_rounded_weights(name):
    fn, shapes = ROUNDED[name]
    rng = np.random.default_rng(len(name))
    arguments = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arguments[1] = round_tf32(arguments[1])
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in arguments]
        wanted, size = np.asarray(fn(*wide)), np.sqrt(np.prod(shapes[1][1:]))
    traced = programs.trace(fn, *arguments)
    found = gpu_candidates.candidates(traced.rounded(), xla_devices.machine(), MOST)
    assert found and any("rounded" in dict(p.params) for p, _ in found)
    made, staged = 0, False
    for program, _ in found:
        try:
            kernel = kernel_for(program)
        except CompileRejected:  # spills, or products that would wait for each other
            continue
        made += 1
        staged |= "beside" in dict(program.params)
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())[0] for _ in range(2))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        # The left operand is rounded to 11 bits: errors of products that do not depend on each other add up.
        error = np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - wanted))) / size
        assert error <= 2.0**-11, (program.params, error)
    assert 2 * made >= len(found) and staged >= (name in STAGED)


NORMS = ((3136, 224, 128), (784, 480, 136), (196, 992, 128), (49, 896, 128))
"""(rows, terms, columns) of DenseNet's norms before products at batch 1."""


def behind_a_norm(x, w, s, t):
    y = (x.astype(jnp.float32) * s + t).astype(x.dtype)
    return jnp.maximum(y, jnp.zeros((), x.dtype)) @ w


def norm_of_bfloat16(rows, terms, columns):
    """Arguments of `behind_a_norm`."""
    rng = np.random.default_rng(rows)
    x, w, s, t = (rng.standard_normal(n).astype(np.float32) for n in ((rows, terms), (terms, columns), terms, terms))
    return [x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), s, t]


@pytest.mark.parametrize("size", NORMS)
def test_every_candidate_behind_a_norm_of_bfloat16(size):
    arguments = norm_of_bfloat16(*size)
    x, w, s, t = arguments
    normed = np.maximum((x.astype(np.float32) * s + t).astype(jnp.bfloat16), 0).astype(np.float64)
    wanted = normed @ w.astype(np.float64)
    traced = programs.trace(behind_a_norm, *arguments)
    found = [program for program, _ in contraction.contraction_schedules(traced.product(), xla_devices.machine())]
    assert found
    for program in found:
        kernel = kernel_for(program)
        got, again = (jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())[0] for _ in range(2))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
        error = np.abs(np.asarray(got, np.float64) - wanted).max()
        assert error <= 2.0**-8 * np.abs(wanted).max(), (program.params, error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_every_candidate(name, dtype):
    fn, shapes = CASES[name]
    rng = np.random.default_rng(len(name))
    arguments = [rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes]
    # What is added to a product is not rounded, be it a matrix.
    exact = [round_tf32(a) if dtype == "float32" and k < 2 else a for k, a in enumerate(arguments)]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in exact]
        wanted = np.asarray(fn(*wide))
        plain = np.asarray(fn(*[jnp.asarray(np.asarray(a, np.float64)) for a in arguments]))
    traced = programs.trace(fn, *arguments)
    found = gpu_candidates.candidates(traced.program(), xla_devices.machine(), 12)
    if dtype != "float32" and name in ("odd", "layer 7x7"):
        assert not found  # neighbours of two bytes cannot be copied alone
        return
    made = 0
    for program, _ in found:
        try:
            kernel = kernel_for(program)
        except CompileRejected:  # an assembler may spill where another does not: tuning leaves such schedules out
            continue
        made += 1
        (got,) = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())
        again = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())[0]
        np.testing.assert_array_equal(np.asarray(got), np.asarray(again))  # no matter in which order blocks ran
        want = wanted if dict(program.params)["cuda"] in ("product", "patch") else plain
        error = np.abs(np.asarray(got, np.float64) - want).max() / np.sqrt(np.mean(np.square(want)))
        terms = float(np.prod(shapes[1][:-1]))
        # The units cut off every product and every sum of some, which adds up: half a unit in the last place per term.
        high = float(np.abs(want).max() / np.sqrt(np.mean(np.square(want))))
        cut = min(1e-4, float(jnp.finfo(np.float32).eps) * terms / 2 * high)
        limit = max(LIMIT * terms**0.5, cut) if dtype == "float32" else 2.1 * float(jnp.finfo(jnp.dtype(dtype)).eps)
        assert error <= limit * max(1.0, np.abs(want).max() if dtype != "float32" else 1.0), (program.params, error)
    assert 2 * made >= len(found)


EXACT = ("network", "odd", "transposed", "batch", "large", "large residual", "large 3x3", "3x3", "3x3 deep")
"""Cases that have kernels for more than TF32."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_candidate(name, dtype):
    fn, shapes = CASES[name]
    rng = np.random.default_rng(len(name))
    arguments = [rng.standard_normal(s).astype(dtype) for s in shapes]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wanted = np.asarray(fn(*[jnp.asarray(np.asarray(a, np.float64)) for a in arguments]))
        traced = programs.trace(fn, *arguments)
        found = [p for p, _ in gpu_candidates.candidates(traced.program(), xla_devices.machine(), MOST)]
        assert found
        for program in found:
            kernel = kernel_for(program)
            run = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))
            (got,), (again,) = run(*traced.operands()), run(*traced.operands())
            np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
            error = np.abs(np.asarray(got, np.float64) - wanted).max() / np.sqrt(np.mean(np.square(wanted)))
            assert error <= 8 * np.finfo(dtype).eps * np.prod(shapes[1][:-1]) ** 0.5, (program.params, error)


def test_zeros_around_an_image_of_float64_meet_infinite_weights():
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        x, w = rng.standard_normal((2, 9, 8, 32)), rng.standard_normal((3, 3, 32, 24))
        w[0, 0, 3, 5] = np.inf
        wanted = np.asarray(jax.jit(conv)(x, w))
        traced = programs.trace(conv, x, w)
        for program, _ in gpu_candidates.candidates(traced.program(), xla_devices.machine(), 3):
            kernel = kernel_for(program)
            (got,) = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))(*traced.operands())
            np.testing.assert_array_equal(np.isnan(np.asarray(got)), np.isnan(wanted))
