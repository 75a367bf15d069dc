"""Acceptance of GPU kernels without a GPU: every region of a function, by the product's own rule, on the PTX machine.

XLA's side and the float64 form run on the CPU; products may round their operands to TF32, as on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from jcuts.base.errors import AccuracyRejected, CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.verify import read
from jcuts.tune.baseline.xla_export import with_exports
from jcuts.tune.problem import Candidate, Problem
from jcuts.tune.verify import reference
from jcuts.tune.verify.inputs import whole
from jcuts.tune.worker import requests, runners
from tests.ptx import machine as ptx_machine

TARGET = CudaTarget((9, 0))


class Verdict(NamedTuple):
    """What became of a region's candidate: "" where it was accepted, else why not."""

    region: str
    label: str
    rejected: str


def verdicts(problem: Problem, region: Any, folder: Path, most: int = 1) -> Iterator[Verdict]:
    """Compiles a problem's first candidates and checks them as a measuring process does, but on the PTX machine."""
    full = with_exports(replace(problem, device=""), region.closed, platform="cuda", runs_on="cpu")
    path = folder / "problem.json"
    path.write_text(json.dumps(full.to_json()))
    with jax.enable_x64(True):
        library = jax.jit(jax.export.deserialize(bytearray(full.library or b"")).call)
        kinds = reference.make(jax, full, library, folder, 0)
    request = {"problem": str(path), "folder": str(folder), "kinds": kinds, "kernel": ""}
    for candidate in full.candidates[:most]:
        try:
            with mock.patch.object(runners, "kernel_runner", return_value=_runner(candidate)):
                requests.check({**request, "label": candidate.label}, lambda _: None)
        except (AccuracyRejected, CompileRejected) as error:
            yield Verdict(full.name, candidate.label, f"{type(error).__name__}: {error}")
        else:
            yield Verdict(full.name, candidate.label, "")


def _runner(candidate: Candidate) -> Callable[[list[np.ndarray], int], list[np.ndarray]]:
    """Runs a candidate on a set of inputs, large ones given by the values that they repeat."""
    program = read(candidate.payload)
    kernel, ptx = compiler.compile_program(program, TARGET), compiler.ptx_of(program, TARGET)

    def run(inputs: list[np.ndarray], _: int) -> list[np.ndarray]:
        operands = [whole(x, shape) for x, (shape, _) in zip(inputs, kernel.inputs, strict=True)]
        return ptx_machine.run_kernel(ptx, kernel, operands)

    return run
