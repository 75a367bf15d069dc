"""Skinny GEMM: what its kernels compute on the PTX machine for 2 to 16 rows, every type and layout; what is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.codegen.cuda.skinny_gemm.tile import skinny_tile
from jcuts.codegen.cuda.split_kernels import split_into_kernels
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.verify import read
from jcuts.lower.patterns.gemm import as_gemm
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.families import FAMILIES, family_of
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.schedule.gpu.skinny_gemm.schedules import SkinnyProblem, SkinnySchedule, schedule_space
from tests import programs
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
H200, A100 = GpuMachine(132, capability=(9, 0)), GpuMachine(108, capability=(8, 0))
compiled = pytest.mark.cuda_compilers


def row_major(x, w, b):
    return jax.nn.gelu(x @ w + b)


def k_major(x, w, b):
    return jax.nn.relu(x @ w.T + b)


def residual(x, w, b, r):
    return x @ w + b + r


def queries(x, w, b):
    return jnp.einsum("hmk,hkn->hmn", x, w) + b


def keys(x, w, b):
    return jnp.einsum("hmk,hnk->hmn", x, w) + b


BATCHED = (queries, keys)


def layer(fn, rows, terms, columns, dtype="float32", seed=0):
    """A traced layer and its arguments."""
    rng = np.random.default_rng(seed)
    batch = (3,) if fn in BATCHED else ()
    weights = (columns, terms) if fn in (k_major, keys) else (terms, columns)
    shapes = [(*batch, rows, terms), (*batch, *weights), (columns,), *([(rows, columns)] if fn is residual else [])]
    arguments = [rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes]
    return programs.trace(fn, *arguments), arguments


def problem_of(traced):
    program = as_gemm(traced.program())
    return program, SkinnyProblem.of(program)


def expected(fn, arguments, target=SM90):
    """The result in float64, of operands as the tensor cores see them."""
    x, w, *more = arguments
    x, w = (round_tf32(a, even=target is SM90) if a.dtype == np.float32 else a for a in (x, w))
    with jax.enable_x64(True):
        return np.asarray(fn(*(jnp.asarray(np.asarray(a, np.float64)) for a in (x, w, *more))))


def check(fn, traced, arguments, program, target=SM90):
    """Compares a schedule on the PTX machine with float64."""
    kernel = compiler.compile_program(program, target)
    (got,) = ptx_machine.run_kernel(compiler.ptx_of(program, target), kernel, traced.operands())
    want = expected(fn, arguments, target)
    scale = np.sqrt(np.mean(want**2)) + np.abs(want)
    error = np.abs(np.asarray(got, np.float64).reshape(want.shape) - want) / scale
    assert error.max() < float(jnp.finfo(arguments[0].dtype).eps) + 4e-7 * arguments[0].shape[-1] ** 0.5


CASES = {
    "row-major": (row_major, 8, 256, 64, "float32", SkinnySchedule(32, 2, 2, 2)),
    "row-major, odd": (row_major, 3, 77, 33, "float32", SkinnySchedule(32, 1, 4, 2)),
    "row-major, pairs of columns": (row_major, 5, 130, 70, "float32", SkinnySchedule(64, 1, 4, 1)),
    "row-major, cluster": (row_major, 16, 518, 36, "float32", SkinnySchedule(32, 1, 4, 2, cluster=3)),
    "row-major, split over the grid": (row_major, 2, 518, 36, "float32", SkinnySchedule(32, 1, 4, 2, split=3)),
    "row-major, 16-bit": (row_major, 8, 260, 80, "bfloat16", SkinnySchedule(64, 1, 4, 2)),
    "row-major, 16-bit, pairs": (row_major, 3, 70, 66, "float16", SkinnySchedule(128, 1, 4, 2)),
    "row-major, 16-bit, cluster": (row_major, 16, 518, 34, "bfloat16", SkinnySchedule(64, 1, 4, 1, cluster=2)),
    "row-major, 64 bytes": (row_major, 8, 256, 64, "float32", SkinnySchedule(16, 2, 2, 2, segment=64)),
    "row-major, 64 bytes, odd": (row_major, 9, 77, 13, "float32", SkinnySchedule(16, 1, 4, 2, segment=64)),
    "row-major, 64 bytes, 16-bit": (row_major, 4, 264, 52, "bfloat16", SkinnySchedule(32, 1, 4, 2, segment=64)),
    "row-major, 64 bytes, 16-bit, pairs": (row_major, 16, 70, 22, "float16", SkinnySchedule(32, 1, 4, 1, segment=64)),
    "row-major, 64 bytes, split": (row_major, 6, 518, 30, "bfloat16", SkinnySchedule(32, 2, 2, 2, split=3, segment=64)),
    "k-major": (k_major, 8, 256, 64, "float32", SkinnySchedule(32, 2, 2, 3)),
    "k-major, odd": (k_major, 7, 77, 13, "float32", SkinnySchedule(16, 1, 4, 2)),
    "k-major, pairs of k": (k_major, 2, 150, 37, "float32", SkinnySchedule(16, 2, 2, 2)),
    "k-major, cluster": (k_major, 11, 1284, 21, "float32", SkinnySchedule(32, 1, 4, 2, cluster=4)),
    "k-major, split over the grid": (k_major, 16, 1028, 21, "float32", SkinnySchedule(16, 2, 2, 2, split=3)),
    "k-major, 16-bit": (k_major, 5, 258, 50, "float16", SkinnySchedule(64, 1, 4, 2)),
    "k-major, 16-bit, split": (k_major, 16, 1000, 37, "bfloat16", SkinnySchedule(32, 1, 4, 2, split=3)),
    "one row": (k_major, 1, 300, 50, "float32", SkinnySchedule(32, 1, 4, 2)),
    "residual": (residual, 6, 96, 40, "float32", SkinnySchedule(32, 1, 4, 1)),
    "queries": (queries, 4, 72, 24, "float32", SkinnySchedule(32, 1, 4, 1)),
    "queries, cluster": (queries, 9, 300, 44, "bfloat16", SkinnySchedule(64, 1, 4, 1, cluster=2)),
    "keys, split": (keys, 13, 264, 40, "float16", SkinnySchedule(32, 1, 4, 1, split=2)),
}


@compiled
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_float64(name):
    fn, rows, terms, columns, dtype, schedule = CASES[name]
    traced, arguments = layer(fn, rows, terms, columns, dtype)
    made = schedule.apply(*problem_of(traced))
    assert family_of(made).name == "skinny_gemm" and SkinnySchedule.of(made) == schedule
    check(fn, traced, arguments, made)


@compiled
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(2, 518, 150), (3, 300, 94), (5, 1030, 70), (16, 260, 130)])
def test_every_proposed_schedule_agrees_with_float64(fn, dtype, rows, terms, columns):
    traced, arguments = layer(fn, rows, terms, columns, dtype)
    small = GpuMachine(8, capability=(9, 0))
    found = list(FAMILIES["skinny_gemm"].schedules(traced.program(), small))
    assert found
    assert all(read(made.to_text()) == made for made, _ in found)  # as a worker process receives it
    for made, score in found[:: 1 if rows == 5 else 3]:
        assert 0 < score <= 1
        check(fn, traced, arguments, made)


@compiled
def test_below_capability_9_the_grid_splits_k():
    traced, arguments = layer(k_major, 8, 1028, 70)
    found = list(FAMILIES["skinny_gemm"].schedules(traced.program(), replace(A100, sms=8)))
    assert any("split" in dict(p.params) for p, _ in found) and not any("cluster" in dict(p.params) for p, _ in found)
    for made, _ in found[:3]:
        check(k_major, traced, arguments, made, SM80)


@compiled
@pytest.mark.parametrize("fn", [row_major, k_major])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(4, 2048, 1000), (16, 334, 78), (8, 128, 4096)])
@pytest.mark.parametrize(("machine", "target"), [(H200, SM90), (A100, SM80)], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedules_compile_without_local_memory(fn, rows, terms, columns, machine, target, dtype):
    found = list(FAMILIES["skinny_gemm"].schedules(layer(fn, rows, terms, columns, dtype)[0].program(), machine))
    assert found
    for made, _ in found[::2]:
        for launch in Image.unpack(compiler.compile_program(made, target).object_code).launches:
            assert launch.resources.stack == 0 and launch.resources.registers * launch.block[0] <= 65536
            assert launch.cluster[0] == 1 or machine is H200


@compiled
def test_weights_known_to_be_rounded_are_not_rounded_again():
    traced, arguments = layer(k_major, 8, 256, 64)
    schedule = SkinnySchedule(32, 2, 2, 2)
    plain, rounded = as_gemm(traced.program()), traced.product()
    count = [
        compiler.ptx_of(schedule.apply(p, SkinnyProblem.of(p)), SM90).count("cvt.rn.tf32") for p in (plain, rounded)
    ]
    assert 0 < count[1] < count[0]
    arguments[1] = round_tf32(arguments[1])
    traced = replace(traced, arguments=tuple(arguments))
    check(k_major, traced, arguments, schedule.apply(rounded, SkinnyProblem.of(rounded)))


@compiled
@pytest.mark.parametrize("segment", [64, 128])
@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_accesses_of_row_major_weights_are_coalesced_and_without_bank_conflicts(segment, dtype, item, monkeypatch):
    """Eight lanes of a copy read whole segments; 128 bytes of shared memory accessed at once have all banks."""
    traced, arguments = layer(row_major, 8, 512, 128, dtype)
    made = SkinnySchedule(segment // item, 1, 4, 2, segment=segment).apply(*problem_of(traced))
    sources, banks = [], set()
    read, place = ptx_machine.Memory.read, ptx_machine.Machine.shared_place

    def reads(self, address, size, what):
        if what.startswith("cp.async.cg"):
            sources.append(address)
        return read(self, address, size, what)

    def places(self, address, size, live, ins):
        found = place(self, address, size, live, ins)
        if size * live.size >= 128 and (ins.op.startswith("cp.async.cg") or ins.op.startswith("ld.shared.v")):
            first = found[1][:, 0].reshape(-1, 128 // size)
            banks.add((ins.op[:8], size, (np.sort(first % 128, 1) == np.arange(0, 128, size)).all()))
        return found

    monkeypatch.setattr(ptx_machine.Memory, "read", reads)
    monkeypatch.setattr(ptx_machine.Machine, "shared_place", places)
    check(row_major, traced, arguments, made)
    lines = np.concatenate(sources).reshape(-1, segment // 16)
    assert (np.diff(lines.astype(np.int64), axis=1) == 16).all() and (lines[:, 0] % segment == 0).all()
    assert {kind for kind, _, _ in banks} == {"cp.async", "ld.share"}
    assert {found[1:] for found in banks} == {(16, True), *([(8, True)] if segment == 64 else [])}


@compiled
@pytest.mark.parametrize("rows", range(2, 17))
def test_all_numbers_of_rows_with_tails_of_row_major_weights(rows):
    """Neither columns nor k are multiples of a tile; rows of W[k, n] are multiples of 16, 8 and 4 bytes."""
    for number, (dtype, columns) in enumerate([("float32", 52 + rows), ("bfloat16", 72 + 2 * rows)]):
        traced, arguments = layer(row_major, rows, 400 + 2 * rows, columns, dtype, rows)
        program, problem = problem_of(traced)
        segment = 128 >> (rows + number) % 2
        made = SkinnySchedule(problem.group(segment), 1, 4, 1 + rows % 3, cluster=1 + rows % 2, segment=segment)
        check(row_major, traced, arguments, made.apply(program, problem))


@compiled
@pytest.mark.parametrize("segment", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_and_infinity_stay_in_their_row_and_column(segment, dtype):
    """The last row of x, the last column and the last k of W: what is copied beyond them has no part in a result."""
    traced, arguments = layer(residual, 5, 138, 78, dtype)
    x, w = arguments[:2]
    x[4, 137], w[137, 77], w[0, 3] = np.nan, np.inf, np.nan
    traced = replace(traced, arguments=tuple(arguments))
    program, problem = problem_of(traced)
    made = SkinnySchedule(problem.group(segment), 1, 4, 2, segment=segment).apply(program, problem)
    kernel = compiler.compile_program(made, SM90)
    (got,) = ptx_machine.run_kernel(compiler.ptx_of(made, SM90), kernel, traced.operands())
    got = np.asarray(got, np.float32)
    assert np.isnan(got[4]).all() and np.isnan(got[:, 3]).all() and np.isinf(got[:4, 77]).all()
    assert np.isfinite(np.delete(got[:4, :77], 3, 1)).all()


@compiled
def test_infinite_weights_stay_where_they_are():
    """Columns beyond the last and k beyond the last are zeros or copies that no result has a part in."""
    traced, arguments = layer(k_major, 3, 77, 33)
    arguments[1][:] = np.abs(arguments[1])
    arguments[1][32, 76] = np.inf
    arguments[0][:] = np.abs(arguments[0]) + 1
    traced = replace(traced, arguments=tuple(arguments))
    made = SkinnySchedule(32, 1, 4, 2).apply(*problem_of(traced))
    kernel = compiler.compile_program(made, SM90)
    (got,) = ptx_machine.run_kernel(compiler.ptx_of(made, SM90), kernel, traced.operands())
    assert np.isinf(got[:, 32]).all() and np.isfinite(got[:, :32]).all()


def test_blocks_of_a_cluster_are_neighbours_in_the_grid():
    made = SkinnySchedule(32, 1, 4, 2, cluster=8).apply(*problem_of(layer(row_major, 4, 2048, 1000)[0]))
    (part,), scratch = split_into_kernels(made)
    source = emit_source(part.program)
    assert (scratch, source.cluster, source.blocks) == (0, 8, 8 * -(-1000 // 32))


def test_a_split_writes_partial_sums_of_float32():
    made = SkinnySchedule(32, 1, 4, 2, split=4).apply(*problem_of(layer(k_major, 4, 1024, 40, "bfloat16")[0]))
    parts, scratch = split_into_kernels(made)
    assert len(parts) == 2 and scratch >= 4 * 4 * 4 * 40


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 64},
        {"tile": (24, 64, 128)},
        {"tile": (8, 40, 128)},
        {"tile": (8, 64, 96)},
        {"warps": (4, 1)},
        {"flight": 3},
        {"cluster": 7},
        {"segment": 32},
    ],
    ids=str,
)
def test_inconsistent_parameters_are_refused(change):
    made = SkinnySchedule(32, 2, 2, 4).apply(*problem_of(layer(row_major, 8, 512, 128)[0]))
    skinny_tile(made)
    params = dict(made.params) | change
    with pytest.raises(CompileRejected, match="no skinny product"):
        emit_source(replace(made, params=tuple(params.items())))


def test_clusters_need_capability_9():
    problem = problem_of(layer(row_major, 8, 4096, 256)[0])[1]
    found = {m: [s for s, _ in schedule_space(problem, m)] for m in (H200, A100)}
    assert any(s.cluster > 1 for s in found[H200]) and any(s.split > 1 for s in found[A100])
    assert not any(s.cluster > 1 for s in found[A100])


@compiled
def test_a_cluster_does_not_compile_below_capability_9():
    program, problem = problem_of(layer(row_major, 8, 512, 128)[0])
    made = SkinnySchedule(32, 1, 4, 2, cluster=2).apply(program, problem)
    with pytest.raises(CompileRejected, match=r"9\.0"):
        compiler.ptx_of(made, SM80)


@pytest.mark.parametrize("machine", [H200, A100], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize(("rows", "tried"), [(1, False), (2, True), (16, True), (17, False)])
def test_layers_of_2_to_16_rows_are_tried_as_skinny_first(machine, rows, tried):
    found = gpu_candidates.candidates(layer(row_major, rows, 2048, 1000)[0].program(), machine, 8, percent=10)
    names = [family_of(p).name for p, _ in found]
    assert ("skinny_gemm" in names) is tried
    assert not tried or (names[0] in ("skinny_gemm", "gemv") and {*names} - {"skinny_gemm", "gemv"})


def test_other_products_are_left_to_others():
    """x whose k are apart, products in full precision, 16-bit rows that no copy of four bytes divides."""

    def apart(x, w):
        return x.T @ w

    def exact(x, w):
        return jnp.dot(x, w, precision="highest")

    zeros = np.zeros
    cases = [(apart, (64, 8)), (exact, (8, 64))]
    for fn, shape in cases:
        program = programs.trace(fn, zeros(shape, np.float32), zeros((64, 96), np.float32)).program()
        assert not list(FAMILIES["skinny_gemm"].schedules(program, H200))
    program = layer(k_major, 8, 77, 32, "bfloat16")[0].program()
    assert not list(FAMILIES["skinny_gemm"].schedules(program, H200))
