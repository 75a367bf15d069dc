"""Column sums in the epilogue of products and convolutions: against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.column_sums import SUMS, as_gemm_with_column_sums, match_column_sums
from jcuts.lower.patterns.gemm import gemm_operands
from jcuts.lower.reduction.column_sums import lower_region_or_column_sums
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.conv.implicit_gemm import ImplicitGemmTile
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.kernel_time import kernel_time
from tests import programs
from tests.codegen.cuda.gemm.test_mma import MACHINE, SM80, SM90, compiled, normal, tf32
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

MMA = [
    MmaTile(32, 32, 16, (2, 2, 1), 3, 1),
    MmaTile(64, 64, 16, (2, 1, 1), 2, 1),
    MmaTile(96, 48, 32, (2, 1, 1), 3, 1),
]
WGMMA = [
    WgmmaTile(64, 64, 32, (1, 1), 3, 1),
    WgmmaTile(128, 128, 32, (2, 1), 3, 2),
    WgmmaTile(128, 64, 32, (1, 1), 3, 1),
    WgmmaTile(64, 128, 32, (1, 2), 3, 1),
]
FRAGMENTS = [
    WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1),
    WgmmaTile(128, 128, 32, (2, 1), 4, rounded=1, spread=1, steps=2),
    WgmmaTile(192, 64, 64, (3, 1), 3, rounded=1),
]
"""Of weights that are rounded already."""
HALF = [
    WgmmaTile(64, 64, 64, (1, 1), 3),
    WgmmaTile(128, 96, 64, (1, 1), 3, paired=1),
    WgmmaTile(256, 64, 64, (4, 1), 4),
    WgmmaTile(256, 64, 64, (2, 1), 2, paired=1),
    WgmmaTile(64, 96, 64, (1, 1), 1, paired=1),
]
"""Of bfloat16."""
HALO = [
    ImplicitGemmTile(64, 32, 1, 4, 2),
    ImplicitGemmTile(128, 64, 2, 5, 2, spread=1, steps=2),
    ImplicitGemmTile(128, 32, 1, 3, 2),
    ImplicitGemmTile(64, 64, 1, 5, 2, rounds=3, spread=1, steps=4),
    ImplicitGemmTile(128, 32, 2, 4, 2, rounds=2, spread=1),
]
SIZES = [(128, 64, 64), (70, 40, 68), (33, 100, 36), (130, 32, 200), (5, 64, 16)]


def rows_of(y):
    return tuple(range(y.ndim - 1))


def statistics(y):
    """Mean and variance of every column, as keras and jax.numpy write them."""
    mean = jnp.mean(y, rows_of(y), keepdims=True)
    return y, mean, jnp.sum(jnp.square(y - mean), rows_of(y)) / (y.size // y.shape[-1])


def dense_statistics(x, w, b):
    return statistics(x @ w + b)


def masked(z, mask, x):
    """The gradient behind a rectifier, with what the gradient of a batch norm sums of it."""
    d = jnp.where(mask > 0, z, 0.0)
    return d, jnp.sum(d, rows_of(d)), jnp.sum(d * x, rows_of(d)) * 2.0


def dense_gradients(x, w, mask, y):
    return masked(x @ w, mask, y)


def gemm_of(fn, *arguments, rounded: bool = False) -> Program:
    """The GEMM with column sums of a function; ``rounded``: its weights are TF32 numbers."""
    traced = programs.trace(fn, *arguments)
    built = lower_region_or_column_sums(traced.graph, traced.everything)
    assert isinstance(built, Program), str(built)
    verify(built)
    made = as_gemm_with_column_sums(built)
    assert made is not None
    if rounded:
        right = gemm_operands(made)[1].buffer
        made = replace(made, buffers=tuple(replace(b, tf32=b.name == right) for b in made.buffers))
    verify(made)
    assert Program.from_json(made.to_text()).digest == made.digest
    return made


def run(fn, arguments, tiling, *, rounded: bool = False):
    program = tiling.of(gemm_of(fn, *arguments, rounded=rounded))
    operands = programs.trace(fn, *arguments).operands()
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    assert len(Image.unpack(kernel.object_code).launches) == 2
    found, again = (ptx_machine.run_kernel(ptx, kernel, operands) for _ in range(2))
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
    return found


def check(found, wanted, limit=2e-6, scale=None):
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.shape == want.shape
        size = np.abs(want).max() if scale is None or place == 0 else scale
        error = np.abs(got.astype(np.float64) - want).max() / size
        assert error < limit, (place, error)


def exact_statistics(y):
    return y, y.mean(rows_of(y), keepdims=True), y.var(rows_of(y))


def exact_gradients(z, mask, x):
    d = np.where(mask > 0, z, 0.0)
    rows = rows_of(d)
    return d, d.sum(rows), 2 * (d * x).sum(rows)


@compiled
@pytest.mark.parametrize("tiling", [*MMA, *WGMMA], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_statistics_of_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    x, w, b = normal(m, k), normal(k, n), normal(n)
    check(run(dense_statistics, (x, w, b), tiling), exact_statistics(tf32(x) @ tf32(w) + b))


@compiled
@pytest.mark.parametrize("tiling", [*MMA, *WGMMA], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_sizes_that_divide_nothing(size, tiling):
    m, k, n = size
    x, w, mask, y = normal(m, k), normal(k, n), normal(m, n, seed=1), normal(m, n, seed=2)
    wanted = exact_gradients(tf32(x) @ tf32(w), mask, y)
    check(run(dense_gradients, (x, w, mask, y), tiling), wanted, scale=np.abs(wanted[0]).sum(0).max())


@compiled
@pytest.mark.parametrize("tiling", FRAGMENTS, ids=str)
@pytest.mark.parametrize("size", [(128, 64, 64), (70, 164, 68)])
def test_weights_that_are_rounded_already(size, tiling):
    m, k, n = size
    x, w, b = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n)
    found = run(lambda x, w, b: statistics(x @ w.T + b), (x, w, b), tiling, rounded=True)
    check(found, exact_statistics(tf32(x) @ w.T.astype(np.float64) + b), 3e-6)


@compiled
@pytest.mark.parametrize("tiling", HALF, ids=str)
def test_results_of_16_bits_are_summed_in_float32(tiling):
    """Of what is stored: rounded values."""
    terms = min(72, 64 * tiling.stages)
    x, w = normal(150, terms, dtype=jnp.bfloat16), normal(terms, 96, dtype=jnp.bfloat16)

    def fn(x, w):
        y = (x @ w).astype(jnp.bfloat16)
        wide = y.astype(jnp.float32)
        return y, jnp.sum(wide, 0), jnp.sum(wide * wide, 0)

    exact = x.astype(np.float64) @ w.astype(np.float64)
    y, sums, squares = run(fn, (x, w), tiling)
    assert np.abs(y.astype(np.float64) - exact).max() < 2.0**-8 * np.abs(exact).max()
    np.testing.assert_allclose(sums, exact.sum(0), atol=2.0**-8 * np.abs(exact).sum(0).max())
    np.testing.assert_allclose(squares, (exact**2).sum(0), rtol=2.0**-7)


CONVOLUTIONS = {
    "3x3": ((2, 9, 11, 32), (3, 3, 32, 40), {}),
    "1x1": ((3, 7, 5, 48), (1, 1, 48, 72), {}),
    "3x3 stride 2": ((2, 11, 10, 16), (3, 3, 16, 24), {"strides": (2, 2)}),
}


@compiled
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("tiling", [MMA[0], MMA[1], WGMMA[0]], ids=str)
def test_convolutions(name, tiling):
    image, filters, params = CONVOLUTIONS[name]
    if isinstance(tiling, WgmmaTile) and image[-1] % 32:
        pytest.skip("k-tiles are 32 channels")
    x, w, b = normal(*image), normal(*filters), normal(filters[-1])
    with jax.enable_x64(True):
        y = np.asarray(conv(jnp.asarray(tf32(x)), jnp.asarray(tf32(w)), **params)) + b
    found = run(lambda x, w, b: statistics(conv(x, w, **params) + b), (x, w, b), tiling)
    check(found, exact_statistics(y), 3e-6)


@compiled
@pytest.mark.parametrize("tiling", [MMA[0], WGMMA[0]], ids=str)
def test_data_gradient_of_a_convolution(tiling):
    """Its weights are reversed and lie along K."""
    dy, w, mask, y = normal(2, 6, 7, 32), normal(3, 3, 24, 32), normal(2, 6, 7, 24, seed=1), normal(2, 6, 7, 24, seed=2)

    def gradient(dy, w):
        return conv(dy, jnp.flip(w, (0, 1)), layout=("NHWC", "HWOI", "NHWC"))

    with jax.enable_x64(True):
        z = np.asarray(gradient(jnp.asarray(tf32(dy)), jnp.asarray(tf32(w))))
    wanted = exact_gradients(z, mask, y)
    found = run(lambda dy, w, mask, y: masked(gradient(dy, w), mask, y), (dy, w, mask, y), tiling)
    check(found, wanted, 3e-6, scale=np.abs(wanted[0]).sum((0, 1, 2)).max())


@compiled
@pytest.mark.parametrize("tiling", HALO, ids=str)
@pytest.mark.parametrize("kind", ["statistics", "gradients"])
@pytest.mark.parametrize("strides, channels, features", [((1, 1), 64, 40), ((2, 2), 48, 72)])
def test_implicit_gemm_with_halo(strides, channels, features, kind, tiling):
    x, w = normal(2, 9, 11, channels), round_tf32(normal(features, 3, 3, channels, seed=1))
    layout = ("NHWC", "OHWI", "NHWC")
    with jax.enable_x64(True):
        z = np.asarray(conv(jnp.asarray(tf32(x)), jnp.asarray(w.astype(np.float64)), strides=strides, layout=layout))
    if kind == "statistics":
        found = run(lambda x, w: statistics(conv(x, w, strides=strides, layout=layout)), (x, w), tiling, rounded=True)
        check(found, exact_statistics(z), 3e-6)
        return
    mask, y = normal(*z.shape, seed=2), normal(*z.shape, seed=3)
    fn = lambda x, w, mask, y: masked(conv(x, w, strides=strides, layout=layout), mask, y)  # noqa: E731
    wanted = exact_gradients(z, mask, y)
    found = run(fn, (x, w, mask, y), tiling, rounded=True)
    check(found, wanted, 3e-6, scale=np.abs(wanted[0]).sum((0, 1, 2)).max())


def test_channels_that_fill_no_k_tile_are_refused():
    """Neighbouring k of a window come in runs of channels: 44 floats are no multiple of the shortest k-tile's line."""
    traced = programs.trace(
        lambda x, w: statistics(conv(x, w, layout=("NHWC", "OHWI", "NHWC"))), normal(2, 9, 11, 44), normal(72, 3, 3, 44)
    )
    built = lower_region_or_column_sums(traced.graph, traced.everything)
    assert isinstance(built, Refusal) and "no GEMM" in built.reason


