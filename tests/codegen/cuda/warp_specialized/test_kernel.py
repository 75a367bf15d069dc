"""Products whose operands are brought by warps of their own: against float64, through the PTX machine."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.codegen.cuda import compile as compiler
from jcuts.schedule.gpu.gemm.wgmma_tile import WgmmaTile
from jcuts.schedule.gpu.warp_specialized.schedules import WarpSpecializedTile
from tests import programs
from tests.codegen.cuda.conv.test_implicit_gemm import CASES, exact
from tests.codegen.cuda.gemm.test_mma import SM90, compare, compiled, normal, tf32
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32


def run_fed(fn, arguments, tiling):
    """The results of a kernel that takes argument 1 as it is."""
    traced = programs.trace(fn, *arguments)
    program = tiling.of(traced.product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    return ptx_machine.run_kernel(ptx, kernel, traced.operands())


def dense(x, w, b, r):
    """A product with bias, a matrix that is added, and ReLU."""
    return jax.nn.relu(lax.dot_general(x, w, (((1,), (1,)), ((), ()))) + b + r)


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        WarpSpecializedTile(64, 32, 1, 3, 1),
        WarpSpecializedTile(128, 40, 2, 5, 4, rounds=2),
        WarpSpecializedTile(128, 64, 1, 4, 2, early=1),
        WarpSpecializedTile(192, 48, 3, 4, 4, rounds=3, early=1),
        WarpSpecializedTile(128, 64, 2, 3, 4, rounds=3, beside=1),
        WarpSpecializedTile(128, 32, 1, 4, 2, rounds=2, early=1, beside=1),
        WarpSpecializedTile(192, 32, 3, 3, 4, beside=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows, terms, columns", [(200, 64, 48), (333, 100, 72), (130, 352, 40), (517, 96, 136)])
def test_products_of_odd_sizes(rows, terms, columns, tiling):
    x, w, b, r = normal(rows, terms), round_tf32(normal(columns, terms, seed=1)), normal(columns), normal(rows, columns)
    wanted = np.maximum(tf32(x) @ w.astype(np.float64).T + b + r, 0)
    compare(run_fed(dense, (x, w, b, r), tiling), [wanted], 3e-6)


@compiled
@pytest.mark.parametrize("early", [0, 1])
def test_several_matrices_beside_a_product(early):
    """One comes by the stages (it is used twice), one does not, one lies across; a norm before all; two results."""

    def fn(x, w, r, q, t, s):
        y = jax.nn.relu(x * s) @ w.T
        return y * r + q, jnp.tanh(y + t.T) + r

    m, k, n = 200, 96, 72
    x, w, s = normal(m, k), round_tf32(normal(n, k, seed=1)), normal(k, seed=4)
    r, q, t = normal(m, n, seed=2), normal(m, n, seed=3), normal(n, m)
    y = tf32(np.maximum(x * s, 0)) @ w.astype(np.float64).T
    tiling = WarpSpecializedTile(128, 64, 2, 4, 4, rounds=2, early=early, beside=1)
    compare(run_fed(fn, (x, w, r, q, t, s), tiling), [y * r + q, np.tanh(y + t.T) + r], 3e-6)


@compiled
def test_the_machine_sees_what_is_wrong_with_stages_beside_a_product():
    """Whoever reads before the copies have come, or gives a stage back before it has been read."""
    x, w, b, r = normal(256, 64), round_tf32(normal(64, 64, seed=1)), normal(64), normal(256, 64, seed=2)
    traced = programs.trace(dense, x, w, b, r)
    program = WarpSpecializedTile(128, 64, 2, 3, 4, rounds=2, beside=1).of(traced.product())
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    waits = [m.span() for m in re.finditer(r"mbarrier.try_wait.parity[^;]*;", ptx)]
    assert len(waits) == 7
    for start, end in waits:
        changed = f"{ptx[:start]}setp.eq.u32 p, 0, 0;{ptx[end:]}"
        with pytest.raises((TensorFault, ptx_machine.Fault)):
            ptx_machine.run_kernel(changed, kernel, traced.operands())


@compiled
@pytest.mark.parametrize(
    "tiling", [WarpSpecializedTile(64, 32, 1, 3, 1), WarpSpecializedTile(128, 40, 2, 4, 2, rounds=2)], ids=str
)
def test_what_stands_before_a_product(tiling):
    x, w, s, t = normal(200, 96), round_tf32(normal(72, 96, seed=1)), normal(96, seed=2), normal(96, seed=3)
    fn = lambda x, w, s, t: jax.nn.relu(x * s + t) @ w.T  # noqa: E731
    wanted = tf32(np.maximum(x * s + t, 0)) @ w.astype(np.float64).T
    compare(run_fed(fn, (x, w, s, t), tiling), [wanted], 3e-6)


@compiled
@pytest.mark.parametrize(
    "tiling", [WarpSpecializedTile(64, 32, 1, 3, 1), WgmmaTile(64, 32, 32, (1, 1), 3, rounded=1)], ids=str
)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: (x * s).astype(jnp.int32).astype(jnp.float32),
        lambda x, s: (x * s > 0).astype(jnp.float32),
        lambda x, s: jnp.where((x > 0) & (s > 0), x, s),
        lambda x, s: (x * s).astype(jnp.bfloat16).astype(jnp.float32) * s,
    ],
    ids=["whole", "positive", "both", "rounded"],
)
def test_other_types_before_a_product(fn, tiling):
    x, w, s = 3 * normal(100, 96), round_tf32(normal(40, 96, seed=1)), normal(96, seed=2)
    wanted = tf32(np.asarray(fn(x, s))) @ w.astype(np.float64).T
    compare(run_fed(lambda x, w, s: fn(x, s) @ w.T, (x, w, s), tiling), [wanted], 3e-6)


@compiled
@pytest.mark.parametrize(
    "tiling",
    [
        WarpSpecializedTile(64, 32, 1, 4, 2, 2),
        WarpSpecializedTile(128, 48, 2, 6, 2, 2, rounds=2),
        WarpSpecializedTile(128, 32, 1, 3, 2, 3, early=1),
        WarpSpecializedTile(64, 40, 1, 8, 4, 2, rounds=3),
        WarpSpecializedTile(128, 24, 2, 5, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_convolutions_of_odd_sizes(case, tiling):
    fn, operands, wanted = exact(case)
    if not tiling.pixels and operands[1].shape[3] % 32:
        pytest.skip("taps end within a tile of terms")
    compare(run_fed(fn, operands, tiling), [wanted], 3e-6)
