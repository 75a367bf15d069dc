"""Matrix products on matrix units: every layout, type and size against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import AccuracyRejected, CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.gemm.mma_mainloop import product_shape
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.gemm import as_gemm, k_tiles_per_split
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.families import TENSOR_CORES, family_of
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.tune.problem import Output
from jcuts.tune.verify.acceptance import check_output
from jcuts.tune.verify.expected import OutputReference
from tests import programs
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
_WHY = compiler.available()
compiled = pytest.mark.cuda_compilers
LIMIT = 2e-6
"""Allowed error over the root mean square: float32 sums of exact products."""
TILINGS = [
    MmaTile(32, 32, 16, (2, 2, 1), 3, 1),
    MmaTile(64, 32, 32, (2, 1, 2), 2, 1),
    MmaTile(16, 64, 32, (1, 2, 4), 4, 1),
    MmaTile(32, 64, 16, (1, 2, 2), 3, 2),
    MmaTile(16, 16, 32, (1, 1, 2), 6, 3),
    MmaTile(32, 32, 16, (2, 2, 1), 3, 1, 2),
    MmaTile(16, 64, 16, (1, 2, 2), 2, 1, 4),
    MmaTile(64, 32, 16, (1, 2, 1), 3, 1, 3),
    MmaTile(48, 96, 32, (3, 2, 1), 3, 1),
]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def tf32(x):
    return round_tf32(x).astype(np.float64)


def product_of(fn, *arguments):
    made = as_gemm(programs.trace(fn, *arguments).program())
    assert made is not None
    return made


def run(fn, arguments, tiling):
    program = tiling.of(product_of(fn, *arguments))
    kernel = compiler.compile_program(program, SM90)
    operands = programs.trace(fn, *arguments).operands()
    return ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, operands)


def compare(found, wanted, limit=LIMIT):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        error = np.abs(got.astype(np.float64) - want).max() / np.sqrt(np.mean(np.square(want)))
        assert error < limit, error


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


@compiled
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("size", [(64, 64, 64), (49, 40, 36), (37, 45, 53), (33, 101, 18), (1, 64, 40), (130, 24, 70)])
def test_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    ways = tiling.split * tiling.cluster
    if k_tiles_per_split(k, tiling.terms, ways)[1] != ways:
        tiling = replace(tiling, split=1, cluster=1)
    x, w, b = normal(m, k), normal(k, n), normal(n)
    compare(run(dense, (x, w, b), tiling), [np.maximum(tf32(x) @ tf32(w) + b, 0)])


LAYOUTS = {
    "nn": (lambda x, w: x @ w, lambda x: x, lambda w: w),
    "tn": (lambda x, w: x.T @ w, np.transpose, lambda w: w),
    "nt": (lambda x, w: x @ w.T, lambda x: x, np.transpose),
    "tt": (lambda x, w: x.T @ w.T, np.transpose, np.transpose),
}


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(48, 40, 32), (50, 98, 38)])
def test_layouts_and_types(layout, dtype, size):
    fn, left, right = LAYOUTS[layout]
    m, k, n = size
    x, w = left(normal(m, k)).astype(jnp.dtype(dtype)), right(normal(k, n)).astype(jnp.dtype(dtype))
    exact = tf32 if dtype == "float32" else np.float64
    wanted = left(exact(x)) @ right(exact(w))
    limit = LIMIT if dtype == "float32" else float(jnp.finfo(jnp.dtype(dtype)).eps) * 2.1
    for tiling in (MmaTile(32, 32, 32, (2, 1, 2), 3, 1), MmaTile(64, 32, 64, (2, 2, 1), 2, 1, 1)):
        compare(run(fn, (x, w), tiling), [wanted], limit)


@compiled
def test_older_units_round_ties_away_from_zero():
    x, w = normal(32, 16), normal(16, 16)
    x.view(np.uint32)[:] = x.view(np.uint32) & np.uint32(0xFFFFE000) | np.uint32(0x1000)  # nothing but ties
    program = TILINGS[0].of(product_of(lambda x, w: x @ w, x, w))
    for target, even in ((SM80, False), (SM90, True)):
        kernel, ptx = compiler.compile_program(program, target), compiler.ptx_of(program, target)
        rounded = [round_tf32(a, even=even).astype(np.float64) for a in (x, w)]
        compare(ptx_machine.run_kernel(ptx, kernel, [x, w]), [rounded[0] @ rounded[1]])


@compiled
def test_the_result_may_be_transposed_and_batched():
    x, w = normal(37, 24), normal(24, 19)
    compare(run(lambda x, w: (x @ w).T * 2, (x, w), TILINGS[0]), [(tf32(x) @ tf32(w)).T * 2])
    q, k = normal(2, 18, 3, 16), normal(2, 29, 3, 16)
    scores = np.einsum("bqhd,bkhd->bhqk", tf32(q), tf32(k)) * 0.25
    for tiling in (TILINGS[0], MmaTile(16, 32, 8, (1, 1, 1), 3, 2)):
        compare(run(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, (q, k), tiling), [scores])


@compiled
@pytest.mark.parametrize("tiling", TILINGS[:3], ids=str)
def test_convolutions_with_everything_behind_them(tiling):
    """Stride 2, bias and ReLU6, a residual, GELU, and two results."""

    def block(x, w, b, r):
        y = conv(x, w, strides=(2, 2)) + b
        return y, jax.nn.gelu(jnp.clip(y, 0.0, 6.0) + r)

    x, w, b, r = normal(2, 13, 11, 20), normal(1, 1, 20, 36), normal(36), normal(2, 7, 6, 36)
    y = np.einsum("nhwc,ck->nhwk", tf32(x)[:, ::2, ::2], tf32(w)[0, 0]) + b
    with jax.enable_x64(True):
        z = np.asarray(jax.nn.gelu(jnp.asarray(np.clip(y, 0, 6) + r)))
    compare(run(block, (x, w, b, r), tiling), [y, z])


CONVOLUTIONS = {
    "3x3": ((1, 7, 6, 16), (3, 3, 16, 20), {}),
    "3x3 stride 2": ((2, 9, 8, 32), (3, 3, 32, 24), {"strides": (2, 2)}),
    "5x1 uneven padding": ((1, 9, 11, 16), (5, 1, 16, 18), {"padding": ((2, 1), (0, 3))}),
    "dilation": ((1, 12, 12, 32), (3, 3, 32, 40), {"dilation": (2, 2)}),
    "one output": ((3, 7, 7, 16), (7, 7, 16, 33), {"padding": "VALID"}),
    "one padded output": ((1, 2, 2, 16), (4, 4, 16, 16), {"padding": ((1, 1), (1, 1))}),
}


@compiled
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_with_taps(name):
    image, filters, params = CONVOLUTIONS[name]
    x, w, b = normal(*image), normal(*filters), normal(filters[-1])
    with jax.enable_x64(True):
        wanted = np.maximum(np.asarray(conv(jnp.asarray(tf32(x)), jnp.asarray(tf32(w)), **params)) + b, 0)
    for tiling in (
        MmaTile(32, 32, 16, (2, 2, 1), 3, 1),
        MmaTile(64, 32, 16, (2, 1, 2), 2, 1),
        MmaTile(16, 32, 16, (1, 1, 2), 4, 3),
        MmaTile(32, 32, 16, (2, 1, 1), 3, 1, 2),
    ):
        compare(run(lambda x, w, b: jax.nn.relu(conv(x, w, **params) + b), (x, w, b), tiling), [wanted])


@compiled
@pytest.mark.parametrize("size", [(49, 96, 40), (5, 200, 33), (1, 260, 72), (200, 33, 130)])
def test_what_the_ranking_proposes_is_right(size):
    m, k, n = size
    x, w, b = normal(m, k), normal(k, n), normal(n)
    traced = programs.trace(dense, x, w, b)
    exact = np.maximum(x.astype(np.float64) @ w + b, 0)
    for program, _ in gpu_candidates.candidates(traced.program(), MACHINE, 16):
        kernel = compiler.compile_program(program, SM90)
        found = ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, traced.operands())
        tensor_cores = family_of(program).capability >= TENSOR_CORES
        compare(found, [np.maximum(tf32(x) @ tf32(w) + b, 0) if tensor_cores else exact])


@compiled
def test_the_code_is_what_the_tiling_says():
    """Fragments in registers, whole accesses, no instruction more than the tile needs."""
    x, w, b = (np.zeros(s, np.float32) for s in ((512, 4096), (4096, 256), (256,)))
    ptx = compiler.ptx_of(MmaTile(64, 64, 32, (2, 2, 1), 3, 1).of(product_of(dense, x, w, b)), SM90)
    steps, rows, columns = 32 // 8, 32 // 16, 32 // 8
    loops = ptx.count("mma.sync") // (steps * rows * columns)
    assert loops >= 1 and ptx.count("mma.sync") == loops * steps * rows * columns
    assert ptx.count("ldmatrix") == loops * steps * rows  # of the left operand
    assert ptx.count("ld.shared.v2.b32") == loops * steps * columns  # of the right one: pairs of columns
    assert ptx.count("cvt.rn.tf32") == loops * steps * (4 * rows + 2 * columns)
    assert ptx.count("cp.async.cg.shared.global") == (2 + loops) * 2 * 64 * 32 * 4 // 16 // 128
    assert ptx.count("st.global.v4.b32") == 64 * 64 // 4 // 128 and "st.global.b32" not in ptx
    assert "ld.local" not in ptx and "st.local" not in ptx


SHAPES = [(3136, 144, 24), (784, 512, 128), (49, 960, 320), (12544, 32, 16), (384, 768, 3072), (1, 1280, 1000)]


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
@pytest.mark.parametrize("size", SHAPES)
def test_candidates_assemble_without_local_memory(size, target):
    m, k, n = size
    arguments = (np.zeros((m, k), np.float32), np.zeros((k, n), np.float32), np.zeros(n, np.float32))
    machine = replace(MACHINE, capability=target.capability)
    for program, _ in gpu_candidates.candidates(programs.trace(dense, *arguments).program(), machine, 3):
        image = Image.unpack(compiler.compile_program(program, target).object_code)
        for launch in image.launches:
            limit = target.max_shared if "groups" in dict(program.params) else 96 << 10
            assert launch.resources.stack == 0 and launch.shared <= limit
            assert launch.block[0] * launch.resources.registers <= 65536


@pytest.mark.parametrize("size", [(37, 45, 53), (16, 64, 32)])
def test_groups_of_terms_keep_their_meaning(size):
    m, k, n = size
    x, w, b = normal(m, k), normal(k, n), normal(n)
    operands = programs.trace(dense, x, w, b).operands()
    program = MmaTile(32, 32, 16, (2, 2, 1), 3, 2).of(product_of(dense, x, w, b))
    (first, second), scratch = split_into_kernels(program)
    for part in (first, second):
        verify(part.program)
    assert scratch >= 4 * 2 * m * n
    (partial,) = interpret(first.program, operands[:2])
    (found,) = interpret(second.program, [partial, operands[2]])
    compare([found], [np.maximum(x.astype(np.float64) @ w + b, 0)])


@compiled
def test_the_machine_sees_what_pipelines_do_wrong():
    x, w = normal(32, 64), normal(64, 32)
    program = TILINGS[0].of(product_of(lambda x, w: x @ w, x, w))
    kernel = compiler.compile_program(program, SM90)
    ptx = compiler.ptx_of(program, SM90)
    for change, what in (
        (lambda t: t.replace("cp.async.wait_group 1;", "cp.async.wait_group 2;"), "under way"),
        (lambda t: t.replace("cvt.rn.tf32.f32", "mov.b32"), "not rounded"),
    ):
        with pytest.raises(TensorFault, match=what):
            ptx_machine.run_kernel(change(ptx), kernel, [x, w])
    with pytest.raises(ptx_machine.Fault, match="race"):
        ptx_machine.run_kernel(ptx.replace("bar.sync 0;", ""), kernel, [x, w])


@pytest.mark.more_with_cuda_compilers
def test_refusals():
    x, w = normal(64, 64), normal(64, 64)
    program = product_of(lambda x, w: x @ w, x, w)
    for tiling in (
        MmaTile(48, 32, 16, (2, 1, 1), 3, 1),
        MmaTile(32, 32, 16, (2, 2, 4), 3, 1),
        MmaTile(32, 32, 16, (2, 2, 1), 1, 1),
    ):
        with pytest.raises(CompileRejected, match="no product of tiles"):
            emit_source(tiling.of(program))
    if not _WHY:
        with pytest.raises(CompileRejected, match="clusters"):
            compiler.compile_program(MmaTile(32, 32, 16, (2, 2, 1), 3, 1, 2).of(program), SM80)
    large = MmaTile(128, 128, 64, (2, 4, 1), 4, 1).of(program)
    assert product_shape(large).shared > SM80.max_shared
    if not _WHY:
        with pytest.raises(CompileRejected, match="shared memory"):
            compiler.compile_program(large, SM80)


def test_the_acceptance_rule_takes_products_that_round_as_the_library_does():
    """XLA's error is that of TF32 too; where the library computes in float32, products of matrix units are refused."""
    rng = np.random.default_rng(11)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((64, 256), (256, 48)))
    spec = Output((64, 48), "float32", 256)

    def cut(a):  # what the unit does to operands that nobody has rounded: a library's worst choice
        return (np.ascontiguousarray(a).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    exact = x.astype(np.float64) @ w
    mine = (tf32(x) @ tf32(w)).astype(np.float32)
    for library in (tf32(x) @ tf32(w), cut(x) @ cut(w)):
        expected = OutputReference("normal", library.astype(np.float32), exact)
        assert check_output(0, spec, [expected], [mine], 2.0).candidate > 100
    with pytest.raises(AccuracyRejected):
        check_output(0, spec, [OutputReference("normal", x @ w, exact)], [mine], 2.0)


def test_higher_precision_is_no_business_of_matrix_units():
    x, w = normal(64, 64), normal(64, 64)
    for precision in (lax.Precision.HIGH, lax.Precision.HIGHEST):
        program = programs.trace(lambda x, w, p=precision: jnp.dot(x, w, precision=p), x, w).program()
        assert as_gemm(program) is None
