"""Persistent recurrences on a GPU: every schedule against float64, again and again, bit for bit (with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.base.errors import CompileRejected, Refusal
from jcuts.schedule.gpu.families import FAMILIES
from jcuts.schedule.gpu.recurrence.parameters import MMA
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests.lower.recurrence.cells import CASES, gru, kalman, lstm, minimal_gated_unit, perceptrons, scalar
from tests.lower.recurrence.test_program import lowered

pytestmark = pytest.mark.gpu

LARGE = {
    "gru of 800, one row": lambda: gru(width=800, steps=200),
    "gru of 800, 16 rows": lambda: gru(width=800, batch=16, steps=60),
    "gru of 77, 3 rows": lambda: gru(width=77, batch=3, steps=50),
    "lstm of 256, 16 rows": lambda: lstm(width=256, batch=16, steps=100),
    "lstm of 1024": lambda: lstm(width=1024, batch=1, steps=50),
    "minimal gated unit of 333": lambda: minimal_gated_unit(width=333, batch=2, steps=80),
    "kalman of 16": lambda: kalman(16, 200),
    "perceptrons of 256": lambda: perceptrons(width=256, batch=1, steps=100),
    "scalar": lambda: scalar(1000),
}
RUNS = 20


def calm(name):
    """A loop whose errors do not grow: its matrices are divided by twice the root of their rows."""
    function, arguments = (LARGE | CASES)[name]()
    scaled = [a / (2 * a.shape[0] ** 0.5 * a.std() + 1) if a.ndim == 2 and a.shape[0] > 5 else a for a in arguments]
    return function, [np.asarray(a, np.float32) for a in scaled]


def checked(programs, operands, wanted, tolerance):
    """Runs schedules again and again, bit for bit, and against float64; how many ran."""
    ran = 0
    for made in programs:
        try:
            kernel = kernel_for(made)
        except CompileRejected:
            continue
        run = jax.jit(lambda *xs, k=kernel: call_kernel(k, *xs))
        first, ran = [np.asarray(x) for x in run(*operands)], ran + 1
        for _ in range(RUNS):
            for mine, again in zip(first, run(*operands), strict=True):
                np.testing.assert_array_equal(mine, np.asarray(again))
        for mine, theirs in zip(first, wanted, strict=True):
            scale = np.sqrt(np.mean(np.square(theirs, dtype=np.float64))) + np.abs(theirs)
            assert (np.abs(mine - theirs) / scale).max() < tolerance, made.params
    return ran


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_every_schedule(name):
    function, arguments = calm(name)
    with jax.default_matmul_precision("highest"):
        program, (operands, wanted) = lowered(function, arguments)
    assert not isinstance(program, Refusal)
    found = list(FAMILIES["recurrence"].schedules(program, xla_devices.machine()))
    assert found
    assert checked([made for made, _ in found], operands, wanted, 2e-5)


@pytest.mark.parametrize("name", [name for name in [*CASES, *LARGE] if "rows" in name or name == "lstm"])
def test_every_schedule_on_tensor_cores(name):
    """Operands are rounded to TF32, 2^-11 of them, in every step of a loop whose errors do not grow."""
    function, arguments = calm(name)
    with jax.default_matmul_precision("highest"):
        _, (operands, wanted) = lowered(function, arguments)
    program, _ = lowered(function, arguments)
    assert not isinstance(program, Refusal)
    found = [p for p, _ in FAMILIES["recurrence"].schedules(program, xla_devices.machine()) if MMA in dict(p.params)]
    assert checked(found, operands, wanted, 5e-3) or name in CASES  # their products are short


def test_beside_other_work():
    """A cooperative launch waits until all its blocks fit; what runs before and behind it changes nothing."""
    function, arguments = calm("gru of 800, one row")
    program, (operands, _) = lowered(function, arguments)
    kernel = kernel_for(next(iter(FAMILIES["recurrence"].schedules(program, xla_devices.machine())))[0])
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ x), x))
    run = jax.jit(lambda *xs: call_kernel(kernel, *xs))
    x = jnp.ones((2048, 2048)) / 2048
    first = [np.asarray(v) for v in run(*operands)]
    for _ in range(RUNS):
        work, found = busy(x), run(*operands)
        work = busy(work)
        for mine, again in zip(first, found, strict=True):
            np.testing.assert_array_equal(mine, np.asarray(again))


@pytest.mark.parametrize("name", ["gru of 800, one row", "lstm of 256, 16 rows", "kalman of 16", "scalar"])
def test_a_function_through_the_decorator(name):
    function, arguments = calm(name)
    ours = jcuts.optimize(function, mode="fusion")
    with jax.enable_x64(True):
        exact = jax.tree.leaves(jax.jit(function)(*(np.asarray(a, np.float64) for a in arguments)))
    plain = jax.tree.leaves(jax.jit(function)(*arguments))
    for mine, xla, theirs in zip(jax.tree.leaves(ours(*arguments)), plain, exact, strict=True):
        theirs = np.asarray(theirs)
        error, own = (np.linalg.norm(np.asarray(v, np.float64) - theirs) for v in (mine, xla))
        assert error < 2 * own + 1e-5 * np.linalg.norm(theirs)