@compiled
@pytest.mark.parametrize("tiling", [MMA[0], WGMMA[1]], ids=str)
def test_variance_beside_a_large_mean(tiling):
    """Mean 100, deviation 1: as accurate as two passes, where a sum of squares in float32 loses four digits."""
    rng = np.random.default_rng(3)
    x, w = np.eye(300, 304, dtype=np.float32), np.zeros((304, 32), np.float32)
    w[:300] = np.round(rng.standard_normal((300, 32)) * 8) / 8
    b = np.full(32, 100, np.float32)
    found = run(dense_statistics, (x, w, b), tiling)
    wanted = exact_statistics(tf32(x) @ tf32(w) + b)
    check(found, wanted, 4e-7)


@compiled
def test_infinities_and_nans_stay_in_their_columns():
    x, w, b = normal(70, 16), normal(16, 40), normal(40)
    b[3], b[17] = np.inf, np.nan
    _, mean, variance = run(dense_statistics, (x, w, b), MMA[0])
    wanted = [np.asarray(v) for v in dense_statistics(x, w, b)]
    assert np.isposinf(mean[0, 3]) and np.isnan(variance[[3, 17]]).all() and np.isnan(mean[0, 17])
    kept = np.isfinite(wanted[2])
    assert kept.sum() == 38 and np.isfinite(mean[0, kept]).all() and np.isfinite(variance[kept]).all()


