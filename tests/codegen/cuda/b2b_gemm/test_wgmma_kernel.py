"""Back-to-back GEMMs by ``wgmma`` in one kernel against float64, through the PTX machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jcuts.base.errors import CompileRejected, Refusal
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.launch_source import emit_source
from jcuts.kernel_ir import verify
from jcuts.lower.patterns.b2b_gemm import match_b2b_gemm
from jcuts.schedule.gpu.b2b_gemm import wgmma_schedules
from jcuts.schedule.gpu.b2b_gemm.wgmma_tile import B2bWgmmaTile, wgmma_shape_of
from jcuts.schedule.gpu.machine import GpuMachine
from tests.codegen.cuda.assembling import assert_most_assemble
from tests.codegen.cuda.b2b_gemm import test_kernel
from tests.codegen.cuda.b2b_gemm.test_kernel import (
    HALF,
    NETWORKS,
    SM80,
    SM90,
    Mlp,
    check_rows_stay_apart,
    compare,
    compiled,
    gelu,
    operands_of,
    per_row,
    program_of,
    results,
    wanted,
)
from tests.ptx import machine as ptx_machine
from tests.ptx.tensor_core import TensorFault, round_tf32

MACHINE = GpuMachine.named("H100")
CASES = {
    "odd": Mlp((77,), 20, 36, 28),
    "gelu, odd": test_kernel.CASES["gelu, odd"],
    "odd, along k": Mlp((130,), 9, 20, 17, jax.nn.sigmoid, along=True),
    "residual": test_kernel.CASES["residual"],
    "silu, a factor per row": Mlp((70,), 40, 68, 36, jax.nn.silu, tail=per_row),
    "one chunk": test_kernel.CASES["one chunk"],
    "leaky, three lines of k": Mlp((64,), 72, 128, 72, jax.nn.leaky_relu),
}
HALVES = {
    "odd": test_kernel.HALVES["odd"],
    "gelu": replace(test_kernel.HALVES["gelu"], inputs=16),
    "gelu, along k": Mlp((5, 13), 20, 56, 44, gelu, along=True, dtype=HALF, stored=HALF),
    "residual": test_kernel.HALVES["residual"],
    "silu, a factor per row": test_kernel.HALVES["silu, a factor per row"],
    "one chunk": test_kernel.HALVES["one chunk"],
    "wide": Mlp((150,), 136, 200, 104, gelu, dtype=HALF, stored=HALF),
}
TILES = [(1, 1, 64, 2), (2, 1, 64, 3), (1, 2, 64, 2), (1, 1, 64, 4, 2), (3, 1, 128, 2), (1, 1, 32, 2, 2, 2)]
"""Warpgroups, fragments of 64 rows of each, hidden columns of a chunk, stages; row tiles and resident blocks."""
MANY_ACCUMULATORS = 80
"""Registers of accumulators from which on ptxas may refuse what it takes of most programs."""


def shape_of(program, *tile):
    found = match_b2b_gemm(program)
    assert not isinstance(found, Refusal), found
    return B2bWgmmaTile(found, *tile)


@compiled
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("layers", [*CASES.values(), *HALVES.values()], ids=[*CASES, *(f"bf16 {n}" for n in HALVES)])
def test_mlps(layers, tile):
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    shape = shape_of(program, *tile)
    if not shape.fits:  # lines of 64 bfloat16 along k
        assert layers.dtype == HALF and layers.along and shape.chunk == 32
        return
    if not shape.has_registers and shape.beside > 1:
        shape = replace(shape, beside=1)
    scheduled = shape.of(program)
    assert verify.read(scheduled.to_text()) == scheduled
    try:
        got = results(scheduled, traced)
    except CompileRejected as error:  # assemblers differ: tuning leaves such schedules out
        assert shape.accumulators > MANY_ACCUMULATORS or (shape.chunks == 1 and shape.rounds > 1)
        assert "local memory" in str(error) or "wait for each other" in str(error)
        return
    compare(layers, got, wanted(layers, arguments))


@compiled
@pytest.mark.parametrize("dtype", [np.float32, HALF])
def test_numbers_that_are_not_finite_stay_in_their_rows(dtype):
    """Neither rows beyond the last, nor hidden columns beyond the last, whose epilogue is not finite, meet others."""
    layers = Mlp((77,), 20, 36, 28, act=lambda y: 1 / y, dtype=dtype)
    tiles = (*TILES[1:3], (1, 1, 32, 4, 2))
    check_rows_stay_apart(layers, lambda p: [shape_of(p, *tile).of(p) for tile in tiles])


@compiled
@pytest.mark.parametrize("along", [False, True])
def test_rounded_weights(along):
    """Those along k are copied as they are, so that a warp passes their fences; the others are transposed."""
    layers = replace(CASES["residual"], along=along)
    arguments = layers.arguments()
    for place in (1, 3):
        arguments[place] = round_tf32(arguments[place])
    program, traced = program_of(layers, arguments, rounded=True)
    shape = shape_of(program, *TILES[1])
    assert shape.has_fence_warp is along
    compare(layers, results(shape.of(program), traced), wanted(layers, arguments))


@compiled
def test_what_is_left_out_is_found():
    layers = Mlp((77,), 24, 96, 24, gelu, along=True, dtype=HALF, stored=HALF)
    program, traced = program_of(layers, layers.arguments())
    program = shape_of(program, 1, 1, 64, 2).of(program)
    kernel, ptx = compiler.compile_program(program, SM90), compiler.ptx_of(program, SM90)
    for change, fault, what in (
        (("fence.proxy.async.shared::cta;", ""), TensorFault, "proxy fence"),
        (("cp.async.wait_group 0;", ""), TensorFault, "proxy fence"),
        (("wgmma.fence.sync.aligned;", ""), TensorFault, "no wgmma.fence"),
    ):
        with pytest.raises(fault, match=what):
            ptx_machine.run_kernel(ptx.replace(*change), kernel, operands_of(traced))


@compiled
@pytest.mark.parametrize("layers", [CASES["residual"], HALVES["residual"]], ids=["residual", "bf16"])
def test_what_the_ranking_proposes_is_right(layers):
    arguments = layers.arguments()
    program, traced = program_of(layers, arguments)
    found = [p for p, _ in wgmma_schedules.b2b_wgmma_schedules(program, MACHINE)]
    assert len(found) > 8
    for candidate in found[:: len(found) // 4]:
        compare(layers, results(candidate, traced), wanted(layers, arguments))


@compiled
@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("name", NETWORKS)
def test_candidates_assemble_without_local_memory(name, dtype):
    layers = replace(NETWORKS[name], dtype=dtype)
    program, _ = program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()])
    found = [p for p, _ in wgmma_schedules.b2b_wgmma_schedules(program, MACHINE)]
    assert len(found) > 3
    assert_most_assemble(found[:3], SM90)


def test_schedules_of_other_gpus_and_of_wide_results_are_none():
    layers = replace(CASES["residual"], results=264, tail=per_row)
    program, _ = program_of(layers, layers.arguments())
    assert not [*wgmma_schedules.b2b_wgmma_schedules(program, MACHINE)]
    program, _ = program_of(CASES["residual"], CASES["residual"].arguments())
    for capability in ((8, 0), (10, 0)):
        assert not [*wgmma_schedules.b2b_wgmma_schedules(program, GpuMachine(108, capability=capability))]


def test_refusals():
    layers = CASES["residual"]
    program, _ = program_of(layers, layers.arguments())
    for tile in ((1, 1, 24, 2), (1, 1, 48, 2), (1, 1, 64, 1), (3, 1, 20, 2)):
        with pytest.raises(CompileRejected, match=r"no \d warpgroups"):
            emit_source(shape_of(program, *tile).of(program))
    layers = Mlp((77,), 20, 36, 25)  # no four columns to transpose at once
    program, _ = program_of(layers, layers.arguments())
    assert not shape_of(program, *TILES[0]).fits


@compiled
def test_other_capabilities_are_refused():
    layers = CASES["residual"]
    program, _ = program_of(layers, layers.arguments())
    with pytest.raises(CompileRejected, match=r"compute capability 9\.0"):
        compiler.compile_program(shape_of(program, *TILES[0]).of(program), SM80)


def test_schedules_are_read_back():
    program, _ = program_of(CASES["residual"], CASES["residual"].arguments())
    for tile in TILES:
        shape = shape_of(program, *tile)
        read = wgmma_shape_of(shape.of(program))
        assert read is not None and replace(read, block=shape.block) == shape


def test_accumulators_are_a_fragments():
    """Of TF32 the first weight's lines are permuted: accumulator columns 2t, 2t + 1 are k = t, t + 4 of a fragment."""
    line = {h: (h & ~7) | (h & 3) << 1 | (h >> 2 & 1) for h in range(16)}
    assert sorted(line.values()) == [*range(16)]
    for t in range(4):
        assert (line[t], line[t + 4]) == (2 * t, 2 * t + 1)


def test_golden_source(golden):
    layers = NETWORKS["ConvNeXt-T, 56x56"]
    program, _ = program_of(layers, [np.zeros(a.shape, a.dtype) for a in layers.arguments()])
    candidate, _ = next(wgmma_schedules.b2b_wgmma_schedules(program, MACHINE))
    source = emit_source(candidate)
    compile(source.text, "b2b_wgmma", "exec")
    text = f"# {dict(candidate.params)}, {source.shared} bytes of shared memory, {source.least} blocks beside\n"
    golden("cuda/b2b_wgmma.txt", f"{text}# {source.blocks} blocks of {source.threads} threads\n{source.text}")
