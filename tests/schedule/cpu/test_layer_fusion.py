"""Layer fusion: chains of layers against float64, whatever the tile; windows, halos, refusals."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.arch.detect import describe_cpu
from jcuts.base.errors import Refusal
from jcuts.kernel_ir.interpret import interpret
from jcuts.kernel_ir.program import Grid, Program
from jcuts.kernel_ir.verify import read, verify
from jcuts.lower.excess_precision import drop_bf16_round_trips
from jcuts.lower.layer_fusion import TEMPLATE, lower_layers
from jcuts.lower.patterns.layer_windows import match_layers, movable_axes, tile_number
from jcuts.schedule.cpu import candidates as cpu_candidates
from jcuts.schedule.cpu import layer_fusion_candidates
from jcuts.schedule.cpu.bound import work_of
from jcuts.schedule.cpu.kernel_time import kernel_time
from jcuts.schedule.cpu.layer_fusion import LayerTiling, local_bytes, tile_program, windows
from tests import programs
from tests.schedule.cpu.random_layers import random_layers

RNG = np.random.default_rng(7)
relu = jax.nn.relu


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def conv(x, w, stride=1, padding="SAME", groups=1, dilation=1):
    form = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * (x.ndim - 2),
        padding,
        rhs_dilation=(dilation,) * (x.ndim - 2),
        dimension_numbers=form,
        feature_group_count=groups,
    )


def max_pool(x, size=3, padding="SAME"):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, 2, 2, 1), padding)


def mlp(x, a, c, b):
    return jax.nn.gelu(x @ a + c) @ b


def bottleneck(x, a, b):
    return x + conv(relu(conv(x, a)), b)


def inverted_residual(x, a, c, b, e):
    wide = jnp.clip(conv(x, a) + c, 0, 6)
    return x + conv(jnp.clip(conv(wide, b, groups=wide.shape[-1]), 0, 6), e)


CASES = {
    "gemm, gemm": (mlp, (37, 24), (24, 48), (48,), (48, 16)),
    "batched gemms": (
        lambda x, a, b: jnp.einsum("bmh,bhn->bmn", relu(jnp.einsum("bmk,bkh->bmh", x, a)), b),
        (3, 21, 24),
        (3, 24, 48),
        (3, 48, 16),
    ),
    "3x3, 3x3": (bottleneck, (2, 11, 13, 16), (3, 3, 16, 16), (3, 3, 16, 16)),
    "3x3, 1x1": (lambda x, a, b: conv(relu(conv(x, a)), b) + 1, (2, 11, 13, 8), (3, 3, 8, 16), (1, 1, 16, 32)),
    "1x1, 3x3 stride 2": (lambda x, a, b: conv(relu(conv(x, a)), b, 2), (1, 12, 9, 8), (1, 1, 8, 16), (3, 3, 16, 16)),
    "valid, dilated": (
        lambda x, a, b: conv(relu(conv(x, a, 1, "VALID")), b, 1, "VALID", dilation=2),
        (1, 19, 13, 8),
        (3, 3, 8, 16),
        (3, 3, 16, 16),
    ),
    "7x7 stride 2, max pool": (lambda x, a: max_pool(relu(conv(x, a, 2))), (2, 23, 25, 3), (7, 7, 3, 16)),
    "max pool, 3x3": (lambda x, a: conv(max_pool(x), a), (2, 23, 25, 16), (3, 3, 16, 16)),
    "three 3x3": (
        lambda x, a, b, c: conv(relu(conv(relu(conv(x, a)), b)), c),
        (2, 15, 9, 8),
        (3, 3, 8, 8),
        (3, 3, 8, 8),
        (3, 3, 8, 8),
    ),
    "inverted residual": (inverted_residual, (2, 11, 9, 8), (1, 1, 8, 40), (40,), (3, 3, 1, 40), (1, 1, 40, 8)),
    "1d": (lambda x, a, b: conv(jax.nn.gelu(conv(x, a)), b, 2), (2, 60, 20), (3, 20, 16), (3, 16, 16)),
    "NCHW": (
        lambda x, a, b: lax.conv_general_dilated(
            relu(lax.conv_general_dilated(x, a, (1, 1), "SAME")), b, (1, 1), "SAME"
        ),
        (2, 8, 11, 13),
        (16, 8, 3, 3),
        (8, 16, 3, 3),
    ),
}


def traced(name: str, dtype: type = np.float32) -> tuple[programs.Traced, Program, np.ndarray]:
    """The function's trace, its unscheduled program and its result in float64."""
    fn, *shapes = CASES[name]
    arguments = [normal(*shape).astype(dtype) for shape in shapes]
    found = programs.trace(fn, *arguments)
    program = lower_layers(found.graph, found.everything)
    assert isinstance(program, Program), program
    with jax.enable_x64(True):
        exact = jax.jit(fn)(*[jnp.asarray(np.asarray(a, np.float64)) for a in arguments])
    return found, program, np.asarray(exact)


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(got, np.float64) - exact).max() / np.sqrt(np.mean(np.square(exact))))