@compiled
def test_both_kernels_are_programs_that_the_interpreter_runs():
    x, w, mask, y, b = normal(70, 24), normal(24, 36), normal(70, 36), normal(70, 36, seed=1), normal(36)
    for fn, arguments in ((dense_statistics, (x, w, b)), (dense_gradients, (x, w, mask, y))):
        program = MMA[0].of(gemm_of(fn, *arguments))
        values = dict(zip((i.name for i in program.inputs), programs.trace(fn, *arguments).operands(), strict=True))
        whole = interpret(program, list(values.values()))
        parts, scratch = split_into_kernels(program)
        assert len(parts) == 2 and scratch > 0
        for part in parts:
            verify(part.program)
            made = interpret(part.program, [values[i.name] for i in part.program.inputs])
            values.update(zip((o.name for o in part.program.outputs), made, strict=True))
        for output, want in zip(program.outputs, whole, strict=True):
            np.testing.assert_allclose(values[output.name], want, rtol=1e-5, atol=1e-4)


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=["sm_80", "sm_90"])
def test_what_is_proposed_assembles_without_local_memory(target):
    """Of layers of ResNet-50, forward and backward; at most one schedule of a layer may spill."""
    f32 = np.float32
    x, b, full = np.zeros((4, 28, 28, 128), f32), np.zeros(128, f32), np.zeros((4, 28, 28, 128), f32)
    w, narrow = np.zeros((3, 3, 128, 128), f32), np.zeros((1, 1, 128, 64), f32)
    forward = lambda x, w, b: statistics(conv(x, w) + b)  # noqa: E731
    backward = lambda x, w, mask, y: masked(conv(x, w), mask, y)  # noqa: E731
    thin = np.zeros((4, 28, 28, 64), f32)
    machine = replace(MACHINE, capability=target.capability)
    for fn, arguments in ((forward, (x, w, b)), (backward, (x, w, full, full)), (backward, (x, narrow, thin, thin))):
        found = gpu_candidates.candidates(programs.trace_sums(fn, *arguments), machine, 4)
        spilled = 0
        for program, score in found:
            assert 0 < score <= 1 and dict(program.params)[SUMS] == 2
            try:
                launches = Image.unpack(compiler.compile_program(program, target).object_code).launches
            except CompileRejected as error:
                assert "local memory" in error.message
                spilled += 1
                continue
            assert [launch.resources.stack for launch in launches] == [0, 0]
        assert len(found) >= 2 and spilled <= 1


