"""Shifts of groups of channels as part of the loads of the product behind them: addresses, kernels, whole functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from benchmarks.networks import workloads
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.fusion import greedy
from jcuts.kernel_ir.interpret import interpret
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands
from jcuts.lower.patterns.strided_concat import match_strided_concat
from jcuts.lower.tensor_graph import build_graph
from jcuts.rewrite.simplify import simplify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.trace import jaxapi
from jcuts.trace.inline import inline
from tests import programs
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import round_tf32

SM90 = CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def traced(fn, *arguments):
    """As the pipeline has it: numbers that are converted are literals."""
    closed = simplify(inline(jaxapi.closed_jaxpr_of(fn, *arguments)))
    return programs.Traced(closed, build_graph(closed.jaxpr), arguments)


def by_hand(x):
    """The shift, group by group."""
    _, h, w, c = x.shape
    found = np.zeros_like(x)
    for k in range(9):
        dy, dx, part = k // 3 - 1, k % 3 - 1, slice(c * k // 9, c * (k + 1) // 9)
        for i in range(h):
            for j in range(w):
                if 0 <= i + dy < h and 0 <= j + dx < w:
                    found[:, i, j, part] = x[:, i + dy, j + dx, part]
    return found


def convolved(x, w, b):
    return jax.nn.relu(workloads.conv(workloads.shifted(x), w[None, None]) + b)


def multiplied(x, w, b):
    return jax.nn.relu(workloads.shifted(x).reshape(-1, x.shape[-1]) @ w + b)


def wanted(x, w, b, rounded=False):
    cut = (lambda a: round_tf32(a).astype(np.float64)) if rounded else np.float64
    return np.maximum(cut(by_hand(x)) @ cut(w) + b, 0)


def operands(channels=144, features=48, batch=2, size=(5, 7)):
    return normal(batch, *size, channels), normal(channels, features), normal(features)


def test_the_workload_shifts():
    x = normal(2, 4, 5, 31)
    np.testing.assert_array_equal(workloads.shifted(jnp.asarray(x)), by_hand(x))


def test_which_concatenations_read_past_their_operands():
    def cut(*starts):
        return [(k, 5, {"start_indices": s, "strides": None}) for k, s in enumerate(starts)]

    grid = cut(*((k // 3, k % 3, 4 * k) for k in range(9)))
    found = match_strided_concat(grid, [(6, 6, 4)] * 9, 2)
    assert found is not None and (found.minor, found.steps, found.extent) == (3, ((0, 1), (1, 0), (4, 12)), 4)
    line = match_strided_concat(cut((2, 0), (1, 4), (0, 8)), [(3, 4)] * 3, 1)
    assert line is not None and line.minor == 3 and line.steps == ((-1, -3), (4, 12)) and line.starts == (2, 0)
    bent = [*grid[:4], (4, 5, {"start_indices": (0, 0, 16), "strides": None}), *grid[5:]]
    assert match_strided_concat(bent, [(6, 6, 4)] * 9, 2) is None
    assert match_strided_concat(grid, [(6, 6, 4)] * 8 + [(6, 6, 5)], 2) is None
    assert match_strided_concat([*grid[:8], (8, 6, grid[8][2])], [(6, 6, 4)] * 9, 2) is None
    assert match_strided_concat(grid[:2], [(6, 6, 4)] * 2, 2) is None
    assert match_strided_concat(cut((0,), (4,), (8,)), [(4,)] * 3, 0) is not None
    strided = [(k, 5, {"start_indices": (4 * k,), "strides": (2,)}) for k in range(3)]
    assert match_strided_concat(strided, [(2,)] * 3, 0) is None


@pytest.mark.parametrize("fn", [convolved, multiplied])
def test_one_subset_one_load_nothing_copied(fn):
    arguments = operands()
    whole = traced(fn, *arguments)
    ((members, program),) = greedy.group(whole.graph).subsets
    assert members == whole.everything
    loads = [n for n in program.phases[0].body.nodes if n.op == "load"]
    assert sorted(n.buffer for n in loads) == ["in0", "in1"] and not any(b.role == "local" for b in program.buffers)
    made = as_gemm(program)
    assert made is not None
    left = gemm_operands(made)[0]
    assert left.along_terms and (left.width, left.run) == (4, 16) and len(left.guards) == 2
    assert list(gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132), 4))
    for form in (program, made):
        (found,) = interpret(form, list(arguments))
        np.testing.assert_allclose(found.reshape(-1), wanted(*arguments).reshape(-1), rtol=2e-4, atol=2e-4)


def test_groups_of_different_sizes_stay_a_copy():
    x, w, b = operands(70)
    assert len(greedy.group(traced(convolved, x, w, b).graph).subsets) > 1
    np.testing.assert_allclose(convolved(x, w, b), wanted(x, w, b), rtol=1e-3, atol=1e-3)


@compiled
@pytest.mark.parametrize("fn", [convolved, multiplied])
@pytest.mark.parametrize(
    "channels, tiling",
    [
        (144, MmaTile(32, 32, 16, (2, 2, 1), 3, 1)),
        (288, MmaTile(16, 64, 32, (1, 2, 4), 4, 1)),
        (288, MmaTile(64, 32, 32, (2, 1, 2), 2, 2)),
        (432, MmaTile(64, 48, 16, (2, 3, 1), 3, 1)),
    ],
    ids=str,
)
def test_kernels_of_every_run_of_channels(fn, channels, tiling):
    arguments = operands(channels)
    whole = traced(fn, *arguments)
    product = as_gemm(whole.program())
    assert product is not None
    program = tiling.of(product)
    kernel = compiler.compile_program(program, SM90)
    (found,) = ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, whole.operands())
    want = wanted(*arguments, rounded=True)
    error = np.abs(found.reshape(-1) - want.reshape(-1)).max() / np.sqrt(np.mean(np.square(want)))
    assert error < 2e-6, error


@compiled
def test_kernels_for_warp_groups():
    x, w, b = arguments = operands(288, 64)
    whole = traced(lambda x, w, b: multiplied(x, w.T, b), x, np.ascontiguousarray(w.T), b)
    program = WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1).of(whole.product())
    kernel, given = compiler.compile_program(program, SM90), whole.operands()
    right = next(k for k, x in enumerate(given) if x.shape == w.T.shape)
    given[right] = round_tf32(given[right])
    (found,) = ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, given)
    want = wanted(*arguments, rounded=True)
    assert np.abs(found.reshape(-1) - want.reshape(-1)).max() < 3e-6 * np.sqrt(np.mean(np.square(want)))


@compiled
def test_what_is_proposed_for_large_shifts_assembles():
    arguments = operands(288, 288, batch=64, size=(28, 28))
    for fn in (convolved, multiplied):
        whole = traced(fn, *arguments)
        for program in (whole.program(), whole.rounded()):
            proposed = gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132, capability=(9, 0)), 6)
            assert len(proposed) > 2
            for scheduled, _ in proposed[:2]:
                compiler.compile_program(scheduled, SM90)


def test_whole_functions_run_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JCUTS_CACHE_DIR", str(tmp_path))
    x, w, b = operands()

    @jcuts.optimize(mode="fusion", tune="off")
    def ours(x, w, b):
        return convolved(x, w, b)

    np.testing.assert_allclose(ours(x, w, b), wanted(x, w, b), rtol=2e-4, atol=2e-4)
    report = ours.explain(x, w, b)
    assert [s.operations["concatenate"] for s in report.subsets if s.chosen != "xla"] == [1] and report.kernels == 1
    few = x[..., :18]  # groups of two channels
    np.testing.assert_allclose(ours(few, w[:18], b), wanted(few, w[:18], b), rtol=2e-4, atol=2e-4)
