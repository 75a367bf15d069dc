"""The performance model of chosen kernels in the report: times in order, PUL, of GPU kernels from their cubins."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jcuts
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.pipeline.predictions import Prediction, predict
from jcuts.report.report_data import HEADINGS, rows
from jcuts.schedule.gpu import candidates
from jcuts.schedule.gpu.machine import GpuMachine
from jcuts.xla import devices as xla_devices
from tests import programs


def test_the_report_names_what_is_measured_predicted_and_bound():
    fast = jcuts.optimize(lambda x: jnp.tanh(x).sum(0), mode="fusion", tune="off")
    report = fast.explain(np.ones((512, 2048), np.float32))
    chosen = [s for s in report.subsets if s.chosen != "xla"]
    assert chosen
    for one in chosen:
        assert one.predicted_seconds >= one.bound_seconds > 0 and 0 < one.pul <= 1 and 0 < one.score <= 1
    assert [len(row) for row in rows(report)] == [len(HEADINGS)] * len(report.subsets)
    at = {name: rows(report)[0][HEADINGS.index(name)] for name in ("predicted us", "bound us", "PUL", "score")}
    assert float(at["PUL"]) >= 0 and float(at["predicted us"]) >= float(at["bound us"]) and float(at["score"]) > 0


@pytest.fixture
def on_an(monkeypatch):
    def on(name, sms):
        monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu(f"NVIDIA {name}", (9, 0), sms))

    return on


@pytest.mark.cuda_compilers
def test_a_gpu_kernel_has_the_pul_of_its_cubin(on_an):
    plain = programs.trace(lambda x: jnp.tanh(x) + 1, jnp.zeros((4096, 4096))).program()
    program, _ = candidates.candidates(plain, GpuMachine.named("H200"), 1, 100.0)[0]
    winner = program, compiler.compile_program(program, CudaTarget((9, 0)))
    on_an("H200", 132)
    here = predict(winner)
    on_an("H100 80GB HBM3", 132)
    slower = predict(winner)
    moved = 2 * 4 * 4096 * 4096
    assert 0 < here.pul <= 1 and here.seconds > moved / 4.815e12
    assert slower.seconds > 1.2 * here.seconds and slower.seconds > moved / 3.352e12


def test_what_is_left_to_xla_has_no_prediction():
    assert predict((None, None)) == Prediction()


def test_a_kernel_that_is_not_compiled_is_predicted_from_its_schedule(on_an):
    plain = programs.trace(lambda x: jnp.tanh(x) + 1, jnp.zeros((4096, 4096))).program()
    program, _ = candidates.candidates(plain, GpuMachine.named("H200"), 1, 100.0)[0]
    on_an("H200", 132)
    found = predict((program, None))
    assert found.seconds > found.bound > 0 and 0 < found.pul <= 1
