"""Schedules of back-to-back GEMMs are legal, few and ranked; shared memory between the GEMMs has no bank conflicts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jcuts.arch.sm_limits import limits_of
from jcuts.estimate import time_model
from jcuts.kernel_ir.verify import verify
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.b2b_gemm import cost, wgmma_cost
from jcuts.schedule.gpu.b2b_gemm.tile import shape_of
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import wgmma_shape_of
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.families import family_of
from tests.codegen.cuda.b2b_gemm import test_kernel
from tests.codegen.cuda.b2b_gemm.test_kernel import CASES, HALF, HALVES, NETWORKS, gelu, program_of


def program_like(layers):
    """The program of an MLP whose operands nobody needs."""
    return program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()])[0]


@pytest.mark.parametrize("layers", [CASES["residual"], CASES["odd"], HALVES["residual"]], ids=["f32", "odd", "bf16"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
def test_schedules_are_legal_few_and_ranked(layers, capability):
    program, machine = program_like(layers), gpu_candidates.GpuMachine(108, capability=capability)
    found = gpu_candidates.candidates(program, machine, 8)
    assert 2 < len(found) <= 8
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0 and scores[0] <= 1
    for candidate, _ in found:
        verify(candidate)
        name = family_of(candidate).name
        assert name == "b2b_gemm" or (name == "b2b_wgmma" and capability == (9, 0))
        shape, model = (shape_of(candidate), cost) if name == "b2b_gemm" else (wgmma_shape_of(candidate), wgmma_cost)
        assert shape is not None and shape.fits and shape.shared <= limits_of(capability).smem_per_block_bytes
        assert dict(candidate.params)["threads"] == shape.threads
        assert model.cycles(shape, machine) >= cost.least(shape.block, machine)
        (use,) = kernel_time.launch_stats(candidate, [(shape.tiles, shape.threads, 128, shape.shared)])
        assert use.flop > 0
        assert kernel_time.unit_of(candidate) == ("tf32_mma" if layers.dtype == np.float32 else "bf16_mma")
        bound = memory_bound(candidate)
        assert sum(b.bytes for b in program.outputs) <= bound.bytes
        assert bound.bytes <= sum(b.bytes for b in (*program.inputs, *program.outputs))


@pytest.mark.parametrize("name", NETWORKS)
def test_predicted_times_are_no_less_than_their_bounds(name):
    machine = gpu_candidates.GpuMachine.named("H100")
    for layers in (NETWORKS[name], replace(NETWORKS[name], dtype=HALF)):
        for candidate, _ in gpu_candidates.candidates(program_like(layers), machine, 8):
            found = kernel_time.kernel_time(candidate, machine)
            assert 0 < found.bound(machine.arch, resident=found.compulsory) <= found.seconds, time_model.text(
                found.root
            )


def test_an_activation_with_special_functions_takes_longer():
    machine = gpu_candidates.GpuMachine.named("H100")
    plain, special = (
        min(
            kernel_time.kernel_time(p, machine).seconds
            for p, _ in gpu_candidates.candidates(program_like(replace(NETWORKS["64 wide"], act=act)), machine, 8)
        )
        for act in (test_kernel.Mlp.act, gelu)
    )
    assert plain < special


def test_gpus_without_the_instructions_have_no_schedules():
    program = program_like(CASES["residual"])
    assert not gpu_candidates.candidates(program, gpu_candidates.GpuMachine(46, capability=(7, 5)), 8)


def swizzled(row, size, pitch):
    """Byte of an element at ``size`` bytes along a row of the hidden tile (`codegen.cuda.b2b_gemm.hidden_tile`)."""
    reverse = (row & 1) << 2 | row & 2 | (row & 7) >> 2
    return row * pitch + (size ^ reverse << 4)


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("layers", [CASES["odd"], HALVES["odd"]], ids=["f32", "bf16"])
def test_banks_of_what_warps_store_and_read(layers, chunk):
    """Stores of one, two and four words, and reads of matrices, meet every bank once, wherever a warp's part begins."""
    shape = test_kernel.shape_of(program_like(layers), 64, chunk, (2, 1), (2, 1))
    pitch, wide = shape.patch_pitch * shape.item, chunk * shape.item
    assert pitch % 128 == 0 and shape.shared % 128 == 0
    for first in range(0, wide, 16):  # ldmatrix: 8 rows of 16 bytes
        reads = [swizzled(row, first, pitch) // 4 + k for row in range(8) for k in range(4)]
        assert len({word % 32 for word in reads}) == 32
    for words in (1, 2, 4) if shape.item == 4 else (1,):
        per_pass = 32 // words
        for first, start in itertools.product(range(0, wide, 16 * words), range(0, 32, per_pass)):
            lanes = [(lane // 4, first + lane % 4 * words * 4) for lane in range(start, start + per_pass)]
            stores = [swizzled(row, size, pitch) // 4 + k for row, size in lanes for k in range(words)]
            assert len({word % 32 for word in stores}) == 32
