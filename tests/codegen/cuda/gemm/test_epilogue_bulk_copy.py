"""What the exit of a product keeps in shared memory: every type and kind of operand, through the PTX machine."""

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
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm.epilogue_smem import LOADED, SENT, STORED, staged_epilogue
from jcuts.schedule.gpu.gemm.memory_bound import best, blocks_per_sm, memory_bound_tiles, time
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from tests import programs
from tests.codegen.cuda.gemm.test_mma import SM90, compare, compiled, normal, product_of, run, tf32
from tests.codegen.cuda.gemm.test_wgmma import EPS, run_rounded
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = gpu_candidates.GpuMachine(132)
TILES = [
    WgmmaTile(64, 64, 32, (1, 1), 3, rounded=1),
    WgmmaTile(128, 64, 32, (2, 1), 3, rounded=1, spread=1, steps=2),
    WgmmaTile(64, 128, 32, (1, 2), 3, rounded=1),
    WgmmaTile(128, 96, 32, (2, 1), 3, rounded=1, early=1),
]


def exact(x, dtype):
    """What the units take of an operand, in float64."""
    return tf32(x) if dtype == "float32" else x.astype(np.float64)


def layer(x, w, b, r):
    return jax.nn.relu(x @ w.T + b + r)


@compiled
@pytest.mark.parametrize("how", [LOADED, STORED, SENT])
@pytest.mark.parametrize("tiling", TILES, ids=str)
@pytest.mark.parametrize("size", [(128, 64, 128), (70, 164, 68), (65, 76, 200)])
def test_a_residual_of_sizes_that_divide_nothing(size, tiling, how):
    m, k, n = size
    x, w, b, r = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n), normal(m, n, seed=2)
    wanted = np.maximum(tf32(x) @ w.T.astype(np.float64) + b + r, 0)
    compare(run_rounded(layer, (x, w, b, r), replace(tiling, held=how)), [wanted], 3e-6)


@compiled
@pytest.mark.parametrize("tiling", [replace(TILES[0], held=STORED), replace(TILES[2], held=STORED, early=1)], ids=str)
def test_several_matrices_and_results(tiling):
    """Two that are added (one of them twice), one across the result, a vector along the rows, three results."""

    def many(x, w, b, r, s, t, c):
        y = x @ w.T + b
        return y * r + s, jnp.tanh(y + t.T) + r, y + c

    m, k, n = 66, 96, 72
    x, w, b, c = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(n), normal(m, 1)
    r, s, t = normal(m, n, seed=2), normal(m, n, seed=3), normal(n, m)
    y = tf32(x) @ w.T.astype(np.float64) + b
    compare(run_rounded(many, (x, w, b, r, s, t, c), tiling), [y * r + s, np.tanh(y + t.T) + r, y + c], 3e-6)


