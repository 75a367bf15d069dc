"""The time model of scheduled CPU programs: it is what ranks them, and its three readings agree with each other."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jcuts.arch.detect import describe_cpu
from jcuts.estimate import cpu_kernel, time_model
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.schedule.bound import roofline_bound
from jcuts.schedule.cpu import candidates, cycle_model, loop_candidates, winograd_candidates
from jcuts.schedule.cpu.bound import machine_of
from jcuts.schedule.cpu.cycle_model import cycle_terms, cycles
from jcuts.schedule.cpu.kernel_time import kernel_time
from scripts.import_graph import read_graph
from tests import programs
from tests.schedule.cpu.test_recorded_cycles import OPERATIONS, _conv, _zeros

HERE = replace(describe_cpu(), simd_bits=512, vector_registers=32, cores=2)
ARCHS = {
    "here": HERE,
    "ports": replace(HERE, fma_ports=1, alu_ports=1, load_ports=1, store_ports=1),
    "many cores": replace(HERE, cores=64, l3=256 << 20),
    "slow memory": replace(HERE, bandwidth={"l2": 20e9, "l3": 5e9, "dram": 1e9}),
    "sse": replace(HERE, simd_bits=128, vector_registers=16),
}


def scheduled(name, arch):
    function, *arguments = OPERATIONS[name]
    program = programs.trace(function, *arguments).program()
    return [p for p, _ in candidates.candidates(program, machine_of(arch, arch.simd_bits // 8, 32, arch.cores), 12)]


@pytest.mark.parametrize("label", ARCHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_readings_agree(name, label):
    arch = ARCHS[label]
    for program in scheduled(name, arch):
        time = kernel_time(program, arch)
        assert time.seconds >= time.bound(arch) > 0
        assert time.bound(arch) == roofline_bound(program, arch).seconds
        found = cpu_kernel.ratios(time, arch)
        factors = (found.memory, found.cache, found.register, found.simd, found.balance)
        assert all(0 < factor <= 1 for factor in factors) and 0 < found.pul <= min(factors)


def test_the_code_is_what_ranks():
    machine = machine_of(HERE, 64, HERE.vector_registers, HERE.cores)
    for program in scheduled("gemm", HERE):
        time = kernel_time(program, HERE)
        assert time.code.value == cycles(program, machine) == cycle_terms(program, machine).value
    shown = time_model.text(time.root)
    for word in ("launch", "tiles", "compute unit", "load ports", "dependent instructions", "L2 cache", "L3 cache"):
        assert word in shown


def test_what_a_schedule_lacks_is_seen_in_its_ratio():
    plain = collapse_program(programs.trace(lambda a, b: a @ b, _zeros(64, 256), _zeros(256, 64)).program())

    def of(rows, vectors):
        schedule = loop_candidates.Schedule(16, "d1", (("d0", rows), ("d1", vectors)), ("d1", "d0"), (("k0", 2),))
        arch = ARCHS["ports"]
        return cpu_kernel.ratios(kernel_time(loop_candidates.apply(plain, schedule), arch), arch)

    assert of(1, 1).register < 0.3 < 0.9 < of(6, 4).register  # one accumulator waits for itself
    assert of(8, 4).register < of(7, 4).register  # 37 registers of 32
    odd = collapse_program(programs.trace(lambda a, b: a @ b, _zeros(64, 256), _zeros(256, 65)).program())
    schedule = loop_candidates.Schedule(16, "d1", (("d0", 6), ("d1", 4)), ("d1", "d0"), (("k0", 2),))
    assert cpu_kernel.ratios(kernel_time(loop_candidates.apply(odd, schedule), HERE), HERE).simd < 0.9  # padded lanes


@pytest.mark.parametrize("name", ["gemm", "conv 3x3", "map", "row sum"])
def test_nothing_is_ranked_without_the_performance_model(name, monkeypatch):
    """Loop nests, packing and Winograd forms get their scores from expressions of `estimate.time_model`."""

    def none(*_, **__):
        raise RuntimeError("no model")

    for module in (cycle_model, winograd_candidates):
        monkeypatch.setattr(module, "serial", none)
    with pytest.raises(RuntimeError, match="no model"):
        scheduled(name, HERE)


def test_winograd_is_ranked_by_the_model(monkeypatch):
    program = programs.trace(_conv, jnp.zeros((1, 56, 56, 64)), jnp.zeros((3, 3, 64, 64))).program()
    machine = machine_of(HERE, 64, 32, 2)
    assert winograd_candidates.candidates(program, machine)
    real = winograd_candidates.serial
    monkeypatch.setattr(winograd_candidates, "serial", lambda parts: time_model.scaled("slower", 9.0, real(parts)))
    assert not winograd_candidates.candidates(program, machine)  # none promises a gain


def test_what_counts_cycles_imports_the_performance_model():
    edges = read_graph().module_edges()
    for module in ("cycle_model", "cache_traffic", "winograd_candidates", "kernel_time"):
        assert any(target.startswith("jcuts.estimate") for target in edges[f"jcuts.schedule.cpu.{module}"]), module