def bfloat16_statistics(x, w, b):
    """A convolution's rounded results with the moments of a batch norm."""
    wide = (conv(x, w) + b).astype(jnp.float32)
    mean = jnp.mean(wide, rows_of(wide))
    return wide.astype(jnp.bfloat16), mean, jnp.mean(jnp.square(wide), rows_of(wide)) - jnp.square(mean)


@compiled
@pytest.mark.parametrize(("channels", "features", "stages"), [(64, 256, 1), (128, 512, 2)])
def test_memory_bound_products_of_16_bits_have_several_blocks_per_sm(channels, features, stages):
    """Of ResNet-50's 1x1 convolutions: no more stages than k-tiles, so that blocks overlap copies and epilogues."""
    x, w = (np.zeros(s, jnp.bfloat16) for s in ((64, 56, 56, channels), (1, 1, channels, features)))
    arguments = x, w, np.zeros(features, jnp.bfloat16)
    found = gpu_candidates.candidates(programs.trace_sums(bfloat16_statistics, *arguments), MACHINE, 3)
    grouped = [dict(program.params) for program, _ in found if "groups" in dict(program.params)]
    assert grouped and {params["stages"] for params in grouped} == {stages}
    for program, _ in found:
        launches = Image.unpack(compiler.compile_program(program, SM90).object_code).launches
        assert launches[0].resources.stack == 0
        if "groups" in dict(program.params):
            threads = dict(program.params)["threads"]
            assert 65536 // (threads * launches[0].resources.registers) >= 2


