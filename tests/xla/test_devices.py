"""Which GPUs kernels are made for, and the sentence that says why not: into `explain`, and to the user."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, UsageError
from jcuts.base.settings import Settings
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.codegen.cuda.toolchain.image import Resources
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.pipeline import passes as pipeline_passes
from jcuts.xla import cuda_launcher
from jcuts.xla import devices as xla_devices
from tests.xla.test_cuda_launcher import driver  # noqa: F401 - a fixture

H200 = xla_devices.Gpu("NVIDIA H200", (9, 0), 132)


@pytest.fixture
def everything_else_works(monkeypatch):
    """As if launcher, driver and compilers were here; the test breaks one thing."""
    monkeypatch.setattr(xla_devices, "this", lambda: H200)
    monkeypatch.setattr(cuda_launcher, "available", lambda: "")
    monkeypatch.setattr(compiler, "available", lambda: "")
    monkeypatch.setattr(cuda_launcher, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(ptxas, "toolkit", lambda: (13, 0))
    assert xla_devices.unusable() == ""


def explained():
    """The note in the report of a function that is planned for a GPU."""
    closed = jax.make_jaxpr(jax.nn.softmax)(np.zeros((64, 64), np.float32))
    outcome = pipeline_passes.optimize_jaxpr(closed, Settings(tune="off"), platform="cuda", may_measure=False)
    assert outcome.closed is closed
    (note,) = outcome.report.notes
    return note


def test_a_device_without_a_capability_is_no_nvidia_gpu():
    device = SimpleNamespace(device_kind="Other", compute_capability="gfx90a")
    with pytest.raises(UsageError, match="Other has no compute capability") as error:
        xla_devices.describe(device)
    assert error.value.values["device"] == "Other"


@pytest.mark.parametrize("capability, what", [((7, 5), "7.5 is older than 8.0"), ((10, 0), "capability 10.0, kernels")])
def test_capabilities_out_of_range_are_left_to_xla(everything_else_works, monkeypatch, capability, what):
    monkeypatch.setattr(xla_devices, "this", lambda: xla_devices.Gpu("some GPU", capability, 100))
    assert what in xla_devices.unusable()
    note = explained()
    assert note.startswith("left to XLA:") and what in note


def test_a_driver_older_than_the_assembler_is_left_to_xla(everything_else_works, monkeypatch):
    monkeypatch.setattr(cuda_launcher, "driver_version", lambda: (12, 4))
    note = explained()
    assert "supports CUDA 12.4, the assembler is of CUDA 13.0" in note and "update the driver" in note


def test_no_driver_is_left_to_xla(everything_else_works, monkeypatch):
    monkeypatch.setattr(cuda_launcher, "available", lambda: "libcuda.so.1 cannot be opened")
    assert "libcuda.so.1 cannot be opened" in explained()


@pytest.mark.parametrize(
    "driver_, toolkit, good",
    [
        ((13, 0), (13, 0), True),
        ((13, 0), (13, 5), True),
        ((13, 0), (12, 8), True),
        ((12, 9), (13, 0), False),
        (None, (13, 0), True),
        ((12, 0), None, True),
    ],
)
def test_code_runs_on_drivers_of_its_major_version(driver_, toolkit, good):
    assert (cuda_launcher.too_old(driver_, toolkit) == "") is good


def test_the_driver_says_its_version(driver, monkeypatch):  # noqa: F811
    code = "import sys; from jcuts.xla import cuda_launcher as cuda; print(cuda.driver_version(sys.argv[1]))"
    run = [sys.executable, "-c", code, str(driver)]
    for number, text in (("12040", "(12, 4)"), ("13000", "(13, 0)")):
        env = {**os.environ, "FAKE_DRIVER_VERSION": number, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout.strip() == text
    assert cuda_launcher.driver_version("libno-such-cuda.so") is None


def test_a_kernel_that_needs_more_than_the_device_has_is_rejected():
    fits = Resources(registers=64, stack=0, shared=200_000)
    compiler.check_limits("softmax", fits, 256, CudaTarget((9, 0)))
    with pytest.raises(CompileRejected, match="softmax: a block needs 200000 bytes of shared memory, sm_80") as error:
        compiler.check_limits("softmax", fits, 256, CudaTarget((8, 0)))
    assert error.value.values == {"shared": 200_000, "limit": 166_912}
    with pytest.raises(CompileRejected, match="1024 threads with 128 registers each needs 131072") as error:
        compiler.check_limits("softmax", Resources(128, 0, 0), 1024, CudaTarget((9, 0)))
    assert error.value.values["limit"] == 65_536
