"""Random programs with GPU kernels, interpreted: PTX in a machine, the rest on the CPU (`on_gpu.py`)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.random_programs import on_gpu, runner
from jcuts.codegen.cuda import compile as compiler
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import devices as xla_devices
from tests import programs

SEED = 70_000_000
pytestmark = [pytest.mark.cuda_compilers, pytest.mark.usefixtures("xla_as_shipped")]


@pytest.mark.parametrize("start, transform", [(SEED, "plain"), (SEED + 20, "plain"), (SEED, "vmap"), (SEED, "grad")])
def test_programs_match_xla(start, transform, cache_dir):
    with on_gpu.on_gpu(interpreted=True):
        verdicts = [runner.run(seed, transform, small=True) for seed in range(start, start + 6)]
    jax.clear_caches()
    ran = [v for v in verdicts if v.status != "unsuitable"]
    assert sum(v.kernels for v in ran) > 0
    assert [f"seed {v.seed} {v.status}: {v.reason}" for v in ran if v.status != "ok"] == []


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32"])
def test_a_callback_sees_no_numbers_of_64_bits(dtype, monkeypatch):
    """Threads of XLA's would take them for numbers of 32 bits."""
    seen = []
    callback = jax.pure_callback

    def watched(function, results, *operands):
        seen.extend(x.dtype.itemsize for x in (*results, *operands))
        return callback(function, results, *operands)

    monkeypatch.setattr(jax, "pure_callback", watched)
    monkeypatch.setattr(xla_devices, "this", lambda: on_gpu.PRETENDED)
    x, wanted = np.arange(-12, 12).reshape(4, 6).astype(dtype), np.arange(12, -12, -1).reshape(4, 6)
    with jax.enable_x64(True):
        program = programs.trace(lambda v: (-v, v.astype(np.int32)), x).program()
        ((candidate, _), *_) = gpu_candidates.candidates(program, gpu_candidates.GpuMachine(132), 1)
        kernel = compiler.compile_program(candidate, xla_devices.target())
        on_gpu._programs[kernel.digest] = candidate
        got, narrow = jax.jit(lambda v: on_gpu.interpret(kernel, v))(x)
    assert got.dtype == dtype and narrow.dtype == np.int32 and max(seen) == 4
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(narrow, x)