def test_memory_bound_products_add_up_to_four_matrices_in_their_epilogue():
    """The gradient behind a residual connection: two gradients, the rectifier's mask and what the batch norm read."""
    x, w = (np.zeros(s, jnp.bfloat16) for s in ((64, 56, 56, 64), (1, 1, 64, 256)))
    full, mask = np.zeros((64, 56, 56, 256), jnp.bfloat16), np.zeros((64, 56, 56, 256), bool)

    def gradients(x, w, other, mask, read, also):
        d = jnp.where(mask, conv(x, w) + other, 0).astype(jnp.bfloat16)
        wide = d.astype(jnp.float32)
        return d, *(jnp.sum(each, rows_of(d)) for each in (wide, wide * read, wide * also))

    for count in (3, 4):
        arguments = x, w, full, mask, full, full if count == 4 else np.zeros(256, jnp.bfloat16)
        found = gpu_candidates.candidates(programs.trace_sums(gradients, *arguments), MACHINE, 3)
        stages = [dict(program.params)["stages"] for program, _ in found if "groups" in dict(program.params)]
        assert stages and set(stages) == {1}


def test_the_second_launch_is_part_of_the_predicted_time():
    x, w, b = np.zeros((4096, 256), np.float32), np.zeros((256, 256), np.float32), np.zeros(256, np.float32)
    sums = MmaTile(128, 64, 32, (2, 2, 1), 3, 1).of(gemm_of(dense_statistics, x, w, b))
    alone = MmaTile(128, 64, 32, (2, 2, 1), 3, 1).of(programs.trace(lambda x, w, b: x @ w + b, x, w, b).product())
    more = kernel_time(sums, MACHINE).seconds - kernel_time(alone, MACHINE).seconds
    assert 1e-6 < more < 5e-6


def test_families_whose_epilogue_reduces_no_columns_are_refused_by_the_registry():
    x, w, b = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32), np.zeros(64, np.float32)
    program = MMA[0].of(gemm_of(dense_statistics, x, w, b))
    assert family_of(program).name == "mma"
    for more in (("fed", 1), ("groups", (1, 1))), (("fma", 1),):
        assert not any(FAMILIES[name].match(replace(program, params=(*program.params, *more))) for name in FAMILIES)
    for more in (("split", 2),), (("cluster", 2),), (("sums", 1),):
        params = {**dict(program.params), **dict(more)}
        with pytest.raises(CompileRejected):
            compiler.compile_program(replace(program, params=tuple(params.items())), SM90)


def refusal(fn, *arguments):
    traced = programs.trace(fn, *arguments)
    found = lower_region_or_column_sums(traced.graph, traced.everything)
    return "" if isinstance(found, Program) else found.reason


def test_what_is_no_column_sum_is_refused():
    x, w = normal(8, 6, 16), normal(16, 24)

    def summed(sums, precision=None):
        def fn(x, w):
            y = jnp.matmul(x, w, precision=precision)
            return y, sums(y)

        return fn

    assert match_column_sums(gemm_of(summed(lambda y: jnp.sum(y, (0, 1))), x, w))
    assert "rows" in refusal(summed(lambda y: jnp.sum(y, 0)), x, w)  # not over all rows
    assert refusal(summed(lambda y: jnp.sum(y, 2)), x, w)  # over columns
    assert refusal(summed(lambda y: jnp.max(y, (0, 1))), x, w)  # no sum
    assert "depends on its column sums" in refusal(summed(lambda y: y - jnp.sum(y, (0, 1))), x, w)
    assert "precision" in refusal(summed(lambda y: jnp.sum(y, (0, 1)), "highest"), x, w)
    few = normal(2, 9, 9, 3), normal(3, 3, 3, 16)  # pixels of three channels: for kernels of few channels
    assert "precision" in refusal(lambda x, w: statistics(conv(x, w)), *few)
