"""Limits per compute capability: the same in every GPU's data file; what code generators and schedules read of them."""

from __future__ import annotations

import pytest

from jcuts.arch.load import list_gpus, load_gpu
from jcuts.arch.sm_limits import LIMITS, NEWEST_CAPABILITY, limits_of, parse_limits
from jcuts.base.errors import ModelError
from jcuts.codegen.cuda.toolchain.target import LEAST_SHARED, CudaTarget
from jcuts.schedule.gpu.machine import GpuMachine


@pytest.mark.parametrize("name", list_gpus())
def test_data_files_of_gpus_agree(name):
    gpu = load_gpu(name)
    limits = limits_of(divmod(gpu.compute_capability, 10))
    if limits is None:
        pytest.skip(f"no code is made for {name}")
    assert limits.registers_per_sm == gpu.registers_per_sm
    assert limits.registers_per_thread == gpu.registers_per_thread
    assert limits.threads_per_sm == gpu.max_threads_per_sm
    assert limits.threads_per_block == gpu.max_thread
    assert limits.blocks_per_sm == gpu.max_blocks_per_sm
    assert limits.warp_threads == gpu.warp_size
    assert limits.smem_per_sm_bytes == gpu.shared_per_sm
    assert limits.smem_per_block_bytes == gpu.max_shared
    assert limits.smem_reserved_per_block_bytes == gpu.shared_reserved


def test_machines_are_those_of_the_data_files():
    assert GpuMachine.named("H200") == GpuMachine(132, 2048, (9, 0))
    assert GpuMachine.named("A100") == GpuMachine(108, 2048, (8, 0))
    assert GpuMachine.of(load_gpu("RTX 2080")) == GpuMachine(46, 1024, (7, 5))


def test_shared_memory_of_a_block():
    found = {name: CudaTarget(divmod(int(name[3:]), 10)).max_shared for name in LIMITS}
    assert found == {
        "sm_75": 65_536,
        "sm_80": 166_912,
        "sm_86": 101_376,
        "sm_87": 166_912,
        "sm_89": 101_376,
        "sm_90": 232_448,
    }
    assert CudaTarget((10, 0)).max_shared == LEAST_SHARED == 49_152


def test_newest_capability():
    assert NEWEST_CAPABILITY == (9, 0)


@pytest.mark.parametrize(
    "change, why",
    [
        ("sector_bytes = 0", "positive"),
        ("sector_bytes = 1.5", "positive"),
        ("sector_bites = 32", "unknown"),
    ],
)
def test_malformed_limits_are_refused(change, why):
    lines = [f"{key} = {value}" for key, value in vars(LIMITS["sm_75"]).items() if key != "sector_bytes"]
    with pytest.raises(ModelError, match=why):
        parse_limits("\n".join(["[sm_1]", *lines, change]), "limits.toml")
    assert parse_limits("\n".join(["[sm_1]", *lines, "sector_bytes = 32"]), "")["sm_1"] == LIMITS["sm_75"]
