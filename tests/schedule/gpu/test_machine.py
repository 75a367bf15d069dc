"""Occupancy by the limits of a compute capability: counted by hand, and asked by the estimates."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jcuts.arch.sm_limits import LIMITS, limits_of, nearest_limits
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
