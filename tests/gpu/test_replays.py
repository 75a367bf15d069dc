"""1,000 replays of CUDA graphs that hold jcuts' calls, with other allocations in between (run with ``-m gpu``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from jcuts.xla.cpu_ffi_call import call_kernel
from jcuts.xla.kernel_cache import kernel_for
from tests import programs
from tests.gpu import cases
from tests.gpu.objects import is_called

pytestmark = pytest.mark.gpu
REPLAYS = 1000
EACH = 20
"""Replays between two changes of the memory: XLA records a graph again when its buffers have moved."""
OPTIONS = {"xla_gpu_graph_min_graph_size": 1}

FUNCTIONS = {
    "softmax and columns": (lambda x: jax.nn.softmax(x) + x.sum(0), (cases.normal(2000, 512),)),
    "statistics": cases.CASES["statistics"],
    "depthwise": cases.CASES["depthwise"],
    "full sum": (lambda x: jnp.abs(x).sum() + x[0], (cases.normal(300_007),)),
}


def check_replays(compiled, arguments):
    """Equal bits in 1,000 runs with junk of random sizes made and dropped between them, most of them replays."""
    rng = np.random.default_rng(0)
    arguments = [jax.device_put(x) for x in arguments]
    start = cuda_launcher.executions()
    first = bits(compiled(*arguments))
    calls = cuda_launcher.executions() - start
    assert calls > 0
    start, kept = cuda_launcher.executions(), []
    for number in range(REPLAYS):
        if number % EACH == 0:
            kept.append(jnp.full((int(rng.integers(1, 300_000)),), np.nan))
            if len(kept) > 3:
                del kept[int(rng.integers(0, 3))]
        assert bits(compiled(*arguments)) == first, number
    assert cuda_launcher.executions() - start < calls * REPLAYS / 2  # replays do not come back to the launcher


def bits(results):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_replays_give_equal_bits(name):
    fn, arguments = FUNCTIONS[name]
    run = jcuts.optimize(fn, mode="fusion", tune="off")
    compiled = jax.jit(lambda *xs: run(*xs)).lower(*arguments).compile(compiler_options=OPTIONS)
    assert is_called(compiled)
    check_replays(compiled, arguments)


def test_replays_of_kernels_with_scratch_memory_give_equal_bits():
    fn, arguments = cases.CASES["column sum"]
    program = programs.trace(fn, *arguments).program()
    split = [
        p
        for p, _ in gpu_candidates.candidates(program, xla_devices.machine(), 64)
        if dict(p.params).get("split", 1) != 1
    ]
    kernel = kernel_for(split[0])
    assert kernel.scratch_bytes and len(Image.unpack(kernel.object_code).launches) == 2
    call = jax.jit(lambda x: call_kernel(kernel, call_kernel_input(x)))
    check_replays(call.lower(*arguments).compile(compiler_options=OPTIONS), arguments)


def call_kernel_input(x):
    """Something before the call, so that the graph has more than one node."""
    return x * 1.5
