"""Split-K GEMV: what its kernels compute on the PTX machine in both layouts, clusters and splits; what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.gemv.kernel import gemv_program, gemv_tile
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.interpret import interpret
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.few_row_gemm import FewRowGemm
from jcuts.schedule.gpu.gemv.schedules import GemvSchedule, schedule_space
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs
from tests.ptx import machine as ptx_machine

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
H200, A100 = GpuMachine(132, capability=(9, 0)), GpuMachine(108, capability=(8, 0))
compiled = pytest.mark.cuda_compilers


def row_major(x, w, b):
    return jax.nn.gelu(x @ w + b)


def k_major(x, w, b):
    return jax.nn.relu(x @ w.T + b)


def heads(x, w, b):
    return jnp.einsum("hk,hkn->hn", x[:3], w) + b


def queries(x, w, b):
    return jnp.einsum("hmk,hkn->hmn", x, w) + b


def layer(fn, terms, columns, dtype="float32", seed=0, rows=1):
    """A traced layer at batch 1 (or of a few rows) and its arguments."""
    rng = np.random.default_rng(seed)
    shape = (columns, terms) if fn is k_major else (3, terms, columns) if fn in (heads, queries) else (terms, columns)
    shapes = ((3, rows, terms) if fn is queries else (3 if fn is heads else rows, terms), shape, (columns,))
    arguments = [rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes]
    return programs.trace(fn, *arguments), arguments


def gemm_of(traced):
    return traced.product()


def check(fn, traced, arguments, program, target=SM90):
    """Compares with float64, of operands as they are stored."""
    kernel = compiler.compile_program(program, target)
    (got,) = ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, traced.operands())
    with jax.enable_x64(True):
        want = np.asarray(fn(*(np.asarray(a, np.float64) for a in arguments)))
    rounding = float(jnp.finfo(arguments[0].dtype).eps)
    scale = np.sqrt(np.mean(want**2)) + np.abs(want)
    terms = arguments[0].shape[-1]
    error = np.abs(np.asarray(got, np.float64).reshape(want.shape) - want) / scale
    assert error.max() < rounding + 4e-7 * terms**0.5


CASES = {
    "row-major": (row_major, 96, 72, GemvSchedule(4, 4, 2, 8, 128)),
    "row-major, a tail of k and of columns": (row_major, 148, 60, GemvSchedule(4, 4, 1, 8, 128)),
    "row-major, odd": (row_major, 77, 33, GemvSchedule(1, 1, 4, 8, 128)),
    "row-major, one row of threads a warp": (row_major, 64, 200, GemvSchedule(2, 2, 4, 32, 128)),
    "row-major, cluster": (row_major, 260, 36, GemvSchedule(4, 4, 1, 8, 128, cluster=3)),
    "row-major, split over the grid": (row_major, 260, 36, GemvSchedule(4, 4, 1, 8, 128, split=3)),
    "k-major": (k_major, 256, 24, GemvSchedule(4, 4, 1, 2, 64)),
    "k-major, a warp per column": (k_major, 388, 21, GemvSchedule(1, 4, 2, 4, 128)),
    "k-major, odd": (k_major, 101, 13, GemvSchedule(1, 1, 2, 1, 64)),
    "k-major, cluster": (k_major, 1028, 10, GemvSchedule(2, 4, 1, 1, 64, cluster=4)),
    "k-major, split over the grid": (k_major, 1028, 10, GemvSchedule(2, 4, 1, 1, 64, split=3)),
    "heads": (heads, 72, 20, GemvSchedule(4, 4, 1, 4, 64)),
}


@compiled
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_float64(name):
    fn, terms, columns, schedule = CASES[name]
    traced, arguments = layer(fn, terms, columns)
    program = gemm_of(traced)
    made = schedule.apply(program, FewRowGemm.of(program))
    assert family_of(made).name == "gemv"
    check(fn, traced, arguments, made)


ROWS = {
    "row-major": (row_major, 2, 148, 60, GemvSchedule(4, 4, 1, 8, 128)),
    "row-major, odd": (row_major, 3, 77, 33, GemvSchedule(1, 1, 4, 8, 128)),
    "row-major, cluster": (row_major, 4, 260, 36, GemvSchedule(4, 4, 1, 8, 128, cluster=3)),
    "row-major, split over the grid": (row_major, 3, 260, 36, GemvSchedule(4, 4, 1, 8, 128, split=3)),
    "k-major": (k_major, 2, 256, 24, GemvSchedule(4, 4, 1, 2, 64)),
    "k-major, odd": (k_major, 3, 101, 13, GemvSchedule(1, 1, 2, 1, 64)),
    "k-major, cluster": (k_major, 4, 1028, 10, GemvSchedule(2, 4, 1, 1, 64, cluster=4)),
    "k-major, split over the grid": (k_major, 4, 1028, 10, GemvSchedule(2, 4, 1, 1, 64, split=3)),
    "queries": (queries, 3, 72, 20, GemvSchedule(4, 4, 1, 4, 64)),
}


@compiled
@pytest.mark.parametrize("name", ROWS)
def test_few_rows_agree_with_float64(name):
    fn, rows, terms, columns, schedule = ROWS[name]
    traced, arguments = layer(fn, terms, columns, rows=rows)
    program = gemm_of(traced)
    made = schedule.apply(program, FewRowGemm.of(program))
    assert family_of(made).name == "gemv" and {a.name: a.unroll for a in made.phases[0].axes}["m"] == rows
    check(fn, traced, arguments, made)


@compiled
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize("rows", [2, 4])
def test_few_rows_compile_without_local_memory(fn, rows):
    for dtype in ("float32", "bfloat16"):
        program = layer(fn, 2048, 1000, dtype, rows=rows)[0].program()
        found = list(FAMILIES["gemv"].schedules(program, H200))
        assert found
        for made, _ in found:
            for launch in Image.unpack(compiler.compile_program(made, SM90).object_code).launches:
                assert launch.resources.stack == 0 and launch.resources.registers * launch.block[0] <= 65536


def test_a_thread_has_all_rows_or_one():
    program = gemm_of(layer(row_major, 96, 72, rows=4)[0])
    made = GemvSchedule(4, 4, 2, 8, 128).apply(program, FewRowGemm.of(program))
    axes = tuple(replace(a, unroll=2) if a.name == "m" else a for a in made.phases[0].axes)
    with pytest.raises(CompileRejected, match="all rows or one"):
        emit_source(gemv_program(replace(made, phases=(replace(made.phases[0], axes=axes),))))


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("fn", "schedule"),
    [
        (row_major, GemvSchedule(8, 4, 1, 8, 128, cluster=2)),
        (row_major, GemvSchedule(4, 4, 2, 8, 128, split=2)),
        (k_major, GemvSchedule(2, 8, 1, 2, 64)),
        (k_major, GemvSchedule(4, 8, 1, 1, 32, cluster=2)),
    ],
)
def test_16_bit_weights_are_added_up_in_float32(fn, schedule, dtype):
    traced, arguments = layer(fn, 264, 40, dtype)
    program = gemm_of(traced)
    check(fn, traced, arguments, schedule.apply(program, FewRowGemm.of(program)))


@compiled
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize(("terms", "columns"), [(2048, 1000), (333, 77), (64, 4096)])
@pytest.mark.parametrize(("machine", "target"), [(H200, SM90), (A100, SM80)], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedules_compile_without_local_memory(fn, terms, columns, machine, target, dtype):
    traced, _ = layer(fn, terms, columns, dtype)
    found = list(FAMILIES["gemv"].schedules(traced.program(), machine))
    assert bool(found) == (dtype == "float32" or terms % 2 == 0)  # else no copy of four bytes: left to XLA
    for made, score in found:
        assert 0 < score <= 1
        for launch in Image.unpack(compiler.compile_program(made, target).object_code).launches:
            assert launch.resources.stack == 0 and launch.resources.registers * launch.block[0] <= 65536
            assert launch.cluster[0] == 1 or machine is H200


def test_blocks_of_a_cluster_are_neighbours_in_the_grid():
    program = gemm_of(layer(row_major, 2048, 1000)[0])
    made = GemvSchedule(4, 4, 1, 8, 128, cluster=8).apply(program, FewRowGemm.of(program))
    (part,), scratch = split_into_kernels(made)
    source = emit_source(part.program)
    assert (scratch, source.cluster, source.blocks) == (0, 8, 8 * -(-1000 // 32))
    assert gemv_tile(gemv_program(made)).cluster == 8


def test_a_split_over_the_grid_keeps_its_meaning():
    traced, _ = layer(k_major, 1028, 10)
    program = gemm_of(traced)
    made = GemvSchedule(2, 4, 1, 1, 64, split=3).apply(program, FewRowGemm.of(program))
    (first, second), scratch = split_into_kernels(made)
    operands = {b.name: o for b, o in zip(program.inputs, traced.operands(), strict=True)}
    parts = interpret(first.program, [operands[b.name] for b in first.program.inputs])
    assert scratch >= sum(p.nbytes for p in parts)
    operands |= {b.name: p for b, p in zip(first.program.outputs, parts, strict=True)}
    (got,) = interpret(second.program, [operands[b.name] for b in second.program.inputs])
    np.testing.assert_allclose(got, interpret(program, traced.operands())[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"across": 6}, "6 threads along the columns"),
        ({"threads": 40}, "8 threads along the columns"),
        ({"across": 64}, "64 threads of 128"),
    ],
)
def test_inconsistent_parameters_are_refused(change, message):
    program = gemm_of(layer(row_major, 96, 72)[0])
    made = GemvSchedule(4, 4, 2, 8, 128).apply(program, FewRowGemm.of(program))
    params = tuple((k, change.get(k, v)) for k, v in made.params)
    with pytest.raises(CompileRejected, match=message):
        emit_source(gemv_program(replace(made, params=params)))


@pytest.mark.parametrize("machine", [H200, A100], ids=["sm_90", "sm_80"])
def test_a_layer_at_batch_1_is_tried_as_gemv_first(machine):
    fn = row_major
    found = gpu_candidates.candidates(layer(fn, 2048, 1000)[0].program(), machine, 8, percent=10)
    names = [family_of(p).name for p, _ in found]
    assert names[0] == "gemv" and len({*names}) > 1
    for rows, tried in ((2, True), (4, True), (5, False)):
        found = gpu_candidates.candidates(layer(fn, 2048, 1000, rows=rows)[0].program(), machine, 100)
        assert any(family_of(p).name == "gemv" for p, _ in found) is tried


def test_clusters_need_capability_9():
    program = gemm_of(layer(row_major, 4096, 256)[0])
    found = {m: [dict(p.params) for p, _ in schedule_space(program, m)] for m in (H200, A100)}
    assert any("cluster" in params for params in found[H200])
    assert any("split" in params for params in found[A100])
    assert not any("cluster" in params for params in found[A100])
