"""Threads that walk: what they compute on the PTX machine, what they read, and which walks are refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jcuts.base.errors import CompileRejected
from jcuts.codegen.cuda import compile as compiler
from jcuts.codegen.cuda.toolchain.image import Image
from jcuts.codegen.cuda.toolchain.target import CudaTarget
from jcuts.kernel_ir.loop_transforms import collapse_program
from jcuts.schedule.gpu import candidates as gpu_candidates
from jcuts.schedule.gpu.machine import scheduled, tiled, unrolled
from jcuts.schedule.gpu.window.filter_gradient import innermost
from tests import programs
from tests.gpu import cases
from tests.ops.cases import conv
from tests.ptx import machine as ptx_machine

SM80, SM90 = CudaTarget((8, 0)), CudaTarget((9, 0))
compiled = pytest.mark.cuda_compilers


def values(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def depthwise(stride):
    def function(x, w, b):
        y = conv(x, w, strides=(stride, stride), padding="SAME", groups=x.shape[-1])
        return jnp.clip(y + b, 0, 6).astype(x.dtype)

    return function


def average(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9


def average_gradient(g):
    return jax.linear_transpose(average, g)(g)[0]


WINDOWS = {
    "depthwise": (depthwise(1), ((2, 10, 6, 8), (3, 3, 1, 8), (8,)), {"d1": 2, "d2": 3, "d3": 4}, 2),
    "whole columns": (depthwise(1), ((1, 9, 5, 12), (3, 3, 1, 12), (12,)), {"d1": 1, "d2": 1, "d3": 2}, 9),
    "stride": (depthwise(2), ((2, 14, 12, 8), (3, 3, 1, 8), (8,)), {"d1": 1, "d2": 3, "d3": 4}, 3),
    "odd": (depthwise(1), ((1, 7, 5, 3), (3, 3, 1, 3), (3,)), {"d1": 1, "d2": 5, "d3": 1}, 4),
    "average": (average, ((2, 10, 5, 8),), {"d1": 2, "d2": 5, "d3": 2}, 2),
    "average gradient": (average_gradient, ((2, 10, 5, 8),), {"d1": 2, "d2": 1, "d3": 2}, 3),
    "maximum gradient": (
        cases._pool_gradient(lax.max, -np.inf, 3, 2, "SAME"),
        ((2, 12, 12, 8), (2, 6, 6, 8)),
        {"d1": 2, "d2": 4, "d3": 2},
        4,
    ),
}


def walking(name, *, tiles=None, ahead=0, dtype="float32", threads=64, more=()):
    """The scheduled program of a window, its operands, and XLA's results."""
    fn, shapes, unroll, count = WINDOWS[name]
    arguments = [values(*s, dtype=dtype, seed=k) for k, s in enumerate(shapes)]
    traced = programs.trace(fn, *arguments)
    program = collapse_program(traced.program())
    phase = program.phases[0]
    phase = replace(phase, reds=tuple(replace(r, unroll=r.extent) for r in phase.reds))
    made = unrolled(replace(program, phases=(phase,)), unroll)
    params = (("walk", ("d1", tiles or count)), ("ahead", ahead), *more)
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*arguments))]
    return scheduled(made, "point", threads, *params), traced.operands(), wanted


def check(program, operands, wanted):
    kernel = compiler.compile_program(program, SM90)
    for got, want in zip(ptx_machine.run_kernel(compiler.ptx_of(program, SM90), kernel, operands), wanted, strict=True):
        eps = float(jnp.finfo(want.dtype).eps)
        scale = float(np.sqrt(np.mean(np.square(want.astype(np.float64)))))
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=8 * eps, atol=16 * eps * max(1.0, scale)
        )


@compiled
@pytest.mark.parametrize(("dtype", "ahead"), [("float32", 0), ("bfloat16", 1), ("float32", 2)])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_walk_computes_what_xla_does(name, dtype, ahead):
    check(*walking(name, dtype=dtype, ahead=ahead))


@compiled
def test_blocks_of_whole_rows_walk():
    check(*walking("depthwise", threads=4, more=(("block", (("d2", 2), ("d3", 2))),)))


@compiled
def test_every_row_is_read_once():
    """Two rows of five points before the loop, and in it only the two that are new."""
    program, _, _ = walking("average")
    assert compiler.ptx_of(program, SM90).count("ld.global") == 2 * 5 + 2 * 5


@compiled
def test_places_of_maxima_are_carried():
    """A row of windows per tile of two rows: in the loop 3 windows of 2 channels and 8 comparisons, as many before."""
    program, _, _ = walking("maximum gradient")
    assert compiler.ptx_of(program, SM90).count("setp.ge.f32") == 2 * 3 * 2 * 8


