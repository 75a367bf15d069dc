"""Runs a candidate once on given inputs, as a check does: a kernel on the CPU or a GPU, or a program of XLA's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jcuts.base.errors import CandidateRejected, WorkerFailed
from jcuts.codegen.artifact import CompiledKernel
from jcuts.codegen.cuda.toolchain.image import is_image
from jcuts.tune.kernel_file import read_kernel
from jcuts.tune.measure.cpu_launch import Launcher, Schedule
from jcuts.tune.problem import Candidate, decode_bytes
from jcuts.tune.resource_errors import is_memory
from jcuts.tune.verify.inputs import whole
from jcuts.tune.worker import problem_files

POISON = (0xFF, 0xAB)
"""What results hold before a run, by turns: NaN first, which differs from zero wherever all elements are compared."""


def kernel_runner(path: str) -> Callable[[list[np.ndarray], int], list[np.ndarray]]:
    kernel = read_kernel(Path(path))
    if is_image(kernel.object_code):
        return gpu_runner(kernel)
    launcher = Launcher(kernel)
    tiles = launcher.kernel.tiles
    # Tiles are independent: any order, any grouping, several at once.
    schedules = (Schedule(), Schedule(1, backward=True), Schedule(max(1, tiles // 3), threads=2))

    def run(inputs: list[np.ndarray], number: int) -> list[np.ndarray]:
        operands = [whole(x, shape) for x, (shape, _) in zip(inputs, kernel.inputs, strict=True)]
        return launcher.run(operands, schedules[number % len(schedules)], poison=POISON[number % 2])

    return run


def gpu_runner(kernel: CompiledKernel) -> Callable[[list[np.ndarray], int], list[np.ndarray]]:
    """Runs on the GPU through the driver, without JAX.  A lost context ends the process: the candidate is to blame."""
    from jcuts.base.errors import NativeError
    from jcuts.tune.measure import cuda_driver, gpu_launch

    launcher = gpu_launch.GpuLauncher(kernel, cuda_driver.device())

    def run(inputs: list[np.ndarray], number: int) -> list[np.ndarray]:
        try:
            # What it does to its operands does not depend on their values: one look is enough.
            return launcher.run(inputs, poison=POISON[number % 2], look=number == 0)
        except NativeError as error:
            if gpu_launch.is_context_lost(error) or cuda_driver.is_lost(error):
                print(f"{kernel.digest}: {error.message}", file=sys.stderr, flush=True)
                os._exit(70)
            if is_memory(error):
                raise WorkerFailed(error.message, **{**error.values, "reason": "memory"}) from error
            raise CandidateRejected(error.message, **error.values) from error

    return run


def xla_runner(candidate: Candidate) -> Callable[[list[np.ndarray], int], list[np.ndarray]]:
    jax = problem_files.import_jax()
    data = json.loads(candidate.payload)
    exported = jax.export.deserialize(bytearray(decode_bytes(data["artifact"]) or b""))
    program = jax.jit(exported.call, compiler_options=data["compiler_options"] or None)
    shapes = [a.shape for a in exported.in_avals]

    def run(inputs: list[np.ndarray], _: int) -> list[np.ndarray]:
        operands = [whole(x, shape) for x, shape in zip(inputs, shapes, strict=True)]
        return [np.asarray(x) for x in jax.tree.leaves(program(*operands))]

    return run


def convolve(request: dict[str, Any], announce: Callable[[str], None]) -> dict[str, Any]:
    """Times cuDNN's algorithms for a convolution, or XLA's own one; imports JAX, which most processes do without."""
    from jcuts.tune.cudnn import worker

    asked = worker.convolve_xla if request["op"] == "convolve_xla" else worker.measure_cudnn_algorithms
    return asked(request, announce)
