"""Occupancy by the limits of a compute capability: counted by hand, and asked by the estimates."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.arch.gpu import RATES
from jcuts.arch.load import list_gpus, load_gpu
from jcuts.arch.sm_limits import LIMITS, limits_of, nearest_limits
from jcuts.base.errors import ModelError
from jcuts.schedule import fit
from jcuts.schedule.gpu import machine as machine_module
from jcuts.schedule.gpu.enumeration import enumerate_schedules
from jcuts.schedule.gpu.machine import GpuMachine
from tests import programs


@pytest.mark.parametrize("name", LIMITS)
def test_threads_are_those_of_the_capability(name):
    capability = divmod(int(name.removeprefix("sm_")), 10)
    assert GpuMachine(10, capability=capability).threads == 10 * limits_of(capability).threads_per_sm


def test_unknown_capabilities_take_the_newest_known_one_before():
    assert nearest_limits((10, 0)) == nearest_limits((12, 0)) == LIMITS["sm_90"]
    assert nearest_limits((8, 8)) == LIMITS["sm_87"]
    assert nearest_limits((7, 0)) == LIMITS["sm_75"]


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        ((8, 0), 256, 61, 16 << 10, 4),  # 64 registers: 65536 / (64 * 256)
        ((8, 0), 128, 32, 40 << 10, 4),  # 164 KiB / (40 + 1)
        ((8, 6), 128, 32, 40 << 10, 2),  # 100 KiB / (40 + 1)
        ((8, 6), 256, 16, 0, 6),  # 1536 threads
        ((7, 5), 64, 16, 0, 16),  # blocks
        ((7, 5), 128, 16, 32 << 10, 2),  # nothing is reserved
        ((9, 0), 128, 128, 227 << 10, 1),
        ((9, 0), 1024, 80, 0, 0),  # 65536 / (80 * 1024)
    ],
)
def test_resident_blocks(capability, threads, registers, shared, blocks):
    assert GpuMachine(1, capability=capability).resident_blocks(threads, registers, shared) == blocks


def _gemm(dtype):
    return programs.trace(lambda x, w: x @ w, jnp.zeros((1024, 512), dtype), jnp.zeros((512, 768), dtype)).program()


@pytest.mark.parametrize("program", [_gemm(np.float32), _gemm(jnp.bfloat16)], ids=["tf32", "bfloat16"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_proposals_follow_what_a_multiprocessor_has(program, capability, monkeypatch):
    machine = GpuMachine(108, capability=capability)
    found = [score for _, score in enumerate_schedules(program, machine)]
    has = limits_of(capability)
    monkeypatch.setattr(machine_module, "nearest_limits", lambda _: replace(has, smem_per_sm_bytes=64 << 10))
    assert found and [score for _, score in enumerate_schedules(program, machine)] != found


PERTURBED = {
    "bw_global": ("gemm", "wide"),
    "bw_l2": ("gemm", "conv"),
    "clock": ("gemm", "depthwise"),
    "shared_banks": ("gemm", "conv"),
    "tf32_mma": ("gemm", "conv"),
}
"""Numbers of an architecture, and the programs whose proposals depend on them."""


def _program(name):
    images = jnp.zeros((16, 28, 28, 128))
    made = {
        "gemm": lambda: programs.trace(lambda x, w: x @ w, jnp.zeros((1024, 512)), jnp.zeros((512, 768))),
        "wide": lambda: programs.trace(lambda x, w: x @ w, jnp.zeros((1, 2048)), jnp.zeros((2048, 1000))),
        "conv": lambda: programs.trace(_conv(1), images, jnp.zeros((3, 3, 128, 128))),
        "depthwise": lambda: programs.trace(_conv(128), images, jnp.zeros((3, 3, 1, 128))),
    }
    return made[name]().program()


def _conv(groups):
    layout = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


@pytest.mark.parametrize(("number", "name"), [(n, p) for n, names in PERTURBED.items() for p in names])
def test_proposals_follow_the_rates_of_the_architecture(number, name):
    program, arch = _program(name), load_gpu("H200")
    if number in arch.flop_per_clock_sm:
        units = {**arch.flop_per_clock_sm, number: arch.flop_per_clock_sm[number] / 4}
        other = replace(arch, flop_per_clock_sm=units)
    else:
        other = replace(arch, **{number: type(getattr(arch, number))(getattr(arch, number) / 4)})
    before, after = (dict(_proposals(program, GpuMachine.of(one))) for one in (arch, other))
    assert before and before != after


def _proposals(program, machine):
    return [(made.digest, score) for made, score in enumerate_schedules(program, machine)]


@pytest.mark.parametrize("name", list_gpus())
def test_what_scales_is_the_same_share_of_every_gpu(name):
    arch, fitted = load_gpu(name), load_gpu(fit.FITTED_GPU)
    table = fit.coefficients("gpu/gemm", "mma_bound")
    here = GpuMachine.of(arch).coefficients("gpu/gemm", "mma_bound")
    shares = (here.memory_bytes_per_cycle * arch.clock / arch.bw_global,)
    assert shares == pytest.approx((table.memory_bytes_per_cycle * fitted.clock / fitted.bw_global,))
    per_sm = here.l2_bytes_per_cycle * arch.clock * arch.num_sm / arch.bw_l2
    assert per_sm == pytest.approx(table.l2_bytes_per_cycle * fitted.clock * fitted.num_sm / fitted.bw_l2)
    assert here.launch_latency_cycles == table.launch_latency_cycles
    lacks = "tf32_mma" not in arch.flop_per_clock_sm
    ratio = 1.0 if lacks else arch.flop_per_clock_sm["tf32_mma"] / fitted.flop_per_clock_sm["tf32_mma"]
    assert here.tf32_products_per_cycle == pytest.approx(table.tf32_products_per_cycle * ratio)


def test_the_gpu_of_the_fit_reads_its_own_tables():
    machine = GpuMachine.named(fit.FITTED_GPU)
    assert machine.coefficients("gpu/window", "cost") is fit.coefficients("gpu/window", "cost")
    assert GpuMachine(132).arch == machine.arch and repr(GpuMachine(132)) == repr(machine)


def test_every_rate_of_a_hardware_quantity_says_what_it_scales_with():
    for path in sorted((fit.ROOT / "gpu").rglob("fit_*.toml")):
        for table in fit.read_tables(f"gpu/{path.parent.name}").values():
            rates = {n for n in table.as_dict() if n.endswith(("_per_cycle", "_per_second", "_hertz"))}
            # of the network between SMs nothing is published: it exists from 9.0 on, and keeps its rate
            assert rates - {"dsmem_bytes_per_cycle"} == set(table.scaling), path
            assert {s.rate for s in table.scaling.values()} <= set(RATES)


def test_scales_with_must_be_a_rate():
    text = """[a]
source = "x"
samples = 1
error = "x"
date = "x"
[a.coefficients]
b = { value = 1.0, unit = "byte/cycle", scales_with = "lat_shared" }
"""
    with pytest.raises(ModelError, match="scales with 'lat_shared': choose from"):
        fit.parse_tables(text, "fit.toml")