@compiled
@pytest.mark.parametrize("held", [LOADED, STORED])
@pytest.mark.parametrize("dtype", ["float32", *EPS])
def test_operands_that_are_arguments(dtype, held):
    m, k, n = 70, 136, 200
    x, w, r = (normal(*s, seed=i).astype(jnp.dtype(dtype)) for i, s in enumerate(((m, k), (k, n), (m, n))))
    wanted = exact(x, dtype) @ exact(w, dtype) + r.astype(np.float64)
    item = 4 if dtype == "float32" else 2
    flight = int(item == 4)
    tilings = WgmmaTile(64, 64, 128 // item, (1, 1), 3, flight), WgmmaTile(128, 128, 128 // item, (2, 1), 3, flight)
    for tiling in tilings:
        found = run(lambda x, w, r: x @ w + r, (x, w, r), replace(tiling, held=held))
        compare(found, [wanted], 3e-6 if item == 4 else 3.2 * EPS[dtype])  # a sum is rounded twice


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_without_warp_groups_ask_early(dtype):
    """A prefetch for every 64 bytes of the added matrix in the tile, and the same results."""
    x, w, r = (normal(*s, seed=i).astype(jnp.dtype(dtype)) for i, s in enumerate(((70, 72), (72, 104), (70, 104))))
    wanted = exact(x, dtype) @ exact(w, dtype) + r.astype(np.float64)
    tiling = MmaTile(32, 64, 32, (2, 2, 1), 3, 1, early=1)
    found = run(lambda x, w, r: x @ w + r, (x, w, r), tiling)
    compare(found, [wanted], 3e-6 if dtype == "float32" else 3.2 * EPS[dtype])
    program = tiling.of(product_of(lambda x, w, r: x @ w + r, x, w, r))
    assert compiler.ptx_of(program, SM90).count("prefetch.global.L2") == -(-32 * 64 * x.itemsize // 64 // 128)


@compiled
def test_types_beside_each_other():
    """A matrix of 16 bits beside float32 products, and results of both types."""
    m, k, n = 70, 64, 72
    x, w, r = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(m, n, seed=2).astype(jnp.bfloat16)
    y = tf32(x) @ w.T.astype(np.float64) + r.astype(np.float64)

    def both(x, w, r):
        y = x @ w.T + r.astype(jnp.float32)
        return y, y.astype(jnp.bfloat16)

    plain, narrow = run_rounded(both, (x, w, r), replace(TILES[0], held=STORED))
    compare([plain], [y], 3e-6)
    compare([narrow], [y], 2.1 * EPS["bfloat16"])


@compiled
@pytest.mark.parametrize("held", [LOADED, STORED])
def test_batches_and_images(held):
    q, k, r = normal(2, 66, 64), normal(2, 72, 64, seed=1), normal(2, 66, 72, seed=2)
    scores = np.einsum("bqd,bkd->bqk", tf32(q), tf32(k)) + r
    tiling = WgmmaTile(64, 64, 32, (1, 1), 3, 1, held=held)
    compare(run(lambda q, k, r: jnp.einsum("bqd,bkd->bqk", q, k) + r, (q, k, r), tiling), [scores])
    x, w, r = normal(2, 7, 6, 32), round_tf32(normal(40, 3, 3, 32)), normal(2, 7, 6, 40, seed=1)
    layout = ("NHWC", "OHWI", "NHWC")
    with jax.enable_x64(True):
        wanted = np.asarray(conv(jnp.asarray(tf32(x)), jnp.asarray(w.astype(np.float64)), layout=layout)) + r
    found = run_rounded(lambda x, w, r: conv(x, w, layout=layout) + r, (x, w, r), replace(TILES[0], held=held))
    compare(found, [wanted], 3e-6)


@compiled
def test_results_alone():
    """They are put where operands were."""
    x, w = normal(70, 64), round_tf32(normal(136, 64, seed=1))
    wide = WgmmaTile(64, 128, 32, (1, 1), 2, rounded=1, held=STORED)
    for tiling in (replace(TILES[0], stages=2, held=STORED), wide):
        compare(run_rounded(lambda x, w: x @ w.T, (x, w), tiling), [tf32(x) @ w.T.astype(np.float64)], 3e-6)


@compiled
def test_the_machine_sees_what_bulk_copies_do_wrong():
    x, w, b, r = normal(64, 64), round_tf32(normal(64, 64, seed=1)), normal(64), normal(64, 64, seed=2)
    traced = programs.trace(layer, x, w, b, r)
    program = replace(TILES[0], stages=2, held=STORED).of(traced.product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    for change, what in (
        (r"mbarrier.init.shared.b64", "no barrier"),
        (r"cp.async.bulk.wait_group.read 0", "before its bulk copies"),
        (r"bar.sync 0", "may not be there|before a barrier"),
        (r"fence.proxy.async.shared::cta", "proxy fence"),
        (r"mbarrier.try_wait", "under way"),
    ):
        changed = re.sub(rf"{change}[^;]*;", "setp.eq.u32 p, 0, 0;" if "try" in change else "", ptx)
        with pytest.raises((TensorFault, ptx_machine.Fault), match=what):
            ptx_machine.run_kernel(changed, kernel, traced.operands())


@compiled
def test_the_code_is_what_the_tiling_says():
    """One bulk copy per row that comes, one that leaves, and no access of the added matrix or the result by lanes."""
    shapes = ((512, 64), (256, 64), (256,), (512, 256))
    traced = programs.trace(layer, *(np.zeros(s, np.float32) for s in shapes))
    ptx = compiler.ptx_of(WgmmaTile(128, 64, 32, (2, 1), 2, rounded=1, held=STORED).of(traced.product()), SM90)
    assert ptx.count("cp.async.bulk.shared::cluster") == ptx.count("cp.async.bulk.global") == 1
    assert ptx.count("ld.shared.v4.b32") == ptx.count("st.shared.v4.b32") == 128 * 64 // 4 // 256
    assert ptx.count("ld.global.nc") == 64 // 16 and "st.global" not in ptx


def test_what_is_kept():
    """Two tiles of rows of 64 floats, 64 bytes apart from their banks; results lie where an added matrix was."""

    def two(x, w, r, t):
        y = x @ w
        return y + r + t.T, y * 2

    x, w, r = np.zeros((256, 64), np.float32), np.zeros((64, 64), np.float32), np.zeros((256, 64), np.float32)
    program = product_of(two, x, w, r, r.T)
    found = staged_epilogue(program, 128, 64, STORED, 1000)
    assert [(k.buffer, k.first, k.pitch) for k in found.loaded] == [(program.inputs[2].name, 1024, 320)]
    assert [(n, k.first) for n, k in found.stored] == [(0, 1024), (1, 1024 + 128 * 320)]
    assert found.end == 1024 + 2 * 128 * 320
    assert staged_epilogue(program, 128, 64, LOADED, 1000).end == 1024 + 128 * 320
    assert staged_epilogue(program, 128, 64, 0, 1000).end == 1000
    narrow = product_of(lambda x, w, r: x @ w + r, x, np.zeros((64, 70), np.float32), np.zeros((256, 70), np.float32))
    assert staged_epilogue(narrow, 128, 64, STORED, 0).end == 0  # rows begin anywhere
    with pytest.raises(CompileRejected, match="no product of tiles"):
        emit_source(WgmmaTile(64, 64, 32, (1, 1), 2, 1, cluster=2, held=LOADED).of(program))


def test_schedules_of_products_that_are_bound_by_memory():
    """By hand: 128x64, both tiles of terms at once; shared memory for two blocks, or, asking early, registers for 3."""
    shapes = ((50176, 64), (256, 64), (256,), (50176, 256))
    traced = programs.trace(layer, *(np.zeros(s, np.float32) for s in shapes))
    program = traced.product()
    counter = WgmmaProblem(program, MACHINE)
    kept, asked = (WgmmaTile(128, 64, 32, (2, 1), 2, rounded=1, **way) for way in ({"held": LOADED}, {"early": 1}))
    assert {kept, asked} <= {t for _, t in memory_bound_tiles(counter)}
    shape = group_shape(kept.of(program))
    assert shape.shared == 2 * (128 + 64) * 128 + 128 * 320 + 8
    assert blocks_per_sm(counter, kept) == 2 == (227 << 10) // (shape.shared + 1024)
    assert blocks_per_sm(counter, asked) == 3 == 65536 // (256 * 80)
    limits = [128 * 64 * 64 / 910, (2 * (64 + 64) + 128 + 64) * 256 / 128, counter.moved / 1568 * 132 / 2580]
    work = limits[2] + 0.5 * (limits[0] + limits[1])
    assert time(counter, kept).value == pytest.approx(1568 / 132 / 2 * (485 + 2 * work) * np.exp(0.02))
    assert time(counter, asked).value == pytest.approx(1568 / 132 / 3 * (485 + 3 * work) * np.exp(-0.06))
    chosen = best(counter, 3)
    assert len({(t.rows, t.columns) for _, t in chosen}) == 3 and all(found >= counter.least for found, _ in chosen)
    found = [dict(p.params) for p, _ in gpu_candidates.candidates(traced.rounded(), MACHINE, 3)]
    assert all("early" in params or "held" in params for params in found)
    few = programs.trace(layer, *(np.zeros(s, np.float32) for s in ((4096, 4096), (4096, 4096), (4096,), (4096, 4096))))
    assert not best(WgmmaProblem(few.product(), MACHINE), 3)  # the units are the limit


def test_results_of_two_bytes_leave_in_whole_lines():
    """Lanes have two columns side by side where weights lie across terms: rows go through shared memory."""
    shapes = ((200704, 64), (64, 256), (200704, 256))
    traced = programs.trace(lambda x, w, r: x @ w + r, *(np.zeros(s, jnp.bfloat16) for s in shapes))
    first = dict(gpu_candidates.candidates(traced.program(), MACHINE, 1)[0][0].params)
    assert first["held"] in (STORED, SENT)
