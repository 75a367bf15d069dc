"""Measured GPUs: kernels that assemble for every capability, and an architecture that comes out as it went in."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from jcuts.arch.gpu import MEASURED, GpuArch
from jcuts.arch.gpu_file import MEASURED_UNITS, UNITS, to_toml
from jcuts.arch.load import load_gpu, parse_gpu
from jcuts.arch.sm_limits import LIMITS
from jcuts.base.errors import ModelError, NativeError
from jcuts.codegen.cuda.toolchain import ptxas
from jcuts.codegen.cuda.toolchain.target import OLDEST
from jcuts.tune.hardware import gpu_dry_run, gpu_kernels, gpu_machine
from jcuts.tune.hardware.gpu_dry_run import ModelledDevice
from jcuts.tune.hardware.gpu_machine import ceiling, measure_gpu, ring
from jcuts.tune.measure import cuda_driver

assembles = pytest.mark.cuda_compilers
CAPABILITIES = [c for c in (divmod(int(name.removeprefix("sm_")), 10) for name in LIMITS) if c >= OLDEST]
EXACT = [name for name in UNITS if name not in ("perf_peak", "bw_global", "bw_l2", "clock")]


@assembles
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_assemble_without_spills(capability):
    cubin = ptxas.assemble(gpu_kernels.module_text(capability), f"sm_{capability[0]}{capability[1]}")
    found = ptxas.resources(cubin)
    benches = gpu_kernels.benches(capability)
    assert set(found) == {bench.name for bench in benches.values()}
    assert not any(used.stack for used in found.values())
    assert all(used.registers <= 65536 // gpu_kernels.THREADS for used in found.values())


def test_capabilities_have_the_units_of_their_instructions():
    assert "tf32_mma" not in gpu_kernels.benches((7, 5)) and "fp16_mma" in gpu_kernels.benches((7, 5))
    assert "m16n8k8.row.col.f32.f16" in gpu_kernels.module_text((7, 5))
    assert "m16n8k16.row.col.f64" in gpu_kernels.module_text((9, 0))
    assert gpu_kernels.module_text((12, 0)).startswith(".version 8.0\n.target sm_90")  # which newer drivers compile


@assembles
@pytest.mark.parametrize("name", ["H100", "H200", "A100", "RTX 2080"])
def test_a_modelled_device_gives_its_own_numbers(name):
    arch, told = load_gpu(name), []
    device = ModelledDevice(arch)
    found = measure_gpu(device, told.append)
    assert len(told) == 4 and device.live == {}
    assert [key for key in EXACT if getattr(found, key) != getattr(arch, key)] == []
    assert found.flop_per_clock_sm == pytest.approx(
        {
            u: f
            for u, f in arch.flop_per_clock_sm.items()
            if u in gpu_kernels.benches(divmod(arch.compute_capability, 10))
        }
    )
    assert found.clock == pytest.approx(arch.clock, rel=1e-3)
    assert found.bw_global == pytest.approx(arch.bw_global, rel=1e-3)
    assert 1.0 <= found.bw_l2 / (gpu_dry_run.L2_SHARE * arch.bw_l2) <= 2.05
    assert set(found.measured) == set(MEASURED) == set(MEASURED_UNITS)
    assert found.measured["dram_latency"] == pytest.approx(800, rel=0.01)
    assert found.measured["l2_latency"] == pytest.approx(260, rel=0.01)
    assert found.measured["launch_seconds"] == pytest.approx(2e-6, rel=0.01)
    assert found.measured["grid_barrier_seconds"] == pytest.approx(2000 / arch.clock, rel=0.01)


@assembles
def test_a_file_is_read_back_and_every_number_has_its_source():
    arch = measure_gpu(ModelledDevice(load_gpu("H100")))
    text = to_toml(arch, "head")
    found = parse_gpu(text, "mine.toml")
    for f in fields(GpuArch):
        wanted, got = getattr(arch, f.name), getattr(found, f.name)
        if f.name == "measured":
            assert got == pytest.approx(wanted, rel=1e-4)
        else:
            assert got == (pytest.approx(wanted, rel=1e-4) if isinstance(wanted, float) else wanted), f.name
    assert set(found.sources) == {*UNITS, *(f"flop_per_clock_sm.{u}" for u in found.flop_per_clock_sm)} | {
        f"measured.{name}" for name in MEASURED
    }
    assert found.sources["lat_shared"].startswith("measured by jcuts arch measure, ")
    assert "dry run, nothing was measured" in found.sources["lat_shared"]
    with pytest.raises(ModelError, match="unknown key of measured"):
        parse_gpu(text.replace("l2_read = {", "l2_reads = {"), "mine.toml")


def test_the_ceiling_is_a_power_of_two():
    assert [ceiling(x) for x in (250.0, 256.0, 258.0, 1300.0, 2600.0, 4.0, 0.7)] == [256, 256, 256, 2048, 4096, 4, 1]


@pytest.mark.parametrize(("hops", "room"), [(16, 2048), (256, 1 << 16)])
def test_a_ring_leads_through_every_line_and_back(hops, room):
    base = 1 << 33
    words, at, seen = ring(base, hops, room), base, set()
    for _ in range(hops):
        seen.add(at)
        at = int(words[(at - base) // 8])
    assert at == base and len(seen) == hops and all(a % gpu_machine.LINE == 0 and base <= a < base + room for a in seen)


@assembles
def test_a_kernel_that_counts_nothing_is_an_error(monkeypatch):
    device = ModelledDevice(load_gpu("H100"))
    monkeypatch.setattr(device, "download", lambda address, size: np.zeros(size, np.uint8))
    with pytest.raises(NativeError, match="counted no cycles") as caught:
        measure_gpu(device)
    assert caught.value.kernel == "fma_f32" and device.live == {}


class Library:
    """The driver's functions: notes the calls, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA Something"
            return 999 if name == self.fails else 0

        return call


def test_the_driver_launches_grids(monkeypatch):
    library = Library()
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: library)
    driver = cuda_driver.Driver()
    assert driver.name == "NVIDIA Something"
    driver.launch_grid(None, 132, 512, (cuda_driver.ctypes.c_uint64(7),))
    driver.launch_grid(None, 132, 512, (cuda_driver.ctypes.c_uint64(7),), together=True)
    (name, arguments), (other, more) = library.calls[-2:]
    assert (name, other) == ("cuLaunchKernel", "cuLaunchCooperativeKernel")
    assert [a.value for a in arguments[1:8]] == [a.value for a in more[1:8]] == [132, 1, 1, 512, 1, 1, 0]
    assert driver.seconds(lambda: None) == 0.0


def test_a_device_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: Library("cuInit"))
    with pytest.raises(NativeError, match="cuInit failed"):
        cuda_driver.Driver()