@pytest.mark.parametrize("name", CASES)
def test_the_candidates_are_right(name):
    """Interpreted, and as machine code; every address proven."""
    found, program, exact = traced(name)
    ranked = layer_fusion_candidates.schedules(program, programs.MACHINE, 16)
    assert ranked, name
    for scheduled, score in ranked:
        assert 0 < score <= 1
        assert read(scheduled.to_text()) == scheduled  # as a worker process receives it
        verify(scheduled, all_addresses=True)
        assert local_bytes(scheduled) <= programs.MACHINE.l2
        assert error(interpret(scheduled, found.operands())[0], exact) < 4e-6
        assert error(programs.run_compiled(scheduled, found.operands())[0], exact) < 4e-6


@pytest.mark.parametrize("name", CASES)
def test_any_tile_is_right(name):
    """Tiles that divide nothing, one and several tiles per task; local buffers start as NaN."""
    found, program, exact = traced(name)
    links = match_layers(program)
    assert not isinstance(links, Refusal)
    axes = movable_axes(program, links)
    extents = program.phases[-1].ranges()
    tried = 0
    for depth, cut in enumerate(axes):
        for size in (1, 2, 3, 4, 5, 7, extents[cut]):
            tiling = LayerTiling((*((a, 1) for a in axes[:depth]), (cut, min(size, extents[cut]))))
            layers = windows(program, links, tiling)
            if isinstance(layers, Refusal):
                assert size < 5 or "overlap" in layers.reason  # a tile smaller than its halo, or a halo in two axes
                continue
            tiled = tile_program(program, links, layers, tiling)
            for block in (1, 2, extents[cut]):
                number = tile_number(cut)
                grid = tuple(Grid(g.axis, g.extent, block if g.axis == number else g.block) for g in tiled.grid)
                tasks = replace(tiled, grid=grid)
                verify(tasks, all_addresses=True)
                assert error(interpret(tasks, found.operands())[0], exact) < 4e-6, (tiling, block)
                tried += 1
    assert tried > 3


def test_bfloat16_is_rounded_between_layers():
    """An intermediate result is what a kernel of its own would have stored."""
    import ml_dtypes

    found, program, exact = traced("3x3, 1x1", ml_dtypes.bfloat16)
    assert {b.dtype for b in program.locals} == {"bfloat16"}
    for scheduled, _ in layer_fusion_candidates.schedules(program, programs.MACHINE, 4):
        assert error(programs.run_compiled(scheduled, found.operands())[0], exact) < 3e-2


def test_a_halo_is_computed_once_per_task():
    """Sliding windows: a task makes the rows of a window once, and moves what the next tile needs."""
    _, program, _ = traced("3x3, 3x3")
    links = match_layers(program)
    assert not isinstance(links, Refusal)
    tiling = LayerTiling((("d0", 1), ("d1", 3)))
    layers = windows(program, links, tiling)
    assert not isinstance(layers, Refusal) and layers[0].result is not None
    assert layers[0].result.size[1] == 5 and layers[0].result.step[1] == 3 and layers[0].result.overlap[1] == 2
    tiled = tile_program(program, links, layers, tiling)
    names = [p.name for p in tiled.phases]
    assert names == ["conv_general_dilated.halo", "conv_general_dilated", "conv_general_dilated", "mid0.shift"]
    assert tiled.phases[0].once == ("d1s",)
    assert [dict(p.ranges()).get("d1u") for p in tiled.phases] == [2, 3, 3, None]


def test_a_machine_with_a_smaller_cache_gets_smaller_tiles():
    _, program, _ = traced("gemm, gemm")
    large = layer_fusion_candidates.schedules(program, programs.MACHINE, 16)
    small = layer_fusion_candidates.schedules(program, replace(programs.MACHINE, l2=2 << 10), 16)
    assert max(local_bytes(p) for p, _ in small) <= 2 << 10 < max(local_bytes(p) for p, _ in large)


@pytest.mark.parametrize(
    "fn, shapes, reason",
    [
        (lambda x, a, b: (x @ a, relu(x @ a) @ b), [(8, 8), (8, 8), (8, 8)], "layers"),
        (lambda x, a, b: (y := relu(x @ a), y @ b), [(8, 8), (8, 8), (8, 8)], "needed elsewhere"),
        (lambda x, a, b: (x @ a) @ b + jnp.sum(x), [(8, 8), (8, 8), (8, 8)], "no chain"),
        (lambda x, a: max_pool(max_pool(x)) * a, [(1, 16, 16, 8), (8,)], "no chain"),
        (lambda x, a: x @ a, [(8, 8), (8, 8)], "1 layers"),
        (lambda x, a: (((x @ a) @ a) @ a) @ a, [(8, 8), (8, 8)], "4 layers"),
        (lambda x, a, b: (x @ a) + (x @ b), [(8, 8), (8, 8), (8, 8)], "follow each other"),
        (lambda x, a: jnp.flip(x @ a, 0) @ a, [(8, 8), (8, 8)], "loop of its layer"),
    ],
)
def test_refusals(fn, shapes, reason):
    found = programs.trace(fn, *(normal(*s) for s in shapes))
    program = lower_layers(found.graph, found.everything)
    assert isinstance(program, Refusal) and reason in str(program), program


