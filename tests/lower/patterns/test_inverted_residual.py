"""Which subsets make a block, what is known of its windows; its schedules are legal, few and ranked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.arch.sm_limits import limits_of
from jcuts.base.errors import Refusal
from jcuts.fusion import greedy
from jcuts.fusion.match_inverted_residual import concatenate_programs, inverted_residual_groups
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Program
from jcuts.kernel_ir.verify import verify
from jcuts.lower.patterns.inverted_residual import match_inverted_residual
from jcuts.pipeline.computation import Computation
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu import kernel_time
from jcuts.schedule.gpu.bound import memory_bound
from jcuts.schedule.gpu.inverted_residual import schedules as inverted_residual_schedules
from jcuts.schedule.gpu.inverted_residual.tile import InvertedResidualTile, shape_of
from tests import programs
from tests.codegen.cuda.inverted_residual.test_kernel import BLOCKS, Layers, traced_number

MACHINE = gpu_candidates.GpuMachine(132)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def yes(program):
    return True


def cover_of(fn, *arguments):
    traced = programs.trace(fn, *arguments)
    return traced, greedy.group(traced.graph).subsets


def block_of(program):
    found = match_inverted_residual(program)
    assert not isinstance(found, Refusal), found
    return found


def program_of(layers):
    traced, cover = cover_of(layers, *layers.arguments())
    (found,) = inverted_residual_groups(traced.graph, cover, yes)
    return traced, found.program


@pytest.mark.parametrize("name", [n for n, layers in BLOCKS.items() if layers.image[0] * layers.wide < 100])
def test_blocks_keep_their_meaning(name):
    """The program computes the same, and so does what is known of its windows."""
    layers = BLOCKS[name]
    traced, program = program_of(layers)
    verify(program)
    assert Program.from_json(program.to_text()) == program
    operands = [traced.arguments[traced_number(traced, t)] for t in traced.graph.subset_inputs(traced.everything)]
    (got,) = interpret(program, operands)
    want = np.asarray(layers(*layers.arguments()))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    found = match_inverted_residual(program)
    assert not isinstance(found, Refusal)
    window, arguments = found.window, layers.arguments()
    x, w, b, f, *_ = (np.asarray(a, np.float64) for a in arguments)
    across = w.reshape(w.shape[0], -1).T if layers.along else w[0, 0]
    wide = x if layers.alone else np.clip(x @ across + b, 0, 6)
    (high, across), (down, aside) = window.outputs, window.step
    grown = np.zeros((wide.shape[0], 64, 64, wide.shape[3]))
    grown[:, 8 : 8 + wide.shape[1], 8 : 8 + wide.shape[2]] = wide
    flat = f.ravel()
    total = np.zeros((wide.shape[0], high, across, wide.shape[3]))
    for (row, column), address in zip(window.taps, window.weights, strict=True):
        rows = 8 + window.start[0] + row + down * np.arange(high)
        columns = 8 + window.start[1] + column + aside * np.arange(across)
        total += grown[:, rows][:, :, columns] * flat[address.const + np.arange(wide.shape[3])]
    numbers = lax.conv_general_dilated(
        jnp.asarray(wide, jnp.float32),
        jnp.asarray(f, jnp.float32),
        layers.strides,
        layers.padding,
        rhs_dilation=layers.dilation,
        feature_group_count=layers.wide,
        dimension_numbers=NUMBERS,
    )
    np.testing.assert_allclose(total, np.asarray(numbers), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size, rows", [(14, 7), (28, 14), (15, 8), (9, 4), (56, 14)])
@pytest.mark.parametrize("stride, padding", [(1, "SAME"), (2, "SAME"), (2, ((1, 1), (1, 1))), (1, "VALID")])
def test_every_pixel_that_a_tile_needs_is_expanded(size, rows, stride, padding):
    layers = Layers((1, size, size, 8), (3, 3), 16, 8, (stride, stride), padding)
    traced = programs.trace(layers, *(np.zeros(a.shape, np.float32) for a in layers.arguments()))
    (found,) = inverted_residual_groups(traced.graph, greedy.group(traced.graph).subsets, yes)
    shape = InvertedResidualTile(block_of(found.program), 1, rows, rows, 16, (2, 1), (2, 1), (1, 1))
    for starts, shifts, span, reach in zip(shape.starts, shape.shifts, shape.span, shape.patch, strict=True):
        for start, shift in zip(starts, shifts, strict=True):
            origin = start + shift
            assert origin >= 0 and origin + span <= size
            needed = set(range(max(0, start), min(size, start + reach)))
            assert needed <= set(range(origin, origin + span))


def test_what_makes_no_block():
    layers = BLOCKS["residual"]
    arguments = layers.arguments()

    def leaks(x, w, b, f, c, v, d):
        along = ("NHWC", "OHWI", "NHWC")
        wide = jax.nn.relu6(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=along) + b)
        deep = lax.conv_general_dilated(wide, f, (1, 1), "SAME", feature_group_count=48, dimension_numbers=NUMBERS)
        return lax.conv_general_dilated(deep, v, (1, 1), "SAME", dimension_numbers=along), wide.sum()

    traced, cover = cover_of(leaks, *arguments)
    (found,) = inverted_residual_groups(traced.graph, cover, yes)
    assert len(found.parts) == 2  # what is expanded is needed elsewhere
    three = [part for part in cover if part[1].template == "convolution"]
    refused = concatenate_programs(traced.graph, three)
    assert isinstance(refused, Refusal) and "needed elsewhere" in refused.reason

    def plain(x, w, f, v):
        wide = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)
        deep = jax.nn.relu(lax.conv_general_dilated(wide, f, (1, 1), "SAME", dimension_numbers=NUMBERS))
        return lax.conv_general_dilated(deep, v, (1, 1), "SAME", dimension_numbers=NUMBERS)

    shapes = (2, 8, 8, 16), (1, 1, 16, 32), (3, 3, 32, 32), (1, 1, 32, 16)
    traced, cover = cover_of(plain, *(np.zeros(s, np.float32) for s in shapes))
    assert not inverted_residual_groups(traced.graph, cover, yes)
    refused = concatenate_programs(traced.graph, cover)
    assert isinstance(refused, Refusal) and "no depthwise" in refused.reason

    def skipped(x, f, v):
        deep = lax.conv_general_dilated(x, f, (1, 1), "SAME", feature_group_count=16, dimension_numbers=NUMBERS)
        return deep + lax.conv_general_dilated(deep, v, (1, 1), "SAME", dimension_numbers=NUMBERS)

    shapes = (2, 8, 9, 16), (3, 3, 1, 16), (1, 1, 16, 16)
    traced, cover = cover_of(skipped, *(np.zeros(s, np.float32) for s in shapes))
    assert not inverted_residual_groups(traced.graph, cover, yes)
    refused = concatenate_programs(traced.graph, cover)
    assert isinstance(refused, Refusal) and "needed behind" in refused.reason

    def exact(*arguments):
        with jax.default_matmul_precision("highest"):
            return layers(*arguments)

    traced, cover = cover_of(exact, *arguments)
    assert not inverted_residual_groups(traced.graph, cover, yes)
    traced, cover = cover_of(layers, *arguments)
    assert not inverted_residual_groups(traced.graph, cover, lambda program: False)


def test_a_chain_of_blocks_has_no_subset_twice():
    first, second = Layers((2, 9, 8, 16), (3, 3), 32, 16, residual=True), Layers((2, 9, 8, 16), (3, 3), 48, 24, (2, 2))
    arguments = [*first.arguments(), *second.arguments()[1:]]
    traced, cover = cover_of(lambda x, *more: second(first(x, *more[:6]), *more[6:]), *arguments)
    found = inverted_residual_groups(traced.graph, cover, yes)
    assert [len(f.parts) for f in found] == [3, 3] and not found[0].members & found[1].members
    assert found[0].members | found[1].members == traced.everything
    level = Computation(traced.closed, traced.graph, lambda: greedy.group(traced.graph), True)
    level.set_partition(cover)
    level.merge_into(level.subset(found[0].members, found[0].program))
    assert next(len(s.members) for s in level.subsets) == len(found[0].members) and len(level.subsets) == 4


@pytest.mark.parametrize("name", ["residual", "stride 2", "odd", "nothing to expand, stride 2"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
def test_schedules_are_legal_few_and_ranked(name, capability):
    _, program = program_of(BLOCKS[name])
    machine = gpu_candidates.GpuMachine(108, capability=capability)
    found = gpu_candidates.candidates(program, machine, 8)
    assert 2 < len(found) <= 8
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0 and scores[0] <= 1
    for candidate, _ in found:
        verify(candidate)
        shape = shape_of(candidate)
        assert shape is not None and shape.fits and shape.shared <= limits_of(capability).smem_per_block_bytes
        assert inverted_residual_schedules.cycles(shape, machine) >= inverted_residual_schedules.least(
            shape.block, machine
        )
        assert dict(candidate.params)["threads"] == shape.threads
        (use,) = kernel_time.launch_stats(candidate, [(shape.tiles, shape.threads, 128, shape.shared)])
        assert use.flop > 0 and kernel_time.unit_of(candidate) == "tf32_mma"
        bound = memory_bound(candidate)
        assert bound.bytes <= sum(b.bytes for b in (*program.inputs, *program.outputs))
        assert bound.bytes >= sum(b.bytes for b in program.outputs)


def test_banks_of_what_warps_store_and_read():
    """Stores of fragments and reads of matrices meet every bank once."""
    for along, chunk in itertools.product((True, False), (16, 32, 48, 64)):
        layers = replace(BLOCKS["residual"], along=along)
        _, program = program_of(layers)
        shape = InvertedResidualTile(block_of(program), 1, 8, 8, chunk, (2, 1), (2, 1), (1, 1))
        width = 2 if along else 4  # words that a lane stores
        lanes = range(32 // width)
        words = [lane // 4 * shape.patch_pitch + lane % 4 * width + k for lane in lanes for k in range(width)]
        assert len({word % 32 for word in words}) == 32
        assert len({(row * shape.projected_pitch + k) % 32 for row in range(8) for k in range(4)}) == 32
        assert len({(row * shape.input_pitch + k) % 32 for row in range(8) for k in range(4)}) == 32