def gradient(stride, image, output, terms, walk, *, ahead=0, split=1, dtype="float32", flight=1):
    """The scheduled program of a depthwise filter's gradient, its operands, and XLA's result."""

    def function(x, g):
        def forward(w):
            return conv(x, w, strides=(stride, stride), padding="SAME", groups=x.shape[-1])

        return jax.linear_transpose(forward, jax.ShapeDtypeStruct((3, 3, 1, x.shape[-1]), x.dtype))(g)[0]

    arguments = [values(*s, dtype=dtype, seed=k) for k, s in enumerate((image, output))]
    traced = programs.trace(function, *arguments)
    program = collapse_program(traced.program())
    phase = program.phases[0]
    phase = replace(phase, reds=tuple(sorted(phase.reds, key=lambda r: innermost(phase, r.name))))
    taps = {a.name: a.extent for a in phase.axes[:-1]}
    made = tiled(replace(program, phases=(phase,)), {**taps, phase.axes[-1].name: 2}, terms)
    params = [("across", 4), ("flight", flight), ("walk", walk), ("ahead", ahead)]
    made = scheduled(made, "columns", 64, *params, *([("split", split)] if split > 1 else []))
    return made, traced.operands(), [np.asarray(jax.jit(function)(*arguments))]


@compiled
@pytest.mark.parametrize(("split", "ahead"), [(1, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize(
    ("stride", "image", "output", "terms", "rows"),
    [
        (1, (4, 8, 12, 8), (4, 8, 12, 8), {"t0": 8, "t1": 3}, 2),
        (1, (3, 9, 5, 8), (3, 9, 5, 8), {"t0": 9, "t1": 5}, 3),
        (1, (4, 8, 12, 8), (4, 8, 12, 8), {"t0": 4, "t1": 2}, 4),
        (2, (4, 12, 12, 8), (4, 6, 6, 8), {"t0": 6, "t1": 3}, 1),
    ],
)
def test_a_filter_gradient_walks_down_the_rows(stride, image, output, terms, rows, split, ahead):
    check(*gradient(stride, image, output, terms, ("t0", rows), split=split, ahead=ahead))


@compiled
def test_a_filter_gradient_of_16_bit_floats_walks():
    check(*gradient(1, (4, 8, 12, 8), (4, 8, 12, 8), {"t0": 8, "t1": 3}, ("t0", 2), split=2, dtype="bfloat16"))


@compiled
def test_walks_that_fit_nothing_are_refused():
    program, _, _ = walking("depthwise")
    for walk in (("d1", 0), ("d9", 2)):
        params = tuple((k, walk if k == "walk" else v) for k, v in program.params)
        with pytest.raises(CompileRejected, match="no walk"):
            compiler.compile_program(replace(program, params=params), SM90)
    with pytest.raises(CompileRejected, match="do not divide"):
        compiler.compile_program(gradient(1, (4, 8, 12, 8), (4, 8, 12, 8), {"t0": 8, "t1": 3}, ("t0", 3))[0], SM90)
    with pytest.raises(CompileRejected, match="each with a walk"):
        compiler.compile_program(
            gradient(1, (4, 8, 12, 8), (4, 8, 12, 8), {"t0": 4, "t1": 3}, ("t0", 2), flight=2)[0], SM90
        )


@compiled
@pytest.mark.parametrize("target", [SM80, SM90], ids=lambda t: t.arch)
def test_proposed_walks_assemble_without_local_memory(target):
    shapes = ((8, 28, 28, 64), (3, 3, 1, 64), (64,))
    program = programs.trace(depthwise(1), *(np.zeros(s, np.float32) for s in shapes)).program()
    machine = gpu_candidates.GpuMachine(132, capability=target.capability)
    walks = [p for p, _ in gpu_candidates.candidates(program, machine, 1 << 20) if "walk" in dict(p.params)]
    assert walks
    image = Image.unpack(compiler.compile_program(walks[0], target).object_code)
    assert all(launch.resources.stack == 0 for launch in image.launches)


@compiled
@pytest.mark.parametrize("form", ["columns", "moments"])
def test_blocks_of_144_columns_have_no_idle_threads(form):
    fn = cases.batch_statistics if form == "moments" else lambda x: x.sum(0)
    x = values(5003, 144)
    traced = programs.trace(fn, x)
    found = [
        p
        for p, _ in gpu_candidates.candidates(traced.program(), gpu_candidates.GpuMachine(4), 1 << 20)
        if dict(p.params)["cuda"] == form and dict(p.params)["across"] in (12, 36)
    ]
    assert found and all(dict(p.params)["threads"] % dict(p.params)["across"] == 0 for p in found)
    assert all(dict(p.params)["threads"] % 32 == 0 for p in found)
    check(found[0], traced.operands(), [np.asarray(y) for y in jax.tree.leaves(jax.jit(fn)(x))])


@compiled
def test_one_pass_means_keep_infinities():
    """Welford's update makes NaN of an infinite mean at the next point; the column's sum is what XLA's mean has."""

    def centred(x):
        mean = x.mean(0, keepdims=True)
        return x - mean, mean[0], jnp.square(x - mean).mean(0)

    x = values(5003, 24)
    special = ([np.inf], [-np.inf, -np.inf], [np.inf, -np.inf], [np.nan], [np.inf, np.nan])
    for column, found in enumerate(special):
        for place, value in enumerate(found):
            x[17 + 2500 * place, column] = value
    x[0, 6], x[5002, 7] = np.inf, -np.inf
    traced = programs.trace(centred, x)
    machine = gpu_candidates.GpuMachine(4)
    found = [p for p, _ in gpu_candidates.candidates(traced.program(), machine, 1 << 20)]
    found = [p for p in found if dict(p.params)["cuda"] == "moments"]
    assert found
    check(found[0], traced.operands(), [np.asarray(y) for y in jax.jit(centred)(x)])