def test_a_result_that_every_tile_needs_has_no_tiling():
    """The second product contracts both dimensions of the first one's result."""
    found = programs.trace(
        lambda x, a, b: jnp.einsum("mh,mhn->n", relu(x @ a), b), normal(9, 8), normal(8, 16), normal(9, 16, 8)
    )
    program = lower_layers(found.graph, found.everything)
    assert isinstance(program, Refusal) and "needs all of" in str(program)


def test_windows_beyond_the_cache_still_have_a_schedule():
    found, program, exact = traced("3x3, 3x3")
    ranked = layer_fusion_candidates.schedules(program, replace(programs.MACHINE, l2=64), 4)
    assert ranked and error(interpret(ranked[0][0], found.operands())[0], exact) < 4e-6


def test_templates_are_dispatched():
    _, program, _ = traced("gemm, gemm")
    assert program.template == TEMPLATE
    ranked = cpu_candidates.candidates(program, programs.MACHINE, 2)
    assert ranked and all(p.template == TEMPLATE for p, _ in ranked)


@pytest.mark.parametrize("first", [0, 10, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 40, 50))])
def test_random_layers(first):
    """Random chains with their best candidate and with a random tile, against float64."""
    tried = 0
    for seed in range(first, first + 10):
        fn, arguments = random_layers(seed)
        try:
            jax.eval_shape(fn, *arguments)
        except (TypeError, ValueError):
            continue  # a window larger than what is left of the image
        tried += check_layers(fn, arguments, seed)
    assert tried


def check_layers(fn, arguments, seed: int) -> bool:
    """Whether the function is a chain of layers; then its kernels are right."""
    found = programs.trace(fn, *arguments)
    program = lower_layers(found.graph, found.everything)
    if isinstance(program, Refusal):
        return False
    with jax.enable_x64(True):
        exact = np.asarray(jax.jit(fn)(*[jnp.asarray(a, np.float64) for a in arguments]))
    if not np.isfinite(exact).all():  # a window that lies in the padding alone
        return False
    links = match_layers(program)
    assert not isinstance(links, Refusal)
    ranked = layer_fusion_candidates.schedules(program, programs.MACHINE, 16)
    assert ranked
    programs_to_try = [ranked[0][0]]
    axes, rng = movable_axes(program, links), np.random.default_rng(seed)
    for _ in range(3):
        depth = int(rng.integers(len(axes)))
        extents = program.phases[-1].ranges()
        tiling = LayerTiling(
            (*((a, 1) for a in axes[:depth]), (axes[depth], int(rng.integers(1, extents[axes[depth]] + 1))))
        )
        layers = windows(program, links, tiling)
        if not isinstance(layers, Refusal):
            programs_to_try.append(tile_program(program, links, layers, tiling))
    for scheduled in programs_to_try:
        verify(scheduled)
        assert error(interpret(scheduled, found.operands())[0], exact) < 1e-5, (seed, scheduled.params)
    assert error(programs.run_compiled(ranked[-1][0], found.operands())[0], exact) < 1e-5, seed
    return True


def test_the_bound_counts_every_layer_once():
    """Halos and what tiles compute beyond the layers are no compulsory work."""
    found, program, _ = traced("three 3x3")
    arch = describe_cpu()
    alone = [found.build([k]) for k in range(len(found.graph.nodes)) if found.graph.nodes[k].prim.startswith("conv")]
    flop = sum(work_of(p, arch).flop["float32"] for p in alone if isinstance(p, Program))
    ranked = layer_fusion_candidates.schedules(program, programs.MACHINE, 16)
    assert len(alone) == 3 and ranked
    for scheduled, _ in ranked:
        assert work_of(scheduled, arch).flop == {"float32": flop}
        time = kernel_time(scheduled, arch)
        assert 0 < time.bound(arch) <= time.seconds


def test_what_follows_a_sum_of_bfloat16_is_rounded_once():
    """Of a chain of layers as of one layer: excess precision inside an epilogue, none between layers."""
    half = jnp.bfloat16

    def layers(x, a, c, b, e):
        hidden = relu((x @ a).astype(jnp.float32) * (1 + c * c) + c).astype(half)
        return (hidden @ b).astype(jnp.float32) + e

    shapes = (48, 32), (32, 64), (64,), (64, 32), (32,)
    arguments = [normal(*s).astype(half) if len(s) == 2 else normal(*s) for s in shapes]
    found = programs.trace(layers, *arguments)
    program = lower_layers(found.graph, found.everything)
    assert isinstance(program, Program) and drop_bf16_round_trips(program) is not program
    wide = [np.asarray(a, np.float64) for a in arguments]
    hidden = np.maximum(wide[0] @ wide[1] * (1 + wide[2] ** 2) + wide[2], 0).astype(half).astype(np.float64)
    exact = hidden @ wide[3] + wide[4]
    for scheduled, _ in cpu_candidates.candidates(program, programs.MACHINE, 4):
        assert scheduled.template == TEMPLATE
        assert error(programs.run_compiled(scheduled, found.operands())[0], exact) < 2e-2
