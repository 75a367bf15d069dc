"""Which programs are products, in what terms; their schedules are legal, few and ranked."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda.gemm.mma_mainloop import product_shape
from jcuts.codegen.cuda.gemm.wgmma_tile import group_shape
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.gemm import as_gemm, gemm_operands, k_tiles_per_split, k_vectors, prologue
from jcuts.lower.region import lower_region
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.gemm import mma as gemm_mma
from jcuts.schedule.gpu.gemm import wgmma as gemm_wgmma
from jcuts.schedule.gpu.gemm.problem import MmaTile
from jcuts.schedule.gpu.gemm.wgmma_problem import WgmmaProblem
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.gemv import schedules as gemv_schedules
from tests import programs
from tests.ops.cases import conv

MACHINE = gpu_candidates.GpuMachine(132)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


PRODUCTS = {
    "plain": (lambda x, w: x @ w, (normal(49, 96), normal(96, 32)), [(True, 4), (False, 4)]),
    "odd": (lambda x, w: x @ w, (normal(7, 9), normal(9, 5)), [(True, 1), (False, 1)]),
    "two by two": (lambda x, w: x @ w, (normal(7, 10), normal(10, 6)), [(True, 2), (False, 2)]),
    "transposed": (lambda x, w: x.T @ w.T, (normal(96, 12), normal(32, 96)), [(False, 4), (True, 4)]),
    "result transposed": (lambda x, w: (x @ w).T, (normal(12, 96), normal(96, 32)), [(False, 4), (True, 4)]),
    "one row": (lambda x, w: x @ w, (normal(1, 96), normal(96, 32)), [(True, 4), (False, 4)]),
    "batch": (
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        (normal(2, 8, 3, 16), normal(2, 9, 3, 16)),
        [(True, 4), (True, 4)],
    ),
    "stride": (
        lambda x, w: conv(x, w, strides=(2, 2)),
        (normal(1, 13, 14, 24), normal(1, 1, 24, 8)),
        [(True, 4), (False, 4)],
    ),
    "channels first": (
        lambda x, w: conv(x, w, layout=("NCHW", "OIHW", "NCHW")),
        (normal(1, 12, 6, 6), normal(20, 12, 1, 1)),
        [(True, 4), (False, 4)],
    ),
    "3x3": (
        lambda x, w: conv(x, w, strides=(2, 1)),
        (normal(2, 9, 8, 24), normal(3, 3, 24, 12)),
        [(True, 4), (False, 4)],
    ),
    "5x1 without padding": (
        lambda x, w: conv(x, w, padding="VALID", dilation=(2, 1)),
        (normal(1, 13, 8, 10), normal(5, 1, 10, 7)),
        [(True, 2), (False, 1)],
    ),
    "bfloat16": (
        lambda x, w: x @ w,
        (normal(5, 96).astype(jnp.bfloat16), normal(96, 32).astype(jnp.bfloat16)),
        [(True, 8), (False, 8)],
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_keep_their_meaning(name):
    fn, arguments, layouts = PRODUCTS[name]

    def more(*xs):
        return jax.nn.relu(fn(*xs) * 2 + 1)

    traced = programs.trace(more, *arguments)
    program = traced.program()
    product = as_gemm(program)
    assert product is not None
    verify(product)
    assert [(s.along_terms, s.width) for s in gemm_operands(product)] == layouts
    for got, want in zip(interpret(product, traced.operands()), interpret(program, traced.operands()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_is_computed_before_a_product():
    """It stays what it was, and only warp groups whose weights are rounded have schedules for it."""

    def norm(x, w, s, b):
        return jax.nn.relu((x - b) * s) @ w.T

    x, w, s, b = normal(4096, 512), normal(64, 512), normal(512), normal(512)
    traced = programs.trace(norm, x, w, s, b)
    program = lower_region(traced.graph, traced.everything, cheap=4.0)
    product = as_gemm(program)
    assert product is not None and prologue(product) is not None
    assert [str(n.index) for n in k_vectors(product)] == ["k", "k"]
    verify(product)
    small = [normal(8, 32), normal(5, 32), normal(32), normal(32)]
    traced = programs.trace(norm, *small)
    little = lower_region(traced.graph, traced.everything, cheap=4.0)
    for got, want in zip(
        interpret(as_gemm(little), traced.operands()), interpret(little, traced.operands()), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    assert gpu_candidates.candidates(program, MACHINE, 100) == []
    right = gemm_operands(product)[1].buffer
    rounded = replace(program, buffers=tuple(replace(b, tf32=b.name == right) for b in program.buffers))
    found = [dict(p.params) for p, _ in gpu_candidates.candidates(rounded, MACHINE, 100)]
    assert found and all(p["rounded"] and "groups" in p for p in found)
    assert sum(p.get("steps") == 2 for p in found) == gemm_wgmma.SPREAD and any("spread" in p for p in found)
    made = as_gemm(rounded)
    for candidate, _ in gpu_candidates.candidates(rounded, MACHINE, 100):
        verify(candidate)
        assert Program.from_json(candidate.to_text()).digest == candidate.digest
    counter = WgmmaProblem(made, MACHINE)
    assert counter.vectors == 2
    for tiling in (t for t in gemm_wgmma.tilings(counter) if t.split == 1):
        assert counter.shared(tiling) == group_shape(tiling.of(made)).shared
    with pytest.raises(CompileRejected, match="no product of tiles"):
        product_shape(MmaTile(32, 32, 16, (2, 2, 1), 3, 1).of(made))


def test_runs_of_terms():
    """Addresses are linear within the channels of a tap; where taps lie side by side without padding, within a row."""

    def run(fn, *arguments):
        return gemm_operands(as_gemm(programs.trace(fn, *arguments).program()))[0]

    x, w = normal(1, 9, 9, 24), normal(3, 3, 24, 8)
    assert (run(conv, x, w).run, run(conv, x, w).step) == (24, 1)
    assert run(lambda x, w: conv(x, w, padding="VALID"), x, w).run == 72
    assert run(lambda x, w: conv(x, w), x, normal(1, 1, 24, 8)).run == 24
    assert len(run(conv, x, w).guards) == 2


@pytest.mark.parametrize(
    "fn, arguments",
    [
        (lambda x, w: jnp.dot(x, w, precision="highest"), (normal(64, 64), normal(64, 64))),
        (lambda x, w: jnp.dot(x, w, precision=lax.Precision.HIGH), (normal(64, 64), normal(64, 64))),
        (lambda x, w: x @ jnp.abs(w), (normal(64, 64), normal(64, 64))),
        (lambda x, w: (x + x[::-1]) @ w, (normal(64, 64), normal(64, 64))),
        (lambda x, w: (x * lax.iota(jnp.float32, 64)) @ w, (normal(64, 64), normal(64, 64))),
        (lambda x, w: conv(jnp.abs(x), w), (normal(1, 9, 9, 16), normal(3, 3, 16, 16))),
        (lambda x, w: conv(x, w, groups=2), (normal(1, 9, 9, 16), normal(3, 3, 8, 16))),
        (lambda x, w: conv(x, w, padding=((1, 1), (1, 1)), lhs=(2, 2)), (normal(1, 9, 9, 16), normal(3, 3, 16, 16))),
        (lambda x, w: x @ w, (normal(64, 4), normal(4, 64))),
        (lambda x, w: x @ w, (normal(63, 65).astype(jnp.bfloat16), normal(65, 63).astype(jnp.bfloat16))),
        (lambda x: x @ x.T, (np.ones((8, 16), np.int32),)),
        (lambda x: jnp.einsum("ab,ab->a", x, x), (normal(64, 64),)),
    ],
    ids=[
        "highest",
        "high",
        "computed weights",
        "two operands",
        "positions",
        "padding",
        "groups",
        "stretched",
        "few terms",
        "two bytes apart",
        "integers",
        "rows",
    ],
)
def test_what_is_no_product(fn, arguments):
    assert as_gemm(programs.trace(fn, *arguments).program()) is None


@pytest.mark.parametrize("size", [(49, 960, 320), (1, 100, 1000), (4096, 512, 4096), (13, 17, 19)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schedules_are_few_legal_and_ranked(size, dtype):
    m, k, n = (2 * x if dtype == "bfloat16" and x > 1 else x for x in size)
    x, w = normal(m, k).astype(jnp.dtype(dtype)), normal(k, n).astype(jnp.dtype(dtype))
    program = programs.trace(lambda x, w: x @ w, x, w).program()
    found = gpu_candidates.candidates(program, MACHINE, 100)
    most = gemm_mma.MOST + (gemm_wgmma.SMALL_GRID_CANDIDATES if dtype == "bfloat16" else 0)
    most += gemv_schedules.MOST if m == 1 else 0
    assert 1 < len({p.digest for p, _ in found}) == len(found) <= most
    assert [s for _, s in found] == sorted((s for _, s in found), reverse=True) and found[0][1] <= 1
    for candidate, _ in found:
        verify(candidate)
        assert Program.from_json(candidate.to_text()).digest == candidate.digest
        assert (candidate.inputs, candidate.outputs) == (program.inputs, program.outputs)


def test_the_ranking_fills_the_machine_and_shares_operands():
    def best(m, k, n):
        found = gpu_candidates.candidates(
            programs.trace(lambda x, w: x @ w, normal(m, k), normal(k, n)).program(), MACHINE, 1
        )
        params = dict(found[0][0].params)
        tiles = -(-m // params["tile"][0]) * -(-n // params["tile"][1])
        return params["tile"], tiles * params.get("split", 1) * params.get("cluster", 1)

    tile, _ = best(2048, 256, 2048)
    assert tile[0] * tile[1] >= 64 * 128  # much work: operands are shared by many outputs
    assert best(49, 960, 320)[1] >= 66  # little: at least half of the multiprocessors have some


@pytest.mark.parametrize("dtype, rate", [("float32", 800), ("bfloat16", 1600)])
def test_large_products_are_for_warp_groups_too(dtype, rate):
    """Both families are scored against one bound: 2 M N K operations at the rate of warp groups."""

    def found(m, k, n, machine=MACHINE):
        x, w = np.zeros((m, k), jnp.dtype(dtype)), np.zeros((k, n), jnp.dtype(dtype))
        made = gpu_candidates.candidates(programs.trace(lambda x, w: x @ w, x, w).program(), machine, 100)
        return [(dict(p.params), score) for p, score in made]

    large = found(4096, 4096, 4096)
    tilings = {str({**params, "paired": 0}) for params, _ in large}  # the best one with and without exchanged results
    assert len(tilings) == gemm_wgmma.MOST and all("groups" in params for params, _ in large)
    made = as_gemm(programs.trace(lambda x, w: x @ w, *(np.zeros((4096, 4096), jnp.dtype(dtype)),) * 2).program())
    assert made is not None
    counter = WgmmaProblem(made, MACHINE)
    assert counter.least == 4096**3 / (132 * rate)
    others = gemm_mma.mma_schedules(made, MACHINE, 3, counter.least)
    assert min(score for _, score in large[:3]) > max(score for _, score in others)
    for tiling in gemm_wgmma.tilings(counter):
        assert counter.cycles(tiling) > counter.least
        assert counter.shared(tiling) == group_shape(tiling.of(made)).shared
    in_few_blocks = {str({**params, "paired": 0}) for params, _ in found(784, 512, 128) if "groups" in params}
    assert len(in_few_blocks) == (gemm_wgmma.SMALL_GRID_CANDIDATES if dtype == "bfloat16" else 0)
    for capability in ((8, 0), (10, 0)):
        older = found(4096, 4096, 4096, gpu_candidates.GpuMachine(132, capability=capability))
        assert older and not any("groups" in params for params, _ in older)


def test_cycles_of_rounded_weights():
    """By hand: tiles of 128x256x32 whose units, port and cache take 1152, 1024 and 793 cycles, in 132 blocks."""
    x, w = np.zeros((12 * 128, 4096), np.float32), np.zeros((11 * 256, 4096), np.float32)
    counter = WgmmaProblem(programs.trace(lambda x, w: x @ w.T, x, w).product(), MACHINE)
    tiling = WgmmaTile(128, 256, 32, (2, 1), 4, rounded=1)
    assert tiling in set(gemm_wgmma.tilings(counter))
    limits = [128 * 256 * 32 / 910, (2 * (64 + 256) + 128 + 256) * 128 / 128, (128 + 256) * 128 / 62, 900 / 2 + 50]
    tile = limits[0] + 0.15 * sum(limits[1:]) + 19 * 4
    total = 3600 + 128 * tile + 500 + 4 * 128 * 256 / 62
    moved = 4 * (x.size + w.size + 12 * 128 * 11 * 256) / 2400
    assert counter.cycles(tiling) == pytest.approx(total + 0.29 * moved)
    assert counter.least == 12 * 128 * 11 * 256 * 4096 / (132 * 910)


def test_cycles_of_few_rows():
    """By hand: 24 clusters of four blocks of 64x192, each of which copies its six tiles of terms at once."""
    x, w = np.zeros((384, 768), np.float32), np.zeros((768, 768), np.float32)
    counter = WgmmaProblem(programs.trace(lambda x, w: x @ w.T, x, w).product(), MACHINE)
    tiling = WgmmaTile(64, 192, 32, (1, 1), 6, cluster=4, rounded=1, steps=0, push=1, early=1)
    assert tiling in set(gemm_wgmma.tilings(counter))
    limits = [64 * 192 * 32 / 873, 2 * (64 + 192) * 128 / 151, (64 + 192) * 128 / 63.1, 1220 / 6 + 10.5]
    tile = limits[2] + 0.35 * (limits[0] + limits[1] + limits[3]) + 52.5
    written = 4 * 64 * 192
    total = 285 + 2.7 * 4 + 190 + 6 * tile + 186 + written / 4 / 63.1 + 768 + 45.9 * 4 + written / 13.6
    moved = 4 * (x.size + w.size + x.size) / 1812
    assert counter.cycles(tiling) == pytest.approx(total + 0.4 * moved)
    for other in gemm_wgmma.tilings(counter):
        assert counter.cycles(other) > counter.least
        assert counter.shared(other) == group_shape(other.of(counter.program)).shared


def test_clusters_are_for_gpus_that_have_them():
    program = programs.trace(lambda x, w: x @ w, normal(64, 1024), normal(1024, 1000)).program()

    def clusters(capability):
        found = gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132, capability=capability), 100)
        return [dict(p.params).get("cluster", 1) for p, _ in found]

    assert max(clusters((9, 0))) > 1 == max(clusters((8, 0)))


def test_groups_of_terms():
    for total, terms, split in ((1000, 32, 5), (64, 16, 8), (33, 16, 2), (7, 16, 1)):
        share, groups = k_tiles_per_split(total, terms, split)
        assert groups <= split and share * groups * terms >= total > share * (groups - 1) * terms
